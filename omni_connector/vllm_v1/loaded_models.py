# SPDX-License-Identifier: Apache-2.0
"""The models that vLLM's workers have loaded, which vLLM shows to no connector.

`patches.watch_workers` tells of each worker when vLLM has made it, before it loads a model. A
worker has `get_model`, and it has it whatever has loaded the model, or loads another one later. On
CPUs vLLM packs weights for its kernels, where Python cannot read them, and removes them from the
model, so they are hashed just before that (`layer_weights`). On devices weights that sleep have no
memory, and reading them would end the process.

Where workers are not watched before the model is loaded (`VLLM_PLUGINS` without this plugin, a
connector that is found by `kv_connector_module_path`), or where the worker has no model, that is
said by `UnreadableWeightsError`.
"""

import enum
import os
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from omni_connector.copy.cuda import CudaStream
from omni_connector.identity.epochs import WeightsDigest
from omni_connector.identity.loaded_weights import (
    TensorDigest,
    UnreadableWeightsError,
    digest_in_pieces,
)
from omni_connector.plugin import require_supported_vllm
from omni_connector.vllm_v1.layer_weights import weights_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase


# Of this process: with expert load balancing its experts lie as they do nowhere else.
_PLACEMENT: Final = os.urandom(8).hex()


class WeightsMemory:
    """The memory that the weights of a worker lie in, which may be taken away while they sleep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asleep = False

    @contextmanager
    def present(self) -> Iterator[None]:
        """The memory stays as it is while this is entered.

        Raises:
            UnreadableWeightsError: the weights sleep.
        """
        with self._lock:
            if self._asleep:
                raise UnreadableWeightsError("the weights sleep")
            yield

    def falls_asleep(self) -> None:
        """The weights go, as soon as nobody reads them."""
        with self._lock:  # vLLM waits for all work of the device before it goes on
            self._asleep = True

    def woke_up(self) -> None:
        """The weights are back."""
        self._asleep = False


_workers: Final["weakref.WeakKeyDictionary[WorkerBase, WeightsMemory]"] = (
    weakref.WeakKeyDictionary()
)


def know(worker: "WorkerBase") -> WeightsMemory:
    """Know a worker that vLLM has made; returns the memory of its weights."""
    return _workers.setdefault(worker, WeightsMemory())


def worker_of(vllm_config: "VllmConfig") -> "WorkerBase":
    """The worker of this process that has a configuration.

    Raises:
        UnreadableWeightsError: it is not known.
    """
    for worker in list(_workers):
        # MultiConnector gives its children copies of the configuration, of the same parts.
        if worker.vllm_config.parallel_config is vllm_config.parallel_config:
            return worker
    raise UnreadableWeightsError(
        "the plugin of omni-connector was not loaded before the model (is VLLM_PLUGINS set?)"
    )


def loaded_digest(vllm_config: "VllmConfig") -> Generator[None, None, WeightsDigest]:
    """Make the digest of the weights in a worker, those of a drafter included; see
    `digest_in_pieces`. Call this on the engine's thread: what it has put on the device until now is
    done before the weights are read.

    Raises:
        UnreadableWeightsError: some weights cannot be read.
    """
    worker = worker_of(vllm_config)
    models = _models_of(worker)
    weights: dict[str, torch.Tensor | TensorDigest] = {}
    for prefix, model in models.items():
        weights |= {prefix + name: value for name, value in weights_of(model).items()}
    stream = _stream_beside(weights.values())
    reading = digest_in_pieces(
        weights,
        [*_processing(vllm_config), *_processed(models.values())],
        *([] if stream is None else [stream.active]),
    )
    return _while_present(_workers[worker], reading)


def head_copies(vllm_config: "VllmConfig") -> dict[str, int]:
    """By name of an attention layer, how many consecutive ranks hold the same KV head: those of the
    projection beside it. Layers without such a projection are left out, and all layers where the
    model is not known.

    The model's configuration does not say it: layers of sliding windows, or of a drafter, may have
    other numbers of heads.
    """
    try:
        models = _models_of(worker_of(vllm_config))
    except (UnreadableWeightsError, NotImplementedError):
        return {}
    layers = vllm_config.compilation_config.static_forward_context
    names = {id(layer): name for name, layer in layers.items()}
    found: dict[str, int] = {}
    for model in models.values():
        for module in model.modules():
            children = list(module.children())
            projections = (getattr(each, "base_layer", each) for each in children)  # LoRA wraps it
            told = (getattr(each, "num_kv_head_replicas", None) for each in projections)
            copies: set[int] = {each for each in told if each is not None}
            if len(copies) == 1:
                number = copies.pop()
                found |= {names[id(each)]: number for each in children if id(each) in names}
    return found


def _models_of(worker: "WorkerBase") -> dict[str, torch.nn.Module]:
    """The model of a worker, and that of its drafter, by the beginning of their weights' names."""
    models: dict[str, torch.nn.Module] = {"": worker.get_model()}
    for name in ("drafter", "speculator"):
        draft = getattr(getattr(worker.model_runner, name, None), "model", None)
        if isinstance(draft, torch.nn.Module):
            models["draft."] = draft
    return models


def _while_present(
    memory: WeightsMemory, reading: Generator[None, None, WeightsDigest]
) -> Generator[None, None, WeightsDigest]:
    while True:
        with memory.present():
            try:
                next(reading)
            except StopIteration as end:
                digest: WeightsDigest = end.value
                return digest
        yield


def _stream_beside(weights: Iterable[torch.Tensor | TensorDigest]) -> CudaStream | None:
    """A stream on which weights are read when the engine's work of now is done; None on a CPU."""
    for each in weights:
        if isinstance(each, torch.Tensor) and each.device.type == "cuda":
            stream = CudaStream(each.device)
            stream.wait(stream.fence())
            return stream
    return None


def _processing(vllm_config: "VllmConfig") -> list[str]:
    """What decides how vLLM lays weights out in memory."""
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    said = [
        require_supported_vllm().version,
        current_platform.device_name,
        str(current_platform.get_device_capability()),
        torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else "",
    ]
    if parallel.enable_expert_parallel and parallel.data_parallel_size > 1:
        said.append(f"experts of {parallel.data_parallel_rank} in {parallel.data_parallel_size}")
    if parallel.enable_eplb:
        said.append(_PLACEMENT)
    return said


def _processed(models: Iterable[torch.nn.Module]) -> list[str]:
    """How the weights of each layer were processed after they were loaded."""
    found: set[str] = set()
    for model in models:
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            around = "base_layer" in module._modules  # of LoRA, which has that of its layer
            if method is not None and not around:
                chosen = {
                    name: str(value)
                    for name, value in vars(method).items()
                    if isinstance(value, enum.Enum | bool)
                }
                found.add(
                    f"{type(module).__name__} {type(method).__name__} {sorted(chosen.items())}"
                )
    return sorted(found)
