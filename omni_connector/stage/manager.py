# SPDX-License-Identifier: Apache-2.0
"""`OmniKVTransferManager`: the KV cache of finished requests, from one stage to the next."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Final, Self

import torch

from omni_connector.errors import ConfigError, OmniError
from omni_connector.stage import contract
from omni_connector.stage.config import OmniKVCacheConfig, read_model_config, read_vllm_config
from omni_connector.stage.extract import LayerKV, extract_kv_cache
from omni_connector.stage.link import (
    ConnectorLink,
    Parts,
    Sender,
    find_sender,
    mark_sending,
)
from omni_connector.stage.payload import KVCacheTransferData
from omni_connector.stage.ranks import Ranks, Received
from omni_connector.stage.receiving import check_tokens, place
from omni_connector.stage.tp import (
    ReceiveKey,
    Topology,
    local_rank,
    local_size,
    merge_shards,
    own_heads,
    slice_heads,
)

__all__ = [
    "KVCacheTransferData",
    "LayerKV",
    "OmniKVCacheConfig",
    "OmniKVTransferManager",
]

logger = logging.getLogger(__name__)

# vLLM-Omni's requests of warm-up runs, which no stage has sent.
_DUMMY_ID: Final = "dummy_req_id"

SendKeyBuilder = Callable[[str, str, str], Sequence[str]]
ReceiveKeyBuilder = Callable[[str, str, str], Sequence[str | ReceiveKey]]
CollectFunction = Callable[..., dict[str, Any] | None]


class OmniKVTransferManager:
    """Sends and receives the KV cache of requests over an `OmniConnector`.

    What is sent can be received by any number of receivers, by each once, until the sender calls
    `cleanup`, sends another request of this id, the connector evicts it, or this process ends. A
    later request of the same id gets what is sent for it, or nothing. A receiver gives up at
    `recv_timeout`. No sender waits for a receiver; a sender without room is
    told that its send failed.

    Args:
        config: what to transfer, and how.
        clock: monotonic seconds.
        sleep: waits for seconds; by default until `close`, if that comes first.

    Attributes:
        config: as given.
        send_stages: (from, to) of what is sent; (None, None) if that is not configured.
        recv_stages: the same of what is received.
        last_failures: the requests that the last `handle_finished_requests_kv_transfer` could
            not send, and why.
        kv_send_key_builder: (request id, from, to) -> keys to put a request under, instead of the
            usual ones; under each of them all heads of this rank are put.
        kv_recv_key_builder: (request id, from, to) -> keys to get it by, or (key, sender's rank).
        kv_payload_merger: payloads of several senders -> one payload.
        kv_payload_slicer: payload -> what this rank uses of it.

    Raises:
        ConfigError: neither of the tensor-parallel sizes divides the other, or `recv_timeout` is no
            number of seconds.
    """

    def __init__(
        self,
        config: OmniKVCacheConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        Topology(config.from_tp, config.to_tp)
        if not 0 <= config.recv_timeout < math.inf:  # else a receiver would wait for ever
            raise ConfigError(f"recv_timeout: {config.recv_timeout} is no number of seconds")
        self.config = config
        self.send_stages = config.send_stages()
        self.recv_stages = config.recv_stages()
        self._link = ConnectorLink(config, lambda: self._topology, clock, sleep)
        self.last_failures: dict[str, str] = {}
        self.kv_send_key_builder: SendKeyBuilder | None = None
        self.kv_recv_key_builder: ReceiveKeyBuilder | None = None
        self.kv_payload_merger: Callable[[list[dict[str, Any]]], Any] | None = None
        self.kv_payload_slicer: Callable[[Any], Any] | None = None
        # `received`: what ranks of this stage have received, while this thread applies it.
        self._given = threading.local()

    @classmethod
    def from_od_config(cls, config: Any) -> Self:
        """Make a manager by the `omni_kv_config` of a model's or diffusion engine's configuration.

        Raises:
            ConfigError: a value there is of the wrong type or out of range.
        """
        return cls(read_model_config(config))

    from_model_config = from_od_config

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, model_config: Any) -> Self:
        """As `from_model_config`; without `omni_kv_config`, by vLLM's `kv_transfer_config`.

        Raises:
            ConfigError: as `from_od_config`.
        """
        return cls(read_vllm_config(vllm_config, model_config))

    @property
    def connector(self) -> Any:
        """The connector, made at first use; None if none is configured, or it did not start.

        If it did not start, the next use tries again.
        """
        return self._link.connector

    get_connector = property(lambda self: self.connector)

    @property
    def tp_topology(self) -> Topology:
        """How many tensor-parallel ranks send and receive, as configured or as vLLM says."""
        return self._topology

    def extract_kv_cache(
        self,
        req_id: str,
        block_ids: Sequence[int],
        seq_len: int,
        kv_caches: Sequence[LayerKV | None],
        block_size: int,
        cache_dtype: str,
        custom_metadata: dict[str, Any] | None = None,
    ) -> KVCacheTransferData:
        """Copy the KV of a request out of the cache, in the configured layout.

        Args:
            req_id: the request, as the next stage knows it.
            block_ids, seq_len, kv_caches, block_size, cache_dtype, custom_metadata: see
                `extract.extract_kv_cache`.

        Raises:
            LayoutError, ValueError, TypeError: as there.
        """
        return extract_kv_cache(
            *(req_id, block_ids, seq_len, kv_caches, block_size, cache_dtype, custom_metadata),
            layout=self.config.kv_layout,
            head_dim=self.config.head_dim,
            cpu_engine=self.config.cpu_engine,
        )

    def send_kv_cache(self, kv_data: KVCacheTransferData) -> bool:
        """Send the KV of one request to the next stage, in three tries where that may help.

        Args:
            kv_data: what `extract_kv_cache` returned.

        Returns:
            Whether it was sent; `last_failures` has the reason if it was not.
        """
        self.last_failures = {}

        def extracted() -> KVCacheTransferData:
            self._link.withdraw(kv_data.request_id)
            return kv_data

        return self._send_or_note(kv_data.request_id, extracted)

    def handle_finished_requests_kv_transfer(
        self,
        finished_reqs: Mapping[str, Mapping[str, Any]],
        kv_caches: list[LayerKV],
        block_size: int,
        cache_dtype: str,
        request_id_resolver: Callable[[str], str] | None = None,
    ) -> list[str]:
        """Take the KV of finished requests from the cache and send it to the next stage.

        Each of a request's objects is tried three times, 0.1 s and 0.2 s apart.

        Args:
            finished_reqs: request id -> `block_ids`, `seq_len` and, optionally,
                `custom_metadata`.
            kv_caches: the cache of each layer; see `extract_kv_cache`.
            block_size: tokens of a block.
            cache_dtype: what the engine calls the cache's dtype.
            request_id_resolver: request id -> the id by which the next stage knows it.

        Returns:
            The ids of all the requests, sent or not: vLLM-Omni frees the blocks of these, and this
            manager needs none of them any more. `last_failures` has those that were not sent.
        """
        self.last_failures = {}
        if not self.config.need_send_cache:
            return list(finished_reqs)
        for request_id, request in finished_reqs.items():

            def extract(
                request_id: str = request_id, request: Mapping[str, Any] = request
            ) -> KVCacheTransferData:
                sent_as = request_id_resolver(request_id) if request_id_resolver else request_id
                self._link.withdraw(sent_as)
                return self.extract_kv_cache(
                    sent_as,
                    request["block_ids"],
                    request["seq_len"],
                    kv_caches,
                    block_size,
                    cache_dtype,
                    request.get("custom_metadata"),
                )

            self._send_or_note(request_id, extract)
        return list(finished_reqs)

    def receive_kv_cache_for_request(
        self,
        request_id: str,
        target_device: torch.device | None = None,
        *,
        sender_info: Mapping[Any, Any] | None = None,
    ) -> tuple[dict[str, Any] | None, int]:
        """Wait for the KV of a request, until `recv_timeout`.

        Args:
            request_id: as the sender calls it.
            target_device: where its tensors are wanted; by default they stay where they arrived.
            sender_info: the sender of this request alone, as `update_sender_info` takes it. If it
                names none, nothing is received.

        Returns:
            request_id, layer_blocks, block_ids and metadata in a dict, and the bytes received;
            (None, 0) if it did not come in time, came damaged, this stage does not receive, or the
            request is one of a warm-up run; at once where waiting would not help, because the
            settings are wrong, the sender refuses, or this manager is closed.
        """
        if not self.config.need_recv_cache or _is_dummy(request_id):
            logger.debug("request %s: no KV cache is to be received", request_id)
            return None, 0
        given: Received | None = getattr(self._given, "received", None)
        if given is not None:
            data, size = given.get(request_id, (None, 0))
            return (None if data is None else place(data, target_device)), size
        try:
            sender = None
            if sender_info is not None:
                sender = find_sender(sender_info, str(self.recv_stages[0]))
            with self._link.asking(sender):
                found = self._receive(request_id)
                if found is None:
                    return None, 0
                data, parts = found
                data = place(data, target_device)
                logger.info("KV cache of request %s received: %d bytes", request_id, parts.size)
                self._link.use(parts.sendings)
                return data, parts.size
        except Exception:
            # Hooks and connectors may raise anything; the stage goes on without this KV.
            logger.exception("KV cache of request %s cannot be used", request_id)
            return None, 0

    def apply_kv_cache_to_request(self, req: Any, data: dict[str, Any]) -> None:
        """Set a received KV cache on a request.

        Args:
            req: gets `past_key_values`, an object with `key_cache` and `value_cache`, and
                `kv_metadata`; and so do its `sampling_params`.
            data: what `receive_kv_cache_for_request` returned.
        """
        received: dict[str, Any] = {}
        if "layer_blocks" in data:
            received["past_key_values"] = SimpleNamespace(**data["layer_blocks"])
        if "metadata" in data:
            received["kv_metadata"] = data["metadata"]
        params = getattr(req, "sampling_params", None)
        for owner in [req] if params is None else [req, params]:
            for name, value in received.items():
                setattr(owner, name, value)

    def receive_kv_cache(self, req: Any, target_device: torch.device | None = None) -> bool:
        """Wait for the KV of a request and set it on the request.

        Args:
            req: has a `request_id`, and perhaps a `kv_sender_info` in the form that
                `update_sender_info` takes: the sender of this request alone. One that names no host
                and port is logged and ignored.
            target_device: as `receive_kv_cache_for_request`.

        Returns:
            Whether it came.
        """
        request_id = getattr(req, "request_id", None)
        if not request_id:
            logger.warning("The request has no id, so no KV cache can be received for it")
            return False
        with self._link.asking(self._sender_of(req)):
            data, _ = self.receive_kv_cache_for_request(request_id, target_device)
        if data is None:
            return False
        self.apply_kv_cache_to_request(req, data)
        return True

    def receive_multi_kv_cache(
        self,
        req: Any,
        cfg_kv_collect_func: CollectFunction | None = None,
        target_device: torch.device | None = None,
    ) -> bool:
        """As `receive_kv_cache`; then collect the companions of classifier-free guidance.

        Args:
            req: its `sampling_params` may have `cfg_kv_request_ids`.
            cfg_kv_collect_func: called with the request id, those ids, this manager and the
                device; what it returns is set on the `sampling_params` by name. What it receives
                on this thread comes from the request's sender. If it raises, the log says so.
            target_device: as `receive_kv_cache_for_request`.

        Returns:
            Whether the request's own KV came. Companions are collected also if it did not.
        """
        came = self.receive_kv_cache(req, target_device)
        companions = _companions_of(req)
        if companions and cfg_kv_collect_func is not None:
            try:
                with self._link.asking(self._sender_of(req, warn=False)):
                    collected = cfg_kv_collect_func(req.request_id, companions, self, target_device)
                for name, value in (collected or {}).items():
                    setattr(req.sampling_params, name, value)
            except Exception:
                # The function is the model's, and may raise anything.
                logger.exception("companions of request %s were not collected", req.request_id)
        return came

    def receive_multi_kv_cache_distributed(
        self,
        req: Any,
        cfg_kv_collect_func: CollectFunction | None = None,
        target_device: torch.device | None = None,
    ) -> bool:
        """`receive_multi_kv_cache` on all ranks of this stage; each rank calls it.

        Without tensor parallelism rank 0 receives, and gives what it got to the other ranks. With
        tensor parallelism each rank receives for itself; but where ranks of the same
        tensor-parallel rank share the branches of classifier-free guidance or a sequence, the first
        of them receives, and gives everything to the rest. Tensor-parallel ranks that receive agree
        before any rank uses it: unless the same came to all of them, none does.

        Args:
            req: as `receive_multi_kv_cache`.
            cfg_kv_collect_func: as `receive_multi_kv_cache`; called on each rank. It gets what was
                received for the request and for its `cfg_kv_request_ids`, and of other ids nothing.
            target_device: where the tensors are wanted, on each rank.

        Returns:
            Whether the request's own KV came. It is the same on all ranks.

        Raises:
            RuntimeError: a rank died, or did not call this in the time-out of its group. Nothing
                was set on the request.
        """
        request_id: str = getattr(req, "request_id", None) or ""
        idle = not self.config.need_recv_cache or not request_id or _is_dummy(request_id)
        ranks = Ranks() if idle else Ranks.find(self._topology)
        if ranks.alone:
            return self.receive_multi_kv_cache(req, cfg_kv_collect_func, target_device)
        names = [request_id]
        if cfg_kv_collect_func is not None:
            names += (_companions_of(req) or {}).values()
        received: Received | None = None
        if ranks.receives:
            with self._link.asking(self._sender_of(req, warn=False)):
                found = {name: self.receive_kv_cache_for_request(name) for name in names}
            received = {name: (kv, size) for name, (kv, size) in found.items() if kv is not None}
        self._given.received = ranks.exchange(received)
        try:
            return self.receive_multi_kv_cache(req, cfg_kv_collect_func, target_device)
        finally:
            self._given.received = None

    def wait_prefetch(self, timeout: float | None = None) -> bool:
        """True: no prefetch is under way. vLLM-Omni's worker asks for it before it pauses."""
        return True

    def update_sender_info(
        self, sender_info: dict[str, Any], sender_stage_id: str | int | None = None
    ) -> None:
        """Tell where the sender of requests is that do not name theirs (`kv_sender_info`).

        Args:
            sender_info: `host` and `zmq_port` of the sender's rank 0, or a dict of these by stage.
                Rank r connects to that port + 16 r. Anything else is logged and ignored. The
                connector's settings in `config` get it, too.
            sender_stage_id: which of the stages; by default the one this stage receives from.
        """
        role = (self.config.connector_config or {}).get("role")
        if not self.config.need_recv_cache and role != "receiver":
            return
        stage = self.recv_stages[0] if sender_stage_id is None else sender_stage_id
        try:
            self._link.update_sender(sender_info, str(stage))
        except ValueError as error:
            _warn_of_sender(sender_info, error)

    def cleanup(self, request_id: str) -> None:
        """Free what was sent for a request; the id is the one that the next stage knows."""
        self._link.cleanup(request_id)

    def close(self) -> None:
        """Close the connector, for good; what waits for KV gets none. Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @cached_property
    def _topology(self) -> Topology:
        config = self.config
        sizes = config.from_tp, config.to_tp
        if sizes == (1, 1):
            size = config.tp_size or local_size()
            sizes = size, size
        if sizes == (1, 1):
            return Topology(1, 1)
        return Topology(*sizes, local_rank() if config.tp_rank is None else config.tp_rank)

    def _resolve_sender_info(
        self, sender_info: Mapping[Any, Any], sender_stage_id: str | int | None = None
    ) -> dict[str, Any] | None:
        """`host` and `zmq_port` of a stage's sender. vLLM-Omni's runner calls this by its name."""
        stage = self.recv_stages[0] if sender_stage_id is None else sender_stage_id
        try:
            sender = find_sender(sender_info, str(stage))
        except ValueError as error:
            _warn_of_sender(sender_info, error)
            return None
        return {"host": sender.host, "zmq_port": sender.port}

    def _send_or_note(self, request_id: str, extract: Callable[[], KVCacheTransferData]) -> bool:
        try:
            self._send(extract())
        except Exception as error:
            # Hooks and connectors may raise anything; the other requests are sent all the same.
            logger.exception("KV cache of request %s was not sent", request_id)
            self.last_failures[request_id] = f"{type(error).__name__}: {error}"
            return False
        return True

    def _send(self, kv_data: KVCacheTransferData) -> None:
        """Put the part of a request's KV that each receiver uses."""
        stages = self._configured(
            self.send_stages, "omni_from_stage and omni_to_stage are not both configured"
        )
        topology = self._topology
        request_id = kv_data.request_id
        build_keys = self.kv_send_key_builder
        built = list(build_keys(request_id, *stages)) if build_keys is not None else []
        keys = built or topology.send_keys(request_id, *stages)
        mark_sending(kv_data)
        if topology.fan_in > 1 and self.config.num_kv_heads is not None:
            kv_data.metadata = contract.metadata_of(vars(kv_data)) | {
                "tp_kv_heads": {
                    "total": self.config.num_kv_heads,
                    "source_rank": topology.rank,
                    "from_tp": topology.from_tp,
                }
            }
        parts = [kv_data] * len(keys)
        # A hook's keys do not tell which rank each is for, so the receivers cut out their heads.
        if topology.fan_out > 1 and not built:
            whole = kv_data.to_dict()
            parts = [
                KVCacheTransferData(**slice_heads(whole, topology, target, "sender"))
                for target in topology.target_ranks()
            ]
        try:
            for key, part in zip(keys, parts, strict=True):
                self._link.put(stages, key, part, request_id)
        except OmniError:
            # Some receivers must not find their part where others never will.
            if len(keys) > 1:
                self._link.cleanup(request_id)
            raise

    def _sender_of(self, req: Any, *, warn: bool = True) -> Sender | None:
        info = getattr(req, "kv_sender_info", None)
        if not info or not self.config.need_recv_cache:
            return None
        try:
            return find_sender(info, str(self.recv_stages[0]))
        except ValueError as error:
            if warn:
                _warn_of_sender(info, error)
            return None

    def _receive(self, request_id: str) -> tuple[dict[str, Any], Parts] | None:
        """What this rank uses of a request's KV, and the parts that came; None if they did not."""
        stages = self._configured(
            self.recv_stages, "the stage to receive from, or this stage's id, is not configured"
        )
        topology = self._topology
        found = self._link.get_all(
            stages, self._receive_keys(request_id, stages), self.config.recv_timeout
        )
        if found is None:
            return None
        payloads = found.payloads
        for payload in payloads:
            check_tokens(payload)
            # A hook's keys may stand for another id at the sender.
            if self.kv_recv_key_builder is None and payload["request_id"] != request_id:
                raise ValueError(f"the payload is that of request {payload['request_id']!r}")
        data: Any = payloads[0]
        if len(payloads) > 1:
            if self.kv_payload_merger is not None:
                data = self.kv_payload_merger(payloads)
            else:
                data = merge_shards(payloads, topology, self.config.num_kv_heads)
        data = own_heads(data, topology, self.kv_payload_slicer)
        if any(contract.states_contract(payload) for payload in payloads):
            # Hooks may have left something out.
            contract.validate(data, payloads[0]["request_id"], required=True)
        return data, found

    def _receive_keys(self, request_id: str, stages: tuple[str, str]) -> list[ReceiveKey]:
        build_keys = self.kv_recv_key_builder
        topology = self._topology
        built = list(build_keys(request_id, *stages)) if build_keys is not None else []
        if not built:
            return topology.receive_keys(request_id, *stages)
        sources = [] if topology.single else topology.source_ranks()
        ranks = iter(sources if len(sources) == len(built) else [None] * len(built))
        return [(each, next(ranks)) if isinstance(each, str) else each for each in built]

    def _configured(
        self, stages: tuple[str, str] | tuple[None, None], missing: str
    ) -> tuple[str, str]:
        from_stage, to_stage = stages
        if from_stage is None or to_stage is None:
            raise ConfigError(missing)
        if not self._link.configured:
            raise ConfigError("no connector is configured")
        return from_stage, to_stage


def _warn_of_sender(info: object, error: ValueError) -> None:
    logger.warning("The sender info %r names no host and port to connect to: %s", info, error)


def _is_dummy(request_id: str) -> bool:
    return request_id == _DUMMY_ID or request_id.startswith(f"{_DUMMY_ID}/")


def _companions_of(req: Any) -> Mapping[str, str] | None:
    """The requests of the branches of classifier-free guidance, by branch."""
    params = getattr(req, "sampling_params", None)
    companions: Mapping[str, str] | None = getattr(params, "cfg_kv_request_ids", None)
    return companions
