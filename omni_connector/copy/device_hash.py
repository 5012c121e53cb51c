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
from omni_connector.copy.native import ALIGNMENT, LEAST_HASHED, SUMS, begin
from omni_connector.copy.stream import RowPart

_BLOCK: Final = 16
"""Stripes of `ALIGNMENT` bytes after which the sums of a row are scrambled."""


def hashable(nbytes: int) -> bool:
    """Whether the kernels hash rows of so many bytes: whole, or in parts of whole stripes."""
    return nbytes >= LEAST_HASHED and not nbytes % ALIGNMENT


def room_words(nbytes: int) -> int:
    """How many words of 64 bits of the device's memory the hashing of rows needs.

    With so many, rows of less than 1 KiB are hashed in several launches.

    Args:
        nbytes: of all rows together.
    """
    return nbytes // 64 + 3 * SUMS


def first_sums(count: int) -> torch.Tensor:
    """Int64 `(count, 8)`: the sums that rows begin with."""
    return torch.from_numpy(begin(count, 0)[:, :SUMS].astype(np.int64))


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

    def __call__(
        self, rows: torch.Tensor, room: torch.Tensor, part: RowPart | None = None
    ) -> torch.Tensor:
        """Put the hashing of rows on the current stream.

        Args:
            rows: int8 `(n, nbytes)` in the device's memory, contiguous and `hashable`.
            room: int64 there, `room_words` of these bytes or more, which nothing else uses until
                the result was read.
            part: which bytes of longer rows these are; None for whole rows.

        Returns:
            Int64 `(n,)`, the first words of `room`: xxh3-64 of each row, once the stream is there.
            Of a part that is not the last one its sums, which are those behind it then.

        Raises:
            RuntimeError: the device has failed.
        """
        count, nbytes = rows.shape
        first, length = (0, nbytes) if part is None else (part.first, part.length)
        more = first + nbytes < length
        before = first // ALIGNMENT % _BLOCK
        blocks = (before + nbytes // ALIGNMENT - (not more)) // _BLOCK
        hashes, rest = room[:count], room[-(-count // SUMS) * SUMS :]
        at_once = len(rest) // (SUMS * (blocks + 1))
        launch = self._kernels.launch
        for begins in range(0, count, at_once):
            some = slice(begins, begins + at_once)
            rows_of_it = rows[some]
            number = ctypes.c_uint32(len(rows_of_it))
            size = number, ctypes.c_uint64(nbytes), ctypes.c_uint32(before), ctypes.c_uint32(more)
            inner = len(rows_of_it) * blocks * SUMS
            sums, totals = rest[:inner], rest[inner : inner + len(rows_of_it) * SUMS]
            begun = ctypes.c_uint64(0)
            if part is not None:
                totals = part.sums[some].view(-1)
                begun = address(totals)
            of_rows = address(rows_of_it)
            # Rows of a single block have no sums of others.
            launch("block_sums", len(sums), of_rows, *size, address(sums))
            launch("row_sums", len(totals), of_rows, *size, address(sums), begun, address(totals))
            if not more:
                whole = ctypes.c_uint64(length)
                launch(
                    "merge_sums",
                    len(rows_of_it),
                    address(totals),
                    number,
                    whole,
                    address(hashes[some]),
                )
        return part.sums if part is not None and more else hashes

    def _check(self) -> None:
        """Raise RuntimeError unless it hashes rows like xxhash, whole or in two parts."""
        for nbytes, cut in ((256, 64), (1024, 256), (1088, 1024), (4096, 960), (16576, 5184)):
            content = np.random.default_rng(0).integers(0, 256, (3, nbytes), np.uint8)
            expected = [xxhash.xxh3_64_intdigest(row.data) for row in content]
            rows = torch.from_numpy(content.view(np.int8)).to(self._device)
            room = torch.empty(room_words(rows.numel()), dtype=torch.int64, device=self._device)
            whole = self(rows, room).tolist()
            sums = first_sums(3).to(self._device)
            self(rows[:, :cut].contiguous(), room, RowPart(0, nbytes, sums))
            parts = self(rows[:, cut:].contiguous(), room, RowPart(cut, nbytes, sums)).tolist()
            for found in (whole, parts):
                if np.array(found, np.int64).view(np.uint64).tolist() != expected:
                    raise RuntimeError("its results differ from those of xxhash")


@functools.cache
def device_hash(device: torch.device) -> DeviceHash | None:
    """The hash of a device, made at the first call; None where it cannot be had."""
    return made_on(device, DeviceHash, "The host hashes KV blocks")
