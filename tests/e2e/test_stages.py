# SPDX-License-Identifier: Apache-2.0
"""Stage to stage: the KV of a real engine, attended to in another process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .pool import Pool, engine_environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "ar_to_diffusion.py"


@pytest.mark.e2e
def test_ar_to_diffusion_transfer(engine_pool: Pool, tmp_path: Path, temporary: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--model", str(engine_pool.model("llama"))],
        env={
            **os.environ,
            **engine_environment(tmp_path),
            "TMPDIR": str(temporary),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "300 tokens of KV received" in done.stdout


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
