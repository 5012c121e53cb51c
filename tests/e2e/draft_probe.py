# SPDX-License-Identifier: Apache-2.0
"""Looks into an engine that drafts, and spoils its drafter's KV: `--worker-extension-cls`."""

from typing import Any

from .probe import KVProbe

EXTENSION = "tests.e2e.draft_probe.DraftProbe"


class DraftProbe(KVProbe):
    """Methods that vLLM adds to its worker class; called by `/collective_rpc`.

    What requests have loaded of the `drafter` alone can be lost, too.
    """

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

    def draft_layers(self) -> list[str]:
        """The layers of the drafter."""
        return sorted(self.model_runner.drafter._draft_attn_layer_names)

    def _probe_is_lost(self, layer: str) -> bool:
        return self._probe_loss == "everything" or layer in self.draft_layers()
