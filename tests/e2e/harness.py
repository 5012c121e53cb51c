# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between two real engines, and what these tests ask of them."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omni_connector.testing import reference
from omni_connector.testing.engines import Engine, EngineError, prefill
from omni_connector.testing.reference import ROUNDING, Answer

from . import kv
from .configurations import BLOCK
from .pool import Member, Pool, require_idle
from .prompts import MAX_TOKENS, new_salt, random_prompt

WAIT_S = 60.0
TOLD_S = 0.2
"""Seconds between two requests that have an engine tell what it has counted."""

# 4 layers x 2 heads x 64 x (K, V) x 4 bytes
BLOCK_BYTES = BLOCK * 4 * 2 * 64 * 2 * 4
LENGTHS = {
    "within-a-block": 57,
    "one-block": BLOCK,
    "one-block-and-a-token": BLOCK + 1,
    "two-blocks-less-a-token": 2 * BLOCK - 1,
    "two-blocks": 2 * BLOCK,
    "not-aligned": 300,
    "two-thousand": 2049,
    "two-thousand-not-aligned": 2100,
}
PROMPTS = {name: random_prompt(seed, length) for seed, (name, length) in enumerate(LENGTHS.items())}
PROMPTS["shares-a-prefix"] = PROMPTS["two-thousand"][:1024] + random_prompt(99, 700)


class References:
    """What engines answer that move nothing, one engine a family; each is asked once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._answers: dict[tuple[str, str, tuple[int, ...]], reference.Answer | None] = {}

    def same_path(self, recipe: str, prompt: list[int]) -> reference.Answer:
        """What every correct decode engine answers after a hand-off, bit for bit."""

        def ask(member: Member) -> reference.Answer:
            with member.engine.client() as client:
                return reference.same_path(client, prompt, max_tokens=MAX_TOKENS)

        return self._once("same path", recipe, prompt, ask)

    def plain(self, recipe: str, prompt: list[int]) -> reference.Answer:
        """What every engine answers that computes the whole prompt."""
        return self._once("plain", recipe, prompt, lambda member: ask(member.engine, prompt))

    def no_op(self, recipe: str, prompt: list[int]) -> reference.Answer | None:
        """What is answered when nothing was handed off, and said to have been.

        None where that was no number at all, so that the answer could not be written as JSON.
        """

        def ask_no_op(member: Member) -> reference.Answer | None:
            member.probe.spoil()
            try:
                return ask(member.engine, prompt, kv_transfer_params={"do_remote_prefill": True})
            except EngineError as error:
                if "not JSON compliant" not in str(error):
                    raise
                return None

        return self._once("no-op", recipe, prompt, ask_no_op)

    def _once(
        self,
        kind: str,
        recipe: str,
        prompt: list[int],
        ask: Callable[[Member], reference.Answer | None],
    ) -> Any:
        key = (kind, recipe, tuple(prompt))
        if key not in self._answers:
            [member] = self._pool.take(("reference", recipe, ""))
            self._answers[key] = ask(member)
        return self._answers[key]


def ask(
    engine: Engine, prompt: list[int], salt: str | None = None, **fields: Any
) -> reference.Answer:
    """Let an engine complete a prompt that its caches do not know, unless they know the salt."""
    settings = {"max_tokens": MAX_TOKENS, "cache_salt": salt or new_salt(), **fields}
    return reference.ask(engine, prompt, **settings)


def counted(engine: Engine, counter: str, **labels: str) -> float:
    """What an engine's connector has counted."""
    return engine.metric(f"vllm:omni_connector_{counter}_total", **labels)


def publish(
    writer: Engine, prompt: list[int], salt: str, counter: str, number: int, **fields: Any
) -> reference.Answer:
    """Have an engine compute a prompt, and wait until it has counted so many more."""
    wanted = counted(writer, counter) + number
    answer = ask(writer, prompt, salt, **fields)
    deadline = time.monotonic() + WAIT_S
    while counted(writer, counter) < wanted:
        assert time.monotonic() < deadline, writer.log_tail()
        time.sleep(TOLD_S)
        writer.complete(random_prompt(7, 3), max_tokens=1)  # idle engines tell nothing
    return answer


def shareable(prompt: list[int]) -> int:
    """Tokens of the full blocks before the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


@dataclass(frozen=True)
class Case:
    """A prompt, and what every correct decode engine answers to it."""

    name: str
    prompt: list[int]
    references: References

    @cached_property
    def reference(self) -> Answer:
        """The answer."""
        return self.references.same_path("llama", self.prompt)

    def check(self, answer: Answer) -> None:
        """Raise AssertionError unless it is the right answer."""
        answer.require_same(self.reference, tolerance=ROUNDING)


@dataclass
class Pair:
    """A prefill and a decode engine, and hand-offs between them."""

    prefill_engine: Engine
    decode_engine: Engine
    prefill_probe: kv.Probe
    decode_probe: kv.Probe

    @classmethod
    def of(cls, prefill: Member, decode: Member) -> "Pair":
        """Hand-offs from one to the other."""
        return cls(prefill.engine, decode.engine, prefill.probe, decode.probe)

    def prefill(self, prompt: list[int], salt: str, **fields: Any) -> dict[str, Any]:
        """The `kv_transfer_params` that the prefill engine answers."""
        return prefill(self.prefill_engine, prompt, cache_salt=salt, **fields)

    def decode(
        self, prompt: list[int], salt: str, params: Any = None, **fields: Any
    ) -> reference.Answer:
        """What the decode engine answers, to params if there are any."""
        if params is not None:
            fields["kv_transfer_params"] = params
        return ask(self.decode_engine, prompt, salt, **fields)

    def hand_off(self, prompt: list[int], salt: str | None = None) -> reference.Answer:
        """Prefill, then decode into blocks that hold nobody's bytes, or a prefix of the salt's."""
        fresh = salt is None
        salt = salt or new_salt()
        params = self.prefill(prompt, salt)
        if fresh:
            self.decode_probe.spoil()
        return self.decode(prompt, salt, params)

    def require_same_kv(
        self,
        prompt: list[int],
        *,
        start: int = 0,
        kv_heads: int | None = None,
        other_stages: bool = False,
        zeroed: Collection[str] = (),
    ) -> None:
        """The latest request found, at its first step, what the prefill engine had computed."""
        sent, found = self.prefill_probe.read("prefilled"), self.decode_probe.read("first")
        assert found[0].prompt == prompt
        assert found[0].computed == len(prompt) - 1
        kv.require_same_kv(
            sent,
            found,
            len(prompt) - 1,
            start=start,
            kv_heads=kv_heads,
            other_stages=other_stages,
            zeroed=zeroed,
        )

    def count(self, engine: Engine, counter: str, **labels: str) -> float:
        """What an engine has counted of something."""
        return engine.metric(f"vllm:omni_connector_{counter}_total", **labels)

    def received(self) -> float:
        """Hand-offs that the decode engine has received."""
        return self.count(self.decode_engine, "handoffs_received")

    def failures(self, **labels: str) -> float:
        """What the decode engine counts as failed."""
        return self.count(self.decode_engine, "failures", **labels)

    def wait_until_idle(self, *engines: Engine) -> None:
        """Wait until neither of them, or of `engines`, holds anything."""
        for engine in engines or (self.prefill_engine, self.decode_engine):
            require_idle(engine)
