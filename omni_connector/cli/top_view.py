# SPDX-License-Identifier: Apache-2.0
"""The tables of `omni-connector top`."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omni_connector.cli.top import History, Rates, Reading, hit_rates, nobody
from omni_connector.net.status import EngineStatus, Usage

_BAR: Final = 16
_LINES: Final = 16
_STATES: Final = {"live": "green", "silent": "bold red"}


def show(look: Callable[[], Reading], history: History, once: bool, interval: float) -> None:
    """Print the tables, again and again where there is a terminal and not `once`."""
    console = Console()
    if once or not console.is_terminal:
        console.print(screen(look(), history))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(look(), history), refresh=True)
            time.sleep(interval)


def screen(reading: Reading, history: History) -> RenderableType:
    """Everything that is seen at one moment."""
    at = time.strftime("%H:%M:%S", time.localtime(reading.time))
    parts: list[RenderableType] = [
        Text(f"omni-connector top, namespace {reading.namespace!r}, {at}", "bold")
    ]
    if reading.engines:
        parts += [_engines(reading, history), Columns([_failures(reading), _times(reading)])]
    else:
        parts.append(Text(nobody(reading)))
    parts += [Text(remark, "yellow") for remark in reading.remarks[:_LINES]]
    return Group(*parts)


def bar(usage: Usage, width: int = _BAR) -> Text:
    """The slots of an arena: held as `#`, cached as `=`, free as `.`."""
    total = usage.slots_total
    if not total:
        return Text("no arena", "dim")
    # What there is of a state is seen, however little it is.
    held = min(width, -(-width * usage.slots_in_use // total))
    cached = min(width - held, -(-width * usage.slots_cached // total))
    return Text.assemble(
        ("#" * held, "red"),
        ("=" * cached, "cyan"),
        ("." * (width - held - cached), "dim"),
        f" {usage.slots_in_use}+{usage.slots_cached}/{total}",
    )


def _engines(reading: Reading, history: History) -> Table:
    table = Table(expand=True, show_footer=len(reading.engines) > 1)
    total = reading.total()
    footer = [
        *(Text(f"{len(reading.engines)} engines"), Text(), Text(), bar(total.usage)),
        *_numbers(total, history.total(reading), hit_rates(reading.engines)),
    ]
    names = (
        *("engine", "role", "state", "slots (# held, = cached)", "leases", "hits own/peer/store"),
        *("in MB/s", "out MB/s", "hand-offs/s", "failures/s"),
    )
    for number, (name, under) in enumerate(zip(names, footer, strict=True)):
        crops = number < 3
        table.add_column(
            name,
            footer=under,
            justify="left" if number < 4 else "right",
            no_wrap=crops,
            overflow="ellipsis" if crops else "fold",
        )
    for engine in reading.engines:
        state = reading.state(engine)
        ranks = f" x{engine.ranks}" if engine.ranks > 1 else ""
        table.add_row(
            Text.assemble(engine.engine_id, (f"\n{engine.model}{ranks}", "dim")),
            Text(engine.role.removeprefix("kv_")),
            Text(state, _STATES[state]),
            bar(engine.usage),
            *_numbers(engine, history.rates(engine, reading.time), hit_rates([engine])),
        )
    return table


def _numbers(
    engine: EngineStatus, rates: Rates | None, hits: dict[str, float | None]
) -> list[Text]:
    def rate(*names: str, unit: float = 1.0) -> Text:
        if rates is None:
            return Text("-", "dim")
        return Text(f"{sum(rates.get(name, 0.0) for name in names) / unit:.1f}")

    return [
        Text(str(engine.usage.leases)),
        Text(" / ".join("-" if part is None else f"{part:.0%}" for part in hits.values())),
        rate("bytes_loaded", unit=1e6),
        rate("bytes_saved", unit=1e6),
        rate("handoffs_offered", "handoffs_received"),
        rate("failures"),
    ]


def _failures(reading: Reading) -> Table:
    table = Table("kind", title="failures since the start", title_justify="left")
    table.add_column("number", justify="right")
    failures = Counter(reading.total().failures)
    for kind, number in failures.most_common(_LINES):
        table.add_row(Text(kind), Text(str(number)))
    if not failures:
        table.add_row(Text("none", "dim"), Text("0", "dim"))
    return table


def _times(reading: Reading) -> Table:
    table = Table("what", title="transfers since the start", title_justify="left")
    table.add_column("number", justify="right")
    table.add_column("mean ms", justify="right")
    numbers: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for engine in reading.engines:
        for name, known in engine.seconds.items():
            numbers[name] += known.count
            seconds[name] = seconds.get(name, 0.0) + known.sum
    for name, number in numbers.most_common(_LINES):
        mean = 1e3 * seconds[name] / number if number else 0.0
        table.add_row(Text(name), Text(str(number)), Text(f"{mean:.2f}"))
    counts = reading.total().counts
    for name in ("handoffs_offered", "handoffs_received", "handoffs_expired", "blocks_stored"):
        table.add_row(Text(name.replace("_", " ")), Text(str(counts.get(name, 0))), Text(""))
    return table
