# SPDX-License-Identifier: Apache-2.0
"""The settings that engines of these tests run with, by name; each serves with several models.

There are few, and the demo's and that of an engine in process beside them: each costs every model
that is tried with it an engine or two.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omni_connector.testing import no_op, reference
from tests import soak

from . import vllm_itself
from .draft_probe import EXTENSION as DRAFT_PROBE
from .probe import EXTENSION as PROBE
from .share_probe import EXTENSION as SHARE_PROBE
from .store_probe import EXTENSION as STORE_PROBE

BLOCK = 128
DRAFTS = 3
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@dataclass(frozen=True)
class Configuration:
    """Settings of an engine, its model aside.

    Attributes:
        connector: the `--kv-transfer-config`.
        arguments: of the server, beside those of the model's family.
        environment: variables on top of those that all engines have.
        kv_cache_bytes: size of the KV cache.
        ranks: of all pipeline stages.
        probe: the `--worker-extension-cls`.
        forked: started by the fork server; else as users start engines.
        drafter: a `--speculative-config` whose model has a KV cache; its `model` is a recipe.
    """

    connector: Mapping[str, Any]
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_cache_bytes: int = 64 << 20
    ranks: int = 1
    probe: str = PROBE
    forked: bool = True
    drafter: Mapping[str, Any] = field(default_factory=dict)


def ours(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The `--kv-transfer-config` of an engine under test, that computes what cannot be loaded."""
    # Longer than a slow machine takes for all that a test does at once.
    settings = {"arena_gib": 0.25, "handoff_ttl_s": 120.0, "load_timeout_s": 30.0, "share": False}
    return {
        "kv_connector": "OmniKVConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {**settings, **extra},
    }


def in_stages(*arguments: str, ranks: int) -> Configuration:
    """Engines of two pipeline stages that hand off and share."""
    return Configuration(
        {**ours(share=True), "kv_load_failure_policy": "fail"},
        arguments=(
            *("--pipeline-parallel-size", "2"),
            # With vLLM's eager mode proper, such an engine dies at its first request here.
            *("--no-enforce-eager", "--compilation-config", '{"backend": "eager"}'),
            *arguments,
        ),
        # vLLM compiles ahead only with torch's compiler, which these tests go without.
        environment={"VLLM_USE_AOT_COMPILE": "0"},
        ranks=ranks,
        probe=SHARE_PROBE,
    )


def drafting(method: str, recipe: str | None) -> Configuration:
    """Engines that hand off and share, with a drafter of `DRAFTS` tokens that has a KV cache."""
    drafter = {"method": method, "num_speculative_tokens": DRAFTS}
    return Configuration(
        ours(share=True),
        probe=DRAFT_PROBE,
        drafter=drafter if recipe is None else {**drafter, "model": recipe},
    )


CONFIGURATIONS = {
    # Answers of an engine that moves nothing, and says that it did: with no
    # kv_transfer_params it is the reference, with them the negative control.
    "reference": Configuration(
        {
            "kv_connector": "NoOpConnector",
            "kv_connector_module_path": no_op.MODULE,
            "kv_role": "kv_both",
        },
        arguments=("--logits-processors", reference.PROCESSOR),
    ),
    "both": Configuration(ours()),
    # Its cache is made small when it is started, so that requests are preempted.
    "scarce": Configuration(ours()),
    # For peers that end, or time out.
    "hasty-prefill": Configuration(ours("kv_producer", handoff_ttl_s=10.0, load_timeout_s=5.0)),
    "hasty-decode": Configuration(ours("kv_consumer", handoff_ttl_s=10.0, load_timeout_s=5.0)),
    "two-ranks": Configuration(ours(), arguments=("--tensor-parallel-size", "2"), ranks=2),
    "two-stages": in_stages(ranks=2),
    "two-stages-of-two-ranks": in_stages("--tensor-parallel-size", "2", ranks=4),
    # All that is unlike the others: blocks, no cache of prefixes, drafts, and an engine that knows
    # the connector by its module and not by the plugin. So nobody can read its weights, and it is
    # told that the calls of the tests to its workers change none.
    "unlike": Configuration(
        {
            **ours(weights="fixed"),
            "kv_connector_module_path": "omni_connector.vllm_v1.connector",
        },
        arguments=(
            *("--block-size", "32", "--no-enable-prefix-caching"),
            *(() if vllm_itself.DRAFTS else ("--speculative-config", json.dumps(NGRAM))),
        ),
        environment={"VLLM_PLUGINS": ""},
        forked=False,
    ),
    # Under vLLM's policy "fail": what goes wrong with a cache must not end a request.
    "share": Configuration(
        {**ours(share=True), "kv_load_failure_policy": "fail"}, probe=SHARE_PROBE
    ),
    # Its children are told when it is started.
    "beside": Configuration({"kv_connector": "MultiConnector", "kv_role": "kv_both"}),
    # With a cache and an arena that are too small for what it is asked.
    "soak": Configuration(
        {**ours(), "kv_connector_extra_config": soak.SETTINGS},
        arguments=("--max-model-len", str(soak.MAX_MODEL_LEN)),
        environment=soak.ENVIRONMENT,
        kv_cache_bytes=soak.KV_CACHE_BYTES,
    ),
    "eagle": drafting("eagle", "eagle-llama"),
    "eagle3": drafting("eagle3", "eagle3-llama"),
    "draft_model": drafting("draft_model", "draft-llama"),
    "mtp": drafting("mtp", None),
    # Its own reference, too.
    "fp8": Configuration(
        ours(),
        arguments=("--kv-cache-dtype", "fp8", "--logits-processors", reference.PROCESSOR),
        probe=DRAFT_PROBE,
    ),
    "store": Configuration({**ours(), "kv_load_failure_policy": "fail"}, probe=STORE_PROBE),
}
"""Addresses of peers and stores, which differ from run to run, are told when one is started."""
