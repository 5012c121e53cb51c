# SPDX-License-Identifier: Apache-2.0
"""Prompts given as embeddings: handed off and shared by what they are, not by the tokens that vLLM
puts in their place. What the toy stores for a position depends on every byte of its embedding.
"""

import pytest
import torch
from vllm.v1.core import kv_cache_utils

from tests import inspection
from tests.toy import BLOCK, CHUNK, FAMILIES

from .harness import HANDOFF, assert_clean, wait
from .stores import MASTER, landed

pytestmark = pytest.mark.vllm

LENGTHS = (2, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
LENGTH = 3 * BLOCK + 5
SHARES = {"share": True}

of_all = pytest.mark.parametrize("family", FAMILIES)


def embeds(length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randn((length, 8), generator=draw).to(torch.bfloat16)


def other_at(place: int, of: torch.Tensor) -> torch.Tensor:
    """The same but for the smallest change of one number."""
    changed = of.clone()
    changed.view(torch.int16)[place, -1] ^= 1
    return changed


def hand_off(prefill, decode, prompt, asked=None, count=6, **options):
    """The tokens of a hand-off; `asked` is the decode engine's prompt, where it is another one."""
    given = {"embeds": prompt, **options}
    params = prefill.generate([0] * len(prompt), 1, HANDOFF, **given).params
    given = {"embeds": prompt if asked is None else asked, **options}
    return decode.generate([0] * len(prompt), count, params, **given).tokens


@pytest.mark.shows(
    "prompts given as embeddings",
    control="test_a_connector_that_moves_nothing_is_noticed",
)
@of_all
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.values
def test_a_prompt_of_embeddings_is_handed_off(engine, family, length):
    prefill = engine("kv_producer", family=family)
    decode = engine("kv_consumer", family=family)
    prompt = embeds(length)
    right = engine(None, family=family).generate([0] * length, 6, embeds=prompt).tokens
    assert hand_off(prefill, decode, prompt) == right
    # Where all layers attend to chunks, vLLM takes the chunks before the last for cached.
    loaded = (length - 1) % CHUNK if family == "chunk" else length - 1
    assert decode.count("tokens_loaded") == loaded
    assert not prefill.failures()
    assert not decode.failures()
    assert_clean(prefill, decode)


@pytest.mark.parametrize("family", ["full", "window and full"])
def test_a_connector_that_moves_nothing_is_noticed(engine, family):
    prefill = engine("kv_producer", family=family)
    decode = engine("kv_consumer", family=family, connector="NoOpConnector")
    prompt = embeds()
    right = engine(None, family=family).generate([0] * LENGTH, 6, embeds=prompt).tokens
    assert hand_off(prefill, decode, prompt) != right


@pytest.mark.parametrize(
    ("family", "place", "block_size"),
    [
        pytest.param(
            family,
            place,
            (1 + (number + nth) % 2) * BLOCK,
            id=f"{family}-{('first', 'second', 'tail')[nth]}",
        )
        for number, family in enumerate(FAMILIES)
        for nth, place in enumerate((0, BLOCK, LENGTH - 2))
    ],
)
@pytest.mark.values
def test_one_other_number_makes_another_prompt(engine, family, place, block_size):
    """In turn, prompts are compared by the hashes of their blocks, where these are equal, and by
    all numbers: each family meets all places, and both ways; and each place both ways."""
    prefill = engine("kv_producer", family=family)
    decode = engine("kv_consumer", family=family, block_size=block_size)
    prompt = embeds()
    asked = other_at(place, prompt)
    right = engine(None, family=family).generate([0] * LENGTH, 6, embeds=asked).tokens
    assert hand_off(prefill, decode, prompt, asked) == right
    assert decode.failures() == {"other_prompt": 1}
    # Of the last one, which the decode engine computes, nothing is handed off.
    asked = other_at(LENGTH - 1, prompt)
    right = engine(None, family=family).generate([0] * LENGTH, 6, embeds=asked).tokens
    assert hand_off(prefill, decode, prompt, asked) == right
    assert decode.failures() == {"other_prompt": 1}


@pytest.mark.parametrize("family", ["full", "window and full", "state and full"])
@pytest.mark.parametrize("place", [3, LENGTH - 3], ids=["in a block", "in the tail"])
def test_tokens_among_embeddings(engine, family, place):
    prefill = engine("kv_producer", family=family)
    decode = engine("kv_consumer", family=family)
    tokens, prompt = list(range(100, 100 + LENGTH)), embeds()
    is_token = [number % 5 == 0 for number in range(LENGTH)]
    given = {"embeds": prompt, "is_token": is_token}
    reference = engine(None, family=family)
    params = prefill.generate(tokens, 1, HANDOFF, **given).params
    right = reference.generate(tokens, 6, **given).tokens
    assert decode.generate(tokens, 6, params, **given).tokens == right
    assert decode.count("tokens_loaded") == LENGTH - 1
    # At one place a token is read, and not the embedding, which vLLM's hashes do not tell.
    swapped = [own ^ (number == place) for number, own in enumerate(is_token)]
    zeros = torch.zeros_like(prompt)
    tokens = [0] * LENGTH
    given = {"embeds": zeros, "is_token": is_token}
    params = prefill.generate(tokens, 1, HANDOFF, **given).params
    given = {"embeds": zeros, "is_token": swapped}
    decode.generate(tokens, 6, params, **given)
    assert decode.failures() == {"other_prompt": 1}


def masked(place: int) -> list[dict]:
    """Prompts of the same ids and the same embeddings. Of the second the token is read at one more
    place."""
    first = [number % 5 == 0 for number in range(LENGTH)]
    second = [own ^ (number == place) for number, own in enumerate(first)]
    zeros = torch.zeros((LENGTH, 8), dtype=torch.bfloat16)
    return [{"embeds": zeros, "is_token": each} for each in (first, second)]


def of_types() -> list[dict]:
    """Prompts whose embeddings are the same bytes of two types."""
    return [{"embeds": embeds().view(dtype)} for dtype in (torch.bfloat16, torch.float16)]


def met(engine) -> int:
    """How many engines of the host this one reads from."""
    neighbours = inspection.neighbours(engine.half)
    neighbours.look()
    return len(neighbours.present())


TWINS = pytest.mark.parametrize(
    ("twins", "alike"),
    [(masked(3), 0), (masked(BLOCK + 2), BLOCK), (of_types(), 0)],
    ids=["3", "18", "types"],
)
"""Prompts that vLLM's hashes do not tell apart (vLLM #56655), and how many of their first
tokens are in full blocks that are alike."""


@TWINS
@pytest.mark.parametrize("family", ["full", "window and full"])
def test_what_vllms_hashes_do_not_tell_has_slots_of_its_own(engine, family, twins, alike):
    prefill = engine("kv_producer", family=family, prefix_caching=False)
    decode = engine("kv_consumer", family=family, prefix_caching=False)
    reference = engine(None, family=family, prefix_caching=False)
    tokens = [0] * LENGTH
    offered = [prefill.generate(tokens, 1, HANDOFF, **each).params for each in twins]
    held = prefill.usage[0]
    again = prefill.generate(tokens, 1, HANDOFF, **twins[1]).params
    assert prefill.usage[0] == held  # equal ones share theirs
    for given, params in zip((*twins, twins[1]), (*offered, again), strict=True):
        right = reference.generate(tokens, 6, **given).tokens
        assert decode.generate(tokens, 6, params, **given).tokens == right
    assert decode.count("handoffs_received") == 3
    assert_clean(prefill, decode)


@TWINS
@pytest.mark.parametrize("through", ["arena", "store"])
def test_what_vllms_hashes_do_not_tell_is_not_found(engine, shelf, through, twins, alike):
    """Also where vLLM's own cache had the one when the other was computed and kept."""
    options = {"extra": SHARES if through == "arena" else MASTER, "instant_copies": True}
    first, second = engine("kv_both", **options), engine("kv_both", **options)
    if through == "arena":
        wait(lambda: met(second) == 1)
    reference = engine(None, prefix_caching=False)
    tokens = [0] * LENGTH
    right = [reference.generate(tokens, 6, **each).tokens for each in twins]
    found = "tokens_from_host" if through == "arena" else "tokens_shared"

    def keep(given):
        first.generate(tokens, 1, **given)
        if through == "store":
            landed(first)

    keep(twins[0])
    assert second.generate(tokens, 6, **twins[1]).tokens == right[1]
    assert second.count(found) == alike
    keep(twins[1])
    third = engine("kv_both", **options)
    if through == "arena":
        wait(lambda: met(third) == 2)
    assert third.generate(tokens, 6, **twins[0]).tokens == right[0]
    assert third.generate(tokens, 6, **twins[1]).tokens == right[1]
    assert third.count(found) == 6 * BLOCK - alike


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_a_vllm_whose_hashes_cannot_be_completed_shares_no_such_prompt(engine, monkeypatch, role):
    """Of a hash that vLLM makes in another way nothing is known."""
    monkeypatch.setattr(
        kv_cache_utils,
        "_gen_prompt_embeds_extra_hash_keys",
        lambda request, *_: [] if request.prompt_embeds is None else [("prompt_embeds", b"")],
    )
    extra = SHARES if role == "kv_both" else None
    made = engine(role, extra=extra, instant_copies=True)
    answer = made.generate([0] * LENGTH, 1, HANDOFF, **masked(3)[0])
    assert answer.params["omni_no_handoff"] == "prompt_embeds"
    assert made.failures() == {"prompt_embeds": 1}
    assert made.usage[0] == 0
    plain = embeds().to(made.config.model_config.dtype)
    answer = made.generate([0] * LENGTH, 1, HANDOFF, embeds=plain)
    assert "omni_no_handoff" not in answer.params
    assert made.usage[0] > 0


def test_a_decode_engine_that_is_given_tokens_instead_computes_them(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    params = prefill.generate([0] * LENGTH, 1, HANDOFF, embeds=embeds()).params
    for instead in ([0] * LENGTH, list(range(100, 100 + LENGTH))):
        assert decode.generate(instead, 6, params).tokens == tokens(instead, 6)
    assert decode.failures() == {"other_prompt": 2}


def test_equal_prompts_share_their_slots_and_others_do_not(engine):
    prefill = engine("kv_producer")
    prompt, held = embeds(), []
    for each in (prompt, prompt.clone(), other_at(LENGTH - 2, prompt), other_at(0, prompt)):
        prefill.generate([0] * LENGTH, 1, HANDOFF, embeds=each)
        held.append(prefill.usage[0])
    # The tail is a block of its own; of another beginning nothing is the same.
    assert held == [4, 4, 5, 9]


def test_a_drafter_that_reads_tokens_ahead_is_handed_off_no_embeddings(engine):
    options = {"family": "full and drafter", "drafter": "mtp", "drafts": 1}
    prefill = engine("kv_producer", **options)
    decode = engine("kv_consumer", **options)
    params = prefill.generate([0] * LENGTH, 1, HANDOFF, embeds=embeds()).params
    assert params["omni_no_handoff"] == "prompt_embeds"
    assert prefill.failures() == {"prompt_embeds": 1}
    good = prefill.generate(list(range(100, 140)), 1, HANDOFF).params
    decode.generate([0] * 40, 2, good, embeds=embeds(40))
    assert decode.failures() == {"prompt_embeds": 1}


def test_a_block_of_embeddings_is_found_by_those_embeddings_alone(engine):
    options = {"extra": SHARES, "instant_copies": True, "usable_blocks": 12}
    sharer = engine("kv_both", **options)
    reference = engine(None, usable_blocks=12)
    prompt = embeds()
    sharer.generate([0] * LENGTH, 1, embeds=prompt)
    for seed in range(2, 6):  # until vLLM's own cache has lost it
        sharer.generate([0] * (9 * BLOCK), 1, embeds=embeds(9 * BLOCK, seed))
    # The second finds its first block in vLLM's own cache.
    for asked, found in ((other_at(BLOCK, prompt), BLOCK), (prompt, 2 * BLOCK)):
        before = sharer.count("tokens_kept")
        right = reference.generate([0] * LENGTH, 4, embeds=asked).tokens
        assert sharer.generate([0] * LENGTH, 4, embeds=asked).tokens == right
        assert sharer.count("tokens_kept") - before == found
