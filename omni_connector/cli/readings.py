# SPDX-License-Identifier: Apache-2.0
"""The state of a namespace's engines at one moment, and rates between two moments.

Both are read from the engines' status files (`omni_connector.net.status`); no engine is asked.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from omni_connector.cli.namespaces import existing_folder
from omni_connector.net.runtime import namespace_dir
from omni_connector.net.status import SIGN_OF_LIFE_S, EngineStatus, Usage, label, plain, read

SILENT_S: Final = 3 * SIGN_OF_LIFE_S
"""Seconds without a written status after which a living process counts as silent: it is stopped,
or its control channel has ended. An engine writes at least every `SIGN_OF_LIFE_S`."""

_STILL_S: Final = 2.5
"""Seconds after which the rates of an engine count as 0. An engine whose counts change writes them
earlier."""

_LOADED: Final = {
    "arena": "tokens_kept",
    "host": "tokens_from_host",
    "peer": "tokens_loaded",
    "store": "tokens_shared",
    "other": "tokens_from_others",
}

Rates = Mapping[str, float]


def hit_rates(engines: Iterable[EngineStatus]) -> dict[str, float | None]:
    """Return the part of the prompts' tokens that was not computed, from 0 to 1, by source.

    Sources are the engine's `own` cache in vLLM, its `arena`, other engines of the `host`, a
    hand-off from a `peer`, the shared `store`, and an `other` connector beside ours. The values are
    None before the first prompt.
    """
    engines = list(engines)
    tokens = sum(each.prompt_tokens for each in engines)
    loaded = {
        source: sum(each.counts.get(name, 0) for each in engines)
        for source, name in _LOADED.items()
    }
    # An engine counts loaded tokens a little before it counts their prompt.
    own = max(0, sum(each.cached_tokens for each in engines) - sum(loaded.values()))
    return {
        name: min(1.0, part / tokens) if tokens else None
        for name, part in {"own": own, **loaded}.items()
    }


def lost_threads(engines: Iterable[EngineStatus]) -> list[str]:
    """A remark on each engine of which an exception has ended a thread."""
    return [
        f"{label(each.engine_id)} has lost threads ({', '.join(each.ended_threads)}), and its log "
        "says why: restart it"
        for each in engines
        if each.ended_threads
    ]


def unpinned(engines: Iterable[EngineStatus]) -> list[str]:
    """A remark on each engine whose devices have not pinned all memory of arenas."""
    return [
        f"GPUs of {label(each.engine_id)} have not pinned {each.unpinned_bytes / 2**30:.1f} of "
        f"{(each.pinned_bytes + each.unpinned_bytes) / 2**30:.1f} GiB of arenas, which they copy "
        "at a fraction of the speed; its log may say why"
        for each in engines
        if each.unpinned_bytes
    ]


@dataclass(frozen=True)
class Reading:
    """The state of a namespace's engines at one moment.

    Attributes:
        namespace: the namespace.
        folder: its runtime folder.
        time: Unix time, in seconds.
        engines: the living engines, sorted by engine id.
        remarks: the files that were skipped, and why; the engines that have lost threads, or have
            memory that is not pinned.
    """

    namespace: str
    folder: Path
    time: float
    engines: list[EngineStatus] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def take(cls, namespace: str) -> Self:
        """Read the status files.

        Raises:
            ConfigError: the runtime folder is unsafe.
        """
        folder = existing_folder(namespace)
        if folder is None:
            return cls(namespace, namespace_dir(namespace), time.time())
        try:
            engines, remarks = read(folder)
        except OSError as error:
            engines = []
            remarks = [plain(f"{folder} cannot be read: {error}")]
        engines.sort(key=lambda each: (each.engine_id, each.started))
        remarks = [*lost_threads(engines), *unpinned(engines), *remarks]
        return cls(namespace, folder, time.time(), engines, remarks)

    def state(self, engine: EngineStatus) -> str:
        """Return `live` or `silent`; see `SILENT_S`."""
        # A time far in the future was written before the clock was set back.
        return "silent" if abs(self.time - engine.written) > SILENT_S else "live"

    def total(self) -> EngineStatus:
        """Return the sums of all engines, as the status of one engine."""
        counts: Counter[str] = Counter()
        failures: Counter[str] = Counter()
        for each in self.engines:
            counts.update(each.counts)
            failures.update(each.failures)
        return EngineStatus(
            engine_id="total",
            role="",
            model="",
            pid=0,
            ranks=sum(each.ranks for each in self.engines),
            arena_bytes=sum(each.arena_bytes for each in self.engines),
            pinned_bytes=sum(each.pinned_bytes for each in self.engines),
            unpinned_bytes=sum(each.unpinned_bytes for each in self.engines),
            started=min((each.started for each in self.engines), default=0.0),
            usage=Usage(
                *(
                    sum(getattr(each.usage, name) for each in self.engines)
                    for name in Usage.__struct_fields__
                )
            ),
            prompt_tokens=sum(each.prompt_tokens for each in self.engines),
            cached_tokens=sum(each.cached_tokens for each in self.engines),
            counts=dict(counts),
            failures=dict(failures),
        )


class History:
    """The last two statuses that each engine wrote, and the rates between them."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, float, int], tuple[EngineStatus | None, EngineStatus]] = {}

    def add(self, reading: Reading) -> None:
        """Add a reading. Engines that are not in it are forgotten."""
        last = {}
        for engine in reading.engines:
            key = engine.engine_id, engine.started, engine.pid
            older, newer = self._last.get(key, (None, engine))
            if engine.written > newer.written:
                older, newer = newer, engine
            elif engine.written < newer.written:  # the clock was set back
                older = None
                newer = engine
            last[key] = older, newer
        self._last = last

    def rates(self, engine: EngineStatus, now: float) -> Rates | None:
        """Return the growth per second of each count, and of all `failures` together, between the
        last two statuses of an engine; None if it has written only one."""
        key = engine.engine_id, engine.started, engine.pid
        older, newer = self._last.get(key, (None, engine))
        if older is None:
            return None
        grown = {
            **{name: number - older.counts.get(name, 0) for name, number in newer.counts.items()},
            "failures": sum(newer.failures.values()) - sum(older.failures.values()),
        }
        seconds = newer.written - older.written
        still = now - newer.written > _STILL_S
        return {name: 0.0 if still else max(0, more) / seconds for name, more in grown.items()}

    def total(self, reading: Reading) -> Rates | None:
        """Return the sums of all engines' rates; None if no engine has rates."""
        each = [self.rates(engine, reading.time) for engine in reading.engines]
        known = [rates for rates in each if rates is not None]
        names = {name for rates in known for name in rates}
        return {name: sum(r.get(name, 0.0) for r in known) for name in names} if known else None
