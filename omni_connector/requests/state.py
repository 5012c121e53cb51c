# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of one request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_connector.handoff.serving import Refusals
    from omni_connector.prefix.hints import Hints
    from omni_connector.prefix.prompts import SharedPrompt


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from vLLM's first word of it to its end.

    Attributes:
        request: vLLM's.
        hints: those of its hints that are followed.
        not_begun: while its weights or its adapter are not known, what was ordered of hand-offs
            when it arrived: an engine that is drained meanwhile still serves it. None once it has
            begun.
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
    not_begun: "Refusals | None" = None
    handed_off: bool = False
    prefix: "SharedPrompt | None" = None
    counted_tokens: int = 0
    room: tuple[int, int] | None = None
