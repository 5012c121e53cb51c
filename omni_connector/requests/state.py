# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of one request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from omni_connector.handoff.receiver import Fetch
    from omni_connector.handoff.sender import Send
    from omni_connector.prefix.hints import Hints
    from omni_connector.prefix.prompts import SharedPrompt


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
    not_begun: Refusals | None = None
    fetch: "Fetch | None" = None
    send: "Send | None" = None
    adapter_asked: tuple[float, int] | None = None
    handed_off: bool = False
    prefix: "SharedPrompt | None" = None
    counted_tokens: int = 0
    room: tuple[int, int] | None = None


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
