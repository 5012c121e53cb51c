# SPDX-License-Identifier: Apache-2.0
"""`BlockStore`: KV blocks under keys, shared by the engines of a cluster, best effort.

A failure of the network raises no exception here: an entry that does not arrive in time counts as
missing. What lies under a key is not checked here: entries carry a check of key and bytes.
"""

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.format import PAGE_BYTES
from omni_connector.arena.pool import pages
from omni_connector.config import StoreSettings
from omni_connector.errors import OmniError, PeerUnreachableError
from omni_connector.transports.mooncake.client import OK, ClientSettings, StoreClient, name_of
from omni_connector.transports.mooncake.memory import Staging, addresses

# Most bytes and keys of one call. Larger calls, and several at once, are no faster.
_CALL_BYTES: Final = 16 << 20
_CALL_KEYS: Final = 256

# Most bytes of registered memory that is kept for later calls.
_SPARE_BYTES: Final = 64 << 20

Rows = NDArray[np.uint8]
_Move = Callable[[list[str], Rows, list[int], float], list[bool]]


class BlockStore(ABC):
    """A store of blocks. All methods may be called from any thread, and end by their timeout."""

    @abstractmethod
    def exists(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        """Whether the store holds each key; False where it does not answer in `timeout` seconds."""

    @abstractmethod
    def buffer(self, rows: int, row_bytes: int) -> Rows:
        """Memory to put from and get into: (rows, row_bytes), page aligned, valid until `close`."""

    @abstractmethod
    def put(
        self, keys: Sequence[str], rows: Rows, lengths: Sequence[int], *, timeout: float
    ) -> list[bool]:
        """Store the first bytes of rows under keys; entries that exist already stay.

        A put that does not end in time may store what a row holds later.

        Args:
            keys: one for each row.
            rows: (n, width), in memory from `buffer`. They must not change meanwhile.
            lengths: bytes of each row, at least 1 and at most width.
            timeout: seconds.

        Returns:
            For each key whether the store holds it now, from this put or from before.
        """

    @abstractmethod
    def get(
        self, keys: Sequence[str], rows: Rows, lengths: Sequence[int], *, timeout: float
    ) -> list[bool]:
        """Read entries into rows. See `put` for the arguments.

        Returns:
            For each key whether exactly the bytes that were asked for arrived. If not, the row has
            any content. No row changes after this has returned.
        """

    @abstractmethod
    def discard(self, keys: Sequence[str], *, timeout: float) -> None:
        """Remove entries that hold wrong bytes, so that they can be put again, as far as it works.

        It ends within `timeout` seconds, whatever it has done by then.
        """

    @property
    @abstractmethod
    def failures(self) -> Mapping[str, int]:
        """How many entries could not be asked for, put or got so far, by kind of failure."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the store, in bounded time. Idempotent."""


class MooncakeBlockStore(BlockStore):
    """Blocks in a Mooncake Store, whose master is asked again in the background when it is away.

    Args:
        settings: where the store is.
        lends: bytes of memory that this process lends to the store.

    Raises:
        MissingDependencyError: Mooncake is not installed.
    """

    def __init__(self, settings: StoreSettings, lends: int = 0) -> None:
        self._client = StoreClient.open(
            ClientSettings(
                master=settings.master,
                metadata_server=settings.metadata_server,
                protocol=settings.protocol,
                device=settings.device,
                host=settings.host,
                segment_bytes=lends,
            )
        )
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._closed = False
        self._staging = Staging(self._client, _SPARE_BYTES)
        self._buffer_bytes = _CALL_BYTES + _CALL_KEYS * PAGE_BYTES
        self._buffers: list[Rows] = []

    def wait(self, timeout: float) -> None:
        """Wait until the store can be used.

        Raises:
            PeerUnreachableError: it cannot within `timeout` seconds.
        """
        self._client.wait(timeout)

    @property
    def failures(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._failures)

    def exists(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        asked = list(keys)
        if not asked:
            return []
        try:
            codes = self._client.call(
                lambda store: store.batch_is_exist(asked), time.monotonic() + timeout
            )
        except OmniError as error:
            self._count(_kind(error), len(asked))
            return [False] * len(asked)
        for code in codes:
            if code < 0:
                self._count(name_of(code), 1)
        return [code == 1 for code in codes]

    def buffer(self, rows: int, row_bytes: int) -> Rows:
        stride = in_pages(row_bytes)
        memory = pages(rows * stride)
        self._client.register(memory)
        with self._lock:
            self._buffers.append(memory)
        return memory.reshape(rows, stride)[:, :row_bytes]

    def put(
        self, keys: Sequence[str], rows: Rows, lengths: Sequence[int], *, timeout: float
    ) -> list[bool]:
        return self._in_parts(self._put, keys, rows, lengths, timeout)

    def get(
        self, keys: Sequence[str], rows: Rows, lengths: Sequence[int], *, timeout: float
    ) -> list[bool]:
        return self._in_parts(self._get, keys, rows, lengths, timeout)

    def discard(self, keys: Sequence[str], *, timeout: float) -> None:
        wrong = list(keys)
        with contextlib.suppress(OmniError):
            self._client.call(
                lambda store: store.batch_remove(wrong, True), time.monotonic() + timeout
            )

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._staging.keep_spare(0)
        for memory in self._buffers:
            self._client.unregister(memory)
        self._client.close()

    def _in_parts(
        self, move: _Move, keys: Sequence[str], rows: Rows, lengths: Sequence[int], timeout: float
    ) -> list[bool]:
        check_rows(keys, rows, lengths)
        deadline = time.monotonic() + timeout
        done: list[bool] = []
        try:
            for part in _parts(lengths):
                done += move(list(keys[part]), rows[part], list(lengths[part]), deadline)
        except OmniError as error:
            self._count(_kind(error), len(keys) - len(done))
            done += [False] * (len(keys) - len(done))
        return done

    def _put(self, keys: list[str], rows: Rows, sizes: list[int], deadline: float) -> list[bool]:
        places = addresses(rows, [i * rows.strides[0] for i in range(len(keys))])
        codes = self._client.call(lambda store: store.batch_put_from(keys, places, sizes), deadline)
        for code in codes:
            if code != OK:
                self._count(name_of(code), 1)
        return [code == OK for code in codes]

    def _get(self, keys: list[str], rows: Rows, sizes: list[int], deadline: float) -> list[bool]:
        *offsets, total = itertools.accumulate(map(in_pages, sizes), initial=0)
        memory = self._staging.take(self._buffer_for(total))
        places = addresses(memory, offsets)
        # They arrive in a staging buffer, to which a call that was given up may still write.
        future = self._staging.start(
            memory, lambda store: store.batch_get_into(keys, places, sizes)
        )
        try:
            codes = self._client.codes(future, deadline)
            for row, code, offset, size in zip(rows, codes, offsets, sizes, strict=True):
                if code == size:
                    np.copyto(row[:size], memory[offset : offset + size])
                else:
                    self._count(name_of(code) if code < 0 else "other length", 1)
            return [code == size for code, size in zip(codes, sizes, strict=True)]
        finally:
            self._staging.settle(memory, future)

    def _buffer_for(self, nbytes: int) -> int:
        # Buffers of one size serve all calls. A row that is larger makes them larger for good.
        with self._lock:
            if nbytes > self._buffer_bytes:
                self._buffer_bytes = nbytes
                self._staging.keep_spare(max(_SPARE_BYTES, 2 * nbytes))
            return self._buffer_bytes

    def _count(self, kind: str, number: int) -> None:
        with self._lock:
            self._failures[kind] += number


def _parts(lengths: Sequence[int]) -> Iterator[slice]:
    start = total = 0
    for i, length in enumerate(lengths):
        if i > start and (total + length > _CALL_BYTES or i - start == _CALL_KEYS):
            yield slice(start, i)
            start = i
            total = 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))


def check_rows(keys: Sequence[str], rows: Rows, lengths: Sequence[int]) -> None:
    """Raise ValueError where the arguments of `BlockStore.put` or `get` do not go together."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or not len(rows) == len(keys) == len(lengths):
        raise ValueError(
            f"{len(keys)} keys and {len(lengths)} lengths for rows of {rows.dtype}{rows.shape}"
        )
    if any(not 0 < length <= rows.shape[1] for length in lengths):
        raise ValueError(f"each length must be 1 to {rows.shape[1]}")


def _kind(error: OmniError) -> str:
    return "unreachable" if isinstance(error, PeerUnreachableError) else "refused"


def in_pages(nbytes: int) -> int:
    """`nbytes`, rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
