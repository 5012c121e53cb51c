# SPDX-License-Identifier: Apache-2.0
"""Pictures are part of what a prompt is: at the level of requests, and with real engines."""

import base64
import hashlib
import io
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from PIL import Image
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from omni_connector.testing.engines import MODEL_NAME, PREFILL_PARAMS, Engine
from omni_connector.testing.reference import ROUNDING, Answer
from omni_connector.vllm_v1.requests import prompt_of

from .configurations import BLOCK
from .harness import Pair
from .pool import Pool
from .prompts import new_salt

pytestmark = pytest.mark.vllm

TOKENS = list(range(40))


def digest(features: list[MultiModalFeatureSpec]) -> bytes:
    """What engines compare of a prompt of TOKENS with these features."""
    request = Request(
        request_id="one",
        prompt_token_ids=TOKENS,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        mm_features=features,
    )
    prompt = prompt_of(request, len(TOKENS) - 1, 0, torch.float32)
    assert prompt is not None
    return prompt.digest("tokens")


def picture(content: bytes, offset: int = 4, length: int = 8) -> MultiModalFeatureSpec:
    """A picture at a place of the prompt, known by the hash of its content as in vLLM."""
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=hashlib.sha256(content).hexdigest(),
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def test_the_same_picture_at_the_same_place_is_the_same_prompt() -> None:
    assert digest([picture(b"a cat")]) == digest([picture(b"a cat")])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([], id="none"),
        pytest.param([picture(b"a dog")], id="another"),
        pytest.param([picture(b"a cat", offset=5)], id="elsewhere"),
        pytest.param([picture(b"a cat", length=9)], id="larger"),
        pytest.param([picture(b"a cat"), picture(b"a cat", offset=20)], id="twice"),
    ],
)
def test_another_picture_under_the_same_tokens_is_another_prompt(
    other: list[MultiModalFeatureSpec],
) -> None:
    assert digest(other) != digest([picture(b"a cat")])


def test_the_order_of_pictures_matters() -> None:
    one = [picture(b"a cat"), picture(b"a dog", offset=20)]
    other = [picture(b"a dog"), picture(b"a cat", offset=20)]
    assert digest(one) != digest(other)


WORDS = ("cache", "block", "engine", "prompt", "answer", "token", "lease", "slot")
SHARED_WITHIN_S = 60.0


def drawn(seed: int) -> str:
    """A picture as the URL of a chat."""
    pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"


def text(seed: int) -> str:
    """Words of about 300 tokens."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, 130))


@dataclass(frozen=True)
class Seeing:
    """Two engines of a model that sees pictures; they hand off and share."""

    pair: Pair

    def ask(
        self, engine: Engine, seed: int, salt: str, ending: str = "", **fields: Any
    ) -> dict[str, Any]:
        """Ask about a picture, with the same words behind each, and then an ending."""
        content = [
            {"type": "image_url", "image_url": {"url": drawn(seed)}},
            {"type": "text", "text": text(1) + ending},
        ]
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": True,
            "top_logprobs": 2,
            "return_tokens_as_token_ids": True,
            "cache_salt": salt,
            **fields,
        }
        with engine.client() as client:
            return client.post("/v1/chat/completions", body)

    def own(self, seed: int, ending: str = "") -> Answer:
        """What the decode engine answers about a picture that its caches do not know."""
        return answer_of(self.ask(self.pair.decode_engine, seed, new_salt(), ending))

    def prefill(self, seed: int, salt: str) -> dict[str, Any]:
        """The `kv_transfer_params` of a prompt with a picture."""
        told = self.ask(
            self.pair.prefill_engine, seed, salt, max_tokens=1, kv_transfer_params=PREFILL_PARAMS
        )
        params: dict[str, Any] = told["kv_transfer_params"]
        return params

    def decode(self, seed: int, salt: str, params: dict[str, Any]) -> Answer:
        """What the decode engine answers to a hand-off, into blocks that hold nobody's bytes."""
        self.pair.decode_probe.spoil()
        told = self.ask(self.pair.decode_engine, seed, salt, kv_transfer_params=params)
        return answer_of(told)

    def publish(self, seed: int, salt: str) -> int:
        """Have the prefill engine compute a prompt, and wait until its full blocks are in its
        arena; their tokens."""
        engine = self.pair.prefill_engine
        saved = self.pair.count(engine, "blocks_saved")
        told = self.ask(engine, seed, salt, max_tokens=1)
        blocks = told["usage"]["prompt_tokens"] // BLOCK
        deadline = time.monotonic() + SHARED_WITHIN_S
        while self.pair.count(engine, "blocks_saved") < saved + blocks:
            assert time.monotonic() < deadline, engine.log_tail()
            engine.complete([5, 6, 7], max_tokens=1)  # idle engines tell nothing
        return int(blocks * BLOCK)

    def found(self) -> float:
        """Tokens that the decode engine has had from arenas."""
        return self.pair.count(self.pair.decode_engine, "tokens_from_host")


def answer_of(told: dict[str, Any]) -> Answer:
    """The answer of a chat as one of completions."""
    [choice] = told["choices"]
    rows = choice["logprobs"]["content"]
    likeliest = [{each["token"]: each["logprob"] for each in row["top_logprobs"]} for row in rows]
    logprobs = {"token_logprobs": [row["logprob"] for row in rows], "top_logprobs": likeliest}
    return Answer.of({"choices": [{"token_ids": choice["token_ids"], "logprobs": logprobs}]})


@pytest.fixture
def seeing(pool: Pool) -> Seeing:
    """Two engines that have met."""
    writing, reading = pool.take(*(("share", "idefics3", name) for name in "ab"))
    seeing = Seeing(Pair.of(writing, reading))
    deadline = time.monotonic() + SHARED_WITHIN_S
    while not seeing.found():
        assert time.monotonic() < deadline, reading.engine.log_tail()
        seeing.publish(0, salt := new_salt())
        seeing.ask(reading.engine, 0, salt)
    return seeing


@pytest.mark.shows(
    "images in prompts: hand-offs",
    control="test_a_picture_that_has_lost_its_kv_is_noticed",
)
@pytest.mark.e2e
@pytest.mark.supports("images in prompts (of Idefics3, a Llama that sees)", "Llama")
def test_a_prompt_with_a_picture_is_handed_off(seeing: Seeing) -> None:
    own, received = seeing.own(2), seeing.pair.received()
    answer = seeing.decode(2, salt := new_salt(), seeing.prefill(2, salt))
    assert seeing.pair.received() == received + 1
    answer.require_same(own, tolerance=ROUNDING)


@pytest.mark.e2e
def test_a_picture_that_has_lost_its_kv_is_noticed(seeing: Seeing) -> None:
    own = seeing.own(9)
    params = seeing.prefill(9, salt := new_salt())
    seeing.pair.decode_probe.call("probe_loses", "everything")
    try:
        answer = seeing.decode(9, salt, params)
    finally:
        seeing.pair.decode_probe.call("probe_loses", "nothing")
    with pytest.raises(AssertionError, match=r"token \d+"):
        answer.require_same(own, tolerance=ROUNDING)


@pytest.mark.e2e
def test_of_another_picture_under_the_same_words_nothing_is_loaded(seeing: Seeing) -> None:
    own, received = seeing.own(4), seeing.pair.received()
    refused = seeing.pair.failures(kind="other_prompt")
    params = seeing.prefill(3, salt := new_salt())
    answer = seeing.decode(4, salt, params)
    assert seeing.pair.failures(kind="other_prompt") == refused + 1
    assert seeing.pair.received() == received
    answer.require_same(own, tolerance=ROUNDING)
    # It still serves the picture that it is of, whose answer is another one.
    right = seeing.decode(3, salt, params)
    assert seeing.pair.received() == received + 1
    with pytest.raises(AssertionError, match=r"token \d+"):
        right.require_same(own, tolerance=ROUNDING)


@pytest.mark.shows(
    "images in prompts: shared prefixes",
    control="test_an_arena_that_delivers_no_picture_is_noticed",
)
@pytest.mark.e2e
def test_a_prefix_with_a_picture_is_shared(seeing: Seeing) -> None:
    before = seeing.found()
    length = seeing.publish(5, salt := new_salt())
    assert length >= 2 * BLOCK
    seeing.pair.decode_probe.spoil()
    ending = " and a token"
    answer = answer_of(seeing.ask(seeing.pair.decode_engine, 5, salt, ending))
    assert seeing.found() == before + length
    answer.require_same(seeing.own(5, ending), tolerance=ROUNDING)


@pytest.mark.e2e
def test_a_prefix_with_another_picture_is_not_found(seeing: Seeing) -> None:
    seeing.publish(6, salt := new_salt())
    before = seeing.found()
    answer = answer_of(seeing.ask(seeing.pair.decode_engine, 7, salt))
    assert seeing.found() == before
    answer.require_same(seeing.own(7), tolerance=ROUNDING)


@pytest.mark.e2e
def test_an_arena_that_delivers_no_picture_is_noticed(seeing: Seeing) -> None:
    seeing.pair.decode_probe.call("host_delivers", "nothing")
    try:
        seeing.publish(8, salt := new_salt())
        seeing.pair.decode_probe.spoil()
        answer = answer_of(seeing.ask(seeing.pair.decode_engine, 8, salt))
    finally:
        seeing.pair.decode_probe.call("host_delivers", "all")
    with pytest.raises(AssertionError, match=r"token \d+"):
        answer.require_same(seeing.own(8), tolerance=ROUNDING)
