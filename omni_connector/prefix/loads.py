# SPDX-License-Identifier: Apache-2.0
"""Loads of prompts' blocks from the arenas of this host and from the store.

One prompt may be loaded from several arenas and the store, with one job for each. The workers end a
job at its deadline (`copy.loading` of an arena, `prefix.store_jobs` of the store). If a job fails,
the others are revoked, and nothing more is loaded for the prompt: vLLM computes it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from omni_connector.copy.held_blocks import CANCELLED, CopyLedger, EngineRequest
from omni_connector.copy.prefix_jobs import HostLoadSpec, StoreLoadSpec
from omni_connector.kv.spans import NULL_BLOCK_ID, BlockSpans, TransferSpec, shares
from omni_connector.prefix.host_blocks import Hit, HostBlocks, Wanted
from omni_connector.prefix.key_prefix import KeyPrefix
from omni_connector.prefix.lookups import StoreLookups
from omni_connector.prefix.prompts import SharedGroups, SharedPrompt
from omni_connector.runtime.stats import UNREACHABLE, Stats
from omni_connector.stores.shared_blocks import CORRUPT, BlockName

BlockTables = Sequence[Sequence[int]]
"""The block ids of one request, for each of vLLM's groups."""


class _Load(NamedTuple):
    """One job of a load.

    Attributes:
        spec: what it copies.
        counter: what its tokens are counted as.
        names: of all loaded blocks, where it is from the store; else None.
        hit: the slots that it reads, where it is from an arena; else None.
    """

    spec: TransferSpec
    counter: str
    names: list[BlockName] | None = None
    hit: Hit | None = None


class PrefixLoads:
    """Starts the loads of prompts, and follows them to their end.

    Args:
        host: the arenas of this host; None loads nothing from there.
        lookups: is told of corrupt entries of the store; None where there is no store.
        ledger: the copy jobs.
        groups: what this engine keeps.
        prefix: of the store's keys.
        timeout: seconds that a load from the store may take.
        stats: where to count.

    Attributes:
        queued: jobs that start with the next step, by number. `SharedPrefix.step` takes them.
    """

    def __init__(
        self,
        *,
        host: HostBlocks | None,
        lookups: StoreLookups | None,
        ledger: CopyLedger,
        groups: SharedGroups,
        prefix: KeyPrefix,
        timeout: float,
        stats: Stats,
    ) -> None:
        self._host = host
        self._lookups = lookups
        self._ledger = ledger
        self._groups = groups
        self._prefix = prefix
        self._timeout = timeout
        self._stats = stats
        self.queued: dict[int, TransferSpec] = {}
        self._failed: list[EngineRequest] = []

    def start(self, prompt: SharedPrompt, tables: BlockTables, start: int, end: int) -> None:
        """Load the tokens from `start` to `end` of a prompt, from the arenas and the store.

        Args:
            tables: the block tables of its request.
        """
        prompt.failure = None
        prompt.from_tail = end - max(start, end // self._groups.unit * self._groups.unit)
        for load, tokens in self._divided(prompt, tables, start, end):
            prompt.sources[load.counter] = prompt.sources.get(load.counter, 0) + tokens
            if self._host is not None and load.hit is not None:
                self._host.hit(*load.hit)
            self._start_job(prompt, load, tokens)

    def sources(self, prompt: SharedPrompt, start: int, end: int) -> dict[str, int]:
        """How many tokens of such a load are counted as what. Any thread may call this."""
        counts: Counter[str] = Counter()
        if end > start:
            blocks = max(shape.num_blocks(end) for shape in self._groups.shapes)
            tables = [[NULL_BLOCK_ID + 1] * blocks] * (max(self._groups.ids) + 1)
            for load, tokens in self._divided(prompt, tables, start, end):
                counts[load.counter] += tokens
        return counts

    def _divided(
        self, prompt: SharedPrompt, tables: BlockTables, start: int, end: int
    ) -> Iterable[tuple[_Load, int]]:
        """The jobs of a load, each with its tokens; arguments as for `start`.

        Blocks that an arena has are loaded from there, all others from the store:

            block           0      1      2      3
            an arena has    yes    no     yes    no
            host load       10     null   12     null
            store load      null   11     null   13
        """
        request_id = prompt.request.request_id
        tail: list[bytes] = []
        if prompt.tail is not None and prompt.tail.end == end:
            tail.append(prompt.tail.name)
        wanted = self._wanted(prompt, tables, start, end, tail)
        loads: list[_Load] = []
        if self._host is not None and prompt.found is not None:
            keyed = []
            for each in wanted:
                full = each.hashes[: len(each.hashes) - len(tail)]
                # The name of a tail is its key.
                keyed.append(replace(each, hashes=prompt.keys(full) + tail))
            specs, left = self._host.loads(request_id, prompt.found, keyed)
            loads += [
                _Load(spec, "tokens_kept" if spec.own else "tokens_from_host", None, hit)
                for spec, hit in specs
            ]
            wanted = [
                replace(each, block_ids=rest.block_ids)
                for each, rest in zip(wanted, left, strict=True)
            ]
        if any(each.block_ids.any() for each in wanted):
            names = [(g, key) for g, each in enumerate(wanted) for key in each.hashes]
            store_load = StoreLoadSpec(
                request_id=request_id,
                blocks=BlockSpans.of([(each.first, each.block_ids) for each in wanted]),
                prefix=prompt.key_prefix(self._prefix.current),
                hashes=[key for each in wanted for key in [b""] * each.begin + each.hashes],
                timeout=self._timeout,
            )
            loads.append(_Load(store_load, "tokens_shared", names))
        by_load = shares(end - start, [load.spec.blocks for load in loads])
        return zip(loads, by_load, strict=True)

    def _wanted(
        self,
        prompt: SharedPrompt,
        tables: BlockTables,
        start: int,
        end: int,
        tail: Sequence[bytes],
    ) -> list[Wanted]:
        """The blocks of each group that are to be filled; arguments as for `start`.

        Args:
            tail: the name of the tail that the tokens end with, if they end with one.
        """
        wanted: list[Wanted] = []
        for g, shape in enumerate(self._groups.shapes):
            if not shape.is_cached:
                # vLLM lets prefixes end where the tokens after them read no ring.
                wanted.append(Wanted(0, np.empty(0, np.int64), range(0), []))
                continue
            table = tables[self._groups.ids[g]]
            read = shape.needed(end, start)
            if len(table) < read.stop or NULL_BLOCK_ID in table[read.start : read.stop]:
                raise RuntimeError(
                    f"request {prompt.request.request_id}: vLLM allocated no block of group {g}"
                )
            first = start // shape.block_size
            block_ids = np.array(table[first : read.stop], np.int64)
            names = prompt.names[g][read.start : end // shape.block_size]
            wanted.append(Wanted(first, block_ids, read, [*names, *tail]))
        return wanted

    def _start_job(self, prompt: SharedPrompt, load: _Load, tokens: int) -> None:
        spec, counter = load.spec, load.counter

        def end(failure: str | None) -> None:
            prompt.jobs.discard(job_id)
            if failure is None:
                self._stats.count(counter, 0 if prompt.void else tokens)
            else:
                self._load_failed(prompt, failure, load.names)
                if isinstance(spec, HostLoadSpec) and self._host and failure == UNREACHABLE:
                    self._host.avoid(spec)
            if not prompt.jobs:
                self._loaded(prompt)

        job_id = self._ledger.start(spec.blocks, end)
        prompt.jobs.add(job_id)
        self.queued[job_id] = spec

    def revoke(self, prompt: SharedPrompt) -> None:
        """Revoke the loads of a prompt."""
        self._ledger.revoke(prompt.jobs)

    def _load_failed(
        self, prompt: SharedPrompt, failure: str, names: list[BlockName] | None
    ) -> None:
        """One load of a prompt has failed: revoke the others.

        Args:
            names: blocks of the load, if it was from the store.
        """
        self.revoke(prompt)
        if prompt.failure is not None:
            return
        prompt.failure = failure
        if prompt.void:
            return
        if failure != CANCELLED:
            self._stats.fail(failure)
        if names is not None:
            prompt.lookup = None  # its answer was wrong, so that computed blocks are stored again
            if failure == CORRUPT and self._lookups is not None:
                self._lookups.distrust(names)

    def _loaded(self, prompt: SharedPrompt) -> None:
        """All loads of a prompt have ended. A failed one is not retried: see
        `SharedPrefix.takes_nothing`."""
        if prompt.void:
            prompt.void = False
            prompt.lookup = None
        elif prompt.failure is None:
            self._stats.count("tokens_from_tails", prompt.from_tail)
            return
        prompt.loads = False
        prompt.found = None
        self._failed.append(prompt.request)

    def take_failed(self) -> list[Any]:
        """vLLM's requests whose loads have failed since the last call."""
        failed = self._failed
        self._failed = []
        return failed
