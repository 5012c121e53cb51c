# SPDX-License-Identifier: Apache-2.0
"""The tables of `omni-connector top`."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omni_connector.cli.namespaces import nobody
from omni_connector.cli.readings import History, Rates, Reading, hit_rates
from omni_connector.net.status import EngineStatus, Usage, label, last_part

_BAR: Final = 12
"""Width of the bar of slots, in characters."""

_OTHER_COLUMNS: Final = 75
"""Width of all columns but that of the names, in characters."""

_LINES: Final = 16
"""Most remarks, and most rows of each table below the engines, so that a terminal shows them."""

_STATES: Final = {
    "live": "green",
    "draining": "yellow",
    "drained": "yellow",
    "silent": "bold red",
}


def show(look: Callable[[], Reading], history: History, once: bool, interval: float) -> None:
    """Print the tables; on a terminal print them anew each `interval` seconds, unless `once`."""
    console = Console()
    if once or not console.is_terminal:
        console.print(screen(look(), history, console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen(look(), history, console.width), refresh=True)
            time.sleep(interval)


def screen(reading: Reading, history: History, width: int) -> RenderableType:
    """Return all tables and remarks, for a terminal that is `width` columns wide."""
    at = time.strftime("%H:%M:%S", time.localtime(reading.time))
    parts: list[RenderableType] = [
        Text(f"omni-connector top, namespace {reading.namespace!r}, {at}", "bold")
    ]
    if reading.engines:
        parts += [
            _engines(reading, history, width),
            _whereabouts(reading),
            Columns([_failures(reading), _times(reading)], padding=(0, 4)),
        ]
    else:
        parts.append(Text(nobody(reading.namespace, "engine", "OmniKVConnector")))
    parts += [Text(remark, "yellow") for remark in reading.remarks[:_LINES]]
    return Group(*parts)


def bar(usage: Usage) -> Text:
    """Return the slots of an arena as a bar: held `#`, cached `=`, free `.`."""
    total = usage.slots_total
    if not total:
        return Text("no arena", "dim")
    # Round up: a state with one slot gets a character too.
    held = min(_BAR, -(-_BAR * usage.slots_in_use // total))
    cached = min(_BAR - held, -(-_BAR * usage.slots_cached // total))
    return Text.assemble(
        ("#" * held, "red"),
        ("=" * cached, "cyan"),
        ("." * (_BAR - held - cached), "dim"),
        f"\n{usage.slots_in_use}+{usage.slots_cached}/{total}",
    )


def _table(*names: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _engines(reading: Reading, history: History, width: int) -> Table:
    table = _table(
        *("engine\nmodel", "role\nstate", "slots #held\n=cached", "leases"),
        *(
            "hits %: own/\narena/host/\npeer/store",
            "in\nMB/s",
            "out\nMB/s",
            "hand-offs\n/s",
            "failures\n/s",
        ),
    )
    for column in table.columns[1:3]:
        column.justify = "left"

    def cell(text: str, style: str = "") -> Text:
        cut = Text(text, style)
        cut.truncate(max(8, width - _OTHER_COLUMNS), overflow="ellipsis")
        return cut

    for engine in reading.engines:
        state = reading.state(engine)
        phase = engine.service.phase
        if state == "live" and phase != "serving":
            state = phase
        role = engine.service.role or engine.role.removeprefix("kv_")
        ranks = f"{engine.ranks} x " if engine.ranks > 1 else ""
        table.add_row(
            Text("\n").join(
                [cell(label(engine.engine_id)), cell(ranks + last_part(engine.model), "dim")]
            ),
            Text.assemble(role[:8], "\n", (state, _STATES[state])),
            bar(engine.usage),
            *_numbers(engine, history.rates(engine, reading.time), hit_rates([engine])),
        )
    if len(reading.engines) > 1:
        total = reading.total()
        table.add_section()
        table.add_row(
            cell(f"{len(reading.engines)} engines", "bold"),
            Text(),
            bar(total.usage),
            *_numbers(total, history.total(reading), hit_rates(reading.engines)),
        )
    return table


def _whereabouts(reading: Reading) -> Table:
    """Which process each engine is, and its model, for which the first table has no room."""
    table = _table("engine", "role", "host", "pid", "model")
    for column in table.columns[1:]:
        column.justify = "left"
    table.padding = (0, 2, 0, 0)
    table.columns[-1].overflow = "fold"
    table.columns[-1].no_wrap = False
    for engine in reading.engines:
        table.add_row(
            *map(Text, (label(engine.engine_id), engine.role, engine.host, str(engine.pid))),
            Text(last_part(engine.model), "dim"),
        )
    return table


def _numbers(
    engine: EngineStatus, rates: Rates | None, hits: dict[str, float | None]
) -> list[Text]:
    def rate(*names: str, unit: float = 1.0) -> Text:
        if rates is None:
            return Text("-", "dim")
        return Text(f"{sum(rates.get(name, 0.0) for name in names) / unit:.1f}")

    percent = [
        "-" if part is None else f"{100 * part:.0f}"
        for name, part in hits.items()
        if name != "other"
    ]
    return [
        Text(str(engine.usage.leases)),
        Text("/".join(percent) + " %"),
        rate("bytes_loaded", unit=1e6),
        rate("bytes_saved", unit=1e6),
        rate("handoffs_offered", "handoffs_received"),
        rate("failures"),
    ]


def _failures(reading: Reading) -> Table:
    table = _table("failures since the start", "number")
    failures = Counter(reading.total().failures)
    for kind, number in failures.most_common(_LINES):
        table.add_row(Text(kind), Text(str(number)))
    if not failures:
        table.add_row(Text("none", "dim"), Text("0", "dim"))
    return table


def _times(reading: Reading) -> Table:
    table = _table("transfers since the start", "number", "mean ms")
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
    for name in ("handoffs_offered", "handoffs_received", "handoffs_expired"):
        table.add_row(
            Text(name.replace("handoffs_", "hand-offs ")), Text(str(counts.get(name, 0))), Text("")
        )
    return table
