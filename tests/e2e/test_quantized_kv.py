# SPDX-License-Identifier: Apache-2.0
"""A KV cache of FP8, with scales of the checkpoint that are others in each layer.

Which scales an engine has, and that engines of other scales refuse each other, is tested without
engines (`tests/vllm_v1/test_numerics.py`).
"""

from collections.abc import Iterator

import pytest

from omni_connector.testing.engines import EngineError
from omni_connector.testing.reference import Answer, same_path

from . import vllm_itself
from .configurations import BLOCK
from .harness import Pair
from .pool import Pool
from .prompts import MAX_TOKENS, random_prompt

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(vllm_itself.FP8_KV), reason=vllm_itself.FP8_KV),
]

LENGTHS = {
    "two-tokens": 2,
    "within-a-block": 57,
    "one-block-and-a-token": BLOCK + 1,
    "in-chunks": 1100,
}
# 4 layers x 2 heads x 64 x (K, V) x 1 byte
TOKEN_BYTES = 4 * 2 * 64 * 2

fp8 = pytest.mark.supports("FP8 KV cache, with scales of the checkpoint", "Llama")


@pytest.fixture
def pair(pool: Pool) -> Iterator[Pair]:
    prefill, decode = pool.take(*(("fp8", "llama-fp8-kv", name) for name in "ab"))
    made = Pair.of(prefill, decode)
    # Waits until both know their weights. What an engine computes before that, and before a call to
    # its workers, might be of other weights: it would be handed off after a reset only.
    made.hand_off(random_prompt(79, 20))
    try:
        yield made
    finally:
        decode.probe.call("probe_loses", "nothing")


def own(pair: Pair, prompt: list[int]) -> Answer:
    """What the decode engine answers on the same numeric path, without a hand-off."""
    with pair.decode_engine.client() as client:
        return same_path(client, prompt, max_tokens=MAX_TOKENS)


@pytest.mark.shows(
    "FP8 KV with scales of the checkpoint",
    control="test_an_engine_that_has_lost_the_kv_is_noticed",
)
@fp8
@pytest.mark.parametrize("length", LENGTHS.values(), ids=list(LENGTHS))
def test_answer_and_kv_are_the_right_ones(pair: Pair, length: int) -> None:
    prompt = random_prompt(80 + length, length)
    reference, received = own(pair, prompt), pair.received()
    before = pair.count(pair.decode_engine, "bytes_loaded")
    answer = pair.hand_off(prompt)
    assert pair.received() == received + 1
    pair.require_same_kv(prompt)
    blocks = -(-(length - 1) // BLOCK)
    loaded = pair.count(pair.decode_engine, "bytes_loaded") - before
    assert loaded == blocks * BLOCK * TOKEN_BYTES
    answer.require_same(reference, tolerance=0.0)


@fp8
def test_an_engine_that_has_lost_the_kv_is_noticed(pair: Pair) -> None:
    prompt = random_prompt(90, 300)
    reference = own(pair, prompt)
    pair.decode_probe.call("probe_loses", "everything")
    # Among all bytes there are some of no number, which cannot be written as JSON.
    with pytest.raises((AssertionError, EngineError), match=r"token \d+|not JSON compliant"):
        pair.hand_off(prompt).require_same(reference, tolerance=0.1)
