# SPDX-License-Identifier: Apache-2.0
"""A connector of somebody else's: objects in a dict, and failures that a test orders."""

import itertools
from collections.abc import Callable
from typing import Any

from omni_connector.objects.factory import OmniConnectorFactory
from omni_connector.stage.config import OmniKVCacheConfig
from omni_connector.stage.manager import OmniKVTransferManager
from omni_connector.testing import FakeClock

_names = itertools.count()


class DictConnector:
    """What the API asks of a connector, and nothing more.

    Attributes:
        supports_raw_data: as of any connector.
        objects: what was put.
        puts: keys, in the order in which they were put or refused.
        gets: keys and metadata asked for.
        on_put: called before each put; what it returns, unless None, is the answer.
        on_get: the same of get.
        cleaned: ids given to `cleanup`.
        closed: how often it was closed.
    """

    def __init__(self, objects: dict | None = None, *, raw: bool = False) -> None:
        self.supports_raw_data = raw
        self.objects = {} if objects is None else objects
        self.puts: list[str] = []
        self.gets: list[tuple[str, Any]] = []
        self.on_put: Callable[[], Any] | None = None
        self.on_get: Callable[[], Any] | None = None
        self.cleaned: list[str] = []
        self.closed = 0

    def put(self, *, from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
        self.puts.append(put_key)
        answer = None if self.on_put is None else self.on_put()
        if answer is not None:
            return answer
        self.objects[from_stage, to_stage, put_key] = data
        return True, len(data), None

    def get(self, *, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> Any:
        self.gets.append((get_key, metadata))
        answer = None if self.on_get is None else self.on_get()
        if answer is not None:
            return answer
        found = self.objects.get((from_stage, to_stage, get_key))
        return None if found is None else (found, len(found))

    def cleanup(self, request_id: str) -> None:
        self.cleaned.append(request_id)
        for key in [key for key in self.objects if request_id in key[2]]:
            del self.objects[key]

    def close(self) -> None:
        self.closed += 1


class Time(FakeClock):
    """A clock that only sleeping moves, and that remembers how long."""

    def __init__(self) -> None:
        super().__init__(100.0)
        self.slept: list[float] = []
        self.on_sleep: Callable[[], None] | None = None

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        super().sleep(seconds)
        if self.on_sleep is not None:
            self.on_sleep()


def register(make: Callable[[dict[str, Any]], Any]) -> str:
    """Register a constructor under a name of its own, and return that."""
    name = f"TestConnector{next(_names)}"
    OmniConnectorFactory.register_connector(name, make)
    return name


def manager(connector: Any = None, **config: Any) -> OmniKVTransferManager:
    """A manager from stage 0 to stage 1, both sending and receiving, whose time is a `Time`.

    `connector` is what it will be given; by default a new `DictConnector`.
    """
    connector = DictConnector() if connector is None else connector
    time = config.pop("time", None) or Time()
    settings = {
        "connector_config": {"type": register(lambda extra: connector)},
        "from_stage": "0",
        "to_stage": "1",
        "stage_id": 1,
        "need_send_cache": True,
        "need_recv_cache": True,
        "recv_timeout": 2.0,
    } | config
    made = OmniKVTransferManager(
        OmniKVCacheConfig(**settings),
        clock=time,
        sleep=time.sleep,
    )
    made.time = time  # type: ignore[attr-defined]
    return made


def send(sender: OmniKVTransferManager, seq: Any, request_id: str = "r", **request: Any) -> bool:
    """Send one request, with one layer, and say whether it was sent."""
    from .caches import cache_of

    finished = {request_id: {"block_ids": seq.block_ids, "seq_len": seq.tokens, **request}}
    caches = [cache_of(seq, "pair")]
    done = sender.handle_finished_requests_kv_transfer(finished, caches, seq.block_size, "auto")
    assert done == [request_id]
    return request_id not in sender.last_failures
