# SPDX-License-Identifier: Apache-2.0
"""Mooncake's modules, imported at their first use; errors say what is missing and how to get it."""

import ctypes
import ctypes.util
import importlib
import shutil
from pathlib import Path
from typing import Any, Final

from omni_connector.errors import MissingDependencyError

_SYSTEM_LIBRARIES: Final = "libibverbs1 librdmacm1 libnuma1"


def engine_module() -> Any:
    """`mooncake.engine`.

    Raises:
        MissingDependencyError: the package, or a system library that it needs, is not installed.
    """
    return _module("mooncake.engine")


def store_module() -> Any:
    """`mooncake.store`.

    Raises:
        MissingDependencyError: as `engine_module`.
    """
    return _module("mooncake.store")


def evicted_last() -> Any:
    """The setting that lets Mooncake evict objects last; it differs between Mooncake's versions.

    Raises:
        MissingDependencyError: as `engine_module`.
    """
    module = store_module()
    config = module.ReplicateConfig()
    if hasattr(module, "SoftPinAction"):
        config.soft_pin_action = module.SoftPinAction.ENABLE
    else:
        config.with_soft_pin = True
    return config


def never_destroy(native: object) -> None:
    """Keep an object of Mooncake until this process ends, and then leave it to the kernel.

    In a process that was forked it has none of its threads, and its destructor would crash.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def wheel_name() -> str:
    """The package of Mooncake for this machine."""
    if ctypes.util.find_library("cuda") is None and shutil.which("nvidia-smi") is None:
        return "mooncake-transfer-engine-non-cuda"
    toolkit = Path("/usr/local/cuda").resolve().name
    runtime = ctypes.util.find_library("cudart") or ""
    if toolkit.startswith("cuda-13") or runtime.endswith(".so.13"):
        return "mooncake-transfer-engine-cuda13"
    return "mooncake-transfer-engine"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"Mooncake is not installed ({error}); pip install {wheel_name()}, and the system "
            f"libraries (Debian, Ubuntu: apt-get install {_SYSTEM_LIBRARIES})"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"Mooncake cannot be loaded: {error}; it needs system libraries (Debian, Ubuntu: "
            f"apt-get install {_SYSTEM_LIBRARIES}) and the package for this machine, {wheel_name()}"
        ) from error
