# SPDX-License-Identifier: Apache-2.0
"""Whether a decode engine computes a prompt sooner than it loads the prompt's KV.

A load of a short prompt may take longer than its computation: it asks for a lease, starts a job and
hears of its end with a step. The decode engine knows both from what it has done before. Where its
own computation is clearly the sooner, it makes no hand-off.

Loads are compared with computations of about their own length alone, peer by peer:

    tokens    1   2   3-4   5-8   9-16   17-32   33-64 ...
    class     0   1   2     3     4      5       6

The engine is slow to refuse hand-offs, as a computation also delays the requests beside it, and
soon makes them again. It refuses none before it has seen enough loads and computations of a class.
"""

import logging
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from omni_connector.runtime.bounded import BoundedMap

logger = logging.getLogger("vllm.omni_connector.receiver")

SLOWER: Final = "slower_than_computing"
"""Kind of failure: a hand-off was not made, as its load would take longer than a computation."""

SAMPLES: Final = 32
"""Durations of each class that are kept, the newest. Each hand-off is made until there are so many
of its class."""

MARGIN: Final = 2.0
"""A hand-off is refused if its load takes more than so many times what its computation costs. The
prompts of one class differ in length by no more than that."""

STAY: Final = 1.5
"""Hand-offs of a class are refused until their loads take less than so many times as long. Between
this and `MARGIN` nothing changes, so durations that vary a little do not change the decision."""

EXPLORED: Final = 8
"""Of the hand-offs that are to be refused, one in so many is made, so that the durations of loads
are those of now."""

# Classes of all peers that have handed off to this engine; of more, the oldest is forgotten.
_MOST_CLASSES: Final = 1024

# Steps that have begun and not ended: vLLM has a few at once, and one for each pipeline stage.
_MOST_STEPS: Final = 64


def _durations() -> deque[float]:
    return deque(maxlen=SAMPLES)


@dataclass(slots=True, eq=False)
class _Loads:
    """Loads of one class from one peer.

    Attributes:
        seconds: durations of the newest.
        refused: whether its hand-offs are refused, but for a few.
        refusable: how many were to be refused.
        told: whether the log has said so.
    """

    seconds: deque[float] = field(default_factory=_durations)
    refused: bool = False
    refusable: int = 0
    told: bool = False


class HandoffCosts:
    """Durations of steps and loads, and what follows from them. For the engine's thread.

    All times are in seconds of one clock.
    """

    def __init__(self) -> None:
        # When each step began that has not ended, and the tokens of prompts that began with it;
        # None for a step that computes nothing.
        self._steps: deque[tuple[float, int | None]] = deque(maxlen=_MOST_STEPS)
        self._answering = _durations()  # of steps that begin no prompt
        self._computing: dict[int, deque[float]] = {}  # of steps that begin prompts, by class
        self._loads: BoundedMap[tuple[str, int], _Loads] = BoundedMap(_MOST_CLASSES)

    def step_begins(self, now: float, tokens: int | None) -> None:
        """A step begins.

        Args:
            tokens: that it computes of prompts that begin with it; None if it computes nothing.
        """
        self._steps.append((now, tokens))

    def step_ends(self, now: float) -> None:
        """The oldest step has ended of those that have begun."""
        if not self._steps:
            return
        began, tokens = self._steps.popleft()
        if tokens:
            self._computing.setdefault(_class_of(tokens), _durations()).append(now - began)
        elif tokens is not None:
            self._answering.append(now - began)

    def loaded(self, peer: str, tokens: int, seconds: float) -> None:
        """So many tokens were loaded from a peer in so much time. It counts from the lease request
        on, without the time in which the prompt waited for room."""
        key = peer, _class_of(tokens)
        if key not in self._loads:
            self._loads[key] = _Loads()
        self._loads[key].seconds.append(seconds)

    def refuses(self, peer: str, tokens: int, others: int) -> bool:
        """Whether to refuse the hand-off of a prompt that has just arrived.

        Args:
            peer: engine id of the engine that has computed it.
            tokens: of the hand-off, at least one.
            others: requests that this engine has beside it.
        """
        size = _class_of(tokens)
        loads = self._loads.get((peer, size))
        computing = self._computing.get(size, ())
        if loads is None or len(loads.seconds) < SAMPLES or len(computing) < SAMPLES:
            return False
        loading = median(loads.seconds)
        alone = median(computing)
        usual = median(self._answering) if len(self._answering) == SAMPLES else 0.0
        # Each request beside it waits for a step that takes longer than usual.
        cost = alone + others * max(0.0, alone - usual)
        loads.refused = loading > (STAY if loads.refused else MARGIN) * cost
        if not loads.refused:
            return False
        if not loads.told:
            loads.told = True
            logger.info(
                "Prompts of up to %d tokens are computed here, which takes %.1f ms, not fetched "
                "from engine %r, which takes %.1f",
                1 << size,
                1e3 * alone,
                peer,
                1e3 * loading,
            )
        loads.refusable += 1
        return loads.refusable % EXPLORED > 0


def _class_of(tokens: int) -> int:
    return (tokens - 1).bit_length()
