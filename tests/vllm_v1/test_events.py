# SPDX-License-Identifier: Apache-2.0
"""KV events: what a subscriber of vLLM's publisher believes of arenas and store is true."""

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from omni_connector.kv.shapes import GroupShape
from omni_connector.vllm_v1 import events as events_module
from omni_connector.vllm_v1.events import KVEvents
from tests import inspection
from tests.toy import BLOCK

from .harness import assert_clean, hand_off, prompt, slots
from .stores import MASTER, PREFIX, QUESTION, landed
from .test_host_prefix import kept, publish, sharer  # noqa: F401 - a fixture

pytestmark = pytest.mark.vllm

EVENTS = KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def each_block(event):
    """An event of many blocks as events of one block each, as routers read it."""
    if not isinstance(event, BlockStored) or len(event.block_hashes) == 1:
        return [event]
    parents = [event.parent_block_hash, *event.block_hashes]
    keys = event.extra_keys or [None] * len(event.block_hashes)
    return [
        msgspec.structs.replace(
            event,
            block_hashes=[block_hash],
            parent_block_hash=parents[i],
            token_ids=event.token_ids[i * event.block_size :][: event.block_size],
            extra_keys=[keys[i]],
        )
        for i, block_hash in enumerate(event.block_hashes)
    ]


class Router:
    """Follows events as a KV-aware router does.

    Attributes:
        blocks: by medium, what is stored: the last event of each block, by its hash.
        clears: media that it takes `AllBlocksCleared` to be of.
        log: every event, those of many blocks as events of one each.
    """

    def __init__(self):
        self.blocks = {"GPU": {}, "CPU": {}, "STORAGE": {}}
        self.clears = tuple(self.blocks)
        self.log = []

    def hears(self, batch):
        for event in [each for of in batch.events for each in each_block(of)]:
            self.log.append(event)
            if isinstance(event, AllBlocksCleared):
                for medium in self.clears:
                    self.blocks[medium].clear()
            elif isinstance(event, BlockStored):
                for block_hash in event.block_hashes:
                    self.blocks[event.medium][block_hash] = event
            else:
                for block_hash in event.block_hashes:
                    self.blocks[event.medium].pop(block_hash, None)

    def of(self, medium, kind=BlockStored):
        return [e for e in self.log if isinstance(e, kind) and e.medium == medium]

    def holds(self, medium, tokens):
        """How many leading blocks of a prompt this router expects to find."""
        named = {
            (e.parent_block_hash, *e.token_ids): e.block_hashes[-1]
            for e in self.blocks[medium].values()
        }
        parent, count = None, 0
        while (name := (parent, *tokens[count * BLOCK : (count + 1) * BLOCK])) in named:
            parent, count = named[name], count + 1
        return count


def routed(engine):
    """Have a router hear what an engine publishes from now on."""
    router = Router()
    engine.scheduler.kv_event_publisher.publish = router.hears
    return router


@pytest.fixture
def teller(sharer):  # noqa: F811
    def make(role="kv_both", **options):
        engine = sharer(role, events=EVENTS, **options)
        return engine, routed(engine)

    return make


def test_what_is_kept_is_told_with_its_tokens(teller):
    engine, router = teller()
    publish(engine)
    assert router.holds("CPU", PREFIX) == kept(engine) == 6
    first, *_, last = router.of("CPU")
    vllms = [h for e in router.of("GPU") for h in e.block_hashes]
    assert [e.block_hashes[0] for e in router.of("CPU")] == vllms
    assert first.parent_block_hash is None
    assert last.parent_block_hash == vllms[-2]
    assert (last.block_size, last.group_idx, last.locality) == (BLOCK, 0, "LOCAL")
    publish(engine)
    assert len(router.of("CPU")) == 6, "they are told once"


@pytest.mark.parametrize("family", ["full", "window", "window and full", "latent"])
def test_each_group_is_told_as_vllm_tells_it(teller, family):
    """Routers count main attention alone, and take an event without a kind for that."""
    engine, router = teller(family=family)
    publish(engine)
    told, vllms = (
        {(e.group_idx, e.block_hashes[0]): e for e in router.of(medium)}
        for medium in ("CPU", "GPU")
    )
    assert len(told) == kept(engine)
    for block, event in told.items():
        assert event.kv_cache_spec_kind
        place = {"medium": "GPU", "locality": vllms[block].locality}
        assert msgspec.structs.replace(event, **place) == vllms[block]
    assert not router.of("CPU", BlockRemoved)


def test_a_block_that_is_evicted_is_removed(teller):
    engine, router = teller(extra=slots(12))
    publish(engine)
    for seed in range(4):
        publish(engine, prompt(4 * BLOCK, seed=seed))
        assert len(router.blocks["CPU"]) == kept(engine)
    assert router.holds("CPU", PREFIX) == 0
    assert router.holds("CPU", prompt(4 * BLOCK, seed=3)) == 4
    publish(engine, QUESTION)
    assert router.holds("CPU", PREFIX) == 6, "what is kept again is told again"


def test_only_the_engine_that_keeps_a_block_tells_of_it(teller):
    (first, of_first), (second, of_second) = teller(), teller()
    publish(first)
    publish(second, QUESTION)
    assert second.count("tokens_from_host") == 6 * BLOCK
    assert of_first.holds("CPU", PREFIX) == 6
    assert not of_second.blocks["CPU"]


def test_a_handed_off_prompt_is_told(teller, tokens):
    (prefill, router), (decode, _) = teller("kv_producer"), teller("kv_consumer")
    assert hand_off(prefill, decode, PREFIX) == tokens(PREFIX, 6)
    assert_clean(prefill, decode)
    assert router.holds("CPU", PREFIX) == kept(prefill)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_after_a_reset_nothing_is_there_and_it_can_come_again(teller, role):
    engine, router = teller(role)
    publish(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    publish(engine)
    cleared = next(i for i, e in enumerate(router.log) if isinstance(e, AllBlocksCleared))
    assert len([e for e in router.log[cleared:] if isinstance(e, BlockStored)]) >= 6
    assert router.holds("CPU", PREFIX) == kept(engine) == 6


@pytest.mark.parametrize("blocks", [6, 70])
@pytest.mark.parametrize("clears", [True, False], ids=["all media", "its own medium"])
def test_after_a_reset_that_changes_no_weights_what_stays_is_told_again(teller, blocks, clears):
    """vLLM's `AllBlocksCleared` names no medium: routers may take it in either way."""
    engine, router = teller(usable_blocks=400, extra=slots(100))
    text = prompt(blocks * BLOCK)
    for end in range(0, blocks, 20):  # not more at once than may be copied
        publish(engine, text[: (end + 20) * BLOCK])
    if not clears:
        router.clears = ("GPU",)
    assert engine.scheduler.reset_prefix_cache()
    engine.generate(prompt(20, seed=9))
    assert router.holds("CPU", text) == blocks
    assert len(router.blocks["CPU"]) == kept(engine) == blocks + 1
    engine.generate([*text, 7])
    assert engine.count("tokens_kept") == blocks * BLOCK
    assert router.holds("CPU", text) == blocks
    told = len(router.of("CPU"))
    engine.generate([*text, 8])
    assert len(router.of("CPU")) == told, "they are told once"


def test_a_salt_is_told_as_vllm_tells_it(teller):
    engine, router = teller()
    publish(engine, salt="tenant")
    told = [e.extra_keys for e in router.of("CPU")]
    assert told == [[("tenant",)], *[[None]] * 5]


def test_the_session_of_a_request_is_told():
    request = with_images([(0, 2 * BLOCK)])
    request.session_id = "a conversation"
    (event,) = told_as_stored(request)
    assert event.session_id == "a conversation"


class Features(list):
    """Images of a prompt, which count how often one is looked at."""

    looked = 0

    def __getitem__(self, at):
        self.looked += 1
        return super().__getitem__(at)


def with_images(images):
    """A request with images after gaps, of so many tokens each, that ends after the last."""
    at, features = 0, Features()
    for number, (gap, length) in enumerate(images):
        place = SimpleNamespace(offset=at + gap, length=length)
        features.append(SimpleNamespace(identifier=f"image {number}", mm_position=place))
        at += gap + length
    blocks = at // BLOCK + 1
    return SimpleNamespace(
        mm_features=features,
        all_token_ids=list(range(blocks * BLOCK)),
        block_hashes=[bytes([n % 256]) * 32 for n in range(blocks)],
        lora_request=None,
        cache_salt=None,
        prompt_embeds=None,
        session_id=None,
    )


def told_as_stored(request):
    group = GroupShape(
        kind="full_attention", block_size=BLOCK, attention_type="all", layers="x", pages=("x",)
    )
    events = KVEvents(None, [group], [0], [("full_attention", None)], BLOCK)
    hashes = request.block_hashes
    events.changes.looked_up(
        request, 0, list(zip(hashes, hashes, strict=True)), [True] * len(hashes)
    )
    return events.take()


@given(images=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=6))
def test_each_block_is_told_with_the_images_in_it(images):
    request = with_images(images)
    (told,) = told_as_stored(request)
    for index, event in enumerate(each_block(told)):
        place = index * BLOCK, (index + 1) * BLOCK
        keys, _ = generate_block_hash_extra_keys(request, *place, 0)
        assert event.extra_keys == events_module._untagged([keys])


def test_for_each_block_few_of_many_images_are_looked_at():
    request = with_images([(3, 29)] * 256)
    (told,) = told_as_stored(request)
    assert request.mm_features.looked < 16 * len(told.block_hashes)


def test_the_store_is_told_when_it_is_known_to_hold_a_block(engine, shelf):
    options = {"extra": {**MASTER}, "events": EVENTS}
    first, second = engine("kv_both", **options), engine("kv_both", **options)
    of_first, of_second = routed(first), routed(second)
    publish(first)
    landed(first)
    assert not of_first.blocks["STORAGE"]
    publish(second, QUESTION)
    assert of_second.holds("STORAGE", QUESTION) == 6
    shelf.evict()
    publish(second, QUESTION + prompt(2 * BLOCK, seed=3))
    assert not of_second.blocks["STORAGE"]


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
@pytest.mark.parametrize("extra", [{"share": True}, {"share": True, **MASTER}, {"share": False}])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_engine_with_an_arena_publishes_events_even_if_it_cannot_share(
    engine, shelf, role, extra, prefix_caching
):
    sharing = extra["share"] and prefix_caching
    publisher = engine(role, extra=extra, events=EVENTS, prefix_caching=prefix_caching)
    router = routed(publisher)
    publish(publisher)
    assert inspection.directory(publisher.half) is not None
    assert len(router.blocks["CPU"]) == (6 if sharing else 0)


def test_without_events_nothing_is_noted(sharer):  # noqa: F811
    engine = sharer()
    publish(engine)
    assert inspection.kv_events(engine.half) is None
    assert inspection.directory(engine.half).pool.listing.changes is None
    assert engine.scheduler.connector.take_events() == ()


@pytest.fixture
def tier():
    """vLLM's names of where what it hits comes from, which it has from 0.32 on."""
    return pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource


def test_vllm_counts_what_was_hit_by_its_source(sharer, shelf, tier):  # noqa: F811
    first, third = sharer(), sharer(extra=MASTER)
    publish(first, PREFIX[: 2 * BLOCK])
    publish(third)
    landed(third)
    inspection.pool(third.half).forget()
    fourth = sharer(extra=MASTER)
    assert hits(fourth, QUESTION) == {
        tier.P2P: 2 * BLOCK,
        tier.EXTERNAL_UNSPECIFIED: 4 * BLOCK,
    }
    own = prompt(4 * BLOCK, seed=7)
    publish(first, own)
    assert first.scheduler.kv_cache_manager.reset_prefix_cache()
    inspection.begin_epoch(first.half)  # as if this had been an eviction
    assert hits(first, own) == {tier.HOST: 3 * BLOCK}


def test_vllm_counts_a_hand_off_as_a_peers(sharer, tier):  # noqa: F811
    prefill, decode = sharer("kv_producer"), sharer("kv_consumer")
    counted = sources(decode)
    hand_off(prefill, decode, PREFIX)
    assert counted == {tier.P2P: len(PREFIX) - 1}


def sources(engine):
    """Where vLLM counts that what it hits from now on comes from."""
    connector = engine.scheduler.connector
    ask, counted = connector.get_external_cache_hit_sources, {}

    def answer(*args):
        counted.update(found := ask(*args))
        return found

    connector.get_external_cache_hit_sources = answer
    return counted


def hits(engine, tokens):
    """By source, what vLLM counts of one request."""
    counted = sources(engine)
    engine.generate(tokens)
    return counted
