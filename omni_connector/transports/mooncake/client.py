# SPDX-License-Identifier: Apache-2.0
"""A client of Mooncake Store whose calls end by a deadline, whatever Mooncake does.

Mooncake waits up to 30 s for its master, and holds the GIL for that while a client is set up. So we
connect to the master first, and lower Mooncake's own limits. Every call runs on a thread that may
be left behind. When the master does not answer, calls fail at once until it answers a question that
is asked in the background.
"""

import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_connector.arena.nodes import copy_cores, threads_on
from omni_connector.errors import OmniError, PeerUnreachableError, TransportError
from omni_connector.net.forks import forget_in_child
from omni_connector.net.peers import parse_host
from omni_connector.runtime.backoff import Backoff
from omni_connector.runtime.blocking_calls import CallThreads
from omni_connector.transports.mooncake.library import (
    family_of,
    never_destroy,
    require_package,
    store_module,
)

logger = logging.getLogger("vllm.omni_connector.transports")

# Mooncake's return codes.
OK: Final = 0
NO_ROOM: Final = -200
NOT_READY: Final = -703
MISSING: Final = -704
TRANSFER_FAILED: Final = -800

# Codes for what passes: somebody else is writing or moving the object. Another try may succeed.
PASSING: Final = frozenset({-601, NOT_READY, -706, -707, -708, -714})

_CODES: Final = {
    -1: "INTERNAL_ERROR",
    NO_ROOM: "NO_AVAILABLE_HANDLE",
    -400: "INVALID_KEY",
    -600: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    NOT_READY: "REPLICA_IS_NOT_READY",
    MISSING: "OBJECT_NOT_FOUND",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    -707: "LEASE_EXPIRED",
    -708: "OBJECT_HAS_REPLICATION_TASK",
    -714: "OBJECT_REPLICA_BUSY",
    TRANSFER_FAILED: "TRANSFER_FAIL",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
}
# Codes of a call that the master has not answered.
_NO_MASTER: Final = frozenset({-900, -901})

# Most calls at a time, each on a thread of its own. Further ones fail at once. It bounds the
# threads that are left behind in calls that hang.
_MAX_CALLS: Final = 32

# Shortest wait for a call, in seconds, after which the master counts as away. A shorter one tells
# nothing of the master.
_HANGS_S: Final = 0.1

# Longest wait to connect to the master, in seconds.
_CONNECT_S: Final = 2.0

# Longest wait of `close` for Mooncake's client, in seconds. After that it goes with the process.
_CLOSE_S: Final = 3.0

# Seconds until a master that is away is asked again: at first, and at most.
_FIRST_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 30.0

# Read by Mooncake when a client is set up; the user's own environment comes first.
_LIMITS: Final = {
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}


def name_of(code: int) -> str:
    """Mooncake's name of a return code."""
    return f"{_CODES.get(code, 'unknown code')} ({code})"


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a client of the store is set up.

    Attributes:
        master: `host:port` of the master.
        metadata_server: where clients find each other; by default they ask each other.
        protocol: `tcp` or `rdma`.
        device: RDMA devices, comma separated.
        host: address of this machine that other clients reach; None takes the one towards the
            master.
        segment_bytes: memory that this process lends to the store.
    """

    master: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device: str = ""
    host: str | None = None
    segment_bytes: int = 0


class StoreClient:
    """One client, which sets itself up in the background. Methods may be called from any thread.

    Raises:
        MissingDependencyError: Mooncake is not installed.
    """

    _shared_lock: ClassVar = threading.Lock()
    _shared: ClassVar[dict[ClientSettings, "StoreClient"]] = {}
    # Whether this process, or the one that it was forked from, has started Mooncake.
    _started: ClassVar = False
    _inherited: ClassVar = False

    @classmethod
    def open(cls, settings: ClientSettings) -> "StoreClient":
        """The client of this process with these settings; each `open` needs a `close`.

        Raises:
            MissingDependencyError: Mooncake is not installed.
            TransportError: this process was forked from one that had used Mooncake.
        """
        if cls._inherited:
            raise TransportError(
                "Mooncake was used before this process was forked, and does not work in it: start "
                "processes with 'spawn', or make the first connector after the fork"
            )
        with cls._shared_lock:
            client = cls._shared.get(settings)
            if client is None:
                client = cls._shared[settings] = cls(settings)
            client._users += 1
        return client

    def __init__(
        self, settings: ClientSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings: Final = settings
        host = settings.host or settings.master.rpartition(":")[0].strip("[]")
        if _is_address(host):
            store_module(family_of(host))
        else:
            require_package()  # the import waits until the name is looked up, in the background
        self._process: Final = os.getpid()
        self._clock = clock
        # A store must not be closed while a call uses it.
        self._threads = CallThreads("omni-mooncake", _MAX_CALLS, self._end)
        self._lock = threading.Lock()
        self._store: Any = None
        self._registered: dict[int, NDArray[np.uint8]] = {}
        self.turns: Final = KeyTurns(clock)
        self._users = 0
        self._closed = False
        self._ended = threading.Event()
        # When the master stopped answering; None while it answers.
        self._away_since: float | None = clock()
        self._told = False
        self._backoff = Backoff(_FIRST_BACKOFF_S, _MAX_BACKOFF_S, clock)
        self._asking = False
        self._changed = threading.Condition(self._lock)
        self._reason = "it was not asked yet"
        forget_in_child(self, StoreClient._abandon)
        self._ask_master()

    def wait(self, timeout: float) -> None:
        """Wait until the master answers.

        Raises:
            PeerUnreachableError: it does not within `timeout` seconds, or not at all.
        """
        deadline = self._clock() + timeout
        with self._lock:
            while self._asking and (left := deadline - self._clock()) > 0:
                self._changed.wait(left)
            if self._away_since is not None:
                raise PeerUnreachableError(self._away())

    def check(self) -> None:
        """Raise if the master does not answer at present; never waits.

        Raises:
            PeerUnreachableError: it does not. It is asked again in the background.
            TransportError: the client is closed.
        """
        with self._lock:
            if self._closed:
                raise TransportError("the connector is closed")
            if self._away_since is None:
                return
            message = self._away()
            due = not self._asking and not self._backoff.active
        if due:
            self._ask_master()
        raise PeerUnreachableError(message)

    def start(self, call: Callable[[Any], list[int]]) -> "Future[list[int]]":
        """Start a call of Mooncake on a thread; `codes` waits for its end.

        Args:
            call: is given Mooncake's store, and returns a code for each key.

        Raises:
            PeerUnreachableError, TransportError: as `check`; or too many calls are under way.
        """
        self.check()
        with self._lock:
            store = self._store
        return self._threads.start(lambda: call(store))

    def codes(self, future: "Future[list[int]]", deadline: float) -> list[int]:
        """The codes that a call has returned.

        Raises:
            PeerUnreachableError: it did not end before the deadline, by the client's clock.
        """
        left = deadline - self._clock()
        try:
            codes = future.result(max(0.0, left))
        except TimeoutError:
            if left >= _HANGS_S:
                self._back_off("a call did not end in time")
            raise PeerUnreachableError(
                f"Mooncake's master at {self.settings.master} did not answer in time"
            ) from None
        lost = [code for code in codes if code in _NO_MASTER]
        if lost:
            self._back_off(name_of(lost[0]))
        return codes

    def call(self, call: Callable[[Any], list[int]], deadline: float) -> list[int]:
        """`start` and `codes`."""
        return self.codes(self.start(call), deadline)

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Let Mooncake use this memory, as soon as the client is set up, until `unregister`."""
        with self._lock:
            self._registered[int(memory.ctypes.data)] = memory
            store = self._store
        if store is not None:
            try:
                _register(store, memory)
            except BaseException:
                with self._lock:
                    self._registered.pop(int(memory.ctypes.data), None)
                raise

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Undo `register`. Idempotent."""
        address = int(memory.ctypes.data)
        with self._lock:
            known = self._registered.pop(address, None)
            store = self._store
        if known is not None and store is not None:
            code = store.unregister_buffer(address)
            if code != OK:
                logger.warning("Mooncake does not unregister memory: %s", name_of(code))

    def close(self) -> None:
        """Undo one `open`. The last `close` leaves the store, and waits 3 seconds for that.

        Calls that are running end before the store is left, even if that takes longer. In another
        process this does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._shared_lock:
            self._users -= 1
            if self._users > 0:
                return
            if self._shared.get(self.settings) is self:
                del self._shared[self.settings]
        self._leave_store()

    def _abandon(self) -> None:
        # In a process that was forked, in which Mooncake has no threads.
        store, self._store = self._store, None
        if store is not None:
            never_destroy(store)
        self._lock = threading.Lock()
        self._closed = True
        self._registered = {}

    def _leave_store(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._threads.close()
        if not self._ended.wait(_CLOSE_S) and first:
            logger.warning("Mooncake's client did not close within %g s and is left", _CLOSE_S)

    def _end(self) -> None:
        with self._lock:
            store, self._store = self._store, None
        if store is not None:
            code = store.close()
            if code != OK:
                logger.warning("Mooncake's client did not close well: %s", name_of(code))
        self._registered.clear()
        self._ended.set()

    def _away(self) -> str:
        since = self._clock() - (self._away_since or 0.0)
        return (
            f"Mooncake's master at {self.settings.master} does not answer ({since:.1f} s so far): "
            f"{self._reason}"
        )

    def _back_off(self, reason: str) -> None:
        with self._lock:
            if self._away_since is None:
                self._away_since = self._clock()
                self._backoff.worked()  # until now
                self._reason = reason
                self._tell()
        self._ask_master()

    def _tell(self) -> None:
        # Holds the lock. Logs each outage once.
        if not self._told:
            self._told = True
            logger.warning("%s; it is asked again in the background", self._away())

    def _ask_master(self) -> None:
        with self._lock:
            if self._asking or self._closed or self._backoff.active:
                return
            self._asking = True
        try:
            self._threads.start(self._ask)
        except OmniError as error:
            self._answered(str(error))

    def _ask(self) -> None:
        try:
            if self._store is None:
                with threads_on(copy_cores()):
                    self._set_up()
            else:
                _reach(self.settings.master)
                (code,) = self._store.batch_is_exist(["omni-connector/ping"])
                if code < 0:
                    raise PeerUnreachableError(name_of(code))
        except OmniError as error:
            self._answered(str(error))
        except Exception as error:
            logger.exception("Mooncake's client failed in an unexpected way; please report it")
            self._answered(str(error))
        else:
            self._answered(None)

    def _answered(self, reason: str | None) -> None:
        with self._lock:
            self._asking = False
            if reason is None:
                if self._told and self._away_since is not None:
                    logger.info("Mooncake's master at %s answers again", self.settings.master)
                self._away_since = None
                self._told = False
            else:
                self._reason = reason
                self._backoff.failed()
                self._tell()
            self._changed.notify_all()

    def _set_up(self) -> None:
        settings = self.settings
        own = _reach(settings.master)
        for variable, value in _LIMITS.items():
            os.environ.setdefault(variable, value)
        StoreClient._started = True
        host = settings.host or own
        store = store_module(family_of(host)).MooncakeDistributedStore()
        code = store.setup(
            host,
            settings.metadata_server,
            settings.segment_bytes,
            0,
            settings.protocol,
            settings.device,
            settings.master,
        )
        if code != OK:
            raise TransportError(
                f"Mooncake's client does not start with {settings.protocol} (code {code}); its own "
                "log says more"
            )
        with self._lock:
            waiting = list(self._registered.values())
            self._store = store
        for memory in waiting:
            _register(store, memory)


class KeyTurns:
    """Lets one thread at a time work on each name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: set[bytes] = set()
        self._changed = threading.Condition()

    def take(self, name: bytes, deadline: float) -> None:
        """Wait until nobody works on this name; then nobody else does until `end`.

        Raises:
            TransportError: the deadline came first.
        """
        with self._changed:
            while name in self._taken:
                left = deadline - self._clock()
                if left <= 0:
                    raise TransportError("an earlier call for the same key has not ended")
                self._changed.wait(left)
            self._taken.add(name)

    def end(self, name: bytes) -> None:
        """Let the next thread work on this name. Idempotent."""
        with self._changed:
            self._taken.discard(name)
            self._changed.notify_all()


def _in_child() -> None:
    StoreClient._shared_lock = threading.Lock()
    StoreClient._shared = {}
    StoreClient._inherited = StoreClient._started


os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _leave_stores() -> None:
    # A thread that returns from Mooncake after the interpreter's end would crash the process.
    for client in list(StoreClient._shared.values()):
        client._leave_store()


def _register(store: Any, memory: NDArray[np.uint8]) -> None:
    code = store.register_buffer(int(memory.ctypes.data), memory.nbytes)
    if code != OK:
        raise TransportError(f"Mooncake does not register {memory.nbytes} bytes: {name_of(code)}")


def _is_address(host: str) -> bool:
    try:
        return not isinstance(parse_host(host), str)
    except ValueError:
        return False


def _reach(master: str) -> str:
    """Connect to the master; returns the address that we have towards it."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError) as error:
        raise PeerUnreachableError(str(error)) from error
