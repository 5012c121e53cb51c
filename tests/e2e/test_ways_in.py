# SPDX-License-Identifier: Apache-2.0
"""The other ways to use the connector: `kv_both`, by module path, and in process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector.testing.reference import Answer

from .harness import (
    MAX_TOKENS,
    ROUNDING,
    Case,
    Pair,
    StartEngine,
    connector_config,
    engine_environment,
    fill_with_other_bytes,
)

pytestmark = pytest.mark.e2e

IN_PROCESS = Path(__file__).with_name("in_process.py")


def by_module_path() -> dict[str, object]:
    """The configuration of an engine that knows the connector by its module only."""
    module = "omni_connector.vllm_v1.connector"
    return {**connector_config("kv_both"), "kv_connector_module_path": module}


@pytest.fixture(scope="module")
def both(start_engine: StartEngine, runtime: Path) -> Pair:
    """Two engines that are both sides; the first was not told of the plugin."""
    first = start_engine("first", by_module_path(), environment={"VLLM_PLUGINS": ""})
    second = start_engine("second", connector_config("kv_both"))
    for engine in (first, second):
        engine.wait_ready()
        fill_with_other_bytes(engine)
    return Pair(first, second, runtime)


def test_both_sides_hand_off_to_each_other(both: Pair, case: Case) -> None:
    for pair in (both, Pair(both.decode_engine, both.prefill_engine, both.runtime)):
        received = pair.count(pair.decode_engine, "handoffs_received")
        pair.hand_off(case.prompt).require_same(case.reference)
        assert pair.count(pair.decode_engine, "handoffs_received") == received + 1
    both.wait_until_idle()


def test_an_engine_in_process_takes_a_hand_off(
    both: Pair, cases: dict[str, Case], model: Path
) -> None:
    case = cases["two-thousand-not-aligned"]
    params = both.prefill_engine.complete(
        case.prompt,
        max_tokens=1,
        kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False},
    )["kv_transfer_params"]
    both.decode_engine.stop()  # two engines at a time are enough for a small machine
    task = {
        "settings": {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            "kv_cache_memory_bytes": 64 << 20,
        },
        "kv_transfer_config": connector_config("kv_consumer"),
        "prompt": case.prompt,
        "max_tokens": MAX_TOKENS,
        "params": params,
    }
    done = subprocess.run(
        [sys.executable, str(IN_PROCESS)],
        input=json.dumps(task),
        env={
            **os.environ,
            **engine_environment(both.runtime),
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
    answer = Answer(tuple(result["tokens"]), tuple(result["logprobs"]))
    # The LLM class has other defaults than the server, and with them another numeric path.
    answer.require_same(case.reference, tolerance=ROUNDING)
    assert result["received"] == [1]
