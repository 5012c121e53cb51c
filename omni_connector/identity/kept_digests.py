# SPDX-License-Identifier: Apache-2.0
"""Digests of files of weights, kept so that the next engine need not read the files again.

The digests of one folder lie in one file of JSON: in the folder's own `.omni-connector`, if that is
there and may be written, else in `.digests` of the runtime folder. They are not put beside the
weights without being asked: an entry more would change the folder, and a folder that has changed
after the start of an engine may not be what the engine has loaded.

An entry counts only while inode, size and times of the file are as they were. The file of entries
counts only if it belongs to this user or to the owner of the weights, and nobody else may write to
it. What is torn or forged is ignored, and computed again. It is replaced by rename. Engines that
start at once take turns by a lock, so that one of them reads the files.
"""

import contextlib
import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec
from msgspec import Meta

from omni_connector.net.runtime import check_private, runtime_dir, runtime_root

BESIDE: Final = ".omni-connector"
"""A folder of this name beside the weights takes their digests."""

IN_RUNTIME: Final = ".digests"
"""The folder for them in the runtime folder; no namespace begins with a dot."""

_NAME: Final = "digests.json"
_FORMAT: Final = 1

# Bytes of the largest file of entries that is read: some 4,096 entries with long names.
_MAX_BYTES: Final = 4 << 20
_MAX_ENTRIES: Final = 8192

_Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

_MASK: Final = (1 << 63) - 1  # of an inode, as `hash_files` has it

FileState = tuple[int, int, int, int]
"""Inode, size in bytes, and the times of the last change of content and of the file, in ns."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    state: tuple[_Number, _Number, _Number, _Number]
    sha256: _Sha256


class _Entries(msgspec.Struct, frozen=True):
    format: int
    files: Annotated[dict[str, _Entry], Meta(max_length=_MAX_ENTRIES)]


_decoder = msgspec.json.Decoder(_Entries)


def state_of(path: Path) -> FileState:
    """The state of a file.

    Raises:
        OSError: it is not there.
    """
    found = path.stat()
    return found.st_ino & _MASK, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class KeptDigests:
    """The digests that are kept for the files of one folder.

    Args:
        folder: where the files lie.

    Raises:
        OSError: it is not there.
        ConfigError: the runtime folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        folder = folder.resolve(strict=True)
        self._owners = {os.geteuid(), folder.stat().st_uid}
        beside = folder / BESIDE
        # The lock is always this user's own, so that nobody else can hold it.
        runtime_dir()
        own = runtime_root() / IN_RUNTIME
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
        check_private(own)
        name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24]
        self._path = own / f"{name}.json"
        self._places = [self._path, beside / _NAME]
        self._lock_path = own / f"{name}.lock"
        self._lock: int | None = None
        if _may_use(beside, self._owners):
            self._path = beside / _NAME

    @property
    def path(self) -> Path:
        """Where `keep` puts the entries."""
        return self._path

    def digest(self, path: Path) -> str | None:
        """The SHA-256 of a file in hex; None where it is not kept.

        Raises:
            OSError: the file of weights is not there.
        """
        state = state_of(path)
        for place in self._places:
            entry = self._read(place).get(path.name)
            if entry is not None and entry.state == state:
                return entry.sha256
        return None

    def keep(self, found: dict[str, tuple[FileState, str]]) -> None:
        """Keep digests, beside those that are there.

        Args:
            found: state and SHA-256 of each file, by its name in the folder.

        Raises:
            OSError: they cannot be written.
        """
        entries = self._read(self._path) | {name: _Entry(*each) for name, each in found.items()}
        while len(entries) > _MAX_ENTRIES:
            del entries[next(iter(entries))]
        content = msgspec.json.encode(_Entries(_FORMAT, entries))
        hidden = self._path.with_name(f".{os.urandom(8).hex()}.new")
        try:
            fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with open(fd, "wb") as file:
                file.write(content)
            hidden.rename(self._path)
        finally:
            hidden.unlink(missing_ok=True)

    def acquire(self) -> bool:
        """Take the lock of this folder, unless another process has it; returns whether it is ours.

        Raises:
            OSError: the lock's file cannot be opened.
        """
        if self._lock is not None:
            return True
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self._lock_path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._lock = fd
        return True

    def close(self) -> None:
        """Let go of the lock. Idempotent."""
        fd, self._lock = self._lock, None
        if fd is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, path: Path) -> dict[str, _Entry]:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(path, flags), "rb") as file:
                if not _is_trusted(os.fstat(file.fileno()), self._owners):
                    return {}
                content = file.read(_MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                return {}
            entries = _decoder.decode(content)
        except (OSError, ValueError, RecursionError):  # none, or torn; msgspec's are ValueErrors
            return {}
        return dict(entries.files) if entries.format == _FORMAT else {}


def _is_trusted(found: os.stat_result, owners: set[int]) -> bool:
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid in owners
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


def _may_use(folder: Path, owners: set[int]) -> bool:
    """Whether a folder beside the weights is one that this user may write to, and no stranger."""
    try:
        found = folder.lstat()
        check = stat.S_ISDIR(found.st_mode) and found.st_uid in owners
    except OSError:
        return False
    open_to_others = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return check and not open_to_others and os.access(folder, os.W_OK | os.X_OK)
