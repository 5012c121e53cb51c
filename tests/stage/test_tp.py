# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel stages: keys, and the heads that each rank sends, gets and keeps."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_connector.errors import ConfigError
from omni_connector.stage import tp
from omni_connector.stage.payload import KVCacheTransferData
from omni_connector.stage.tp import Topology

from .connectors import DictConnector, manager

TOKENS, BLOCK = 6, 4


def _model(heads: int, layers: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of all heads: (tokens, heads, dim), by layer."""
    generator = torch.Generator().manual_seed(heads)
    return [
        tuple(torch.randn(TOKENS, heads, 3, generator=generator) for _ in range(2))
        for _ in range(layers)
    ]


def _shard(part: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The heads that vLLM gives a rank: its share, or one that several have."""
    heads = part.shape[1]
    if heads >= ranks:
        each = heads // ranks
        return part[:, rank * each : (rank + 1) * each]
    return part[:, rank // (ranks // heads), None]


def _paged(part: torch.Tensor) -> torch.Tensor:
    """Tokens in blocks 1 and 0 of two."""
    pages = torch.zeros(2, BLOCK, *part.shape[1:], dtype=part.dtype)
    pages[1] = part[:BLOCK]
    pages[0, : TOKENS - BLOCK] = part[BLOCK:]
    return pages


FINISHED = {"r": {"block_ids": [1, 0], "seq_len": TOKENS}}


def _send(
    model, from_tp: int, to_tp: int, connector: DictConnector, *, hook: Any = None, **config: Any
) -> None:
    """Send the shards of all ranks, or what is the same on all of them.

    Args:
        hook: makes the keys of a rank, in place of the usual ones.
    """
    sizes = {} if "tp_size" in config else {"from_tp": from_tp, "to_tp": to_tp}
    for rank in range(from_tp):
        sender = manager(connector, tp_rank=rank, **sizes, **config)
        if hook is not None:
            sender.kv_send_key_builder = lambda *_, rank=rank: hook(rank)
        caches = [
            _paged(layer)
            if isinstance(layer, torch.Tensor)
            else tuple(_paged(_shard(part, rank, from_tp)) for part in layer)
            for layer in model
        ]
        assert sender.handle_finished_requests_kv_transfer(FINISHED, caches, BLOCK, "auto") == ["r"]
        assert not sender.last_failures


def _receive(from_tp: int, to_tp: int, connector: DictConnector, **config: Any) -> list[dict]:
    received = []
    for rank in range(to_tp):
        receiver = manager(connector, from_tp=from_tp, to_tp=to_tp, tp_rank=rank, **config)
        data, size = receiver.receive_kv_cache_for_request("r")
        assert data is not None
        assert size > 0
        received.append(data)
    return received


def _check(model, received: list[dict]) -> None:
    for rank, data in enumerate(received):
        for layer, parts in enumerate(model):
            for name, part in zip(("key_cache", "value_cache"), parts, strict=True):
                found = data["layer_blocks"][name][layer]
                assert torch.equal(found, _shard(part, rank, len(received)))
                assert found.is_contiguous()


SIZES = [(1, 1), (2, 2), (4, 4), (2, 1), (4, 1), (4, 2), (8, 2), (1, 2), (1, 4), (2, 4), (2, 8)]


@pytest.mark.parametrize(("from_tp", "to_tp"), SIZES)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("known", [True, False], ids=["heads known", "heads unknown"])
@pytest.mark.pairs
def test_every_rank_gets_the_heads_that_vllm_would_give_it(
    from_tp: int, to_tp: int, heads: int, known: bool
) -> None:
    model, connector = _model(heads), DictConnector()
    config = {"num_kv_heads": heads} if known else {}
    _send(model, from_tp, to_tp, connector, **config)
    _check(model, _receive(from_tp, to_tp, connector, **config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize(("from_tp", "to_tp"), [(4, 2), (2, 4), (2, 1)])
def test_caches_of_narrow_dtypes_and_with_nan_pass_too(
    dtype: torch.dtype, from_tp: int, to_tp: int
) -> None:
    model = [tuple(part.to(dtype) for part in layer) for layer in _model(2)]
    if dtype.is_floating_point:
        for layer in model:
            layer[0][1, 0, 1] = float("nan")
    connector = DictConnector()
    _send(model, from_tp, to_tp, connector)
    for rank, data in enumerate(_receive(from_tp, to_tp, connector)):
        for layer, parts in enumerate(model):
            found = data["layer_blocks"]["key_cache"][layer]
            expected = _shard(parts[0], rank, to_tp).contiguous()
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("from_tp", "to_tp"), [(4, 2), (8, 2), (4, 1)])
def test_the_senders_tell_how_many_heads_the_model_has(from_tp: int, to_tp: int) -> None:
    # Zeros: the shards of different heads are equal, so that comparing them would mislead.
    model = [tuple(torch.zeros_like(part) for part in layer) for layer in _model(from_tp)]
    connector = DictConnector()
    _send(model, from_tp, to_tp, connector, num_kv_heads=from_tp)
    received = _receive(from_tp, to_tp, connector)
    _check(model, received)
    assert "tp_kv_heads" not in received[0]["metadata"]


def test_what_the_receiver_is_configured_with_comes_first() -> None:
    # Copies of a head that differ in a bit, as kernels that are not deterministic may leave them.
    connector = DictConnector()
    heads = torch.stack([torch.full((TOKENS, 3), 1.0 + rank / 1e6) for rank in range(2)], dim=1)
    _send([(heads, heads)], 2, 1, connector)
    for heads, config in ((1, {"num_kv_heads": 1}), (2, {"num_kv_heads": 2}), (2, {})):
        data = _receive(2, 1, connector, **config)[0]
        assert data["layer_blocks"]["key_cache"][0].shape[1] == heads


@pytest.mark.parametrize(("from_tp", "to_tp"), SIZES)
def test_the_latent_of_mla_is_the_same_on_all_ranks(from_tp: int, to_tp: int) -> None:
    latent = torch.randn(TOKENS, 6)
    connector = DictConnector()
    _send([latent], from_tp, to_tp, connector)
    for data in _receive(from_tp, to_tp, connector):
        assert torch.equal(data["layer_blocks"]["key_cache"][0], latent[:, None])
        assert data["layer_blocks"]["value_cache"] == [None]


def test_keys_name_both_ranks_where_there_are_several() -> None:
    connector = DictConnector()
    _send(_model(4), 1, 1, connector)
    assert list(connector.objects) == [("0", "1", "omni_0_to_1_kv_cache_r")]
    for from_tp, to_tp, keys in (
        (2, 2, ["r_0_0_0_0", "r_0_0_1_1"]),
        (4, 2, ["r_0_0_0_0", "r_0_0_1_0", "r_0_0_2_1", "r_0_0_3_1"]),
        (2, 4, ["r_0_0_0_0", "r_0_0_0_1", "r_0_0_1_2", "r_0_0_1_3"]),
    ):
        connector = DictConnector()
        _send(_model(4), from_tp, to_tp, connector)
        assert [key for *_, key in connector.objects] == keys
        _receive(from_tp, to_tp, connector)
        assert [key for key, _ in connector.gets] == keys


def test_one_size_stands_for_both_sides_if_no_mapping_is_given() -> None:
    connector = DictConnector()
    _send(_model(4), 2, 2, connector, tp_size=2)
    assert [key for *_, key in connector.objects] == ["r_0_0_0_0", "r_0_0_1_1"]


def test_a_slice_is_marked() -> None:
    connector = DictConnector()
    _send(_model(8), 2, 4, connector)
    received = _receive(2, 4, connector)
    assert received[3]["metadata"]["tp_head_slice"] == {
        "applied": True,
        "side": "sender",
        "target_rank": 3,
        "source_rank": 1,
        "from_tp": 2,
        "to_tp": 4,
        "offset_in_shard": 1,
        "num_slices": 2,
    }
    assert "tp_head_slice" not in _receive_unsliced(2, 2)["metadata"]


def _receive_unsliced(from_tp: int, to_tp: int) -> dict:
    connector = DictConnector()
    _send(_model(8), from_tp, to_tp, connector)
    return _receive(from_tp, to_tp, connector)[0]


def test_heads_that_the_sender_did_not_slice_are_sliced_by_the_receiver() -> None:
    model, connector = _model(4), DictConnector()
    _send(model, 2, 4, connector, hook=lambda rank: Topology(2, 4, rank).send_keys("r", "0", "1"))
    received = _receive(2, 4, connector)
    _check(model, received)
    mark = received[3]["metadata"]["tp_head_slice"]
    assert (mark["side"], mark["offset_in_shard"], mark["num_slices"]) == ("receiver", 1, 2)


def test_a_slice_for_another_rank_or_other_sizes_is_refused() -> None:
    connector = DictConnector()
    _send(_model(8), 2, 4, connector)
    objects = connector.objects
    objects["0", "1", "r_0_0_0_0"] = objects["0", "1", "r_0_0_0_1"]
    receiver = manager(connector, from_tp=2, to_tp=4, tp_rank=0)
    assert receiver.receive_kv_cache_for_request("r") == (None, 0)
    objects["0", "1", "r_0_0_0_0"] = objects["0", "1", "r_0_0_1_2"]
    receiver = manager(connector, from_tp=2, to_tp=2, tp_rank=0)
    assert receiver.receive_kv_cache_for_request("r") == (None, 0)


def test_a_part_that_is_missing_is_a_time_out_and_not_a_smaller_cache() -> None:
    connector = DictConnector()
    _send(_model(4), 4, 1, connector)
    del connector.objects["0", "1", "r_0_0_2_0"]
    receiver = manager(connector, from_tp=4, to_tp=1, tp_rank=0)
    assert receiver.receive_kv_cache_for_request("r") == (None, 0)
    # Parts that came are not asked for again.
    assert [key for key, _ in connector.gets].count("r_0_0_0_0") == 1


def test_parts_of_requests_of_the_same_id_are_not_joined() -> None:
    connector = DictConnector()
    first, second = _model(4), [tuple(-part for part in layer) for layer in _model(4)]
    receiver = manager(connector, from_tp=2, to_tp=1, tp_rank=0)
    _send(first, 2, 1, connector)
    assert receiver.receive_kv_cache_for_request("r")[1] > 0
    earlier = dict(connector.objects)
    _send(second, 2, 1, connector)
    late = {key: connector.objects[key] for key in connector.objects if key[2] == "r_0_0_1_0"}
    assert late
    connector.objects |= {key: earlier[key] for key in late}  # that rank has not sent it yet
    assert receiver.receive_kv_cache_for_request("r") == (None, 0)
    connector.objects |= late
    data, _ = receiver.receive_kv_cache_for_request("r")
    assert data is not None
    assert torch.equal(data["layer_blocks"]["key_cache"][0], second[0][0])


def test_a_request_that_was_sent_in_part_is_withdrawn() -> None:
    connector = DictConnector()
    answers = iter([None, None, *[(False, 0, None)] * 3])
    connector.on_put = lambda: next(answers)
    sender = manager(connector, from_tp=1, to_tp=4, tp_rank=0)
    caches = [tuple(_paged(part) for part in layer) for layer in _model(4)]
    assert sender.handle_finished_requests_kv_transfer(FINISHED, caches, BLOCK, "auto") == ["r"]
    assert list(sender.last_failures) == ["r"]
    assert connector.objects == {}


def _shards(heads: int, from_tp: int) -> list[dict[str, Any]]:
    model = _model(heads)
    return [
        {
            "request_id": "r",
            "layer_blocks": {
                name: [_shard(layer[part], rank, from_tp).clone() for layer in model]
                for part, name in enumerate(("key_cache", "value_cache"))
            },
            "block_ids": [1, 0],
            "metadata": {"seq_len": TOKENS, "block_size": BLOCK},
        }
        for rank in range(from_tp)
    ]


def _swap(shards: list[dict[str, Any]]) -> None:
    for rank, shard in enumerate(shards):
        shard["metadata"]["tp_kv_heads"] = {"total": 4, "source_rank": 1 - rank, "from_tp": 2}


DAMAGE = {
    "request_id": lambda shards: shards[1].update(request_id="q"),
    "block_ids": lambda shards: shards[1].update(block_ids=[0, 1]),
    "seq_len": lambda shards: shards[1]["metadata"].update(seq_len=7),
    "numbers of layers": lambda shards: shards[1]["layer_blocks"]["key_cache"].pop(),
    "is absent": lambda shards: shards[1]["layer_blocks"]["value_cache"].__setitem__(0, None),
    "another shape": lambda shards: shards[1]["layer_blocks"]["value_cache"].__setitem__(
        0, torch.zeros(TOKENS, 1, 3)
    ),
    "in the place of sender 0": _swap,
}


@pytest.mark.parametrize("says", DAMAGE)
def test_shards_that_do_not_belong_together_are_refused(says: str) -> None:
    shards = _shards(4, 2)
    DAMAGE[says](shards)
    with pytest.raises(ValueError, match=says):
        tp.merge_shards(shards, Topology(2, 1, 0), None)


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    data = KVCacheTransferData("r", {"key_cache": [torch.zeros(TOKENS, 3, 2)]}, [], {})
    with pytest.raises(ValueError, match="3 KV heads cannot be shared out to 2 ranks"):
        tp.slice_heads(data.to_dict(), Topology(1, 2, 0), 0, "sender")
    flat = KVCacheTransferData("r", {"key_cache": [torch.zeros(TOKENS)]}, [], {})
    with pytest.raises(ValueError, match="no dimension of heads"):
        tp.slice_heads(flat.to_dict(), Topology(1, 2, 0), 0, "sender")
    with pytest.raises(ValueError, match="3 KV heads cannot be shared out over 4 ranks"):
        tp.merge_shards(_shards(4, 4), Topology(4, 1, 0), 3)


def test_equal_shards_in_an_order_that_vllm_does_not_make_are_refused() -> None:
    shards = _shards(4, 4)
    shards[2]["layer_blocks"] = shards[1]["layer_blocks"]
    with pytest.raises(ValueError, match="no order that vLLM makes"):
        tp.merge_shards(shards, Topology(4, 1, 0), None)


def test_shards_without_tokens_are_not_taken_for_copies() -> None:
    shards = _shards(2, 2)
    for shard in shards:
        shard["layer_blocks"] = {
            name: [tensor[:0] for tensor in layers]
            for name, layers in shard["layer_blocks"].items()
        }
    merged = tp.merge_shards(shards, Topology(2, 1, 0), None)
    assert merged["layer_blocks"]["key_cache"][0].shape == (0, 2, 3)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (4, 6), (0, 1), (1, 0), (-2, 1)])
def test_sizes_must_divide(sizes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="tensor-parallel sizes must divide"):
        manager(from_tp=sizes[0], to_tp=sizes[1])


def test_a_rank_must_be_one_of_its_sides() -> None:
    assert Topology(1, 4, 3).source_ranks() == [0]
    with pytest.raises(ValueError, match="rank 3 is not one of the 1 that send"):
        Topology(1, 4, 3).target_ranks()
    with pytest.raises(ValueError, match="rank 3 is not one of the 1 that receive"):
        Topology(4, 1, 3).source_ranks()
    with pytest.raises(ConfigError, match="rank -1"):
        Topology(2, 2, -1)


def test_the_rank_is_vllms_else_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.distributed.parallel_state", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert (tp.local_rank(), tp.local_size()) == (0, 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert tp.local_rank() == 2
    monkeypatch.setenv("LOCAL_RANK", "two")
    assert tp.local_rank() == 0

    def not_made() -> int:
        raise AssertionError("tensor model parallel group is not initialized")

    state = SimpleNamespace(
        get_tensor_model_parallel_rank=not_made, get_tensor_model_parallel_world_size=not_made
    )
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (tp.local_rank(), tp.local_size()) == (1, 1)
    state.get_tensor_model_parallel_rank = lambda: 3
    state.get_tensor_model_parallel_world_size = lambda: 4
    assert (tp.local_rank(), tp.local_size()) == (3, 4)
    connector = DictConnector()
    assert manager(connector).receive_kv_cache_for_request("r") == (None, 0)
    assert connector.gets[0] == ("r_0_0_3_3", None)


@pytest.mark.vllm
def test_vllms_own_parallel_state_is_asked_that_way() -> None:
    import vllm.distributed.parallel_state as state

    for name in ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"):
        assert callable(getattr(state, name))
    assert tp.local_size() == 1


def test_each_senders_rank_answers_at_its_own_port() -> None:
    connector = DictConnector()
    connector.told = []
    connector.update_sender_info = lambda host, port: connector.told.append((host, port))
    receiver = manager(connector, from_tp=4, to_tp=2, tp_rank=1)
    assert receiver.connector is connector
    receiver.update_sender_info({"host": "h", "zmq_port": 5000})
    assert connector.told == [("h", 5016)]
    assert receiver.receive_kv_cache_for_request("r") == (None, 0)
    assert connector.gets[:2] == [
        ("r_0_0_2_1", {"source_host": "h", "source_port": 5032}),
        ("r_0_0_3_1", {"source_host": "h", "source_port": 5048}),
    ]
