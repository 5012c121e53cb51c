# SPDX-License-Identifier: Apache-2.0
"""One rank on the device: its KV cache in a layout of vLLM, its arena, and another engine's."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from copying_rank import InPlace, Rank
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.transports import Endpoint
from omni_connector.transports.shm import SharedMemoryTransport
from on_gpu.accelerator import Accelerator, pin

HEADS: Final = 8
TOKENS: Final = 16

LAYOUTS: Final = ("LBNHC", "BLNHC")
"""vLLM's default, in which each layer lies by itself, and the one in which a block is one run."""


class OtherEngine(InPlace):
    """Maps the arena of the other engine once more, read-only, as an engine would.

    Attributes:
        slots: what is mapped; None before the first load.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._transport = SharedMemoryTransport(folder=Path(folder))
        self.slots: NDArray[np.uint8] | None = None

    def add(self, arena: Arena, name: str) -> Endpoint:
        return self._transport.export(arena, name)

    def attach(self, endpoint: Endpoint, *, timeout: float) -> Any:
        attached = self._transport.attach(endpoint, timeout=timeout)
        attached.pin_with = lambda pins: None  # type: ignore[method-assign]
        self.slots = attached.slots
        return attached

    def close(self) -> None:
        """Let go of it."""
        self._transport.close()


class DeviceRank:
    """A rank that saves and loads `moved` bytes.

    Args:
        stack: closes all.
        moved: bytes of a save, and of a load.

    Attributes:
        rank: has the jobs.
        buffer: the KV cache.
        block_bytes: of all layers.
        count: blocks of a save, and of a load.
        saved, loaded: which these are.
        pinned: whether the device has taken the own arena.
    """

    def __init__(
        self,
        device: Accelerator,
        stack: ExitStack,
        *,
        layers: int,
        layout: str,
        page: int,
        cache: int,
        moved: int,
    ) -> None:
        self.block_bytes = layers * page
        self.count = max(1, moved // self.block_bytes)
        blocks = max(1 + 2 * self.count, cache // self.block_bytes)
        size = blocks * self.block_bytes
        self.buffer = torch.zeros(size, dtype=torch.int8, device=device.device)
        content = page // (HEADS * TOKENS)
        if layout == "BLNHC":
            whole = self.buffer.view(blocks, layers, TOKENS, HEADS, content).transpose(0, 1)
        else:
            whole = self.buffer.view(layers, blocks, TOKENS, HEADS, content)
        views = {f"layer.{number}": each for number, each in enumerate(whole.transpose(2, 3))}
        self.views = views
        self._other = OtherEngine(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(self._other.close)
        self.rank = Rank(
            *(self.count, self.count, stack),
            page_bytes=page,
            copy_threads=4,
            transports=self._other,
            views=views,
            make=device.copier,
        )
        self.loaded, self.saved = np.split(self.rank.blocks, 2)
        self.moved = self.count * self.block_bytes
        # What `Rank` has pinned is taken anew, to see whether the device has it.
        self.rank.copier.unpin(self.rank.own.slots)
        self.pinned = pin(self.rank.copier, self.rank.own.slots)
        self._stack = stack

    def pin_other(self) -> bool:
        """Have the device read the other engine's arena itself; whether it does."""
        slots = self._other.slots
        assert slots is not None, "nothing was loaded yet"
        taken = pin(self.rank.copier, slots)
        if taken:
            self._stack.callback(self.rank.copier.unpin, slots)
        return taken

    def blocks(self, ids: NDArray[np.int64]) -> NDArray[np.int8]:
        """Some blocks as slots hold them."""
        at = torch.from_numpy(ids).to(self.buffer.device)
        pages = [each[at].transpose(1, 2).reshape(len(ids), -1) for each in self.views.values()]
        return torch.cat(pages, 1).cpu().numpy()
