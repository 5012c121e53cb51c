# SPDX-License-Identifier: Apache-2.0
"""One rank's threads, copier and arena, and the arena of an engine beside it: measured on a
device, real or simulated."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch
import xxhash
from machine import KIB, timed

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
from omni_connector.transports import Endpoint
from omni_connector.transports.peer_arenas import OwnArena

LAYERS: Final = 16
PAGE_BYTES: Final = 64 * KIB
NEVER_S: Final = 1e6


class InPlace:
    """Attaches arenas of this process."""

    supports_mapping = True

    def __init__(self) -> None:
        self._arenas: dict[str, OwnArena] = {}

    def add(self, arena: Arena, name: str) -> Endpoint:
        """Make an arena known under a name."""
        endpoint = Endpoint.of(arena, "shm", name)
        self._arenas[name] = OwnArena(endpoint, arena)
        return endpoint

    def choose(self, endpoints: tuple[Endpoint, ...]) -> tuple[Any, Endpoint]:
        """See `Transports`."""
        return self, endpoints[0]

    def attach(self, endpoint: Endpoint, *, timeout: float) -> OwnArena:
        """See `ArenaTransport`."""
        return self._arenas[endpoint.address]


def fill(arena: Arena, slots: int, size: int, seed: int) -> None:
    """Publish the first slots of an arena, with `size` random bytes each, in generation 1."""
    draw = np.random.default_rng(seed)
    for slot in range(slots):
        arena.begin_write(slot, 1)
        content = arena.slots[slot, :size]
        content[:] = draw.integers(0, 256, size, np.uint8)
        arena.publish(slot, 1, b"", size, xxhash.xxh3_64_intdigest(content.data))


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
