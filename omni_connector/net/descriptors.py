# SPDX-License-Identifier: Apache-2.0
"""File descriptors: what an error says where none are left, and whether enough are."""

import errno
import os
from typing import Final

from omni_connector.errors import TransportError

_ADVICE: Final[dict[int | None, str]] = {
    errno.EMFILE: "; raise `ulimit -n`",
    errno.ENFILE: "; raise the sysctl fs.file-max",
}
NO_MORE: Final = frozenset(_ADVICE)
"""The codes of errors of a process, or a machine, that can open no more."""


def reason(error: Exception) -> str:
    """The error's text, with what to do about it where descriptors have run out."""
    return f"{error}{_ADVICE.get(getattr(error, 'errno', None), '')}"


def require_spare(count: int, purpose: str) -> None:
    """Make sure that `count` more descriptors can be opened now.

    Args:
        count: how many.
        purpose: what they are for, for the message.

    Raises:
        TransportError: they cannot.
    """
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise TransportError(
            f"too few file descriptors for {purpose}, which needs {count}: {reason(error)}"
        ) from error
    finally:
        for each in opened:
            os.close(each)
