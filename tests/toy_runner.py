# SPDX-License-Identifier: Apache-2.0
"""The toy model in an engine: it follows a scheduler's output and keeps its KV in vLLM's blocks."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, MambaSpec
from vllm.v1.outputs import DraftTokenIds

from tests.toy import (
    DRAFTER_LAYER,
    MAX_LENGTH,
    RING_BYTES,
    STATE_BYTES,
    Mind,
    bytes_of_rank,
    drafters_kv,
    embedded,
    heads_of,
    kinds_of,
)


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    tables: list[list[int]]
    drafts: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)  # answers; all where there are none
    # Positions whose drafter's KV is there; and positions that others have computed, which are
    # still to be compared.
    drafted: int = 0
    unseen: int = 0
    prompt: list[int] = field(default_factory=list)  # what it reads of one with embeddings
    # The first position that is computed again after a prefix hit, and the one behind the last.
    replay: tuple[int, int] = (0, 0)
    # With drafts, where a group's state is after the last step: the column of its block in the
    # table, and how many columns later.
    running: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Put:
    """KV that is written to one layer of one rank: `cache[place] = content`."""

    cache: NDArray[np.uint8]
    place: Any
    content: NDArray[np.uint8]


@dataclass(slots=True)
class _Part:
    """A request's part of a step: positions `start` to `end`, and what they leave in the cache, by
    group and layer.

    Attributes:
        tokens: those at its positions, drafts behind the tokens that are known.
        minds: the model after the last known position, and after each draft; none in a chunk of a
            prompt.
    """

    request_id: str
    row: _Row
    start: int
    end: int
    tokens: list[int]
    minds: list[Mind]
    puts: list[list[list[_Put]]]


class ToyRunner:
    """Follows a scheduler's output as vLLM's model runner does, and computes.

    Args:
        kv_caches: for each rank the layers as vLLM registers them, `[B, H, N, C]`. Ranks of other
            pipeline stages have other layers.
        config: the groups, with the layers of all stages.
        weights: of the model; other weights, other KV.

    Attributes:
        launch: has the device do a piece of work, now or later, after all that was launched before
            it. Where it is later, `finish` says when.
        layer_computed: called in a forward pass with each attention layer, when the KV of the
            whole batch is written in it and none in the layers after it; None computes request
            by request. Layers that keep a state tell nothing, as in vLLM.
        halves: whether a batch is computed in two halves, one after the other, as vLLM does with
            `--enable-dbo`: each of them tells of all layers.
        bad_blocks: blocks that a load should have filled for the step under way and did not. vLLM
            discards the tokens of requests that have read them.
        tokens_ahead: tokens after a position on which the drafter's KV depends.
        drafter_runs: how many times the drafter computes its layers in a step.
    """

    def __init__(
        self,
        kv_caches: list[dict[str, torch.Tensor]],
        config: KVCacheConfig,
        weights: bytes = b"",
    ) -> None:
        self.weights = weights
        self.launch: Callable[[Callable[[], None]], object] = lambda work: work()
        self.layer_computed: Callable[[str], None] | None = None
        self.halves = False
        self.bad_blocks: set[int] = set()
        self.tokens_ahead = 1
        self.drafter_runs = 1
        layers = {
            name: [rank[name].view(torch.uint8).numpy() for rank in kv_caches if name in rank]
            for name in itertools.chain.from_iterable(kv_caches)
        }
        kinds = kinds_of(config)
        # That of the drafter is the last, so that the others have their numbers.
        self._kinds = tuple(kind for kind in kinds if kind.attention != "ahead")
        self._drafter: _Attention | None = None
        self._groups: list[_Attention | _Ring | _State] = []
        self._layers = [rank for ranks in layers.values() for rank in ranks]
        # The groups take turns, as they do in hybrid models.
        groups = config.kv_cache_groups[: len(self._kinds)]
        if len(self._kinds) < len(kinds):  # its layers are in the last group
            last = config.kv_cache_groups[-1]
            self._drafter_layers = [each for each in last.layer_names if _is_drafters(each)]
            caches = [layers[name] for name in self._drafter_layers]
            self._drafter = _Attention(caches, heads_of(last.kv_cache_spec))
            self._drafter_size = kinds[-1].size
            self._drafter_block = last.kv_cache_spec.block_size
        names = [[n for n in group.layer_names if not _is_drafters(n)] for group in groups]
        self._order = [
            (names[g][number], g, number)
            for number in range(max(map(len, names)))
            for g in range(len(names))
            if number < len(names[g])
        ]
        for kind, group, own in zip(self._kinds, groups, names, strict=True):
            caches = [layers[name] for name in own]
            if kind.attention == "state":
                spec = group.kv_cache_spec
                assert isinstance(spec, MambaSpec)
                drafts = spec.num_speculative_blocks
                self._groups.append(
                    _State(caches, spec.block_size, every=kind.every, drafts=drafts)
                )
            elif isinstance(group.kv_cache_spec, CircularBufferSpec):
                self._groups.append(_Ring(caches))
            else:
                self._groups.append(_Attention(caches, heads_of(group.kv_cache_spec)))
        self._block_sizes = [each.kv_cache_spec.block_size for each in config.kv_cache_groups]
        self._rows: dict[str, _Row] = {}
        self._batch: list[str] = []  # the requests of the last step
        # States that are not at the end of their block yet: group, block, and where they are.
        self._moves: list[tuple[_State, int, int]] = []

    def execute(self, step: SchedulerOutput) -> tuple[list[str], list[list[int]]]:
        """Compute one step: the request ids of the batch and what each has sampled."""
        self.prepare(step)
        batch = self.forward(step)
        self.postprocess()
        return batch

    def prepare(self, step: SchedulerOutput) -> None:
        """What happens to blocks before the forward pass: new ones are zeroed, shared ones
        copied."""
        if step.new_block_ids_to_zero:
            self.launch(partial(self._zero, np.asarray(step.new_block_ids_to_zero)))
        if step.kv_cache_block_copies:
            sources, targets = zip(*step.kv_cache_block_copies, strict=True)
            assert len({*sources, *targets}) == len({*sources}) + len(targets), (
                f"copies overwrite blocks that others need: {step.kv_cache_block_copies}"
            )
            self.launch(partial(self._copy_blocks, list(sources), list(targets)))

    def _zero(self, blocks: NDArray[np.int64]) -> None:
        for cache in self._layers:
            cache[blocks] = 0

    def _copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """As in vLLM, all blocks of a layer are read before any is written. Layers that share
        memory are copied one after the other."""
        for cache in self._layers:
            cache[targets] = cache[sources]

    def finish(self) -> None:
        """Wait until all that was launched is done."""

    def postprocess(self) -> None:
        """What vLLM does with states when it has sampled, after the connector's saves have begun:
        where drafts were right, it moves the state at the end of a block to that block."""
        self.launch(self._move)

    def _move(self) -> None:
        for group, target, source in self._moves:
            group.copy(target, source)
        self._moves.clear()

    def forward(self, step: SchedulerOutput) -> tuple[list[str], list[list[int]]]:
        """Launch the forward pass of a step that was prepared; `postprocess` has to follow.

        What is sampled is in the lists once the pass is done.
        """
        self.finish()  # the tokens that the step before sampled
        self._follow(step)
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends: dict[str, tuple[int, int]] = {}
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            # A scheduler that runs ahead counts drafts that have turned out wrong since.
            start = min(computed[request_id], len(self._rows[request_id].token_ids) - 1)
            ends[request_id] = start, start + num_tokens
        self._batch = list(ends)
        batch: list[_Part] = []
        told = self.layer_computed if ends else None
        self.launch(partial(self._compute, ends, batch, by_layer=told is not None))
        if told is not None:
            self._launch_layers(len(ends), batch, told)
        sampled: list[list[int]] = [[] for _ in ends]
        self.launch(partial(self._sample, batch, sampled))
        if self._drafter is not None and ends:
            for number in range(self.drafter_runs):
                self.launch(partial(self._draft, self._drafter, batch, number))
                if told is not None:
                    for layer in self._drafter_layers:
                        told(layer)
        return list(step.num_scheduled_tokens), sampled

    def _compute(
        self, ends: dict[str, tuple[int, int]], batch: list[_Part], *, by_layer: bool
    ) -> None:
        """Read what the requests need, and write it; or take it back, where layers follow."""
        undone: list[_Put] = []
        for number, (request_id, (start, end)) in enumerate(ends.items(), 1):
            batch.append(self._part(request_id, start, end))
            if not by_layer or number < len(ends):  # else nobody reads it before the layers come
                undone += self._write(batch[-1], by_layer)
        for put in reversed(undone):
            put.cache[put.place] = put.content

    def _sample(self, batch: list[_Part], sampled: list[list[int]]) -> None:
        for part, of_part in zip(batch, sampled, strict=True):
            self._sample_part(part, of_part)
        self.bad_blocks.clear()

    def _sample_part(self, part: _Part, sampled: list[int]) -> None:
        """Add the tokens that a part of a step gives: one, and one more for each draft that is
        right."""
        row = part.row
        row.drafts = []
        known = len(row.token_ids)
        drafts = part.tokens[len(row.token_ids) - part.start :]
        for number, mind in enumerate(part.minds):
            position = len(row.token_ids) - 1
            # What was written is read once more: it, too, has to be where it belongs.
            stored = [
                group.read(
                    row.tables[g],
                    position,
                    position + 1,
                    (-(-part.end // group.block_size) - 1, number),
                ).tobytes()
                if isinstance(group, _State) and group.drafts
                else group.read(row.tables[g], position, position + 1).tobytes()
                for g, group in enumerate(self._groups)
            ]
            token = mind.token(stored)
            if row.allowed:
                token = row.allowed[0]
            if self.bad_blocks and not self.bad_blocks.isdisjoint(itertools.chain(*row.tables)):
                sampled[:] = [token]  # nobody will see it
                return
            if not row.allowed:
                self.sampled(part.request_id, row.token_ids, token)
            row.token_ids.append(token)
            sampled.append(token)
            if len(sampled) > len(drafts) or drafts[len(sampled) - 1] != token:
                break
        for g, group in enumerate(self._groups):
            if isinstance(group, _State) and group.drafts:
                row.running[g], move = group.accept(row.tables[g], part.end, known, len(sampled))
                if move is not None:
                    self._moves.append((group, *move))
        if sampled:
            row.drafts = self.proposed(row.token_ids)

    def _draft(self, drafter: "_Attention", batch: list[_Part], number: int) -> None:
        """What a drafter leaves in the cache: first of all tokens that are known, then of those
        that it proposes itself, once for each."""
        for part in batch:
            row, table = part.row, part.row.tables[-1]
            weights, ahead = self.weights_of(part.request_id), self.tokens_ahead
            if row.unseen:
                found = drafter.read(table, 0, row.unseen)
                for position in range(row.unseen):
                    known = tuple(row.token_ids[: position + 1 + ahead])
                    right = drafters_kv(weights, known, self._drafter_size)
                    if len(known) > position + ahead and found[position].tobytes() != right:
                        self.drafter_differs(
                            part.request_id, position, row.unseen, found[position].tobytes()
                        )
                row.unseen = 0
            start = min(row.drafted, part.start)
            end = max(start, min(part.end, len(row.token_ids) - ahead))
            kept = [
                drafters_kv(weights, tuple(row.token_ids[: p + 1 + ahead]), self._drafter_size)
                for p in range(start, end)
            ]
            if number == 0:
                row.drafted = end
            # Of these some tokens after them are proposed, and may turn out to be others.
            beyond = range(end, min(len(table) * self._drafter_block, end + number + ahead))
            kept += [
                drafters_kv(b"proposed" + bytes([number]), (p,), self._drafter_size) for p in beyond
            ]
            puts = drafter.puts(table, start, end + len(beyond), kept)
            for put in itertools.chain(*puts):
                put.cache[put.place] = put.content

    def drafter_differs(self, request_id: str, position: int, computed: int, found: bytes) -> None:
        """Called for each position whose drafter's KV differs from the one that others have kept.

        Args:
            computed: positions that others have computed.
        """
        raise WrongBytes(f"the drafter finds other KV of position {position}")

    def weights_of(self, request_id: str) -> bytes:
        """The weights, and what else a request is computed with; to be overridden."""
        return self.weights

    def drafts(self) -> DraftTokenIds:
        """What is proposed to follow the tokens that the last step has sampled."""
        rows = {each: self._rows[each] for each in self._batch if each in self._rows}
        drafts = {request_id: row.drafts for request_id, row in rows.items() if row.drafts}
        return DraftTokenIds(list(drafts), [list(each) for each in drafts.values()])

    def sampled(self, request_id: str, token_ids: list[int], token: int) -> None:
        """Called with each token sampled and those before it; to be overridden."""

    def proposed(self, token_ids: list[int]) -> list[int]:
        """Drafts of the tokens after these; to be overridden."""
        return []

    def _follow(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            tables = [list(ids) for ids in new.block_ids]
            sampling, computed = new.sampling_params, new.num_computed_tokens
            allowed = list((sampling and sampling.allowed_token_ids) or ())
            prompt = _with_embeddings(new)
            # V2 is told of a resumed request as of a new one, with the tokens that it has answered.
            token_ids = list(new.prefill_token_ids or new.prompt_token_ids or ())
            token_ids[: len(prompt)] = prompt
            self._rows[new.req_id] = _Row(
                token_ids,
                tables,
                allowed=allowed,
                drafted=computed,
                unseen=computed,
                prompt=prompt,
                replay=self._replay(getattr(new, "replay_start", 0)),  # from vLLM 0.31 on
            )
        cached = step.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._rows[request_id]
            if request_id in cached.resumed_req_ids:
                row.token_ids = list(cached.all_token_ids[request_id])
                row.token_ids[: len(row.prompt)] = row.prompt
                row.tables = [[] for _ in row.tables]
                row.running.clear()
                row.drafted = row.unseen = computed
            for table, ids in zip(row.tables, block_ids or (), strict=False):
                table += ids

    def _replay(self, start: int) -> tuple[int, int]:
        """The positions from `start` on that vLLM computes again; none at 0."""
        windows = [kind.window for kind in self._kinds if kind.replayed]
        return (start, start + max(windows)) if start and windows else (0, 0)

    def _part(self, request_id: str, start: int, end: int) -> _Part:
        """Read the cache, and draw what the request's next positions leave in it."""
        row = self._rows[request_id]
        mind = Mind(self.weights_of(request_id), self._kinds)
        full = []
        for g, (kind, group) in enumerate(zip(self._kinds, self._groups, strict=True)):
            if isinstance(group, _State) and group.drafts:
                read = group.read(row.tables[g], 0, start, row.running.get(g))
            elif kind.replayed:  # below the replay there is nothing
                first = max(kind.first_read(start), row.replay[0])
                read = group.read(row.tables[g], first, start)
            else:
                read = group.read(row.tables[g], kind.first_read(start), start)
            if kind.attention == "all":
                full.append(read)
            else:
                mind.read(g, read.tobytes())
        if full:  # by position, as they were drawn
            mind.read_full(np.concatenate(full, axis=1).tobytes())
        tokens = row.token_ids[start:end]
        tokens += row.drafts[: end - start - len(tokens)]
        # vLLM fills up the first step of a request that has no drafts yet.
        tokens += [0] * (end - start - len(tokens))
        last = len(row.token_ids) - 1
        again = max(start, min(end, row.replay[1]))  # what is before stays as it is cached
        if end - 1 > last or again > start:
            cached = self._cached(row, start, again) if again > start else iter(())
            drawn, minds = [], []
            for position, token in enumerate(tokens, start):
                drawn.append(mind.step(token, next(cached, None)))
                if position >= last:
                    minds.append(mind.copy())
        else:
            drawn = mind.steps(tokens)
            minds = [mind] * (end - 1 == last)
        puts = []
        for g, group in enumerate(self._groups):
            content = [each[g] for each in drawn]
            if isinstance(group, _State) and group.drafts:
                known = min(end, last + 1)
                inner = group.inner_puts(row.tables[g], start, known, content)
                running = group.running_puts(row.tables[g], end, content[known - start - 1 :])
                puts.append([one + two for one, two in zip(inner, running, strict=True)])
            elif self._kinds[g].cached:
                puts.append(group.puts(row.tables[g], again, end, content[again - start :]))
            else:
                puts.append(group.puts(row.tables[g], start, end, content))
        return _Part(request_id, row, start, end, tokens, minds, puts)

    def _cached(self, row: _Row, start: int, end: int) -> Iterator[list[bytes]]:
        """Of each of these positions what the groups hold that keep all of them."""
        found = [
            group.read(row.tables[g], start, end)
            for g, (kind, group) in enumerate(zip(self._kinds, self._groups, strict=True))
            if kind.attention == "all"
        ]
        return iter([[each[at].tobytes() for each in found] for at in range(end - start)])

    def _write(self, part: _Part, by_layer: bool) -> list[_Put]:
        """Write it to the cache at once, as the next request of the batch may read it; returns
        what was there, where layers are told of."""
        before = []
        for puts in part.puts:
            for put in itertools.chain(*puts):
                if by_layer:
                    before.append(_Put(put.cache, put.place, put.cache[put.place].copy()))
                put.cache[put.place] = put.content
        return before

    def _launch_layers(
        self, requests: int, batch: list[_Part], computed: Callable[[str], None]
    ) -> None:
        """Write it layer by layer, and tell of each."""
        every = slice(None)
        halves = (
            (slice(0, None, 2), slice(1, None, 2)) if self.halves and requests > 1 else (every,)
        )
        for half, (name, g, number) in itertools.product(halves, self._order):
            self.launch(partial(self._write_layer, batch, half, g, number))
            if isinstance(self._groups[g], _Attention):
                computed(name)

    def _write_layer(self, batch: list[_Part], half: slice, g: int, number: int) -> None:
        for part in batch[half]:
            for put in part.puts[g][number]:
                put.cache[put.place] = put.content

    def restore(
        self,
        token_ids: list[int],
        start: int,
        tables: Sequence[list[int]],
        weights: bytes | None = None,
    ) -> None:
        """Write the KV of these tokens from `start` on to blocks that are there, as these weights
        give it, or the model's own."""
        mind = Mind(self.weights if weights is None else weights, self._kinds)
        drawn = mind.steps(token_ids)
        for g, group in enumerate(self._groups):
            size = MAX_LENGTH if isinstance(group, _Ring) else self._block_sizes[g]
            for position in range(start, len(token_ids)):
                if tables[g][position // size]:  # else nobody will read it
                    puts = group.puts(tables[g], position, position + 1, [drawn[position][g]])
                    for put in itertools.chain(*puts):
                        put.cache[put.place] = put.content

    def spoil(self, block_ids: list[int], seed: int) -> None:
        """Fill whole blocks with noise, which no correct answer can come from."""
        self.launch(partial(self._spoil, np.asarray(block_ids), seed))

    def _spoil(self, blocks: NDArray[np.int64], seed: int) -> None:
        draw = np.random.default_rng(seed)
        for cache in self._layers:
            noise = draw.bytes(len(blocks) * math.prod(cache.shape[1:]))
            cache[blocks] = np.frombuffer(noise, np.uint8).reshape(-1, *cache.shape[1:])


def _is_drafters(name: str) -> bool:
    return name.startswith(DRAFTER_LAYER)


def _with_embeddings(new: NewRequestData) -> list[int]:
    """What the toy reads of a prompt that has embeddings; nothing of one that has none.

    As in vLLM, where token ids are given, a mask says which of them embeddings replace.
    """
    embeds, token_ids = new.prompt_embeds, new.prompt_token_ids
    is_token = getattr(new, "prompt_is_token_ids", None)
    if embeds is None or (token_ids is not None and is_token is None):
        return []
    found = embedded(embeds)
    if token_ids is None or is_token is None:
        return found
    return [token if own else it for token, own, it in zip(token_ids, is_token, found, strict=True)]


class WrongBytes(AssertionError):
    """Ranks that keep the same bytes keep different ones."""


Layers = list[list[NDArray[np.uint8]]]
"""For each layer the caches of all ranks."""


class _Attention:
    """The layers of a group that store something for every position."""

    def __init__(self, layers: Layers, heads: int) -> None:
        _, kept, self._block_size, content = layers[0][0].shape
        self._content = content
        self._heads = heads
        # Ranks that share a head keep a copy each.
        self._copies = max(1, len(layers[0]) * kept // heads)
        self._kept = kept
        self._size = len(layers) * heads * content
        self._layers = layers
        stacks = [_stacked([layer[rank] for layer in layers]) for rank in range(len(layers[0]))]
        self._stacks = [each for each in stacks if each is not None]

    def read(self, table: list[int], start: int, end: int) -> NDArray[np.uint8]:
        """KV of these positions: (positions, bytes)."""
        blocks, offsets = self._places(table, start, end)
        ranks = len(self._layers[0])
        if len(self._stacks) == ranks:  # all layers at a time
            parts = [stack[:, blocks, :, offsets] for stack in self._stacks]
            found = parts[0] if ranks == 1 else np.concatenate(parts, axis=2)
        else:
            found = np.empty(
                (end - start, len(self._layers), ranks * self._kept, self._content), np.uint8
            )
            for number, layer in enumerate(self._layers):
                for place, rank in enumerate(layer):
                    first = place * self._kept
                    found[:, number, first : first + self._kept] = rank[blocks, :, offsets]
        if self._copies == 1:
            return found.reshape(end - start, self._size)
        one = found[:, :, :: self._copies]
        for number in range(1, self._copies):
            if (found[:, :, number :: self._copies] != one).any():
                raise WrongBytes("two ranks keep different bytes of one head")
        return one.reshape(end - start, self._size)

    def puts(
        self, table: list[int], start: int, end: int, content: list[bytes]
    ) -> list[list[_Put]]:
        """KV for these positions, by layer."""
        blocks, offsets = self._places(table, start, end)
        rows = np.frombuffer(b"".join(content), np.uint8).reshape(
            end - start, len(self._layers), self._heads, self._content
        )
        every: list[list[_Put]] = [[] for _ in self._layers]
        for number, layer in enumerate(self._layers):
            for place, rank in enumerate(layer):
                first = place * self._heads // len(layer)
                kept = rows[:, number, first : first + self._kept]
                every[number].append(_Put(rank, (blocks, slice(None), offsets), kept))
        return every

    def _places(
        self, table: list[int], start: int, end: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        size = self._block_size
        last = -(-end // size)
        assert 0 not in table[start // size : last], (
            "vLLM has taken a block away that is still used"
        )
        numbers, offsets = _split(size)
        return np.asarray(table[:last], np.int64)[numbers[start:end]], offsets[start:end]


def _stacked(layers: list[NDArray[np.uint8]]) -> NDArray[np.uint8] | None:
    """The layers as one array that shares their memory; None unless they lie in it at equal
    distances. The layers have to be kept."""
    first = layers[0]
    starts = [each.__array_interface__["data"][0] for each in layers]
    distance = starts[1] - starts[0] if len(layers) > 1 else 0
    alike = all((each.shape, each.strides) == (first.shape, first.strides) for each in layers)
    if not alike or starts != [starts[0] + i * distance for i in range(len(layers))]:
        return None
    return np.lib.stride_tricks.as_strided(
        first, (len(layers), *first.shape), (distance, *first.strides), writeable=False
    )


@functools.cache
def _split(block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each position the number of its block, and its place in that."""
    return np.divmod(np.arange(MAX_LENGTH), block_size)


class _Ring:
    """The layers of a group that keep the latest positions of a request in its only block, each in
    the place of its number modulo the size of that. Every rank keeps the same bytes."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        _, self._heads, self._capacity, self._content = layers[0][0].shape

    def read(self, table: list[int], start: int, end: int) -> NDArray[np.uint8]:
        """What is kept of these positions: (positions, bytes)."""
        assert end - start <= self._capacity
        places = np.arange(start, end) % self._capacity
        found = []
        for layer in self._layers:
            one = layer[0][table[0]][:, places]
            if any((rank[table[0]][:, places] != one).any() for rank in layer[1:]):
                raise WrongBytes("two ranks keep different bytes of one ring")
            found.append(one.transpose(1, 0, 2).reshape(end - start, RING_BYTES))
        return np.concatenate(found, axis=1)

    def puts(
        self, table: list[int], start: int, end: int, content: list[bytes]
    ) -> list[list[_Put]]:
        """What is kept of these positions, by layer; of many, the last."""
        (block,) = table
        assert block != 0, "vLLM has taken a block away that holds a ring"
        first = max(start, end - self._capacity)
        places = np.arange(first, end) % self._capacity
        rows = np.frombuffer(b"".join(content[first - start :]), np.uint8).reshape(
            end - first, len(self._layers), self._heads, self._content
        )
        return [
            [_Put(rank, (block, slice(None), places), kept) for rank in layer]
            for layer, kept in zip(self._layers, rows.transpose(1, 0, 2, 3), strict=True)
        ]


class _State:
    """The layers of a group that keep one state, in the block of the last position; or `every` one
    at the end of a block, too.

    With `drafts` a step leaves a state after each of these, in blocks that follow the one of its
    last position, as it is not known yet which of them are right. `accept` says it.
    """

    def __init__(self, layers: Layers, block_size: int, *, every: bool, drafts: int) -> None:
        self._every = every
        self.drafts = drafts
        self.block_size = block_size
        ranks = len(layers[0])
        self._places = [bytes_of_rank(rank, ranks) for rank in range(ranks)]
        self._layers = [
            [
                rank.reshape(len(rank), -1)[:, : len(places)]
                for rank, places in zip(each, self._places, strict=True)
            ]
            for each in layers
        ]

    def read(
        self, table: list[int], start: int, end: int, running: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        """State after `end` positions: its bytes, of the whole model.

        Args:
            running: the column of its block, and how many columns later; None: where a state is
                that was not computed with drafts.
        """
        states = np.zeros((len(self._layers), STATE_BYTES), np.uint8)
        if end == 0:
            return states.ravel()
        block = self._block(table, end) if running is None else table[sum(running)]
        assert block != 0, "vLLM has taken a block away that holds a state"
        for state, layer in zip(states, self._layers, strict=True):
            for rank, places in zip(layer, self._places, strict=True):
                state[places] = rank[block]
            # What several ranks have must be right on each.
            for rank, places in zip(layer, self._places, strict=True):
                if not np.array_equal(state[places], rank[block]):
                    state ^= 0xFF
        return states.ravel()

    def puts(
        self, table: list[int], start: int, end: int, content: list[bytes]
    ) -> list[list[_Put]]:
        """The state after `end` positions, by layer."""
        inner = self.inner_puts(table, start, end, content)
        last = self._puts(self._block(table, end), content[end - start - 1])
        return [one + two for one, two in zip(inner, last, strict=True)]

    def inner_puts(
        self, table: list[int], start: int, end: int, content: list[bytes]
    ) -> list[list[_Put]]:
        """The states at the ends of blocks before `end`, by layer, where they are kept."""
        puts: list[list[_Put]] = [[] for _ in self._layers]
        size = self.block_size
        for after in range((start // size + 1) * size, end, size) if self._every else ():
            of_block = self._puts(self._block(table, after), content[after - start - 1])
            puts = [one + two for one, two in zip(puts, of_block, strict=True)]
        return puts

    def _puts(self, block: int, content: bytes) -> list[list[_Put]]:
        """One state, by layer."""
        states = np.frombuffer(content, np.uint8).reshape(-1, STATE_BYTES)
        return [
            [
                _Put(rank, block, state[places])
                for rank, places in zip(layer, self._places, strict=True)
            ]
            for layer, state in zip(self._layers, states, strict=True)
        ]

    def running_puts(self, table: list[int], end: int, content: list[bytes]) -> list[list[_Put]]:
        """The states after the tokens that are known, and after each draft, by layer.

        Args:
            end: positions of the step, drafts included.
        """
        puts: list[list[_Put]] = [[] for _ in self._layers]
        column = -(-end // self.block_size) - 1
        for block, after in zip(table[column:], content, strict=False):
            assert block != 0, "vLLM has taken a block away that takes a state"
            puts = [one + two for one, two in zip(puts, self._puts(block, after), strict=True)]
        return puts

    def accept(
        self, table: list[int], end: int, known: int, accepted: int
    ) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Some of the step's tokens are right: returns what is running; and to which block a state
        has to be copied and from which, where one belongs to the end of a block.

        Args:
            end: positions of the step, drafts included.
            known: tokens that were known before.
            accepted: tokens that were sampled, one more than the drafts that are right.
        """
        column = -(-end // self.block_size) - 1
        first = min(end, known)  # tokens up to the state in that column
        aligned = (first + accepted - 1) // self.block_size * self.block_size
        target = aligned // self.block_size - 1
        if aligned < first:
            return (column, max(0, accepted - 1)), None
        move = table[target], table[column + aligned - first]
        return ((column, 0) if target == column else (column, accepted - 1)), move

    def copy(self, target: int, source: int) -> None:
        """Copy the state of one block to another."""
        for layer in self._layers:
            for rank in layer:
                rank[target] = rank[source]

    def _block(self, table: list[int], end: int) -> int:
        block = table[(end - 1) // self.block_size]
        assert block != 0, "vLLM has taken a block away that holds a state"
        return block
