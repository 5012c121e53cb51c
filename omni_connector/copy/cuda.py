# SPDX-License-Identifier: Apache-2.0
"""A CUDA stream beside the engine's own."""

import ctypes
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.device_hash import DeviceHash, device_hash, hashable, room_words
from omni_connector.copy.device_rows import WORD, device_rows
from omni_connector.copy.stream import RowPart, Stream

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


# Of cuMemHostRegister: pinned for every context of the process and mapped for kernels; and never
# written by the device.
_PORTABLE: Final = 1 | 2
_READ_ONLY: Final = 8

_RELAXED: Final = 2
"""Of CUstreamCaptureMode: what this thread calls is no concern of a capture by another thread."""

_CLOSED: Final = 4
"""CUDA's error of a call after everything was torn down."""


class _Driver:
    """Calls of the driver that torch has not got, on one device.

    torch's runtime would remember an error of such a call, and tell it to the thread's next kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.cuda._utils._get_device_index(device, optional=True)
        self._library = ctypes.CDLL("libcuda.so.1")
        self._ready = threading.local()

    def call(self, name: str, *arguments: Any) -> int:
        """The code of a call, 0 if it worked; the device's context is the thread's."""
        self.relax()
        code: int = getattr(self._library, name)(*arguments)
        return code

    def relax(self) -> None:
        """Let this thread work while another one captures a graph: else each call that may wait for
        the device would break the capture. Not for the thread that captures."""
        if getattr(self._ready, "done", False):
            return
        self._ready.done = True
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._library.cuDeviceGet(ctypes.byref(device), self._device)
        # The context that torch uses. Nobody releases it, as it goes with the process.
        self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._library.cuCtxSetCurrent(context)
        mode = ctypes.c_int(_RELAXED)
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_HASHED_AT_ONCE: Final = 2
"""Batches, one for each staging buffer. A device hashes a few long slots on few of its cores, which
takes longer than to copy them."""


class _Hashing:
    """A stream on which one batch after the other is hashed.

    Args:
        device: a CUDA device.
        room: for what `DeviceHash` keeps meanwhile.

    Attributes:
        last: the end of its work so far; None if there was none.
    """

    def __init__(self, device: torch.device, room: torch.Tensor) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._room = room
        self.last: torch.cuda.Event | None = None

    def hash(
        self,
        device_hash: DeviceHash,
        rows: torch.Tensor,
        there: torch.cuda.Event,
        sums: torch.Tensor,
        part: RowPart | None,
    ) -> None:
        """See `Stream.hash`."""
        self._stream.wait_event(there)
        with torch.cuda.stream(self._stream):
            sums.copy_(device_hash(rows, self._room, part), non_blocking=True)
            self.last = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self.last.record(self._stream)


def _event(fence: object) -> torch.cuda.Event:
    """A fence of a stream.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(fence, torch.cuda.Event):
        raise TypeError(f"not a fence of this copier: {fence!r}")
    return fence


class CudaStream(Stream):
    """A side stream of one CUDA device, and the host memory registered with it. Hashing has streams
    of its own, so that the device copies meanwhile.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._driver = _Driver(device)
        # The arena is registered piece by piece on one thread, and let go of on another.
        self._registering = threading.Lock()
        self._registered: set[int] = set()  # addresses
        self._closed = False
        self._hash = device_hash(device)
        self._rows = device_rows(device)
        self._hashing: list[_Hashing] = []

    def beside(self) -> "CudaStream":
        # What one has registered all may use.
        return CudaStream(self._device)

    def active(self) -> AbstractContextManager[object]:
        self._driver.relax()
        # Entering a stream also makes its device the current one.
        return torch.cuda.stream(self._stream)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, fence: object) -> bool:
        self._driver.relax()
        return bool(_event(fence).query())  # type: ignore[no-untyped-call]

    def wait(self, fence: object) -> None:
        self._driver.relax()
        for event in fence if isinstance(fence, tuple) else (fence,):
            self._stream.wait_event(_event(event))

    def mark(self) -> tuple[torch.cuda.Event, ...]:
        # Without `blocking`, whoever waits for it takes a core all the while.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event, *(each.last for each in self._hashing if each.last is not None)

    def finish(self, mark: object | None) -> None:
        events = self.mark() if mark is None else mark
        assert isinstance(events, tuple)
        for event in events:
            event.synchronize()

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.int8, pin_memory=True)

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        return self._allocate(nbytes, torch.int8)

    def prepare_hash(self, nbytes: int) -> None:
        if self._hash is not None:
            rooms = [
                self._allocate(room_words(nbytes), torch.int64) for _ in range(_HASHED_AT_ONCE)
            ]
            self._hashing = [_Hashing(self._device, room) for room in rooms]

    def _allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        # vLLM registers KV caches within a memory pool of this thread, which sleep mode takes away.
        with ThreadPoolExecutor(1) as elsewhere:
            empty = partial(torch.empty, count, dtype=dtype, device=self._device)
            return elsewhere.submit(empty).result()

    def can_hash(self, nbytes: int) -> bool:
        return self._hash is not None and hashable(nbytes)

    def hash(
        self,
        rows: torch.Tensor,
        *,
        there: object,
        sums: torch.Tensor,
        part: RowPart | None = None,
    ) -> None:
        assert self._hash is not None
        assert isinstance(there, tuple)
        hashing = self._hashing[0]
        self._hashing = [*self._hashing[1:], hashing]
        hashing.hash(self._hash, rows, there[0], sums, part)

    def can_move(self, nbytes: int) -> bool:
        return self._rows is not None and not nbytes % WORD

    def move(self, staged: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
        assert self._rows is not None
        self._rows.move(staged, rows, to_host=to_host)

    def pin(self, slots: NDArray[np.uint8]) -> int:
        address = slots.ctypes.data
        with self._registering:
            if self._closed:
                return _CLOSED
            flags = _PORTABLE if slots.flags.writeable else _PORTABLE | _READ_ONLY
            place = ctypes.c_void_p(address), ctypes.c_size_t(slots.nbytes)
            code = self._driver.call("cuMemHostRegister_v2", *place, ctypes.c_uint(flags))
            if not code:
                self._registered.add(address)
            return code

    def unpin(self, slots: NDArray[np.uint8]) -> None:
        with self._registering:
            self._let_go(self._registered & {slots.ctypes.data})

    def close(self) -> None:
        with self._registering:
            self._closed = True
            self._let_go(self._registered)

    def _let_go(self, addresses: set[int]) -> None:
        # Holds the lock.
        self._registered = self._registered - addresses
        unregister = partial(self._driver.call, "cuMemHostUnregister")
        codes = [unregister(ctypes.c_void_p(each)) for each in addresses]
        if any(codes):  # after a failure of the device, all do; its memory goes with the process
            logger.warning("cuMemHostUnregister failed with CUDA errors %s", sorted(set(codes)))
