# SPDX-License-Identifier: Apache-2.0
"""A CUDA stream beside the engine's own."""

import contextlib
import logging
import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.device_hash import device_hash, hashable
from omni_connector.copy.stream import Stream

logger = logging.getLogger("vllm.omni_connector.staging")


def pci_address() -> str | None:
    """The address on the PCI bus of this thread's CUDA device; None where it has not got one yet,
    or torch does not tell."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        domain = device.pci_domain_id
        bus = device.pci_bus_id
        number = device.pci_device_id
    except AttributeError:
        return None
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


class CudaStream(Stream):
    """A side stream of one CUDA device, and the host memory registered with it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The arena is registered piece by piece on one thread, and let go of on another.
        self._registering = threading.Lock()
        self._registered: list[int] = []
        self._closed = False
        self._hash = device_hash(device)

    def active(self) -> AbstractContextManager[object]:
        # Entering a stream also makes its device the current one.
        return torch.cuda.stream(self._stream)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, fence: object) -> None:
        if not isinstance(fence, torch.cuda.Event):
            raise TypeError(f"not a fence of this copier: {fence!r}")
        self._stream.wait_event(fence)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def finish(self, mark: object | None) -> None:
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()
        else:
            self._stream.synchronize()

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.int8, pin_memory=True)

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.int8, device=self._device)

    def to_device(self, ids: NDArray[np.int64]) -> torch.Tensor:
        # From pageable memory torch waits until the copy is there.
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self._device)

    def can_hash(self, nbytes: int) -> bool:
        return self._hash is not None and hashable(nbytes)

    def hash(self, rows: torch.Tensor) -> torch.Tensor:
        assert self._hash is not None
        sums = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
        return sums.copy_(self._hash(rows), non_blocking=True)

    def pin(self, slots: NDArray[np.uint8]) -> bool:
        address = slots.ctypes.data
        with self._registering:
            if self._closed or address in self._registered:
                return False
            # Portable (1): pinned for every context of the process. A refusal (a kernel limit,
            # memory that cannot be registered) leaves the pinned buffers, which are always right.
            with torch.cuda.device(self._device):
                runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                code = runtime.cudaHostRegister(address, slots.nbytes, 1)
            if int(code) != 0:
                # The runtime remembers the refusal, and tells it to the next kernel of this thread:
                # to this one, and not to one of the engine's.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
                return False
            self._registered.append(address)
            return True

    def close(self) -> None:
        with self._registering, torch.cuda.device(self._device):
            self._closed = True
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            codes = [int(runtime.cudaHostUnregister(each)) for each in self._registered]
            self._registered = []
        if any(codes):  # after a failure of the device, all do; its memory goes with the process
            logger.warning("cudaHostUnregister failed with CUDA errors %s", sorted(set(codes)))
