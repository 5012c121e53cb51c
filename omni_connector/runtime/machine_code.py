# SPDX-License-Identifier: Apache-2.0
"""Machine code from the kernels: C that is shipped as LLVM IR, and compiled where it runs.

scripts/compile_kernels.py makes the IR, which is the same for all processors. llvmlite, which vLLM
needs for numba, compiles it for the one that it meets. Whoever uses a kernel goes on without where
there is no llvmlite, or where the kernel of the host does not let a process run such code.
"""

import ctypes
import errno
import functools
import importlib
import logging
import mmap
import os
from importlib.resources import files
from typing import Any

logger = logging.getLogger("vllm.omni_connector.native")


class CodeDeniedError(OSError):
    """The kernel does not let this process run code that it has written."""


@functools.cache
def code_is_denied() -> bool:
    """Whether the kernel does not let this process run code that it has written; says so once.

    Hardened kernels, SELinux and seccomp filters deny it. LLVM does not look at the answer, and the
    process would end with SIGSEGV at the first call. So this asks as LLVM does: for memory that was
    written to become executable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        page[0] = 1
        # The address is that of a buffer, which must be gone before the page can be unmapped.
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        wanted = mmap.PROT_READ | mmap.PROT_EXEC
        denied = bool(libc.mprotect(address, mmap.PAGESIZE, wanted))
        code = ctypes.get_errno() or errno.EACCES
    if denied:
        logger.warning(
            "This process may not run code that it compiles (mprotect: %s), so numpy and Python "
            "copy KV blocks and look them up, more slowly",
            os.strerror(code),
        )
    return denied


def kernel(module: str, name: str) -> str:
    """The IR of a kernel, from the folder `kernels` beside a module.

    >>> kernel("omni_connector.copy.native", "copy").splitlines()[1]
    '; scripts/compile_kernels.py has made this file.'
    """
    folder = files(module.rpartition(".")[0]).joinpath("kernels")
    return folder.joinpath(f"{name}.ll").read_text(encoding="utf-8")


def compiled(code: str) -> Any:
    """Machine code of LLVM's, which is there as long as what this returns.

    Raises:
        CodeDeniedError: the kernel lets nobody run it.
        Exception: whatever keeps llvmlite from compiling it; or there is none.
    """
    if code_is_denied():
        raise CodeDeniedError("compiled code may not run here")
    llvm: Any = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=2
    )
    module = llvm.parse_assembly(code)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
