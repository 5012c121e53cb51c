# SPDX-License-Identifier: Apache-2.0
"""The folder of a store of files: one file a block, in sub-folders, under names made of the keys.

A file appears by rename, so that nobody sees half of one; what a killed writer left has another
name and is swept. Nothing is flushed to the disk (no fsync), because this is a cache: after a crash
of the machine a file may be short or hold other bytes, which its length and its trailer tell.
All methods block as long as the file system does.
"""

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from omni_connector.arena.format import PAGE_BYTES
from omni_connector.errors import ConfigError

# Folders among which the files are spread, by the first byte of the name.
_PARTS: Final = 256
_NAME: Final = re.compile(r"[0-9a-f]{38}\.kv")
_TEMPORARY: Final = re.compile(r"[0-9a-f]{16}\.new")
_LOCK: Final = ".sweep"

GONE: Final = (errno.ENOENT, errno.ESTALE)
"""Of a file that another host has removed, NFS says on any call that its handle is stale."""


class BlockFile(NamedTuple):
    """A file of the folder.

    Attributes:
        path: where it is.
        nbytes: what it takes of the disk.
        used_ns: when a block was last written or asked for, in nanoseconds of the wall clock.
        temporary: whether it is, or was to become, a block: its writer is at work, or was killed.
    """

    path: str
    nbytes: int
    used_ns: int
    temporary: bool


class BlockFolder:
    """Blocks as files.

    Args:
        path: the folder, absolute. Its parent must exist.
    """

    def __init__(self, path: str) -> None:
        self.path: Final = path
        self.lock_path: Final = os.path.join(path, _LOCK)

    def prepare(self) -> None:
        """Make the folder if it is missing, for this user alone, and check who can write to it.

        Raises:
            ConfigError: its parent is missing, it is no folder, others can put files into it, or
                can put another folder in its place.
            OSError: the file system fails.
        """
        path = self.path
        try:
            _check_parent(os.path.dirname(os.path.normpath(path)))
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            link, status = os.lstat(path), os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"store.path: the folder {path} cannot be made ({error.strerror}); mount or make "
                f"{os.path.dirname(path)} first"
            ) from error
        trusted = (os.geteuid(), 0)
        if stat.S_ISLNK(link.st_mode):
            _check_parent(os.path.dirname(os.path.realpath(path)))
        if link.st_uid not in trusted or status.st_uid not in trusted:
            raise ConfigError(
                f"store.path: {path} belongs to user {status.st_uid}, not to {os.geteuid()} who "
                "runs this engine; take a folder of your own"
            )
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"store.path: {path} is no folder")
        if status.st_mode & 0o022:
            raise ConfigError(
                f"store.path: others can write to {path} (mode {status.st_mode & 0o7777:o}), and "
                "so forge blocks; chmod it to 700, or take a folder in it"
            )

    def path_of(self, key: str) -> str:
        """Where the block of a key lies. Any text is a key, and none leads out of the folder."""
        name = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
        return f"{self.path}/{name[:2]}/{name[2:]}.kv"

    def status(self, path: str) -> os.stat_result | None:
        """What the file system says of a block's file; None where there is none, or none that this
        user may read.

        Raises:
            OSError: the file system fails.
        """
        try:
            found = os.stat(path, follow_symlinks=False)
        except OSError as error:
            if error.errno not in GONE:
                raise
            return None
        return found if stat.S_ISREG(found.st_mode) and _is_readable(found) else None

    def touch(self, path: str, now_ns: int) -> None:
        """Say that a block was used at this time of the wall clock."""
        with contextlib.suppress(OSError):  # gone, or on a disk that cannot be written to
            os.utime(path, ns=(now_ns, now_ns))

    def open(self, path: str) -> int:
        """A descriptor from which a block can be read. What is no file is removed.

        Raises:
            FileNotFoundError: there is no file.
            OSError: the file system fails.
        """
        # Whoever can write to the folder may have put a pipe there, whose opening would wait.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
                raise
            self.remove(path)
            raise FileNotFoundError(errno.ENOENT, "It is no file", path) from error
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            self.remove(path)
            raise FileNotFoundError(errno.ENOENT, "It is no file", path)
        except BaseException:
            os.close(fd)
            raise

    def write(self, path: str, content: memoryview, wanted: Callable[[], bool]) -> bool:
        """Store a block.

        Args:
            path: of `path_of`.
            content: the bytes.
            wanted: asked once all bytes are written; if it says no, nothing is stored.

        Returns:
            Whether the block is stored.

        Raises:
            OSError: the file system fails.
        """
        temporary = f"{os.path.dirname(path)}/{os.urandom(8).hex()}.new"
        try:
            fd = self._create(temporary)
            try:
                left = content
                while left:
                    left = left[os.write(fd, left) :]
            finally:
                os.close(fd)  # where a network file system may tell of errors
            if wanted():
                os.rename(temporary, path)
                return True
        except BaseException:
            self.remove(temporary)
            raise
        self.remove(temporary)
        return False

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path), 0o700)
            return os.open(path, flags, 0o600)

    def remove(self, path: str) -> bool:
        """Remove a file; returns whether it was there and has gone."""
        try:
            os.unlink(path)
        except OSError:  # gone already, or swept later
            return False
        return True

    def files(self) -> Iterator[BlockFile | None]:
        """All files of the store, in any order; None now and then, where one may pause.

        Raises:
            OSError: the file system fails.
        """
        for part in range(_PARTS):
            try:
                entries = os.scandir(f"{self.path}/{part:02x}")
            except FileNotFoundError:
                continue
            with entries:
                for number, entry in enumerate(entries, 1):
                    temporary = _TEMPORARY.fullmatch(entry.name) is not None
                    if not temporary and not _NAME.fullmatch(entry.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        nbytes = -(-status.st_size // PAGE_BYTES) * PAGE_BYTES
                        yield BlockFile(entry.path, nbytes, status.st_mtime_ns, temporary)
                    if number % 256 == 0:
                        yield None
            yield None

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize


def _is_readable(status: os.stat_result) -> bool:
    """Whether this user may read a file, as far as its owner and its mode tell."""
    own = os.geteuid()
    return own in (status.st_uid, 0) or bool(status.st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _check_parent(parent: str) -> None:
    """Make sure that nobody else can rename the folder that lies in this one.

    Raises:
        ConfigError: somebody can.
        OSError: the file system fails.
    """
    status = os.stat(parent)
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"store.path: the parent folder {parent} belongs to user {status.st_uid}, who could "
            f"put another folder in its place; take a folder within one of user {os.geteuid()}, "
            "who runs this engine"
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"store.path: others can write to the parent folder {parent} (mode "
            f"{status.st_mode & 0o7777:o}), and so put another folder in its place; take a folder "
            "within one of your own, or set the parent's sticky bit"
        )
