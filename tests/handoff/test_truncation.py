# SPDX-License-Identifier: Apache-2.0
"""Which prompts can leave their last token to the decode engine."""

from types import SimpleNamespace
from typing import Any

import pytest

from omni_connector.handoff.truncation import truncation_refusal

TOKENS = 40  # that are computed; the prompt has one more


def request(images: tuple[tuple[int, int], ...] = (), **fields: Any) -> SimpleNamespace:
    """A request of vLLM's with images, each by its first token and length."""
    features = [
        SimpleNamespace(mm_position=SimpleNamespace(offset=first, length=length))
        for first, length in images
    ]
    usual = {
        "kv_transfer_params": {"do_remote_decode": True},
        "skip_reading_prefix_cache": False,
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "mm_features": features,
    }
    return SimpleNamespace(**(usual | fields))


@pytest.mark.parametrize(
    ("images", "refusal"),
    [
        ((), None),
        (((0, 10),), None),
        (((0, TOKENS),), None),
        (((TOKENS - 1, 1),), None),
        (((TOKENS, 1),), "multimodal_tail"),
        (((0, 10), (TOKENS - 5, 6)), "multimodal_tail"),
        (((0, TOKENS + 1),), "multimodal_tail"),
    ],
)
def test_a_prompt_that_ends_with_an_image_is_not_cut(
    images: tuple[tuple[int, int], ...], refusal: str | None
) -> None:
    assert truncation_refusal(request(images), TOKENS) == refusal


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "passed_on"),
        ({"skip_reading_prefix_cache": True}, "skip_reading_prefix_cache"),
        (
            {
                "skip_reading_prefix_cache": True,
                "sampling_params": SimpleNamespace(prompt_logprobs=1),
            },
            "prompt_logprobs",
        ),
    ],
)
def test_other_prompts_that_are_not_cut_are_refused_by_their_reason(
    fields: dict[str, Any], refusal: str
) -> None:
    assert truncation_refusal(request(**fields), TOKENS) == refusal
