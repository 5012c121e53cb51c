# SPDX-License-Identifier: Apache-2.0
"""What a decode engine must answer after a hand-off, computed without any connector.

A decode engine that was handed the KV of N-1 prompt tokens computes the last one as a decode
step. A plain run of the prompt computes all N in one prefill, which rounds differently. So the
reference engine is given the first N-1 tokens, and a logits processor makes the last prompt
token its first output: every later token took the same numeric path as on the decode engine.

Start the reference engine with `--logits-processors`, `PROCESSOR`, and otherwise with the
arguments of the engine under test: chunks of another size round differently too.

Use float32. The prefill engine computes N tokens in the pass in which the reference computes N-1,
and on some CPUs the KV of a token depends on how many were computed with it: in float32 by less
than `ROUNDING` of a log-probability, in bfloat16 by more than 1 without AVX-512.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from omni_connector.testing.engines import Client, Engine, completion

ROUNDING = 1e-3
FORCED_TOKEN = "omni_forced_first_token"
LOGPROBS: Mapping[str, Any] = {"logprobs": 2, "return_tokens_as_token_ids": True}
"""Fields of a request whose answer `Answer` reads."""
PROCESSOR = "omni_connector.testing.reference:ForcedFirstToken"
_ID = "token_id:"


class ForcedFirstToken(AdapterLogitsProcessor):
    """Makes the first output the token named in `vllm_xargs[FORCED_TOKEN]`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[..., torch.Tensor] | None:
        forced = (params.extra_args or {}).get(FORCED_TOKEN)
        if forced is None:
            return None
        token = int(forced)

        def force(output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if output:
                return logits
            only = torch.full_like(logits, float("-inf"))
            only[token] = 0.0
            return only

        return force


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens, and what the model thought of them.

    Attributes:
        tokens: their ids.
        logprobs: log-probability of each.
        likeliest: of each place, log-probabilities of the likeliest tokens by id; empty where the
            answer was not asked for with `LOGPROBS`.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[Mapping[int, float], ...] = ()

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> "Answer":
        """Read the answer of `/v1/completions` to `return_token_ids` and `LOGPROBS`."""
        choice = response["choices"][0]
        logprobs = choice["logprobs"]
        likeliest = tuple(
            {int(token.removeprefix(_ID)): value for token, value in row.items()}
            for row in logprobs["top_logprobs"] or ()
            if row and all(token.startswith(_ID) for token in row)
        )
        return cls(tuple(choice["token_ids"]), tuple(logprobs["token_logprobs"]), likeliest)

    def require_same(self, reference: "Answer", *, tolerance: float = 0.0) -> None:
        """Raise AssertionError, naming the first difference, unless this is the reference.

        If the two take different tokens, and both answers give the two tokens equal
        log-probabilities up to the tolerance, either is right. The rest is then not compared.

        Args:
            tolerance: largest allowed difference of a log-probability; 0 means bit for bit.
        """
        if len(self.tokens) != len(reference.tokens):
            raise AssertionError(f"{len(self.tokens)} tokens, expected {len(reference.tokens)}")
        rows = zip(self.tokens, reference.tokens, self.logprobs, reference.logprobs, strict=True)
        for place, (token, expected, logprob, wanted) in enumerate(rows):
            if token != expected:
                if self._ties(place, expected, tolerance) and reference._ties(
                    place, token, tolerance
                ):
                    return
                raise AssertionError(
                    f"token {place} is {token} (log-probability {logprob}), "
                    f"expected {expected} ({wanted})"
                )
            if not abs(logprob - wanted) <= tolerance:
                raise AssertionError(
                    f"token {place} ({token}) has log-probability {logprob}, expected {wanted}: "
                    f"off by {abs(logprob - wanted):.3g}, allowed {tolerance:.3g}"
                )

    def agrees(self, reference: "Answer", *, tolerance: float = 0.0) -> bool:
        """Whether `require_same` would find no difference."""
        try:
            self.require_same(reference, tolerance=tolerance)
        except AssertionError:
            return False
        return True

    def _ties(self, place: int, other: int, tolerance: float) -> bool:
        """Whether another token is as likely here as the one taken."""
        likeliest = self.likeliest[place] if place < len(self.likeliest) else {}
        return other in likeliest and abs(likeliest[other] - self.logprobs[place]) <= tolerance


def ask(client: Client | Engine, prompt: Sequence[int], **fields: Any) -> Answer:
    """Complete `prompt` and read tokens with their log-probabilities."""
    return Answer.of(client.complete(prompt, **LOGPROBS, **fields))


def same_path(client: Client, prompt: Sequence[int], *, max_tokens: int, **fields: Any) -> Answer:
    """Return the reference for `max_tokens` tokens after `prompt` (two tokens or more).

    Args:
        fields: of the request besides.

    Raises:
        ValueError: the prompt is too short to be split.
        AssertionError: the engine was not started with `PROCESSOR`.
    """
    if len(prompt) < 2:
        raise ValueError("the reference needs a prompt of at least two tokens")
    body = completion(
        prompt[:-1],
        max_tokens=max_tokens + 1,
        **LOGPROBS,
        **fields,
        vllm_xargs={FORCED_TOKEN: prompt[-1]},
    )
    full = Answer.of(client.post("/v1/completions", body))
    if full.tokens[0] != prompt[-1]:
        raise AssertionError(f"the reference engine runs without {PROCESSOR}")
    return Answer(full.tokens[1:], full.logprobs[1:], full.likeliest[1:])
