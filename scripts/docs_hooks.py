# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: pages may link to files of the repository, and show its pictures."""

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]
_LINK: Final = re.compile(r"(!?\[[^\]]*\]\()(\.\./[^)#\s]+)((?:#[^)]*)?\))")
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


def on_page_markdown(markdown: str, config: Any, page: Page, **_: Any) -> str:
    """Lead links that leave the folder of the pages to the repository; pictures are copied.

    Raises:
        FileNotFoundError: a link leads to no file of the repository.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def linked(match: re.Match[str]) -> str:
        text, link, end = match.groups()
        target = posixpath.normpath(posixpath.join("docs", folder, link))
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which is not there")
        if target.startswith("docs/"):
            return match[0]
        if text.startswith("!"):
            return f"{text}{posixpath.relpath(target, folder or '.')}{end}"
        return f"{text}{config['repo_url']}/blob/main/{target}{end}"

    return _LINK.sub(linked, markdown)
