# SPDX-License-Identifier: Apache-2.0
"""What tests of hand-offs compare KV with notices what is not the sender's."""

from collections.abc import Callable

import pytest
import torch

from .kv import Held, require_same_kv

SIZE, HEADS, WIDTH, LAYER = 4, 2, 3, "layer"
TOKENS = 10  # and two places behind them in the last of three blocks
PROMPT = torch.randn(3 * SIZE, HEADS, WIDTH, generator=torch.Generator().manual_seed(0))
PROMPT[3, 1, 2] = float("nan")


def held(tokens: torch.Tensor, places: tuple[int, ...] = (0, 1, 2)) -> Held:
    """What blocks hold whose tokens are these."""
    blocks = tokens.unflatten(0, (-1, 1, SIZE)).transpose(2, 3)[list(places)]
    groups = [{"kind": "FullAttentionSpec", "block_size": SIZE, "layers": {LAYER: []}}]
    return Held(groups, [], 0, [{"places": list(places), "layers": {LAYER: [blocks]}}])


def ranks(*tokens: torch.Tensor) -> list[Held]:
    return [held(each) for each in tokens]


def changed(place: int) -> torch.Tensor:
    """The prompt with one number changed."""
    other = PROMPT.clone()
    other[place, 0, 1] += 1.0
    return other


def test_the_sender_s_bytes_are_the_same() -> None:
    require_same_kv(ranks(PROMPT), ranks(PROMPT), TOKENS)
    require_same_kv(ranks(PROMPT), [held(PROMPT, (1, 2))], TOKENS)
    require_same_kv(ranks(PROMPT), ranks(changed(3)), TOKENS, start=SIZE)


@pytest.mark.parametrize("place", range(TOKENS))
def test_one_wrong_number_is_noticed(place: int) -> None:
    with pytest.raises(AssertionError, match=f"another token {place} of {TOKENS}"):
        require_same_kv(ranks(PROMPT), ranks(changed(place)), TOKENS)


def test_a_number_that_is_none_must_have_the_same_bits() -> None:
    other = PROMPT.clone()
    other[3, 1, 2] = -other[3, 1, 2]
    with pytest.raises(AssertionError, match="another token 3"):
        require_same_kv(ranks(PROMPT), ranks(other), TOKENS)


def test_behind_the_prompt_are_the_sender_s_bytes_or_zeros() -> None:
    zeros = PROMPT.clone()
    zeros[TOKENS:] = 0.0
    require_same_kv(ranks(PROMPT), ranks(zeros), TOKENS)
    with pytest.raises(AssertionError, match="another request behind token 10"):
        require_same_kv(ranks(PROMPT), ranks(changed(TOKENS)), TOKENS)


def test_what_the_sender_does_not_hold_is_noticed() -> None:
    with pytest.raises(AssertionError, match="does not hold as token 0 of 10"):
        require_same_kv([held(PROMPT, (1, 2))], ranks(PROMPT), TOKENS)
    with pytest.raises(AssertionError, match="no token at all"):
        require_same_kv(ranks(PROMPT), [held(PROMPT, ())], TOKENS)


@pytest.mark.parametrize(
    ("cut", "join"),
    [
        (lambda rows: [rows], lambda rows: list(rows.split(1, dim=1))),
        (lambda rows: list(rows.split(1, dim=1)), lambda rows: [rows]),
        (lambda rows: [rows[:, :1]] * 2, lambda rows: [rows[:, :1]]),
    ],
    ids=["one-to-two", "two-to-one", "held-twice"],
)
def test_heads_are_those_of_the_rank(
    cut: Callable[[torch.Tensor], list[torch.Tensor]],
    join: Callable[[torch.Tensor], list[torch.Tensor]],
) -> None:
    heads = len(torch.cat(join(PROMPT), dim=1)[0])
    require_same_kv(ranks(*cut(PROMPT)), ranks(*join(PROMPT)), TOKENS, kv_heads=heads)
    with pytest.raises(AssertionError, match="rank 0 found another token 7"):
        require_same_kv(ranks(*cut(PROMPT)), ranks(*join(changed(7))), TOKENS, kv_heads=heads)


def test_states_are_compared() -> None:
    groups = [{"kind": "MambaSpec", "block_size": SIZE, "layers": {LAYER: []}}]

    def state(value: float) -> list[Held]:
        layers = {LAYER: [torch.full((1, 1, 5), value)]}
        return [Held(groups, [], 0, [{"places": [2], "layers": layers}])]

    require_same_kv(state(1.0), state(1.0), TOKENS)
    with pytest.raises(AssertionError, match="another state"):
        require_same_kv(state(1.0), state(2.0), TOKENS)
