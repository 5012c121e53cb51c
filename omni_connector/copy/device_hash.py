# SPDX-License-Identifier: Apache-2.0
"""Checksums that a CUDA device makes of rows in its memory, so that no core of the host does.

Where there is no driver, or what the kernels give is not what xxhash gives, the host hashes.
"""

import ctypes
import functools
from typing import Final

import numpy as np
import torch
import xxhash

from omni_connector.copy.device_kernels import DeviceKernels, address, made_on
from omni_connector.copy.native import ALIGNMENT, LEAST_HASHED

_BLOCK_BYTES: Final = 1024
"""Bytes after which the sums of a row are scrambled."""

_SUMS: Final = 8
"""Of a row, 64 bits each."""


def hashable(nbytes: int) -> bool:
    """Whether the kernels hash rows of so many bytes."""
    return nbytes >= LEAST_HASHED and not nbytes % ALIGNMENT


def room_words(nbytes: int) -> int:
    """How many words of 64 bits of the device's memory the hashing of rows needs.

    With so many, rows of less than 1 KiB are hashed in several launches.

    Args:
        nbytes: of all rows together.
    """
    return nbytes // 64 + 2 * _SUMS


class DeviceHash:
    """Hashes rows on one CUDA device.

    Args:
        device: whose context is current on the calling thread.

    Raises:
        OSError: there is no driver.
        RuntimeError: it cannot use the kernels, or they do not hash as xxhash does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        names = "block_sums", "row_sums", "merge_sums"
        self._kernels = DeviceKernels(device, "hash_rows.ptx", names)
        self._check()

    def __call__(self, rows: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Put the hashing of rows on the current stream.

        Args:
            rows: int8 `(n, nbytes)` in the device's memory, contiguous and `hashable`.
            room: int64 there, `room_words` of these bytes or more, which nothing else uses until
                the result was read.

        Returns:
            Int64 `(n,)`, the first words of `room`: xxh3-64 of each row, once the stream is there.

        Raises:
            RuntimeError: the device has failed.
        """
        count, nbytes = rows.shape
        blocks = (nbytes - 1) // _BLOCK_BYTES
        hashes, rest = room[:count], room[-(-count // _SUMS) * _SUMS :]
        at_once = len(rest) // (_SUMS * (blocks + 1))
        launch = self._kernels.launch
        for first in range(0, count, at_once):
            some = rows[first : first + at_once]
            of_some = hashes[first : first + at_once]
            size = ctypes.c_uint32(len(some)), ctypes.c_uint64(nbytes)
            inner = len(some) * blocks * _SUMS
            sums, totals = rest[:inner], rest[inner : inner + len(some) * _SUMS]
            # Rows of a single block have no sums of others.
            launch("block_sums", len(sums), address(some), *size, address(sums))
            launch("row_sums", len(totals), address(some), *size, address(sums), address(totals))
            launch("merge_sums", len(some), address(totals), *size, address(of_some))
        return hashes

    def _check(self) -> None:
        """Raise RuntimeError unless it hashes like xxhash."""
        for nbytes in (256, 1024, 1088, 4096, 16 * 1024 + 192):
            content = np.random.default_rng(0).integers(0, 256, (3, nbytes), np.uint8)
            rows = torch.from_numpy(content.view(np.int8)).to(self._device)
            room = torch.empty(room_words(rows.numel()), dtype=torch.int64, device=self._device)
            found = self(rows, room).cpu().numpy().view(np.uint64).tolist()
            if found != [xxhash.xxh3_64_intdigest(row.data) for row in content]:
                raise RuntimeError("its results differ from those of xxhash")


@functools.cache
def device_hash(device: torch.device) -> DeviceHash | None:
    """The hash of a device, made at the first call; None where it cannot be had."""
    return made_on(device, DeviceHash, "The host hashes KV blocks")
