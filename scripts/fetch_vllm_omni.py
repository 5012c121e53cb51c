# SPDX-License-Identifier: Apache-2.0
"""Unpacks the published vLLM-Omni's Python files and pipelines into a folder, for the tests.

It is not installed: it wants other versions of its dependencies, and would bring plugins into every
engine of the environment. The wheel has 8 MB, and what is unpacked 25 MB.

    python scripts/fetch_vllm_omni.py [FOLDER]
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

VERSION: Final = "0.30.0"
FOLDER: Final = Path(__file__).parents[1] / ".vllm-omni" / f"{VERSION}-with-pipelines"

_MAX_WHEEL_BYTES: Final = 32 << 20
_MAX_UNPACKED_BYTES: Final = 128 << 20
_DOWNLOAD_S: Final = 240.0


class FetchError(Exception):
    """It cannot be had; the message says why."""


def fetch(folder: Path = FOLDER) -> Path:
    """Unpack it, if it is not there already; returns the folder that has `vllm_omni`.

    Raises:
        FetchError: pip cannot download it, or it is larger than expected.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        place = Path(name)
        _unpack(_download(place), place / "unpacked")
        try:
            os.rename(place / "unpacked", folder)
        except OSError:
            if not folder.is_dir():  # another process may have been quicker
                raise
    return folder


def _download(place: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(place), f"vllm-omni=={VERSION}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip takes more than {_DOWNLOAD_S:.0f} s") from error
    if done.returncode:
        raise FetchError(done.stderr.strip()[-500:])
    (wheel,) = place.glob("*.whl")
    if wheel.stat().st_size > _MAX_WHEEL_BYTES:
        raise FetchError(f"{wheel.name} has {wheel.stat().st_size} bytes")
    return wheel


def _unpack(wheel: Path, place: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [
            each
            for each in archive.infolist()
            if each.filename.startswith("vllm_omni/") and each.filename.endswith((".py", ".yaml"))
        ]
        total = sum(each.file_size for each in files)
        if total > _MAX_UNPACKED_BYTES:
            raise FetchError(f"{wheel.name} unpacks to {total} bytes")
        archive.extractall(place, files)


if __name__ == "__main__":
    try:
        print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
    except FetchError as error:
        sys.exit(f"vLLM-Omni {VERSION} cannot be had: {error}")
