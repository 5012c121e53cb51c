# SPDX-License-Identifier: Apache-2.0
"""Looks into, and spoils, the KV cache of a running engine: `--worker-extension-cls`.

What a request's blocks hold is read through the views that vLLM's own layers use, so that a
wrong idea of the layout in the connector cannot hide in the test.
"""

from pathlib import Path
from typing import Any

import torch

EXTENSION = "tests.e2e.probe.KVProbe"
SPOILED = 3.0


class KVProbe:
    """Methods that vLLM adds to its worker class; called by `/collective_rpc`."""

    model_runner: Any
    rank: int

    def probe_watch(self) -> list[dict[str, Any]]:
        """Follow the block tables of requests from now on; describe the cache groups.

        As a request is first scheduled, what its blocks then hold is kept: after a hand-off
        that is what was loaded, before the engine has computed anything.
        """
        runner = self.model_runner
        if not hasattr(self, "_probe_tables"):
            self._probe_tables: dict[str, list[list[int]]] = {}
            self._probe_first: dict[str, Any] = {}
            execute = runner.execute_model

            def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
                self._probe_follow(scheduler_output)
                return execute(scheduler_output, *args, **kwargs)

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
        for layers in self._probe_layers().values():
            for tensor in layers:
                # Halves of float32 are finite in bfloat16 only if they were drawn as such, and
                # groups of several types may share these bytes.
                *rows, width = tensor.shape
                noise = torch.empty((*rows, width * tensor.itemsize // 2), dtype=torch.bfloat16)
                noise.normal_(0.0, SPOILED, generator=draw)
                tensor.copy_(noise.view(tensor.dtype))

    def probe_save(self, folder: str) -> None:
        """Write what the latest request's blocks held at its first step, and hold now."""
        last = next(reversed(self._probe_tables), None)
        now = self._probe_read(self._probe_tables[last]) if last is not None else None
        torch.save({"first": self._probe_first, "now": now}, Path(folder) / f"{self.rank}.pt")

    def _probe_follow(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self._probe_tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self._probe_first = self._probe_read(self._probe_tables[new.req_id])
            self._probe_first["computed"] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids is None or request_id not in self._probe_tables:
                continue
            table = self._probe_tables[request_id]
            for group, ids in enumerate(new_ids):
                resumed = request_id in cached.resumed_req_ids
                table[group] = list(ids) if resumed else table[group] + list(ids)

    def _probe_layers(self) -> dict[str, list[torch.Tensor]]:
        context = self.model_runner.compilation_config.static_forward_context
        layers = {}
        for group in self.model_runner.kv_cache_config.kv_cache_groups:
            for name in group.layer_names:
                cache = context[name].kv_cache
                layers[name] = [cache] if isinstance(cache, torch.Tensor) else list(cache)
        return layers

    def _probe_shapes(self, name: str) -> list[list[int]]:
        return [list(tensor.shape) for tensor in self._probe_layers()[name]]

    def _probe_read(self, table: list[list[int]]) -> dict[str, Any]:
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
                    tensors.append(tensor[rows].unflatten(0, (len(held), parts)))
                contents[name] = tensors
            groups.append({"places": [place for place, _ in held], "layers": contents})
        return {"groups": groups}
