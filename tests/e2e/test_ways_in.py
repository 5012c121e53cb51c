# SPDX-License-Identifier: Apache-2.0
"""The other ways to use the connector: `kv_both`, by module path, and in process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector.testing.engines import PREFILL_PARAMS
from omni_connector.testing.reference import Answer

from .configurations import ours
from .harness import Case, Pair
from .pool import Pool, engine_environment
from .prompts import MAX_TOKENS

pytestmark = pytest.mark.e2e

IN_PROCESS = Path(__file__).with_name("in_process.py")


def test_both_sides_hand_off_to_each_other(pool: Pool, case: Case) -> None:
    # One was not told of the plugin: it knows the connector by its module.
    members = pool.take(("unlike", "llama", ""), ("both", "llama", "a"))
    for pair in (Pair.of(*members), Pair.of(*reversed(members))):
        received = pair.received()
        case.check(pair.hand_off(case.prompt))
        assert pair.received() == received + 1
    pair.wait_until_idle()


def test_an_engine_in_process_takes_a_hand_off(
    pool: Pool, cases: dict[str, Case], temporary: Path
) -> None:
    case = cases["two-thousand-not-aligned"]
    [member] = pool.take(("both", "llama", "a"))
    answer = member.engine.complete(
        case.prompt, max_tokens=1, kv_transfer_params=dict(PREFILL_PARAMS)
    )
    task = {
        "settings": {
            "model": str(pool.model("llama")),
            "dtype": "float32",
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 64 << 20,
        },
        "kv_transfer_config": ours("kv_consumer"),
        "prompt": case.prompt,
        "max_tokens": MAX_TOKENS,
        "params": answer["kv_transfer_params"],
    }
    done = subprocess.run(
        [sys.executable, str(IN_PROCESS)],
        input=json.dumps(task),
        env={
            **os.environ,
            **engine_environment(pool.runtime),
            "TMPDIR": str(temporary),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    likeliest = ({int(token): value for token, value in row} for row in result["likeliest"])
    case.check(Answer(tuple(result["tokens"]), tuple(result["logprobs"]), tuple(likeliest)))
    assert result["received"] == [1]
