# SPDX-License-Identifier: Apache-2.0
"""The two stages of `test_two_stages.py`: a vLLM engine that writes KV, and one of four ranks that
denoise with it (two branches of guidance, two tensor-parallel ranks each).

Arguments: which stage, the folder in which its orders appear, and its setting in JSON. Both use the
methods of `OmniKVTransferManager` and nothing else of the package.
"""

import datetime
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from omni_connector.stage import OmniKVCacheConfig, OmniKVTransferManager

GUIDANCE = 4.0
BRANCH = "cfg_text"


def example() -> Any:
    """The example's module: its engine's layers and its denoiser are used here, too."""
    path = Path(__file__).parents[2] / "examples" / "ar_to_diffusion.py"
    spec = importlib.util.spec_from_file_location("ar_to_diffusion", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def orders(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each order as it appears, and where its answer goes; without end."""
    number = 0
    while True:
        order = folder / f"{number}.order"
        while not order.exists():
            time.sleep(0.02)
        yield folder / f"{number}.said", json.loads(order.read_text())
        number += 1


def say(path: Path, answer: object) -> None:
    """Answer an order."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(answer))
    new.rename(path)


def manager(connector: dict[str, Any], **config: Any) -> OmniKVTransferManager:
    """A manager of the edge from stage 0 to stage 1, one rank there and two here."""
    edge: dict[str, Any] = {"from_stage": "0", "to_stage": "1", "from_tp": 1, "to_tp": 2}
    return OmniKVTransferManager(
        OmniKVCacheConfig(connector_config=connector, num_kv_heads=2, **edge, **config),
    )


def autoregressive_stage(folder: Path, setting: dict[str, Any]) -> None:
    """Compute two prompts with a vLLM engine, and send their KV as often as is asked for."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's cache, in this process
    from vllm import LLM, SamplingParams

    helper = example()
    llm = LLM(
        setting["model"],
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        max_num_batched_tokens=2048,
    )
    engine = llm.llm_engine
    core: Any = engine.engine_core.engine_core
    for name, prompt in setting["prompts"].items():
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
    engine.step()  # the prompts are computed now, and their blocks are still the requests'
    blocks = {}
    for request in core.scheduler.running:
        [blocks[request.request_id.rsplit("-", 1)[0]]] = (
            core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        )
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = [layer.attn for layer in helper.attention_layers(runner.model)]
    caches = [layer.kv_cache for layer in layers]
    senders = {
        name: manager(
            given, need_send_cache=True, tp_rank=0, tp_size=1, **helper.cache_layout(layers[0])
        )
        for name, given in setting["senders"].items()
    }
    for said, order in orders(folder):
        sender = senders[order["by"]]
        finished = {
            request: {"block_ids": blocks[prompt], "seq_len": len(setting["prompts"][prompt])}
            for request, prompt in order["send"].items()
        }
        ids = sender.handle_finished_requests_kv_transfer(
            finished, caches, core.scheduler.block_size, "float32"
        )
        say(said, {"ids": sorted(ids), "failures": sender.last_failures})
        for request in order.get("cleanup", ()):
            sender.cleanup(request)


def rank_stage(folder: Path, setting: dict[str, Any]) -> None:
    """Receive requests as one rank of four, and denoise with what came."""
    rank = setting["rank"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{setting['meeting']}",
        rank=rank,
        world_size=4,
        timeout=datetime.timedelta(seconds=120),
    )
    # Ranks (0, 1) and (2, 3) are tensor-parallel; (0, 2) and (1, 3) share the branches.
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    cfg = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    _have_groups(world=dist.group.WORLD, cfg=cfg, tp=tp)
    receivers: dict[str, OmniKVTransferManager] = {}
    for said, order in orders(folder):
        by = order["by"]
        if by not in receivers:
            receivers[by] = manager(
                setting["receivers"][by],
                stage_id=1,
                tp_rank=rank % 2,
                tp_size=2,
                need_recv_cache=True,
            )
        receiver = receivers[by]
        receiver.config.recv_timeout = order["timeout"]
        request = SimpleNamespace(
            request_id=order["request"],
            sampling_params=SimpleNamespace(cfg_kv_request_ids={BRANCH: order["companion"]}),
        )
        if order.get("sender"):
            request.kv_sender_info = order["sender"]
        time.sleep(order.get("late", {}).get(str(rank), 0.0))
        begun = time.monotonic()
        came = receiver.receive_multi_kv_cache_distributed(request, collect)
        took = time.monotonic() - begun
        answer: dict[str, Any] = {
            "came": came,
            "took": took,
            "held": sorted(vars(request.sampling_params)),
        }
        if came:
            answer["latents"] = denoise(request, rank, tp, cfg).tolist()
        say(said, answer)


def _have_groups(**groups: Any) -> None:
    """Let the manager find these as vLLM-Omni's and vLLM's."""
    state = ModuleType("vllm_omni.diffusion.distributed.parallel_state")
    sys.modules["vllm.distributed.parallel_state"] = sys.modules[state.__name__] = state
    for name, group in groups.items():
        setattr(state, f"get_{name}_group", lambda group=group: SimpleNamespace(cpu_group=group))


def collect(
    request_id: str, companions: dict[str, str], receiver: OmniKVTransferManager, device: Any
) -> dict[str, Any]:
    """The KV of the prompt that guidance leads away from."""
    found, _ = receiver.receive_kv_cache_for_request(companions[BRANCH], device)
    if found is None:
        return {}
    return {f"{BRANCH}_past_key_values": SimpleNamespace(**found["layer_blocks"])}


def denoise(request: SimpleNamespace, rank: int, tp: Any, cfg: Any) -> torch.Tensor:
    """Latents of the guided model: each rank computes its heads of its branch."""
    params = request.sampling_params
    own = request.past_key_values if rank < 2 else params.cfg_text_past_key_values
    keys, values = own.key_cache, own.value_cache
    assert keys[0].shape[1] == 1, f"KV of {keys[0].shape} on one of two ranks"

    def gather(partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, group=tp)
        return partial

    branch = latents_of(keys, values, 2, rank % 2, gather)
    both = [torch.empty_like(branch) for _ in range(2)]
    dist.all_gather(both, branch, group=cfg)
    return guided(*both)


def guided(with_prompt: torch.Tensor, without: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance."""
    return without + GUIDANCE * (with_prompt - without)


def latents_of(
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    heads: int,
    first: int,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What the example's denoiser computes, by heads: a part on each tensor-parallel rank.

    Args:
        keys, values: of this rank's heads, (tokens, heads of this rank, dim) a layer.
        heads: of all ranks.
        first: the first head of this rank.
        gather: adds up what the ranks have computed, in place.
    """
    helper = example()
    _, mine, dim = keys[0].shape
    model = helper.Denoiser(heads, dim, len(keys))
    own = slice(first * dim, (first + mine) * dim)
    state = model.latents.detach()
    with torch.no_grad():
        for query, output, key, value in zip(
            model.queries, model.outputs, keys, values, strict=True
        ):
            attended = functional.scaled_dot_product_attention(
                query(state)[:, own].reshape(-1, mine, dim).transpose(0, 1),
                key.float().transpose(0, 1),
                value.float().transpose(0, 1),
            )
            part = attended.transpose(0, 1).reshape(len(state), -1) @ output.weight[:, own].T
            state = state + gather(part) + output.bias
    return state


if __name__ == "__main__":
    stages = {"autoregressive": autoregressive_stage, "rank": rank_stage}
    stages[sys.argv[1]](Path(sys.argv[2]), json.loads(sys.argv[3]))
