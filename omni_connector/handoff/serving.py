# SPDX-License-Identifier: Apache-2.0
"""Which hand-offs an engine takes part in now, and whether it is about to leave.

An operator may give an engine another role, and have it drain: then it offers no new hand-offs, and
goes on with all that it holds. The control channel's thread reads the orders, and the engine's
thread asks here for each request that arrives.
"""

import logging
from collections.abc import Callable
from typing import Final

from omni_connector.net.orders import NO_ORDERS, ROLES, Orders, Phase, Role, Service
from omni_connector.requests.state import Refusals, Requests
from omni_connector.runtime.context import EngineContext

logger = logging.getLogger("vllm.omni_connector.handoff")

DRAINING: Final = "draining"
DECODE_ROLE: Final = "decode_role"
PREFILL_ROLE: Final = "prefill_role"
"""Kinds of failure: as it drains, or by its role, an engine offers no hand-off or fetches none."""

UNSERVED: Final = frozenset({DRAINING, DECODE_ROLE, PREFILL_ROLE})

# Seconds before vLLM kills a process at which it lets go of its hand-offs. It needs them to close
# its sockets and to remove its files.
_EXIT_S: Final = 2.0

# Largest part of vLLM's shutdown time-out that `_EXIT_S` may take.
_EXIT_PART: Final = 0.25


def roles_of(kv_role: str, *, handoff: bool) -> tuple[Role, ...]:
    """All roles that a configuration allows, the one that it gives first; none without hand-offs.

    Args:
        kv_role: vLLM's `kv_role`.
        handoff: the setting of this name.
    """
    if not handoff:
        return ()
    only: dict[str, tuple[Role, ...]] = {"kv_producer": ("prefill",), "kv_consumer": ("decode",)}
    return only.get(kv_role, ("both", *(role for role in ROLES if role != "both")))


class ServingState:
    """The role of an engine, its phase, and its requests.

    Args:
        roles: as `roles_of` says.
        context: clock and statistics.
        requests: those that have not ended.
        busy: whether hand-offs are open, or copies are under way; asked on any thread.
    """

    def __init__(
        self,
        roles: tuple[Role, ...],
        context: EngineContext,
        requests: Requests,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self.busy = busy
        self._roles = roles
        self._clock = context.clock
        self._role: Role | None = roles[0] if roles else None
        self._drain = False
        self._leave_by: float | None = None
        self._requests = requests
        self._orders = NO_ORDERS
        self._told: tuple[str, ...] = ()

    @property
    def draining(self) -> bool:
        """Whether no new hand-offs are offered, as this engine is to leave."""
        return self._drain or self._leave_by is not None

    @property
    def has_requests(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self._requests)

    @property
    def phase(self) -> Phase:
        """How far this engine is; see `Service`."""
        if not self.draining:
            return "serving"
        return "draining" if self._requests or self.busy() else "drained"

    @property
    def role(self) -> Role | None:
        """What it does of hand-offs now."""
        return self._role

    def refusals(self) -> Refusals:
        """What becomes of a request that arrives now, whatever is ordered before it begins."""
        return Refusals(self.offer_refusal(), self.fetch_refusal())

    def offer_refusal(self) -> str | None:
        """Why no new hand-off is offered; None where it is."""
        if self.draining:
            return DRAINING
        return DECODE_ROLE if self._role == "decode" else None

    def fetch_refusal(self) -> str | None:
        """Why no KV is fetched for a request; None where it is. An engine that drains fetches: else
        prefills that are finished would be computed once more."""
        return PREFILL_ROLE if self._role == "prefill" else None

    def follow(self, orders: Orders) -> bool:
        """Obey the orders that are there now, on the control channel's thread.

        Returns:
            Whether an order was refused that had not been refused before.
        """
        if orders == self._orders:
            return False
        self._orders = orders
        if orders.drain is not None and orders.drain != self._drain:
            self._drain = orders.drain
            text = "drains: it offers no new hand-offs" if orders.drain else "serves again"
            logger.info("This engine %s (`omni-connector drain`, or SIGTERM to its server)", text)
        refused = orders.refused
        if orders.role and orders.role not in self._roles:
            allowed = ", ".join(self._roles) or "none, as it hands nothing off"
            refused = (*refused, f"role {orders.role}: its configuration allows {allowed}")
        elif orders.role is not None and self._roles:
            wanted = orders.role or self._roles[0]
            if wanted != self._role:
                self._role = wanted
                logger.info("This engine has the role %s (`omni-connector role`)", wanted)
        news = [text for text in refused if text not in self._told]
        self._told = refused
        for text in news:
            logger.warning("An order to this engine is not obeyed: %s", text)
        return bool(news)

    def leave(self, timeout: float) -> None:
        """vLLM shuts this engine down, and kills it after so many seconds. Safe in the handler of
        a signal: it takes no lock."""
        if self._leave_by is None and timeout > 0:
            self._leave_by = self._clock() + timeout - min(_EXIT_S, _EXIT_PART * timeout)

    def stays(self) -> bool:
        """Whether an engine that vLLM shuts down has to go on for what peers may fetch from it."""
        return self._leave_by is not None and self.busy() and self._clock() < self._leave_by

    def service(self) -> Service:
        """What the status file says of it."""
        return Service(
            phase=self.phase,
            role=self._role,
            roles=self._roles,
            requests=len(self._requests),
            arrived=self._requests.arrived,
        )
