# SPDX-License-Identifier: Apache-2.0
"""Machine code from the kernels, which are C that is shipped as LLVM IR.

scripts/compile_kernels.py makes the IR, which is the same for all processors. llvmlite, which vLLM
installs for numba, compiles it at the start for the processor at hand. Every user of a kernel has a
slower way in Python: it takes that way if llvmlite is missing, or if the host's Linux does not let
a process run code that the process has written.
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
    """Linux does not let this process run code that it has written."""


@functools.cache
def code_is_denied() -> bool:
    """Whether Linux does not let this process run code that it has written. Logs a denial once.

    Hardened kernels, SELinux and seccomp filters deny it. LLVM ignores the error of `mprotect`, so
    that the first call would end the process with SIGSEGV. Therefore this makes the same request as
    LLVM beforehand: it makes memory executable that was written.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        page[0] = 1
        # The buffer is freed at the end of this line; a page that has one cannot be unmapped.
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        wanted = mmap.PROT_READ | mmap.PROT_EXEC
        denied = bool(libc.mprotect(address, mmap.PAGESIZE, wanted))
        code = ctypes.get_errno() or errno.EACCES
    if denied:
        logger.warning(
            "This process may not run code that it compiles (mprotect: %s). Numpy copies KV "
            "blocks instead, which is slower",
            os.strerror(code),
        )
    return denied


def kernel(module: str, name: str) -> str:
    """Return a kernel as it is shipped, from the folder `kernels` beside a module.

    >>> kernel("omni_connector.copy.native", "copy.ll").splitlines()[1]
    '; scripts/compile_kernels.py has made this file.'
    """
    folder = files(module.rpartition(".")[0]).joinpath("kernels")
    return folder.joinpath(name).read_text(encoding="utf-8")


def compiled(code: str) -> Any:
    """Compile IR; return LLVM's engine, which has the functions' addresses. The machine code is
    freed with the engine.

    Raises:
        CodeDeniedError: Linux does not let this process run it.
        Exception: llvmlite is missing (`ImportError`), or cannot compile the IR.
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
