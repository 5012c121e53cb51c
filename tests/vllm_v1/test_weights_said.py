# SPDX-License-Identifier: Apache-2.0
"""What trainers say to vLLM's engine core is noticed."""

from types import SimpleNamespace

import pytest
from vllm.v1.engine.core import EngineCore

from omni_connector.identity.epochs import WeightsSaid
from omni_connector.vllm_v1.compat import weights_said

pytestmark = pytest.mark.vllm


class Manager:
    """vLLM's KV cache manager, as far as it is an engine's name here."""


class Core(EngineCore):
    """The engine core of an engine without workers."""

    def __init__(self, manager):
        said = []
        self.said = said
        self.scheduler = SimpleNamespace(kv_cache_manager=manager)
        self.model_executor = SimpleNamespace(
            collective_rpc=lambda method, *_: said.append((method, weights_said(manager).times))
        )

    def __del__(self):
        """Nothing of vLLM's is left to end."""


def test_calls_to_the_workers_are_noticed_before_they_are_made():
    manager, other = Manager(), Manager()
    assert weights_said(manager) == WeightsSaid()
    core = Core(manager)
    core.collective_rpc("reload_weights")
    core.collective_rpc(method="another")
    assert core.said == [("reload_weights", 1), ("another", 2)]
    assert weights_said(manager) == WeightsSaid(times=2)
    assert weights_said(other) == WeightsSaid()


@pytest.mark.parametrize("name", ["step 7", "", "x" * 100_000, "\udcff not UTF-8"])
def test_the_name_that_a_trainer_gives_is_noticed(name):
    manager = Manager()
    weights_said(manager)
    core = Core(manager)
    core.set_weight_version(name)
    assert weights_said(manager) == WeightsSaid(times=1, named=1, name=name)
    core.set_weight_version(7)  # not a name
    assert weights_said(manager) == WeightsSaid(times=1, named=1, name=name)


def test_while_the_engine_core_is_made_nobody_is_told():
    core = Core(Manager())
    del core.scheduler
    core.collective_rpc("measure")
    assert [method for method, _ in core.said] == ["measure"]
