# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a configuration is said before vLLM loads the model."""

import copy
import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from PIL import Image  # noqa: E402
from vllm.config import (  # noqa: E402
    ECTransferConfig,
    KVEventsConfig,
    KVTransferConfig,
    MultiModalConfig,
    VllmConfig,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems  # noqa: E402
from vllm.multimodal.processing import BaseProcessingInfo, ProcessorInputs  # noqa: E402

from omni_connector import plugin  # noqa: E402
from omni_connector.config import OmniConfig  # noqa: E402
from omni_connector.errors import ConfigError, TransportError  # noqa: E402
from omni_connector.net import runtime as runtime_module  # noqa: E402
from omni_connector.net.runtime import LOOPBACK_KEY, loopback_key  # noqa: E402
from omni_connector.vllm_v1 import patches, startup  # noqa: E402

Make = Callable[..., VllmConfig]


@pytest.fixture
def make(model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the configuration of an engine as a server or an `LLM` does; no model is loaded."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
    plugin.register()

    def made(
        connector: str = plugin.CONNECTOR_NAME,
        role: Any = "kv_both",
        engine: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> Any:
        transfer = KVTransferConfig(
            kv_connector=connector, kv_role=role, kv_connector_extra_config=extra
        )
        given = {"model": str(model), "skip_tokenizer_init": True, "enforce_eager": True}
        arguments = EngineArgs(**(given | dict(engine or {})))
        arguments.kv_transfer_config = transfer
        return arguments.create_engine_config()

    return made


@pytest.fixture
def taken() -> Any:
    """A port that somebody has."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield held.getsockname()[1]


class Info(BaseProcessingInfo):
    """Of a model with images."""

    def get_supported_mm_limits(self) -> dict[str, int | None]:
        return {"image": None}


def image_hash(made: Any, **changes: Any) -> str:
    """How a server of this configuration, of a model with images, hashes an image."""
    made.model_config.multimodal_config = MultiModalConfig()
    for name, value in changes.items():
        setattr(made, name, value)
    startup.name_media_by_content(made)
    context: Any = SimpleNamespace(model_config=copy.copy(made.model_config))
    image = ImageProcessorItems([Image.new("RGB", (4, 4))])
    inputs = ProcessorInputs(prompt=[], mm_data_items=MultiModalDataItems(image=image))
    (told,) = inputs.get_mm_hashes(Info(context).model_id, "sha256")["image"]
    return told


def test_images_are_told_by_the_content_of_a_model_and_not_by_its_path(
    make: Make, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseProcessingInfo, "model_id", BaseProcessingInfo.model_id)
    there, other = tmp_path / "there", tmp_path / "other"
    shutil.copytree(model, there)
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    at = [{"model": str(each)} for each in (model, there, other)]
    told = [image_hash(make(engine=each)) for each in at]
    assert told[0] == told[1] != told[2]
    # For these, vLLM's own hashes stay as they are: by the path.
    events = KVEventsConfig(enable_kv_cache_events=True)
    encoder = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    for how in ({"connector": "ExampleConnector"}, {"kv_events_config": events}, {"ec": encoder}):
        name = how.pop("connector", plugin.CONNECTOR_NAME)
        changes = {"ec_transfer_config": how.pop("ec", None), **how}
        extra = {} if name == plugin.CONNECTOR_NAME else {"shared_storage_path": "/nowhere"}
        here = [image_hash(make(name, engine=each, **extra), **changes) for each in at[:2]]
        assert here[0] != here[1]
        assert told[0] not in here


def test_what_is_right_is_let_through(make: Make, runtime: Path) -> None:
    made = make(arena_gib=0.01, listen="127.0.0.1:0")
    assert made.kv_transfer_config is not None
    assert made.kv_transfer_config.kv_connector == plugin.CONNECTOR_NAME


@pytest.mark.parametrize(("started", "told"), [(2, 2), (1, 1), (0, 1)])
def test_an_engine_core_knows_how_many_of_its_deployment_are_on_the_host(
    make: Make, monkeypatch: pytest.MonkeyPatch, started: int, told: int
) -> None:
    monkeypatch.setenv(patches.LOCAL_ENGINES, "7")  # of a deployment before
    arguments = {"data_parallel_size": 2, "data_parallel_size_local": started}
    parallel = make(engine=arguments).parallel_config
    parallel.reconfigure_for_independent_dp_rank()  # as in the engine core of a dense model
    assert patches.local_engines(parallel) == told


@pytest.mark.parametrize("nonsense", ["", "-3", "two", "\u0662", "1e3"])
def test_nonsense_in_the_environment_counts_as_one_engine(
    make: Make, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    parallel = make().parallel_config
    monkeypatch.setenv(patches.LOCAL_ENGINES, nonsense)
    assert patches.local_engines(parallel) == 1


def test_a_key_that_is_misspelt(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'arena_gb'; did you mean 'arena_gib'"):
        make(arena_gb=1)


def test_a_key_of_one_connector_of_several(make: Make) -> None:
    ours = {
        "kv_connector": plugin.CONNECTOR_NAME,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"arena_gb": 1},
    }
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    with pytest.raises(ConfigError, match=r"did you mean 'arena_gib'"):
        make("MultiConnector", connectors=[other, ours])


def test_the_settings_of_another_connector_are_its_own(make: Make) -> None:
    assert make("ExampleConnector", arena_gb=1, shared_storage_path="/nowhere")


def test_a_runtime_folder_that_is_open_to_others(make: Make, runtime: Path) -> None:
    os.chmod(runtime, 0o755)
    with pytest.raises(ConfigError, match=r"mode 755.*OMNI_CONNECTOR_RUNTIME_DIR="):
        make()


def test_a_runtime_folder_whose_path_is_too_long(
    make: Make, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = runtime / ("x" * 90)
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(deep))
    with pytest.raises(ConfigError, match=r"Linux allows 107; set OMNI_CONNECTOR_RUNTIME_DIR"):
        make()


def test_a_key_file_that_is_missing(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"key_file.*omni\.key.*keygen"):
        make(key_file=str(tmp_path / "omni.key"))


def test_a_key_of_loopback_that_others_may_read(make: Make, runtime: Path) -> None:
    loopback_key()
    (runtime / LOOPBACK_KEY).chmod(0o644)
    with pytest.raises(ConfigError, match=r"loopback\.key is open to others.*chmod it to 600"):
        make(listen="127.0.0.1:0")
    assert make(), "it needs none"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_host_that_makes_no_memfd(make: Make, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(name: str, flags: int = 0) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(TransportError, match=r"cannot make a memfd: .*seccomp profile"):
        make()
    with pytest.raises(TransportError, match=r"cannot make a memfd: .*seccomp profile"):
        make(role="kv_consumer")
    assert make(role="kv_consumer", share=False), "it has no arena"


def test_a_host_without_a_folder_for_temporary_files(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMNI_CONNECTOR_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(runtime_module.tempfile, "gettempdir", none)
    with pytest.raises(ConfigError, match=r"no folder for temporary files.*RUNTIME_DIR"):
        startup.check_settings(OmniConfig(), binds=False, arena=False)


def test_a_port_that_somebody_has(make: Make, taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"listen: cannot listen at 127\.0\.0\.1:{taken}"):
        make(listen=f"127.0.0.1:{taken}")


def test_an_engine_that_only_receives_opens_no_port(make: Make, taken: int) -> None:
    assert make(role="kv_consumer", listen=f"127.0.0.1:{taken}")


def test_a_further_process_of_an_engine_does_not_want_its_port(
    make: Make, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = SimpleNamespace(parent_process=lambda: SimpleNamespace(pid=1))
    monkeypatch.setattr(startup, "multiprocessing", processes)
    assert make(listen=f"127.0.0.1:{taken}")


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"transport": "smh"}, "unknown transport 'smh'; did you mean 'shm'"),
        ({"transport": "shm", "transport_config": {"threds": 1}}, "threds"),
        ({"transport_config": {"shn": {}}}, "did you mean 'shm'"),
    ],
)
def test_a_transport_that_is_misspelt(make: Make, extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(**extra)


@pytest.mark.parametrize("setting", ["decode", "prefill"])
def test_context_parallelism_is_refused_by_its_setting(make: Make, setting: str) -> None:
    made = make()
    setattr(made.parallel_config, f"{setting}_context_parallel_size", 2)
    with pytest.raises(ConfigError, match=f"{setting}_context_parallel_size is 2"):
        startup.check_engine_config(made)


def test_loading_the_plugin_again_checks_once(make: Make) -> None:
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once
