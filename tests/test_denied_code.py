# SPDX-License-Identifier: Apache-2.0
"""Where a process may not run code that it has written, numpy and Python do the work."""

import json
import platform
import subprocess
import sys

import pytest

# Installs a seccomp filter that denies mprotect and pkey_mprotect with PROT_EXEC, as a hardened
# kernel does; then runs the rest in the same process.
DENY = """
import ctypes, platform, struct, sys

# By machine: AUDIT_ARCH, mprotect, pkey_mprotect.
ARCH, MPROTECT, PKEY_MPROTECT = {
    "x86_64": (0xC000003E, 10, 329),
    "aarch64": (0xC00000B7, 226, 288),
}[platform.machine()]
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, DENY = 0x7FFF0000, 0x00050000 | 13  # EACCES
PROTECTION = 16 + 2 * 8  # the third argument in struct seccomp_data
filter_code = b"".join(
    struct.pack("=HBBI", *line)
    for line in (
        (LOAD, 0, 0, 4),
        (EQUAL, 0, 6, ARCH),
        (LOAD, 0, 0, 0),
        (EQUAL, 1, 0, MPROTECT),
        (EQUAL, 0, 3, PKEY_MPROTECT),
        (LOAD, 0, 0, PROTECTION),
        (ANY_BIT, 0, 1, 4),
        (RETURN, 0, 0, DENY),
        (RETURN, 0, 0, ALLOW),
    )
)
code = ctypes.create_string_buffer(filter_code)
program = ctypes.create_string_buffer(struct.pack("=H6xQ", len(filter_code) // 8,
                                                  ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
NO_NEW_PRIVS, SECCOMP, FILTER = 38, 22, 2
if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
    SECCOMP, FILTER, ctypes.addressof(program), 0, 0
):
    print("no seccomp:", ctypes.get_errno())
    sys.exit(77)
"""

USE = """
import json, logging

said = []
class Notes(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("vllm.omni_connector.native").addHandler(Notes())

from omni_connector.copy.native import native_copy

found = [native_copy() is None for _ in range(2)]
print(json.dumps([found, said]))
"""


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter for this")
def test_an_engine_that_may_not_run_its_own_code_goes_on_without_and_says_so_once():
    pytest.importorskip("llvmlite")
    done = run(DENY + USE)
    if done.returncode == 77:
        pytest.skip(f"this kernel takes no seccomp filter: {done.stdout}")
    assert done.returncode == 0, done.stderr[-2000:]
    without, said = json.loads(done.stdout)
    assert without == [True] * 2
    assert len(said) == 1
    assert "Permission denied" in said[0]


def test_where_it_may_it_does():
    pytest.importorskip("llvmlite")
    done = run(USE)
    assert json.loads(done.stdout) == [[False] * 2, []], done.stderr[-2000:]
