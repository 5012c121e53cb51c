# SPDX-License-Identifier: Apache-2.0
"""Which blocks are saved to an arena, and what they give: admission policies on made traces.

Block hashes only, no engine: the real slot pool with its order of eviction and its admission, as an
engine that shares prefixes uses them (*learnt*). A prompt finds its blocks up to the first that is
missing, and then saves those of its new blocks that the policy admits. Beside it stand:

- all: every new block is saved;
- another threshold;
- one depth: all prompts are of one depth, so that it learns one ratio for all;
- LRU: every new block is saved, and the least recently used one goes;
- Belady: it knows the future. It saves only blocks that are used before they would go.

    python benchmarks/admission.py [--quick]

writes results/admission.md and results/admission.png beside this file.
"""

import argparse
import bisect
import heapq
import platform
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from traces import Trace, agents, block_key, conversations, documents, mixed

from omni_connector.arena import eviction
from omni_connector.arena.eviction import depth_of
from omni_connector.arena.slot_pool import SlotPool

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
SHARES = (0.01, 0.05, 0.20)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a policy does with a trace.

    Attributes:
        asked: blocks of all prompts.
        hits: blocks that were found.
        saved: blocks that were copied.
    """

    asked: int
    hits: int
    saved: int

    @property
    def saved_per_1000(self) -> float:
        """Blocks saved for 1,000 asked."""
        return 1000 * self.saved / self.asked

    @property
    def hit_share(self) -> float:
        """Part of the blocks that were found."""
        return self.hits / self.asked

    @property
    def worth(self) -> float:
        """Blocks found for each block saved."""
        return self.hits / self.saved if self.saved else float("inf")


def replay(
    size: int,
    trace: Trace,
    *,
    saves_all: bool = False,
    depth_of: Callable[[int], int] = depth_of,
) -> Outcome:
    """Replay a trace on the slot pool.

    Args:
        saves_all: whether every new block is saved, whatever the pool admits.
        depth_of: the depth of a prompt of which so many blocks were found.
    """
    pool = SlotPool(size)
    asked = hits = saved = 0
    for prompt in trace:
        keys = [block_key(block) for block in prompt]
        places = pool.places(0, keys)
        has = places >= 0
        depth = len(has) if has.all() else int(has.argmin())
        asked += len(keys)
        hits += depth
        found = places[has][::-1]
        pool.touch(found, pool.generation[found])
        new = [keys[place] for place in np.flatnonzero(~has).tolist()]
        prompts = np.full(len(new), depth_of(depth))
        admits = np.ones(len(new), bool) if saves_all else pool.admits(0, new, prompts)
        admitted = np.flatnonzero(admits)
        chosen = [new[place] for place in admitted.tolist()]
        kept = pool.keep(0, chosen, size, prompts=prompts[admitted])
        pool.filled(kept.slots)
        pool.let_go(kept.slots[::-1])
        saved += len(kept.slots)
    return Outcome(asked, hits, saved)


@contextmanager
def worth(worth: int) -> Iterator[None]:
    """Have blocks passed over while fewer than one in `worth` is used again."""
    former = eviction.WORTH
    eviction.WORTH = worth  # type: ignore[misc]
    try:
        yield
    finally:
        eviction.WORTH = former  # type: ignore[misc]


def one_in_32(size: int, trace: Trace) -> Outcome:
    """As learnt, if one block in 32 were enough."""
    with worth(32):
        return replay(size, trace)


def lru(size: int, trace: Trace) -> Outcome:
    """The end of a prompt goes before its beginning, as all of it is used at the same time."""
    kept: OrderedDict[int, None] = OrderedDict()
    asked = hits = saved = 0
    for prompt in trace:
        asked += len(prompt)
        hits += next((i for i, block in enumerate(prompt) if block not in kept), len(prompt))
        for block in reversed(prompt):
            saved += block not in kept
            kept[block] = None
            kept.move_to_end(block)
            if len(kept) > size:
                kept.popitem(last=False)
    return Outcome(asked, hits, saved)


def belady(size: int, trace: Trace) -> Outcome:
    """Of all blocks that are there or new, those stay that are used next; what never is used again
    is not saved."""
    uses: dict[int, list[int]] = {}
    for at, prompt in enumerate(trace):
        for block in prompt:
            uses.setdefault(block, []).append(at)
    kept: dict[int, int] = {}
    latest_first: list[tuple[int, int, int]] = []
    asked = hits = saved = 0
    for at, prompt in enumerate(trace):
        depth = next((i for i, block in enumerate(prompt) if block not in kept), len(prompt))
        asked += len(prompt)
        hits += depth
        new: set[int] = set()
        for i, block in enumerate(prompt):
            later = uses[block]
            place = bisect.bisect_right(later, at)
            if place == len(later):
                kept.pop(block, None)
                continue
            if block not in kept:
                new.add(block)
            kept[block] = later[place]
            heapq.heappush(latest_first, (-later[place], -i, block))
        while len(kept) > size:
            use, _, block = heapq.heappop(latest_first)
            if kept.get(block) == -use:
                del kept[block]
                new.discard(block)
        saved += len(new)
    return Outcome(asked, hits, saved)


POLICIES: dict[str, Callable[[int, Trace], Outcome]] = {
    "all": lambda size, trace: replay(size, trace, saves_all=True),
    "learnt": replay,
    "one in 32": one_in_32,
    "one depth": lambda size, trace: replay(size, trace, depth_of=lambda _: 0),
    "LRU": lru,
    "Belady": belady,
}

TRACES: dict[str, Callable[[float], Trace]] = {
    "conversations": lambda part: conversations(0, 2400.0 * part),
    "agents": lambda part: agents(0, 1600.0 * part),
    "documents": lambda part: documents(0, int(3000 * part)),
    "mixed": lambda part: mixed(0, 1600.0 * part),
}

Results = dict[str, dict[float, dict[str, Outcome]]]
"""By trace, size of the arena and policy."""


def markdown(results: Results, sizes: dict[str, str], command: str) -> str:
    """The page of results."""
    lines = [
        "# Which new blocks are saved",
        "",
        f"`{command}`: Python {platform.python_version()}; the figures do not depend on the "
        "machine.",
        "",
        "Block hashes are replayed on the real slot pool. *arena*: its slots, in percent of the "
        "trace's distinct blocks. *saved*: blocks copied to the arena for 1,000 blocks of prompts. "
        "*found*: part of these blocks that a prompt finds, up to its first that is missing, which "
        "is also the part of its tokens. *found a save*: blocks found for each block saved.",
        "",
        "*learnt*, as engines do: by depth, which is how many of a prompt's first blocks were "
        "found, by powers of two. A look-up finds that out anyway, and it tells the turns of a "
        "conversation from documents that come once. *one in 32*: with another threshold than one "
        "in 8. *one depth*: with one count for all prompts. *LRU*: all are saved, and the block "
        "that was used longest ago is evicted. Nothing else is told apart. A first turn of a "
        "conversation counts with documents, and prompts of all cache "
        f"salts count together: a count passes nothing over before {eviction.LEAST} new blocks, so "
        "one for each salt would copy so many for each; and clients choose their salts.",
        "",
        *(f"- {name}: {size}" for name, size in sizes.items()),
        "",
        "![Blocks found and saved](admission.png)",
        "",
        "| trace | arena | policy | saved | found, % | found a save |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for trace, of_trace in results.items():
        for share, of_share in of_trace.items():
            for policy, outcome in of_share.items():
                lines.append(
                    f"| {trace} | {100 * share:.0f} % | {policy} | {outcome.saved_per_1000:.0f} "
                    f"| {100 * outcome.hit_share:.1f} | {outcome.worth:.2f} |"
                )
    return "\n".join([*lines, ""])


def plot(results: Results, path: Path) -> None:
    """Blocks found over blocks saved, a line for each policy, a panel for each trace."""
    figure, panels = plt.subplots(1, len(results), figsize=(4 * len(results), 3.6))
    for panel, (trace, of_trace) in zip(panels, results.items(), strict=True):
        for policy in POLICIES:
            outcomes = [of_share[policy] for of_share in of_trace.values()]
            panel.plot(
                [each.saved_per_1000 for each in outcomes],
                [100 * each.hit_share for each in outcomes],
                marker="o",
                label=policy,
            )
        panel.set_title(trace)
        panel.set_xlabel("saved of 1,000 blocks")
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("blocks found, %")
    panels[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Replay, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter traces")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    results: Results = {}
    sizes: dict[str, str] = {}
    for name, make in TRACES.items():
        trace = make(0.2 if arguments.quick else 1.0)
        distinct = len(set().union(*trace))
        asked = sum(map(len, trace))
        sizes[name] = f"{len(trace):,} prompts of {asked:,} blocks, {distinct:,} of them distinct"
        results[name] = {
            share: {policy: run(int(share * distinct), trace) for policy, run in POLICIES.items()}
            for share in SHARES
        }
    text = markdown(
        results, sizes, "python benchmarks/admission.py" + (" --quick" if arguments.quick else "")
    )
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "admission.md").write_text(text)
    plot(results, arguments.output / "admission.png")


if __name__ == "__main__":
    main()
