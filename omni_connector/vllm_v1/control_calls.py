# SPDX-License-Identifier: Apache-2.0
"""What an engine answers through vLLM: `POST /v1/kv_connector/rpc`, vLLM's `on_rpc`.

vLLM carries bytes to the scheduler half and back, and knows nothing of them (its pull request
51639, in no release up to 0.33). The bytes are one message, in MessagePack or, where they begin
with a brace, in JSON; the answer comes in the same form. Who answers a message defines
its type, and registers the function that answers it. A message of another type is refused by name.
The engine's thread calls these functions, so they must not block.
"""

import functools
import logging
import operator
from collections.abc import Callable
from typing import Any, Final

import msgspec

from omni_connector.errors import OmniError
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.net.rank_socket import RankAnswers
from omni_connector.net.status import EngineStatus, plain

logger = logging.getLogger("vllm.omni_connector.rpc")

MAX_BYTES: Final = 65536
"""Bytes of the longest message; those of `omni-connector explain` are as long at most."""


class AskStatus(msgspec.Struct, frozen=True, tag="ask-status"):
    """Asks what `omni-connector top` shows of this engine; answered with `Status`."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What an engine says of itself."""

    status: EngineStatus


class ControlCalls:
    """Answers messages by their types. The engine's thread calls all methods."""

    def __init__(self) -> None:
        self._answers: dict[type[msgspec.Struct], Callable[[Any], msgspec.Struct]] = {}
        self._json: msgspec.json.Decoder[Any] | None = None
        self._msgpack: msgspec.msgpack.Decoder[Any] | None = None

    def register(self, answers: RankAnswers) -> None:
        """Answer these types of messages, too.

        Args:
            answers: for each type what returns the answer. It raises an `OmniError` for what it
                refuses.

        Raises:
            ValueError: one of the types is answered already.
        """
        for question in answers:
            if question in self._answers:
                raise ValueError(f"{question.__name__} is answered already")
        if not answers:
            return
        self._answers |= answers
        every: Any = functools.reduce(operator.or_, self._answers)
        self._json = msgspec.json.Decoder(every)
        self._msgpack = msgspec.msgpack.Decoder(every)

    def answer(self, payload: bytes) -> bytes:
        """The answer to one message. Raises nothing: what is wrong is refused."""
        as_json = payload[:1] == b"{"
        encode = msgspec.json.encode if as_json else msgspec.msgpack.encode
        try:
            answer = self._answer(payload, as_json)
        except (OmniError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            answer = Refusal(plain(str(error)[:200]), package=PACKAGE)
        except Exception:
            logger.exception("A message through vLLM could not be answered; please report it")
            answer = Refusal("the answer failed; the log says why", package=PACKAGE)
        return encode(answer)

    def _answer(self, payload: bytes, as_json: bool) -> msgspec.Struct:
        if len(payload) > MAX_BYTES:
            return Refusal(f"{len(payload)} bytes, {MAX_BYTES} at most", package=PACKAGE)
        decoder = self._json if as_json else self._msgpack
        if decoder is None:
            return Refusal("this engine answers nothing yet", package=PACKAGE)
        question = decoder.decode(payload)
        return self._answers[type(question)](question)
