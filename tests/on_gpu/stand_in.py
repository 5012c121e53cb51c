# SPDX-License-Identifier: Apache-2.0
"""A host that stands in for a GPU in `benchmarks/on_gpu`: the copier for devices runs upon it, and
all work is done when it is launched."""

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np
import torch

from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.staged import StagedCopier
from omni_connector.copy.stream import Stream

from ..kv.conftest import HostStream


class StandIn:
    """See `Accelerator`."""

    name = "a stand-in for a GPU"
    device = "cpu"

    def free(self) -> int:
        return 1 << 40

    def synchronize(self) -> None:
        pass

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def copier(self, canonical, layout, helpers=None) -> BlockCopier:
        return StagedCopier(canonical, layout, self.stream(), helpers)

    def stream(self) -> Stream:
        return HostStream(pins=True, hashes=True, moves=True)

    def host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.int8)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        return work

    def copy_batch(self, targets, sources, nbytes: int, *, any_order: bool) -> None:
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)

    def copy_pages(self, targets, sources, nbytes: int, programs: int) -> None:
        os.environ["TRITON_INTERPRET"] = "1"  # the same kernel, on the host
        from on_gpu.page_kernel import copy_pages

        copy_pages(targets, sources, nbytes, programs)

    def shareable(self, nbytes: int) -> tuple[torch.Tensor, int]:
        descriptor = os.memfd_create("stand-in")
        os.ftruncate(descriptor, nbytes)
        return _mapped(descriptor, nbytes), descriptor

    def attach(self, descriptor: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        memory = _mapped(descriptor, nbytes)
        return memory, lambda: os.close(descriptor)


def _mapped(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, nbytes), np.int8))
