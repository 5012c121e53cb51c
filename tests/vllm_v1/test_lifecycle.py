# SPDX-License-Identifier: Apache-2.0
"""Start, reset and end of an engine, and what happens between two of its steps."""

import copy

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from omni_connector.errors import ConfigError
from omni_connector.plugin import CONNECTOR_NAME, register
from omni_connector.vllm_v1 import worker
from omni_connector.vllm_v1.compat import hash_block_size
from omni_connector.vllm_v1.connector import OmniKVConnector
from omni_connector.vllm_v1.identity import hash_id
from tests import inspection
from tests.toy import BLOCK

from .harness import (
    HANDOFF,
    InProcessEngine,
    assert_clean,
    connector_threads,
    hand_off,
    prompt,
    run,
    sockets,
    wait,
)

pytestmark = pytest.mark.vllm

PROMPT = prompt(5 * BLOCK)


def test_the_class_is_registered_under_its_own_name():
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME) is OmniKVConnector
    assert OmniKVConnector.__name__ == CONNECTOR_NAME
    assert supports_hma(OmniKVConnector)


def test_vllm_books_loaded_tokens_where_it_asks_for_their_source():
    source = OmniKVConnector._cache_hit_source
    asks = hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources")
    assert (source is not None and source.value == "p2p") is asks


@pytest.mark.parametrize("family", ["full", "window and full", "all three"])
def test_what_a_block_hash_stands_for_is_known_where_vllm_does_not_tell(engine, family):
    each = engine("kv_both", family=family)
    untold = copy.copy(each.kv_config)
    untold.hash_block_size = None
    assert hash_block_size(each.config, untold) == BLOCK
    assert hash_block_size(each.config, each.kv_config) == BLOCK


def test_no_hash_names_blocks_that_depend_on_later_tokens(engine):
    each = engine("kv_both")
    untold = copy.deepcopy(each.kv_config)
    object.__setattr__(untold.kv_cache_groups[0].kv_cache_spec, "non_causal", True)
    assert hash_block_size(each.config, untold) == 0


@pytest.mark.parametrize(
    ("cores", "device", "threads"),
    [(1, "cpu", 1), (4, "cpu", 3), (64, "cpu", 4), (2, "cuda", 2), (64, "cuda", 4)],
)
def test_a_copy_is_shared_by_the_cores_beside_those_that_compute(
    engine, monkeypatch, cores, device, threads
):
    """And by the engine's own thread, while it has nothing to compute."""
    monkeypatch.setattr(worker.torch, "get_num_threads", lambda: 1)
    assert worker._copy_threads(cores, device) == threads
    monkeypatch.setattr(worker, "_copy_threads", lambda cores, device: threads)
    assert inspection.sharing_threads(engine("kv_both").worker_half) == 1 + threads


@pytest.mark.parametrize("role", ["kv_producer", "kv_both", "kv_consumer"])
def test_nobody_needs_vllm_to_see_to_the_delivery(engine, role):
    assert engine(role).scheduler.requires_kv_delivery is False


def test_a_decode_engine_has_no_arena_and_listens_to_nobody(engine, runtime):
    decode = engine("kv_consumer")
    assert decode.worker_half.handshake.endpoints == ()
    assert not sockets(runtime)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"arena_gb": 1}, "arena_gib"),
        ({"arena_gib": "much"}, "arena_gib"),
        ({"integrity": "none"}, "generation"),
        ({"arena_gib": 1e-9}, "arena_gib"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_is_named(model, runtime, extra, said):
    with pytest.raises(ConfigError, match=said):
        InProcessEngine(model, "kv_both", extra=extra)
    wait(lambda: not connector_threads())
    assert not sockets(runtime)


def test_the_decode_engine_serves_others_while_it_waits(engine):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    held = prefill.hold(saves=True)
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id))
    decoded = decode.submit(PROMPT, max_tokens=6, params=prefill.answers[request_id].params)
    local = decode.submit(prompt(40, seed=1), max_tokens=6)
    decode.run(lambda: decode.done(local))
    assert not decode.done(decoded)
    held.open()
    run([prefill, decode], lambda: decode.done(decoded))
    assert_clean(prefill, decode)


def test_a_load_that_never_comes_is_given_up_in_time(engine, tokens):
    extra = {"load_timeout_s": 0.3}
    prefill, decode = engine("kv_producer", extra=extra), engine("kv_consumer", extra=extra)
    prefill.hold(saves=True)
    request_id = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(request_id))
    answer = prefill.answers[request_id].params
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"peer_unreachable": 1}
    assert not decode.leftovers()


def test_a_peer_that_does_not_answer_is_given_up_in_time(engine, tokens, monkeypatch):
    prefill, decode = engine("kv_producer"), engine("kv_consumer", extra={"load_timeout_s": 0.3})
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    monkeypatch.setattr(inspection.control_server(prefill.half), "receive", lambda *_: None)
    assert decode.generate(PROMPT, 6, params=answer).tokens == tokens(PROMPT, 6)
    assert decode.failures() == {"peer_unreachable": 1}
    assert not decode.leftovers()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_shutdown_leaves_no_thread_and_no_socket_and_may_be_repeated(engine, runtime, role):
    each = engine(role)
    assert connector_threads()
    for _ in range(2):
        each.shutdown()
    assert not connector_threads()
    assert not sockets(runtime)


def test_shutdown_in_the_middle_of_everything(engine, runtime):
    prefill, decode = engine("kv_producer", max_tokens_a_step=32), engine("kv_consumer")
    answer = prefill.generate(PROMPT, params=HANDOFF).params
    saves, loads = prefill.hold(saves=True), decode.hold(loads=True)
    decode.submit(PROMPT, params=answer)
    decode.run(loads.waiting.is_set)
    prefill.submit(prompt(90, seed=1), params=HANDOFF)
    prefill.run(saves.waiting.is_set)
    decode.submit(prompt(40, seed=2), params=answer)
    prefill.shutdown()
    decode.shutdown()
    assert not connector_threads()
    assert not sockets(runtime)


def test_an_engine_that_was_never_started_shuts_down(model, runtime):
    made = InProcessEngine(model, "kv_both")
    for role in KVConnectorRole:
        OmniKVConnector(made.config, role, made.kv_config).shutdown()
    made.shutdown()
    assert not connector_threads()


def test_engines_of_other_namespaces_do_not_find_each_other(engine, tokens):
    prefill = engine("kv_producer", extra={"namespace": "one"})
    decode = engine("kv_consumer", extra={"namespace": "two"})
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert decode.failures() == {"peer_unreachable": 1}


def test_hashes_seeded_at_random_are_compared_with_nobodys(engine, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = engine().config
    config.cache_config.prefix_caching_hash_algo = "sha256"
    assert hash_id(config, BLOCK) == hash_id(config, BLOCK) != ""
    assert hash_id(config, BLOCK) != hash_id(config, 2 * BLOCK)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    assert hash_id(config, BLOCK) == ""
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = hash_id(config, BLOCK)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert "" != one != hash_id(config, BLOCK)
    config.cache_config.enable_prefix_caching = False
    assert hash_id(config, BLOCK) == ""


def test_a_step_with_nothing_to_do_makes_no_work(engine):
    both = engine("kv_both")
    both.submit(prompt(20), max_tokens=3)
    scheduled = both.scheduler.schedule()
    metadata = scheduled.kv_connector_metadata
    for work in (metadata.saves, metadata.loads, metadata.cancel):
        assert not work
    both.scheduler.update_from_output(scheduled, both.execute(scheduled))
    both.settle()


def test_the_end_of_an_engine_closes_its_copier(engine):
    """On a device it has pinned the arena's memory."""
    each = engine("kv_both")
    copier = each.hold()
    closed = []
    copier.close = lambda: closed.append(copier)
    each.shutdown()
    assert closed == [copier]
