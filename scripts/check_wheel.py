# SPDX-License-Identifier: Apache-2.0
"""Check what is in a wheel and an sdist: `check_wheel.py FOLDER`. It prints what is wrong."""

import re
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Final

NEEDED: Final = (
    "omni_connector/py.typed",
    "omni_connector/plugin.py",
    "omni_connector/cli/dashboards/grafana.json",
    "omni_connector/cli/dashboards/alerts.yml",
    "omni_connector/cli/dashboards/prometheus.yml",
    "omni_connector/copy/kernels/copy.ll",
    "omni_connector/testing/conformance/__init__.py",
)
"""What users of a wheel miss if it is not there."""

_RELATIVE: Final = re.compile(r"\]\((?!https?://|#|mailto:)[^)]*\)")


def wrong_in_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel, one sentence each."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = Parser().parsestr(wheel.read(metadata).decode("utf-8"))
        [points] = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        entry_points = wheel.read(points).decode("utf-8")
    wrong = [f"{each} is missing" for each in NEEDED if each not in names]
    wrong += [
        f"{each} does not belong there"
        for each in names
        if not each.startswith(("omni_connector/", "omni_connector-")) or "__pycache__" in each
    ]
    text = str(told.get_payload())
    if not text.strip():
        wrong.append("the long description is empty")
    wrong += [
        f"the long description has a relative link: {each}" for each in _RELATIVE.findall(text)
    ]
    if not told.get_all("Project-URL"):
        wrong.append("it has no project URLs")
    for group in ("vllm.general_plugins", "vllm_omni.general_plugins", "console_scripts"):
        if f"[{group}]" not in entry_points:
            wrong.append(f"the entry points {group} are missing")
    return wrong


def wrong_in_sdist(path: Path) -> list[str]:
    """What is wrong with an sdist, one sentence each."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md")
    return [f"{each} is missing in the sdist" for each in needed if each not in names]


def main(folder: str) -> int:
    """Check all that a folder has; return the exit status."""
    wheels, sdists = (sorted(Path(folder).glob(each)) for each in ("*.whl", "*.tar.gz"))
    wrong = [] if wheels and sdists else ["the wheel or the sdist is missing"]
    for path in wheels:
        wrong += wrong_in_wheel(path)
    for path in sdists:
        wrong += wrong_in_sdist(path)
    for each in wrong:
        print(each)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
