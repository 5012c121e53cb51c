# SPDX-License-Identifier: Apache-2.0
"""Mooncake that is not there, or not all of it; where it is, the other tests show that."""

import ctypes.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector.transports.mooncake.transport import library as mooncake_lib

IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
from omni_connector.errors import MissingDependencyError
from omni_connector.transports.mooncake.transport.library import engine_module, store_module
for module in (engine_module, store_module):
    try:
        module()
    except MissingDependencyError as error:
        print(error)
assert "torch" not in sys.modules
"""


def messages(folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_missing_wheel_is_named_with_its_libraries(tmp_path: Path) -> None:
    (tmp_path / "mooncake.py").write_text("raise ModuleNotFoundError('No module named mooncake')")
    told = messages(tmp_path)
    assert len(told) == 2
    for each in told:
        assert f"pip install {mooncake_lib.wheel_name()}," in each
        assert "apt-get install libibverbs1 librdmacm1 libnuma1" in each


def test_a_missing_library_is_named_with_its_package(tmp_path: Path) -> None:
    message = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (tmp_path / "mooncake").mkdir()
    for name in ("__init__", "engine", "store"):
        source = "" if name == "__init__" else f"raise ImportError({message!r})"
        (tmp_path / "mooncake" / f"{name}.py").write_text(source)
    told = messages(tmp_path)
    assert len(told) == 2
    for each in told:
        assert message in each
        assert "apt-get install libibverbs1 librdmacm1 libnuma1" in each


@pytest.mark.parametrize(
    ("libraries", "toolkit", "wheel"),
    [
        ({}, "cuda", "mooncake-transfer-engine-non-cuda"),
        ({"cuda": "libcuda.so.1"}, "cuda-12.9", "mooncake-transfer-engine"),
        ({"cuda": "libcuda.so.1"}, "cuda-13.0", "mooncake-transfer-engine-cuda13"),
        (
            {"cuda": "libcuda.so.1", "cudart": "libcudart.so.13"},
            "cuda",
            "mooncake-transfer-engine-cuda13",
        ),
    ],
)
def test_the_wheel_is_that_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, libraries: dict[str, str], toolkit: str, wheel: str
) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", libraries.get)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(Path, "resolve", lambda path: Path("/usr/local") / toolkit)
    assert mooncake_lib.wheel_name() == wheel
