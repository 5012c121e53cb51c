# SPDX-License-Identifier: Apache-2.0
"""Kernels that run on a CUDA device: written in C, shipped as PTX, compiled by the driver for the
device at hand."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from omni_connector.runtime.machine_code import kernel

logger = logging.getLogger("vllm.omni_connector.staging")

_Made = TypeVar("_Made")

_THREADS: Final = 256
"""Of a block of threads."""


class DeviceKernels:
    """The kernels of one file, on one CUDA device.

    Args:
        device: whose context is current on the calling thread.
        name: of the file in the folder `kernels`.
        functions: the kernels' names.

    Raises:
        OSError: there is no driver.
        RuntimeError: it cannot use them.
    """

    def __init__(self, device: torch.device, name: str, functions: Sequence[str]) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        image = kernel(__name__, name).encode()
        self._require("cuModuleLoadData", ctypes.byref(module), image)
        self._functions = {}
        for each in functions:
            function = ctypes.c_void_p()
            self._require("cuModuleGetFunction", ctypes.byref(function), module, each.encode())
            self._functions[each] = function

    def launch(self, name: str, threads: int, *arguments: Any) -> None:
        """Put a kernel on the current stream.

        Args:
            name: of the kernel.
            threads: that it has work for; none is launched for 0.
            arguments: as ctypes.

        Raises:
            RuntimeError: the device has failed.
        """
        if not threads:
            return
        places = [ctypes.addressof(each) for each in arguments]
        pointers = (ctypes.c_void_p * len(places))(*places)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        grid = -(-threads // _THREADS), 1, 1
        block = _THREADS, 1, 1
        function = self._functions[name]
        self._require("cuLaunchKernel", function, *grid, *block, 0, stream, pointers, None)

    def attribute(self, number: int) -> int:
        """What the driver says of the device, by the number of a device attribute of CUDA.

        Raises:
            RuntimeError: it does not know it.
        """
        device = ctypes.c_int()
        value = ctypes.c_int()
        self._require("cuCtxGetDevice", ctypes.byref(device))
        self._require("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def _require(self, call: str, *arguments: Any) -> None:
        code = getattr(self._driver, call)(*arguments)
        if code:
            raise RuntimeError(f"{call} failed with CUDA error {code}")


def made_on(
    device: torch.device, make: Callable[[torch.device], _Made], otherwise: str
) -> _Made | None:
    """What `make` makes for a CUDA device; None where it cannot be had, which is logged.

    Args:
        make: raises OSError or RuntimeError if there is no driver, or the kernels do not work.
        otherwise: what the host does then.
    """
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # the context is current from here on
            return make(device)
    except (OSError, RuntimeError) as error:
        logger.warning("%s, as the device cannot be used for it: %s", otherwise, error)
        return None


def address(tensor: torch.Tensor) -> ctypes.c_uint64:
    """The address of a tensor, as a kernel's argument."""
    return ctypes.c_uint64(tensor.data_ptr())
