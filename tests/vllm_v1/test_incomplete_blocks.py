# SPDX-License-Identifier: Apache-2.0
"""The first block of a window may be loaded in part: nobody but its request may find it."""

import pytest

from tests import inspection

from .harness import HANDOFF, assert_clean, prompt, wait

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", ["window", "window and full"])
def test_nobody_finds_them_while_their_request_waits_for_an_encoder(engine, monkeypatch, family):
    """vLLM hashes what has been loaded, and then leaves the request aside as it does where an
    encoder connector still fetches an input, without another word to this connector."""
    small, large = 4, 16
    reference = engine(family=family, block_size=large, prefix_caching=False)
    prefill = engine("kv_producer", family=family, block_size=small, usable_blocks=256)
    decode = engine("kv_consumer", family=family, block_size=large, usable_blocks=128)
    encoding: set[str] = set()

    def pending(request, num_computed_tokens):
        return request.request_id in encoding

    monkeypatch.setattr(decode.scheduler, "_ec_transfer_pending", pending, raising=False)
    for length in range(3 * large - 3, 5 * large, 5):
        question = prompt(length)
        cut = (length - 1) // large * large  # the first block that is not full comes after it
        other = question[:cut] + prompt(7, seed=99)
        held = decode.hold(loads=True)
        params = prefill.generate(question, params=HANDOFF).params
        waits = decode.submit(question, max_tokens=6, params=params)
        decode.run(held.waiting.is_set)
        encoding.add(waits)
        held.open()
        wait(lambda: inspection.copies_ended(decode.worker_half))
        decode.step()  # tells of it; the next one hashes the blocks
        finds = decode.submit(other, max_tokens=6)
        decode.run(lambda finds=finds: decode.done(finds))
        assert decode.answers[finds].tokens == reference.generate(other, 6).tokens
        encoding.clear()
        decode.settle()
        assert decode.answers[waits].tokens == reference.generate(question, 6).tokens
    assert decode.count("handoffs_received") == 7
    assert_clean(prefill, decode)
