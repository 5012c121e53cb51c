# SPDX-License-Identifier: Apache-2.0
"""`OmniKVCacheConfig`, the settings of a transfer manager, and how engines' settings become it."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from omni_connector.errors import ConfigError

logger = logging.getLogger(__name__)

StageId = str | int


@dataclass
class OmniKVCacheConfig:
    """Configuration of an `OmniKVTransferManager`.

    Attributes:
        connector_config: `type`, a name that `OmniConnectorFactory` knows, and that connector's
            settings.
        from_stage: the stage that sends.
        to_stage: the stage that it sends to.
        stage_id: this stage, where it receives.
        engine_input_source: the stages that this stage gets its input from. It receives from the
            first of them; without any, from the stage before it if `stage_id` is a number, else
            from `from_stage`.
        need_recv_cache: whether this stage receives.
        need_send_cache: whether this stage sends.
        recv_timeout: seconds to wait for a KV cache.
        from_tp: tensor-parallel ranks of the sending stage.
        to_tp: ranks of the receiving stage. With 1 for both, both have as many as this stage.
        tp_rank: this process's tensor-parallel rank; by default vLLM is asked.
        tp_size: ranks of this stage; by default vLLM is asked.
        num_kv_heads: KV heads of the model, all ranks together.
        head_dim: elements of a key; where unknown, keys and values are taken to be of equal size.
        kv_layout: a `KVLayout`, or one a layer, for caches whose shape does not tell the layout.
        cpu_engine: whether the cache is that of vLLM on a CPU. Its layout depends on the
            instruction set, so that `kv_layout` must name it.
    """

    connector_config: dict[str, Any] | None = None
    from_stage: StageId | None = None
    to_stage: StageId | None = None
    stage_id: StageId | None = None
    engine_input_source: list[StageId] | None = None
    need_recv_cache: bool = False
    need_send_cache: bool = False
    recv_timeout: float = 30.0
    from_tp: int = 1
    to_tp: int = 1
    tp_rank: int | None = None
    tp_size: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    kv_layout: str | list[str | None] | None = None
    cpu_engine: bool = False
    # vLLM-Omni's diffusion runner asks for it, and prefetches nothing then.
    enable_kv_async_prefetch: ClassVar[bool] = False

    def send_stages(self) -> tuple[str, str] | tuple[None, None]:
        """What this stage sends: from which stage, to which stage."""
        return _edge(self.from_stage, self.to_stage)

    def recv_stages(self) -> tuple[str, str] | tuple[None, None]:
        """What this stage receives: from which stage, to which stage."""
        source: StageId | None = self.from_stage
        if self.engine_input_source:
            source = self.engine_input_source[0]
        elif isinstance(self.stage_id, int) and self.stage_id > 0:
            source = self.stage_id - 1
        return _edge(source, self.stage_id)


def _edge(start: StageId | None, end: StageId | None) -> tuple[str, str] | tuple[None, None]:
    # Stage 0 is a stage, so that what is false does not stand for what is absent.
    if start in (None, "") or end in (None, ""):
        return None, None
    return str(start), str(end)


class _RankMapping(msgspec.Struct, frozen=True):
    from_tp: int = 1
    to_tp: int = 1


class _Settings(
    msgspec.Struct,
    frozen=True,
    rename={"from_stage": "omni_from_stage", "to_stage": "omni_to_stage"},
):
    """`omni_kv_config` of a model's configuration; its other keys belong to other readers."""

    connector_config: dict[str, Any] | None = None
    from_stage: StageId | None = None
    to_stage: StageId | None = None
    stage_id: StageId | None = None
    engine_input_source: list[StageId] | None = None
    need_recv_cache: bool = False
    need_send_cache: bool = False
    recv_timeout: float = 30.0
    rank_mapping: _RankMapping | None = None
    num_kv_heads: int | None = None
    kv_layout: str | list[str | None] | None = None


def read_model_config(config: Any) -> OmniKVCacheConfig:
    """Read the `omni_kv_config` of a model's, or a diffusion engine's, configuration.

    Raises:
        ConfigError: a value has the wrong type; the message names the key.
    """
    read = _read_settings(getattr(config, "omni_kv_config", None))
    if read.num_kv_heads is None:
        read.num_kv_heads = _ask(config, "get_total_num_kv_heads")
    read.head_dim = _ask(config, "get_head_size")
    return read


def read_vllm_config(vllm_config: Any, model_config: Any) -> OmniKVCacheConfig:
    """As `read_model_config`; without `omni_kv_config`, take the connector of `kv_transfer_config`.

    The connector is its `omni_connector_config`, or that of its `kv_connector_extra_config`.

    Raises:
        ConfigError: as `read_model_config`.
    """
    read = read_model_config(model_config)
    if not isinstance(getattr(model_config, "omni_kv_config", None), Mapping):
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        extra = getattr(transfer, "kv_connector_extra_config", None)
        for found in (
            getattr(transfer, "omni_connector_config", None),
            extra.get("omni_connector_config") if isinstance(extra, dict) else None,
        ):
            if isinstance(found, dict) and found:
                read.connector_config = dict(found)
                break
    device = getattr(vllm_config, "device_config", None)
    read.cpu_engine = getattr(device, "device_type", None) == "cpu"
    parallel = getattr(vllm_config, "parallel_config", None)
    size = getattr(parallel, "tensor_parallel_size", None)
    rank = getattr(parallel, "rank", None)
    if isinstance(size, int) and isinstance(rank, int) and size > 0:
        read.tp_size, read.tp_rank = size, rank % size
    return read


def _read_settings(settings: object) -> OmniKVCacheConfig:
    if not isinstance(settings, Mapping) or not settings:
        return OmniKVCacheConfig()
    try:
        given = msgspec.convert(dict(settings), _Settings)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ConfigError(f"omni_kv_config: {error}") from error
    if not 0 <= given.recv_timeout < math.inf:  # else a receiver would wait for ever
        raise ConfigError(
            f"omni_kv_config: {given.recv_timeout} is no number of seconds - at `$.recv_timeout`"
        )
    values = msgspec.structs.asdict(given)
    ranks = values.pop("rank_mapping") or _RankMapping()
    return OmniKVCacheConfig(from_tp=ranks.from_tp, to_tp=ranks.to_tp, **values)


def _ask(config: Any, question: str) -> int | None:
    ask: Callable[[], object] | None = getattr(config, question, None)
    answer = ask() if callable(ask) else None
    return answer if isinstance(answer, int) and answer > 0 else None
