# SPDX-License-Identifier: Apache-2.0
"""Rows of pinned memory that kernels of a CUDA device read and write, wherever they lie.

Where there is no driver, or the kernels cannot use the host's memory, rows pass through a buffer of
the host.
"""

import ctypes
import functools
from typing import Final

import torch

from omni_connector.copy.device_kernels import DeviceKernels, address, made_on

WORD: Final = 16
"""Bytes by which sizes and addresses of rows must be divisible."""

_ONE_ADDRESS: Final = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""

_THREADS: Final = 64 * 256
"""Most threads of a launch. A few of a device's cores keep the bus to the host busy, and leave the
others to the engine."""


class DeviceRows:
    """Moves rows between one CUDA device and pinned memory of the host.

    Args:
        device: whose context is current on the calling thread.

    Raises:
        OSError: there is no driver.
        RuntimeError: it cannot use the kernels, or they do not move what they should.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels = DeviceKernels(device, "move_rows.ptx", ("rows_to_host", "rows_from_host"))
        self._require_host_addresses()
        self._check()

    def move(self, packed: torch.Tensor, rows: torch.Tensor, *, to_host: bool) -> None:
        """Put the move of rows on the current stream.

        Args:
            packed: int8 `(n, nbytes)` in the device's memory, contiguous.
            rows: int64 `(n,)` there: the address of each row of the host. Addresses and `nbytes`
                are divisible by `WORD`.
            to_host: whether the rows of the host are written, else those of the device.

        Raises:
            RuntimeError: the device has failed.
        """
        count, nbytes = packed.shape
        words = nbytes // WORD
        size = ctypes.c_uint32(count), ctypes.c_uint32(words)
        name = "rows_to_host" if to_host else "rows_from_host"
        threads = min(count * words, _THREADS)
        self._kernels.launch(name, threads, address(packed), address(rows), *size)

    def _require_host_addresses(self) -> None:
        """Raise RuntimeError unless registered memory has one address on host and device. A kernel
        that used another one would end all of the engine's work on the device."""
        if not self._kernels.attribute(_ONE_ADDRESS):
            raise RuntimeError("its kernels know registered memory by other addresses")

    def _check(self) -> None:
        """Raise RuntimeError unless rows arrive."""
        here = torch.arange(5 * 48).to(torch.int8).view(5, 48).pin_memory()
        order = [3, 0, 4]
        rows = torch.tensor([here[each].data_ptr() for each in order], device=self._device)
        there = torch.zeros((3, 48), dtype=torch.int8, device=self._device)
        self.move(there, rows, to_host=False)
        expected = here.clone()
        arrived = torch.equal(there.cpu(), expected[order])
        self.move(there + 1, rows, to_host=True)
        expected[order] += 1
        torch.cuda.current_stream(self._device).synchronize()
        if not arrived or not torch.equal(here, expected):
            raise RuntimeError("what they move does not arrive")


@functools.cache
def device_rows(device: torch.device) -> DeviceRows | None:
    """What moves the rows of a device, made at the first call; None where it cannot be had."""
    return made_on(device, DeviceRows, "The host copies rows of KV blocks")
