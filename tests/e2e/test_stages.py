# SPDX-License-Identifier: Apache-2.0
"""Stage to stage: the KV of a real engine, attended to in another process."""

import importlib.util

import pytest
import torch

from .conftest import EXAMPLE
from .programs import Program


@pytest.mark.e2e
def test_ar_to_diffusion_transfer(example: Program) -> None:
    assert "300 tokens of KV received" in example.finish(timeout=250)


def test_the_example_would_notice_one_wrong_token() -> None:
    spec = importlib.util.spec_from_file_location("ar_to_diffusion", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    draw = torch.Generator().manual_seed(3)
    keys, values = ([torch.randn(300, 2, 64, generator=draw) for _ in range(4)] for _ in range(2))
    right = example.Denoiser(2, 64, 4)(keys, values)
    for tensors in (keys, values):
        saved = tensors[2][150].clone()
        tensors[2][150] = tensors[2][149]
        wrong = example.Denoiser(2, 64, 4)(keys, values)
        tensors[2][150] = saved
        assert (wrong - right).abs().max() / right.abs().max() > 1e-4
