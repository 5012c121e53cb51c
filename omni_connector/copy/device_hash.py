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

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Put the hashing of rows on the current stream.

        Args:
            rows: int8 `(n, nbytes)` in the device's memory, contiguous and `hashable`.

        Returns:
            Int64 `(n,)` in the device's memory: xxh3-64 of each row, once the stream is there.

        Raises:
            RuntimeError: the device has failed.
        """
        count, nbytes = rows.shape
        blocks = (nbytes - 1) // _BLOCK_BYTES
        sums = torch.empty(count * blocks * _SUMS, dtype=torch.int64, device=self._device)
        totals = torch.empty(count * _SUMS, dtype=torch.int64, device=self._device)
        hashes = torch.empty(count, dtype=torch.int64, device=self._device)
        size = ctypes.c_uint32(count), ctypes.c_uint64(nbytes)
        launch = self._kernels.launch
        # Rows of a single block have no sums of others.
        launch("block_sums", len(sums), address(rows), *size, address(sums))
        launch("row_sums", len(totals), address(rows), *size, address(sums), address(totals))
        launch("merge_sums", count, address(totals), *size, address(hashes))
        return hashes

    def _check(self) -> None:
        """Raise RuntimeError unless it hashes like xxhash."""
        for nbytes in (256, 1024, 1088, 4096, 16 * 1024 + 192):
            content = np.random.default_rng(0).integers(0, 256, (3, nbytes), np.uint8)
            rows = torch.from_numpy(content.view(np.int8)).to(self._device)
            found = self(rows).cpu().numpy().view(np.uint64).tolist()
            if found != [xxhash.xxh3_64_intdigest(row.data) for row in content]:
                raise RuntimeError("its results differ from those of xxhash")


@functools.cache
def device_hash(device: torch.device) -> DeviceHash | None:
    """The hash of a device, made at the first call; None where it cannot be had."""
    return made_on(device, DeviceHash, "The host hashes KV blocks")
