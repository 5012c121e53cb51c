# SPDX-License-Identifier: Apache-2.0
"""`MooncakeStoreConnector`: whole objects in a Mooncake Store, where they outlive their sender.

An object has a *manifest* under a name that is derived from its key. The fragments of a larger
object have names that no other version of it has, and the manifest says which fragments there are
and what their checksum is. The manifest is written last and in one go. So a reader gets the old
version or the new one, whole, or finds that it got neither.

Mooncake never overwrites an entry that is put, but replaces one that is "upserted", as manifests
are.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.buffers import Buffers
from omni_connector.errors import (
    ArenaFullError,
    ChecksumError,
    IntegrityError,
    OmniError,
    TransportError,
)
from omni_connector.net.forks import forget_in_child
from omni_connector.objects import codec
from omni_connector.objects.base import (
    ConnectorClosedError,
    ObjectKey,
    OmniConnector,
    objects_of,
)
from omni_connector.objects.manifest import (
    CONTENT_AT,
    FRAGMENT_BYTES,
    MANIFEST_BYTES,
    Version,
    manifest_name,
)
from omni_connector.runtime.bounded import BoundedMap
from omni_connector.transports.mooncake.client import (
    MISSING,
    NO_ROOM,
    OK,
    PASSING,
    ClientSettings,
    StoreClient,
    name_of,
)
from omni_connector.transports.mooncake.library import evicted_last
from omni_connector.transports.mooncake.memory import Staging, addresses

logger = logging.getLogger(__name__)

# Most tries to read an object whose manifest or fragments are replaced meanwhile.
_ATTEMPTS: Final = 4

# Calls for fragments that are under way at a time: one arrives while the one before is checked.
_WINDOW: Final = 2

# Fragments that one call reads.
_GROUP_FRAGMENTS: Final = 4

# Seconds between two tries.
_RETRY_S: Final = 0.005

# Longest wait for a manifest that is being written, in seconds.
_NOT_READY_S: Final = 0.25

# Bytes that are copied at a time. They are still in the processor's cache for their checksum.
_CACHED_BYTES: Final = 256 << 10
# Objects that are remembered for `cleanup`. Older ones are left to Mooncake's eviction.
_MAX_REMEMBERED: Final = 1 << 16


class MooncakeStoreConnector(OmniConnector):
    """Objects in a Mooncake Store; it exports no arenas.

    Connectors of one process with the same settings share one client of Mooncake.

    Args:
        master: `host:port` of Mooncake's master.
        metadata_server: where Mooncake's clients find each other; by default they ask each other.
        host: address of this machine that other clients reach; by default the one towards the
            master.
        protocol: `tcp` or `rdma`.
        device: RDMA devices, comma separated.
        segment_gib: memory that this process lends to the store, for the objects of all clients;
            what lies in it goes with this process. 0 for none.
        buffer_mib: memory of the staging buffers that are kept for the next objects.
        namespace: connectors of one namespace find each other's objects.
        object_timeout: seconds that a `put`, a `get` or the construction takes at most.

    Raises:
        MissingDependencyError: Mooncake is not installed.
        TransportError: the master does not answer in time.
        ValueError: an argument is out of range.
    """

    transport = "mooncake_store"
    is_store = True
    _why_closed = "the connector is closed"

    def __init__(
        self,
        *,
        master: str = "127.0.0.1:50051",
        metadata_server: str = "P2PHANDSHAKE",
        host: str | None = None,
        protocol: Literal["tcp", "rdma"] = "tcp",
        device: str = "",
        segment_gib: float = 0.25,
        buffer_mib: float = 64.0,
        namespace: str = "default",
        object_timeout: float = 10.0,
    ) -> None:
        numbers = (object_timeout, segment_gib, buffer_mib)
        if not (all(map(math.isfinite, numbers)) and min(numbers) >= 0 and object_timeout > 0):
            raise ValueError("object_timeout must be positive, segment_gib and buffer_mib >= 0")
        settings = ClientSettings(
            master=master,
            metadata_server=metadata_server,
            protocol=protocol,
            device=device,
            host=host,
            segment_bytes=int(segment_gib * (1 << 30)),
        )
        self._prefix = f"{namespace}/objects"
        self.object_timeout = object_timeout
        self._client = StoreClient.open(settings)
        try:
            self._client.wait(object_timeout)
            self._pinned = evicted_last()
        except BaseException:
            self._client.close()
            raise
        self._staging = Staging(self._client, int(buffer_mib * (1 << 20)) + 4 * MANIFEST_BYTES)
        self._buffers = Buffers()
        self._lock = threading.Lock()
        self._closed = False
        self._stored: BoundedMap[bytes, tuple[ObjectKey, Version]]
        self._stored = BoundedMap(_MAX_REMEMBERED)
        forget_in_child(self, MooncakeStoreConnector._abandon)

    def _abandon(self) -> None:
        # In a process that was forked: Mooncake has no threads there, and objects are the parent's.
        self._lock = threading.Lock()
        self._stored = BoundedMap(_MAX_REMEMBERED)
        self._closed = True
        self._why_closed = "the connector is the parent's: a forked process makes its own"

    def store_object(self, key: ObjectKey, parts: Sequence[memoryview]) -> dict[str, Any]:
        self._check_open()
        deadline = time.monotonic() + self.object_timeout
        length = sum(part.nbytes for part in parts)
        digest = key.digest
        version = Version.new(digest, length)
        self._client.turns.take(digest, deadline)
        manifest = None
        try:
            if not version.inline:
                checksum = self._store_fragments(version, parts, deadline)
                version = msgspec.structs.replace(version, checksum=checksum)
            version, memory, manifest = self._start_manifest(version, parts, deadline)
            self._check(self._client.codes(manifest, deadline), [key])
        except BaseException:
            self._remove(version.fragment_names(self._prefix))
            raise
        finally:
            if manifest is None:
                self._client.turns.end(digest)
            else:
                # A manifest that comes late must not replace that of a later put.
                manifest.add_done_callback(lambda _: self._client.turns.end(digest))
                self._staging.settle(memory, manifest)
        self._remember(key, version)
        return {"transport": self.transport, "length": length}

    def load_object(
        self, key: ObjectKey, metadata: Mapping[str, Any] | None, *, timeout: float
    ) -> memoryview | None:
        self._check_open()
        deadline = time.monotonic() + timeout
        failed: Version | None = None
        problem: OmniError | None = None
        for _ in range(_ATTEMPTS):
            try:
                found = self._load_manifest(key.digest, deadline)
            except IntegrityError as error:
                # The manifest may have been replaced while it was read.
                problem = error
                time.sleep(_RETRY_S)
                continue
            if found is None:
                return None
            version, content = found
            if content is not None:
                return self._got(version, content, deadline)
            if version == failed:
                break
            problem = None
            try:
                loaded = self._load_fragments(version, deadline)
            except IntegrityError as error:
                problem, loaded = error, None
            if loaded is not None:
                return self._got(version, loaded, deadline)
            failed = version
        if problem is not None:
            raise problem
        return None

    def drop_objects(self, request_id: str) -> int:
        with self._lock:
            dropped = objects_of(
                request_id,
                (((digest, version), key) for digest, (key, version) in self._stored.items()),
            )
            for digest, _ in dropped:
                del self._stored[digest]
        self._drop([version for _, version in dropped], time.monotonic() + self.object_timeout)
        return len(dropped)

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._staging.keep_spare(0)
        self._buffers.close()
        self._client.close()

    def details(self) -> dict[str, Any]:
        with self._lock:
            found: dict[str, Any] = {"objects": len(self._stored)}
            found["master"] = self._client.settings.master
            if self._closed:
                return found | {"status": "closed"}
        try:
            self._client.check()
        except TransportError as error:
            found["status"] = f"unhealthy: {error}"
        return found

    def _got(self, version: Version, content: NDArray[np.uint8], deadline: float) -> memoryview:
        if self.consumes:
            self._drop([version], deadline)
        return content.data

    def _drop(self, versions: Sequence[Version], deadline: float) -> None:
        """Remove versions of objects; newer ones, of whatever sender, stay."""
        names: list[str] = []
        try:
            for version in versions:
                names += version.fragment_names(self._prefix)
                found = self._load_manifest(version.digest, deadline)
                if found is not None and found[0] == version:
                    names.append(manifest_name(self._prefix, version.digest))
        except OmniError as error:
            logger.warning("Objects are left to Mooncake's eviction: %s", error)
        self._remove(names, deadline)

    def _store_fragments(
        self, version: Version, parts: Sequence[memoryview], deadline: float
    ) -> int:
        names = version.fragment_names(self._prefix)
        sizes = version.fragments
        checksums = np.zeros(len(sizes), np.uint64)
        before: tuple[str, Future[list[int]]] | None = None
        cuts = codec.cut(parts, sizes)
        for index, (name, size, segments) in enumerate(zip(names, sizes, cuts, strict=True)):
            memory = self._staging.take(FRAGMENT_BYTES)
            checksums[index] = _fill(memory[:size], segments)
            place = int(memory.ctypes.data)
            # A fragment is copied while the one before is sent. Sending two at a time is slower.
            if before is not None:
                try:
                    self._check(self._client.codes(before[1], deadline), [before[0]])
                except BaseException:
                    self._staging.give_back(memory)
                    raise

            def call(store: Any, name: str = name, place: int = place, size: int = size) -> Any:
                return store.batch_put_from([name], [place], [size], self._pinned)

            before = name, self._start(memory, call)
        if before is not None:
            self._check(self._client.codes(before[1], deadline), [before[0]])
        return codec.checksum_of(version.length, checksums)

    def _start_manifest(
        self, version: Version, parts: Sequence[memoryview], deadline: float
    ) -> tuple[Version, NDArray[np.uint8], "Future[list[int]]"]:
        memory = self._staging.take(MANIFEST_BYTES)
        end = CONTENT_AT
        if version.inline:
            end += version.length
            checksum = _fill(memory[CONTENT_AT:end], parts)
            version = msgspec.structs.replace(version, checksum=checksum)
        memory.data[:CONTENT_AT] = version.encode()
        name = [manifest_name(self._prefix, version.digest)]
        size = [end]
        place = addresses(memory, [0])

        def call(store: Any) -> list[int]:
            return _until(
                deadline, lambda: store.batch_upsert_from(name, place, size, self._pinned)
            )

        return version, memory, self._staging.start(memory, call)

    def _load_manifest(
        self, digest: bytes, deadline: float
    ) -> tuple[Version, NDArray[np.uint8] | None] | None:
        memory = self._staging.take(MANIFEST_BYTES)
        name = [manifest_name(self._prefix, digest)]
        place = addresses(memory, [0])
        ready = min(deadline, time.monotonic() + _NOT_READY_S)

        def call(store: Any) -> list[int]:
            return _until(ready, lambda: store.batch_get_into(name, place, [MANIFEST_BYTES]))

        started = self._staging.start(memory, call)
        try:
            (size,) = self._client.codes(started, deadline)
            if size == MISSING or size in PASSING:
                return None
            if size < 0:
                raise TransportError(f"Mooncake cannot read {name[0]}: {name_of(size)}")
            version = Version.decode(memory[:size], digest)
            if not version.inline:
                return version, None
            content = self._buffers.take(version.length)
            if _fill(content, [memory[CONTENT_AT:size].data]) != version.checksum:
                raise ChecksumError("an object has other bytes than were put")
            return version, content
        finally:
            self._staging.settle(memory, started)

    def _load_fragments(self, version: Version, deadline: float) -> NDArray[np.uint8] | None:
        names, sizes = version.fragment_names(self._prefix), version.fragments
        self._staging.check()
        content = self._buffers.take(version.length)
        self._client.register(content)
        checksums = np.zeros(len(sizes), np.uint64)
        groups = [
            range(start, min(start + _GROUP_FRAGMENTS, len(sizes)))
            for start in range(0, len(sizes), _GROUP_FRAGMENTS)
        ]
        started: list[Future[list[int]]] = []

        def start(group: range) -> None:
            asked, wanted = [names[i] for i in group], [sizes[i] for i in group]
            places = addresses(content, [i * version.fragment_bytes for i in group])
            started.append(
                self._client.start(lambda store: store.batch_get_into(asked, places, wanted))
            )

        try:
            for at, group in enumerate(groups):
                for following in groups[len(started) : at + _WINDOW]:
                    start(following)
                codes = self._client.codes(started[at], deadline)
                for i, code in zip(group, codes, strict=True):
                    if code == MISSING:
                        return None
                    if code < 0:
                        raise TransportError(f"Mooncake cannot read {names[i]}: {name_of(code)}")
                    if code != sizes[i]:
                        raise IntegrityError(f"fragment {i} has {code} bytes, not {sizes[i]}")
                    fragment = content[i * version.fragment_bytes :][: sizes[i]]
                    checksums[i] = xxhash.xxh3_64_intdigest(fragment.data)
            if codec.checksum_of(version.length, checksums) != version.checksum:
                raise ChecksumError("an object has other bytes than were put")
            return content
        finally:
            self._staging.retire(content, started)

    def _start(self, memory: NDArray[np.uint8], call: Any) -> "Future[list[int]]":
        started = self._staging.start(memory, call)
        self._staging.settle(memory, started)
        return started

    def _check(self, codes: list[int], names: Sequence[object]) -> None:
        for code, name in zip(codes, names, strict=True):
            if code == NO_ROOM:
                raise ArenaFullError(
                    f"Mooncake has no room for {name}: {name_of(code)}; lend it more (segment_gib)"
                )
            if code != OK:
                raise TransportError(f"Mooncake does not take {name}: {name_of(code)}")

    def _remember(self, key: ObjectKey, version: Version) -> None:
        with self._lock:
            before = self._stored.get(version.digest)
            self._stored[version.digest] = key, version
        if before is not None:
            self._remove(before[1].fragment_names(self._prefix))

    def _remove(self, names: list[str], deadline: float | None = None) -> None:
        # Best effort: entries that stay belong to no manifest, and are evicted some day.
        if not names:
            return
        try:
            started = self._client.start(lambda store: store.batch_remove(names, True))
            if deadline is not None:
                codes = self._client.codes(started, deadline)
                left = [name_of(code) for code in codes if code not in (OK, MISSING)]
                if left:
                    logger.warning("Mooncake does not remove %d entries: %s", len(left), left[0])
        except OmniError as error:
            logger.debug("%d entries are left to Mooncake's eviction: %s", len(names), error)

    def _check_open(self) -> None:
        if self._closed:
            raise ConnectorClosedError(self._why_closed)


def _until(deadline: float, call: Callable[[], list[int]]) -> list[int]:
    """The codes of a call for one name, made again until it ends otherwise than in passing."""
    while (codes := call())[0] in PASSING and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return codes


def _fill(room: NDArray[np.uint8], segments: Iterable[memoryview | NDArray[np.uint8]]) -> int:
    """Copy segments, one after the other; returns their checksum."""
    checksum = xxhash.xxh3_64()
    target = room.data
    at = 0
    for segment in segments:
        for start in range(0, segment.nbytes, _CACHED_BYTES):
            part = segment[start : start + _CACHED_BYTES]
            end = at + part.nbytes
            target[at:end] = part  # type: ignore[assignment]
            checksum.update(target[at:end])
            at = end
    return checksum.intdigest()
