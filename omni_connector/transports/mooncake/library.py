# SPDX-License-Identifier: Apache-2.0
"""Mooncake's modules, imported at their first use; errors say what is missing and how to get it.

Mooncake connects either to IPv4 or to IPv6 addresses, never to both. It decides that once for a
process, when the package is imported, by whether the environment has `MC_USE_IPV6`. So the address
of this machine that Mooncake starts on must be known before the first import.
"""

import ctypes
import ctypes.util
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, Final

from omni_connector.errors import MissingDependencyError, TransportError
from omni_connector.net.peers import HostPort
from omni_connector.net.resolver import resolve

logger = logging.getLogger("vllm.omni_connector.transports")

_SYSTEM_LIBRARIES: Final = "libibverbs1 librdmacm1 libnuma1"
# Mooncake asks only whether the variable is set: "0" and "" count like "1".
_USE_IPV6: Final = "MC_USE_IPV6"

_PACKAGE: Final = "mooncake"

# The family of the addresses that Mooncake connects to in this process; None before its import.
_chosen: str | None = None
_importing = threading.Lock()


def engine_module(family: str | None = None) -> Any:
    """`mooncake.engine`.

    Args:
        family: `IPv4` or `IPv6`, that of the address of this machine that the engine starts on. The
            first import in a process lets Mooncake connect to addresses of this family alone. With
            None the environment decides.

    Raises:
        MissingDependencyError: the package, or a system library that it needs, is not installed.
        TransportError: Mooncake connects to the other family's addresses in this process.
    """
    return _module("mooncake.engine", family)


def store_module(family: str | None = None) -> Any:
    """`mooncake.store`.

    Args:
        family: as of `engine_module`.

    Raises:
        MissingDependencyError, TransportError: as `engine_module`.
    """
    return _module("mooncake.store", family)


def require_package() -> None:
    """Raise unless the package is there; imports none of it, so decides no address family.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise _not_installed("No module named 'mooncake'")


def family_of(host: str) -> str:
    """`IPv4` or `IPv6`: the family of an address, or of what `resolver.resolve` makes of a name.

    Raises:
        PeerUnreachableError: the name cannot be looked up; that may take half a minute.
    """
    try:
        host = resolve(HostPort(host, 0)).host
    except ValueError:
        pass  # an address with a zone, which Mooncake's store takes
    return "IPv6" if ":" in host else "IPv4"


def evicted_last() -> Any:
    """The setting that lets Mooncake evict objects last; it differs between Mooncake's versions.

    Call this once the client is set up, as its address decides the address family.

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


def _module(name: str, family: str | None) -> Any:
    global _chosen
    with _importing:
        if _chosen is None:
            if family is not None and _PACKAGE not in sys.modules:
                _choose(family)
            found = _import(name)
            _chosen = "IPv6" if _USE_IPV6 in os.environ else "IPv4"
        else:
            found = _import(name)
        chosen = _chosen
    if family not in (None, chosen):
        raise TransportError(
            f"Mooncake connects to {chosen} addresses alone in this process, as it was imported "
            f"for them, and cannot start on an {family} address: give all engines, stores and "
            "connectors of a process addresses of one family"
        )
    return found


def _choose(family: str) -> None:
    if family == "IPv6":
        os.environ[_USE_IPV6] = "1"
    elif os.environ.pop(_USE_IPV6, None) is not None:
        logger.warning(
            "%s is set, but Mooncake starts on an IPv4 address: the variable is removed, as with "
            "it Mooncake connects to no IPv4 address",
            _USE_IPV6,
        )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise _not_installed(str(error)) from error
    except ImportError as error:
        raise MissingDependencyError(
            f"Mooncake cannot be loaded: {error}; it needs system libraries (Debian, Ubuntu: "
            f"apt-get install {_SYSTEM_LIBRARIES}) and the package for this machine, {wheel_name()}"
        ) from error


def _not_installed(reason: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"Mooncake is not installed ({reason}); pip install {wheel_name()}, and the system "
        f"libraries (Debian, Ubuntu: apt-get install {_SYSTEM_LIBRARIES})"
    )


def _in_child() -> None:
    global _importing
    _importing = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_in_child)
