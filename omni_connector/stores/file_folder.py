# SPDX-License-Identifier: Apache-2.0
"""The folder of a store of files: one file a block, in sub-folders, under names made of the keys.

A file appears by rename, so that nobody sees half of one; what a killed writer left has another
name and is swept. Nothing is flushed to the disk (no fsync), because this is a cache: after a crash
of the machine a file may be short or hold other bytes, which its length and its trailer tell.
All methods block as long as the file system does.
"""

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from omni_connector.errors import ConfigError
from omni_connector.memory.arena_format import PAGE_BYTES

_PARTS: Final = 256
_NAME: Final = re.compile(r"[0-9a-f]{38}\.kv")
_TEMPORARY: Final = re.compile(r"[0-9a-f]{16}\.new")
_LOCK: Final = ".sweep"


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
            ConfigError: its parent is missing, it is no folder, or others can put files into it.
            OSError: the file system fails.
        """
        path = self.path
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            link, status = os.lstat(path), os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"store.path: the folder {path} cannot be made ({error.strerror}); mount or make "
                f"{os.path.dirname(path)} first"
            ) from error
        trusted = (os.geteuid(), 0)
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
