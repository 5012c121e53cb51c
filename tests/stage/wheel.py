# SPDX-License-Identifier: Apache-2.0
"""Loads modules of the published vLLM-Omni into this process, as far as they load without it.

It cannot be imported beside another vLLM than its own, and not without its dependencies. So its
parent packages are empty here. Packages that are absent, and are only named when its modules load,
are stood in for by modules whose attributes are empty classes.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

# Their `__init__` would import all of vLLM-Omni.
_EMPTY: Final = (
    "vllm_omni",
    "vllm_omni.config",
    "vllm_omni.core",
    "vllm_omni.core.sched",
    "vllm_omni.diffusion",
    "vllm_omni.diffusion.diffusion_kv",
    "vllm_omni.diffusion.distributed",
    "vllm_omni.diffusion.sched",
    "vllm_omni.diffusion.worker",
    "vllm_omni.distributed",
    "vllm_omni.distributed.omni_connectors",
    "vllm_omni.distributed.omni_connectors.transfer_adapter",
    "vllm_omni.entrypoints",
    "vllm_omni.inputs",
    "vllm_omni.metrics",
    "vllm_omni.worker",
)
_ABSENT: Final = ("aenum", "cache_dit", "diffusers", "imageio", "omegaconf", "prettytable")
# Of the vLLM that it wants; named only where its modules load.
_GONE: Final = (
    ("vllm.v1.outputs", "RoutedExpertsLists"),
    ("vllm.v1.worker.utils", "is_residual_scattered_for_sp"),
)


class _Empty(type):
    """Of classes whose attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(types.ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Empty(name, (), {})
        setattr(self, name, found)
        return found


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last to be asked, so that what is installed is loaded."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def make_importable(root: Path) -> None:
    """Let this process import `vllm_omni` and what it needs.

    Args:
        root: folder that the wheel was unpacked into.
    """
    for name in _EMPTY:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, package)
    sys.meta_path.append(_Absent())
    vars(sys.modules["vllm_omni.metrics"])["OrchestratorAggregator"] = None


def make_loadable() -> None:
    """Give vLLM what vLLM-Omni adds to it, and the names of its vLLM that this one lacks."""
    from vllm.v1.request import RequestStatus

    for module, name in _GONE:
        vars(importlib.import_module(module)).setdefault(name, None)
    for value, name in ((-1, "WAITING_FOR_CHUNK"), (-2, "WAITING_FOR_INPUT")):
        member = int.__new__(RequestStatus, value)
        member._name_, member._value_ = name, value
        setattr(RequestStatus, name, member)
        RequestStatus._member_map_[name] = member
        RequestStatus._value2member_map_[value] = member
