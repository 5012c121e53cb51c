# SPDX-License-Identifier: Apache-2.0
"""Pictures are part of what a prompt is; at the level of requests, without an engine."""

import hashlib

import pytest

pytest.importorskip("vllm")

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from omni_connector.vllm_v1.requests import prompt_of

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
    prompt = prompt_of(request, len(TOKENS) - 1, 0)
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
