# SPDX-License-Identifier: Apache-2.0
"""`omni-connector drain` and `omni-connector role`: orders to one running engine.

An order is a signal file beside the engine's status file (`omni_connector.net.orders`). The answer
is read from the status file: no engine is asked, and no port is used.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omni_connector.cli.namespaces import existing_folder, nobody
from omni_connector.cli.readings import SILENT_S
from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError
from omni_connector.net.orders import DRAIN, ROLE, Role, Service, give_order, take_back
from omni_connector.net.status import EngineStatus, label, plain, read_each

NOTICE_S: Final = 10.0
"""Longest wait in seconds until an engine obeys: it reads orders twice a second, or every 5 s
while it is idle, and writes its status then."""

# Seconds between two looks at whether the engines have obeyed.
_POLL_S: Final = 0.2


@dataclass(frozen=True)
class OrderedEngine:
    """An engine that takes orders.

    Attributes:
        file: its status file.
        status: what it said when it was found.
    """

    file: Path
    status: EngineStatus

    @property
    def name(self) -> str:
        """Its engine id, for messages."""
        return self.status.engine_id

    def now(self) -> EngineStatus | None:
        """What it says now; None once it has ended."""
        found, _ = read_each(self.file.parent)
        return found.get(self.file)


def find_engine(beginning: str, namespace: str) -> OrderedEngine | None:
    """The engine of a namespace whose id begins so, or is equal; None, with a message, where there
    is none.

    Raises:
        ConfigError: several engines fit, or the runtime folder is unsafe.
    """
    folder = existing_folder(namespace)
    found: dict[Path, EngineStatus] = {} if folder is None else read_each(folder)[0]
    fitting = [
        OrderedEngine(file, status)
        for file, status in found.items()
        if status.engine_id.startswith(beginning) or label(status.engine_id) == beginning
    ]
    exact = [each for each in fitting if beginning in (each.name, label(each.name))]
    chosen = exact if len(exact) == 1 else fitting
    if len(chosen) > 1:
        names = ", ".join(sorted(each.name for each in chosen))
        which = f"have an id that begins with {plain(beginning)!r}" if beginning else "run here"
        raise ConfigError(f"several engines {which}; name one of {names}")
    if chosen:
        return chosen[0]
    if found:
        names = ", ".join(sorted(each.engine_id for each in found.values()))
        _tell(
            f"no engine of namespace {plain(namespace)} has an id that begins with "
            f"{plain(beginning)!r}; it may have ended. There are {names}"
        )
    else:
        _tell(nobody(namespace, "engine", "OmniKVConnector"))
    return None


def drain(
    engine: str, namespace: str | None, *, wait: float | None, quiet: float, undo: bool
) -> int:
    """Have an engine drain; return the exit status.

    Args:
        engine: beginning of its id; "" if it is the only one of its namespace.
        namespace: of the engine; None for the environment's.
        wait: seconds to wait until it is empty; None does not wait.
        quiet: seconds without a new request before it counts as empty.
        undo: take the order back instead.

    Raises:
        ConfigError: as `find_engine`.
        OSError: the order cannot be written.
    """
    chosen = find_engine(engine, _namespace(namespace))
    if chosen is None:
        return 1
    if undo:
        take_back(chosen.file, DRAIN)
        return _obeyed(chosen, "serves", lambda service: service.phase == "serving")
    give_order(chosen.file, DRAIN)
    if wait is None:
        return _obeyed(chosen, "drains", lambda service: service.phase != "serving")
    return _drained(chosen, wait, quiet)


def _drained(engine: OrderedEngine, wait: float, quiet: float) -> int:
    since = time.monotonic()
    deadline = since + wait
    arrived = -1
    while (status := engine.now()) is not None:
        now = time.monotonic()
        service = status.service
        if service.arrived != arrived:
            arrived = service.arrived
            since = now
        if service.phase == "drained" and now >= since + quiet:
            print(f"{engine.name} is drained")
            return 0
        if now >= deadline:
            left = f"{service.requests} requests, {status.usage.handoffs_open} open hand-offs"
            silent = " (it is silent)" if time.time() - status.written > SILENT_S else ""
            _tell(f"{engine.name} is not drained after {wait:g} s: {left}{silent}")
            return 1
        time.sleep(_POLL_S)
    print(f"{engine.name} has ended")
    return 0


def role(engine: str, wanted: Role, namespace: str | None) -> int:
    """Give an engine another role; return the exit status.

    Args:
        engine: beginning of its id.
        wanted: the role.
        namespace: of the engine; None for the environment's.

    Raises:
        ConfigError: as `find_engine`; or the engine's configuration does not allow the role.
        OSError: the order cannot be written.
    """
    chosen = find_engine(engine, _namespace(namespace))
    if chosen is None:
        return 1
    roles = chosen.status.service.roles
    if wanted not in roles:
        allowed = f"only {', '.join(roles)}" if roles else "no role, as it hands nothing off"
        raise ConfigError(
            f"{chosen.name} cannot have the role {wanted}: its kv_role is "
            f"{chosen.status.role}, which allows {allowed}"
        )
    if wanted == roles[0]:
        take_back(chosen.file, ROLE)
    else:
        give_order(chosen.file, ROLE, wanted)
    return _obeyed(chosen, f"has the role {wanted}", lambda service: service.role == wanted)


def _obeyed(engine: OrderedEngine, what: str, done: Callable[[Service], bool]) -> int:
    deadline = time.monotonic() + NOTICE_S
    while (status := engine.now()) is not None:
        if done(status.service):
            print(f"{engine.name} {what}")
            return 0
        if time.monotonic() >= deadline:
            _tell(f"{engine.name} has not obeyed within {NOTICE_S:g} s; its log may say why")
            return 1
        time.sleep(_POLL_S)
    _tell(f"{engine.name} has ended")
    return 1


def _namespace(given: str | None) -> str:
    return OmniConfig.load(None).namespace if given is None else given


def _tell(text: str) -> None:
    print(f"omni-connector: {text}", file=sys.stderr)
