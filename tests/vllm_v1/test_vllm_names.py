# SPDX-License-Identifier: Apache-2.0
"""The table of vLLM's names: the installed vLLM fits it, and one that has changed is refused."""

import inspect
import sys
from abc import abstractmethod
from types import ModuleType

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool

from omni_connector import plugin
from omni_connector.errors import UnsupportedVersionError
from omni_connector.plugin import InstalledVllm
from omni_connector.vllm_v1 import connector, vllm_names
from omni_connector.vllm_v1.connector import OmniKVConnector
from omni_connector.vllm_v1.vllm_names import (
    HOOKS,
    TABLE,
    Attributes,
    Called,
    Hook,
    IfThere,
    losses,
    misfits,
    require_fitting_vllm,
    untested,
)

pytestmark = pytest.mark.vllm

STANDIN = "vllm_of_the_future"


@pytest.fixture(autouse=True)
def _ask_anew():
    require_fitting_vllm.cache_clear()
    yield
    require_fitting_vllm.cache_clear()


@pytest.fixture
def standin(monkeypatch):
    """A module in which a test puts names."""
    module = ModuleType(STANDIN)
    monkeypatch.setitem(sys.modules, STANDIN, module)
    return module


def test_the_installed_vllm_fits():
    assert misfits() == []
    assert losses() == []
    assert require_fitting_vllm() == plugin.installed_vllm()


def test_every_method_that_vllm_calls_is_in_the_table():
    """Those that a supported vLLM lacks are there as such."""
    table = list(HOOKS)
    for each in TABLE:
        if isinstance(each, IfThere) and isinstance(each.name, Hook):
            table.append(each.name)
    known = {hook.name: hook for hook in table}
    called = {
        name
        for base in (KVConnectorBase_V1, SupportsHMA)
        for name in vars(base)
        if name in vars(OmniKVConnector) and not name.startswith("_")
    }
    assert called <= set(known), "vLLM calls what the table does not check"
    for name in called:
        own = inspect.getattr_static(OmniKVConnector, name)
        hook = known[name]
        if isinstance(own, property):
            continue
        own = own.__func__ if isinstance(own, classmethod) else own
        taken = [
            each.name
            for each in inspect.signature(own).parameters.values()
            if each.kind is not each.VAR_KEYWORD and each.name not in ("self", "cls")
        ]
        assert tuple(taken) == hook.parameters, name


def test_a_missing_function_is_named(monkeypatch):
    monkeypatch.delattr(kv_cache_utils, "make_block_hash_with_group_id")
    assert misfits() == ["vllm.v1.core.kv_cache_utils.make_block_hash_with_group_id is missing"]


def test_a_missing_module_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.utils.hashing", None)
    assert misfits() == ["vllm.utils.hashing.get_hash_fn_by_name is missing"]


def test_a_function_that_wants_another_argument_is_named(monkeypatch):
    def free_blocks(self, ordered_blocks, tenant): ...

    monkeypatch.setattr(BlockPool, "free_blocks", free_blocks)
    (problem,) = misfits()
    assert problem.startswith("vllm.v1.core.block_pool.BlockPool.free_blocks(self, ordered")
    assert "missing a required argument: 'tenant'" in problem


@pytest.mark.parametrize(
    "changed",
    [
        lambda self, request, num_computed_tokens, budget: ...,
        lambda self, request, num_computed_tokens, budget=None: ...,
        lambda self, request: ...,
        lambda self, asked, num_computed_tokens: ...,
    ],
    ids=["one more", "one more with a default", "one less", "another name"],
)
def test_a_hook_that_vllm_calls_otherwise_is_named(monkeypatch, changed):
    monkeypatch.setattr(KVConnectorBase_V1, "get_num_new_matched_tokens", changed)
    (problem,) = misfits()
    assert problem.startswith("KVConnectorBase_V1.get_num_new_matched_tokens takes (")
    assert problem.endswith("expected (request, num_computed_tokens)")


def test_a_hook_that_vllm_no_longer_calls_is_named(monkeypatch):
    monkeypatch.delattr(KVConnectorBase_V1, "take_events")
    assert misfits() == ["KVConnectorBase_V1.take_events is missing"]


def test_a_new_duty_of_connectors_is_named(monkeypatch):
    duties = {*KVConnectorBase_V1.__abstractmethods__, "migrate_blocks"}
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", frozenset(duties))
    assert misfits() == ["it wants a connector to have migrate_blocks"]


def test_what_a_class_sets_in_its_constructor_counts(standin):
    class Pool:
        drawn: int

        def __init__(self):
            self.blocks = []

        @abstractmethod
        def touch(self): ...

    standin.Pool = Pool
    assert Attributes(f"{STANDIN}:Pool", ("blocks", "drawn", "touch")).misfit() is None
    problem = Attributes(f"{STANDIN}:Pool", ("blocks", "slots", "pages")).misfit()
    assert problem == f"{STANDIN}.Pool has no slots, pages"


def test_what_is_read_of_the_installed_classes_can_be_told():
    """Of compiled code it could not, and a missing attribute would be no misfit."""
    for each in TABLE:
        if isinstance(each, Attributes) and each.attributes:
            changed = Attributes(each.name, (*each.attributes, "not_there"))
            assert changed.misfit() is not None, each.name


def test_a_name_that_not_all_have_is_checked_where_it_is(standin):
    hook = IfThere(Called(f"{STANDIN}:sources", 1))
    assert hook.misfit() is None
    standin.sources = lambda: None
    assert "is called otherwise" in hook.misfit()


def test_what_is_lost_without_a_name_is_told(monkeypatch):
    monkeypatch.delattr(WorkerLoRAManager, "_load_adapter")
    assert misfits() == []
    (loss,) = losses()
    assert loss.startswith("requests with a LoRA adapter share no KV (vllm.lora.worker_manager.")


@pytest.fixture
def newer(monkeypatch):
    """The installed vLLM says that it is a later one."""
    monkeypatch.setattr(plugin, "version", lambda name: "0.40.1")
    return InstalledVllm("vllm", "0.40.1")


def test_a_newer_vllm_in_which_all_fits_starts_with_one_warning(newer, engine, log, monkeypatch):
    installed = require_fitting_vllm()
    assert installed == newer
    monkeypatch.setattr(connector, "INSTALLED_VLLM", installed)
    engine("kv_both")  # both halves
    (warning,) = [line for line in log if "newer" in line]
    assert warning == untested(installed)
    assert "vllm 0.40.1" in warning


def test_a_tested_vllm_starts_without_a_warning(engine, log):
    engine("kv_both")
    assert not log


@pytest.mark.usefixtures("newer")
def test_a_newer_vllm_that_has_changed_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(kv_cache_utils, "make_block_hash_with_group_id")
    with pytest.raises(UnsupportedVersionError) as refusal:
        require_fitting_vllm()
    name = "vllm.v1.core.kv_cache_utils.make_block_hash_with_group_id"
    assert f"does not fit vllm 0.40.1: {name} is missing." in str(refusal.value)


def test_a_refusal_names_a_few_and_counts_the_rest(monkeypatch):
    problems = [f"name {i} is missing" for i in range(9)]
    monkeypatch.setattr(vllm_names, "misfits", lambda: problems)
    with pytest.raises(UnsupportedVersionError, match="name 4 is missing; and 4 more"):
        require_fitting_vllm()
