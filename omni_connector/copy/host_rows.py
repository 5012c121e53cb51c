# SPDX-License-Identifier: Apache-2.0
"""Rows of bytes in the host's memory: copied and hashed by machine code, on several threads."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.copy.native import (
    ALIGNMENT,
    LEAST_HASHED,
    NativeCopy,
    begin,
    checksums,
    native_copy,
)

SHARED_BYTES: Final = 1 << 20
"""Fewest bytes that a thread copies of a shared copy. A helper wakes in about the time in which
these are copied."""

_Item = TypeVar("_Item")


class Sharing(Protocol):
    """Threads that share work; see `omni_connector.runtime.shared_work.Helpers`."""

    threads: int

    def share(self, work: Callable[[_Item], None], items: Sequence[_Item]) -> None:
        """Call `work` with each item; returns once no thread works on any of them."""


def in_parts(
    helpers: Sharing | None,
    count: int,
    nbytes: int,
    work: Callable[[slice], None],
    least: int,
) -> None:
    """Call `work` with parts of `count` items, which together are all of them.

    Args:
        helpers: share in the parts; without, the calling thread has one part.
        count: items, such as slots.
        nbytes: of all of them.
        work: is called with the places of some items, on any of the threads.
        least: bytes of a part.
    """
    if helpers is None:
        work(slice(0, count))
        return
    # More parts than threads, as one may come late.
    parts = max(1, min(2 * helpers.threads, count, nbytes // least))
    ends = [count * part // parts for part in range(parts + 1)]
    helpers.share(work, [slice(*each) for each in pairwise(ends)])


def hashes_between(places: Sequence[int]) -> bool:
    """Whether one copy goes on with the checksums of another, where rows begin, end and lie."""
    return native_copy() is not None and not any(place % ALIGNMENT for place in places)


def begin_hashing(
    lengths: Sequence[int], slots: NDArray[np.uint8], count: int
) -> NDArray[np.uint64] | None:
    """States of the checksums of slots that are filled by a copy of each of some rows.

    Args:
        lengths: bytes of the rows, in the order in which a slot holds them.
        slots: `(n_slots, slot_bytes)`, which the copies write.
        count: of the slots that they write.

    Returns:
        States `(count, ...)`; None where only whole slots can be hashed.
    """
    if not hashes_between([slots.ctypes.data, slots.strides[0], *lengths]):
        return None
    nbytes = sum(lengths)
    return begin(count, nbytes) if nbytes >= LEAST_HASHED else None


class HostRows:
    """Copies and hashes rows of equal length.

    Args:
        helpers: share in it; None leaves all to the calling thread.

    Attributes:
        shared_bytes: fewest bytes that a thread copies or hashes of a call.
    """

    shared_bytes = SHARED_BYTES

    def __init__(self, helpers: Sharing | None = None) -> None:
        self._helpers = helpers

    def copy(
        self,
        targets: NDArray[np.uint8],
        sources: NDArray[np.uint8],
        target_ids: NDArray[np.int64],
        source_ids: NDArray[np.int64],
        *,
        checksum: bool,
        states: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.uint64]:
        """Copy rows. What is hashed is what was written, also where a source changes meanwhile.

        Args:
            targets, sources: rows `(rows, nbytes)`, as many as there are of each; a row lies in one
                piece.
            target_ids, source_ids: which row goes where `(n,)`.
            checksum: whether the rows are hashed.
            states: of `begin_hashing` `(n, ...)`, with which hashing goes on.

        Returns:
            Checksums `(n,)` of the rows, or of all rows that were hashed with the states; zeros
            where none are asked for.

        Raises:
            IndexError: a row that does not exist; nothing was copied.
            ValueError: states that are not for such rows; nothing was copied.
        """
        nbytes = targets.shape[1]
        to = _addresses(targets, target_ids)
        from_ = _addresses(sources, source_ids)
        native = self._native(nbytes, checksum, states, to)
        if native is not None:
            held = begin(len(to), nbytes) if states is None else states
            run = native.copying(to, from_, np.array([nbytes]), held, checksum=checksum)
            in_parts(self._helpers, len(to), len(to) * nbytes, run, self.shared_bytes)
            return checksums(held) if checksum else np.zeros(len(to), np.uint64)
        sums = np.zeros(len(to), np.uint64)

        def copy(some: slice) -> None:
            pairs = zip(target_ids[some].tolist(), source_ids[some].tolist(), strict=True)
            for at, (target, source) in enumerate(pairs, some.start):
                targets[target] = sources[source]
                if checksum:
                    sums[at] = xxhash.xxh3_64_intdigest(targets[target].data)

        in_parts(self._helpers, len(to), len(to) * nbytes, copy, self.shared_bytes)
        return sums

    def hash(
        self,
        rows: NDArray[np.uint8],
        ids: NDArray[np.int64],
        states: NDArray[np.uint64] | None = None,
    ) -> NDArray[np.uint64]:
        """Checksums of rows that are not copied; arguments and errors as `copy`."""
        nbytes = rows.shape[1]
        at = _addresses(rows, ids)
        native = self._native(nbytes, True, states)
        if native is not None:
            held = begin(len(at), nbytes) if states is None else states
            run = native.hashing(at, np.array([nbytes]), held)
            in_parts(self._helpers, len(at), len(at) * nbytes, run, self.shared_bytes)
            return checksums(held)
        sums = np.zeros(len(at), np.uint64)

        def hash_rows(some: slice) -> None:
            found = [xxhash.xxh3_64_intdigest(rows[each].data) for each in ids[some].tolist()]
            sums[some] = found

        in_parts(self._helpers, len(at), len(at) * nbytes, hash_rows, self.shared_bytes)
        return sums

    @staticmethod
    def _native(
        nbytes: int,
        checksum: bool,
        states: NDArray[np.uint64] | None,
        targets: NDArray[np.int64] | None = None,
    ) -> NativeCopy | None:
        """Machine code for such rows; None where there is none."""
        found = native_copy()
        if (
            found is not None
            and not nbytes % ALIGNMENT
            and (nbytes >= LEAST_HASHED or not checksum or states is not None)
            and (targets is None or not (targets % ALIGNMENT).any())
        ):
            return found
        if states is not None:
            raise ValueError("states of checksums, for rows that `begin_hashing` was not told of")
        return None


def _addresses(rows: NDArray[np.uint8], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """The address of each of some rows `(n, 1)`."""
    # Outside of numpy, a row that does not exist is another's memory.
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(rows):
        raise IndexError(f"ids from {ids.min()} to {ids.max()}, of {len(rows)}")
    return rows.ctypes.data + ids[:, None] * rows.strides[0]
