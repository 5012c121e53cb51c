# SPDX-License-Identifier: Apache-2.0
"""The example that subscribes to KV events, with vLLM's own publisher."""

import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from vllm.config import KVEventsConfig  # noqa: E402
from vllm.distributed.kv_events import (  # noqa: E402
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)

from omni_connector.testing.ports import free_port  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_events.py"


def test_it_hears_several_engines_at_one_loopback_port() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE), endpoint], stdout=subprocess.PIPE, text=True
    ) as subscriber:
        publishers = [EventPublisherFactory.create(config) for _ in range(2)]
        try:
            assert subscriber.stdout is not None
            heard: set[str] = set()
            lines = subscriber.stdout
            reader = Thread(
                target=lambda: heard.update(each.strip() for each in lines), daemon=True
            )
            reader.start()
            deadline = time.monotonic() + 120
            while len(heard) < 2 and time.monotonic() < deadline:
                for number, publisher in enumerate(publishers):  # the first ones come too early
                    stored = BlockStored(
                        block_hashes=[7] * (number + 1),
                        parent_block_hash=None,
                        token_ids=[1, 2, 3, 4],
                        block_size=4,
                        lora_id=None,
                        medium="CPU",
                        lora_name=None,
                        kv_cache_spec_kind="mamba",
                    )
                    publisher.publish(KVEventBatch(ts=0.0, events=[stored]))
                time.sleep(0.05)
        finally:
            subscriber.kill()
            for publisher in publishers:
                publisher.shutdown()
    assert heard == {"BlockStored 1 CPU mamba", "BlockStored 2 CPU mamba"}
