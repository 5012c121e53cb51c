# SPDX-License-Identifier: Apache-2.0
"""An event of many blocks tells a router what one event for each block would tell it."""

import hashlib
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from omni_connector.arena.block_index import BlockIndex
from omni_connector.arena.slot_index import SlotChanges
from omni_connector.arena.slot_pool import SlotListing, SlotPool
from omni_connector.kv.shapes import GroupShape
from omni_connector.prefix.block_changes import BlockChanges
from omni_connector.vllm_v1 import events as module
from omni_connector.vllm_v1.events import KVEvents

pytestmark = pytest.mark.vllm

HASHED = 4
SIZES = (4, 8, 12)
GROUP_IDS = (3, 0, 5)
KINDS = [("full_attention", None), *[("mamba", None)] * 3, *[("sliding_window", 8)] * 2]
TOKENS = 60


def request(tokens, *, salt=None, lora=None, session=None, images=()):
    """A request of vLLM's, as far as events are about it."""
    made = SimpleNamespace(
        mm_features=[
            SimpleNamespace(
                identifier=f"image {at}", mm_position=SimpleNamespace(offset=at, length=length)
            )
            for at, length in images
        ],
        all_token_ids=tokens,
        block_hashes=[],
        lora_request=lora
        and SimpleNamespace(adapter_id=7, name=lora, lora_name=lora, path=lora, lora_path=lora),
        cache_salt=salt,
        prompt_embeds=None,
        session_id=session,
    )
    before = b""
    for start in range(0, len(tokens), HASHED):
        end = start + HASHED
        keys, _ = generate_block_hash_extra_keys(made, start, end, 0)
        before = hashlib.sha256(before + repr((tokens[start:end], keys)).encode()).digest()
        made.block_hashes.append(before)
    return made


REQUESTS = [
    request(list(range(TOKENS)), session="a"),
    request(list(range(TOKENS // 2)) + [9] * (TOKENS // 2), session="b"),
    request(list(range(TOKENS)), salt="tenant"),
    request(list(range(TOKENS)), lora="adapter"),
    request(list(range(TOKENS)), images=[(3, 10), (13, 4), (30, 20)]),
]


def hashes_of(request, group):
    step = SIZES[group] // HASHED
    return request.block_hashes[step - 1 :: step]


def one_event(change):
    """The event of one block."""
    fields = {
        "medium": "STORAGE" if change.in_store else "CPU",
        "group_idx": GROUP_IDS[change.group],
        "locality": None if change.in_store else "LOCAL",
    }
    if change.content is None:
        block_hash = maybe_convert_block_hash(change.block_hash)
        return BlockRemoved(block_hashes=[block_hash], **fields)
    of, group, i = change.content
    hashes, size = [maybe_convert_block_hash(each) for each in hashes_of(of, group)], SIZES[group]
    keys, _ = generate_block_hash_extra_keys(of, i * size, (i + 1) * size, 0)
    lora = of.lora_request
    return BlockStored(
        block_hashes=[hashes[i]],
        parent_block_hash=hashes[i - 1] if i else None,
        token_ids=of.all_token_ids[i * size : (i + 1) * size],
        block_size=size,
        lora_id=lora and lora.adapter_id,
        lora_name=lora and lora.name,
        extra_keys=module._untagged([keys]),
        session_id=of.session_id,
        kv_cache_spec_kind=KINDS[GROUP_IDS[group]][0],
        kv_cache_spec_sliding_window=KINDS[GROUP_IDS[group]][1],
        **fields,
    )


class Subscriber:
    """What a subscriber of vLLM's publisher knows of blocks: by medium, group and hash."""

    def __init__(self):
        self.blocks = {}

    def hears(self, events):
        packet = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
        for event in msgspec.msgpack.decode(packet, type=KVEventBatch).events:
            place = event.medium, event.group_idx
            if isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.blocks[*place, block_hash]
                continue
            parent, size = event.parent_block_hash, event.block_size
            assert len(event.token_ids) == size * len(event.block_hashes)
            assert len(event.extra_keys) == len(event.block_hashes)
            for i, block_hash in enumerate(event.block_hashes):
                alone = {
                    "block_hashes": [block_hash],
                    "parent_block_hash": parent,
                    "token_ids": event.token_ids[i * size : (i + 1) * size],
                    "extra_keys": [event.extra_keys[i]],
                }
                assert (*place, block_hash) not in self.blocks
                self.blocks[*place, block_hash] = msgspec.structs.replace(event, **alone)
                parent = block_hash


class Place:
    """An arena and a store whose events are published."""

    def __init__(self, slots, index, made):
        self.pool = SlotPool(slots)
        self.pool.listing = SlotListing(index, b"", SlotChanges(slots))
        self.changes, self.take = made(self.pool)

    def does(self, step):
        match step:
            case "void":
                self.pool.forget()
                self.changes.void()
            case "forget":
                self.pool.forget()
            case ("store", of, group, held):
                hashes = hashes_of(REQUESTS[of], group)
                named = list(zip(hashes, hashes, strict=True))
                self.changes.looked_up(REQUESTS[of], group, named, held)
            case ("arena", of, group, some):
                hashes = hashes_of(REQUESTS[of], group)
                blocks = [(i, hashes[i], hashes[i]) for i in sorted(some) if i < len(hashes)]
                self.changes.filled(REQUESTS[of], group, blocks)
                keys = [key for _, key, _ in blocks]
                slots = self.pool.keep(group, keys, len(keys)).slots
                self.pool.filled(slots)
                self.pool.let_go(slots[::-1])


@contextmanager
def twins(slots):
    """Two places that are alike: of one as engines tell of it, of one block by block."""
    groups = [
        GroupShape(kind="g", block_size=size, attention_type="all", layers="x", pages=("x",))
        for size in SIZES
    ]

    def engines(pool):
        events = KVEvents(pool, groups, GROUP_IDS, KINDS, HASHED)
        return events.changes, events.take

    def block_by_block(pool):
        changes = BlockChanges(pool, SIZES, lambda of, g, indices: [(of, g, i) for i in indices])
        return changes, lambda: [one_event(change) for change in changes.take()]

    indexes = [BlockIndex.create(slots, bytes(16)) for _ in range(2)]
    try:
        makers = zip(indexes, (engines, block_by_block), strict=True)
        yield [Place(slots, index, made) for index, made in makers]
    finally:
        for index in indexes:
            index.close()


OF = st.integers(0, len(REQUESTS) - 1)
GROUP = st.integers(0, len(SIZES) - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), OF, GROUP, st.lists(st.booleans(), max_size=15)),
        st.tuples(st.just("store"), OF, GROUP, st.just([True] * 15)),
        st.tuples(st.just("arena"), OF, GROUP, st.sets(st.integers(0, 14), max_size=15)),
        st.tuples(st.just("arena"), OF, GROUP, st.just(range(15))),
        st.sampled_from(["hear", "hear", "hear", "forget", "void"]),
    ),
    max_size=30,
)


@given(steps=STEPS, slots=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_subscriber_rebuilds_what_one_event_a_block_would_tell(steps, slots):
    heard, wanted = Subscriber(), Subscriber()
    with twins(slots) as (ours, others):
        for step in [*steps, "hear"]:
            if step == "hear":
                told, one_by_one = ours.take(), others.take()
                heard.hears(told)
                wanted.hears(one_by_one)
                assert heard.blocks == wanted.blocks
                assert len(told) <= len(one_by_one)
                continue
            for each in (ours, others):
                each.does(step)


@pytest.mark.parametrize("place", ["store", "arena"])
@pytest.mark.parametrize("group", range(len(SIZES)))
def test_one_event_tells_of_all_blocks_of_a_prompt(place, group):
    blocks = TOKENS // SIZES[group]
    with twins(blocks) as (ours, _):
        ours.does((place, 0, group, [True] * blocks if place == "store" else range(blocks)))
        (stored,) = ours.take()
        assert stored.token_ids == REQUESTS[0].all_token_ids[: blocks * SIZES[group]]
        assert len(stored.block_hashes) == blocks
        ours.does("void")
        (removed,) = ours.take()
        assert set(removed.block_hashes) == set(stored.block_hashes)


def test_a_request_of_another_session_is_told_apart():
    with twins(40) as (ours, _):
        ours.does(("store", 0, 0, [True] * 7))
        ours.does(("store", 1, 0, [True] * 15))
        told = ours.take()
        assert [len(each.block_hashes) for each in told] == [7, 8]
        assert told[1].parent_block_hash == told[0].block_hashes[-1]
