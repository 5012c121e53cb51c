# SPDX-License-Identifier: Apache-2.0
"""What LoRA adapters contain, because a name or a path says nothing of the weights that lie there.

vLLM reads an adapter's files when it is told to load it, when a request first needs it, when it had
evicted it, and with `load_inplace` in each step. Each worker tells which version of the files it
has loaded last (`AdapterLoad`). A thread of the scheduler half reads the files, once for each
version of them, and looks at them again before each use that comes more than a second later. A
request with an adapter waits for that before anything is asked or offered for it. The content is
known if all workers have loaded the version that lies there now.

vLLM names the blocks of an adapter by its name and path, until its prefix cache is reset. So where
workers load another version under them, no KV of the adapter is shared until the next reset.
"""

import enum
import hashlib
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from omni_connector.runtime.bounded import BoundedMap
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import WOKEN, Turns

logger = logging.getLogger("vllm.omni_connector.adapters")

FRESH_S: Final = 1.0
WAIT_S: Final = 10.0
CLOSE_S: Final = 5.0

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth"})
_READ_BYTES: Final = 4 << 20
_MAX_ADAPTERS: Final = 4096

# Steps after which the workers have told of all that they had loaded before. vLLM schedules two
# steps ahead at most.
_REPORT_STEPS: Final = 3

_Name = tuple[str, str, bool]
_Version = tuple[tuple[str, int, int, int, int], ...]


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


class AskedFor(Protocol):
    """What is known of a request, as far as this module reads `RequestState`."""

    adapter_asked: tuple[float, int] | None

    @property
    def request(self) -> AdaptedRequest: ...


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A worker has loaded an adapter.

    Attributes:
        rank: of the worker.
        version: of the files, as `version_of` gives it; "" where they changed meanwhile.
    """

    rank: int
    int_id: int
    name: str
    path: str
    version: str


@dataclass(frozen=True, slots=True)
class _Seen:
    content: str | None
    version: str
    at: float


@dataclass(frozen=True, slots=True)
class _Computed:
    """Of which version vLLM has computed blocks under a name and path, in an epoch.

    Attributes:
        version: None where it is several.
    """

    version: str | None
    epoch: int


class Replaced(enum.Enum):
    """A version of an adapter that was replaced by another one under its name and path.

    vLLM names the blocks of both alike. So a block that has filled, and is not copied yet, may hold
    the KV of either.
    """

    UNUSED = enum.auto()
    """No request is being computed that began with it."""

    IN_USE = enum.auto()
    """Some are. What was computed so far is void, because nobody knows which of it."""


class AdapterContents:
    """The contents of adapters, and the requests that wait until these are known.

    The engine's thread calls all methods.

    Args:
        context: clock, statistics, and the thread that reads, which starts when the first adapter
            is used.
        ranks: workers of this engine.

    Attributes:
        used: whether any request has used an adapter. Until then no request waits, and
            `step_ended` need not be called.
    """

    def __init__(self, context: EngineContext, ranks: int = 1) -> None:
        self.used = False
        self._clock = context.clock
        self._stats = context.stats
        self._ranks = ranks
        self._start = context.start
        self._thread: Turns | None = None
        self._closing = False
        self._asked: dict[_Name, None] = {}
        self._seen: BoundedMap[_Name, _Seen] = BoundedMap(_MAX_ADAPTERS)
        self._digests: BoundedMap[Path, tuple[_Version, str]] = BoundedMap(_MAX_ADAPTERS)
        # By id: the version that each rank has.
        self._loaded: BoundedMap[int, dict[int, str]] = BoundedMap(_MAX_ADAPTERS)
        self._computed: dict[tuple[str, str], _Computed] = {}
        self._live: Counter[tuple[str, str]] = Counter()  # requests, by name and path
        # Of requests whose last step is being told. Their ids may have been given to others.
        self._ending: list[tuple[str, str]] = []
        self._steps = 0

    def begins(self, request: AdaptedRequest) -> None:
        """A request has arrived, which `ends` at some time."""
        lora = request.lora_request
        if lora is not None:
            self.used = True
            self._live[lora.lora_name, lora.lora_path] += 1

    def arrives(self, state: AskedFor) -> bool:
        """Whether a new request has to wait until its adapter is read. If so, ask `waits` later."""
        lora = state.request.lora_request
        if lora is None:
            return False
        if self._fresh(lora) and self._is_loaded(lora):
            return False
        state.adapter_asked = self._clock(), self._steps
        return True

    def waits(self, state: AskedFor) -> bool:
        """Whether a request that had to wait still has to."""
        request = state.request
        if state.adapter_asked is None or request.lora_request is None:
            return False
        since, steps = state.adapter_asked
        if self._clock() >= since + WAIT_S:
            return False
        if not self._is_loaded(request.lora_request) and self._steps < steps + _REPORT_STEPS:
            return True
        seen = self._seen.get(_name(request.lora_request))
        if seen is not None and seen.at >= since:
            return False
        return not self._fresh(request.lora_request)

    def ends(self, request: AdaptedRequest) -> None:
        """A request is over. What was loaded in its last step is told after that."""
        if (lora := request.lora_request) is not None:
            name = lora.lora_name, lora.lora_path
            self._live[name] -= 1
            if not self._live[name]:
                del self._live[name]
            self._ending.append(name)

    def step_ended(self) -> None:
        """What the workers had to tell of a step is told."""
        self._steps += 1
        self._ending.clear()

    def loaded(self, load: AdapterLoad, epoch: int) -> "Replaced | None":
        """A worker has loaded an adapter; returns which other version under the same name it has
        replaced."""
        known = self._loaded.get(load.int_id, {})
        self._loaded[load.int_id] = {**known, load.rank: load.version}
        name = load.name, load.path
        had = self._computed.get(name)
        live = self._is_live(name)
        # After a reset, too, requests compute with what they had.
        if had is None or (had.epoch != epoch and not live):
            self._computes(name, load.version, epoch)
            return None
        if had.version == load.version:
            return None
        void = live and had.version is not None
        # `epoch` ends where all is void, but vLLM keeps its blocks.
        self._computed[name] = _Computed(None, epoch + void)
        return Replaced.IN_USE if void else Replaced.UNUSED

    def _is_live(self, name: tuple[str, str]) -> bool:
        """Whether requests are being computed with an adapter of this name and path."""
        return name in self._live or name in self._ending

    def _computes(self, name: tuple[str, str], version: str | None, epoch: int) -> bool:
        if name not in self._computed and len(self._computed) >= _MAX_ADAPTERS:
            for other, had in list(self._computed.items()):
                if had.epoch != epoch and not self._is_live(other):
                    del self._computed[other]
            if len(self._computed) >= _MAX_ADAPTERS:
                return False
        self._computed[name] = _Computed(version, epoch)
        return True

    def _is_loaded(self, lora: Adapter) -> bool:
        return len(self._loaded.get(lora.lora_int_id, ())) == self._ranks

    def content(self, request: AdaptedRequest, epoch: int) -> str | None:
        """Digest of the adapter of a request; "" where it has none, None where it is unknown.

        Args:
            epoch: number of the weights' epoch.
        """
        lora = request.lora_request
        if lora is None:
            return ""
        seen = self._seen.get(_name(lora))
        problem = self._problem(lora, seen, epoch)
        if problem is None and seen is not None:
            return seen.content
        self._stats.fail("adapter_unknown")
        logger.warning(
            "Request %s shares no KV (adapter_unknown) with its LoRA adapter %r at %r: %s",
            request.request_id,
            lora.lora_name,
            lora.lora_path,
            problem,
        )
        return None

    def _problem(self, lora: Adapter, seen: _Seen | None, epoch: int) -> str | None:
        """Why the content of an adapter is unknown; None if it is known."""
        if seen is None or seen.content is None:
            return "its files cannot be read"
        versions = set(self._loaded.get(lora.lora_int_id, {}).values())
        name = lora.lora_name, lora.lora_path
        had = self._computed.get(name)
        if not self._is_loaded(lora):
            return "vLLM has not loaded it yet; later requests can share"
        if versions != {seen.version}:
            return "its files have changed since vLLM loaded it; reset the prefix cache and load it"
        if had is not None and had.epoch == epoch and had.version != seen.version:
            return "other weights were loaded under this name; reset the prefix cache"
        if not self._computes(name, seen.version, epoch):
            return f"there are more than {_MAX_ADAPTERS} adapters"
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
        version = ""
        try:
            content, version = self._read(name)
        except Exception as error:  # noqa: BLE001 - its requests share nothing; the thread goes on
            logger.warning(
                "Requests with the LoRA adapter %r at %r share no KV, as it cannot be read: %s",
                *name[:2],
                error,
            )
        self._seen[name] = _Seen(content, version, began)
        self._asked.pop(name, None)
        return 0.0

    def _read(self, name: _Name) -> tuple[str, str]:
        folder = _folder(name[1])
        files = _files(folder)
        version = _version(files)
        known = self._digests.get(folder)
        if known is None or known[0] != version:
            known = version, self._digest(files)
            if _version(_files(folder)) != version:
                raise OSError("its files are being written")
            self._digests[folder] = known
        return f"{known[1]}{'-3d' if name[2] else ''}", _text(folder, version)

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


def version_of(path: str) -> str:
    """The version of an adapter's files: another one wherever they may have been written.

    Args:
        path: as vLLM has it: a folder, or the name of a repository.

    Raises:
        OSError: there are no such files on this host.
    """
    folder = _folder(path)
    return _text(folder, _version(_files(folder)))


def _text(folder: Path, version: _Version) -> str:
    return hashlib.blake2b(repr((str(folder), version)).encode(), digest_size=16).hexdigest()


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
    return tuple(
        (name, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
        for name, stat in found
    )
