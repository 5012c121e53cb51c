# SPDX-License-Identifier: Apache-2.0
"""The runtime folders of namespaces, for commands, which read them and make none."""

import os
from pathlib import Path
from typing import Final

from omni_connector.net.runtime import (
    RUNTIME_DIR_VARIABLE,
    check_private,
    namespace_dir,
    of_kernel,
    runtime_root,
)
from omni_connector.net.status import plain, read

_OTHERS: Final = 20
"""Most namespaces that a message names."""


def existing_folder(namespace: str) -> Path | None:
    """Return the runtime folder of a namespace on this host; None if there is none.

    Raises:
        ConfigError: this folder or a parent of it is not private (`check_private`).
    """
    folder = namespace_dir(namespace)
    for path in (folder.parent.parent, folder.parent, folder):
        if not os.path.lexists(path):
            return None
        check_private(path)
    return folder


def nobody(namespace: str, who: str, when: str) -> str:
    """Return the message for a namespace in which no engine was found.

    Args:
        namespace: the namespace.
        who: the kind of engine that was looked for.
        when: the settings with which such an engine is found.
    """
    folder = namespace_dir(namespace)
    others = _others(folder)
    found = f" There are engines in {', '.join(others)}." if others else ""
    return (
        f"No {who} of namespace {plain(namespace)} was found in {plain(str(folder))}.{found} "
        f"An engine is found once it has started with {when}. If yours has, name its namespace "
        f"with --namespace, and give this command the {RUNTIME_DIR_VARIABLE} and XDG_RUNTIME_DIR "
        "that the engine has."
    )


def _others(folder: Path) -> list[str]:
    """Return other namespaces that have engines."""
    others: list[str] = []
    root = runtime_root()
    for name in sorted(os.listdir(root)) if root.is_dir() else ():
        if (root / name).is_dir() and root / name != folder.parent and len(others) < _OTHERS:
            try:
                if read(of_kernel(root / name))[0]:
                    others.append(plain(name))
            except OSError:  # it is gone
                continue
    return others
