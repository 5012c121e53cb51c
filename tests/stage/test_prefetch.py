# SPDX-License-Identifier: Apache-2.0
"""The KV of the next request comes in the background."""

import threading
import time
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch

from omni_connector.stage.config import read_model_config
from omni_connector.stage.groups import ParallelGroups
from omni_connector.stage.manager import KVPrefetchConsumeError, OmniKVTransferManager
from omni_connector.stage.prefetch import Prefetcher, Received, free_memory

from .caches import sequence
from .connectors import DictConnector, manager, send

SENDER = {"host": "127.0.0.1", "zmq_port": 50151}
WAIT_S = 60.0


def _manager(connector: DictConnector | None = None, **config: Any) -> OmniKVTransferManager:
    return manager(connector, enable_kv_async_prefetch=True, **config)


def _job(request_id: str = "r", **fields: Any) -> dict[str, Any]:
    return {"request_id": request_id, "kv_sender_info": SENDER} | fields


def _request(request_id: str = "r") -> Namespace:
    return Namespace(request_id=request_id, sampling_params=Namespace(), kv_sender_info=SENDER)


def test_what_was_prefetched_is_consumed_once_and_asked_for_no_more() -> None:
    connector = DictConnector()
    with _manager(connector) as kv:
        assert send(kv, sequence())
        kv.start_prefetch(_job())
        assert kv.wait_prefetch(WAIT_S) is True
        asked = len(connector.gets)
        req = _request()
        assert kv.consume_and_distribute_kv_cache(req) is True
        assert torch.equal(req.past_key_values.key_cache[0], sequence().key)
        assert req.sampling_params.kv_metadata["seq_len"] == 10
        assert len(connector.gets) == asked
        assert kv.consume_prefetched_kv(req) == (None, 0)
        assert kv.stats.received == 1


def test_starting_returns_at_once_and_the_pipeline_computes_meanwhile() -> None:
    connector = DictConnector()
    entered, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        may_go.wait(WAIT_S)

    connector.on_get = hold
    with _manager(connector) as kv:
        assert send(kv, sequence())
        kv.start_prefetch(_job())
        assert entered.wait(WAIT_S)
        assert kv.wait_prefetch(0.0) is False
        kv.start_prefetch(_job())  # it is under way already
        may_go.set()
        data, size = kv.consume_prefetched_kv(_request())
        assert data is not None
        assert size > 0
        assert len(connector.gets) == 1


def test_what_was_prefetched_is_not_used_by_a_later_request_of_the_same_id() -> None:
    with _manager() as kv:
        assert send(kv, sequence(seed=1))
        kv.start_prefetch(_job())
        assert kv.wait_prefetch(WAIT_S)  # and is aborted
        assert send(kv, sequence(seed=2))
        kv.start_prefetch(_job())
        data, _ = kv.consume_prefetched_kv(_request())
        assert data is not None
        assert torch.equal(data["layer_blocks"]["key_cache"][0], sequence(seed=2).key)
        kv.start_prefetch(_job())
        assert kv.consume_and_distribute_kv_cache(_request()) is False


def test_what_another_sender_has_is_not_what_was_asked_of_this_one() -> None:
    connector = DictConnector()
    connector.update_sender_info = lambda host, port: None  # type: ignore[attr-defined]
    with _manager(connector, recv_timeout=WAIT_S) as kv:
        kv.start_prefetch(_job())
        kv.start_prefetch(_job(kv_sender_info={"host": "elsewhere", "zmq_port": 50151}))
        assert send(kv, sequence())
        assert kv.consume_prefetched_kv(_request())[1] > 0
        assert connector.gets[-1][1]["source_host"] == "elsewhere"


def test_another_request_drops_the_one_before() -> None:
    connector = DictConnector()
    with _manager(connector, recv_timeout=WAIT_S) as kv:
        kv.start_prefetch(_job("never sent"))
        assert send(kv, sequence(), "next")
        kv.start_prefetch(_job("next"))
        assert kv.wait_prefetch(WAIT_S)
        assert kv.consume_prefetched_kv(_request("never sent")) == (None, 0)
        # Consuming another one has dropped it, as vLLM-Omni's runner goes by turns.
        assert kv.consume_prefetched_kv(_request("next")) == (None, 0)
        kv.start_prefetch(_job("next"))
        assert kv.consume_prefetched_kv(_request("next"))[1] > 0
        assert kv.stats.receive_timeouts == 0


def test_what_was_not_prefetched_is_received_when_it_is_consumed() -> None:
    connector = DictConnector()
    with _manager(connector) as kv:
        assert send(kv, sequence())
        assert kv.consume_and_distribute_kv_cache(_request()) is True
        assert kv.consume_and_distribute_kv_cache(_request("never sent")) is False


def test_what_came_in_time_for_the_second_try_only_is_used() -> None:
    connector = DictConnector()
    with _manager(connector, recv_timeout=0.0) as kv:
        kv.start_prefetch(_job())
        assert kv.wait_prefetch(WAIT_S)
        assert send(kv, sequence())
        assert kv.consume_and_distribute_kv_cache(_request()) is True
        assert kv.stats.receive_timeouts == 1


def test_what_cannot_be_used_is_said_and_not_asked_for_again() -> None:
    connector = DictConnector()
    connector.objects["0", "1", "omni_0_to_1_kv_cache_r"] = b"damaged"
    with _manager(connector) as kv:
        kv.start_prefetch(_job())
        with pytest.raises(KVPrefetchConsumeError, match="header_len"):
            kv.consume_prefetched_kv(_request())
        kv.start_prefetch(_job())
        assert kv.wait_prefetch(WAIT_S)
        asked = len(connector.gets)
        req = _request()
        assert kv.consume_and_distribute_kv_cache(req) is False
        assert len(connector.gets) == asked
        assert not hasattr(req, "past_key_values")
        assert kv.stats.receive_failures == 2


FOLLOWER = ParallelGroups(Namespace(world_size=2, rank_in_group=1))


@pytest.mark.parametrize(
    ("job", "config"),
    [
        (None, {}),
        ({}, {}),
        (_job(kv_sender_info=None), {}),
        (_job(kv_sender_info={"host": "two words"}), {}),
        (_job("dummy_req_id/1"), {}),
        (_job(), {"need_recv_cache": False}),
        (_job(), {"enable_kv_async_prefetch": False}),
        (_job(), {"kv_prefetch_min_free_mem_ratio": 1.1}),
        (_job(), {"parallel_groups": FOLLOWER}),
    ],
)
def test_nothing_is_prefetched_where_it_should_not_be(job: Any, config: dict[str, Any]) -> None:
    connector = DictConnector()
    with manager(connector, **{"enable_kv_async_prefetch": True} | config) as kv:
        kv.start_prefetch(job)
        assert kv.wait_prefetch(0.0) is True
        assert kv.consume_prefetched_kv(_request()) == (None, 0)
    assert connector.gets == []


def test_prefetching_gives_way_to_what_needs_the_memory() -> None:
    free = 0.3
    received = Received({"layer_blocks": {}}, 1, {})
    prefetcher = Prefetcher(lambda *arguments: received, 0.25, lambda device: free)
    assert prefetcher.start("a", None, None) is True
    free = 0.2
    assert prefetcher.start("b", None, None) is False
    assert prefetcher.consume("a", WAIT_S) == received
    assert 0 < free_memory(None) <= 1
    prefetcher.close()


def test_a_prefetch_that_does_not_end_is_given_up_and_closing_waits_for_none() -> None:
    may_go = threading.Event()
    prefetcher = Prefetcher(lambda *arguments: may_go.wait() and None, 0.0)
    assert prefetcher.start("a", None, None) is True
    assert prefetcher.consume("a", 0.05) is None
    assert prefetcher.start("b", None, None) is True
    # Both threads are taken, the first by what was given up.
    assert prefetcher.start("c", None, None) is False
    prefetcher.close()
    assert prefetcher.start("d", None, None) is False
    may_go.set()


def test_closing_the_manager_ends_what_is_received_in_the_background() -> None:
    connector = DictConnector()
    kv = _manager(connector, recv_timeout=WAIT_S)
    kv.start_prefetch(_job("never sent"))
    while not connector.gets:
        time.sleep(0.01)
    kv.close()
    kv.close()
    kv.start_prefetch(_job("another"))
    assert kv.consume_prefetched_kv(_request("another")) == (None, 0)


@pytest.mark.parametrize(
    ("settings", "collects", "enabled"),
    [
        ({"enable_kv_async_prefetch": True}, False, True),
        ({}, False, False),
        ({"enable_kv_async_prefetch": True}, True, False),
        ({"enable_kv_async_prefetch": True, "connector_config": {"memory_pool_device": "cuda"}},
         False, False),
        ({"enable_kv_async_prefetch": True, "connector_config": {"memory_pool_device": "CPU"}},
         False, True),
    ],
)  # fmt: skip
def test_the_configuration_says_whether_to_prefetch(
    settings: dict[str, Any], collects: bool, enabled: bool
) -> None:
    config = Namespace(omni_kv_config=settings | {"kv_prefetch_min_free_mem_ratio": 0.25})
    if collects:
        config.cfg_kv_collect_func = lambda *arguments: {}
    read = read_model_config(config)
    assert read.enable_kv_async_prefetch is enabled
    assert read.kv_prefetch_min_free_mem_ratio == 0.25


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan"), "half"])
def test_a_ratio_that_is_none_is_refused(ratio: Any) -> None:
    settings = {"kv_prefetch_min_free_mem_ratio": ratio}
    with pytest.raises(ValueError, match="kv_prefetch_min_free_mem_ratio"):
        read_model_config(Namespace(omni_kv_config=settings))
