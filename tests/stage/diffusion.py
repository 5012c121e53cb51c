# SPDX-License-Identifier: Apache-2.0
"""A stage that denoises with cross-attention to the KV of the stage before, in its own process.

Arguments: request id, and a file with that stage's keys and values. Prints what it computes with
the KV it receives, and with that of the file.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .shared import shared_manager

HEADS, DIM = 4, 32


class Denoiser(nn.Module):
    """Latents that attend, layer after layer, to the keys and values of a prompt.

    Args:
        layers: how many.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        width = HEADS * DIM
        self.queries = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.latents = nn.Parameter(torch.randn(5, width))

    @torch.no_grad()
    def forward(self, past_key_values) -> torch.Tensor:
        """Latents (5, width) from keys and values (tokens, KV heads, dim), a pair a layer."""
        state = self.latents
        for layer, (query, output) in enumerate(zip(self.queries, self.outputs, strict=True)):
            key, value = (
                cache[layer].float().transpose(0, 1)
                for cache in (past_key_values.key_cache, past_key_values.value_cache)
            )
            group = HEADS // key.shape[0]
            attended = functional.scaled_dot_product_attention(
                query(state).view(-1, HEADS, DIM).transpose(0, 1),
                key.repeat_interleave(group, 0),
                value.repeat_interleave(group, 0),
            )
            state = state + output(attended.transpose(0, 1).reshape(state.shape))
        return state


def main(request_id: str, file: str) -> None:
    torch.set_num_threads(1)
    req = SimpleNamespace(request_id=request_id, sampling_params=SimpleNamespace())
    with shared_manager(need_send_cache=False) as kv:
        print(json.dumps("ready"), flush=True)
        received = kv.receive_kv_cache(req)
    itself = np.load(file)
    names = ("key_cache", "value_cache")
    own = SimpleNamespace(**{name: [torch.from_numpy(a) for a in itself[name]] for name in names})
    denoise = Denoiser(len(own.key_cache))
    said = {"received": received, "itself": denoise(own).tolist()}
    if received:
        said["seq_len"] = req.kv_metadata["seq_len"]
        said["dtype"] = str(req.past_key_values.key_cache[0].dtype)
        said["output"] = denoise(req.past_key_values).tolist()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
