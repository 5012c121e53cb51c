# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of one request."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from omni_connector.requests.phases import WAYS, Phase
from omni_connector.runtime.trace import Trace, now

if TYPE_CHECKING:
    from omni_connector.handoff.parts import Fetch, Send
    from omni_connector.prefix.hints import Hints
    from omni_connector.prefix.prompts import SharedPrompt


logger = logging.getLogger("vllm.omni_connector.requests")


class Refusals(NamedTuple):
    """Why an engine takes no part in a hand-off, as it was when the request arrived.

    Attributes:
        offer: why the hand-off is not offered; None where it is.
        fetch: why the KV is not fetched; None where it is.
    """

    offer: str | None
    fetch: str | None


class Offer(NamedTuple):
    """What vLLM was told last that can be loaded for a request.

    Attributes:
        whose: the product that offers it.
        begin: tokens that vLLM had of it already.
        brings_all: see `Product.brings_all`.
    """

    whose: object
    begin: int
    brings_all: bool


_NO_REFUSALS: Final = Refusals(None, None)


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from vLLM's first word of it to its end.

    Attributes:
        request: vLLM's.
        hints: those of its hints that are followed.
        phase: how far it is.
        phase_began: since when, as `trace.now` tells it; 0 where nothing is traced.
        refusals: what was ordered of hand-offs when it arrived. An engine that is drained meanwhile
            still serves it.
        begun: whether the products know of it: not while its weights or its adapter are not known.
        shortened: whether its prompt was, or would be, shortened for a hand-off. Its hashes were
            not.
        fetch: the load of its KV from the engine that has computed its prompt; None if it has none.
        send: its hand-off to another engine; None if it asks for none.
        adapter_asked: while it waits until its adapter is read, since when, and in which step; else
            None.
        offer: what vLLM was last told that can be loaded; None: nothing.
        prefix: its part in shared prefixes; None if it shares none.
        counted_tokens: tokens of its prompt when it was last counted; 0 if it was not.
        room: while its load is under way, the KV blocks that it takes beyond the loaded ones for
            its next tokens, and the ones that it takes for its whole prompt if the load fails and
            gives its blocks back; else None.
    """

    request: Any
    hints: "Hints"
    phase: Phase = Phase.ARRIVED
    phase_began: int = 0
    refusals: Refusals = _NO_REFUSALS
    begun: bool = True
    shortened: bool = False
    fetch: "Fetch | None" = None
    send: "Send | None" = None
    adapter_asked: tuple[float, int] | None = None
    offer: Offer | None = None
    prefix: "SharedPrompt | None" = None
    counted_tokens: int = 0
    room: tuple[int, int] | None = None

    def enter(self, phase: Phase, trace: Trace) -> None:
        """Begin a phase, if it is not in that, and record the one that ends. Where the table of
        phases has no such way, the log names both: vLLM has done what nobody here expects."""
        former = self.phase
        if phase is former:
            return
        if phase not in WAYS[former]:
            logger.error(
                "Request %s is in the phase %r, and %r is not to follow it",
                self.request.request_id,
                former.value,
                phase.value,
            )
        self.phase = phase
        if not trace.is_recording:
            return
        began, self.phase_began = self.phase_began, now()
        if began:
            name = former.value
            if former is Phase.COMPUTING and self.send is not None:
                name = "prefill"
            elif former is Phase.COMPUTING and self.fetch is not None:
                name = "decode"
            trace.phase(name, began, self.phase_began, self.request.request_id)


class Requests(dict[str, RequestState]):
    """All that vLLM has, by id. The engine's thread changes it; others may ask for its length.

    Attributes:
        arrived: so many in all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrived = 0

    def arrive(self, request: Any, hints: "Hints") -> RequestState:
        """One has arrived. Call this before its hand-off is asked for: so an engine that is found
        drained has offered nothing since it was told to drain."""
        state = self[request.request_id] = RequestState(request, hints)
        self.arrived += 1
        return state

    def end(self, request_id: str) -> None:
        """One has ended, and its hand-off, if there is one, has begun."""
        del self[request_id]
