# SPDX-License-Identifier: Apache-2.0
"""What a simulated engine is made from: vLLM's own configuration, made once for each shape."""

import copy
import functools
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.toy import (
    GROUPS,
    drafting,
    head_copies,
    kv_cache_config,
    layers_with_states,
    tell_hash_block_size,
    write_model,
)

MODULE: Final = "tests.simulation.engines.connector"
OTHER: Final = "tests.simulation.engines.other"
WINDOW: Final = 10
REPLAYED: Final = 12
MAX_LENGTH: Final = 512
_MODEL_NAME: Final = "/toy"  # a path that no machine has, so that no files of it are looked for


Role = Literal["kv_producer", "kv_both", "kv_consumer"]
Policy = Literal["recompute", "fail"]


@dataclass(frozen=True)
class EngineShape:
    """One engine of a simulation.

    Attributes:
        name: its engine id.
        role: `kv_role`; None for an engine without connector.
        family: of `toy.GROUPS`.
        blocks: KV blocks that requests can have.
        block_size: tokens of one.
        ranks: tensor-parallel size.
        step_tokens: most tokens of a step.
        long_prefill: most of them of one prompt, 0 for no limit.
        seqs: most requests of a step.
        overlap: async scheduling.
        priorities: whether requests are scheduled by priority.
        policy: `kv_load_failure_policy`.
        runner: of `lifecycles.LIFECYCLES`.
        caching: whether prefixes are cached.
        slots: of the arena of each rank, or of all ranks that spread their slots over them.
        shares: whether it uses the shared store.
        integrity: as configured.
        zeroes: whether vLLM has new blocks zeroed, whatever the family.
        step_s: seconds that a step takes which computes something.
        hosts: whether it shares its prefixes with the engines of its host.
        drafts: speculative tokens of a step.
        drafter: `mtp` or `modules`, where the drafter has KV of its own; see `toy.drafting`.
        states: `--mamba-cache-mode`, where prefixes are cached.
        late_reports: how often a rank reports in the next step only what it could report in one.
        beside: where another connector stands in MultiConnector, `before` ours or `after`; "" where
            there is none.
        stages: numbers of the layers at which the pipeline stages after the first begin.
        far_ranks: whether each rank is on a host of its own.
        match_unit: `--prefix-match-unit`; 0: as vLLM chooses it.
    """

    name: str
    role: Role | None
    family: str
    blocks: int
    block_size: int
    ranks: int
    step_tokens: int
    long_prefill: int
    seqs: int
    overlap: bool
    priorities: bool
    policy: Policy
    runner: str
    caching: bool
    slots: int
    shares: bool
    integrity: str
    zeroes: bool
    step_s: float
    hosts: bool = False
    drafts: int = 0
    drafter: str = ""
    states: Literal["align", "all"] = "align"
    late_reports: float = 0.0
    beside: str = ""
    stages: tuple[int, ...] = ()
    far_ranks: bool = False
    match_unit: int = 0


def num_workers(shape: EngineShape) -> int:
    """Ranks of all pipeline stages."""
    return shape.ranks * (1 + len(shape.stages))


def rank_slots(shape: EngineShape) -> int:
    """Slots of the arena of each rank: a stripe of the slots, where ranks hold the same KV."""
    if shape.far_ranks:
        return shape.slots
    stripes = math.gcd(shape.ranks, *copies_by_layer(shape).values())
    if "state" not in GROUPS[shape.family]:
        return -(-shape.slots // stripes)
    if shape.stages:  # then each rank keeps all slots
        return shape.slots
    # A state and a block of attention take 1 + stripes slots together, of 2 * stripes.
    return -(-shape.slots * (1 + stripes) // (2 * stripes))


def copies_by_layer(shape: EngineShape) -> dict[str, int]:
    """How many ranks hold the same KV head, by layer."""
    config = kv_cache_config(
        2, shape.block_size, shape.family, ranks=shape.ranks, caching=shape.caching
    )
    return head_copies(config, shape.ranks)


def num_hosts(shape: EngineShape) -> int:
    """Hosts that the engine spans; each has a part of its ranks."""
    return num_workers(shape) if shape.far_ranks else 1


ARENA_WAIT_S: Final = 2.0
LOAD_TIMEOUT_S: Final = 3.0
HANDOFF_TTL_S: Final = 12.0
LOOKUP_TIMEOUT_S: Final = 0.25
ORPHAN_S: Final = 4.0


def extra_config(shape: EngineShape, slot_bytes: int) -> dict[str, Any]:
    """The connector's settings."""
    extra: dict[str, Any] = {
        "model_id": "toy",
        "arena_gib": (
            (rank_slots(shape) + 0.5)
            * slot_bytes
            * (num_workers(shape) // num_hosts(shape))  # those of one host
            / (1 << 30)
        ),
        "arena_wait_s": ARENA_WAIT_S,
        "load_timeout_s": LOAD_TIMEOUT_S,
        "handoff_ttl_s": HANDOFF_TTL_S,
        "integrity": shape.integrity,
        "share": shape.hosts,
    }
    if shape.shares:
        extra["store"] = {"master": "127.0.0.1:1", "lookup_timeout_s": LOOKUP_TIMEOUT_S}
    return extra


def vllm_config(shape: EngineShape, extra: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration of one engine, with a `kv_transfer_config` of its own."""
    config = copy.copy(shared_config())
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    cache, scheduler = config.cache_config, config.scheduler_config
    cache.block_size = shape.block_size
    cache.enable_prefix_caching = shape.caching
    cache.num_gpu_blocks = shape.blocks + 1
    cache.kv_cache_layout = "LBHNC"
    cache.mamba_cache_mode = "none"
    scheduler.max_num_seqs = shape.seqs
    scheduler.max_num_batched_tokens = shape.step_tokens
    scheduler.max_num_scheduled_tokens = shape.step_tokens
    scheduler.long_prefill_token_threshold = shape.long_prefill
    scheduler.policy = "priority" if shape.priorities else "fcfs"
    # vLLM turns it off on a CPU; the scheduler is the same one everywhere.
    scheduler.async_scheduling = shape.overlap
    config.parallel_config.tensor_parallel_size = shape.ranks
    config.parallel_config.pipeline_parallel_size = 1 + len(shape.stages)
    config.parallel_config.nnodes = num_hosts(shape)
    config.parallel_config.rank = 0
    # The scheduler half asks no rank at a socket; see `SimulatedRankCopies`.
    config.parallel_config.distributed_executor_backend = "uni"
    if shape.drafts:
        # Beside async scheduling runs the one that needs no answer of the step before.
        without_kv = "ngram_gpu" if shape.overlap else "ngram"
        config.speculative_config = _drafter(shape.drafts, shape.drafter or without_kv)
    config.kv_transfer_config = None
    if shape.role is not None:
        ours: dict[str, Any] = {
            "kv_connector": "SimulatedConnector",
            "kv_connector_module_path": MODULE,
            "kv_role": shape.role,
            "kv_connector_extra_config": extra,
        }
        if shape.beside:
            other = {"kv_connector": "OtherConnector", "kv_connector_module_path": OTHER}
            both = [{**other, "kv_role": "kv_both"}, ours]
            both = both if shape.beside == "before" else both[::-1]
            multi = {"kv_connector": "MultiConnector", "kv_role": shape.role}
            ours = {**multi, "kv_connector_extra_config": {"connectors": both}}
        config.kv_transfer_config = KVTransferConfig(
            engine_id=shape.name, kv_load_failure_policy=shape.policy, **ours
        )
    return config


@functools.cache
def _drafter(tokens: int, drafter: str) -> SpeculativeConfig:
    return drafting(shared_config(), drafter, tokens)


def cache_config(shape: EngineShape, config: VllmConfig) -> tuple[KVCacheConfig, int, int]:
    """The cache groups of one rank, with the layers of all pipeline stages; block sizes of the
    scheduler and of hashes."""
    # Block 0 is vLLM's null block, which nobody gets.
    kv_config = kv_cache_config(
        shape.blocks + 1,
        shape.block_size,
        shape.family,
        ranks=shape.ranks,
        caching=shape.caching,
        window=WINDOW,
        replayed=REPLAYED,
        states=shape.states,
        drafts=shape.drafts,
    )
    config.compilation_config.static_forward_context.update(layers_with_states(kv_config))
    if kv_config.has_mamba_layers and shape.caching:
        mode: Any = shape.states
        config.cache_config.mamba_cache_mode = mode
    config.cache_config.prefix_match_unit = shape.match_unit or None
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_config, config)
    tell_hash_block_size(kv_config, hash_block_size)
    return kv_config, block_size, hash_block_size


@functools.cache
def shared_config() -> VllmConfig:
    """What the configurations of all engines have in common."""
    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(
            model=str(write_model(Path(folder))),
            skip_tokenizer_init=True,
            dtype="float16",
            max_model_len=MAX_LENGTH,
        )
        # The same in each process. It is a part of a store's keys, by whose order a sweep chooses
        # among files of the same age.
        model.model = _MODEL_NAME
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_LENGTH,
                is_encoder_decoder=False,
                max_num_seqs=8,
                max_num_batched_tokens=MAX_LENGTH,
                enable_chunked_prefill=True,
            ),
            device_config=DeviceConfig("cpu"),
        )
