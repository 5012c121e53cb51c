# SPDX-License-Identifier: Apache-2.0
"""The scheduler half: one authority over slots, hand-offs and loads of an engine.

It decides; the workers copy. Nothing here waits: claims are answered on the control thread,
copies are reported by the workers with each step.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.directory import SlotDirectory
from omni_connector.handoff.messages import TOKEN_BYTES, Welcome
from omni_connector.handoff.params import (
    BadParamsError,
    RemotePrefill,
    is_usable,
    parse_remote_prefill,
    tcp_address,
    wants_handoff,
    wants_remote_kv,
)
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.receiver import HandoffReceiver
from omni_connector.handoff.sender import HandoffSender
from omni_connector.handoff.server import ControlServer
from omni_connector.handoff.upkeep import Upkeep
from omni_connector.kv.ledger import CopyLedger
from omni_connector.net.keys import ClusterKey, load_key
from omni_connector.net.peers import Peers, parse_listen
from omni_connector.net.runtime import loopback_key, runtime_dir, socket_path
from omni_connector.prefix.shared_prefix import SharedPrefix
from omni_connector.vllm_v1.adapters import AdapterContents
from omni_connector.vllm_v1.compat import hash_block_size, recompute
from omni_connector.vllm_v1.epoch import WeightsEpoch
from omni_connector.vllm_v1.identity import fingerprint, hash_id, prompt_of
from omni_connector.vllm_v1.metadata import (
    OmniConnectorMetadata,
    OmniHandshakeMetadata,
    OmniWorkerMetadata,
)
from omni_connector.vllm_v1.metrics import COUNTERS, OmniStats
from omni_connector.vllm_v1.sharing import open_shared_prefix
from omni_connector.vllm_v1.specs import fails_by_block, keeps_all, transferred_groups
from omni_connector.vllm_v1.surroundings import SURROUNDINGS, Surroundings
from omni_connector.vllm_v1.truncation import TRUNCATED, truncate, truncation_refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.omni_connector.scheduler")


class OmniScheduler:
    """The part of the connector that lives beside vLLM's scheduler.

    Args:
        config: the connector's settings.
        vllm_config: vLLM's.
        kv_cache_config: what vLLM allocates.
        surroundings: clock, randomness and threads.
    """

    def __init__(
        self,
        config: OmniConfig,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        surroundings: Surroundings = SURROUNDINGS,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._surroundings = surroundings
        self._clock = surroundings.clock
        self._engine_id: str = transfer.engine_id
        self._produces = transfer.is_kv_producer
        self._consumes = transfer.is_kv_consumer
        groups = transferred_groups(kv_cache_config)
        self._group_ids = tuple(groups)
        self._hash_block_size = hash_block_size(vllm_config, kv_cache_config)
        self._fails_by_block = fails_by_block(kv_cache_config)
        # Of what is kept for the last tokens only, a prefill must end where the decode begins.
        self._stops_early = not keeps_all(kv_cache_config)
        self._epoch = surroundings.randbytes(TOKEN_BYTES)
        self._stats = OmniStats()
        self._manager: KVCacheManager | None = None
        self._directory: SlotDirectory | None = None
        self._channel: ControlChannel | None = None
        self._sender: HandoffSender | None = None
        self._receiver: HandoffReceiver | None = None
        self._ledger: CopyLedger | None = None
        self._weights: WeightsEpoch | None = None
        self._void: tuple[list[int], list[int]] = [], []
        self._shared: SharedPrefix | None = None
        self._runtime_dir = runtime_dir(config.namespace)
        self._peers = Peers(config.peers)
        self._key: ClusterKey | None = None
        if config.key_file is not None:
            self._key = load_key(config.key_file)
        self._upkeep = Upkeep(self._runtime_dir, self._clock)
        self._adapters = AdapterContents(self._clock, surroundings.start)
        self._gauges: tuple[int, int, int] | None = None

    def bind_kv_cache_manager(self, manager: "KVCacheManager") -> None:
        """Remember where the block ids of running requests are."""
        self._manager = manager

    def start(self, workers: Mapping[tuple[int, int], OmniHandshakeMetadata]) -> None:
        """The workers have registered their caches: open the control channel.

        Args:
            workers: by (pipeline rank, tensor rank).

        Raises:
            ConfigError: the ranks disagree.
        """
        ranks = [workers[key] for key in sorted(workers)]
        if not ranks:
            raise ConfigError(
                "no worker of OmniKVConnector has introduced itself; MultiConnector passes on the "
                "word of one child only, so OmniKVConnector must be its first that has one"
            )
        if len({(rank.page_orders, rank.attention) for rank in ranks}) != 1:
            raise ConfigError("the ranks of this engine have KV caches of different layouts")
        ours = fingerprint(
            self._config, self._vllm_config, self._kv_cache_config, ranks, self._epoch
        )
        hashing = hash_id(self._vllm_config, self._hash_block_size)
        arenas = tuple(rank.endpoints for rank in ranks if rank.endpoints)
        assert self._manager is not None
        self._weights = weights = WeightsEpoch(self._manager.block_pool)
        self._ledger = ledger = CopyLedger(self._manager.block_pool, ours.ranks, self._clock)
        self._upkeep.sweep()
        server = None
        if self._produces:
            if len(arenas) != ours.ranks:
                raise ConfigError("a rank of this engine has no arena")
            num_slots = min(endpoints[0].n_slots for endpoints in arenas)
            self._directory = SlotDirectory(
                num_slots, self._clock, self._config.handoff_ttl_s, self._surroundings.randbytes
            )
            self._upkeep.keep(self._directory, weights.holds)
            server = ControlServer(
                fingerprint=ours,
                welcome=Welcome(self._epoch, hashing, ours, arenas),
                directory=self._directory,
                valid=weights.holds,
                clock=self._clock,
                patience=self._config.handoff_ttl_s,
                count=self._upkeep.count,
            )
        config, rank = self._config, self._vllm_config.parallel_config.data_parallel_index
        channel = ControlChannel(
            fingerprint=ours,
            server=server,
            listen=self._control_path(self._engine_id) if server is not None else None,
            listen_tcp=None if config.listen is None else parse_listen(config.listen, rank),
            key=self._key or (loopback_key() if config.listen or config.peers else None),
            on_tick=self._upkeep.tick,
            on_peer_gone=self._upkeep.sweep,
            clock=self._clock,
            start=self._surroundings.start,
            sockets=self._surroundings.sockets(),
        )
        self._channel = self._upkeep.channel = channel
        if self._directory is not None:
            self._sender = HandoffSender(
                directory=self._directory,
                ledger=ledger,
                fingerprint=ours,
                group_ids=self._group_ids,
                engine_id=self._engine_id,
                epoch=self._epoch,
                address=channel.tcp_address,
                arena_wait=self._config.arena_wait_s,
                clock=self._clock,
                stats=self._stats,
                on_complete=channel.recheck,
            )
        if self._consumes:
            self._receiver = HandoffReceiver(
                channel=channel,
                ledger=ledger,
                address_of=self._address_of,
                fingerprint=ours,
                group_ids=self._group_ids,
                hash_id=hashing,
                load_timeout=self._config.load_timeout_s,
                clock=self._clock,
                stats=self._stats,
            )
        self._shared = open_shared_prefix(
            self._config,
            self._vllm_config,
            self._kv_cache_config,
            ledger=ledger,
            fingerprint=ours,
            group_ids=self._group_ids,
            surroundings=self._surroundings,
            stats=self._stats,
        )

    def _control_path(self, engine_id: str) -> Any:
        return socket_path(self._runtime_dir, f"control:{engine_id}")

    def _address_of(self, remote: RemotePrefill) -> str:
        path = self._control_path(remote.remote_engine_id)
        # Who listens in this folder is an engine of this user on this host.
        if remote.remote_host is None or path.exists():
            return f"ipc://{path}"
        return f"tcp://{tcp_address(remote, self._peers, has_key=self._key is not None)}"

    def _take_events(self) -> None:
        for event, number in self._upkeep.take().items():
            if event in COUNTERS:
                self._stats.count(event, number)
            else:
                self._stats.fail(event, number)

    def _follow_weights(self) -> None:
        if self._weights is not None and not self._weights.holds():
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Whatever was computed so far is void, here and at those who are reading it."""
        assert self._weights is not None
        self._weights.begin()
        if self._sender is not None and self._directory is not None:
            slots, generations = self._sender.void()
            self._void[0].extend(slots)
            self._void[1].extend(generations)
        if self._receiver is not None:
            self._receiver.void()
        if self._shared is not None:
            self._shared.void()

    def on_new_request(self, request: "Request") -> None:
        """A request was added: ask for its KV elsewhere, or prepare to hand it off."""
        self._follow_weights()
        self._check_params(request)
        if not (request.kv_transfer_params or self._shared is not None):
            return
        if not self._adapters.arrives(request):
            self._begin(request)

    def _begin(self, request: "Request") -> None:
        epoch = 0 if self._weights is None else self._weights.number
        adapter = self._adapters.content(request, epoch, self._stats)
        if adapter is None:
            if wants_handoff(request.kv_transfer_params or {}) and self._sender is not None:
                self._sender.add(request, Prompt(token_ids=(), num_tokens=0), "adapter_unknown")
            return
        self._follow_params(request, adapter)
        if self._shared is not None and not request.resumable:  # a session's tokens may change
            truncated = bool(request.kv_transfer_params) and self._stops_early
            self._shared.add(request, stops_early=truncated, adapter=adapter)

    def _check_params(self, request: "Request") -> None:
        params = request.kv_transfer_params
        if params is not None and not is_usable(params):
            self._stats.fail("malformed_params")
            logger.warning(
                "Request %s is served without hand-off: its kv_transfer_params are no object, or "
                "their do_remote_decode is no boolean (malformed_params)",
                request.request_id,
            )
            # vLLM, too, takes them for an object, and would stop at anything else.
            request.kv_transfer_params = None

    def _follow_params(self, request: "Request", adapter: str) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        if wants_remote_kv(params) and self._receiver is not None:
            self._fetch(request, params, adapter)
        if wants_handoff(params) and self._sender is not None:
            self._offer(request, params, adapter)

    def _fetch(self, request: "Request", params: Mapping[str, Any], adapter: str) -> None:
        assert self._receiver is not None
        try:
            remote = parse_remote_prefill(params)
            # vLLM computes the last token here in any case, for its logits.
            num_tokens = request.num_prompt_tokens - 1
            prompt = prompt_of(request, num_tokens, self._hash_block_size, adapter)
            if prompt is None:
                raise BadParamsError("prompt_embeds", "the prompt has no token ids")
            if prompt.num_tokens > 0:
                self._receiver.add(request, remote, prompt)
            else:
                # No prompt of one token is handed off: it is that which vLLM puts in the place of
                # one that its server has refused.
                self._receiver.reject(remote)
        except BadParamsError as error:
            self._stats.fail(error.reason)
            logger.warning(
                "Request %s computes its prompt here: kv_transfer_params not used (%s: %s)",
                request.request_id,
                error.reason,
                error,
            )

    def _offer(self, request: "Request", params: Mapping[str, Any], adapter: str) -> None:
        assert self._sender is not None
        truncated = params.get(TRUNCATED) is True  # by another connector beside this one
        num_tokens = request.num_prompt_tokens - (not truncated)
        prompt = prompt_of(request, num_tokens, self._hash_block_size, adapter)
        if prompt is None:
            self._stats.fail("prompt_embeds")
            logger.warning(
                "Request %s is not handed off: its prompt has no token ids", request.request_id
            )
            return
        if num_tokens < 1:
            self._sender.add(request, prompt, refusal="nothing_to_hand_off")
            return
        refusal = "control_ended" if self._upkeep.ended() else None
        if request.resumable:  # it goes on writing, and a state is overwritten in place
            refusal = "resumable"
        elif refusal is None and self._stops_early and not truncated:
            refusal = truncation_refusal(request, num_tokens)
            if refusal is None:
                truncate(request, params)
        if refusal is not None:
            self._stats.fail(refusal)
            logger.warning("Request %s is not handed off (%s)", request.request_id, refusal)
        self._sender.add(request, prompt, refusal)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed: int
    ) -> tuple[int | None, bool]:
        """vLLM's question, answered at once; see `KVConnectorBase_V1`."""
        self._follow_weights()
        if self._adapters.waits(request):
            return None, False
        if self._adapters.goes_on(request.request_id):
            self._begin(request)
            return None, False  # it may be shorter now: vLLM looks at it anew
        matched: int | None = 0
        if request.kv_transfer_params:
            request_id = request.request_id
            if (
                self._sender is not None
                and not self._sender.may_schedule(request_id)
                and not self._upkeep.ended()
            ):
                return None, False
            if self._receiver is not None:
                matched = self._receiver.matched_tokens(request_id, num_computed)
        if matched == 0 and self._shared is not None:
            matched = self._shared.matched_tokens(request, num_computed)
        return matched, bool(matched)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external: int
    ) -> None:
        """Blocks were allocated; `num_external` of their tokens are ours to load."""
        shared = self._shared
        from_store = shared is not None and shared.offers(request.request_id)
        if self._receiver is not None and request.kv_transfer_params:
            self._receiver.allocated(request, blocks, 0 if from_store else num_external)
        if shared is not None:
            shared.allocated(request, blocks, num_external if from_store else 0)

    def build_meta(self, scheduler_output: "SchedulerOutput") -> OmniConnectorMetadata:
        """This step's work for the workers."""
        meta = OmniConnectorMetadata()
        self._upkeep.ended()
        self._follow_weights()
        if self._void[0]:
            meta.void, self._void = self._void, ([], [])
        if self._sender is not None:
            assert self._manager is not None
            self._sender.build(meta, scheduler_output, self._manager.get_blocks)
        if self._receiver is not None:
            computes = scheduler_output.total_num_scheduled_tokens > 0
            self._receiver.build(meta, computes=computes)
        if self._shared is not None:
            assert self._manager is not None
            self._shared.build(meta, scheduler_output, self._manager)
        if self._ledger is not None:
            meta.cancel.extend(self._ledger.take_revoked())
        return meta

    def update_output(self, output: "KVConnectorOutput") -> None:
        """Take the workers' reports."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, OmniWorkerMetadata):
            return
        assert self._ledger is not None
        assert self._manager is not None
        self._follow_weights()
        self._ledger.report(report.done, report.failed)
        for request in self._receiver.take_void() if self._receiver is not None else ():
            # It has come, but of other weights than it will be read with.
            recompute(request, self._manager)
        for request in self._receiver.take_failed() if self._receiver is not None else ():
            if self._shared is not None:
                self._shared.load_nothing(request.request_id)
            if not self._fails_by_block and request.request_id not in output.failed_recving:
                logger.warning(
                    "Request %s computes its prompt here: its load failed, and the model "
                    "runner does not pass on failed loads",
                    request.request_id,
                )
                recompute(request, self._manager)
        for request in self._shared.take_failed() if self._shared is not None else ():
            # Told to vLLM, a failed load could end the request: its policy is for hand-offs.
            recompute(request, self._manager)

    def step_ended(self) -> None:
        """vLLM has taken what a step has computed."""
        if self._receiver is not None:
            self._receiver.step_ended()

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """The request is over, in whatever way; see `SupportsHMA`."""
        self._follow_weights()
        self._adapters.goes_on(request.request_id)
        if self._shared is not None:
            self._shared.finish(request.request_id)
        if not request.kv_transfer_params:
            return False, None
        if self._receiver is not None:
            self._receiver.finish(request.request_id)
        if self._sender is None:
            return False, None
        return False, self._sender.finish(request)

    def copying(self) -> bool:
        """Whether blocks are held, until a later step, that no request need hold."""
        return bool(self._ledger)

    def frees_soon(self) -> bool:
        """Whether blocks come free so soon that nobody should be preempted for some."""
        return self._ledger is not None and self._ledger.frees_soon()

    def reset_cache(self) -> bool:
        """Void whatever was computed before, as after a change of weights."""
        if self._weights is not None:
            self._begin_epoch()
        return True

    def take_stats(self) -> OmniStats | None:
        """What was counted since the last call; None when nothing changed."""
        stats = self._stats
        self._take_events()
        if self._shared is not None:
            self._shared.count_failures()
        if self._directory is not None:
            gauges = self._directory.usage()
            if gauges != self._gauges:
                self._gauges = gauges
                held, cached, leases = gauges
                stats.gauge("slots_in_use", held)
                stats.gauge("slots_cached", cached)
                stats.gauge("leases", leases)
                stats.gauge("slots_total", self._directory.num_slots)
        if stats.is_empty():
            return None
        taken = OmniStats()
        taken.data, stats.data = stats.data, taken.data
        return taken

    def close(self) -> None:
        """Stop the control channel, the lookups, and the reading of adapters. Idempotent."""
        self._adapters.close()
        if self._shared is not None:
            self._shared.close()
        if self._channel is not None:
            self._channel.close()
