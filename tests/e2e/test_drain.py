# SPDX-License-Identifier: Apache-2.0
"""Engines behind vllm-router are restarted while clients ask: nothing is lost, or computed twice.

The long form is `benchmarks/rolling_restarts.py`.
"""

from collections.abc import Iterator

import pytest

from omni_connector.testing import reference
from omni_connector.testing.engines import Engine
from tests import soak
from tests.rolling import ARGUMENTS, MOST_TOKENS, QUIET_S, SIDES, Rolling

from .pool import Pool

pytestmark = pytest.mark.e2e

CLIENTS = 4
LEAVES_S = 10.0
REST_S = 0.5
"""Rest of each client after an answer while an engine starts: it starts sooner so."""
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@pytest.fixture(scope="module")
def rolling(engine_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolling]:
    pytest.importorskip("vllm_router")
    prompts = soak.make_prompts(families=2, each=4)
    [member] = engine_pool.take(("reference", "llama", ""))
    with member.engine.client() as client:
        expected = [reference.same_path(client, each, max_tokens=MOST_TOKENS) for each in prompts]
    runtime = engine_pool.runtime.with_name("rolling")
    runtime.mkdir(mode=0o700)

    def make(side: str, port: int | None) -> Engine:
        engine = engine_pool.new(
            "both",
            arguments=ARGUMENTS,
            environment={"OMNI_CONNECTOR_RUNTIME_DIR": str(runtime)},
            connector={"drain_quiet_s": QUIET_S},
        )
        assert engine.kv_transfer_config is not None
        engine.kv_transfer_config = {**engine.kv_transfer_config, "kv_role": ROLES[side]}
        engine.port = port or engine.port
        return engine

    log = tmp_path_factory.mktemp("rolling") / "router.log"
    rolling = Rolling(make, runtime, log, prompts, expected, REST_S)
    try:
        rolling.start()
        yield rolling
    finally:
        rolling.stop()


def test_a_restart_of_each_side_loses_nothing_and_wastes_no_prefill(rolling: Rolling) -> None:
    def restart() -> None:
        for side in SIDES:
            rolling.restart(side, 0)

    outcome = rolling.run(restart, CLIENTS, requests=40)
    assert not outcome.lost
    assert not outcome.killed
    assert not outcome.wrong
    assert outcome.answered >= 40
    assert outcome.count("handoffs_received") > outcome.answered // 2
    assert outcome.wasted == 0, outcome.failures()
    assert set(outcome.failures()) <= {"draining"}


def test_a_drain_that_does_nothing_is_found_out(rolling: Rolling) -> None:
    """The negative control: at SIGINT vLLM's server shuts down without the drain before it."""
    outcome = rolling.run(lambda: rolling.stop_undrained("decode", 1, LEAVES_S), CLIENTS)
    assert outcome.lost
