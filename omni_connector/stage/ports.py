# SPDX-License-Identifier: Apache-2.0
"""Ports at which the ranks of a stage's replicas send KV, by vLLM-Omni's scheme.

    base + 100 + stage + 1024 * replica + 16 * rank

An orchestrator tells receivers the port of the replica's rank 0; rank r is asked at 16 r more.
"""

import os
from typing import Final

from omni_connector.errors import ConfigError
from omni_connector.net.peers import MAX_PORT

RANK_STRIDE: Final = 16
"""Ports from one rank of a stage to the next, and so the most stages. vLLM-Omni counts so."""

REPLICA_STRIDE: Final = 1024
"""Ports from one replica of a stage to the next. vLLM-Omni counts so."""

KV_OFFSET: Final = 100
"""Below it are the ports of other payloads of stages with the same base."""

REPLICA_VARIABLE: Final = "VLLM_OMNI_REPLICA_ID"


def kv_port(base: int, stage: int, *, replica: int = 0, rank: int = 0) -> int:
    """Port at which a rank sends KV.

    >>> kv_port(50051, 0), kv_port(50051, 2, replica=1, rank=3)
    (50151, 51225)

    Raises:
        ConfigError: two ranks could have the same port, or it is no port.
    """
    if not 0 <= stage < RANK_STRIDE:
        raise ConfigError(f"stage {stage} has no KV port: stages are 0 to {RANK_STRIDE - 1}")
    if replica < 0 or rank < 0:
        raise ConfigError(f"replica {replica} and rank {rank} must not be negative")
    port = base + KV_OFFSET + stage + REPLICA_STRIDE * replica + RANK_STRIDE * rank
    if not 0 < port <= MAX_PORT:
        raise ConfigError(
            f"rank {rank} of replica {replica} of stage {stage} would send at port {port}, which "
            f"is none; lower zmq_port ({base})"
        )
    return port


def configured_port(value: object) -> int:
    """`zmq_port` of a configuration, in which variables of the environment may stand.

    Raises:
        ConfigError: it is no number.
    """
    text = os.path.expandvars(str(value))
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"zmq_port is {value!r}, which is no port")
    return int(text)


def stage_number(stage: str | int | None) -> int:
    """The stage as `kv_port` takes it: 0 where its name is no number."""
    text = str(stage)
    return int(text) if text.isascii() and text.isdigit() else 0


def replica_id() -> int:
    """Replica of this stage that this process belongs to, by vLLM-Omni's variable; else 0."""
    return stage_number(os.environ.get(REPLICA_VARIABLE))
