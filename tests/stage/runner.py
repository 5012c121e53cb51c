# SPDX-License-Identifier: Apache-2.0
"""Ranks of stages: vLLM-Omni's own model runners, groups of ranks, and Bagel's pipeline.

Bagel's own code chooses the KV of each branch, and vLLM-Omni's own guidance which rank computes
which branch. Only the transformer is stood in for: what it computes of a branch is the sum of its
KV.

Run as a module it loads the wheel once, and forks each `Rank` and `Sender` that it is asked for.
"""

import datetime
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ..patience import lengthen_objects
from .caches import cache_of, sequence
from .chunks import fork_stages
from .wheel import make_importable, make_loadable


class Rank:
    """One rank of the stage.

    Args:
        rank: its number.
        meeting: file at which the ranks meet.
        sizes: ranks that share branches, are tensor-parallel, and share a sequence; None for a
            world of two ranks that vLLM-Omni knows nothing of.
        whose: the manager that the runner has, "our" or "their".
        settings: `omni_kv_config`, besides what all have.
        companions: whether the model collects branches.
    """

    def __init__(
        self,
        rank: int,
        meeting: str,
        sizes: tuple[int, int, int] | None,
        whose: str,
        settings: dict[str, Any],
        companions: bool = True,
    ) -> None:
        from vllm_omni.diffusion.worker import diffusion_model_runner
        from vllm_omni.model_executor.stage_input_processors.bagel import collect_cfg_kv_caches
        from vllm_omni.platforms import current_omni_platform

        from omni_connector.stage import OmniKVTransferManager

        # What was sent is found at the first look, however busy the machine is.
        lengthen_objects(pytest.MonkeyPatch())
        if sizes is None:
            self._meet(rank, 2, meeting)
        else:
            self._group(rank, meeting, *sizes)
        connector = "OmniSharedMemoryConnector"
        if whose == "our":
            connector = "SharedMemoryConnector"
            diffusion_model_runner.OmniKVTransferManager = OmniKVTransferManager
        shared = {
            "connector_config": {"type": connector}, "omni_from_stage": "0", "stage_id": 1,
            "need_recv_cache": True, "recv_timeout": 30.0,
        }  # fmt: skip
        config = SimpleNamespace(
            omni_kv_config=shared | settings,
            stage_id=1,
            cfg_kv_collect_func=collect_cfg_kv_caches if companions else None,
            parallel_config=SimpleNamespace(use_hsdp=False),
            cache_backend=None,
        )
        self.runner = diffusion_model_runner.DiffusionModelRunner(None, config, torch.device("cpu"))
        # It measures a GPU's memory.
        current_omni_platform.reset_peak_memory_stats = lambda: None
        self.runner._sample_peak_memory_mb = lambda: 0.0
        self.runner.pipeline = _pipeline()
        self._manager = self.runner.kv_transfer_manager

    def execute(
        self, request: str, companions: dict[str, str] | None = None, following: str | None = None
    ) -> Any:
        """What the stage computes of a request; None where no KV came.

        Args:
            request: its id.
            companions: those of its branches, by branch.
            following: the next request, whose KV the runner may prefetch.
        """
        job = following and {"request_id": following, "kv_sender_info": {"0": _SENDER}}
        try:
            found = self.runner.execute_model(self._request(request, companions), job)
        except RuntimeError as error:
            return f"RuntimeError: {error}"
        return None if found.output is None else found.output.tolist()

    def step(self, request: str, companions: dict[str, str] | None = None) -> Any:
        """The same, where the runner computes step by step."""
        from vllm_omni.diffusion.sched.interface import (
            CachedRequestData,
            DiffusionSchedulerOutput,
            NewRequestData,
        )

        new = NewRequestData(request_id=request, req=self._request(request, companions))
        self.runner._update_states(
            DiffusionSchedulerOutput(
                step_id=0,
                scheduled_new_reqs=[new],
                scheduled_cached_reqs=CachedRequestData.make_empty(),
                finished_req_ids=set(),
                num_running_reqs=1,
                num_waiting_reqs=0,
            )
        )
        state = self.runner.state_cache.pop(request)
        found = self.runner.pipeline.denoise(state.prompt, state.sampling)
        return None if found is None else found.tolist()

    def prefetched(self, timeout: float) -> bool:
        """Whether the prefetch that was started has ended; what its worker asks before a pause."""
        return bool(self._manager.wait_prefetch(timeout=timeout))

    def stubborn(self) -> None:
        """From now on this rank uses what came to it, whatever came to others."""
        from omni_connector.stage.ranks import Ranks

        Ranks._agree = lambda *_: True  # type: ignore[method-assign]

    def close(self) -> None:
        """As its worker does."""
        self._manager.close()

    @staticmethod
    def _meet(rank: int, world: int, meeting: str) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=60),
        )

    def _group(self, rank: int, meeting: str, branches: int, heads: int, sequence: int) -> None:
        from vllm_omni.diffusion.distributed import parallel_state

        world = branches * heads * sequence
        self._meet(rank, world, meeting)  # it would count devices, to choose one
        parallel_state.init_distributed_environment(
            world, rank, f"file://{meeting}", rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(
            data_parallel_size=1,
            cfg_parallel_size=branches,
            tensor_parallel_size=heads,
            sequence_parallel_size=sequence,
            ulysses_degree=sequence,
            backend="gloo",
        )

    @staticmethod
    def _request(request: str, companions: dict[str, str] | None) -> Any:
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        params = OmniDiffusionSamplingParams(seed=0, num_inference_steps=1)
        params.cfg_kv_request_ids = companions
        return OmniDiffusionRequest({"prompt": "a"}, params, request)


class Sender:
    """One rank of an autoregressive stage: vLLM-Omni's own model runner, as far as it sends KV.

    Args:
        rank, ranks: its tensor-parallel rank, and how many there are.
        receivers: those of the next stage.
    """

    def __init__(self, rank: int, ranks: int, receivers: int) -> None:
        from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

        from omni_connector.stage import OmniKVTransferManager

        role = {"name": "OmniSharedMemoryConnector", "extra": {"role": "sender"}}
        model = SimpleNamespace(
            stage_id=0,
            stage_connector_config=role,
            omni_kv_config={
                "connector_config": {"type": "SharedMemoryConnector"}, "need_send_cache": True,
                "omni_from_stage": "0", "omni_to_stage": "1", "stage_id": 0,
                "rank_mapping": {"from_tp": ranks, "to_tp": receivers},
            },
        )  # fmt: skip
        parallel = SimpleNamespace(tensor_parallel_size=ranks, rank=rank)
        runner = object.__new__(GPUARModelRunner)  # without a model
        runner.kv_transfer_manager = OmniKVTransferManager.from_vllm_config(
            SimpleNamespace(parallel_config=parallel), model
        )
        runner.init_omni_connectors(model, kv_transfer_manager=runner.kv_transfer_manager)
        runner.execute_model_state = None
        runner.routed_experts_initialized = False
        runner.model = None
        runner.requests, runner.model_intermediate_buffer = {"own": True}, {}
        runner._prefix_cache_step_begin = lambda output: None
        runner.recv_full_payload_inputs = self._enough
        self.runner = runner

    def send(self, request: str, seed: int) -> list[str]:
        """Finish a request; the ids of those whose blocks are free then."""
        runner = self.runner
        # All ranks have one table of blocks.
        seq = replace(sequence(seed=seed), block_ids=sequence().block_ids)
        runner.kv_caches = [cache_of(seq, "pair")]
        runner.cache_config = SimpleNamespace(block_size=seq.block_size, cache_dtype="auto")
        runner.model_intermediate_buffer = {"own": {"global_request_id": request}}
        finished = {"own": {"block_ids": seq.block_ids, "seq_len": seq.tokens}}
        with suppress(_SentError):
            runner.execute_model(SimpleNamespace(finished_requests_needing_kv_transfer=finished))
        return list(runner.kv_extracted_req_ids)

    def close(self) -> None:
        """End its connector."""
        self.runner.kv_transfer_manager.close()

    @staticmethod
    def _enough(output: Any) -> None:
        raise _SentError  # what follows computes


class _SentError(Exception):
    """The runner has sent what it had to."""


def stage_of(kind: str, *arguments: Any) -> Any:
    """A `Rank`, or a `Sender`."""
    return {"rank": Rank, "sender": Sender}[kind](*arguments)


# Connectors of one host ask all senders there.
_SENDER = {"host": "127.0.0.1", "zmq_port": 50151}


def _pipeline() -> Any:
    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.distributed.cfg_parallel import (
        CFGParallelMixin,
        _get_cfg_world_size_or_one,
    )
    from vllm_omni.diffusion.models.bagel.pipeline_bagel import BagelPipeline

    class Pipeline(CFGParallelMixin):
        def forward(self, batch: Any) -> Any:
            return DiffusionOutput(output=self.denoise(batch.prompts[0], batch.sampling_params))

        def denoise(self, prompt: Any, sampling: Any) -> torch.Tensor | None:
            if sampling.past_key_values is None:
                return None  # it would compute the prompt itself
            chosen = BagelPipeline._forward_single(_bagel(), prompt, sampling, prepare_only=True)
            contexts = [chosen[f"{name}_context"] for name in ("gen", "cfg_text", "cfg_img")]
            if _get_cfg_world_size_or_one() == 2:
                contexts.pop()  # Bagel refuses a branch more than there are ranks
            return self.predict_noise_with_multi_branch_cfg(
                do_true_cfg=True,
                true_cfg_scale=1.0,
                branches_kwargs=[{"cache": each["past_key_values"]} for each in contexts],
            )

        def predict_noise(self, cache: Any) -> torch.Tensor:
            parts = [*cache.key_cache.values(), *cache.value_cache.values()]
            sums = [each.double().sum() for each in parts if each is not None]
            return torch.stack(sums).sum().view(1) if sums else torch.zeros(1, dtype=torch.float64)

        def combine_multi_branch_cfg_noise(self, predictions: Any, *_: Any) -> torch.Tensor:
            return torch.cat(list(predictions))

    return Pipeline()


def _bagel() -> Any:
    """A Bagel of one layer, as far as it chooses the KV."""
    ids = torch.zeros(1, dtype=torch.long)
    names = ("packed_text_ids", "packed_position_ids", "packed_vae_position_ids")
    model = SimpleNamespace(
        max_latent_size=4,
        latent_downsample=16,
        config=SimpleNamespace(llm_config=SimpleNamespace(num_hidden_layers=1)),
        prepare_vae_latent=lambda **_: dict.fromkeys(names, ids),
        prepare_vae_latent_cfg=lambda **_: {"cfg_packed_position_ids": ids},
    )
    return SimpleNamespace(
        bagel=model,
        device=torch.device("cpu"),
        language_model=SimpleNamespace(vocab_size=9),
        new_token_ids={},
    )


def main(root: str) -> None:
    """Load the wheel, and fork a rank for each line of stdin."""
    make_importable(Path(root))
    make_loadable()
    import vllm_omni.diffusion.models.bagel.pipeline_bagel
    import vllm_omni.diffusion.worker.diffusion_model_runner
    import vllm_omni.model_executor.stage_input_processors.bagel
    import vllm_omni.worker.gpu_ar_model_runner  # noqa: F401

    fork_stages(stage_of)


if __name__ == "__main__":
    main(sys.argv[1])
