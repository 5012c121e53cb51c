# SPDX-License-Identifier: Apache-2.0
"""The prompt digest: equal for equal prompts, different for whatever changes the KV."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.handoff.messages import DIGEST_BYTES, DigestKind
from omni_connector.handoff.prompt import Prompt

KINDS: tuple[DigestKind, ...] = ("blocks", "tokens")
MakePrompt = Callable[..., Prompt]

tokens = st.lists(st.integers(0, 2**31), min_size=1, max_size=40)


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_compute_the_same_digest(kind: DigestKind, make_prompt: MakePrompt) -> None:
    ours, theirs = make_prompt(extra=("salt=a",)), make_prompt(extra=("salt=a",))
    assert ours.digest(kind) == theirs.digest(kind)
    assert len(ours.digest(kind)) == DIGEST_BYTES


def test_the_digest_does_not_change_between_releases() -> None:
    prompt = Prompt(
        token_ids=[1, 2, 3, 4, 5],
        num_tokens=5,
        block_hashes=[b"\1" * 32, b"\2" * 32],
        hash_block_size=2,
        extra=("salt=x",),
    )
    assert [prompt.digest(kind).hex()[:16] for kind in KINDS] == [
        "bcfe766cdf530c79",
        "5a8ae055c40b42f1",
    ]


def test_the_kinds_are_told_apart_even_without_hashes(make_prompt: MakePrompt) -> None:
    prompt = make_prompt(block_hashes=(), hash_block_size=0)
    assert prompt.digest("blocks") != prompt.digest("tokens")


@given(tokens=tokens, data=st.data())
def test_any_changed_token_changes_the_digest(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[place] += 1
    for kind in KINDS:
        assert Prompt(token_ids=tokens, num_tokens=len(tokens)).digest(kind) != Prompt(
            token_ids=other, num_tokens=len(tokens)
        ).digest(kind)


@given(tokens=tokens, data=st.data())
def test_swapped_tokens_change_the_digest(tokens: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(tokens))
    for kind in KINDS:
        same = Prompt(token_ids=tokens, num_tokens=len(tokens)).digest(kind) == Prompt(
            token_ids=other, num_tokens=len(tokens)
        ).digest(kind)
        assert same == (other == tokens)


def test_with_hashes_the_tokens_behind_the_last_full_block_count(make_prompt: MakePrompt) -> None:
    prompt = make_prompt(40)
    changed = [*prompt.token_ids[:39], 7]
    assert prompt.digest("blocks") != make_prompt(40, token_ids=changed).digest("blocks")


def test_a_changed_block_hash_changes_the_blocks_digest_only(make_prompt: MakePrompt) -> None:
    prompt, other = make_prompt(), make_prompt(block_hashes=[b"\0" * 32, b"\xff" * 32])
    assert prompt.digest("blocks") != other.digest("blocks")
    assert prompt.digest("tokens") == other.digest("tokens")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((), ("salt=a",)),
        (("salt=a",), ("salt=b",)),
        (("salt=a",), ("lora=a",)),
        (("lora=a", "salt=b"), ("salt=b", "lora=a")),
        (("ab", "c"), ("a", "bc")),
        (("mm=x@0+4",), ("mm=x@4+4",)),
        (("",), ()),
        (("salt=\ud800",), ("salt=\ud801",)),
    ],
)
def test_what_else_changes_the_kv_changes_the_digest(
    kind: DigestKind, one: tuple[str, ...], other: tuple[str, ...], make_prompt: MakePrompt
) -> None:
    assert make_prompt(extra=one).digest(kind) != make_prompt(extra=other).digest(kind)


@pytest.mark.parametrize("length", [40, 1])
def test_what_else_changes_the_kv_tells_prompts_of_one_engine_apart(
    length: int, make_prompt: MakePrompt
) -> None:
    extras: list[tuple[str, ...]] = [(), ("salt=a",), ("salt=b",), ("lora=a",), ("mm=x@0+4",)]
    prompts = [make_prompt(length, extra=extra) for extra in extras]
    assert len({each.identity() for each in prompts}) == len(extras)
    assert prompts[1].identity() == make_prompt(length, extra=("salt=a",)).identity()


@pytest.mark.parametrize("kind", KINDS)
def test_length_counts_and_what_follows_the_prompt_does_not(
    kind: DigestKind, make_prompt: MakePrompt
) -> None:
    prompt = make_prompt(40)
    longer = make_prompt(48)
    assert longer.digest(kind) != prompt.digest(kind)
    ends_earlier = make_prompt(48, num_tokens=40)  # decoding goes on, and adds tokens and hashes
    assert ends_earlier.digest(kind) == prompt.digest(kind)


def test_hashes_and_tokens_cannot_stand_for_each_other() -> None:
    hashed = Prompt(
        token_ids=[1, 2, 3, 4], num_tokens=4, block_hashes=[b"\0" * 32], hash_block_size=4
    )
    plain = Prompt(token_ids=[0, 0, 0, 0], num_tokens=4)  # the same 32 bytes
    assert hashed.digest("blocks") != plain.digest("blocks")


@pytest.mark.parametrize("block", [16, 64], ids=["hashed", "without hashes"])
def test_prompts_of_other_kv_are_not_identical(make_prompt: MakePrompt, block: int) -> None:
    """Identical prompts share the slots of a hand-off."""
    one = make_prompt(40, block)
    assert one.identity() == make_prompt(40, block).identity()
    others = [
        make_prompt(40, block, extra=("salt=a",)),
        make_prompt(40, block, extra=("salt=b",)),
        make_prompt(39, block),
        make_prompt(40, block, token_ids=[*range(100, 139), 7]),
    ]
    assert len({each.identity() for each in (one, *others)}) == 5
    first = [bytes([9]) * 32, bytes([10]) * 32]
    assert make_prompt(40, 16, block_hashes=first).identity() != make_prompt(40, 16).identity()
