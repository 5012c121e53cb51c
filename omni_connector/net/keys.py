# SPDX-License-Identifier: Apache-2.0
"""The key that the engines of a cluster share, and the file it is kept in.

Both sides prove themselves with the same CURVE key pair: a serving engine admits only clients
that hold it, and an asking engine accepts only servers that hold it. The file is a certificate in
pyzmq's format, with the public and the secret key.
"""

import contextlib
import os
import secrets
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
import zmq.auth
from zmq.utils import z85

from omni_connector.errors import ConfigError
from omni_connector.net.users import other_user

_MAX_FILE_BYTES: Final = 1 << 16
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_CERTIFICATE: Final = """\
#   Key of omni-connector, the same file for all engines of a cluster.
#   Whoever can read it can take part: copy it to the other hosts securely, with mode 600.

metadata
    made-by = "omni-connector keygen"
curve
    public-key = "{public}"
    secret-key = "{secret}"
"""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A CURVE key pair; each key is 40 characters of Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)


def load_key(path: str | Path) -> ClusterKey:
    """Read the key from its file.

    Raises:
        ConfigError: the file is missing, no regular file, not this user's, open to others, or
            holds no key pair; the message says what to do.
    """
    try:
        # O_NONBLOCK: opening a FIFO or a device must not wait.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot open the key_file: {error}{_looked_in(path)}; `omni-connector keygen` makes "
            "one, which all engines of the cluster share"
        ) from error
    try:
        _check_file(path, os.fstat(fd))
        # The descriptor is the file that was checked; the path may name another one by now.
        return _parse(path, f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _looked_in(path: str | Path) -> str:
    """The folder from which a relative path counts, which need not be that of the configuration."""
    return "" if os.path.isabs(path) else f", looked for in {os.getcwd()}"


def _check_file(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"the key_file {path} is no regular file; name the file of the key")
    other = other_user(status.st_uid, "copy it for the user of the engine")
    if other is not None:
        raise ConfigError(f"the key_file {path} belongs to {other}")
    if status.st_mode & _OTHERS:
        raise ConfigError(
            f"the key_file {path} is open to others (mode {stat.S_IMODE(status.st_mode):o}); "
            "chmod it to 600, and make a new key if others may have read it"
        )
    if status.st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"the key_file {path} has {status.st_size} bytes, which no key has")


def _parse(path: str | Path, opened: str) -> ClusterKey:
    remedy = "it must be a file that `omni-connector keygen` has made, copied whole"
    try:
        public, secret = zmq.auth.load_certificate(opened)
    except (ValueError, IndexError) as error:
        raise ConfigError(f"the key_file {path} holds no key: {remedy}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the key_file {path}: {error}") from error
    if secret is None:
        raise ConfigError(f"the key_file {path} holds no secret key: {remedy}")
    if not _is_key(public) or not _is_key(secret) or zmq.curve_public(secret) != public:
        raise ConfigError(f"the key_file {path} holds no valid pair of keys: {remedy}")
    return ClusterKey(public, secret)


def _is_key(text: bytes) -> bool:
    if len(text) != 40:
        return False
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, struct.error):  # a character, or a number, that is not in Z85
        return False


def own_key(path: Path) -> ClusterKey:
    """Read the key from a file of this user's, and make the file first if there is none.

    Several processes may do so at once; all get the same key.

    Raises:
        ConfigError: as `load_key`, or the file cannot be made.
    """
    if not path.exists():
        mine = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        write_new_key(mine)
        try:
            os.link(mine, path)  # it appears whole; if another process was first, its file stays
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(f"cannot make the key file {path}: {error}") from error
        finally:
            mine.unlink(missing_ok=True)
    return load_key(path)


def write_new_key(path: str | Path) -> ClusterKey:
    """Make a key, and write it to a new file that only this user can read.

    Raises:
        ConfigError: the file exists, and is left as it is; or it cannot be made.
    """
    public, secret = zmq.curve_keypair()
    text = _CERTIFICATE.format(public=public.decode(), secret=secret.decode())
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists and is not overwritten: engines that use it would be cut off from "
            "each other; name another file, or remove it first"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot make the key file: {error}") from error
    try:
        with os.fdopen(fd, "w") as file:
            os.fchmod(fd, 0o600)  # the umask may have taken bits away
            file.write(text)
            file.flush()
            os.fsync(fd)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(path)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot write the key file {path}: {error}") from error
        raise
    return ClusterKey(public, secret)
