# SPDX-License-Identifier: Apache-2.0
"""Spoils what a request has loaded, of the drafter or of all layers: `--worker-extension-cls`."""

from typing import Any

import torch

from .probe import SPOILED, KVProbe

EXTENSION = "tests.e2e.draft_probe.DraftProbe"


class DraftProbe(KVProbe):
    """Methods that vLLM adds to its worker class; called by `/collective_rpc`."""

    _loses = "nothing"

    def probe_watch(self) -> list[dict[str, Any]]:
        # The drafter computes its layers after the forward pass, when tokens are sampled.
        if not hasattr(self, "_draft_steps"):
            self._draft_steps: list[Any] = []
            sample = self.model_runner.sample_tokens

            def watched(*args: Any, **kwargs: Any) -> Any:
                result = sample(*args, **kwargs)
                while self._draft_steps:
                    KVProbe._probe_end(self, self._draft_steps.pop(0))
                return result

            self.model_runner.sample_tokens = watched
        return KVProbe.probe_watch(self)

    def _probe_end(self, scheduler_output: Any) -> None:
        if scheduler_output.total_num_scheduled_tokens:
            self._draft_steps.append(scheduler_output)

    def draft_loses(self, what: str) -> None:
        """From now on, of what requests have loaded: `nothing`, `drafter`, or `everything`."""
        self._loses = what

    def draft_layers(self) -> list[str]:
        """The layers of the drafter."""
        return sorted(self.model_runner.drafter._draft_attn_layer_names)

    def _probe_follow(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            if self._loses != "nothing" and new.num_computed_tokens:
                self._spoil(list(new.block_ids))
        KVProbe._probe_follow(self, scheduler_output)

    def _spoil(self, table: list[list[int]]) -> None:
        config, layers = self.model_runner.kv_cache_config, self._probe_layers()
        drafter = self.draft_layers() if self._loses == "drafter" else []
        draw = torch.Generator().manual_seed(7)
        for group, ids in zip(config.kv_cache_groups, table, strict=True):
            held = torch.tensor([block for block in ids if block], dtype=torch.long)
            for name in group.layer_names:
                if self._loses == "drafter" and name not in drafter:
                    continue
                for tensor in layers[name]:
                    parts = tensor.shape[0] // config.num_blocks
                    rows = (held[:, None] * parts + torch.arange(parts)).flatten()
                    noise = torch.empty(tensor[rows].shape).normal_(0.0, SPOILED, generator=draw)
                    tensor[rows] = noise.to(tensor.dtype)
