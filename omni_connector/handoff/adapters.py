# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapters contain, because a name or a path says nothing of the weights that lie there.

A thread reads the files of an adapter, once for each version of them, and looks at them again
before each use that comes more than a second later. A request with an adapter waits for that before
anything is asked or offered for it.

vLLM names the blocks of an adapter by its name and path. So within an epoch of the weights one name
and path stands for one content here. Where the files change, no KV of the adapter is shared until
vLLM's prefix cache is reset and the adapter is loaded again.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from omni_connector.stats import Stats
from omni_connector.turns import WOKEN, StartTurns, Turns, TurnThread

logger = logging.getLogger("vllm.omni_connector.adapters")

FRESH_S: Final = 1.0
WAIT_S: Final = 10.0
CLOSE_S: Final = 5.0

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth"})
_READ_BYTES: Final = 4 << 20
_MAX_ADAPTERS: Final = 4096

_Name = tuple[str, str, bool]
_Version = tuple[tuple[str, int, int, int], ...]


class Adapter(Protocol):
    """An adapter, as far as this module reads vLLM's `LoRARequest`."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_path(self) -> str: ...
    @property
    def lora_int_id(self) -> int: ...
    @property
    def load_inplace(self) -> bool: ...
    @property
    def is_3d_lora_weight(self) -> bool: ...


class AdaptedRequest(Protocol):
    """A request, as far as this module reads vLLM's `Request`."""

    @property
    def request_id(self) -> str: ...
    @property
    def lora_request(self) -> Adapter | None: ...


@dataclass(frozen=True, slots=True)
class _Seen:
    content: str | None
    at: float


@dataclass(frozen=True, slots=True)
class _Used:
    content: str
    epoch: int
    int_id: int


class AdapterContents:
    """The contents of adapters, and the requests that wait until these are known.

    The engine's thread calls all methods.

    Args:
        clock: seconds, monotonic.
        start: starts the thread that reads, when the first adapter is used.
    """

    def __init__(self, clock: Callable[[], float], start: StartTurns = TurnThread) -> None:
        self._clock = clock
        self._start = start
        self._thread: Turns | None = None
        self._closing = False
        self._asked: dict[_Name, None] = {}
        self._seen: dict[_Name, _Seen] = {}
        self._digests: dict[Path, tuple[_Version, str]] = {}
        self._used: dict[_Name, _Used] = {}
        self._waiting: dict[str, float] = {}

    def arrives(self, request: AdaptedRequest) -> bool:
        """Whether a new request has to wait until its adapter is read. If so, ask `waits` later."""
        if request.lora_request is None or self._fresh(request.lora_request):
            return False
        self._waiting[request.request_id] = self._clock()
        return True

    def waits(self, request: AdaptedRequest) -> bool:
        """Whether a request that had to wait still has to."""
        since = self._waiting.get(request.request_id)
        if since is None or request.lora_request is None:
            return False
        seen = self._seen.get(_name(request.lora_request))
        if seen is not None and seen.at >= since:
            return False
        return not self._fresh(request.lora_request) and self._clock() < since + WAIT_S

    def goes_on(self, request_id: str) -> bool:
        """End the wait of a request, if it waits; returns whether it did."""
        return self._waiting.pop(request_id, None) is not None

    def content(self, request: AdaptedRequest, epoch: int, stats: Stats) -> str | None:
        """Digest of the adapter of a request; "" where it has none, None where it is unknown.

        Args:
            epoch: number of the weights' epoch.
            stats: where adapters of unknown content are counted.
        """
        lora = request.lora_request
        if lora is None:
            return ""
        name = _name(lora)
        seen, used = self._seen.get(name), self._used.get(name)
        problem = None
        if seen is None or seen.content is None:
            problem = "its files cannot be read"
        elif used is None:
            if len(self._used) >= _MAX_ADAPTERS:
                problem = f"there are more than {_MAX_ADAPTERS} adapters"
        elif used.content != seen.content and not (
            used.epoch != epoch and (used.int_id != lora.lora_int_id or lora.load_inplace)
        ):
            problem = "its files have changed; reset the prefix cache and load it again"
        if problem is None:
            assert seen is not None
            assert seen.content is not None
            self._used[name] = _Used(seen.content, epoch, lora.lora_int_id)
            return seen.content
        stats.fail("adapter_unknown")
        logger.warning(
            "Request %s shares no KV (adapter_unknown): of the LoRA adapter %r at %r, %s",
            request.request_id,
            lora.lora_name,
            lora.lora_path,
            problem,
        )
        return None

    def close(self) -> None:
        """Stop the thread, within `CLOSE_S` seconds. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.wake()
            self._thread.join(CLOSE_S)

    def _fresh(self, lora: Adapter) -> bool:
        name = _name(lora)
        seen = self._seen.get(name)
        if seen is not None and self._clock() < seen.at + FRESH_S:
            return True
        if name not in self._asked:
            if len(self._seen) > _MAX_ADAPTERS:
                self._seen.clear()
            self._asked[name] = None
            if self._thread is None:
                self._thread = self._start("omni-adapters", self._turn)
            self._thread.wake()
        return False

    def _turn(self) -> float | None:
        name = next(iter(self._asked.copy()), None)
        if self._closing or name is None:
            return None if self._closing else WOKEN
        began = self._clock()
        content = None
        try:
            content = self._read(name)
        except Exception as error:  # noqa: BLE001 - its requests share nothing; the thread goes on
            logger.warning("The LoRA adapter %r at %r cannot be read: %s", *name[:2], error)
        self._seen[name] = _Seen(content, began)
        self._asked.pop(name, None)
        return 0.0

    def _read(self, name: _Name) -> str:
        folder = _folder(name[1])
        files = _files(folder)
        version = _version(files)
        known = self._digests.get(folder)
        if known is None or known[0] != version:
            known = version, self._digest(files)
            if _version(_files(folder)) != version:
                raise OSError("its files are being written")
            if len(self._digests) > _MAX_ADAPTERS:
                self._digests.clear()
            self._digests[folder] = known
        return f"{known[1]}{'-3d' if name[2] else ''}"

    def _digest(self, files: list[Path]) -> str:
        hasher = hashlib.blake2b(digest_size=16)
        for path in files:
            head = f"{path.name}\0{path.stat().st_size}\0"
            hasher.update(head.encode("utf-8", "surrogateescape"))
            with path.open("rb") as file:
                while content := file.read(_READ_BYTES):
                    if self._closing:
                        raise OSError("the engine ends")
                    hasher.update(content)
        return hasher.hexdigest()


def _name(lora: Adapter) -> _Name:
    return lora.lora_name, lora.lora_path, lora.is_3d_lora_weight


def _folder(path: str) -> Path:
    """The folder from which vLLM's workers load an adapter."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder.resolve()
    from huggingface_hub import snapshot_download

    found: Any = snapshot_download(path, local_files_only=True)  # the workers download it
    return Path(found).resolve()


def _files(folder: Path) -> list[Path]:
    """An adapter's configuration and weights.

    Raises:
        OSError: one of them is missing.
    """
    files = sorted(p for p in folder.iterdir() if p.name == _CONFIG or p.suffix in _WEIGHTS)
    if len(files) < 2 or _CONFIG not in {path.name for path in files}:
        raise OSError(f"no {_CONFIG} and weights in {folder}")
    return files


def _version(files: list[Path]) -> _Version:
    found = ((path.name, path.stat()) for path in files)
    return tuple((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in found)
