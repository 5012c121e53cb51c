# SPDX-License-Identifier: Apache-2.0
"""Whether a decode engine computes a prompt sooner than it loads the prompt's KV.

A load of a short prompt may take longer than its computation: it asks for a lease, starts a job and
hears of its end with a step. The decode engine knows both from what it has done before. Where its
own computation is the sooner, it makes no hand-off.

A loaded prompt has a step to wait for, too: that of its last token. So a load saves the time by
which a step that computes all of the prompt takes longer than one that computes a token or a few.
It saves that time to each other request of the engine as well, as a step is shared by all.

Loads are compared with computations of about their own length alone, peer by peer:

    tokens    1   2   3-4   5-8   9-16   17-32   33-64 ...
    class     0   1   2     3     4      5       6

The engine refuses none before it has seen enough loads and computations of a class.
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

MARGIN: Final = 1.25
"""Hand-offs of a class begin to be refused when their loads take more than so many times the time
that they save."""

STAY: Final = 0.8
"""Hand-offs of a class are refused until their loads take less than so many times the time that
they save. Between this and `MARGIN` nothing changes, so durations that vary a little do not change
the decision."""

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
        # When each step began that has not ended, and the tokens of prompts that began with it.
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MOST_STEPS)
        self._computing: dict[int, deque[float]] = {}  # of steps that begin prompts, by class
        self._loads: BoundedMap[tuple[str, int], _Loads] = BoundedMap(_MOST_CLASSES)

    def step_begins(self, now: float, tokens: int) -> None:
        """A step begins, which computes so many tokens of prompts that begin with it."""
        self._steps.append((now, tokens))

    def step_ends(self, now: float) -> None:
        """The oldest step has ended of those that have begun."""
        if not self._steps:
            return
        began, tokens = self._steps.popleft()
        if tokens:
            self._computing.setdefault(_class_of(tokens), _durations()).append(now - began)

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
        saved = (1 + others) * max(0.0, alone - self._shortest_step(size))
        loads.refused = loading > (STAY if loads.refused else MARGIN) * saved
        if not loads.refused:
            return False
        if not loads.told:
            loads.told = True
            logger.info(
                "Prompts of up to %d tokens are computed here, in steps of %.1f ms, not fetched "
                "from engine %r, which takes %.1f ms besides a step",
                1 << size,
                1e3 * alone,
                peer,
                1e3 * loading,
            )
        loads.refusable += 1
        return loads.refusable % EXPLORED > 0

    def _shortest_step(self, size: int) -> float:
        """What a step takes that computes what a load of this class leaves to compute: of the
        steps that begin prompts, those of the fewest tokens; 0 where shorter ones are not known."""
        known = (each for each in self._computing if len(self._computing[each]) == SAMPLES)
        fewest = min(known, default=size)
        return median(self._computing[fewest]) if fewest < size else 0.0


def _class_of(tokens: int) -> int:
    return (tokens - 1).bit_length()
