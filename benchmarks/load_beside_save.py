# SPDX-License-Identifier: Apache-2.0
"""What a load that a request waits for takes beside a save that nobody waits for.

One rank fills blocks from the mapped arena of another engine, on its thread for loads, while its
thread for saves copies other blocks to its own arena. In each round the same load is made alone,
beside a save that steps back for it (a background job, as what is kept for others), and beside one
that does not (as what a decode engine waits for). The save begins before the load and is still
under way when it ends. The order of the three is another one in each round.

All of it on an idle machine, and while a process computes on each core, as engines do.

    python benchmarks/load_beside_save.py [--quick]

writes results/load_beside_save.md beside this file. The exit status is 1 if a load took more than
`MOST` times as long beside a save that steps back as alone, on the idle machine, in the median.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from machine import KIB, RESULTS, Memcpy, machine, timed
from unlike_engines import InPlace, fill

from omni_connector.arena.arena import Arena
from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.jobs import LoadSpec, Saver, SaveSpec
from omni_connector.copy.layered import LayerRanges
from omni_connector.copy.loading import Loader
from omni_connector.copy.threads import CopyThread, Outcome, Work
from omni_connector.kv.canonical import GroupSpec, LayerSpec, SlotLayout, canonicalize
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.spans import BlockSpans
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.runtime.shared_work import Helpers

LAYERS: Final = 16
PAGE_BYTES: Final = 64 * KIB
NEVER_S: Final = 1e6
MOST: Final = 1.25
ALONE, BESIDE, STEPS_BACK = MODES = ("alone", "beside a save", "beside one that steps back")

# Bytes that a load moves, in MiB: prompts of 257 and 2,049 tokens of an 8B model, and a long one.
LOADS_MIB: Final = (32, 256, 512)


class Rank:
    """A rank's caches, its threads and arena, and the arena of the engine that it loads from.

    Attributes:
        copier: of the caches.
        own, theirs: the arenas.
        layer_ranges: of the caches.
        blocks: of the caches, in the order in which they are loaded and then saved.
        block_bytes: of one.

    Args:
        loaded, saved: blocks of the largest load, and of a save.
        stack: closes all.
        page_bytes: of a block of one layer.
        copy_threads: as the setting; None for the default beside an engine that computes on a core.
        transports: attach the other engine's arena.
        checksum: whether slots have checksums.
        views: the caches, by layer `(blocks, heads, tokens, bytes)`; None for `LAYERS` on the host.
        make: makes the copier.
    """

    def __init__(
        self,
        loaded: int,
        saved: int,
        stack: ExitStack,
        *,
        page_bytes: int = PAGE_BYTES,
        copy_threads: int | None = None,
        transports: InPlace | None = None,
        checksum: bool = True,
        views: Mapping[str, torch.Tensor] | None = None,
        make: Callable[..., BlockCopier] = make_copier,
    ) -> None:
        count = loaded + saved
        if views is None:
            blocks = 1 + count  # block 0 is the null block, which nothing is copied to or from
            buffer = torch.ones(LAYERS * blocks * page_bytes, dtype=torch.int8)
            pages = buffer.view(LAYERS, blocks, 1, 1, page_bytes)
            views = {f"model.layers.{number}": page for number, page in enumerate(pages)}
        names = list(views)
        shape = views[names[0]].shape
        layers = tuple(LayerSpec(name, page_bytes, page_bytes) for name in names)
        group_spec = GroupSpec("full_attention", shape[2], layers)
        canonical = canonicalize([group_spec], views, shape[0])
        layout = SlotLayout.of(canonical)
        group = GroupShape(
            kind="full_attention",
            block_size=shape[2],
            attention_type="all",
            layers=" ".join(names),
            pages=(f"C{page_bytes}",) * len(names),
        )
        addresses = [{name: view.data_ptr() for name, view in views.items()}]
        layer_ranges = LayerRanges.of(canonical, layout, addresses)
        own = stack.enter_context(Arena.create(saved, layout.slot_bytes))
        theirs = stack.enter_context(Arena.create(loaded, layout.slot_bytes))
        own.slots[:] = 1
        fill(theirs, loaded, layout.group_bytes[0], seed=1)
        transports = transports or InPlace()
        self._arenas = ((transports.add(theirs, "theirs"),),)
        self._helpers = Helpers()
        default = max(1, min(4, len(os.sched_getaffinity(0)) - 1))
        self._helpers.threads = 1 + (copy_threads or default)
        copier = make(layer_ranges.canonical, layer_ranges.layout, self._helpers)
        stack.callback(copier.close)
        copier.pin(own.slots)
        self.copier, self.own, self.theirs = copier, own, theirs
        self.layer_ranges = layer_ranges
        self._loads = CopyThread("omni-load")
        self._saves = CopyThread("omni-save", first=self._loads)
        peer: Any = transports
        self._loader = Loader(
            transports=peer,
            copier=copier,
            layout=layout,
            groups=(group,),
            rank=0,
            ranks=1,
            checksum=checksum,
            context=PROCESS_CONTEXT,
            notify=self._loads.notify,
            threads=self._helpers.threads if canonical.device.type == "cpu" else 1,
        )
        self._saver = Saver(arena=own, copier=copier, layer_ranges=layer_ranges, checksum=checksum)
        self.blocks = 1 + np.random.default_rng(7).permutation(shape[0] - 1)[:count]
        self._loaded, self._saved = loaded, saved
        self._generation = 0
        self.block_bytes = layout.group_bytes[0]
        for close in (self._loader.close, lambda: self._helpers.close(5.0)):
            stack.callback(close)
        stack.callback(self._saves.close)
        stack.callback(self._loads.close)

    def load(self, blocks: int) -> float:
        """Load so many blocks; returns the seconds until that has ended."""
        return timed(lambda: self._do(self._loads, self._load(blocks)))

    def save(self) -> float:
        """Save; returns the seconds until that has ended."""

        def copy() -> None:
            self.start_save(background=False)
            self._end(self._saves)

        return timed(copy)

    def both(self, blocks: int) -> float:
        """Load and save at once, as if somebody waited for both; seconds until both have ended."""

        def copy() -> None:
            self.start_save(background=False)
            self._do(self._loads, self._load(blocks))
            self._end(self._saves)

        return timed(copy)

    def _load(self, blocks: int) -> Work:
        spec = LoadSpec(
            request_id="r",
            blocks=BlockSpans.of([(0, self.blocks[:blocks].tolist())]),
            slots=BlockSpans.of([(0, list(range(blocks)))]),
            generations=np.ones(blocks, np.int64),
            arenas=self._arenas,
            timeout=NEVER_S,
        )
        return self._loader.work(1, spec, None)

    def start_save(self, *, background: bool, fence: object = None) -> None:
        """Start the save, which waits for a fence or follows a forward pass."""
        self._generation += 1
        spec = SaveSpec(
            blocks=BlockSpans.of([(0, self.blocks[self._loaded :].tolist())]),
            slots=np.arange(self._saved),
            generations=np.full(self._saved, self._generation),
            keys=[b""] * self._saved,
        )
        self._saves.submit(2, self._saver.work(2, spec, fence), background=background)

    def end_save(self) -> tuple[float, bool]:
        """Wait for the end of the save; its own seconds, and whether it was under way until now."""
        was_under_way = not self._saves.has_ended
        return self._end(self._saves).seconds, was_under_way

    def follow(self) -> None:
        """Tell the save that the forward pass that it follows has come further."""
        self._saves.notify()

    def start_load(self, blocks: int) -> None:
        """Start to load so many blocks."""
        self._loads.submit(1, self._load(blocks))

    def ended(self) -> list[Outcome]:
        """The jobs that have ended since the last call."""
        return [*self._saves.take_ended(), *self._loads.take_ended()]

    def _do(self, thread: CopyThread, work: Work) -> None:
        thread.submit(1, work)
        self._end(thread)

    def _end(self, thread: CopyThread) -> Outcome:
        while not thread.has_ended:  # an engine looks once a step
            time.sleep(0.0001)
        (outcome,) = thread.take_ended()
        if outcome.failure is not None:
            raise SystemExit(f"a copy failed: {outcome.failure}")
        return outcome


@contextmanager
def computing(busy: bool) -> Iterator[None]:
    """Have a process compute on each core meanwhile, or none."""
    spin = [sys.executable, "-c", "while True: pass"]
    cores = len(os.sched_getaffinity(0)) if busy else 0
    spinning = [subprocess.Popen(spin) for _ in range(cores)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def measure(
    rank: Rank, blocks: int, memcpy: Memcpy, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of the loads of each mode, in memcpys of their bytes, and milliseconds; by round."""
    relative: dict[str, list[float]] = {mode: [] for mode in MODES}
    milliseconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(repeats + 1):
        for place in range(len(MODES)):
            mode = MODES[(turn + place) % len(MODES)]
            took: list[float] = []

            def load(mode: str = mode, took: list[float] = took) -> None:
                if mode != ALONE:
                    rank.start_save(background=mode == STEPS_BACK)
                    time.sleep(0.002)  # it is under way
                took.append(rank.load(blocks))
                if mode != ALONE and not rank.end_save()[1]:
                    raise SystemExit("a save ended before the load beside it: make it larger")

            copied, _ = memcpy.beside(blocks * rank.block_bytes, load)
            if turn:  # the first touches what no later one has to
                relative[mode].append(took[0] / copied)
                milliseconds[mode].append(took[0] * 1e3)
    return relative, milliseconds


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller loads and fewer rounds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    loads, repeats = (LOADS_MIB[:2], 5) if arguments.quick else (LOADS_MIB, 15)
    command = " ".join(["python benchmarks/load_beside_save.py", *sys.argv[1:]])
    lines = [
        "# A load beside a save that nobody waits for",
        "",
        f"`{command}`: {machine()}.",
        "",
        "Milliseconds until a load from a mapped arena has ended, with checksums, medians of "
        f"{repeats} rounds. In brackets the median, lowest and highest of the rounds' ratios to "
        "the load alone, each in numpy copies of as many bytes just before and after.",
        "",
        f"| machine | MiB | {' | '.join(MODES)} |",
        "|---|---:|---:|---:|---:|",
    ]
    good = True
    with ExitStack() as stack:
        per_mib = KIB * KIB / (LAYERS * PAGE_BYTES)
        most = int(max(loads) * per_mib)
        rank = Rank(most, 2 * most, stack)
        memcpy = Memcpy(most * rank.block_bytes)
        for busy in (False, True):
            with computing(busy):
                for size in loads:
                    relative, took = measure(rank, int(size * per_mib), memcpy, repeats)
                    cells = [f"{statistics.median(took[ALONE]):.1f}"]
                    for mode in MODES[1:]:
                        ratios = sorted(
                            one / other
                            for one, other in zip(relative[mode], relative[ALONE], strict=True)
                        )
                        middle = statistics.median(ratios)
                        cells.append(
                            f"{statistics.median(took[mode]):.1f} ({middle:.2f}, {ratios[0]:.2f} "
                            f"to {ratios[-1]:.2f})"
                        )
                        if mode == STEPS_BACK and not busy and middle > MOST:
                            good = False
                    where = "every core computes" if busy else "idle"
                    lines.append(f"| {where} | {size} | {' | '.join(cells)} |")
                    print(lines[-1], flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "load_beside_save.md").write_text("\n".join([*lines, ""]))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
