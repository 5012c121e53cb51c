# SPDX-License-Identifier: Apache-2.0
"""`OmniConnector`, which passes whole objects under keys.

A subclass implements `store_object`, `load_object`, `drop_objects` and `close`. What users call
(`put`, `get`, `get_with_deadline`, their forms for asyncio, `cleanup`, `health`) is implemented
here, on top of those.
"""

import asyncio
import functools
import hashlib
import logging
import math
import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from omni_connector.errors import (
    ConfigError,
    IncompatiblePeerError,
    MissingDependencyError,
    OmniError,
    PeerRefusedError,
    TransportError,
)
from omni_connector.objects import codec
from omni_connector.objects.waits import FIRST_PAUSE_S, LAST_PAUSE_S, Waits, on_a_thread
from omni_connector.runtime.backoff import Backoff
from omni_connector.transports.base import Service

logger = logging.getLogger(__name__)


class ConnectorClosedError(TransportError):
    """The connector is closed, or is that of the parent of this forked process."""


LASTING_ERRORS: Final = (
    ConfigError,
    ConnectorClosedError,
    IncompatiblePeerError,
    MissingDependencyError,
    PeerRefusedError,
)
"""Errors that are the same at the next try: they end a wait for an object at once."""

_Object = TypeVar("_Object")


def check_times(ttl_s: float, *timeouts: float) -> None:
    """Raise ValueError unless these are a time to live, and seconds to wait."""
    if math.isnan(ttl_s):
        raise ValueError("buffer_ttl_seconds must be a number, not nan")
    if not all(0 < each < math.inf for each in timeouts):
        raise ValueError("timeouts must be positive, and not infinite")


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The name of an object: the stages it travels between, and the caller's key."""

    from_stage: str
    to_stage: str
    key: str

    @property
    def digest(self) -> bytes:
        """A digest of 32 bytes, of any key whatever its length and characters."""
        names = self.from_stage, self.to_stage, self.key
        parts = (name.encode("utf-8", "surrogatepass") for name in names)
        return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()

    def belongs_to(self, request_id: str) -> bool:
        """Whether this is the key of a request: the id itself, or one of the two formats of KV.

        >>> ObjectKey("0", "1", "omni_0_to_1_kv_cache_user_1").belongs_to("user_1")
        True
        >>> ObjectKey("0", "1", "user_1_0_0_2_3").belongs_to("user_1")
        True
        >>> ObjectKey("0", "1", "omni_0_to_1_kv_cache_user_1_2").belongs_to("user_1")
        False

        An id may contain any characters. So it ends where the format says: in
        `omni_{from}_to_{to}_kv_cache_{id}` with the key, and in
        `{id}_{from}_0_{sender's rank}_{receiver's rank}` where the last four fields begin.
        """
        if not request_id or request_id not in self.key:
            return False
        return request_id in (self.key, self._id_in_format())

    def _id_in_format(self) -> str | None:
        prefix = f"omni_{self.from_stage}_to_{self.to_stage}_kv_cache_"
        if self.key.startswith(prefix):
            return self.key.removeprefix(prefix)
        ranks = rf"(.+)_{re.escape(self.from_stage)}_0_[0-9]+_[0-9]+"
        found = re.fullmatch(ranks, self.key, flags=re.DOTALL)
        return None if found is None else found[1]

    def __str__(self) -> str:
        key = self.key if len(self.key) <= 80 else f"{self.key[:77]}..."
        return f"{key!r} from stage {self.from_stage} to {self.to_stage}"


def objects_of(name: str, objects: Iterable[tuple[_Object, ObjectKey]]) -> list[_Object]:
    """Those of the objects that `cleanup` frees for a name.

    >>> names = "r", "omni_0_to_1_kv_cache_r", "omni_0_to_1_kv_cache_r2"
    >>> keys = [ObjectKey("0", "1", each) for each in names]
    >>> [objects_of(name, enumerate(keys)) for name in ("r", "omni_0_to_1_kv_cache_r", "r2")]
    [[0], [1], [2]]

    Args:
        name: a whole key; the objects that were put under it are meant, and no others. Where
            there are none, the id of a request. Nothing is meant by "".
        objects: each with its key.
    """
    known = list(objects) if name else []
    exact = [each for each, key in known if key.key == name]
    return exact or [each for each, key in known if key.belongs_to(name)]


class OmniConnector(Service):
    """Passes objects. All methods may be called from any thread.

    Attributes:
        supports_raw_data: whether `put` sends a tensor straight from its device, not through the
            host's memory.
        is_store: whether objects outlive the process that put them.
        object_timeout: seconds that one `get` waits for its peers, at most.
        consumes: whether an object that was got here is gone for everybody, as vLLM-Omni's stages
            expect. Set it before the first `get`.
    """

    supports_raw_data: bool = False
    is_store: bool = False
    consumes: bool = False
    object_timeout: float = 5.0

    @abstractmethod
    def store_object(self, key: ObjectKey, parts: Sequence[memoryview]) -> dict[str, Any]:
        """Keep the concatenated parts under a key, in place of what was there.

        Returns:
            Metadata with which `load_object` finds the object faster: msgpack builtins, a few
            hundred bytes.

        Raises:
            ArenaFullError: there is no room.
            TransportError: the connector is closed, or the store fails.
        """

    @abstractmethod
    def load_object(
        self, key: ObjectKey, metadata: Mapping[str, Any] | None, *, timeout: float
    ) -> memoryview | None:
        """The verified bytes under a key, in memory of their own, aligned to 64 bytes or more.

        None where nobody has the object (yet, or any more); the newest where several have one.

        Args:
            key: what to look for.
            metadata: what `store_object` returned, if it is known here; not trusted.
            timeout: seconds for peers to answer.

        Raises:
            TransportError, IntegrityError, ProtocolError: the object exists, but reading it failed.
        """

    @abstractmethod
    def drop_objects(self, request_id: str) -> int:
        """Free what was stored here for a key or request (`objects_of`); returns how many."""

    def put(
        self, from_stage: str | int, to_stage: str | int, put_key: str, data: object
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """Make an object available to another stage, in place of one put under the key before.

        It stays until `cleanup`, `close` or the end of this process. Where room is limited, a
        later `put` that finds none evicts objects that were got, before any others.

        Args:
            from_stage: the stage that sends.
            to_stage: the stage that will get it.
            put_key: any string.
            data: bytes, bytearray or memoryview, which arrive as bytes; `codec.Pieces`; or
                torch tensors, numpy arrays, None, bool, int, float, str, bytes, and lists,
                tuples and dicts of these (`codec` says how they arrive). It must not change
                until `put` returns.

        Returns:
            Whether it worked, the size in bytes, and metadata for `get` (None on failure). The
            log says why a `put` failed.

        Raises:
            TypeError: `data` contains something else; the message says where.
        """
        key = ObjectKey(str(from_stage), str(to_stage), put_key)
        parts = codec.encode(data)
        size = codec.size_of(parts)
        try:
            metadata = self.store_object(key, parts)
        except (OmniError, OSError) as error:  # descriptors, for one, may run out anywhere
            logger.warning("put of %s (%d bytes) failed: %s", key, size, error)
            return False, 0, None
        return True, size, metadata

    def get(
        self,
        from_stage: str | int,
        to_stage: str | int,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        timeout: float = math.inf,
    ) -> tuple[Any, int] | None:
        """Get an object that a stage has put; does not wait until it is put.

        Args:
            from_stage: the stage that sent it.
            to_stage: the stage it was sent to.
            get_key: the key it was put under.
            metadata: what `put` returned, if it is known here.
            timeout: seconds for peers to answer, if fewer than `object_timeout`. A store, whose
                answer is the object itself, always has that.

        Returns:
            The object and its size in bytes. None where it was not put (yet), its sender is gone,
            or reading it failed, which the log explains. Its tensors lie in one buffer, which is
            freed with the last of them.

        Raises:
            ValueError: `timeout` is nan.
        """
        with suppress(*LASTING_ERRORS):  # `_get` has logged it
            return self.get_or_raise(from_stage, to_stage, get_key, metadata, timeout=timeout)
        return None

    def get_or_raise(
        self,
        from_stage: str | int,
        to_stage: str | int,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        timeout: float = math.inf,
    ) -> tuple[Any, int] | None:
        """As `get`, for callers that try again: None is returned where that may help.

        Raises:
            ConfigError, IncompatiblePeerError, MissingDependencyError, PeerRefusedError,
            TransportError (the connector is closed): each further try would fail, too.
            ValueError: `timeout` is nan.
        """
        if math.isnan(timeout):
            raise ValueError("timeout must be a number of seconds, not nan")
        if self.is_store:
            timeout = math.inf
        return self._get(ObjectKey(str(from_stage), str(to_stage), get_key), metadata, timeout)

    def get_with_deadline(
        self,
        from_stage: str | int,
        to_stage: str | int,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        deadline: float,
    ) -> tuple[Any, int] | None:
        """Wait for an object until a deadline; asks every 1 ms at first, every 50 ms later.

        Args:
            from_stage, to_stage, get_key, metadata: as of `get`.
            deadline: on the clock of `time.monotonic()`. Reading an object that was found in time
                may take longer.

        Returns:
            As `get`. None at the deadline, once `abandon_get` is called with this key, or at once
            where each further try would fail, too (`get_or_raise`).

        Raises:
            ValueError: `deadline` is nan or infinite.
        """
        _check_deadline(deadline)
        key = ObjectKey(str(from_stage), str(to_stage), get_key)
        pauses = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S)
        with suppress(*LASTING_ERRORS), self._waits.begin(get_key) as abandoned:
            while (left := deadline - time.monotonic()) > 0 and not abandoned.is_set():
                found = self._get(key, metadata, left)
                left = deadline - time.monotonic()
                if found is not None or left <= 0:
                    return found
                abandoned.wait(min(pauses.failed(), left))
        return None

    def abandon_get(self, get_key: str) -> None:
        """End the waits for this key that are under way in this process; they return None.

        An object that is being read is read to its end.
        """
        self._waits.abandon(get_key)

    def reap_consumed(self) -> None:
        """Free the objects that receivers have got, which are else kept while there is room.

        Where objects lie in a store, it does not tell who has got them, and this does nothing.
        """

    async def put_async(
        self, from_stage: str | int, to_stage: str | int, put_key: str, data: object
    ) -> tuple[bool, int, dict[str, Any] | None]:
        """`put` from asyncio: it copies on a thread of its own, and the loop runs on.

        A task that is cancelled meanwhile leaves the `put` to end, so `data` must not change then
        either.
        """
        return await on_a_thread(functools.partial(self.put, from_stage, to_stage, put_key, data))

    async def get_async(
        self,
        from_stage: str | int,
        to_stage: str | int,
        get_key: str,
        metadata: Mapping[str, Any] | None = None,
        *,
        deadline: float | None = None,
    ) -> tuple[Any, int] | None:
        """`get` from asyncio, or with a deadline `get_with_deadline`.

        The loop runs on meanwhile, and no thread is taken while the object is not there yet.

        Raises:
            ValueError: `deadline` is nan or infinite.
        """
        if deadline is None:
            return await on_a_thread(
                functools.partial(self.get, from_stage, to_stage, get_key, metadata)
            )
        _check_deadline(deadline)
        key = ObjectKey(str(from_stage), str(to_stage), get_key)
        pauses = Backoff(FIRST_PAUSE_S, LAST_PAUSE_S)
        with suppress(*LASTING_ERRORS), self._waits.begin(get_key) as abandoned:
            while (left := deadline - time.monotonic()) > 0 and not abandoned.is_set():
                found = await on_a_thread(functools.partial(self._get, key, metadata, left))
                left = deadline - time.monotonic()
                if found is not None or left <= 0:
                    return found
                await asyncio.sleep(min(pauses.failed(), left))
        return None

    def cleanup(self, request_id: str) -> None:
        """Free what was put here under a key, or under keys of a request (`objects_of`).

        Args:
            request_id: the whole key that was put. If nothing was put under it, the id of a request
                whose keys have one of the two formats of KV.
        """
        self.drop_objects(request_id)

    @property
    def _waits(self) -> Waits:
        # Subclasses need not call an `__init__` of this class; `setdefault` is atomic.
        found: Waits = self.__dict__.setdefault("_waits_by_key", Waits())
        return found

    def _get(
        self, key: ObjectKey, metadata: Mapping[str, Any] | None, timeout: float
    ) -> tuple[Any, int] | None:
        try:
            content = self.load_object(key, metadata, timeout=min(timeout, self.object_timeout))
            return None if content is None else codec.decode(content)
        except (OmniError, OSError) as error:
            # Of a peer that refuses, the connector has warned once.
            level = logging.DEBUG if isinstance(error, PeerRefusedError) else logging.WARNING
            logger.log(level, "get of %s failed: %s", key, error)
            if isinstance(error, LASTING_ERRORS):
                raise
            return None


def _check_deadline(deadline: float) -> None:
    if not math.isfinite(deadline):
        raise ValueError(f"deadline must be a time of time.monotonic(), not {deadline}")
