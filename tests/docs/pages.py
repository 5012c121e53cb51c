# SPDX-License-Identifier: Apache-2.0
"""The code blocks of README and docs/."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


@dataclass(frozen=True)
class Block:
    """One code block, indented or fenced.

    Attributes:
        page: path of its page from the repository's root.
        line: where it stands there, the first line being 1.
        text: what a reader copies.
    """

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@functools.cache
def blocks() -> Sequence[Block]:
    """All of them, page by page."""
    found = []
    for path in PAGES:
        page = str(path.relative_to(ROOT))
        for token in MarkdownIt("commonmark").parse(path.read_text()):
            if token.type in ("code_block", "fence"):
                assert token.map is not None
                found.append(Block(page, token.map[0] + 1, token.content))
    return found


def block(page: str, start: str) -> Block:
    """The one block of a page that begins so.

    Raises:
        LookupError: there is none, or there are several.
    """
    found = [each for each in blocks() if each.page == page and each.text.startswith(start)]
    if len(found) != 1:
        places = ", ".join(map(str, found)) or "nowhere"
        raise LookupError(f"one block of {page} should begin with {start!r}: {places}")
    return found[0]
