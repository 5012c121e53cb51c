# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine reads a prompt; another process denoises with attention to the engine's KV.

    python examples/ar_to_diffusion.py [--model FOLDER]

The first stage is a real engine in this process. When it has computed the prompt, the transfer
manager takes the prompt's KV from the engine's blocks and sends it. The second stage, a process of
its own with a small torch module, receives it and attends to it. At the end what it computed is
compared with the same module's output on the KV that transformers computes for the prompt, which
never saw vLLM or the connector. Without --model a small model is made first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from omni_connector import OmniKVCacheConfig, OmniKVTransferManager

REQUEST = "request/1"
TOKENS = 300
WIDTH, LATENTS = 64, 8


class Denoiser(nn.Module):
    """Latents that attend to keys and values of a prompt, layer after layer.

    Args:
        heads: KV heads of the prompt's model.
        dim: elements of a key.
        layers: layers of that model.
    """

    def __init__(self, heads: int, dim: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.heads, self.dim = heads, dim
        self.latents = nn.Parameter(torch.randn(LATENTS, WIDTH))
        self.queries = nn.ModuleList(nn.Linear(WIDTH, heads * dim) for _ in range(layers))
        self.outputs = nn.ModuleList(nn.Linear(heads * dim, WIDTH) for _ in range(layers))

    @torch.no_grad()
    def forward(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
        """Latents (LATENTS, WIDTH) from a key and a value (tokens, heads, dim) a layer."""
        state = self.latents
        for query, output, key, value in zip(self.queries, self.outputs, keys, values, strict=True):
            attended = functional.scaled_dot_product_attention(
                query(state).view(LATENTS, self.heads, self.dim).transpose(0, 1),
                key.float().transpose(0, 1),
                value.float().transpose(0, 1),
            )
            state = state + output(attended.transpose(0, 1).reshape(LATENTS, -1))
        return state


def manager(**role: Any) -> OmniKVTransferManager:
    """A manager between stage 0 and stage 1, over shared memory."""
    return OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config={"type": "SharedMemoryConnector"},
            from_stage="0",
            to_stage="1",
            stage_id=1,
            **role,
        )
    )


def autoregressive_stage(model: Path, prompt: list[int], peer: subprocess.Popen[str]) -> str:
    """Compute the prompt with a vLLM engine, send its KV; what the second stage then says."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's cache, in this process
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
    )
    engine = llm.llm_engine
    core: Any = engine.engine_core.engine_core
    engine.add_request(
        REQUEST, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8, ignore_eos=True)
    )
    engine.step()  # the prompt is computed now, and its blocks are still the request's
    [request] = core.scheduler.running
    runner = core.model_executor.driver_worker.worker.model_runner
    [blocks] = core.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    layers = [layer.attn for layer in attention_layers(runner.model)]
    with manager(need_send_cache=True, **cache_layout(layers[0])) as kv:
        kv.handle_finished_requests_kv_transfer(
            {REQUEST: {"block_ids": blocks, "seq_len": len(prompt)}},
            [layer.kv_cache for layer in layers],
            block_size=core.scheduler.block_size,
            cache_dtype="float32",
        )
        assert not kv.last_failures, kv.last_failures
        said, _ = peer.communicate(timeout=120)  # the KV stays until this manager is closed
    return said


def attention_layers(model: nn.Module) -> list[Any]:
    """The attention modules of a decoder, in the order of its layers."""
    return [layer.self_attn for layer in model.model.layers]


def cache_layout(layer: Any) -> dict[str, Any]:
    """How the engine's attention stores keys and values; CPUs have ways of their own."""
    if layer.kv_cache.device.type != "cpu":
        return {}
    isa = "amx" if layer.isa == "amx" else "vec"
    return {"cpu_engine": True, "kv_layout": f"cpu_{isa}"}


def diffusion_stage() -> None:
    """Receive the KV and attend to it: JSON to the standard output."""
    request = SimpleNamespace(request_id=REQUEST, sampling_params=SimpleNamespace())
    with manager(need_recv_cache=True, recv_timeout=180.0) as kv:
        if not kv.receive_kv_cache(request):
            raise SystemExit("no KV has come")
    past = request.past_key_values
    _, heads, dim = past.key_cache[0].shape
    latents = Denoiser(heads, dim, len(past.key_cache))(past.key_cache, past.value_cache)
    print(json.dumps({"tokens": request.kv_metadata["seq_len"], "latents": latents.tolist()}))


def independent(model: Path, prompt: list[int]) -> torch.Tensor:
    """The latents with the KV that transformers computes."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        past = reference(torch.tensor([prompt]), use_cache=True).past_key_values
    # (1, heads, tokens, dim) a layer
    keys = [layer.keys[0].transpose(0, 1) for layer in past.layers]
    values = [layer.values[0].transpose(0, 1) for layer in past.layers]
    _, heads, dim = keys[0].shape
    return Denoiser(heads, dim, len(keys))(keys, values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        diffusion_stage()
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            from omni_connector.testing.models import make_model

            model = make_model("llama", Path(folder) / "llama")
        torch.manual_seed(1)
        prompt = torch.randint(3, 500, (TOKENS,)).tolist()
        peer = subprocess.Popen(
            [sys.executable, __file__, "--receive"], stdout=subprocess.PIPE, text=True
        )
        try:
            said = json.loads(autoregressive_stage(model, prompt, peer))
        finally:
            peer.kill()
            peer.wait()
        expected = independent(model, prompt)
    latents = torch.tensor(said["latents"])
    off = (latents - expected).abs().max().item() / expected.abs().max().item()
    print(f"{said['tokens']} tokens of KV received; latents differ by {off:.1e} of their size")
    if said["tokens"] != TOKENS or not off < 1e-4:
        raise SystemExit("the second stage did not attend to the prompt's KV")


if __name__ == "__main__":
    main()
