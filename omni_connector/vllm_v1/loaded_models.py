# SPDX-License-Identifier: Apache-2.0
"""The models that vLLM's workers have loaded, which vLLM shows to no connector.

A part of `compat`, in a module of its own because the plugin loads it in each worker before
anything else. `watch_workers` wraps two methods of vLLM:

- `WorkerBase.__init__`, to know the worker of each configuration. A worker has `get_model`, and it
  has it whatever has loaded the model, or loads another one later.
- on CPUs `UnquantizedLinearMethod.process_weights_after_loading`: vLLM packs linear weights there
  for its kernels, where Python cannot read them, and removes them from the model. So they are
  hashed just before that, with each load and each reload.

Where this module was not loaded before the model (`VLLM_PLUGINS` without this plugin, a connector
that is found by `kv_connector_module_path`), or where the worker has no model, that is said by
`UnreadableWeightsError`.
"""

import functools
import sys
import weakref
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from omni_connector.copy.loaded_weights import (
    TensorDigest,
    UnreadableWeightsError,
    digest_in_pieces,
    digest_of_tensor,
)
from omni_connector.identity.epochs import WeightsDigest
from omni_connector.plugin import WORKERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of a module: the digest of the weight that it had before vLLM packed it.
_PACKED: Final = "_omni_connector_packed_weight"
# Of a function: it is wrapped already.
_WRAPPED: Final = "_omni_connector_wrapped"

_workers: Final["weakref.WeakSet[Any]"] = weakref.WeakSet()


def watch_workers() -> None:
    """From now on know the workers that vLLM makes in this process. Idempotent, and cheap where
    this process makes none: it imports nothing of vLLM."""
    module = sys.modules.get(WORKERS)
    worker_class = getattr(module, "WorkerBase", None)
    if worker_class is None or hasattr(worker_class.__init__, _WRAPPED):
        return
    made = worker_class.__init__

    @functools.wraps(made)
    def watched(worker: Any, *args: Any, **options: Any) -> None:
        made(worker, *args, **options)
        _workers.add(worker)
        _keep_digests_of_packed_weights()

    setattr(watched, _WRAPPED, True)
    worker_class.__init__ = watched


def _keep_digests_of_packed_weights() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    unquantized: Any = UnquantizedLinearMethod
    process = unquantized.process_weights_after_loading
    if hasattr(process, _WRAPPED):
        return

    @functools.wraps(process)
    def hashed(method: Any, layer: Any) -> Any:
        layer.__dict__.pop(_PACKED, None)
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and not weight.is_meta and weight.numel():
            layer.__dict__[_PACKED] = digest_of_tensor("weight", weight)
        return process(method, layer)

    setattr(hashed, _WRAPPED, True)
    unquantized.process_weights_after_loading = hashed


def worker_of(vllm_config: "VllmConfig") -> Any:
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
    `digest_in_pieces`.

    Raises:
        UnreadableWeightsError: some weights cannot be read.
    """
    worker = worker_of(vllm_config)
    models = {"": worker.get_model()}
    runner = worker.model_runner
    for name in ("drafter", "speculator"):
        draft = getattr(getattr(runner, name, None), "model", None)
        if isinstance(draft, torch.nn.Module):
            models["draft."] = draft
    weights: dict[str, torch.Tensor | TensorDigest] = {}
    for prefix, model in models.items():
        weights |= {prefix + name: value for name, value in weights_of(model).items()}
    return digest_in_pieces(weights)


def weights_of(model: torch.nn.Module) -> Mapping[str, torch.Tensor | TensorDigest]:
    """The tensors of a model that weights are loaded into, by name: parameters, and buffers that
    belong to its state. A cache of rotary embeddings, which settings size, does not.

    Raises:
        UnreadableWeightsError: vLLM has packed some weights in a way that hides them.
    """
    found: dict[str, torch.Tensor | TensorDigest] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        tensors: dict[str, torch.Tensor | None] = dict(module._parameters)
        for name, buffer in module._buffers.items():
            if name not in module._non_persistent_buffers_set:
                tensors[name] = buffer
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            whole = f"{prefix}.{name}" if prefix else name
            found[whole] = tensor
            if tensor.numel() == 0 and tensor.device.type == "cpu":
                packed = module.__dict__.get(_PACKED) if name == "weight" else None
                if packed is None:
                    raise UnreadableWeightsError(f"vLLM has packed {whole} for this CPU")
                found[whole] = packed
    return found
