# SPDX-License-Identifier: Apache-2.0
"""What follows from a serving engine's answers: the loads of a decode engine; they need vLLM."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import xxhash
from numpy.typing import NDArray

from omni_connector.arena.arena import Arena
from omni_connector.copy import loading
from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.held_blocks import CopyLedger
from omni_connector.copy.jobs import LoadSpec
from omni_connector.copy.loading import Loader
from omni_connector.copy.threads import Outcome, Work
from omni_connector.errors import PeerUnreachableError
from omni_connector.handoff import receiver as receiving
from omni_connector.handoff.client import Lease, PeerSession, PendingLease
from omni_connector.handoff.messages import HandshakeReply, LeaseGranted, encode
from omni_connector.handoff.prompt import PromptRules
from omni_connector.handoff.receiver import HandoffReceiver
from omni_connector.kv.canonical import SlotLayout
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.convert import PageRun
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.transports.base import Endpoint
from omni_connector.transports.choice import Transports
from omni_connector.transports.shm import SharedMemoryTransport
from omni_connector.vllm_v1.metadata import OmniConnectorMetadata
from tests.hostile.control import EPOCH, PROMPT, compatibility, readers
from tests.hostile.mutation import distort_msgpack
from tests.hostile.trial import Parser

_BLOCKS: Final = 64
_TIMEOUT_S: Final = 0.01
_PAGES_BYTES: Final = 4096


class _Channel:
    """In the place of the control channel: a session that is told what was drawn."""

    def __init__(self, ours: CompatibilityKey, frames: list[bytes]) -> None:
        self._ours = ours
        self._frames = frames

    def request_lease(self, address: str, pending: PendingLease) -> None:
        """As `ControlChannel.request_lease`, answered at once."""
        session = PeerSession(address, self._ours, time.monotonic)
        session.request_lease(pending)
        for frame in self._frames:
            session.receive(frame)
        session.fail(PeerUnreachableError("no answer in time"))

    def release(self, lease: Lease) -> None:
        """As `ControlChannel.release`."""


class _Pool:
    """In the place of vLLM's blocks: counts their references."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(ref_cnt=0) for _ in range(_BLOCKS)]

    def touch(self, blocks: list[Any]) -> None:
        """As `BlockPool.touch`."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: list[Any]) -> None:
        """As `BlockPool.free_blocks`."""
        for block in blocks:
            block.ref_cnt -= 1


class _Log:
    """In the place of loggers: what is logged with its stack is a fault."""

    def warning(self, *args: object) -> None:
        """Nothing."""

    def exception(self, text: str, *args: object) -> None:
        """Called while the error is handled, which ends the trial with it."""
        raise AssertionError(text)


class _Copier:
    """In the place of the copies into KV caches: goes over the same rows."""

    speed = 1

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def load(self, copy: BlockCopy) -> NDArray[np.uint64]:
        """As `BlockCopier.load`."""
        return self._read(copy, self._sizes[copy.group])

    def load_pages(
        self, copy: BlockCopy, runs: Sequence[PageRun], length: int
    ) -> NDArray[np.uint64]:
        """As `BlockCopier.load_pages`."""
        done = 0
        for run in runs:
            assert done <= run.at <= length - run.nbytes
            assert 0 <= run.first < run.end <= self._sizes[copy.group]
            done = run.at + run.nbytes
        return self._read(copy, length)

    def _read(self, copy: BlockCopy, length: int) -> NDArray[np.uint64]:
        rows, index = copy.slots, copy.slot_ids
        assert len(copy.block_ids) == len(index)
        self._check(copy.block_ids)
        assert not len(index) or (index.min() >= 0 and index.max() < len(rows))
        assert rows.shape[1] >= length
        found = [xxhash.xxh3_64_intdigest(rows[i, :length].tobytes()) for i in index]
        return np.array(found if copy.checksum else [0] * len(found), np.uint64)

    def zero(self, group: int, block_ids: NDArray[np.int64], *, fence: object) -> None:
        """As `BlockCopier.zero`."""
        self._check(block_ids)

    def _check(self, block_ids: NDArray[np.int64]) -> None:
        assert all(0 < block < _BLOCKS for block in block_ids.tolist())


class _Decoder:
    """A decode engine of some compatibility key: its half beside the scheduler, and its loads."""

    def __init__(self, ours: CompatibilityKey, connector: SharedMemoryTransport) -> None:
        self.ours = ours
        sizes = tuple(_PAGES_BYTES * group.block_size // 16 // ours.ranks for group in ours.groups)
        layout = SlotLayout(sizes, max(sizes))
        copier: Any = _Copier(sizes)
        self.loader = Loader(
            transports=Transports([connector], [connector]),
            copier=copier,
            layout=layout,
            groups=ours.groups,
            rank=0,
            ranks=ours.ranks,
            checksum=True,
            context=PROCESS_CONTEXT,
            notify=lambda: None,
        )

    def load(self, frames: list[bytes], timeout: float = _TIMEOUT_S) -> bool | str:
        """Request a lease, ask, allocate and load, as vLLM has it done."""
        channel: Any = _Channel(self.ours, frames)
        pool: Any = _Pool()
        ledger = CopyLedger(pool, self.ours.ranks, time.monotonic)
        receiver = HandoffReceiver(
            rules=PromptRules(lambda *_: None),
            channel=channel,
            ledger=ledger,
            address_of=lambda remote: "ipc://x",
            compatibility=self.ours,
            group_ids=(0, 1),
            hash_id="",
            load_timeout=timeout,
            context=PROCESS_CONTEXT,
        )
        request: Any = SimpleNamespace(request_id="r")
        remote: Any = SimpleNamespace(token=b"t" * 16, epoch=EPOCH, remote_engine_id="e")
        fetch = receiver.add(request, remote, PROMPT)
        matched = receiver.matched_tokens(fetch, 0)
        if not matched:
            receiver.finish(fetch)
            return "not used"
        tables = [list(range(1, _BLOCKS))] * 2
        blocks: Any = SimpleNamespace(get_block_ids=lambda: tables)
        receiver.load(fetch, blocks, matched)
        meta = OmniConnectorMetadata()
        step: Any = SimpleNamespace(work=meta, busy=False)
        receiver.step(step)
        [(job_id, spec)] = meta.loads.items()
        assert isinstance(spec, LoadSpec)
        outcome = _done(self.loader.work(job_id, spec, None))
        failed = {} if outcome.failure is None else {job_id: outcome.failure}
        ledger.report({job_id: self.ours.ranks}, failed)
        receiver.finish(fetch)
        assert fetch.lease is None
        assert not ledger
        assert not any(block.ref_cnt for block in pool.blocks)
        return True if outcome.failure is None else outcome.failure


def _done(work: Work) -> Outcome:
    pieces = work(lambda: False)
    while True:
        try:
            goes_on = next(pieces)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        if goes_on is not True:
            time.sleep(0.0005)


@contextmanager
def answers() -> Iterator[Parser]:
    """Answers of a serving engine, followed to the bytes that they name."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="omni-", dir="/tmp")))
        stack.enter_context(patch.object(loading, "logger", _Log()))
        stack.enter_context(patch.object(receiving, "logger", _Log()))
        # However late it is read, a lease is not asked for again: the answer would be the same.
        stack.enter_context(patch.object(receiving, "_FRESH_S", 400.0))
        connector = stack.enter_context(SharedMemoryTransport(folder=folder))
        arena = stack.enter_context(Arena.create(16, 8192, randbytes=lambda count: b"E" * count))
        content = np.arange(_PAGES_BYTES, dtype=np.uint8)
        checksum = xxhash.xxh3_64_intdigest(content.data)
        for slot in range(12):
            arena.begin_write(slot, 1)
            arena.slots[slot, :_PAGES_BYTES] = content
            if slot < 10:
                arena.publish(slot, 1, b"k", _PAGES_BYTES, checksum)
        endpoint = connector.export(arena, "a")
        decoders = [_Decoder(ours, connector) for ours in readers()]
        for decoder in decoders:
            stack.callback(decoder.loader.close)
        corpus = _corpus(endpoint)

        def make(rng: random.Random) -> tuple[int, list[bytes]]:
            frames = list(corpus)
            place = rng.choice((0, 1, 1))
            frames[place] = distort_msgpack(frames[place], rng)
            return rng.randrange(len(decoders)), frames

        def parse(hostile: tuple[int, list[bytes]]) -> bool | str:
            return decoders[hostile[0]].load(hostile[1])

        def alive() -> None:
            for decoder in decoders:
                assert decoder.load(list(corpus), timeout=400.0) is True, (
                    "a valid answer is refused"
                )

        yield Parser("loads by answers", make, parse, (), alive)


def _corpus(endpoint: Endpoint) -> tuple[bytes, bytes]:
    groups = tuple(tuple((3 * g + i, 1) for i in range(3)) for g in range(2))
    granted = LeaseGranted(1, PROMPT.num_tokens, (0, 0), groups, 1000.0)
    handshake_reply = HandshakeReply(EPOCH, "", compatibility(), ((endpoint,),))
    return encode(handshake_reply), encode(granted)
