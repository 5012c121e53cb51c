# SPDX-License-Identifier: Apache-2.0
"""The runtime folders of namespaces, as commands look at them: they make none."""

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


def existing_folder(namespace: str) -> Path | None:
    """The folder of this kernel's engines of a namespace; None where there is none.

    Raises:
        ConfigError: as `check_private`, of this folder or that of all namespaces.
    """
    folder = namespace_dir(namespace)
    for path in (folder.parent.parent, folder.parent, folder):
        if not os.path.lexists(path):
            return None
        check_private(path)
    return folder


def nobody(namespace: str, who: str, when: str) -> str:
    """What to say where no engine was found.

    Args:
        namespace: in which it was looked.
        who: what engine was looked for.
        when: what makes it show itself.
    """
    folder = namespace_dir(namespace)
    others = _others(folder)
    found = f" There are engines in {', '.join(others)}." if others else ""
    return (
        f"No {who} of namespace {plain(namespace)} shows itself in {plain(str(folder))}.{found} "
        f"An engine does once it has started with {when}. Give its namespace with --namespace; "
        f"{RUNTIME_DIR_VARIABLE} and XDG_RUNTIME_DIR must be here as they are there."
    )


def _others(folder: Path) -> list[str]:
    """Other namespaces in which engines show themselves."""
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
