# SPDX-License-Identifier: Apache-2.0
"""What configurations served, as bars beside each other: panels of several benchmarks' plots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

PANELS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """What one configuration did.

    Attributes:
        requests_per_s: requests a second.
        next_token_ms: milliseconds between two tokens, 99th percentile.
        sources: of the tokens of all prompts, in percent, by where their KV came from.
        memory: bytes of the machine's memory.
    """

    requests_per_s: float
    next_token_ms: float
    sources: Mapping[str, float]
    memory: float


def draw(panels: Sequence[Axes], by_name: Mapping[str, Bar]) -> None:
    """Draw into `PANELS` panels; the configurations stand in the same order in all of them."""
    speeds, gaps, sources, memory = panels
    names, bars = list(by_name), list(by_name.values())
    colours = [f"C{number}" for number in range(len(names))]
    speeds.barh(names, [each.requests_per_s for each in bars], color=colours)
    speeds.set(xlabel="requests/s")
    gaps.barh(names, [each.next_token_ms for each in bars], color=colours)
    gaps.set(xlabel="ms to the next token, 99 %")
    memory.barh(names, [each.memory / 2**30 for each in bars], color=colours)
    memory.set(xlabel="memory (GiB)")
    left = [0.0] * len(names)
    for number, source in enumerate(bars[0].sources):
        widths = [each.sources[source] for each in bars]
        grey = 0.35 + 0.25 * number
        sources.barh(names, widths, left=left, color=str(min(grey, 0.9)), label=source)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    sources.set(xlabel="prompt tokens, by source (%)")
    sources.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    for axes in panels:
        axes.invert_yaxis()
        axes.grid(alpha=0.3, axis="x")
        if axes is not speeds:
            axes.set_yticklabels([])
