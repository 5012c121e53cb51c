# SPDX-License-Identifier: Apache-2.0
"""KV from stage to stage through Mooncake's Transfer Engine."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from omni_connector.net.keys import write_new_key
from omni_connector.objects import mooncake as objects_mooncake
from omni_connector.objects.exchange import Read
from omni_connector.stage import link
from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.extract import KVLayout
from omni_connector.stage.manager import OmniKVTransferManager
from omni_connector.stage.ports import KV_OFFSET, RANK_STRIDE
from omni_connector.testing.ports import free_port, free_ports

from .caches import cache_of, sequence
from .connectors import send

pytest.importorskip("mooncake.engine", exc_type=ImportError)


def manager(**config: Any) -> OmniKVTransferManager:
    settings = {"type": "MooncakeTransferEngineConnector", **config.pop("settings", {})}
    return OmniKVTransferManager(
        OmniKVCacheConfig(
            connector_config=settings,
            from_stage="0",
            to_stage="1",
            stage_id="1" if config.get("need_recv_cache") else "0",
            recv_timeout=10.0,
            **config,
        )
    )


def test_a_sequence_travels_to_the_stage_that_is_told_its_sender() -> None:
    port = free_port() - KV_OFFSET
    layers = [sequence(37, heads=2, dim=32, block_size=16, num_blocks=9, seed=s) for s in range(3)]
    layers = [type(each)(each.key, each.value, layers[0].block_ids, 16, 9) for each in layers]
    caches = [cache_of(each, KVLayout.PACKED) for each in layers]
    with ExitStack() as stack:
        sender = stack.enter_context(manager(need_send_cache=True, settings={"zmq_port": port}))
        receiver = stack.enter_context(manager(need_recv_cache=True))
        finished = {"req/1": {"block_ids": layers[0].block_ids, "seq_len": 37}}
        sender.handle_finished_requests_kv_transfer(finished, caches, 16, "float32")
        receiver.update_sender_info({"host": "127.0.0.1", "zmq_port": port + KV_OFFSET})
        data, size = receiver.receive_kv_cache_for_request("req/1")
        assert data is not None
        assert size > 0
        blocks = data["layer_blocks"]
        for i, layer in enumerate(layers):
            assert torch.equal(blocks["key_cache"][i], layer.key)
            assert torch.equal(blocks["value_cache"][i], layer.value)


def test_ranks_without_a_port_send_to_the_ranks_of_a_request_that_names_their_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The default port itself may be somebody's.
    monkeypatch.setattr(link, "ENGINE_PORT", free_ports(RANK_STRIDE + 1) - KV_OFFSET)
    seqs = [sequence(21, heads=2, dim=8, block_size=16, num_blocks=4, seed=s) for s in range(2)]
    with ExitStack() as stack:
        for rank, seq in enumerate(seqs):
            sender = stack.enter_context(manager(need_send_cache=True, tp_rank=rank, tp_size=2))
            assert send(sender, seq)
        for rank, seq in enumerate(seqs):
            receiver = stack.enter_context(manager(need_recv_cache=True, tp_rank=rank, tp_size=2))
            req = SimpleNamespace(request_id="r", kv_sender_info={"host": "127.0.0.1"})
            assert receiver.receive_kv_cache(req)
            assert torch.equal(req.past_key_values.key_cache[0], seq.key)


def test_a_sender_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port() - KV_OFFSET
    with ExitStack() as stack:
        sender = stack.enter_context(manager(need_send_cache=True, settings={"zmq_port": port}))
        receiver = stack.enter_context(manager(need_recv_cache=True))
        receiver.config.recv_timeout = 3600.0  # who polls hangs
        receiver.update_sender_info({"host": "127.0.0.1", "zmq_port": port + KV_OFFSET})
        assert sender.connector.health()["status"] == "healthy"
        with monkeypatch.context() as patched:
            patched.setattr(objects_mooncake, "QUESTIONS", msgspec.msgpack.Decoder(Read))
            assert receiver.receive_kv_cache_for_request("r") == (None, 0)
        # What it refuses once, it may answer to the next request.
        seq = sequence(21, heads=2, dim=8, block_size=16, num_blocks=4)
        assert send(sender, seq)
        data, _ = receiver.receive_kv_cache_for_request("r")
        assert data is not None
        assert torch.equal(data["layer_blocks"]["key_cache"][0], seq.key)


def test_a_receiver_with_another_key_does_not_wait(tmp_path: Path) -> None:
    port = free_port() - KV_OFFSET
    write_new_key(tmp_path / "key")
    with ExitStack() as stack:
        sender = stack.enter_context(manager(need_send_cache=True, settings={"zmq_port": port}))
        assert sender.connector.health()["status"] == "healthy"
        receiver = stack.enter_context(
            manager(need_recv_cache=True, settings={"key_file": str(tmp_path / "key")})
        )
        receiver.config.recv_timeout = 3600.0  # who polls hangs
        receiver.update_sender_info({"host": "127.0.0.1", "zmq_port": port + KV_OFFSET})
        assert receiver.receive_kv_cache_for_request("r") == (None, 0)


def test_an_edge_without_kv_opens_no_port() -> None:
    with manager(settings={"zmq_port": free_port()}) as idle:
        assert "listen" not in idle.connector.health()
