# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of one request."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_connector.requests.phases import WAYS, Phase
from omni_connector.runtime.trace import Trace, now

if TYPE_CHECKING:
    from omni_connector.handoff.receiver import Fetch
    from omni_connector.handoff.sender import Send
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


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from vLLM's first word of it to its end.

    Attributes:
        request: vLLM's.
        hints: those of its hints that are followed.
        phase: how far it is.
        phase_began: since when, as `trace.now` tells it; 0 where nothing is traced.
        not_begun: while its weights or its adapter are not known, what was ordered of hand-offs
            when it arrived: an engine that is drained meanwhile still serves it. None once it has
            begun.
        fetch: the load of its KV from the engine that has computed its prompt; None if it has none.
        send: its hand-off to another engine; None if it asks for none.
        adapter_asked: while it waits until its adapter is read, since when, and in which step; else
            None.
        handed_off: whether its last load was a hand-off: that alone brings what no prefix cache
            has.
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
    not_begun: Refusals | None = None
    fetch: "Fetch | None" = None
    send: "Send | None" = None
    adapter_asked: tuple[float, int] | None = None
    handed_off: bool = False
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
