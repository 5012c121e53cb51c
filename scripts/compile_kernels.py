#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels, which are written in C, to the LLVM IR that is shipped beside them.

    python scripts/compile_kernels.py           writes omni_connector/*/kernels/*.ll and *.ptx
    python scripts/compile_kernels.py --check   fails where one is not what its C gives

Who changes a kernel needs clang 19, or the one that the environment variable CLANG names; nobody
else does. llvmlite compiles the IR for the processor that it meets, with the LLVM that it has. So
what clang says about the target is removed, and so are the attributes and flags: each version of
LLVM has some that older ones cannot read.

Kernels whose C asks for `__NVPTX__` are compiled to PTX as well. The driver of a CUDA device makes
its machine code of that: for all devices from compute capability 7.0 on.

The first line tells clang's major version, since each writes other IR, and a digest of the C and of
the headers that it includes. `--check` compares the digest, and compiles again where it finds a
clang of that version.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

# The target is any with 64 bits and little-endian words. Loops and vectors stay as they are in C:
# clang would choose those of the target's oldest processor.
FLAGS: Final = (
    *("--target=x86_64-unknown-linux-gnu", "-ffreestanding", "-nostdlibinc", "-std=c17"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-O2", "-fno-vectorize", "-fno-slp-vectorize", "-fno-strict-aliasing"),
    *("-fno-discard-value-names", "-S", "-emit-llvm", "-o", "-"),
)

# PTX 6.0 is the oldest that has sm_70, and drivers from 384.81 on read it. Without saying so, clang
# asks for the newest that it knows, which drivers before R555 refuse.
PTX_FLAGS: Final = (
    *("--target=nvptx64-nvidia-cuda", "-march=sm_70", "--cuda-feature=+ptx60"),
    *("-ffreestanding", "-nostdlibinc", "-std=c17"),
    *("-Wall", "-Wextra", "-Werror", "-O3", "-fno-strict-aliasing", "-S", "-o", "-"),
)

_FIRST_LINE: Final = re.compile(r"(?:;|//) clang (\d+), sha256 of the C (\w+)")
_DROPPED_LINE: Final = re.compile(r"(; (ModuleID|Function)|source_filename|target|attributes|!).*")
_DROPPED: Final = re.compile(
    r"\s+; preds = .*"
    r"|, !llvm\.loop !\d+"
    r"| (#\d+|dso_local|local_unnamed_addr|inbounds|nuw|nsw|nneg|disjoint|samesign"
    r"|noundef|nonnull|noalias|nocapture|captures\(none\)|readonly|writeonly|immarg"
    r"|range\([^)]*\)|dereferenceable\(\d+\))(?![\w(])"
)
_NONTEMPORAL: Final = re.compile(r"(?<=!nontemporal )!\d+")


def kernels() -> list[Path]:
    """Their C files."""
    return sorted(ROOT.glob("omni_connector/**/kernels/*.c"))


def digest(source: Path) -> str:
    """What the IR says about the C that it was made from."""
    content = b"".join(each.read_bytes() for each in (source, *headers(source)))
    return hashlib.sha256(content).hexdigest()[:16]


def headers(source: Path) -> list[Path]:
    """The headers beside a kernel that it includes, also by way of others."""
    found: list[Path] = []
    left = [source]
    while left:
        text = left.pop().read_text(encoding="utf-8")
        more = [each for each in source.parent.glob("*.h") if f'"{each.name}"' in text]
        left += [each for each in more if each not in found]
        found += [each for each in more if each not in found]
    return sorted(found)


def find_clang(major: str = "19") -> str | None:
    """The command of a clang of this version; None where there is none."""
    for command in filter(None, (os.environ.get("CLANG"), f"clang-{major}", "clang")):
        if shutil.which(command) and version(command) == major:
            return command
    return None


def version(clang: str) -> str:
    """Its major version."""
    told = subprocess.check_output([clang, "-dumpversion"], text=True)
    return told.partition(".")[0].strip()


def targets(source: Path) -> list[Path]:
    """The files that are made of a kernel."""
    content = "".join(each.read_text(encoding="utf-8") for each in (source, *headers(source)))
    suffixes = [".ll"] + [".ptx"] * ("__NVPTX__" in content)
    return [source.with_suffix(suffix) for suffix in suffixes]


def compiled(target: Path, clang: str) -> str:
    """A kernel as it is shipped."""
    source = target.with_suffix(".c")
    to_ptx = target.suffix == ".ptx"
    flags = PTX_FLAGS if to_ptx else FLAGS
    done = subprocess.run(
        [clang, *flags, str(source)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{clang} cannot compile {source}")
    comment = "//" if to_ptx else ";"
    lines = [f"{comment} clang {version(clang)}, sha256 of the C {digest(source)}"]
    lines += [f"{comment} scripts/compile_kernels.py has made this file.", ""]
    if to_ptx:
        return "\n".join([*lines, done.stdout.strip(), ""])
    for line in done.stdout.splitlines():
        if not _DROPPED_LINE.fullmatch(line) and (line or lines[-1]):
            lines.append(_NONTEMPORAL.sub("!0", _DROPPED.sub("", line)))
    if "!nontemporal" in done.stdout:
        lines += ["", "!0 = !{i32 1}"]
    return "\n".join(lines).strip() + "\n"


def outdated(target: Path) -> str | None:
    """Why a file is not what the kernel's C gives; None if it is, as far as can be told here."""
    source = target.with_suffix(".c")
    there = target.read_text(encoding="utf-8") if target.exists() else ""
    found = _FIRST_LINE.match(there)
    if found is None:
        return "was not made by this script"
    if found[2] != digest(source):
        return f"was made from another {source.name}"
    clang = find_clang(found[1])
    if clang is None:
        print(f"no clang {found[1]} here: only the digest of {source.name} was compared")
    elif there != compiled(target, clang):
        return f"is not what {clang} makes of {source.name}"
    return None


def main() -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        made = [target for source in kernels() for target in targets(source)]
        reasons = {target: outdated(target) for target in made}
        for target, reason in reasons.items():
            if reason is not None:
                print(
                    f"{target.relative_to(ROOT)} {reason}: run scripts/compile_kernels.py",
                    file=sys.stderr,
                )
        return int(any(reasons.values()))
    clang = os.environ.get("CLANG") or find_clang()
    if clang is None:
        print("clang 19 is missing (Debian: apt-get install clang-19)", file=sys.stderr)
        return 1
    for source in kernels():
        for target in targets(source):
            target.write_text(compiled(target, clang), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
