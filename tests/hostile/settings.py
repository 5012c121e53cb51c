# SPDX-License-Identifier: Apache-2.0
"""What users, routers and operators say: `kv_transfer_params` and configurations."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec

from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError, OmniError
from omni_connector.handoff.params import (
    BadParamsError,
    handoff_answer,
    is_usable,
    no_handoff_answer,
    parse_remote_prefill,
    tcp_address,
    wants_handoff,
    wants_remote_kv,
)
from omni_connector.net.peers import HostPort, Peers
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.mooncake import read_hint
from omni_connector.objects.transfer_config import load_omni_transfer_config
from omni_connector.stage.config import read_model_config
from tests.hostile.mutation import distort_value
from tests.hostile.trial import Parser

PARAMS: list[dict[str, Any]] = [
    {"do_remote_decode": True, "do_remote_prefill": False},
    no_handoff_answer("arena_full"),
    *(
        handoff_answer(
            engine_id="engine-1",
            request_id="cmpl-1",
            epoch=bytes(range(16)),
            token=b"\xff" * 16,
            num_tokens=33,
            tokens_ahead=0,
            tp_size=2,
            address=address,
        )
        for address in (None, HostPort("127.0.0.1", 5600), HostPort("host.internal", 1))
    ),
]
"""What engines of this package answer, and what asks for a hand-off."""

CONFIGS: list[dict[str, Any]] = [
    {},
    {
        "transport": "shm",
        "transport_config": {"knob": 1, "more": {"a": [None, "b"]}},
        "arena_gib": 0.5,
        "namespace": "team",
        "model_id": "m@1",
        "handoff_ttl_s": 60,
        "arena_wait_s": 1.5,
        "load_timeout_s": 3,
        "integrity": "generation",
        "engine_id": "e",
    },
    {
        "listen": "127.0.0.1:0",
        "peers": ["10.0.0.0/8", "::1", "host.internal"],
        "mooncake": {"protocol": "tcp", "device": "", "host": "10.0.0.1", "timeout_s": 5.0},
        "store": {"master": "127.0.0.1:50051", "segment_gib": 0, "lookup_timeout_s": 0.1},
    },
]
"""Values of `kv_connector_extra_config`."""

_PIPELINE: dict[str, Any] = {
    "connectors": {
        "a": {"name": "SharedMemoryConnector", "extra": {"object_gib": 1}},
        "b": {"name": "MooncakeStoreConnector"},
    },
    "stages": [
        {"stage_id": 0, "output_connectors": {"to_stage_1": "a"}},
        {"stage_id": 1, "input_connectors": {"from_stage_0": "a"}, "engine_input_source": [0]},
    ],
    "edges": [{"from": 1, "to": 2}],
}
_MANAGER: dict[str, Any] = {
    "connector_config": {"type": "SharedMemoryConnector"},
    "omni_from_stage": "0",
    "omni_to_stage": "1",
    "stage_id": 1,
    "engine_input_source": [0],
    "need_recv_cache": True,
    "recv_timeout": 3.5,
    "rank_mapping": {"from_tp": 2, "to_tp": 4},
    "num_kv_heads": 8,
    "kv_layout": ["packed", None],
}


def hostile_params(rng: random.Random) -> Any:
    """`kv_transfer_params` of a request."""
    if rng.random() < 0.02:
        return distort_value([1], rng)
    return distort_value(rng.choice(PARAMS), rng)


@contextmanager
def params() -> Iterator[Parser]:
    """`kv_transfer_params`, in both roles."""
    peers = Peers(["10.0.0.0/8", "127.0.0.1", "host.internal"])

    def parse(found: Any) -> bool | str:
        if not is_usable(found):
            return "no object"
        handed = wants_handoff(found)
        if not wants_remote_kv(found):
            return True if handed else "wants nothing"
        remote = parse_remote_prefill(found)
        assert (len(remote.epoch), len(remote.token)) == (16, 16)
        if remote.remote_host is not None:
            address = tcp_address(remote, peers, has_key=True)
            assert peers.allows(address.host)
            assert 0 < address.port < 1 << 16
        return True

    yield Parser("kv_transfer_params", hostile_params, parse, (BadParamsError,))


@contextmanager
def configurations() -> Iterator[Parser]:
    """`kv_connector_extra_config`, alone or from the environment."""

    def make(rng: random.Random) -> tuple[Any, dict[str, str]]:
        found = distort_value(rng.choice(CONFIGS), rng)
        environ: dict[str, str] = {}
        if isinstance(found, dict) and rng.random() < 0.3:
            for key, value in list(found.items()):
                if isinstance(key, str) and rng.random() < 0.5:
                    text = value if isinstance(value, str) else _text(value)
                    environ[f"OMNI_CONNECTOR_{key.upper()}"] = text
                    del found[key]
        return found, environ

    def parse(hostile: tuple[Any, dict[str, str]]) -> bool:
        found, environ = hostile
        config = OmniConfig.load(found, environ)
        assert 0 < config.load_timeout_s < float("inf")
        assert 0 < config.handoff_ttl_s < float("inf")
        assert (config.arena_bytes() or 0) >= 0
        Peers(config.peers)
        msgspec.msgpack.encode(config)  # peers are told some of it
        return True

    yield Parser("configurations", make, parse, (ConfigError,))


def _text(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return "{"


@contextmanager
def pipelines() -> Iterator[Parser]:
    """Configurations of pipelines, and of one stage's manager."""

    def make(rng: random.Random) -> tuple[bool, Any]:
        pipeline = rng.random() < 0.5
        return pipeline, distort_value(_PIPELINE if pipeline else _MANAGER, rng)

    def parse(hostile: tuple[bool, Any]) -> bool:
        pipeline, found = hostile
        if pipeline:
            load_omni_transfer_config(config_dict=found)
            return True
        config = read_model_config(SimpleNamespace(omni_kv_config=found))
        assert 0 <= config.recv_timeout < float("inf"), "a receiver would wait for ever"
        config.send_stages()
        config.recv_stages()
        return True

    yield Parser("pipelines and managers", make, parse, (ConfigError,))


@contextmanager
def hints() -> Iterator[Parser]:
    """Metadata that came with an object, which says where to ask for it."""
    corpus: list[Any] = [
        {"transport": "shm", "length": 3},
        {"transport": "mooncake", "source_host": "127.0.0.1", "source_port": 5, "length": 3},
    ]

    def make(rng: random.Random) -> Any:
        return distort_value(rng.choice(corpus), rng)

    def parse(found: Any) -> bool:
        read_hint(found)
        return True

    yield Parser("metadata of objects", make, parse, (OmniError,))


@contextmanager
def object_keys() -> Iterator[Parser]:
    """Keys and request ids, which are any strings."""

    def make(rng: random.Random) -> list[Any]:
        keys: list[Any] = ["0", "1", "omni_0_to_1_kv_cache_req-1", "req-1"]
        found = distort_value(keys, rng)
        return (
            [each for each in found if isinstance(each, str)] if isinstance(found, list) else keys
        )

    def parse(found: list[str]) -> bool:
        start, end, key, request_id = (*found, "", "", "", "")[:4]
        name = ObjectKey(start, end, key)
        assert len(name.digest) == 32
        str(name)
        name.belongs_to(request_id)
        return True

    yield Parser("keys of objects", make, parse, ())
