# SPDX-License-Identifier: Apache-2.0
"""The demo as users run it, but for what all engines of these tests have in their environment, and
its negative control.
"""

import logging
from functools import partial
from pathlib import Path

import pytest

from omni_connector.cli import demo as module
from omni_connector.cli import engines
from omni_connector.cli.demo import demo

from .configurations import CONFIGURATIONS
from .pool import Pool, PooledEngine, engine_environment

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes the demo's model."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def environment(engine_pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines, too, sleep where vLLM's processes would yield, and compile nothing."""
    for name, value in engine_environment(engine_pool.runtime).items():
        monkeypatch.setenv(name, value)


def test_the_demo_moves_the_kv_and_gets_the_same_tokens(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    level = logging.getLogger("vllm").level
    status = demo(lengths=(100, 513), rounds=1, cache=cache, logs=tmp_path)
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.count("yes") == 2
    assert logging.getLogger("vllm").level == level  # whose process it is wants its log


def test_the_demo_fails_a_connector_that_moves_nothing(
    cache: Path,
    engine_pool: Pool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The test above starts engines as users do. Here they are forked.
    forked = partial(PooledEngine, fork_server=engine_pool.fork_server())
    monkeypatch.setattr(engines, "Engine", forked)
    # How long counts are waited for that do not come.
    monkeypatch.setattr(module, "_STATS_S", 1.0)
    no_op = CONFIGURATIONS["reference"].connector
    status = demo(lengths=(513,), rounds=1, cache=cache, logs=tmp_path, kv_transfer_config=no_op)
    out = capsys.readouterr().out
    assert status == 1
    assert "KV of 0 tokens" in out
    assert "the answer differs from the reference" in out
