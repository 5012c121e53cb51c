# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages may link to files of the repository, and show its pictures."""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).parents[1]
_OUTSIDE: Final = re.compile(r"(!?)(\[[^\]]*\]\()((?:\.\./)+)([^)#\s]+)((?:#[^)]*)?\))")
_PICTURES: Final = "benchmarks/results"


def on_files(files: Files, config: Any) -> Files:
    """Add the plots of the benchmarks to the files of the site."""
    for picture in sorted((ROOT / _PICTURES).glob("*.png")):
        files.append(
            File(
                f"{_PICTURES}/{picture.name}",
                str(ROOT),
                config["site_dir"],
                use_directory_urls=True,
            )
        )
    return files


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Lead links that leave the folder of the pages to the repository; pictures are copied.

    Raises:
        FileNotFoundError: a link leads to no file of the repository.
    """

    def linked(match: re.Match[str]) -> str:
        picture, text, _, target, end = match.groups()
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"a page links to {target}, which is not in the repository")
        if picture:
            return f"{picture}{text}{target}{end}"
        return f"{text}{config['repo_url']}/blob/main/{target}{end}"

    return _OUTSIDE.sub(linked, markdown)
