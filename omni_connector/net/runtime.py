# SPDX-License-Identifier: Apache-2.0
"""The runtime folder, in which the sockets of one user's engines lie.

A process that is killed leaves its socket behind; `sweep` removes sockets that nobody listens on.
A socket gets its name only once it accepts: before, it has a temporary name. `sweep` and new
sockets take turns by a lock on the folder itself, so that a socket that is about to listen is not
taken for a dead one; the kernel drops the lock of a process that is killed.

A Unix socket belongs to the kernel that bound it, also where its file lies on a file system that
hosts share: every other kernel refuses connections to it, as it does to a dead one. So engines of
one kernel have a folder of their own within the namespace's, and no other host's entries in sight:

    <runtime root>/<namespace>/<digest of the kernel's boot and of the mount>/<sockets>
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from omni_connector.errors import (
    ConfigError,
    PeerRefusedError,
    PeerUnreachableError,
    TransportError,
)
from omni_connector.net.descriptors import reason
from omni_connector.net.keys import ClusterKey, own_key
from omni_connector.net.users import other_user

logger = logging.getLogger("vllm.omni_connector.net")

RUNTIME_DIR_VARIABLE: Final = "OMNI_CONNECTOR_RUNTIME_DIR"
LOCK_TIMEOUT_S: Final = 5.0
"""Longest wait for the lock of a folder, in seconds. Who holds it does so for milliseconds."""

_FOLDER: Final = "omni-connector"
LOOPBACK_KEY: Final = ".loopback.key"  # no namespace begins with a dot
SUN_PATH_BYTES: Final = 108  # Linux' limit for a path, with a zero at its end
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_ADDRESS: Final = re.compile(r"[a-z][0-9]{0,3}-[0-9a-f]{24}\.sock")
_POLL_S: Final = 0.005  # between two tries to get the lock

# Drawn anew at each boot. Containers of one kernel share it, and reach each other's sockets,
# whatever their network and process namespaces are.
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_KERNEL: Final = re.compile(r"[0-9a-f]{8}")

FOREIGN_SILENCE_S: Final = 7 * 86400.0
"""Seconds without a change after which a folder of another kernel is taken for one of an earlier
boot, or of a host that has gone. Each sweep changes the time of its own folder."""


def runtime_root() -> Path:
    """Where the folders of all namespaces lie; it may not exist yet.

    It is `$OMNI_CONNECTOR_RUNTIME_DIR` if that is set, else `$XDG_RUNTIME_DIR/omni-connector` if
    that variable names a folder of this user, else `omni-connector-<uid>` in the temporary folder.

    Raises:
        ConfigError: `$OMNI_CONNECTOR_RUNTIME_DIR` is no absolute path, or there is no temporary
            folder.
    """
    override = os.environ.get(RUNTIME_DIR_VARIABLE, "")
    xdg = os.environ.get("XDG_RUNTIME_DIR", "")
    if override:
        if not os.path.isabs(override):
            raise ConfigError(f"{RUNTIME_DIR_VARIABLE} must be an absolute path, not {override!r}")
        return Path(override)
    if _is_own_folder(xdg):
        return Path(xdg) / _FOLDER
    return _temporary_folder() / f"{_FOLDER}-{os.geteuid()}"


def _temporary_folder() -> Path:
    """The folder for temporary files, in which all engines of a host look.

    Raises:
        ConfigError: there is none.
    """
    try:
        folder = tempfile.gettempdir()
    except OSError:
        folder = ""
    # Python falls back to the working directory, where no other engine looks.
    if folder and not (folder == _working_folder() and folder not in _temporary_folders()):
        return Path(folder)
    raise ConfigError(
        "there is no folder for temporary files in which this user may write ($TMPDIR, /tmp, "
        f"/var/tmp), and so no runtime folder; set {RUNTIME_DIR_VARIABLE} to a folder that the "
        "engines of this host share"
    )


def _temporary_folders() -> set[str]:
    named = [os.environ.get(variable) for variable in ("TMPDIR", "TEMP", "TMP")]
    return {os.path.abspath(each) for each in (*named, "/tmp", "/var/tmp", "/usr/tmp") if each}


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # somebody has removed it
        return ""


def namespace_dir(namespace: str) -> Path:
    """The folder in `runtime_root` of this kernel's engines of a namespace; it may not exist yet.

    Raises:
        ConfigError: as `runtime_root`.
    """
    return of_kernel(runtime_root() / _short(namespace))


def of_kernel(folder: Path) -> Path:
    """The folder of this kernel's engines within the folder of a namespace."""
    # One file system may be mounted twice, with other options. Its inodes are others then, and
    # sockets bound in one mount refuse connections made in the other.
    device = next(each for each in (folder, *folder.parents) if each.exists()).stat().st_dev
    return folder / hashlib.sha256(f"{kernel_name()}/{device}".encode()).hexdigest()[:8]


def kernel_name() -> str:
    """What this kernel shares with no other, nor with itself after a restart. Processes of one
    kernel have one monotonic clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # a sandbox may hide it; then engines of one host name are taken to be near
        return f"host {socket.gethostname()}"


def runtime_dir(namespace: str = "default") -> Path:
    """The folder of `namespace_dir`. It is made if need be, private to this user.

    Args:
        namespace: any name; engines of one kernel that share it find each other.

    Raises:
        ConfigError: as `check_private`, or the folder cannot be made.
    """
    folder = namespace_dir(namespace)
    for path in (folder.parent.parent, folder.parent, folder):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        except OSError as error:
            raise ConfigError(f"cannot make the runtime folder {path}: {error}") from error
        check_private(path)
    return folder


def loopback_key() -> ClusterKey:
    """The key for ports on loopback if there is no `key_file`.

    All engines with the same runtime folder have the same key, whatever their namespaces.

    Raises:
        ConfigError: as `runtime_dir` and `own_key`.
    """
    runtime_dir()
    return own_key(runtime_root() / LOOPBACK_KEY)


def check_private(folder: Path) -> None:
    """Make sure that nobody but this user can put anything into a folder.

    Raises:
        ConfigError: it is not a folder, not this user's, or open to others.
    """
    try:
        status = os.lstat(folder)
    except OSError as error:
        raise ConfigError(f"cannot look at the runtime folder {folder}: {error}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the runtime folder {folder} is no folder (symbolic links are refused)")
    other = other_user(status.st_uid, f"set {RUNTIME_DIR_VARIABLE} to another one")
    if other is not None:
        raise ConfigError(f"the runtime folder {folder} belongs to {other}")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"the runtime folder {folder} is open to others (mode {status.st_mode & 0o777:o}); "
            f"name a folder in it, which is made private: {RUNTIME_DIR_VARIABLE}={folder / 'omni'}"
        )


def open_own_file(path: Path) -> int:
    """A descriptor to read a regular file of this user, which the caller closes. Never waits.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is a link, a pipe or another user's, or cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError("it is no file of this user")
    except BaseException:
        os.close(fd)
        raise
    return fd


def socket_path(folder: Path, name: str, *, kind: str = "") -> Path:
    """The path of the socket for a name, which may have any length and characters.

    Args:
        folder: a runtime folder.
        name: any string.
        kind: a few letters that keep the sockets of different uses apart.

    Raises:
        ConfigError: the folder's path is too long for a socket in it.
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    path = folder / f"{kind}{digest}.sock"
    length = len(os.fsencode(path))
    if length >= SUN_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {length} bytes, Linux allows {SUN_PATH_BYTES - 1}; "
            f"set {RUNTIME_DIR_VARIABLE} to a shorter folder"
        )
    return path


def check_address(path: Path) -> None:
    """Refuse an address that a peer names, unless an engine's socket can have it.

    Raises:
        PeerRefusedError: it is another socket's, or the folder is not private.
        PeerUnreachableError: there is no such folder.
    """
    known = path.is_absolute() and _ADDRESS.fullmatch(path.name) and str(path).isprintable()
    if not known or len(os.fsencode(path)) >= SUN_PATH_BYTES:
        raise PeerRefusedError(f"{str(path)!r} is not the address of an engine's socket")
    if not os.path.lexists(path.parent):
        raise PeerUnreachableError(f"there is no folder {path.parent} on this host")
    try:
        check_private(path.parent)
    except ConfigError as error:
        raise PeerRefusedError(str(error)) from error


@contextlib.contextmanager
def locked(folder: Path, *, timeout: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the folder's lock, under which sockets appear in it and are swept from it.

    Raises:
        TransportError: another process held the lock for `timeout` seconds, or the folder is gone.
    """
    deadline = time.monotonic() + timeout
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"cannot open the runtime folder {folder}: {reason(error)}") from error
    process = os.getpid()
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TransportError(
                        f"the runtime folder {folder} was locked by another process for "
                        f"{timeout:g} s; is one of this user's engines stopped?"
                    ) from None
            time.sleep(_POLL_S)
        yield
    finally:
        # A process that is forked meanwhile has the same open file, and with it the lock: closing
        # would leave it locked while that process lives.
        if os.getpid() == process:
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextlib.contextmanager
def appearing(path: Path, hidden: Path, taken: str) -> Iterator[None]:
    """Bind a socket at `hidden` in this context; at its end it appears at `path`.

    So a socket is seen only once it accepts, and under the folder's lock nobody sweeps it before.
    A dead socket at `path` is replaced.

    Raises:
        TransportError: somebody listens at `path` already (with `taken` as its message), or the
            folder cannot be locked.
        OSError: the socket cannot be renamed.
    """
    with locked(path.parent):
        if path.exists() and not is_dead(path):
            raise TransportError(taken)
        try:
            yield
            os.rename(hidden, path)
        finally:
            hidden.unlink(missing_ok=True)


def listen(path: Path, *, backlog: int = 64) -> socket.socket:
    """A listening, non-blocking SOCK_SEQPACKET socket; see `appearing`.

    Raises:
        TransportError: another process listens there, or the socket cannot be made.
    """
    hidden = path.with_name(f".{os.urandom(8).hex()}.new")
    with contextlib.ExitStack() as undo:
        try:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.setblocking(False)
            with appearing(path, hidden, f"another process listens at {path} already"):
                listener.bind(os.fspath(hidden))
                os.chmod(hidden, 0o600)
                listener.listen(backlog)
        except OSError as error:
            raise TransportError(f"cannot listen at {path}: {reason(error)}") from error
        undo.pop_all()
    return listener


def sweep(folder: Path, *, timeout: float = LOCK_TIMEOUT_S) -> list[str]:
    """Remove all of this user's sockets in a runtime folder that nobody listens on, and folders of
    other kernels that have been silent for `FOREIGN_SILENCE_S`.

    Returns:
        The names removed.

    Raises:
        TransportError: the folder cannot be read, or cannot be locked within `timeout` seconds.
    """
    removed = []
    with locked(folder, timeout=timeout):
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if _is_own_socket(entry)]
            for name in names:
                if is_dead(folder / name):
                    (folder / name).unlink(missing_ok=True)
                    removed.append(name)
            _sweep_silent(folder)
        except OSError as error:
            raise TransportError(
                f"cannot sweep the runtime folder {folder}: {reason(error)}"
            ) from error
    if removed:
        logger.info("Removed %d dead sockets from %s", len(removed), folder)
    return removed


def _sweep_silent(folder: Path) -> None:
    if not _KERNEL.fullmatch(folder.name):
        return
    os.utime(folder)
    # Both times are the file system's, whatever the clocks of the hosts say.
    now = folder.stat().st_mtime
    with os.scandir(folder.parent) as entries:
        others = [each.name for each in entries if _KERNEL.fullmatch(each.name)]
    for name in others:
        other = folder.with_name(name)
        with contextlib.suppress(OSError, ConfigError):  # it is gone, or not ours to remove
            if now - other.lstat().st_mtime > FOREIGN_SILENCE_S:
                check_private(other)
                shutil.rmtree(other)
                logger.info("Removed %s: nothing has changed there for a week", other)


def tidy(folder: Path) -> None:
    """Do the work of `sweep`, unless another process does so now. Never waits, raises nothing."""
    try:
        sweep(folder, timeout=0.0)
    except TransportError as error:  # a later sweep, by any engine, removes them
        logger.debug("Dead sockets were not removed from %s: %s", folder, error)


def identity(path: Path) -> tuple[int, int]:
    """What tells the file at a path from any other that may take its place.

    Raises:
        OSError: there is none.
    """
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def remove_own(path: Path, own: tuple[int, int]) -> None:
    """Remove a file, unless another one has taken its place. Raises nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        if identity(path) == own:
            path.unlink()


def is_dead(path: Path) -> bool:
    """Whether nobody listens at a socket of this kernel that exists. Does not wait.

    Raises:
        OSError: there are no more descriptors.
    """
    # Only a refused connection proves that nobody listens: EAGAIN means a full backlog,
    # EPROTOTYPE a live socket of another type.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED


def _is_own_socket(entry: "os.DirEntry[str]") -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # its owner closed it just now
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


def _is_own_folder(path: str) -> bool:
    # After `su`, XDG_RUNTIME_DIR may still name the folder of the previous user.
    if not os.path.isabs(path):
        return False
    try:
        status = os.stat(path)
    except OSError:  # a folder that does not exist counts as not named
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _short(namespace: str) -> str:
    if _PLAIN.fullmatch(namespace):
        return namespace
    return hashlib.sha256(namespace.encode("utf-8", "surrogatepass")).hexdigest()[:24]
