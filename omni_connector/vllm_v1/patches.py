# SPDX-License-Identifier: Apache-2.0
"""Every patch of vLLM's own code. An engine without `OmniKVConnector` has the first alone.

| patched | what it is for |
|---|---|
| `EngineArgs.create_engine_config` | settings are checked before vLLM loads the model |
| `BaseProcessingInfo.model_id` | hashes of images do not tell where the model lies |
| `WorkerBase.__init__` | the worker of each configuration is known, and so its model |
| `process_weights_after_loading` of layers | weights are hashed before vLLM packs them |
| `sleep`, `wake_up` and `discard` of a worker | weights that sleep are not read |
| `EngineCore.collective_rpc`, `set_weight_version` | what trainers do to weights is noticed |
| `WorkerLoRAManager._load_adapter` | the contents of LoRA adapters are known |
| `reset_prefix_cache` of a KV cache manager | copies in flight end before it |
| the signal handler of an engine core | an engine that is told to end tells its peers |

The first shows which engines use the connector, whose processes inherit `LOCAL_ENGINES`. The
others are patched there alone.

A watch is a generator: what stands before its `yield` runs before vLLM's function, what stands
after it once that has returned. Each patch is applied by itself. If one cannot be applied, or its
watch fails, vLLM's function runs as it is, and the log says what is lost.

This module imports nothing of vLLM before it patches it.
"""

import functools
import importlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from omni_connector.plugin import CONNECTOR_NAME, LOCAL_ENGINES, require_registered
from omni_connector.vllm_v1.vllm_names import loss_of, require_fitting_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.processing import BaseProcessingInfo
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.worker.worker_base import WorkerBase

# A child of vLLM's logger, which is the one that vLLM configures.
_logger = logging.getLogger("vllm.omni_connector.patches")

Watch = Callable[..., Generator[None, None, None]]
"""Runs beside a call of vLLM's function, whose arguments it is given."""

CONFIGURATIONS: Final = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
MODEL_NAMES: Final = "vllm.multimodal.processing:BaseProcessingInfo.model_id"
WORKERS: Final = "vllm.v1.worker.worker_base:WorkerBase.__init__"
PACKING: Final = (
    "vllm.model_executor.layers.quantization.base_config:"
    "QuantizeMethodBase.process_weights_after_loading"
)
SLEEP: Final = "vllm.v1.worker.gpu_worker:Worker.sleep"
CALLS_OF_WORKERS: Final = "vllm.v1.engine.core:EngineCore.collective_rpc"
WEIGHT_VERSIONS: Final = "vllm.v1.engine.core:EngineCore.set_weight_version"
ADAPTERS: Final = "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter"
SHUTDOWN: Final = "vllm.v1.engine.core:EngineCoreProc.run_engine_core"

# Of a function that took the place of one of vLLM's.
_REPLACED: Final = "_omni_connector_replaced"


# How a patch is applied


def patch(target: str, watch: Watch) -> bool:
    """Have a watch run beside each call of a method of vLLM, in this process. Idempotent.

    Args:
        target: `module:Class.method`.

    Returns:
        Whether it does. Else the log says what is lost.
    """
    problem = loss_of(target)[1]
    if problem is not None:
        _say_lost(target, problem)
        return False
    module, _, path = target.partition(":")
    name, _, method = path.partition(".")
    owner = getattr(importlib.import_module(module), name)
    return hasattr(getattr(owner, method), _REPLACED) or _patch(target, owner, method, watch)


def _patch_one(target: str, instance: Any, method: str, watch: Watch) -> None:
    """As `patch`, for one object of vLLM. What it has not is left alone."""
    if getattr(instance, method, None) is not None:
        _patch(target, instance, method, watch)


def _patch(target: str, owner: Any, name: str, watch: Watch) -> bool:
    try:
        _replace(owner, name, lambda theirs: _watched(target, theirs, watch))
    except Exception as error:  # noqa: BLE001 - said
        _say_lost(target, f"{name} cannot be replaced: {error!r}")
        return False
    return True


def _replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    theirs = getattr(owner, name)
    ours = functools.wraps(theirs)(made(theirs))
    setattr(ours, _REPLACED, True)
    setattr(owner, name, ours)


def _watched(target: str, theirs: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def ours(*args: Any, **options: Any) -> Any:
        watching: Generator[None, None, None] | None = None
        try:
            watching = watch(*args, **options)
            next(watching, None)
        except Exception as error:  # noqa: BLE001 - vLLM goes on as if it was not patched
            _say_lost(target, repr(error))
            watching = None
        try:
            result = theirs(*args, **options)
        except BaseException:
            if watching is not None:
                _end(target, watching.close)
            raise
        if watching is not None:
            _end(target, functools.partial(next, watching, None))
        return result

    return ours


def _end(target: str, end: Callable[[], object]) -> None:
    try:
        end()
    except Exception as error:  # noqa: BLE001 - vLLM goes on as if it was not patched
        _say_lost(target, repr(error))


@functools.cache  # once
def _say_lost(target: str, problem: str) -> None:
    _logger.warning("%s (%s)", loss_of(target)[0], problem)


# Which engines use the connector


def own_extra_config(transfer: "KVTransferConfig | None") -> Mapping[str, Any] | None:
    """Our `kv_connector_extra_config`; None where another connector is configured, or none.

    Under `MultiConnector` it is that of our entry, which may be given as anything.
    """
    if transfer is None or isinstance(transfer, Mapping):  # vLLM has not read it yet
        return None
    if transfer.kv_connector == CONNECTOR_NAME:
        return transfer.kv_connector_extra_config
    extra: Any = transfer.kv_connector_extra_config  # of another connector it may be anything
    entries = extra.get("connectors") if isinstance(extra, Mapping) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("kv_connector") == CONNECTOR_NAME:
            found: Mapping[str, Any] = entry.get("kv_connector_extra_config") or {}
            return found
    return None


def watch_configurations() -> None:
    """Have the settings of each engine of ours checked that this process configures. Idempotent.

    An engine of somebody else is configured as without this package.

    Raises:
        ImportError: vLLM has no such module.
        AttributeError: vLLM's class is not as expected.
    """
    owner: Any = importlib.import_module(CONFIGURATIONS.partition(":")[0]).EngineArgs
    if hasattr(owner.create_engine_config, _REPLACED):
        return

    def made(theirs: Callable[..., "VllmConfig"]) -> Callable[..., "VllmConfig"]:
        def create(self: "EngineArgs", *args: Any, **options: Any) -> "VllmConfig":
            if _asks(self):
                require_fitting_vllm()
                require_registered()
            vllm_config = theirs(self, *args, **options)
            if _asks(vllm_config):
                # Within vLLM's function pydantic would put its own words behind an error's message.
                startup = importlib.import_module("omni_connector.vllm_v1.startup")
                startup.check_engine_config(vllm_config)
                startup.name_media_by_content(vllm_config)
                # Its processes inherit it.
                local = vllm_config.parallel_config.data_parallel_size_local
                os.environ[LOCAL_ENGINES] = str(local)
                watch_workers()
            return vllm_config

        return create

    _replace(owner, "create_engine_config", made)


def _asks(configured: Any) -> bool:
    """Whether `EngineArgs` or a `VllmConfig` asks for this connector."""
    try:
        return own_extra_config(configured.kv_transfer_config) is not None
    except Exception as error:  # noqa: BLE001 - an engine of ours is told so by its connector
        _say_unknown(type(configured).__name__, repr(error))
        return False


@functools.cache  # once
def _say_unknown(name: str, problem: str) -> None:
    _logger.warning(
        "Whether an engine uses %s cannot be read of vLLM's %s, so that settings are not checked "
        "before the model is loaded (%s)",
        CONNECTOR_NAME,
        name,
        problem,
    )


def local_engines(parallel_config: "ParallelConfig") -> int:
    """Data-parallel engines of a deployment on this host, the one with this configuration included.

    It is 1 where they are started one by one, each by a server of its own.
    """
    told = os.environ.get(LOCAL_ENGINES, "")
    counted = int(told) if told.isascii() and told.isdigit() else 1
    return max(1, counted, parallel_config.data_parallel_size_local)


# What is patched in an engine that uses it


def name_models(other: Callable[["ModelConfig"], str | None]) -> bool:
    """Have vLLM's hashes of images and the like tell models by other names than theirs.

    Args:
        other: told a model's configuration; None keeps vLLM's name.

    Returns:
        Whether they do. Else the log says what is lost.
    """
    module, _, path = MODEL_NAMES.partition(":")
    problem = loss_of(MODEL_NAMES)[1]
    owner: Any = None if problem else getattr(importlib.import_module(module), path.split(".")[0])
    named = vars(owner).get("model_id") if owner else None
    if not isinstance(named, property):
        _say_lost(MODEL_NAMES, problem or "it is no property")
        return False
    if not hasattr(named.fget, _REPLACED):

        def model_id(info: "BaseProcessingInfo") -> str:
            name = other(info.ctx.model_config)
            return str(named.__get__(info) if name is None else name)

        setattr(model_id, _REPLACED, True)
        owner.model_id = property(model_id)
    return True


def watch_workers() -> None:
    """From now on know the workers that vLLM makes in this process, and their weights. Cheap where
    it makes none, as nothing of vLLM is imported then."""
    if WORKERS.partition(":")[0] in sys.modules:
        patch(WORKERS, _worker_made)


def _worker_made(worker: "WorkerBase", *_: Any, **__: Any) -> Generator[None, None, None]:
    yield
    if own_extra_config(worker.vllm_config.kv_transfer_config) is None:
        return  # of another engine of this process
    from vllm.platforms import current_platform

    from omni_connector.vllm_v1 import loaded_models

    memory = loaded_models.know(worker)
    if current_platform.is_cpu():  # where vLLM ignores `sleep`
        watch_packing()
        return

    def sleeps(*args: Any, **options: Any) -> Generator[None, None, None]:
        if _of_weights(*args, **options):
            memory.falls_asleep()
        yield

    def wakes(*args: Any, **options: Any) -> Generator[None, None, None]:
        yield
        if _of_weights(*args, **options):
            memory.woke_up()

    # Every level of `sleep` takes the weights away.
    _patch_one(SLEEP, worker, "sleep", lambda *_, **__: sleeps())
    _patch_one(SLEEP, worker, "discard", sleeps)
    _patch_one(SLEEP, worker, "wake_up", wakes)


def _of_weights(tags: Any = None) -> bool:
    return tags is None or "weights" in tags


def watch_packing() -> None:
    """From now on hash weights before vLLM packs them for the kernels of a CPU, where Python cannot
    read them. It does so with each load and each reload, by methods of many classes."""
    problem = loss_of(PACKING)[1]
    if problem is not None:
        _say_lost(PACKING, problem)
        return
    base: Any = importlib.import_module(PACKING.partition(":")[0]).QuantizeMethodBase
    if _REPLACED in vars(base):
        return

    def defined(cls: Any, /, **options: Any) -> None:
        super(base, cls).__init_subclass__(**options)
        _watch_packing_by(cls)

    base.__init_subclass__ = classmethod(defined)
    setattr(base, _REPLACED, True)
    classes = deque(base.__subclasses__())
    while classes:
        cls = classes.popleft()
        _watch_packing_by(cls)
        classes += cls.__subclasses__()


def _watch_packing_by(cls: type) -> None:
    name = PACKING.rpartition(".")[2]
    own = vars(cls).get(name)
    if own is not None and not hasattr(own, _REPLACED):
        _patch(PACKING, cls, name, _packs)


def _packs(method: Any, layer: Any, *_: Any, **__: Any) -> Generator[None, None, None]:
    from omni_connector.vllm_v1.layer_weights import keep_digests

    with keep_digests(layer):
        yield


def watch_trainers(called: Callable[[Any], None], named: Callable[[Any, str], None]) -> None:
    """From now on hear of calls to all workers, and of names that trainers give to weights.

    Args:
        called: told the engine core, before the call is made.
        named: told the engine core and the name, which it has taken.
    """

    def calls(engine_core: Any, *_: Any, **__: Any) -> Generator[None, None, None]:
        called(engine_core)
        yield

    def names(engine_core: Any, weight_version: Any) -> Generator[None, None, None]:
        yield
        if isinstance(weight_version, str):
            named(engine_core, weight_version)

    patch(CALLS_OF_WORKERS, calls)
    patch(WEIGHT_VERSIONS, names)


def watch_adapters(loading: Callable[[Any], Generator[None, None, None]]) -> None:
    """From now on hear of LoRA adapters that vLLM loads in this process.

    Args:
        loading: a watch that is told vLLM's `LoRARequest`.
    """
    patch(ADAPTERS, lambda manager, lora: loading(lora))


def watch_resets(
    manager: "KVCacheManager", attempted: Callable[[], None], done: Callable[[], None]
) -> None:
    """From now on hear of resets of an engine's prefix cache: of each attempt, before it is made,
    and of each that succeeded."""

    def made(theirs: Callable[..., bool]) -> Callable[..., bool]:
        def reset(*args: Any, **options: Any) -> bool:
            attempted()
            was_reset = theirs(*args, **options)
            if was_reset:
                done()
            return was_reset

        return reset

    _replace(manager, "reset_prefix_cache", made)


def notice_shutdown(notice: Callable[[], object]) -> bool:
    """Have a function called when the process of vLLM's engine core is told to end.

    No hook of a connector tells it. The engine core does by a handler of SIGTERM and SIGINT in its
    main thread (vLLM's `run_engine_core`), which is set before the connector is made. That
    handler is called after ours.

    Args:
        notice: called within a signal handler, so it must take no lock.

    Returns:
        Whether this is such a process. In the process of another program, as with `LLM`, signals
        are left alone.
    """
    problem = loss_of(SHUTDOWN)[1]
    if problem is not None:
        _say_lost(SHUTDOWN, problem)
    if threading.current_thread() is not threading.main_thread():
        return False
    found = False
    for number in (signal.SIGTERM, signal.SIGINT):
        theirs = signal.getsignal(number)
        if not callable(theirs) or getattr(theirs, "__module__", "") != SHUTDOWN.partition(":")[0]:
            continue

        def handler(
            signum: int, frame: FrameType | None, theirs: Callable[..., object] = theirs
        ) -> None:
            notice()
            theirs(signum, frame)

        signal.signal(number, handler)
        found = True
    return found
