# SPDX-License-Identifier: Apache-2.0
"""The IR that is shipped is that of the C beside it, and every processor's."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import module_at

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compile_kernels.py"


script: Any = module_at(SCRIPT)
KERNELS = script.kernels()
MADE = [target for source in KERNELS for target in script.targets(source)]
each_kernel = pytest.mark.parametrize("source", KERNELS, ids=lambda source: source.stem)
each_made = pytest.mark.parametrize("target", MADE, ids=lambda target: target.name)


def test_the_kernels_are_these() -> None:
    host = {"copy"}
    devices = {"hash_rows", "move_rows"}
    assert {source.stem for source in KERNELS} == host | devices
    assert {each.stem for each in MADE if each.suffix == ".ptx"} == devices


def copied(target: Path, folder: Path) -> Path:
    """A copy of a kernel's C, of its headers, and of one file that is made of it."""
    for each in (target.with_suffix(".c"), *target.parent.glob("*.h"), target):
        shutil.copy(each, folder)
    return folder / target.name


@each_made
def test_the_ir_was_made_from_this_c(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "find_clang", lambda major: None)
    assert script.outdated(target) is None


@each_made
def test_clang_makes_the_same_ir_of_it(target: Path) -> None:
    [major] = re.findall(r"^(?:;|//) clang (\d+)", target.read_text(encoding="utf-8"))
    if script.find_clang(major) is None:
        pytest.skip(f"no clang {major} here")
    assert script.outdated(target) is None


@pytest.mark.parametrize("target", [each for each in MADE if each.suffix == ".ptx"])
def test_drivers_before_the_newest_read_the_ptx(target: Path) -> None:
    """A driver refuses PTX of a version that is newer than itself; 6.0 is the oldest for sm_70."""
    versions = re.findall(
        r"^\.version (.+)\n\.target (.+)$", target.read_text("utf-8"), re.MULTILINE
    )
    assert versions == [("6.0", "sm_70")]


@each_made
def test_ir_of_other_c_is_outdated(target: Path, tmp_path: Path) -> None:
    copy = copied(target, tmp_path)
    assert script.outdated(copy) is None
    for changed in (copy.with_suffix(".c"), *script.headers(copy.with_suffix(".c"))):
        before = changed.read_text(encoding="utf-8")
        changed.write_text(before + "\n", encoding="utf-8")
        assert "from another" in script.outdated(copy)
        changed.write_text(before, encoding="utf-8")
    copy.unlink()
    assert "was not made" in script.outdated(copy)


@each_made
def test_ir_that_was_changed_is_outdated(target: Path, tmp_path: Path) -> None:
    if script.find_clang() is None:
        pytest.skip("no clang 19 here")
    copy = copied(target, tmp_path)
    code = copy.read_text(encoding="utf-8")
    copy.write_text(code.replace("add", "sub"), encoding="utf-8")
    assert "is not what" in script.outdated(copy)


@each_kernel
@pytest.mark.parametrize(
    ("triple", "processor", "past_caches"),
    [
        ("x86_64-unknown-linux-gnu", "x86-64", "movnt"),
        ("x86_64-unknown-linux-gnu", "x86-64-v3", "vmovnt"),
        ("x86_64-unknown-linux-gnu", "sapphirerapids", "vmovnt.*zmm"),
        ("aarch64-unknown-linux-gnu", "generic", "stnp"),
        ("aarch64-unknown-linux-gnu", "neoverse-v2", "stnp"),
    ],
)
def test_the_ir_is_compiled_for_every_processor(
    source: Path, triple: str, processor: str, past_caches: str
) -> None:
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    ir = source.with_suffix(".ll").read_text(encoding="utf-8")
    assert not re.search(r"target (triple|datalayout)|attributes #", ir)
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=2)
    module = llvm.parse_assembly(ir)
    module.triple = triple
    module.data_layout = str(machine.target_data)
    module.verify()
    assert machine.emit_object(module)
    if source.stem == "copy":
        assert len(re.findall(rf"\t{past_caches}", machine.emit_assembly(module))) >= 2 * 16


def test_a_wheel_has_c_and_ir(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for each in (*KERNELS, *MADE):
        assert str(each.relative_to(ROOT)) in names
