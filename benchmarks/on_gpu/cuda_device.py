# SPDX-License-Identifier: Apache-2.0
"""One CUDA device, and the calls of its driver that torch has not got."""

import ctypes
import gc
import os
from collections.abc import Callable
from ctypes import byref
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.choice import make_copier
from omni_connector.copy.copier import BlockCopier
from omni_connector.copy.cuda import CudaStream
from omni_connector.copy.stream import Stream
from omni_connector.kv.canonical import CanonicalKVCaches, SlotLayout
from omni_connector.runtime.shared_work import Helpers

_STREAM_ORDER: Final = 1
_ANY_ORDER: Final = 3
_BATCHES_SINCE: Final = 12080
"""The version of CUDA whose call is asked for: in a later one it has other arguments."""

_BATCH_ARGUMENTS: Final = (
    *[ctypes.c_void_p] * 3,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
    ctypes.c_size_t,
    *[ctypes.c_void_p] * 2,
)

_ON_DEVICE: Final = 1
_BY_DESCRIPTOR: Final = 1
_READ_WRITE: Final = 3
_RECOMMENDED: Final = 1


class _Location(ctypes.Structure):
    """A place of memory, as the driver has it."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """How copies of a batch are made, as the driver has it."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class _Allocation(ctypes.Structure):
    """What memory is made, as the driver has it."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """Who may use memory, as the driver has it."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Cuda:
    """See `Accelerator`.

    Raises:
        SystemExit: torch finds no CUDA device.
    """

    device = "cuda:0"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device")
        torch.cuda.set_device(0)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self._driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        self._require("cuDriverGetVersion", byref(version))
        self.name = (
            f"{torch.cuda.get_device_name(0)}, driver for CUDA {version.value / 1000:g}, "
            f"torch {torch.__version__}"
        )
        self._side = torch.cuda.Stream(0)  # type: ignore[no-untyped-call]
        self._batches: Any = None

    def free(self) -> int:
        """See `Accelerator`."""
        gc.collect()  # a KV cache that is let go of may lie in a cycle
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(0)
        return free

    def synchronize(self) -> None:
        """See `Accelerator`."""
        torch.cuda.synchronize(0)

    def mark(self) -> Callable[[], bool]:
        """See `Accelerator`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.query

    def copier(
        self, canonical: CanonicalKVCaches, layout: SlotLayout, helpers: Helpers | None = None
    ) -> BlockCopier:
        """See `Accelerator`."""
        return make_copier(canonical, layout, helpers)

    def stream(self) -> Stream:
        """See `Accelerator`."""
        return CudaStream(torch.device(self.device))

    def host(self, nbytes: int) -> torch.Tensor:
        """See `Accelerator`."""
        return torch.empty(nbytes, dtype=torch.int8, pin_memory=True)

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """See `Accelerator`."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(0)
        with torch.cuda.stream(self._side):
            graph.capture_begin()
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def copy_batch(
        self,
        targets: NDArray[np.uint64],
        sources: NDArray[np.uint64],
        nbytes: int,
        *,
        any_order: bool,
    ) -> None:
        """See `Accelerator`."""
        call = self._batch_call()
        sizes = np.full(len(targets), nbytes, np.uint64)
        # Where the bytes lie is a hint for managed memory only.
        attributes = _CopyAttributes(_ANY_ORDER if any_order else _STREAM_ORDER)
        first = ctypes.c_size_t(0)
        failed = ctypes.c_size_t()
        code = call(
            *(each.ctypes.data for each in (targets, sources, sizes)),
            *(len(targets), byref(attributes), byref(first), 1, byref(failed)),
            self._side.cuda_stream,
        )
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {code}")

    def copy_pages(
        self, targets: torch.Tensor, sources: torch.Tensor, nbytes: int, programs: int
    ) -> None:
        """See `Accelerator`."""
        from on_gpu.page_kernel import copy_pages

        copy_pages(targets, sources, nbytes, programs)

    def shareable(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """See `Accelerator`."""
        allocation = _Allocation(1, _BY_DESCRIPTOR, _Location(_ON_DEVICE, 0))
        size = self._size(allocation, nbytes)
        handle = ctypes.c_uint64()
        self._require("cuMemCreate", byref(handle), size, byref(allocation), ctypes.c_uint64(0))
        descriptor = ctypes.c_int(-1)
        self._require(
            *("cuMemExportToShareableHandle", byref(descriptor), handle, _BY_DESCRIPTOR),
            ctypes.c_uint64(0),
        )
        return self._tensor(self._map(handle, size), nbytes), descriptor.value

    def attach(self, descriptor: int, nbytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """See `Accelerator`."""
        allocation = _Allocation(1, _BY_DESCRIPTOR, _Location(_ON_DEVICE, 0))
        size = self._size(allocation, nbytes)
        handle = ctypes.c_uint64()
        self._require(
            *("cuMemImportFromShareableHandle", byref(handle), ctypes.c_void_p(descriptor)),
            _BY_DESCRIPTOR,
        )
        os.close(descriptor)
        address = self._map(handle, size)

        def let_go() -> None:
            self._require("cuMemUnmap", address, size)
            self._require("cuMemAddressFree", address, size)
            self._require("cuMemRelease", handle)

        return self._tensor(address, nbytes), let_go

    def _batch_call(self) -> Any:
        """The driver's copy of a batch, of CUDA 12.8."""
        if self._batches is None:
            found = ctypes.c_void_p()
            status = ctypes.c_int()
            self._require(
                *("cuGetProcAddress_v2", b"cuMemcpyBatchAsync", byref(found), _BATCHES_SINCE),
                *(ctypes.c_uint64(0), byref(status)),
            )
            if not found.value:
                raise RuntimeError(f"the driver has no cuMemcpyBatchAsync (status {status.value})")
            self._batches = ctypes.CFUNCTYPE(ctypes.c_int, *_BATCH_ARGUMENTS)(found.value)
        return self._batches

    def _size(self, allocation: _Allocation, nbytes: int) -> ctypes.c_size_t:
        """Bytes of an allocation that has room for `nbytes`."""
        least = ctypes.c_size_t()
        self._require(
            "cuMemGetAllocationGranularity", byref(least), byref(allocation), _RECOMMENDED
        )
        return ctypes.c_size_t(-(-nbytes // least.value) * least.value)

    def _map(self, handle: ctypes.c_uint64, size: ctypes.c_size_t) -> ctypes.c_uint64:
        """Map an allocation; its address."""
        address = ctypes.c_uint64()
        nothing = ctypes.c_uint64(0)
        self._require(
            "cuMemAddressReserve", byref(address), size, ctypes.c_size_t(0), nothing, nothing
        )
        self._require("cuMemMap", address, size, ctypes.c_size_t(0), handle, nothing)
        access = _Access(_Location(_ON_DEVICE, 0), _READ_WRITE)
        self._require("cuMemSetAccess", address, size, byref(access), ctypes.c_size_t(1))
        return address

    def _tensor(self, address: ctypes.c_uint64, nbytes: int) -> torch.Tensor:
        """Memory of the device as a tensor, which does not own it."""

        class Memory:
            __cuda_array_interface__ = {  # noqa: RUF012 - the protocol's own name
                "shape": (nbytes,),
                "typestr": "|i1",
                "data": (address.value, False),
                "version": 3,
            }

        return torch.as_tensor(Memory(), device=self.device)

    def _require(self, call: str, *arguments: Any) -> None:
        code = getattr(self._driver, call)(*arguments)
        if code:
            raise RuntimeError(f"{call} failed with CUDA error {code}")
