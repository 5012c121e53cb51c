# SPDX-License-Identifier: Apache-2.0
"""What must be left of an engine when all is quiet: nothing that it did not have at its start.

The walk goes through every object of the package that both halves reach, and counts the entries of
each dict, list, set and queue, whatever its name. Engines that tests drive
themselves are looked at in the same way.
"""

import functools
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from omni_connector.requests.state import Offer
from tests import inspection

_CONTAINERS: Final = (dict, list, set, deque, frozenset)

# What is kept on purpose, and bounded: caches, what is counted, and what speaks of living peers.
_KEPT: Final = re.compile(
    r"\._slots\b|\._free\b|\._cached\b|\._by_key\b|\._batches\b|\._plans\b|\._chosen\b"
    r"|stats\b|\._introduced\b|\._peers\b|\._linked\b|\.poller\._(sockets|unsettled)$|\.loader\.arenas\._known\b|\._untold\b"
    r"|\.pinning\._memories\b|kept\._(prompts|moves)\b|\.loader\.copies\._results\b"
    r"|_sessions\._(states|users)\b"
    r"|\._sent\b|\._distrusted\b|\._failures\b|\._?events\b|\._report\.|\._gauges\b"
    r"|\._avoided\b|\._connections\b|\._spare\b|\._status\b|\.pool\._(kept|kept_of)$|\._adapters\b"
    r"|\._?changes\b|\._beginnings\b"
    r"|\._weights\._?answers$|\._(undrafted|spoiled)\._hashes$|\._without_drafter\b"
    r"|\._copier\b|\._layout\b|\._commands\b|\._told\b|\._threads\b|\._void\b"
    r"|\._neighbours\._(met|not_before|why_not)$|\.ranks\._said\b"
    r"|\._repeated_layers\b|\._manager\b|\._config\b|\._vllm_config\b|\._kv_cache_config\b"
)
_DEPTH: Final = 12


class CheckedEngine(Protocol):
    """What is looked at.

    Attributes:
        scheduler: vLLM's.
        all_free: KV blocks that nobody held at its start.
    """

    scheduler: Any
    all_free: int

    @property
    def halves(self) -> list[Any]:
        """The scheduler half and the worker halves."""

    @property
    def free_blocks(self) -> int:
        """KV blocks that nobody holds."""


def sizes(engine: CheckedEngine) -> dict[str, int]:
    """Entries of each container that the halves of an engine reach, by where it is."""
    found: dict[str, int] = {}
    for number, half in enumerate(engine.halves):
        _walk(half, f"{type(half).__name__}{number or ''}", found, set(), 0)
    return found


def held_by(engine: CheckedEngine) -> tuple[int, int]:
    """Slots of an engine that are held, and how many peers may read some."""
    directory = inspection.directory(engine.halves[0]) if engine.halves else None
    if directory is None:
        return 0, 0
    held, _, leases = directory.usage()
    return int(held), int(leases)


def leftovers(engine: CheckedEngine, before: Mapping[str, int]) -> list[str]:
    """What an engine has that it had not at its start, in words."""
    left = []
    scheduler = engine.scheduler
    if scheduler.requests:
        left.append(f"requests {sorted(scheduler.requests)}")
    if engine.free_blocks != engine.all_free:
        left.append(f"{engine.all_free - engine.free_blocks} KV blocks")
    if scheduler.connector is not None and engine.halves:
        directory = inspection.directory(engine.halves[0])
        if directory is not None:
            held, _, leases = directory.usage()[:3]
            if held or leases:
                left.append(f"{held} slots held, {leases} leases")
    if engine.halves and any(kept := inspection.being_kept(engine.halves[0])):
        left.append(f"{kept[0]} slots and {kept[1]} blocks counted as being kept")
    for path, size in sizes(engine).items():
        if size > before.get(path, 0) and not _KEPT.search(path):
            left.append(f"{path}: {size - before.get(path, 0)} more entries")
    return left


def _walk(thing: Any, path: str, found: dict[str, int], seen: set[int], depth: int) -> None:
    kind: Any = type(thing)
    manner = _manner(kind)
    if manner is None or id(thing) in seen or depth > _DEPTH:
        return
    seen.add(id(thing))
    if manner == "object":
        for name, value in _attributes(thing):
            if value is not None:
                _walk(value, f"{path}.{name}", found, seen, depth + 1)
        return
    if manner == "container":
        found[path] = found.get(path, 0) + len(thing)
        path = f"{path}[]"
    for each in list(thing.values() if isinstance(thing, dict) else thing):
        _walk(each, path, found, seen, depth + 1)


@functools.cache
def _manner(kind: type) -> str | None:
    """How one goes on from a thing of some type; None for not at all."""
    if issubclass(kind, Offer):  # it leads to a product, which is looked at in its own place
        return None
    if issubclass(kind, _CONTAINERS):
        return "container"
    if issubclass(kind, tuple):
        return "tuple"
    module = kind.__module__
    ours = module.startswith("omni_connector.") and not module.startswith("omni_connector.testing")
    return "object" if ours and not issubclass(kind, (int, str, bytes, float)) else None


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(thing, "__dict__", {}).items())
    kind: Any = type(thing)
    for name in _slots(kind):
        if hasattr(thing, name):
            yield name, getattr(thing, name)


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ()))
