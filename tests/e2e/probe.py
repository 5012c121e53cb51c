# SPDX-License-Identifier: Apache-2.0
"""Looks into, and spoils, the KV cache of a running engine: `--worker-extension-cls`.

What a request's blocks hold is read through the views that vLLM's own layers use, so that a
wrong idea of the layout in the connector cannot hide in the test.
"""

import math
from pathlib import Path
from typing import Any

import torch

EXTENSION = "tests.e2e.probe.KVProbe"
SPOILED = 3.0
NOISE = 1_000_003
"""How many numbers are drawn; a prime, so that repeated they are others in every block."""
KEPT = 16


class KVProbe:
    """Methods that vLLM adds to its worker class; called by `/collective_rpc`."""

    model_runner: Any
    rank: int

    _probe_loss = "nothing"

    def probe_watch(self) -> list[dict[str, Any]]:
        """Follow the block tables of requests from now on; describe the cache groups.

        What a request's blocks hold is kept as it is `first` scheduled, after a hand-off that is
        what was loaded, and once its prompt is `prefilled`.
        """
        runner = self.model_runner
        if not hasattr(self, "_probe_seen"):
            self._probe_seen: dict[str, dict[str, Any]] = {}
            execute = runner.execute_model

            def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                self._probe_follow(scheduler_output)
                result = execute(scheduler_output, *args, **kwargs)
                self._probe_end(scheduler_output)
                return result

            runner.execute_model = watched
        return [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "layers": {name: self._probe_shapes(name) for name in group.layer_names},
            }
            for group in runner.kv_cache_config.kv_cache_groups
        ]

    def probe_spoil(self) -> None:
        """Fill the whole KV cache with numbers that belong to nobody."""
        draw = torch.Generator().manual_seed(self.rank)
        # Halves of float32 are finite in bfloat16 only if they were drawn as such, and groups of
        # several types may share these bytes.
        noise = torch.empty(NOISE, dtype=torch.bfloat16).normal_(0.0, SPOILED, generator=draw)
        drawn = 0
        spoiled = set()
        for layers in self._probe_layers().values():
            for tensor in layers:
                view = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
                if view in spoiled:  # a layer of another group has it, too
                    continue
                spoiled.add(view)
                *rows, width = tensor.shape
                shape = (*rows, width * tensor.itemsize // 2)
                count = math.prod(shape)
                more = noise.roll(-drawn).repeat(-(-count // NOISE))[:count]
                tensor.copy_(more.view(shape).view(tensor.dtype))
                drawn = (drawn + count) % NOISE

    def probe_loses(self, what: str) -> None:
        """From now on, of what requests have loaded: `nothing`, or `everything`."""
        self._probe_loss = what

    def probe_save(self, folder: str, most: str) -> None:
        """Write what was kept of so many of the latest requests."""
        latest = list(self._probe_seen.values())[-int(most) :]
        torch.save(latest, Path(folder) / f"{self.rank}.pt")

    def _probe_follow(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            table = [list(ids) for ids in new.block_ids]
            if self._probe_loss != "nothing" and new.num_computed_tokens:
                self._probe_lose(table)
            self._probe_seen[new.req_id] = {
                "prompt": list(new.prompt_token_ids or ()),  # none of one given as embeddings
                "computed": new.num_computed_tokens,
                "table": table,
                "first": self._probe_read(table),
                "prefilled": None,
            }
            if len(self._probe_seen) > KEPT:
                del self._probe_seen[next(iter(self._probe_seen))]
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids is None or request_id not in self._probe_seen:
                continue
            table = self._probe_seen[request_id]["table"]
            for group, ids in enumerate(new_ids):
                resumed = request_id in cached.resumed_req_ids
                table[group] = list(ids) if resumed else table[group] + list(ids)

    def _probe_end(self, scheduler_output: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self._probe_seen.get(request_id)
            if request is not None and request["prefilled"] is None:
                before = computed.get(request_id, request["computed"])
                if before + scheduled >= len(request["prompt"]):
                    request["prefilled"] = self._probe_read(request["table"])

    def _probe_lose(self, table: list[list[int]]) -> None:
        """Fill the blocks of one request with noise, in the layers that lose it."""
        config, layers = self.model_runner.kv_cache_config, self._probe_layers()
        draw = torch.Generator().manual_seed(7)
        for group, ids in zip(config.kv_cache_groups, table, strict=True):
            held = torch.tensor([block for block in ids if block], dtype=torch.long)
            for name in filter(self._probe_is_lost, group.layer_names):
                for tensor in layers[name]:
                    parts = tensor.shape[0] // config.num_blocks
                    rows = (held[:, None] * parts + torch.arange(parts)).flatten()
                    noise = torch.empty(tensor[rows].shape).normal_(0.0, SPOILED, generator=draw)
                    tensor[rows] = noise.to(tensor.dtype)

    def _probe_is_lost(self, layer: str) -> bool:
        return True

    def _probe_layer(self, name: str) -> Any:
        return self.model_runner.compilation_config.static_forward_context[name]

    def _probe_layers(self) -> dict[str, list[torch.Tensor]]:
        layers = {}
        for group in self.model_runner.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                cache = self._probe_layer(name).kv_cache
                layers[name] = [cache] if isinstance(cache, torch.Tensor) else list(cache)
        return layers

    def _probe_shapes(self, name: str) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self._probe_layers()[name]]

    def _probe_read(self, table: list[list[int]]) -> list[dict[str, Any]]:
        """Read the blocks of one request: by group, the places in the prompt and the tensors."""
        config = self.model_runner.kv_cache_config
        layers = self._probe_layers()
        groups = []
        for group, ids in zip(config.kv_cache_groups, table, strict=True):
            held = [(place, block) for place, block in enumerate(ids) if block]
            block_ids = torch.tensor([block for _, block in held], dtype=torch.long)
            contents = {}
            for name in group.layer_names:
                tensors = []
                for tensor in layers[name]:
                    # The kernel may see each block as several smaller ones.
                    parts = tensor.shape[0] // config.num_blocks
                    rows = (block_ids[:, None] * parts + torch.arange(parts)).flatten()
                    found = tensor[rows]
                    isa = getattr(self._probe_layer(name), "isa", None)
                    if isa is not None and tensor.ndim == 4:
                        found = unpacked(found, isa)
                    tensors.append(found.unflatten(0, (len(held), parts)))
                contents[name] = tensors
            groups.append({"places": [place for place, _ in held], "layers": contents})
        return groups


def unpacked(blocks: torch.Tensor, isa: str) -> torch.Tensor:
    """Blocks x heads x tokens x (K, V), from how vLLM's CPU attention kernels keep them.

    Per block and head these keep all K and then all V, and at least one of the two across the
    tokens of the block, so that the rows of the view `[B, H, N, C]` are no tokens.

    Raises:
        ValueError: a kernel of another machine.
    """
    count, heads, tokens, width = blocks.shape
    size = width // 2
    keys, values = blocks.reshape(count, heads, 2, tokens * size).unbind(2)
    pack = 4 // blocks.itemsize
    if isa in ("vec", "vec16"):
        keys = keys.unflatten(-1, (size, tokens)).transpose(-1, -2)
        values = values.unflatten(-1, (tokens, size))
    elif isa == "amx":
        keys = keys.unflatten(-1, (tokens // 16, size // pack, 16, pack))
        keys = keys.permute(0, 1, 2, 4, 3, 5).reshape(count, heads, tokens, size)
        values = values.unflatten(-1, (size // 16, tokens // pack, 16, pack))
        values = values.permute(0, 1, 3, 5, 2, 4).reshape(count, heads, tokens, size)
    else:
        raise ValueError(f"how the {isa} kernels keep K and V is not known here")
    return torch.cat((keys, values), dim=-1)
