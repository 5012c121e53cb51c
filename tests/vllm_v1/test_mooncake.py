# SPDX-License-Identifier: Apache-2.0
"""Hand-offs whose bytes go through Mooncake's Transfer Engine, over TCP on loopback."""

import threading

import numpy as np
import pytest

from omni_connector.transports.mooncake.transport import MooncakeTransport
from tests import inspection
from tests.toy import BLOCK, FAMILIES

from .harness import HANDOFF, assert_clean, hand_off, leased, prompt, require_right_handoffs
from .test_failed_loads import (
    FAILURES,
    PROMPT,
    copier_fails,
    peer_is_gone,
    slot_is_reused_while_it_is_read,
)

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("reused_engines")]

MOONCAKE = {"transport": "mooncake"}
LENGTHS = [2, BLOCK, 3 * BLOCK + 1, 150]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("instant", [False, True], ids=["late", "instant"])
@pytest.mark.values
def test_tokens_are_those_of_a_single_engine(engine, family, instant):
    options = {"family": family, "instant_copies": instant}
    reference = engine(**options)
    prefill = engine("kv_producer", extra=MOONCAKE, **options)
    decode = engine("kv_consumer", extra=MOONCAKE, **options)
    # vLLM takes the chunks before the last for cached.
    require_right_handoffs(prefill, decode, reference, LENGTHS, loads_all=family != "chunk")
    assert decode.count("peer:mooncake:configured") == 1


@pytest.mark.parametrize(
    ("option", "theirs", "ours"),
    [
        *(("ranks", 2, 1), ("ranks", 1, 2), ("ranks", 2, 2)),
        *(("block_size", 32, 16), ("block_size", 16, 32)),
    ],
)
def test_engines_of_other_numbers_of_ranks_and_blocks_of_other_sizes(engine, option, theirs, ours):
    prefill = engine("kv_producer", extra=MOONCAKE, **{option: theirs})
    decode = engine("kv_consumer", extra=MOONCAKE, **{option: ours})
    require_right_handoffs(prefill, decode, engine(**{option: ours}), LENGTHS)


# What is copied here is a copy already; tests/transports has the case of a slot that is reused.
@pytest.mark.parametrize(
    "spoil",
    [each for each in FAILURES if each is not slot_is_reused_while_it_is_read],
    ids=lambda spoil: spoil.__name__,
)
def test_a_failed_load_is_computed(engine, tokens, spoil):
    prefill = engine("kv_producer", extra=MOONCAKE)
    decode = engine("kv_consumer", policy="recompute", extra=MOONCAKE)
    request_id = leased(prefill, decode, PROMPT)
    spoil(prefill, decode)
    decode.settle()
    assert decode.answers[request_id].tokens == tokens(PROMPT, 6)
    assert decode.failures() == {FAILURES[spoil]: 1}
    assert decode.count("handoffs_received") == 0
    assert not decode.leftovers()
    assert decode.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)
    if spoil not in (peer_is_gone, copier_fails):
        assert hand_off(prefill, decode, prompt(90)) == tokens(prompt(90), 6)


def test_a_peer_that_does_not_answer_stops_nobody_else(engine, tokens, monkeypatch):
    prefill = engine("kv_producer", extra=MOONCAKE)
    silent = engine("kv_producer", extra=MOONCAKE)
    decode = engine("kv_consumer", policy="recompute", extra=MOONCAKE)
    address = silent.worker_half.handshake.endpoints[0].address
    attach = MooncakeTransport.attach
    ended = threading.Event()

    def slow(self, endpoint, *, timeout):
        if endpoint.address == address:
            ended.wait()
        return attach(self, endpoint, timeout=timeout)

    monkeypatch.setattr(MooncakeTransport, "attach", slow)
    late = silent.generate(prompt(60, seed=1), params=HANDOFF).params
    stuck = decode.submit(prompt(60, seed=1), max_tokens=6, params=late)
    answer = prefill.generate(prompt(90), params=HANDOFF).params
    quick = decode.submit(prompt(90), max_tokens=6, params=answer)
    decode.run(lambda: decode.done(quick))
    assert decode.answers[quick].tokens == tokens(prompt(90), 6)
    assert not decode.done(stuck)
    decode.pass_time(60.0)
    decode.settle()
    assert decode.answers[stuck].tokens == tokens(prompt(60, seed=1), 6)
    assert decode.failures() == {"peer_unreachable": 1}
    ended.set()


def test_by_itself_shared_memory_is_taken_on_one_host(engine, tokens):
    both_ways = {"transport": "auto", "listen": "127.0.0.1:0", "peers": ["127.0.0.1"]}
    prefill = engine("kv_producer", extra=both_ways)
    decode = engine("kv_consumer", extra=both_ways)
    assert [e.transport for e in prefill.worker_half.handshake.endpoints] == ["shm", "mooncake"]
    assert hand_off(prefill, decode, prompt(90)) == tokens(prompt(90), 6)
    assert decode.count("peer:shm:nearest") == 1
    assert_clean(prefill, decode)


def test_nothing_of_mooncake_starts_where_no_other_host_is_named(engine):
    both = engine("kv_both")
    assert [e.transport for e in both.worker_half.handshake.endpoints] == ["shm"]
    readers = inspection.readers(inspection.transports(both.worker_half))
    assert [each.transport for each in readers] == ["shm"]


def test_wrong_bytes_are_found_out(engine, tokens, monkeypatch):
    """The negative control: without the checks of headers and checksums, the answers are wrong."""
    prefill = engine("kv_producer", extra=MOONCAKE)
    decode = engine("kv_consumer", extra=MOONCAKE)
    inspection.compare_nothing(monkeypatch.setattr)
    request_id = leased(prefill, decode, PROMPT)
    for handoff in prefill.handoffs:
        for slot in handoff.slots[0]:
            np.bitwise_xor(arena := prefill.arena().slots[slot], 0x55, out=arena)
    decode.settle()
    assert decode.answers[request_id].tokens != tokens(PROMPT, 6)


@pytest.mark.parametrize("block_size", [BLOCK, 2 * BLOCK], ids=["alike", "converted"])
def test_bytes_that_travel_are_checked_whatever_the_integrity(engine, tokens, block_size):
    """Another slot's bytes, under the right header: a generation alone says nothing of them."""
    extra = {**MOONCAKE, "integrity": "generation"}
    prefill = engine("kv_producer", extra=extra)
    decode = engine("kv_consumer", extra=extra, block_size=block_size)
    assert hand_off(prefill, decode, prompt(90)) == tokens(prompt(90), 6)
    request_id = leased(prefill, decode, PROMPT)
    handoff = prefill.handoffs[0]
    arena, (one, two, *_) = prefill.arena(), handoff.slots[0]
    arena.slots[[one, two]] = arena.slots[[two, one]]
    decode.settle()
    assert decode.answers[request_id].tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"checksum_mismatch": 1}
