# SPDX-License-Identifier: Apache-2.0
"""A rank's answers to the question of its scheduler half which weights it has.

The question comes with a step, as do the answers, so that no rank need be reachable otherwise. The
bytes are hashed on a thread beside the engine's, in pieces, so that it can end at any time.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Final

from vllm.logger import init_logger

from omni_connector.identity.epochs import RankWeights, WeightsDigest
from omni_connector.identity.loaded_weights import UnreadableWeightsError
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import WOKEN, Turns

logger = init_logger("vllm.omni_connector.weights")

ReadWeights = Callable[[], Generator[None, None, WeightsDigest]]
"""Makes the digest of a rank's weights, piece by piece. It is called on the engine's thread, and
continued on another one. Raises `UnreadableWeightsError`."""

# Longest wait for the thread to end, in seconds: it ends after the piece that it reads.
_CLOSE_S: Final = 5.0


class AnsweredWeights:
    """Reads the weights of a rank when it is asked. The engine's thread calls all methods.

    Args:
        rank: which.
        read: makes the digest.
        context: its thread, which starts with the first question.

    Attributes:
        answers: since the last `take`.
    """

    def __init__(self, rank: int, read: ReadWeights, context: EngineContext) -> None:
        self._rank = rank
        self._read = read
        self._start = context.start
        self._thread: Turns | None = None
        self._asked = 0
        self._closing = False
        # Of the last question: what reads the weights, until it has.
        self._reading: tuple[int, Generator[None, None, WeightsDigest]] | None = None
        self.answers: list[RankWeights] = []

    def ask(self, question: int) -> None:
        """A step asks this. A question that is under way or answered is not asked anew."""
        if question == self._asked:
            return
        self._asked = question
        try:
            reading = self._read()
        except Exception as error:  # noqa: BLE001 - it is reported
            self.answers.append(self._failed(question, error))
            return
        self._reading = question, reading
        if self._thread is None:
            self._thread = self._start("omni-weights-digest", self._turn)
        else:
            self._thread.wake()

    def take(self) -> Sequence[RankWeights]:
        """The answers since the last call."""
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._thread.wake()
            self._thread.join(_CLOSE_S)

    def _turn(self) -> float | None:
        if self._closing:
            return None
        current = self._reading
        if current is None:
            return WOKEN
        question, reading = current
        answer: RankWeights | None = None
        try:
            next(reading)
        except StopIteration as end:
            answer = RankWeights(self._rank, question, end.value)
        except Exception as error:  # noqa: BLE001 - it is reported
            answer = self._failed(question, error)
        if answer is not None:
            if self._reading is current:  # else another question has come meanwhile
                self._reading = None
            self.answers.append(answer)
        return 0.0

    def _failed(self, question: int, error: Exception) -> RankWeights:
        if not isinstance(error, UnreadableWeightsError):
            logger.exception("The weights of rank %d cannot be read", self._rank, exc_info=error)
        return RankWeights(self._rank, question, None, str(error)[:200] or type(error).__name__)
