# SPDX-License-Identifier: Apache-2.0
"""Running a command as on a lesser CPU, so that its way through the code is tested here too."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "as_cpu.sh"

# What numpy asks CPUID for when it is imported, in a child of a child; and then a real fault.
ASK = """
import faulthandler, json, os, signal, subprocess, sys
faulthandler.enable(sys.stderr)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
if sys.argv[1:]:
    from numpy._core._multiarray_umath import __cpu_features__ as found
    print(json.dumps(sorted(name for name, there in found.items() if there)))
else:
    subprocess.run([sys.executable, __file__, "child"], check=True)
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def run(place: Path, *arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    script = place / "ask.py"
    script.write_text(ASK)
    return subprocess.run(
        [str(SCRIPT), *arguments, sys.executable, str(script)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def features(place: Path, *arguments: str) -> set[str]:
    done = run(place, *arguments)
    assert done.returncode in (-signal.SIGSEGV, 128 + signal.SIGSEGV), done.stderr
    assert "Segmentation fault" in done.stderr  # said by faulthandler, whose handler was called
    return set(json.loads(done.stdout.splitlines()[0]))


def test_what_is_taken_away_is_not_there_for_children_either(tmp_path: Path) -> None:
    if "cpuid_fault" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this CPU cannot pose as another: no `cpuid_fault` in /proc/cpuinfo")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        pytest.skip("there is no C compiler")
    haswell = features(tmp_path, "avx2")
    assert {"AVX2", "FMA3"} <= haswell
    assert not any(name.startswith("AVX512") for name in haswell)
    cascade_lake = features(tmp_path, "avx512")
    assert haswell <= cascade_lake
    assert "AVX512_SPR" not in cascade_lake
    if "avx512f" in Path("/proc/cpuinfo").read_text().split() and "CPUID_MASK" not in os.environ:
        assert "AVX512F" in cascade_lake


@pytest.mark.parametrize("arguments", [(), ("sse",)])
def test_another_level_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert "avx2 or avx512" in done.stderr
