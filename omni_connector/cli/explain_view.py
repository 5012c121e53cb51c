# SPDX-License-Identifier: Apache-2.0
"""The table of `omni-connector explain`."""

from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from omni_connector.cli.explained import Answer, Explanation
from omni_connector.net.status import label, last_part
from omni_connector.prefix.explain import Miss, Place

_RUNS: Final = 12
"""Most runs of blocks that are shown for one group; a table with more cannot be read."""

_PLACES: Final = {
    Place.OWN: ("own KV cache", "green"),
    Place.ARENA: ("own arena", "cyan"),
    Place.HOST: ("arena of", "cyan"),
    Place.STORE: ("store", "blue"),
    Place.MISSING: ("missing", "red"),
    Place.UNKNOWN: ("not known yet", "dim"),
}
_CAUSES: Final = {
    "never_seen": "never seen by this engine",
    "evicted": "evicted from its arena, or passed over",
    "other_salt": "last seen with another cache salt, LoRA adapter or image",
    "too_late": "the store did not answer in time",
}


def show(answer: Answer) -> None:
    """Print the table and the remarks."""
    Console().print(screen(answer))


def screen(answer: Answer) -> RenderableType:
    """Return a table with one row for each engine, and the remarks below it."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("engine\nmodel", overflow="fold")
    table.add_column("tokens: where their KV is", overflow="fold")
    table.add_column("a request would load", justify="right")
    table.add_column("and compute", justify="right")
    table.add_column("first miss", overflow="fold")
    for each in answer.engines:
        table.add_row(
            Text.assemble(label(each.engine_id), "\n", (last_part(each.model), "dim")),
            _where(each),
            _loads(each),
            Text("?" if each.computed is None else f"{each.computed} of {each.tokens}"),
            Text("-", "dim") if each.missing is None else _why(each.missing),
        )
    notes = [
        Text(f"{label(each.engine_id)}: {note}") for each in answer.engines for note in _notes(each)
    ]
    told: tuple[RenderableType, ...] = (table, *notes) if answer.engines else ()
    return Group(*told, *(Text(remark, "yellow") for remark in answer.remarks))


def _loads(explanation: Explanation) -> Text:
    lines = [
        Text(f"{count} {_PLACES[source][0] if source != Place.HOST else 'other arenas'}")
        for source, count in explanation.sources.items()
        if count
    ]
    if explanation.computed is None:
        lines.append(Text(_PLACES[Place.UNKNOWN][0], "dim"))
    return Text("\n").join(lines) or Text("nothing", "dim")


def _where(explanation: Explanation) -> Text:
    lines: list[Text] = []
    for group in explanation.groups:
        if len(explanation.groups) > 1:
            lines.append(Text(f"{group['kind']}:", "dim"))
        runs = group["runs"]
        for run in runs[:_RUNS]:
            place, style = _PLACES[run["source"]]
            lines.append(
                Text.assemble(
                    f"{run['first_token']}-{run['end_token'] - 1} ",
                    (f"{place} {label(run['engine'])}".rstrip(), style),
                )
            )
        if len(runs) > _RUNS:
            lines.append(Text(f"and {len(runs) - _RUNS} more (--json has all)", "dim"))
        if not runs:
            lines.append(Text(f"no full block of {group['block_size']} tokens", "dim"))
    if (tail := explanation.tail) is not None:
        place, style = _PLACES[tail.source]
        lines.append(
            Text.assemble(
                f"{tail.first_token}-{tail.end_token - 1} ",
                (f"{place} {label(tail.engine)}".rstrip(), style),
                ", where another has ended",
            )
        )
    return Text("\n").join(lines)


def _why(miss: Miss) -> Text:
    text = f"token {miss.first_token}: {_CAUSES.get(miss.cause, miss.cause)}"
    if miss.evicted_from:
        text += f"; evicted from the arena of {', '.join(map(label, miss.evicted_from))}"
    return Text(text)


def _notes(explanation: Explanation) -> list[str]:
    notes = list(explanation.remarks)
    if explanation.requests:
        phases = (f"{count} in the phase {phase}" for phase, count in explanation.requests.items())
        notes.append(f"has requests with this prompt: {', '.join(phases)}")
    if explanation.shares_with:
        notes.append(f"shares with {', '.join(map(label, explanation.shares_with))}")
    return notes + [
        f"does not share with {label(name)}: {why}" for name, why in explanation.apart.items()
    ]
