# SPDX-License-Identifier: Apache-2.0
"""Checksums as a device makes them, also part by part, by xxhash."""

import itertools

import numpy as np
import torch
import xxhash

from omni_connector.copy.stream import RowPart


class Digests:
    """Hashes rows. A number that finds what was hashed so far stands for the sums of a part."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._begun: dict[int, xxhash.xxh3_64] = {}

    def hash(self, rows: torch.Tensor, sums: torch.Tensor, part: RowPart | None) -> None:
        """See `Stream.hash`."""
        ends = part is None or part.ends(rows.shape[1])
        for place, row in enumerate(rows.numpy()):
            begun = None if part is None else self._begun.pop(int(part.sums[place, 0]), None)
            digest = begun or xxhash.xxh3_64()
            digest.update(row.data)
            if ends:
                sums[place] = int(np.uint64(digest.intdigest()).astype(np.int64))
            else:
                number = next(self._numbers)
                self._begun[number] = digest
                sums[place] = number
