# SPDX-License-Identifier: Apache-2.0
"""The long description of the package: README.md with links that a package index can follow."""

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Targets of links and pictures that are no addresses, nor places on the same page.
_RELATIVE: Final = re.compile(r"(!?\[[^\]]*\]\()(?!https?://|#|mailto:)([^)\s]+)(\))")


def absolute(text: str, project: str) -> str:
    """A page of the repository's root, with absolute links.

    Args:
        text: Markdown.
        project: address of the repository on GitHub.
    """

    def linked(match: re.Match[str]) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}{project}/{kind}/main/{match[2]}{match[3]}"

    return _RELATIVE.sub(linked, text)


class LongDescription(MetadataHookInterface):
    """Sets `readme`, which `pyproject.toml` declares as dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text to the metadata."""
        text = Path(self.root, "README.md").read_text("utf-8")
        project = metadata["urls"]["Repository"]
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, project),
        }
