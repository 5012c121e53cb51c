# SPDX-License-Identifier: Apache-2.0
"""Patches of vLLM: each by itself, and none that an engine without this connector notices."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from omni_connector import plugin
from omni_connector.vllm_v1 import patches, vllm_names
from omni_connector.vllm_v1.vllm_names import (
    LOSSES,
    TABLE,
    Attributes,
    Called,
    Calls,
    Hook,
    IfThere,
    UsedName,
    losses,
    misfits,
)
from tests.toy import write_model

from .names_used import Use, load, uses, without

pytestmark = pytest.mark.vllm

USES = uses()


# The mechanism

STANDIN = "vllm_of_the_future"
TARGET = f"{STANDIN}:Core.reload"


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of a vLLM of which one method is patched."""
    module = ModuleType(STANDIN)

    class Core:
        def reload(self, path: str) -> str:
            if path == "missing":
                raise OSError(path)
            return f"reloaded {path}"

    module.Core = Core  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, STANDIN, module)
    table = ((Called(TARGET, 1), "reloads are not noticed"),)
    monkeypatch.setattr(vllm_names, "LOSSES", table)
    patches._say_lost.cache_clear()
    return Core


def test_a_watch_runs_around_each_call_and_once(core: Any) -> None:
    seen = []

    def watch(self: Any, path: str) -> Iterator[None]:
        seen.append(f"before {path}")
        try:
            yield
            seen.append("after")
        finally:
            seen.append("end")

    assert patches.patch(TARGET, watch)
    assert patches.patch(TARGET, watch)
    assert core().reload("a") == "reloaded a"
    with pytest.raises(OSError, match="missing"):
        core().reload(path="missing")
    assert seen == ["before a", "after", "end", "before missing", "end"]


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_watch_that_fails_is_said_once_and_stops_nobody(
    core: Any, log: list[str], when: str
) -> None:
    def fail(now: str) -> None:
        if now == when:
            raise AttributeError("no such attribute")

    def watch(*_: Any) -> Iterator[None]:
        fail("before")
        yield
        fail("after")

    patches.patch(TARGET, watch)
    assert [core().reload("a") for _ in range(2)] == ["reloaded a"] * 2
    said = "reloads are not noticed (AttributeError('no such attribute'))"
    assert log == ([] if when == "never" else [said])


@pytest.mark.parametrize(
    "change",
    [
        lambda core: delattr(core, "reload"),
        lambda core: setattr(core, "reload", lambda self: None),
        lambda core: delattr(sys.modules[STANDIN], "Core"),
    ],
    ids=["no method", "other arguments", "no class"],
)
def test_what_cannot_be_patched_is_said_with_what_is_lost(
    core: Any, log: list[str], change: Callable[[Any], None]
) -> None:
    change(core)
    before = dict(vars(core))
    assert not patches.patch(TARGET, lambda *_: iter([None]))
    assert dict(vars(core)) == before
    (line,) = log
    assert line.startswith(f"reloads are not noticed ({STANDIN}.Core.reload")


APPLY: dict[str, Callable[[], Any]] = {
    patches.WORKERS: patches.watch_workers,
    patches.CALLS_OF_WORKERS: lambda: patches.watch_trainers(print, print),
    patches.WEIGHT_VERSIONS: lambda: patches.watch_trainers(print, print),
    patches.ADAPTERS: lambda: patches.watch_adapters(lambda lora: iter([None])),
}


@pytest.mark.parametrize("lacking", [*APPLY, None])
def test_each_patch_is_left_out_by_itself(
    monkeypatch: pytest.MonkeyPatch, log: list[str], lacking: str | None
) -> None:
    places = {target: target.rpartition(".")[::2] for target in APPLY if _there(target)}
    for owner, name in places.values():
        monkeypatch.setattr(load(owner), name, inspect.unwrap(getattr(load(owner), name)))
    patches._say_lost.cache_clear()
    if lacking in places:
        monkeypatch.delattr(load(places[lacking][0]), places[lacking][1])
        del places[lacking]
    for apply in APPLY.values():
        apply()
    assert all(hasattr(load(target), patches._REPLACED) for target in places)
    lost = [] if lacking is None else [vllm_names.loss_of(lacking)]
    assert log == [f"{loss} ({problem})" for loss, problem in lost if problem is not None]
    assert bool(log) == (lacking is not None)


def _there(target: str) -> bool:
    try:
        return load(target) is not None
    except AttributeError:
        return False


# The table of names


def _names(each: UsedName, *, optional: bool = False) -> Iterator[tuple[Any, str, bool]]:
    """The class or module, and the name, of each entry; and whether it may be missing."""
    if isinstance(each, IfThere):
        yield from _names(each.name, optional=True)
    elif isinstance(each, Hook):
        yield load(f"{vllm_names._BASE}:{each.of}"), each.name, optional
    elif isinstance(each, Called | Calls | Attributes):
        module, _, path = each.name.partition(":")
        cls, _, name = path.rpartition(".")
        attributes = each.attributes if isinstance(each, Attributes) else ()
        try:
            if cls:
                yield load(module), cls, optional
            yield load(f"{module}:{cls}" if cls else module), name, optional
            yield from ((load(each.name), attribute, optional) for attribute in attributes)
        except (ImportError, AttributeError):
            assert optional, each  # of another version


def _table() -> dict[tuple[int, str], bool]:
    """By class and name, whether it may be missing. A module is a name of its package."""
    found: dict[tuple[int, str], bool] = {}
    for each in (*TABLE, *(name for name, _ in LOSSES)):
        for owner, name, optional in _names(each):
            for cls in _family(owner):
                key = id(cls), name
                found[key] = optional and found.get(key, True)
            if isinstance(owner, ModuleType):
                package, _, last = owner.__name__.rpartition(".")
                found[id(sys.modules[package]), last] = False
    return found


def _family(owner: Any) -> list[Any]:
    """A class and vLLM's bases of it; or a module."""
    classes = getattr(owner, "__mro__", ())
    return [each for each in classes if each.__module__.startswith("vllm.")] or [owner]


def _entry(table: dict[tuple[int, str], bool], use: Use) -> bool | None:
    owner = load(use.owner)
    known = [table.get((id(each), use.name)) for each in _family(owner)]
    return next((each for each in known if each is not None), None)


def test_the_source_is_read() -> None:
    """Names of all kinds are found."""
    found = {(use.owner.rpartition(":")[2], use.name) for use in USES}
    assert {
        ("VllmConfig", "shutdown_timeout"),
        ("EngineArgs", "create_engine_config"),
        ("EngineCoreProc", "run_engine_core"),
        ("vllm.v1.kv_cache_interface", "KVQuantMode"),
        ("KVConnectorFactory", "register_connector"),
        ("ParallelConfig", "tensor_parallel_size"),  # of an attribute of a configuration
        ("KVCacheBlock", "ref_cnt"),  # by a protocol
        ("vllm.v1.kv_cache_interface", "MLAAttentionSpec"),  # of which only the name is used
    } <= found


def test_every_name_that_the_source_uses_is_in_the_table() -> None:
    table = _table()
    missing = {use: where for use, where in USES.items() if _entry(table, use) is None}
    assert missing == {}


def test_whatever_is_taken_away_is_reported_and_a_bystander_does_not_notice(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    table = _table()
    unreported, noticed = [], []
    for use in USES:
        with monkeypatch.context() as patch:
            made = _bystander(use, patch)
            log.clear()
            plugin._say.cache_clear()
            plugin.register()
            plugin.register()
            if not made() or len(log) > 1:
                noticed.append((use, list(log)))
            reported = [*misfits(), *losses()]
            if not _entry(table, use) and not any(use.name in line for line in reported):
                unreported.append(use)
    assert not unreported, unreported
    assert noticed == []
    assert misfits() == losses() == []  # all was given back


def _bystander(use: Use, patch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Take a name away from a vLLM to which nobody has registered.

    Returns:
        Makes the configuration of an engine that uses no connector; whether it is as vLLM makes it.
    """
    fields = {} if use.name == "kv_transfer_config" else {"kv_transfer_config": None}
    plain = SimpleNamespace(**fields)
    patch.setattr(EngineArgs, "create_engine_config", lambda self: plain)
    patch.setattr(KVConnectorFactory, "_registry", {})
    patch.setattr(plugin, "_factory", None)
    patch.setattr(plugin, "_unregistered", None)
    patches._say_unknown.cache_clear()
    without(use, patch)
    return lambda: (
        use.name == "create_engine_config"
        or EngineArgs.create_engine_config(SimpleNamespace(**fields)) is plain
    )


# vLLM's own code, in a process that lacks a name

LACKING = {
    "KVQuantMode": "vllm.v1.kv_cache_interface:KVQuantMode",
    "MLAAttentionSpec": "vllm.v1.kv_cache_interface:MLAAttentionSpec",
    "vllm.v1.core.kv_cache_utils": "vllm.v1.core.kv_cache_utils:",
    "create_engine_config": "vllm.engine.arg_utils:EngineArgs.create_engine_config",
    "_registry": f"{vllm_names._FACTORY}._registry",
    "register_connector": f"{vllm_names._FACTORY}.register_connector",
    "nothing": "",
}

# Each case is forked where vLLM has made a configuration, and so has loaded what it needs itself.
SCRIPT = """
import importlib, json, logging, os, sys
import vllm.plugins
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

model, cases = sys.argv[1], json.loads(sys.argv[2])
create = EngineArgs.create_engine_config

def take_away(target):
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    if not path:
        sys.modules[module] = None
        return
    *cls, name = path.split(".")
    for each in cls:
        owner = getattr(owner, each)
    delattr(owner, name)

def made(plugins, connector):
    os.environ["VLLM_PLUGINS"] = plugins
    if connector:
        transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    else:
        transfer = None
    try:
        args = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True,
                          kv_transfer_config=transfer)
        patched = getattr(EngineArgs, "create_engine_config", None)
        return "made " + str((patched or create)(args))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

class Count(logging.Handler):
    def emit(self, record):
        print(json.dumps(["said", record.getMessage()]))

made("", None)
vllm.plugins.plugins_loaded = False
logging.getLogger("vllm.omni_connector").addHandler(Count(logging.WARNING))
for case, target in cases.items():
    for plugins, connector in [("", None), ("omni_connector", None),
                               ("omni_connector", "OmniKVConnector")]:
        sys.stdout.flush()
        if os.fork() == 0:
            print(json.dumps(["case", case, plugins, connector]))
            if target:
                take_away(target)
            print(json.dumps(["result", made(plugins, connector)]))
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], list[list[str]]]:
    """By name that is lacking, plugins and connector: what was said, and the configuration."""
    folder = write_model(tmp_path_factory.mktemp("toy"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), json.dumps(LACKING)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith('["'):
            kind, *told = json.loads(line)
            if kind == "case":
                lines = found.setdefault(tuple(told), [])
            else:
                lines.append([kind, *told])
    return found


@pytest.mark.parametrize("name", LACKING)
def test_an_engine_without_the_connector_is_made_as_without_the_package(
    started: dict[tuple[str, ...], list[list[str]]], name: str
) -> None:
    without_package, with_package = (
        started[name, plugins, None] for plugins in ("", "omni_connector")
    )
    assert with_package[-1] == without_package[-1]
    if name == "KVQuantMode" and not without_package[0][1].startswith("made "):
        pytest.skip("this vLLM makes no configuration without it")  # from 0.33 on
    assert without_package[0][1].startswith("made ")
    said = [line for line in with_package if line[0] == "said"]
    assert len(said) == (name in ("create_engine_config", "_registry", "register_connector"))


@pytest.mark.parametrize("name", LACKING)
def test_an_engine_that_asks_for_the_connector_is_told_the_name(
    started: dict[tuple[str, ...], list[list[str]]], name: str
) -> None:
    result = started[name, "omni_connector", plugin.CONNECTOR_NAME][-1][1]
    if name == "nothing":
        assert result.startswith("made ")
    else:
        assert result.startswith("UnsupportedVersionError: ")
        assert name in result
