# SPDX-License-Identifier: Apache-2.0
"""`omni-connector drain` and `omni-connector role`: orders to one running engine.

An order is a signal file beside the engine's status file (`omni_connector.net.orders`). The answer
is read from the status file: no engine is asked, and no port is used.
"""

import re
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
from omni_connector.net.status import (
    EngineStatus,
    container,
    label,
    plain,
    read_each,
    read_file,
)

NOTICE_S: Final = 10.0
"""Longest wait in seconds until an engine obeys: it reads orders twice a second, or every 5 s
while it is idle, and writes its status then."""

# Seconds between two looks at whether the engines have obeyed.
_POLL_S: Final = 0.2

# What vLLM adds to the engine id of a data-parallel rank.
_RANK: Final = re.compile(r"_dp[0-9]+\Z")


@dataclass
class OrderedEngine:
    """An engine that takes orders.

    Attributes:
        file: its status file.
        status: what it said last.
        problem: why its status file could not be read at the last look; "" where it could.
    """

    file: Path
    status: EngineStatus
    problem: str = ""

    @property
    def name(self) -> str:
        """Its engine id, for messages."""
        return self.status.engine_id

    @property
    def server(self) -> str:
        """The engine id of its vLLM server; that of a data-parallel rank has a number behind."""
        return _RANK.sub("", self.name)

    def look(self) -> bool:
        """Read what it says now; False once it has ended."""
        try:
            status = read_file(self.file)
        except (OSError, ValueError) as error:
            self.problem = plain(str(error))
            return True
        self.problem = ""
        self.status = status or self.status
        return status is not None


def find_engines(beginning: str, namespace: str) -> list[OrderedEngine]:
    """The engine of a namespace whose id begins so, or is equal; several if they are the
    data-parallel ranks of one server. Where there is none, a message says so.

    Args:
        beginning: of the id; "" for the only engine, else the one in the container of this command.
        namespace: of the engine.

    Raises:
        ConfigError: several engines fit, or the runtime folder is unsafe.
    """
    folder = existing_folder(namespace)
    found, remarks = ({}, []) if folder is None else read_each(folder)
    for remark in remarks:
        _tell(remark)
    engines = [OrderedEngine(file, status) for file, status in found.items()]
    fitting = [
        each for each in engines if each.name.startswith(beginning) or label(each.name) == beginning
    ]
    exact = [each for each in fitting if beginning in (each.name, label(each.name))]
    here = "" if beginning else container()
    near = [each for each in fitting if here and each.status.container == here]
    for chosen in (exact, fitting, near):
        ranks = {each.name: each for each in chosen}
        if len({each.server for each in chosen}) == 1 and len(ranks) == len(chosen):
            return [ranks[name] for name in sorted(ranks)]
    if fitting:
        names = ", ".join(sorted(each.name for each in fitting))
        which = f"have an id that begins with {plain(beginning)!r}" if beginning else "run here"
        raise ConfigError(f"several engines {which}; name one of {names}")
    if found:
        names = ", ".join(sorted(each.engine_id for each in found.values()))
        _tell(
            f"no engine of namespace {plain(namespace)} has an id that begins with "
            f"{plain(beginning)!r}; it may have ended. There are {names}"
        )
    else:
        _tell(nobody(namespace, "engine", "OmniKVConnector"))
    return []


def drain(
    engine: str, namespace: str | None, *, wait: float | None, quiet: float, undo: bool
) -> int:
    """Have an engine drain; return the exit status.

    Args:
        engine: beginning of its id, as `find_engines` takes it.
        namespace: of the engine; None for the environment's.
        wait: seconds to wait until it is empty; None does not wait.
        quiet: seconds without a new request before it counts as empty.
        undo: take the order back instead.

    Raises:
        ConfigError: as `find_engines`.
        OSError: the order cannot be written.
    """
    chosen = find_engines(engine, _namespace(namespace))
    if not chosen:
        return 1
    for each in chosen:
        if undo:
            take_back(each.file, DRAIN)
        else:
            give_order(each.file, DRAIN)
    if undo:
        return _obeyed(chosen, "serves", lambda service: service.phase == "serving")
    if wait is None:
        return _obeyed(chosen, "drains", lambda service: service.phase != "serving")
    return _drained(chosen, wait, quiet)


def _drained(engines: list[OrderedEngine], wait: float, quiet: float) -> int:
    since = time.monotonic()
    deadline = since + wait
    arrived = -1
    while True:
        running = [each for each in engines if each.look()]
        now = time.monotonic()
        if arrived != (arrived := sum(each.status.service.arrived for each in engines)):
            since = now
        busy = [each for each in running if each.problem or each.status.service.phase != "drained"]
        if not running or (not busy and now >= since + quiet):
            for each in engines:
                print(f"{each.name} {'is drained' if each in running else 'has ended'}")
            return 0
        if now >= deadline:
            for each in busy or running:
                _tell(f"{each.name} is not drained after {wait:g} s: {_left(each)}")
            return 1
        time.sleep(_POLL_S)


def _left(engine: OrderedEngine) -> str:
    if engine.problem:
        return f"its status file cannot be read ({engine.problem})"
    status = engine.status
    silent = " (it is silent)" if time.time() - status.written > SILENT_S else ""
    return (
        f"{status.service.requests} requests, {status.usage.handoffs_open} open hand-offs{silent}"
    )


def role(engine: str, wanted: Role | None, namespace: str | None) -> int:
    """Give an engine another role, or say which it has; return the exit status.

    Args:
        engine: beginning of its id, as `find_engines` takes it.
        wanted: the role; None asks.
        namespace: of the engine; None for the environment's.

    Raises:
        ConfigError: as `find_engines`; or the engine's configuration does not allow the role.
        OSError: the order cannot be written.
    """
    chosen = find_engines(engine, _namespace(namespace))
    if not chosen:
        return 1
    if wanted is None:
        for each in chosen:
            print(f"{each.name} has the role {each.status.service.role or 'none'}")
        return 0
    for each in chosen:
        roles = each.status.service.roles
        if wanted not in roles:
            allowed = f"only {', '.join(roles)}" if roles else "no role, as it hands nothing off"
            raise ConfigError(
                f"{each.name} cannot have the role {wanted}: its kv_role is "
                f"{each.status.role}, which allows {allowed}"
            )
    for each in chosen:
        if wanted == each.status.service.roles[0]:
            take_back(each.file, ROLE)
        else:
            give_order(each.file, ROLE, wanted)
    return _obeyed(chosen, f"has the role {wanted}", lambda service: service.role == wanted)


def _obeyed(engines: list[OrderedEngine], what: str, done: Callable[[Service], bool]) -> int:
    deadline = time.monotonic() + NOTICE_S
    ended = 0
    for engine in engines:
        while runs := engine.look():
            if not engine.problem and done(engine.status.service):
                print(f"{engine.name} {what}")
                break
            if time.monotonic() >= deadline:
                why = f"; {_left(engine)}" if engine.problem else "; its log may say why"
                _tell(f"{engine.name} has not obeyed within {NOTICE_S:g} s{why}")
                return 1
            time.sleep(_POLL_S)
        if not runs:
            ended += 1
            _tell(f"{engine.name} has ended")
    return min(ended, 1)


def _namespace(given: str | None) -> str:
    return OmniConfig.load(None).namespace if given is None else given


def _tell(text: str) -> None:
    print(f"omni-connector: {text}", file=sys.stderr)
