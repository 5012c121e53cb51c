# SPDX-License-Identifier: Apache-2.0
"""The short form of `benchmarks/soak.py`: requests of all kinds, and an engine that is killed."""

import pytest

from tests import soak

from .pool import Pool

pytestmark = pytest.mark.e2e

REQUESTS = 120
LEFT_S = 60.0
# Engines take what they need at the beginning. Far less than what these requests would leak.
GROWTH = {"own": 48 << 20, "shared": 48 << 20, "files": 32, "threads": 16}


def test_every_answer_is_right_and_nothing_is_left(engine_pool: Pool) -> None:
    prompts = soak.make_prompts(families=3, each=4)
    [member] = engine_pool.take(("reference", "llama", ""))
    expected = [soak.references(member.engine, prompts)]
    runtime = engine_pool.runtime.with_name("soak")
    runtime.mkdir(mode=0o700)

    def sharer() -> soak.Engine:
        return engine_pool.new("soak", environment={"OMNI_CONNECTOR_RUNTIME_DIR": str(runtime)})

    pair = [sharer(), sharer()]
    try:
        for engine in pair:
            engine.start()
        for engine in pair:
            engine.wait_ready()
            soak.until(lambda engine=engine: not soak.held(engine), LEFT_S, "still held")
        soak.until(lambda: len(list(runtime.rglob("*.status"))) == 2, LEFT_S, "no status")
        ours = soak.files(runtime)
        weights = [engine_pool.model("llama")]
        report = soak.Soak(pair, sharer, prompts, expected, weights, runtime).run(REQUESTS)
        assert not report.wrong
        assert not report.broken
        assert report.lives >= 1
        assert report.changes["role"] >= 1
        for kind, most in GROWTH.items():
            assert all(growth < most for growth in report.growth(kind).values()), report.usage
        for engine in pair:
            soak.until(lambda engine=engine: not soak.held(engine), LEFT_S, "still held")
        soak.until(lambda: soak.files(runtime) <= ours, LEFT_S, "files of the killed engine")
        for metric in ("tokens_from_host", "tokens_kept", "handoffs_received"):
            assert sum(e.metric(f"vllm:omni_connector_{metric}_total") for e in pair), metric
    finally:
        for engine in pair:
            engine.stop()
    soak.sweep(runtime)
    assert not soak.files(runtime)
    assert not [path for path in report.memory if path.exists()]
