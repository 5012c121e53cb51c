# SPDX-License-Identifier: Apache-2.0
"""What engines say of themselves in the runtime folder, for `omni-connector top`.

An engine keeps one small file there, in JSON, which it replaces as a whole. As long as the engine
lives, it holds a lock on its file, which the kernel drops with the process: a file that others can
lock is a dead engine's, and whoever finds it removes it. Nobody waits for such a lock.

A reader trusts no file: it reads a bounded number of them and of bytes, checks every type, and
takes all that no terminal should get out of the texts.
"""

import contextlib
import fcntl
import logging
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from omni_connector import __version__
from omni_connector.errors import ConfigError
from omni_connector.net.forks import forget_in_child
from omni_connector.net.keys import ClusterKey
from omni_connector.net.orders import ORDER, Orders, Service, forget_orders, read_orders
from omni_connector.net.runtime import (
    LOOPBACK_KEY,
    loopback_key,
    open_own_file,
    runtime_dir,
    runtime_root,
)
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.metric_names import FAILURE, PEER
from omni_connector.runtime.stats import THREAD_ENDED
from omni_connector.runtime.turns import ended_threads

logger = logging.getLogger("vllm.omni_connector.status")

FORMAT: Final = 1
"""Version of the content. Readers skip files of another one."""

MAX_BYTES: Final = 1 << 20
"""Longest file that is read, in bytes."""

MAX_FILES: Final = 1024
"""Most files of a folder that are read."""

WRITE_S: Final = 0.4
"""Shortest time between two writes, in seconds. The control channel ticks twice a second, and each
tick may write."""

SIGN_OF_LIFE_S: Final = 5.0
"""Seconds after which an engine writes even if nothing has changed."""

# Seconds between two looks for files of dead engines.
_SWEEP_S: Final = 10.0

_NAME: Final = re.compile(r"\.?[0-9a-f]{16}\.status")

# Most tries to open a file that its engine replaces meanwhile.
_LOOKS: Final = 3

_DRAWN_ID: Final = re.compile(r"([0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(.*)")

_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Amount = Annotated[float, Meta(ge=0, le=1e12)]
_Text = Annotated[str, Meta(max_length=512)]
_Counts = Annotated[dict[_Text, _Count], Meta(max_length=1024)]


class Durations(Struct, frozen=True):
    """How often something was timed, and the sum of the seconds that it took."""

    count: _Count = 0
    sum: _Amount = 0.0


class Usage(Struct, frozen=True):
    """An arena and its hand-offs at one moment; all zeros on an engine that hands nothing off.

    Attributes:
        slots_total: slots of each rank's arena.
        slots_in_use: of them, held by hand-offs or being written.
        slots_cached: of them, kept for reuse, and held by nobody.
        leases: hand-offs leased to a peer, each lease counted.
        handoffs_open: hand-offs that have not ended, running prefills included.
        slots_pinned: the pinned ones of the cached slots.
    """

    slots_total: _Count = 0
    slots_in_use: _Count = 0
    slots_cached: _Count = 0
    leases: _Count = 0
    handoffs_open: _Count = 0
    slots_pinned: _Count = 0

    @property
    def slots_free(self) -> int:
        """Slots that hold nothing."""
        return max(0, self.slots_total - self.slots_in_use - self.slots_cached)


class EngineStatus(Struct, frozen=True, kw_only=True):
    """What one engine says of itself. Counts are since its start, of all its ranks.

    Attributes:
        format: of this file; a reader skips others.
        engine_id: by which peers know it.
        role: its `kv_role`.
        model: what peers compare to know that they run the same weights.
        host: name of its host, or of its container.
        container: its container, as `container` names it.
        pid: of the process of its scheduler half, as that process sees it.
        vllm, omni_connector: their versions.
        ranks: how many have an arena, of all its pipeline stages together.
        arena_bytes: of the arenas of all ranks; 0 where it has none.
        pinned_bytes: of all arenas that its ranks read, how much their devices have pinned.
        unpinned_bytes: of the same, how much has memory that they have not pinned.
        loopback_key: whether its ports on loopback have the key of the runtime folder.
        started, written: seconds of Unix time. All else is as of `written` or later.
        usage: as it is now.
        service: its phase, its role, and its requests.
        prompt_tokens: of all prompts that it has begun to compute.
        cached_tokens: the ones whose KV it did not compute, wherever that came from.
        counts: by the names of the metrics.
        failures: by kind.
        peers: arenas of peers that it reads, by `transport:reason`.
        seconds: by the names of the metrics.
    """

    format: int = FORMAT
    engine_id: _Text
    role: _Text
    model: _Text
    host: _Text = ""
    container: _Text = ""
    pid: _Count = 0
    vllm: _Text = ""
    omni_connector: _Text = ""
    ranks: _Count = 1
    arena_bytes: _Count = 0
    pinned_bytes: _Count = 0
    unpinned_bytes: _Count = 0
    loopback_key: bool = False
    started: _Amount = 0.0
    written: _Amount = 0.0
    usage: Usage = Usage()
    service: Service = Service()
    prompt_tokens: _Count = 0
    cached_tokens: _Count = 0
    counts: _Counts = {}
    failures: _Counts = {}
    peers: _Counts = {}
    seconds: Annotated[dict[_Text, Durations], Meta(max_length=1024)] = {}

    @property
    def ended_threads(self) -> list[str]:
        """The names of its threads that an exception has ended."""
        ended = (kind for kind in self.failures if kind.startswith(THREAD_ENDED))
        return sorted(kind.removeprefix(THREAD_ENDED) for kind in ended)


def label(engine_id: str) -> str:
    """A name for an engine that fits a column: ids that vLLM draws are cut, given ones are not.

    `omni-connector explain --engine` takes it, as it is the beginning of the id unless the engine
    is one data-parallel rank of several.

    >>> label("1c9e4f0a-3c56-4f9e-9d2b-6f1a0c7d8e9f_dp1"), label("prefill-a")
    ('1c9e4f0a_dp1', 'prefill-a')
    """
    drawn = _DRAWN_ID.fullmatch(engine_id)
    return engine_id if drawn is None else drawn[1] + drawn[2]


def container() -> str:
    """Which container of the host this process is in: the name of its mount namespace, as the
    containers of a pod have one host name. "" where the kernel tells none."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


def last_part(model: str) -> str:
    """The last part of a model's name or path, as in `Llama-3.1-8B@main`."""
    return model.rstrip("/").rpartition("/")[2] or model


_decoder = msgspec.json.Decoder(EngineStatus)


def plain(text: str) -> str:
    """A text without what steers a terminal or cannot be seen, each such character as `?`."""
    return "".join(each if each.isprintable() else "?" for each in text)


class StatusFile:
    """The file of one engine. It appears with the first `write`.

    A name is never used again, so that a file that was found dead stays dead.

    Args:
        folder: a runtime folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.urandom(8).hex()}.status"
        self._process = os.getpid()
        self._locked: int | None = None
        # The lock would live as long as a process that was forked.
        forget_in_child(self, StatusFile._let_go)

    def write(self, text: bytes) -> None:
        """Replace the content.

        Raises:
            OSError: it could not be written; then the former content stands, if it still can.
        """
        for _ in range(_LOOKS - 1):
            with contextlib.suppress(FileNotFoundError):  # it was swept before it was locked
                self._write(text)
                return
        self._write(text)

    def _write(self, text: bytes) -> None:
        hidden = self._path.with_name(f".{self._path.name}")
        fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.write(fd, text) < len(text):
                raise OSError("it was not written whole")
            os.rename(hidden, self._path)
        except BaseException:
            os.close(fd)
            hidden.unlink(missing_ok=True)
            raise
        self._let_go()
        self._locked = fd

    def orders(self) -> Orders:
        """What this engine is asked to do, by signal files beside its own. Raises nothing."""
        return read_orders(self._path)

    def sweep(self) -> None:
        """Remove the files of dead engines in the same folder."""
        sweep(self._path.parent)

    def close(self) -> None:
        """Remove the file, and what was ordered. Idempotent."""
        if os.getpid() == self._process:  # else it belongs to the parent process
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            forget_orders(self._path)
        self._let_go()

    def _let_go(self) -> None:
        fd, self._locked = self._locked, None
        if fd is not None:
            os.close(fd)


class StatusReport:
    """Keeps the file of an engine up to date.

    `tick` is for the control channel's thread, the other methods for the engine's. The lock between
    them is held by nobody who reads or writes a file.

    Args:
        file: of the engine.
        engine: what does not change, without what this process knows by itself. Its `counts` name
            what is reported even while it is 0.
        usage: what the arena holds now.
        context: clock and locks.
        service: which requests the engine serves now.
        obey: takes what the engine is asked to do, at each tick.
    """

    def __init__(
        self,
        file: StatusFile,
        engine: EngineStatus,
        usage: Callable[[], Usage],
        context: EngineContext,
        service: Callable[[], Service] = Service,
        obey: Callable[[Orders], object] = lambda orders: None,
    ) -> None:
        self._file = file
        self._engine = msgspec.structs.replace(
            engine,
            engine_id=plain(engine.engine_id)[:512],
            model=plain(engine.model)[:512],
            host=plain(socket.gethostname()),
            container=container(),
            pid=os.getpid(),
            omni_connector=__version__,
            started=time.time(),
        )
        self._usage = usage
        self._service = service
        self._obey = obey
        self._clock = context.clock
        self._lock = context.lock()
        self._prompt_tokens = self._cached_tokens = 0
        self._pinned_bytes = self._unpinned_bytes = 0
        self._counts = Counter(engine.counts)
        self._failures: Counter[str] = Counter()
        self._peers: Counter[str] = Counter()
        self._seconds: dict[str, Durations] = {}
        self._told: EngineStatus | None = None
        self._told_at = self._swept_at = -SIGN_OF_LIFE_S - _SWEEP_S
        self._warned = self._closed = False

    def add(self, data: Mapping[str, Mapping[str, Any]]) -> None:
        """Add what was counted: `counts` and `seconds`, as the metrics have them."""
        with self._lock:
            for name, amount in data.get("counts", {}).items():
                if name.startswith(FAILURE):
                    self._failures[name.removeprefix(FAILURE)] += amount
                elif name.startswith(PEER):
                    self._peers[name.removeprefix(PEER)] += amount
                else:
                    self._counts[name] += amount
            for name, values in data.get("seconds", {}).items():
                known = self._seconds.get(name, Durations())
                self._seconds[name] = Durations(known.count + len(values), known.sum + sum(values))

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt that begins to be computed.

        Args:
            tokens: of the prompt.
            cached: tokens whose KV is there already.
        """
        with self._lock:
            self._prompt_tokens += tokens
            self._cached_tokens += min(tokens, cached)

    def pinned(self, pinned: int, unpinned: int) -> None:
        """Set how many bytes of arenas the devices have pinned, and how many they have not."""
        with self._lock:
            self._pinned_bytes = pinned
            self._unpinned_bytes = unpinned

    def tick(self) -> bool:
        """Obey orders, and write what has changed, if the last time is long enough ago. Raises
        nothing.

        Returns:
            Whether something has changed since the last time, or may have.
        """
        if self._closed:
            return False
        self._obey(self._file.orders())
        now = self._clock()
        if now < self._told_at + WRITE_S:
            return True
        written = time.time()  # before the usage is read: a reader compares it with its own news
        status = self._status()
        try:
            if now >= self._swept_at + _SWEEP_S:
                self._swept_at = now
                self._file.sweep()
            changed = status != self._told
            if not changed and now < self._told_at + SIGN_OF_LIFE_S:
                return False
            self._told_at = now
            self._file.write(msgspec.json.encode(msgspec.structs.replace(status, written=written)))
            self._told = status
            self._warned = False
        except (OSError, UnicodeError) as error:
            if not self._warned:
                logger.warning("`omni-connector top` does not show this engine: %s", error)
            self._warned = True
            return True
        return changed

    def current(self) -> EngineStatus:
        """What the file would say now."""
        written = time.time()
        return msgspec.structs.replace(self._status(), written=written)

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._closed = True
        self._file.close()

    def _status(self) -> EngineStatus:
        usage = self._usage()
        service = self._service()
        ended = Counter(THREAD_ENDED + name for name in ended_threads())  # no step counted them yet
        with self._lock:
            return msgspec.structs.replace(
                self._engine,
                usage=usage,
                service=service,
                pinned_bytes=self._pinned_bytes,
                unpinned_bytes=self._unpinned_bytes,
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._cached_tokens,
                counts=dict(self._counts),
                failures=dict(self._failures + ended),
                peers=dict(self._peers),
                seconds=dict(self._seconds),
            )


def read(folder: Path) -> tuple[list[EngineStatus], list[str]]:
    """What the living engines of a runtime folder say, and a remark on each file that says nothing
    sensible. Files of dead engines are removed.

    Raises:
        OSError: the folder cannot be read.
    """
    found, remarks = read_each(folder)
    return list(found.values()), remarks


def read_each(folder: Path) -> tuple[dict[Path, EngineStatus], list[str]]:
    """As `read`, by the status file of each engine.

    Raises:
        OSError: the folder cannot be read.
    """
    found: dict[Path, EngineStatus] = {}
    remarks: list[str] = []
    for name in _names(folder, hidden=False):
        try:
            status = read_file(folder / name)
        except (OSError, ValueError) as error:
            remarks.append(plain(f"{name} was skipped: {error}"))
            continue
        if status is not None:
            found[folder / name] = status
    return found, remarks


def check_loopback_key() -> ClusterKey:
    """The key of `loopback_key`, unless it would be another one than that of running engines.

    Raises:
        ConfigError: as `loopback_key`; or the file was removed while an engine had its key.
    """
    path = runtime_root() / LOOPBACK_KEY
    if not path.exists():
        kernel = runtime_dir().name
        engines = [each for folder in path.parent.glob(f"*/{kernel}") for each in _said(folder)]
        names = [label(each.engine_id) for each in engines if each.loopback_key]
        if names:
            raise ConfigError(
                f"{path} was removed while engines run that have its key ({', '.join(names)}), and "
                "they would refuse an engine with a new one: stop them, then start all again, or "
                f"give all a key_file; keep what removes old files away from {path.parent}"
            )
    return loopback_key()


def _said(folder: Path) -> list[EngineStatus]:
    try:
        return read(folder)[0]
    except OSError:  # no runtime folder any more
        return []


def read_file(path: Path) -> EngineStatus | None:
    """What one living engine says, by the path that `read_each` gives; None if it has ended.

    Raises:
        OSError: the file cannot be read.
        ValueError: it says nothing sensible.
    """
    fd = _of_living(path)
    if fd is None:
        return None
    with open(fd, "rb") as file:
        return _decoded(file.read(MAX_BYTES + 1))


def sweep(folder: Path) -> None:
    """Remove the files of dead engines, and orders to them.

    Raises:
        OSError: the folder cannot be read.
    """
    orders = [found for name in os.listdir(folder) if (found := ORDER.fullmatch(name))][:MAX_FILES]
    for name in _names(folder, hidden=True):
        with contextlib.suppress(OSError):
            fd = _of_living(folder / name)
            if fd is not None:
                os.close(fd)
    for order in orders:
        if not (folder / f"{order[1]}.status").exists():
            with contextlib.suppress(OSError):
                (folder / order[0]).unlink(missing_ok=True)


def _names(folder: Path, *, hidden: bool) -> list[str]:
    """The status files in a folder, `MAX_FILES` at most.

    Args:
        hidden: whether those that are being written are among them. An engine may not have locked
            such a file yet, and a reader that looks all the time would take it away each time. So
            only the sweeps of engines list them, which are seconds apart.
    """
    names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    return [name for name in names if hidden or not name.startswith(".")][:MAX_FILES]


def _of_living(path: Path) -> int | None:
    """A descriptor of a file whose engine lives; None where there is none any more."""
    for _ in range(_LOOKS):
        try:
            fd = open_own_file(path)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            replaced = os.fstat(fd).st_nlink == 0  # its engine has written since we opened it
        except BlockingIOError:
            return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if not replaced:
            path.unlink(missing_ok=True)
            return None
    raise OSError("it is replaced all the time")


def _decoded(text: bytes) -> EngineStatus:
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        status = _decoder.decode(text)  # msgspec's own errors are ValueErrors
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if status.format != FORMAT:
        raise ValueError(
            f"its format is {status.format} (omni-connector {plain(status.omni_connector[:64])}), "
            f"and this one reads {FORMAT} (omni-connector {__version__})"
        )
    return msgspec.structs.replace(
        status,
        **{
            name: plain(getattr(status, name))
            for name in (
                "engine_id",
                "role",
                "model",
                "host",
                "container",
                "vllm",
                "omni_connector",
            )
        },
        **{
            name: {plain(key): value for key, value in getattr(status, name).items()}
            for name in ("counts", "failures", "peers", "seconds")
        },
    )
