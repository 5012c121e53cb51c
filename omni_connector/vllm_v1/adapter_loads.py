# SPDX-License-Identifier: Apache-2.0
"""Which versions of LoRA adapters vLLM loads in this process.

vLLM tells a connector nothing of it: not when an adapter is loaded ahead of any request, nor when
it is read again because it was evicted, or with `load_inplace`. So the method of vLLM's worker
that reads an adapter's files is patched. Where there is no such method, nothing is reported, and
the contents of adapters stay unknown.
"""

import weakref
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omni_connector.identity.adapters import Adapter, AdapterLoad, version_of
from omni_connector.vllm_v1.patches import watch_adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_watching: Final[weakref.WeakSet["AdapterLoads"]] = weakref.WeakSet()


class AdapterLoads:
    """What one worker has loaded and not told yet. Its engine's thread calls all methods.

    Attributes:
        found: name, path and version of each adapter that was loaded, by its id.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[str, str, str]] = {}

    def note(self, lora: Adapter, before: str | None, after: str | None) -> None:
        """An adapter was loaded, or its load has failed.

        Args:
            before, after: versions of its files before and after that; None where there were none.
        """
        local = Path(lora.lora_path).expanduser().exists()
        # What is no path of this host is a repository, which vLLM downloads while it loads.
        unchanged = before == after or (before is None and not local)
        version = after if unchanged else None
        self.found[lora.lora_int_id] = lora.lora_name, lora.lora_path, version or ""

    def take(self, rank: int) -> list[AdapterLoad]:
        """The last load of each adapter since the last call."""
        found, self.found = self.found, {}
        return [AdapterLoad(rank, int_id, *load) for int_id, load in found.items()]


def watch_adapter_loads(vllm_config: "VllmConfig") -> AdapterLoads:
    """From now on note the adapters that vLLM loads in this process."""
    loads = AdapterLoads()
    if vllm_config.lora_config is not None:
        watch_adapters(_loading)
        _watching.add(loads)
    return loads


def _loading(lora: Adapter) -> Generator[None, None, None]:
    before = _version(lora)
    try:
        yield
    finally:
        after = _version(lora)
        for loads in _watching:
            loads.note(lora, before, after)


def _version(lora: Adapter) -> str | None:
    try:
        return version_of(lora.lora_path)
    except Exception:  # noqa: BLE001 - whatever it is, vLLM says so itself if it cannot load
        return None
