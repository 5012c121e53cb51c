# SPDX-License-Identifier: Apache-2.0
"""Makes both halves of an engine's connector from the configurations: ours and vLLM's.

The worker half is made with the connector of its rank. The scheduler half is made when the workers
have registered their KV caches, because what it consists of depends on what they say.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import eq, mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from omni_connector.arena.block_index import BlockIndex
from omni_connector.arena.format import EPOCH_BYTES
from omni_connector.arena.memory_claims import deployment_id
from omni_connector.arena.size import ArenaSizing
from omni_connector.arena.slot_index import SlotChanges
from omni_connector.arena.slot_pool import SlotListing
from omni_connector.config import OmniConfig
from omni_connector.copy.held_blocks import CopyLedger
from omni_connector.errors import ConfigError
from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import TOKEN_BYTES, HandshakeReply
from omni_connector.handoff.params import BadParamsError, RemotePrefill, tcp_address
from omni_connector.handoff.periodic_tasks import PeriodicTasks
from omni_connector.handoff.prompt import Prompt, PromptRules
from omni_connector.handoff.receiver import HandoffReceiver
from omni_connector.handoff.sender import HandoffSender
from omni_connector.handoff.server import ControlServer
from omni_connector.handoff.serving import ServingState, roles_of
from omni_connector.identity.epochs import WeightsEpoch
from omni_connector.identity.full_digest import WeightFilesDigest
from omni_connector.identity.weight_files import process_began
from omni_connector.kv.numerics import digest
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.keys import load_key
from omni_connector.net.orders import Orders
from omni_connector.net.peers import Peers, parse_listen
from omni_connector.net.runtime import is_dead, loopback_key, runtime_dir, socket_path, tidy
from omni_connector.net.status import EngineStatus, StatusReport, Usage
from omni_connector.plugin import require_supported_vllm
from omni_connector.prefix.explainer import ExplainedEngine
from omni_connector.prefix.host_blocks import HostBlocks, touch
from omni_connector.prefix.key_prefix import KeyPrefix
from omni_connector.prefix.loads import PrefixLoads
from omni_connector.prefix.lookups import StoreLookups
from omni_connector.prefix.neighbours import LocalEngine
from omni_connector.prefix.prompts import SharedGroups
from omni_connector.prefix.saves import PrefixSaves
from omni_connector.prefix.shared_prefix import SharedPrefix
from omni_connector.prefix.tails import Tails, keeps_tails
from omni_connector.prefix.thinking import ThinkingTokens
from omni_connector.requests.state import Requests
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.metric_names import COUNTERS
from omni_connector.runtime.trace import FileTrace
from omni_connector.stores.block_store import BlockStore
from omni_connector.stores.shared_blocks import key_prefix, reader_traits, readers_id
from omni_connector.vllm_v1.compat import (
    hash_block_size,
    most_blocks_of_a_prompt,
    thinking_tokens,
)
from omni_connector.vllm_v1.drafter import drafts_with_kv, tokens_ahead, tokens_written_ahead
from omni_connector.vllm_v1.events import KVEvents
from omni_connector.vllm_v1.identity import compatibility, configuration_id, hash_id
from omni_connector.vllm_v1.load_room import LoadRoom
from omni_connector.vllm_v1.metadata import (
    OmniHandshakeMetadata,
    num_local_workers,
    num_near_ranks,
    num_workers,
)
from omni_connector.vllm_v1.metrics import OmniStats
from omni_connector.vllm_v1.patches import local_engines
from omni_connector.vllm_v1.rank_arena import ArenaPlan
from omni_connector.vllm_v1.requests import prompt_of, token_hasher
from omni_connector.vllm_v1.scheduler import OmniScheduler
from omni_connector.vllm_v1.scheduler_report import SchedulerReport
from omni_connector.vllm_v1.specs import (
    attends_to_all,
    cached_block_sizes,
    fails_by_block,
    replay,
    state_block_size,
    state_refusal,
    transferred_groups,
)
from omni_connector.vllm_v1.surroundings import Surroundings
from omni_connector.vllm_v1.undrafted import DraftedGroup, UndraftedBlocks
from omni_connector.vllm_v1.worker import OmniWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.omni_connector.sharing")


def make_worker(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    surroundings: Surroundings,
) -> OmniWorker:
    """The worker half of one rank.

    Raises:
        ConfigError: a setting of a transport is wrong.
        MissingDependencyError: Mooncake is needed and not installed.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    ranks = num_workers(vllm_config)
    rank = parallel.rank % ranks
    shares = config.share and _sharing_refusal(vllm_config, kv_cache_config) is None
    answer = partial(
        surroundings.answer_for_rank, runtime_dir(config.namespace), str(transfer.engine_id), rank
    )
    transports = surroundings.transports(config, config.handoff and transfer.is_kv_producer)
    stats = OmniStats()
    context = _context(config, transfer.engine_id, f"worker{rank}", surroundings, stats)
    arena: ArenaPlan | None = None
    if _has_arena(config, vllm_config, kv_cache_config):
        arena = ArenaPlan(
            sizing=_arena_sizing(config, vllm_config, kv_cache_config),
            name=f"arena:{transfer.engine_id}:{rank}",
            transports=transports,
            rank=rank,
            ranks=ranks,
            near_ranks=num_near_ranks(vllm_config),
            divides=not _publishes_events(vllm_config),
            context=context,
            prefault=surroundings.prefault,
        )
    return OmniWorker(
        config=config,
        kv_cache_config=kv_cache_config,
        layers=vllm_config.compilation_config.static_forward_context,
        transports=transports,
        rank=rank,
        stage_ranks=parallel.tensor_parallel_size,
        local_ranks=num_local_workers(vllm_config),
        arena=arena,
        answer=answer,
        shares=shares,
        store=_lending_store(config, vllm_config, kv_cache_config, surroundings),
        context=context,
        stats=stats,
        surroundings=surroundings,
        weights=partial(surroundings.read_weights, vllm_config),
        head_copies=partial(surroundings.head_copies, vllm_config),
        adapters=surroundings.adapter_loads(vllm_config),
        drafts=drafts_with_kv(vllm_config),
    )


def make_scheduler(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    *,
    workers: Mapping[tuple[int, int], OmniHandshakeMetadata],
    manager: "KVCacheManager",
    surroundings: Surroundings,
    alone: bool,
) -> OmniScheduler:
    """The scheduler half, with its control channel open.

    Args:
        workers: what the ranks say of their caches, by (pipeline rank, tensor rank).
        manager: knows the block ids of running requests.
        alone: whether this is the only connector of the engine.

    Raises:
        ConfigError: the ranks disagree, or a setting is wrong.
        TransportError: another engine listens at this engine's socket.
        MissingDependencyError: Mooncake is needed and not installed.
    """
    return _Assembly(
        config,
        vllm_config,
        kv_cache_config,
        _agreeing(workers, vllm_config),
        manager,
        surroundings,
    ).scheduler(alone=alone)


class _Assembly:
    """What the parts of a scheduler half have in common, and how each is made of it."""

    def __init__(
        self,
        config: OmniConfig,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        ranks: list[OmniHandshakeMetadata],
        manager: "KVCacheManager",
        surroundings: Surroundings,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        assert transfer.engine_id is not None
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._transfer = transfer
        self._engine_id: str = transfer.engine_id
        self._manager = manager
        self._surroundings = surroundings
        self._stats = OmniStats()
        self._context = _context(config, self._engine_id, "scheduler", surroundings, self._stats)
        self._epoch = self._context.randbytes(TOKEN_BYTES)
        self._arenas = tuple(rank.endpoints for rank in ranks if rank.endpoints)
        self._slots = [endpoints[0].n_slots for endpoints in self._arenas]
        weights = surroundings.weights_id(config, vllm_config)
        drafter = surroundings.drafter_of(vllm_config)
        self._ours = compatibility(config, vllm_config, ranks, weights, drafter)
        # Who can read each other's slots has the same configuration; whose keys are the same, has
        # the same weights, too.
        self._configuration = digest([config.model_id or "", configuration_id(vllm_config)])
        self._shared_with = msgspec.structs.replace(
            self._ours, model=config.model_id or "", weights=self._configuration
        )
        self._group_ids = tuple(transferred_groups(kv_cache_config))
        self._hash_block_size = hash_block_size(vllm_config, kv_cache_config)
        self._hash_id = hash_id(vllm_config, self._hash_block_size)
        self._weights = WeightsEpoch(
            manager.block_pool,
            self._ours.num_arenas,
            self._context.clock,
            fixed=config.weights == "fixed",
            named=config.model_id is not None,
            said=surroundings.weights_said(manager),
        )
        self._ledger = CopyLedger(manager.block_pool, self._ours.num_arenas, self._context.clock)
        self._folder = runtime_dir(config.namespace)
        self._peers = Peers(config.peers)
        self._key = None if config.key_file is None else load_key(config.key_file)
        with_arena = _has_arena(config, vllm_config, kv_cache_config)
        self._directory = self._new_directory() if with_arena else None
        roles = roles_of(str(transfer.kv_role), handoff=config.handoff)
        self._requests = Requests()
        self._serving = ServingState(roles, self._context, self._requests)
        self._status = self._new_status()
        self._periodic_tasks = PeriodicTasks(
            self._folder,
            self._context,
            self._directory,
            self._status.tick,
        )
        self._events = self._kv_events() if _publishes_events(vllm_config) else None

    def scheduler(self, *, alone: bool) -> OmniScheduler:
        """Make the half. If that fails, nothing is left open."""
        tidy(self._folder)
        directory = self._directory
        offered = directory if self._config.handoff and self._transfer.is_kv_producer else None
        receives = self._config.handoff and self._transfer.is_kv_consumer
        channel = self._channel(None if offered is None else self._server(offered))
        self._periodic_tasks.channel = channel
        try:
            shared = self._shared_prefix(alone)
        except BaseException:
            channel.close()
            self._status.close()
            raise
        sender = None if offered is None else self._sender(offered, channel, alone=alone)
        receiver = self._receiver(channel) if receives else None
        return OmniScheduler(
            self._vllm_config,
            self._kv_cache_config,
            manager=self._manager,
            context=self._context,
            weights=self._weights,
            ledger=self._ledger,
            room=LoadRoom(
                self._manager.block_pool,
                self._ours.groups,
                most_blocks_of_a_prompt(self._manager, self._group_ids),
                self._vllm_config.num_speculative_tokens,
                tokens_written_ahead(self._vllm_config),
            ),
            periodic_tasks=self._periodic_tasks,
            channel=channel,
            directory=directory,
            products=tuple(each for each in (sender, receiver, shared) if each is not None),
            shared=shared,
            incomplete={} if receiver is None else receiver.incomplete,
            weight_files=self._weight_files(channel),
            events=self._events,
            report=SchedulerReport(
                self._stats,
                self._periodic_tasks,
                directory,
                self._status,
                self._serving,
                self._context.clock,
            ),
            requests=self._requests,
            serving=self._serving,
            undrafted=UndraftedBlocks(self._drafted_groups()),
            spoiled=UndraftedBlocks(
                list(map(self._lacking_group, self._group_ids, self._ours.groups))
            ),
            alone=alone,
        )

    def _lacking_group(self, number: int, shape: GroupShape) -> DraftedGroup:
        loses_blocks = shape.attention_type != "all"
        return DraftedGroup(number, shape.block_size, self._hash_block_size, loses_blocks)

    def _drafted_groups(self) -> list[DraftedGroup]:
        """The groups with layers of the drafter."""
        layers = set(self._ours.drafter_layers or ())
        by_group = zip(*self._ours.stages, strict=True)
        return [
            self._lacking_group(number, stages[0])
            for number, stages in zip(self._group_ids, by_group, strict=True)
            if not layers.isdisjoint(name for shape in stages for name in shape.names or ())
        ]

    def _new_directory(self) -> SlotDirectory:
        if len(self._arenas) != self._ours.num_arenas:
            raise ConfigError(
                f"only {len(self._arenas)} of the {self._ours.num_arenas} ranks have an arena; the "
                "logs of the others say why"
            )
        return SlotDirectory(
            min(map(mul, self._slots, self._ours.stripes_by_arena)),
            self._context,
            self._config.handoff_ttl_s,
            self._ours.slot_groups,
        )

    def _new_status(self) -> StatusReport:
        endpoints = [each[0] for each in self._arenas]
        return StatusReport(
            self._surroundings.status_file(self._folder),
            EngineStatus(
                engine_id=self._engine_id,
                role=str(self._transfer.kv_role),
                model=self._ours.model,
                vllm=require_supported_vllm().version,
                ranks=self._ours.num_arenas,
                arena_bytes=sum(each.n_slots * each.slot_bytes for each in endpoints),
                loopback_key=self._config.needs_loopback_key,
                counts=dict.fromkeys(COUNTERS, 0),
            ),
            Usage if self._directory is None else self._directory.status,
            self._context,
            self._serving.service,
            self._obey,
        )

    def _obey(self, orders: Orders) -> None:
        if self._serving.follow(orders):
            self._periodic_tasks.count("bad_order")

    def _server(self, directory: SlotDirectory) -> ControlServer:
        return ControlServer(
            compatibility=self._ours,
            handshake_reply=HandshakeReply(self._epoch, self._hash_id, self._ours, self._arenas),
            directory=directory,
            valid=self._weights.holds,
            weights=lambda: self._weights.name,
            clock=self._context.clock,
            pending_timeout=self._config.handoff_ttl_s,
            count=self._periodic_tasks.count,
        )

    def _channel(self, server: ControlServer | None) -> ControlChannel:
        listen = self._config.listen
        rank = self._vllm_config.parallel_config.data_parallel_index
        return ControlChannel(
            compatibility=self._ours,
            server=server,
            listen=None if server is None else self._control_path(self._engine_id),
            listen_tcp=None if listen is None else parse_listen(listen, rank),
            key=loopback_key() if self._config.needs_loopback_key else self._key,
            on_tick=self._periodic_tasks.tick,
            rests=lambda: self._periodic_tasks.rests,
            on_peer_gone=partial(tidy, self._folder),
            context=self._context,
            sockets=self._surroundings.sockets(),
        )

    def _weight_files(self, channel: ControlChannel) -> WeightFilesDigest | None:
        """Makes the digest of the weights' files, which peers compare from then on."""
        find = self._surroundings.weight_files
        if find is None or not self._config.handoff:
            return None
        return WeightFilesDigest(
            find=partial(find, self._config, self._vllm_config),
            unchanged_since=process_began,
            tell=lambda digest: channel.learn(weight_files=digest),
            context=self._context,
        )

    def _rules(self) -> PromptRules:
        size, dtype = self._hash_block_size, self._vllm_config.model_config.dtype

        def prompt(request: Any, num_tokens: int, adapter: str, ahead: int) -> Prompt | None:
            return prompt_of(request, num_tokens, size, dtype, adapter, ahead)

        return PromptRules(
            prompt,
            tokens_ahead(self._vllm_config),
            stops_early=not attends_to_all(self._kv_cache_config),
            state_block=state_block_size(self._kv_cache_config),
        )

    def _sender(
        self, directory: SlotDirectory, channel: ControlChannel, *, alone: bool
    ) -> HandoffSender:
        return HandoffSender(
            rules=self._rules(),
            alone=alone,
            ended=self._periodic_tasks.ended,
            directory=directory,
            ledger=self._ledger,
            compatibility=self._ours,
            group_ids=self._group_ids,
            engine_id=self._engine_id,
            epoch=self._epoch,
            address=channel.tcp_address,
            arena_wait=self._config.arena_wait_s,
            context=self._context,
            on_complete=channel.recheck,
            weights_known=lambda: self._weights.known,
        )

    def _receiver(self, channel: ControlChannel) -> HandoffReceiver:
        return HandoffReceiver(
            rules=self._rules(),
            fails_by_block=fails_by_block(self._kv_cache_config),
            channel=channel,
            ledger=self._ledger,
            address_of=self._address_of,
            compatibility=self._ours,
            group_ids=self._group_ids,
            hash_id=self._hash_id,
            weights=lambda: self._weights.name,
            load_timeout=self._config.load_timeout_s,
            min_tokens=self._config.min_handoff_tokens,
            context=self._context,
        )

    def _control_path(self, engine_id: str) -> Path:
        return socket_path(self._folder, f"control:{engine_id}")

    def _address_of(self, remote: RemotePrefill) -> str:
        """Where to ask for a hand-off: at the Unix socket where there is one, else over TCP."""
        path = self._control_path(remote.remote_engine_id)
        # Whoever listens in this folder is an engine of this user on this host.
        near = path.exists()
        if remote.remote_host is None or (near and _listens(path)):
            return f"ipc://{path}"
        try:
            return f"tcp://{tcp_address(remote, self._peers, has_key=self._key is not None)}"
        except BadParamsError:
            if near:  # that an engine of this host has ended is the better error
                return f"ipc://{path}"
            raise

    def _shared_prefix(self, alone: bool) -> SharedPrefix | None:
        """The scheduler half of sharing; None if sharing is off, or cannot work."""
        config, surroundings = self._config, self._surroundings
        if config.store is None and not config.share:
            return None
        if refusal := _sharing_refusal(self._vllm_config, self._kv_cache_config):
            log = logger.info if config.store is None else logger.warning
            log("No prefix is shared: %s", refusal)
            return None
        prefix = KeyPrefix(self._key_prefixes, self._context.randbytes)
        groups = SharedGroups(
            self._ours.groups,
            self._group_ids,
            self._hash_block_size,
            tokens_ahead(self._vllm_config),
        )
        changes = None if self._events is None else self._events.changes
        lookups = None
        if config.store is not None:
            store = surroundings.block_store(config.store, 0)
            lookups = StoreLookups(store, self._ours.stages, self._ours.ranks, self._context)
        host = self._host_blocks(prefix.in_arenas)
        tails = None
        # With drafts a step leaves several states, of which none may be the one at its end.
        drafts = self._vllm_config.num_speculative_tokens > 0
        if keeps_tails(groups) and not drafts:
            tails = Tails(groups, host)
        shared = SharedPrefix(
            host=host,
            lookups=lookups,
            loads=PrefixLoads(
                host=host,
                lookups=lookups,
                ledger=self._ledger,
                groups=groups,
                prefix=prefix,
                timeout=config.load_timeout_s,
                stats=self._stats,
            ),
            saves=PrefixSaves(
                tokens_a_step=1 + self._vllm_config.num_speculative_tokens,
                prefix=prefix,
                host=host,
                stores=lookups is not None,
                ledger=self._ledger,
                groups=groups,
                num_blocks=self._kv_cache_config.num_blocks,
                alone=alone,
                stages=self._vllm_config.parallel_config.pipeline_parallel_size,
                tails=tails,
                finds=self._finds,
                context=self._context,
                changes=changes,
            ),
            groups=groups,
            tails=tails,
            prefix=prefix,
            followed_hints=frozenset(config.hints),
            thinking=self._thinking_tokens(),
            lookup_timeout=0.0 if config.store is None else config.store.lookup_timeout_s,
            context=self._context,
            changes=changes,
            replay=replay(self._kv_cache_config),
        )
        if surroundings.explains:
            shared.explain(self._explained_engine(groups))
        return shared

    def _explained_engine(self, groups: SharedGroups) -> ExplainedEngine:
        return ExplainedEngine(
            folder=self._folder,
            engine_id=self._engine_id,
            compatibility=self._shared_with,
            hash_id=self._hash_id,
            name=self._ours.model,
            model=self._vllm_config.model_config,
            groups=groups,
            hash_tokens=token_hasher(self._vllm_config, self._hash_block_size),
            cached=self._manager.block_pool.get_cached_block,
            weights=self._weights,
            requests=self._requests,
        )

    def _key_prefixes(self, weights: str) -> tuple[str, str]:
        """The prefixes of keys in a store and in arenas, of all engines with these weights."""
        key = msgspec.structs.replace(
            self._ours, weights=digest([self._configuration, weights or "by model_id"])
        )
        name = partial(key_prefix, self._config.namespace, key, self._hash_id)
        return name(require_supported_vllm().version), name()

    def _thinking_tokens(self) -> ThinkingTokens | None:
        """The tokens of thoughts; None where vLLM does not tell them, of which the log says so."""
        found = thinking_tokens(self._vllm_config)
        if found is not None:
            logger.info(
                "Answers are kept up to where the model begins to think, as later prompts do not "
                "repeat its thoughts; the hint `thinking: keep` keeps one whole"
            )
        elif self._vllm_config.reasoning_config is not None:
            logger.warning(
                "Answers are kept with the model's thoughts, because its reasoning parser does "
                "not tell vLLM by which tokens it thinks. Requests whose answer is not used "
                "again can say `cache: no`"
            )
        return found

    def _kv_events(self) -> KVEvents:
        pool = None if self._directory is None else self._directory.pool
        kinds = self._manager.kv_cache_event_metadata
        return KVEvents(pool, self._ours.groups, self._group_ids, kinds, self._hash_block_size)

    def _finds(
        self, group_id: int, block_ids: Sequence[int], hashes: Sequence[bytes]
    ) -> list[bool]:
        blocks = self._manager.block_pool.blocks
        whose = make_block_hash_with_group_id(BlockHash(b""), group_id)
        found = [blocks[each].block_hash for each in block_ids]
        return list(map(eq, found, [each + whose for each in hashes]))

    def _host_blocks(self, prefix: bytes) -> HostBlocks | None:
        """The arenas of this host; None where this engine does not share its own."""
        config = self._config
        if not config.share or self._directory is None:
            return None
        pool = self._directory.pool
        epoch = self._context.randbytes(EPOCH_BYTES)
        index = BlockIndex.create(self._directory.num_slots, epoch)
        try:
            engine = LocalEngine(
                folder=self._folder,
                engine_id=self._engine_id,
                readers=readers_id(self._shared_with, self._hash_id),
                traits=reader_traits(self._shared_with, self._hash_id),
                index=index,
                arenas=self._arenas,
                ranks=self._surroundings.ranks(
                    self._folder, self._engine_id, self._ours.read_by_ranks
                ),
                stripes=self._ours.stripes_by_arena,
                on_hits=partial(touch, pool),
            )
            neighbours = self._surroundings.neighbours(engine, self._context)
        except BaseException:
            index.close()
            raise
        changes = None if self._events is None else SlotChanges(index.num_slots)
        pool.listing = SlotListing(index, prefix, changes)
        return HostBlocks(
            pool=pool,
            index=index,
            arenas=self._arenas,
            neighbours=neighbours,
            groups=self._ours.groups,
            slot_groups=self._ours.slot_groups,
            key_prefix=prefix,
            load_timeout=config.load_timeout_s,
            context=self._context,
        )


def _listens(path: Path) -> bool:
    """Whether somebody may listen at a Unix socket: an engine that was killed leaves a dead one."""
    try:
        return not is_dead(path)
    except OSError:  # there are no more descriptors; whoever connects says so
        return True


def _context(
    config: OmniConfig,
    engine_id: str | None,
    half: str,
    surroundings: Surroundings,
    stats: OmniStats,
) -> EngineContext:
    """That of one half, with its own statistics and trace."""
    context = replace(surroundings.context, stats=stats)
    if config.trace is None:
        return context
    trace = FileTrace(config.trace, engine_id or "", half, context.start)
    return replace(context, trace=trace)


def _agreeing(
    workers: Mapping[tuple[int, int], OmniHandshakeMetadata], vllm_config: "VllmConfig"
) -> list[OmniHandshakeMetadata]:
    """What the ranks say, stage by stage."""
    parallel = vllm_config.parallel_config
    stages, ranks = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    keys = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    if sorted(workers) != keys:
        raise ConfigError(
            f"this engine has {stages} pipeline stages of {ranks} ranks, but its workers are, by "
            f"stage and rank, {sorted(workers)}"
        )
    for stage, rank in keys:
        if workers[stage, rank].groups != workers[stage, 0].groups:
            raise ConfigError("the ranks of this engine have KV caches of different layouts")
        spreads = {
            (each.stripes, each.shards) for each in (workers[stage, rank], workers[stage, 0])
        }
        if len(spreads) > 1:
            raise ConfigError("only some ranks of this engine hold the same KV as others")
    names = Counter(
        name
        for stage in range(stages)
        for group in workers[stage, 0].groups
        for name in group.names or ()
    )
    if twice := [name for name, times in names.items() if times > 1]:
        # vLLM numbers EAGLE's layers behind those of the last stage, not behind all.
        raise ConfigError(
            f"vLLM calls layers of several pipeline stages {twice[0]}, so that OmniKVConnector "
            "cannot tell the drafter's from the model's"
        )
    return [workers[key] for key in keys]


def _publishes_events(vllm_config: "VllmConfig") -> bool:
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def _has_arena(
    config: OmniConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> bool:
    """Whether the workers of this engine have arenas: to hand off, or to share."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    shares = config.share and _sharing_refusal(vllm_config, kv_cache_config) is None
    return shares or (config.handoff and transfer.is_kv_producer)


def _lending_store(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    surroundings: Surroundings,
) -> BlockStore | None:
    """The store as one worker uses it, which lends it memory; None where nothing is shared."""
    if config.store is None or _sharing_refusal(vllm_config, kv_cache_config) is not None:
        return None
    ranks = num_workers(vllm_config)
    return surroundings.block_store(config.store, config.store.segment_bytes() // ranks)


def _sharing_refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Why this engine cannot share prefixes; None if it can."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return "prefix caching is off; remove --no-enable-prefix-caching"
    refusal = state_refusal(kv_cache_config)
    if refusal is not None:
        return refusal
    hash_size = hash_block_size(vllm_config, kv_cache_config)
    if not hash_id(vllm_config, hash_size):
        return (
            f"--prefix-caching-hash-algo {cache.prefix_caching_hash_algo} hashes differently in "
            "each process; take sha256_cbor, or set PYTHONHASHSEED to the same number everywhere"
        )
    for block_size in cached_block_sizes(kv_cache_config):
        if block_size % hash_size:
            return f"blocks of {block_size} tokens are hashed by {hash_size}"
    return None


def _arena_sizing(
    config: OmniConfig, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig"
) -> ArenaSizing:
    """What the configuration of an engine says of the arena of one rank."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    assert transfer is not None
    ranks = num_local_workers(vllm_config)
    given = config.arena_bytes()
    sharers = ranks * local_engines(parallel)
    caches = 0
    if vllm_config.device_config.device_type == "cpu":  # in the same memory, page by page
        caches = sharers * sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    return ArenaSizing(
        given=None if given is None else given // ranks,
        cache_blocks=kv_cache_config.num_blocks,
        max_tokens=vllm_config.model_config.max_model_len,
        sharers=sharers,
        reserved=caches,
        deployment=deployment_id(f"{config.namespace}/{transfer.engine_id}"),
    )
