# SPDX-License-Identifier: Apache-2.0
"""Loads small models of several families with vLLM's own loader, in a process of its own, and
prints what their digests tell of changes in their files: `test_loaded_models` reads it.

    python -m tests.vllm_v1.loaded_families FOLDER FAMILY...
"""

import gc
import json
import re
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from omni_connector.identity.epochs import WeightsDigest
from omni_connector.identity.loaded_weights import digest_of
from omni_connector.testing.models import make_model
from omni_connector.vllm_v1 import patches
from omni_connector.vllm_v1.layer_weights import weights_of

WEIGHTS = "model.safetensors"


def configured(path: Path) -> VllmConfig:
    return EngineArgs(
        model=str(path), enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 24
    ).create_engine_config()


def loaded(config: VllmConfig) -> torch.nn.Module:
    """The model as vLLM has it in memory."""
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def digest(config: VllmConfig) -> WeightsDigest:
    return digest_of(weights_of(loaded(config)))


def kinds(names: list[str]) -> dict[str, str]:
    """One name of each kind: those that differ in numbers of layers and experts are alike."""
    return {re.sub(r"\.\d+\.", ".N.", name): name for name in sorted(names, reverse=True)}


def told(path: Path, room: Path, looked_at: set[str]) -> dict[str, object]:
    """What the digests of one model tell.

    Args:
        looked_at: ends of names, of weights that other families have, too; they are left out.
    """
    shutil.copytree(path, room)
    config = configured(room)
    model = loaded(config)
    weights = weights_of(model)
    before = digest_of(weights)
    files = load_file(path / WEIGHTS)
    unseen = []
    names = kinds(list(files))
    if getattr(config.model_config.hf_config, "tie_word_embeddings", False):
        names.pop("lm_head.weight", None)  # vLLM does not load it
    ends = {".".join(name.split(".")[-2:]): name for name in names.values()}
    ends = {end: name for end, name in ends.items() if end not in looked_at}
    looked_at |= ends.keys()
    for name in ends.values():
        changed = files[name].clone()
        changed.view(-1)[-1] += 1.0
        save_file({**files, name: changed}, room / WEIGHTS, metadata={"format": "pt"})
        if digest(config) == before:
            unseen.append(name)
    save_file(files, room / WEIGHTS, metadata={"format": "pt"})
    hashed = set(weights)
    return {
        "the same again": digest(config) == before,
        "changed": len(ends),
        "unseen": unseen,
        "left out": sorted({name for name, _ in model.named_buffers()} - hashed),
        "hashed": sorted(hashed),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    patches.watch_packing()
    paths = {family: make_model(family, folder / family) for family in sys.argv[2:]}
    gc.freeze()  # vLLM collects garbage at each load: two thirds of the time, among all its modules
    # Of a model with experts, as vLLM then makes the groups of all.
    with set_current_vllm_config(configured(paths[sys.argv[2]])):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    looked_at: set[str] = set()
    found = {
        family: told(path, folder / f"{family}-changed", looked_at)
        for family, path in paths.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
