# SPDX-License-Identifier: Apache-2.0
"""Routers that follow KV events credit an engine with what it can load: Dynamo's own indexer,
vllm-router, and llm-d by its rules."""

from itertools import count

import msgspec
import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored

from omni_connector.testing.ports import free_port
from tests.patience import wait_until
from tests.toy import BLOCK

from .harness import prompt, slots
from .indexer import Credit, Indexer
from .kv_aware import KvAwareRouter
from .llm_d import WEIGHTS, LlmD
from .test_host_prefix import publish, sharer  # noqa: F401 - a fixture

pytestmark = pytest.mark.vllm

BLOCKS = 8
LENGTH = BLOCKS * BLOCK
TEXT = prompt(LENGTH + 3)
MAIN = "full_attention"


def endpoint_of(engine):
    """Where a router of this host hears an engine's events."""
    return engine.config.kv_events_config.endpoint.replace("*", "127.0.0.1")


class Dynamo:
    """An engine that Dynamo's indexer follows."""

    NOTHING = Credit(0, 0, 0)
    BOTH = Credit(LENGTH, LENGTH, LENGTH)
    ARENA = Credit(0, LENGTH, LENGTH)

    def __init__(self, engine, folder):
        self.indexer = Indexer(folder, endpoint_of(engine), BLOCK)
        self.close = self.indexer.close
        self.ended = self.indexer.forget_engine

    def credit(self, tokens):
        return self.indexer.credit(tokens)


class Scored:
    """An engine that llm-d follows."""

    NOTHING = 0.0
    BOTH = pytest.approx(BLOCKS * WEIGHTS["GPU"])
    ARENA = pytest.approx(BLOCKS * WEIGHTS["CPU"])

    def __init__(self, engine, folder):
        self.reader = LlmD()
        engine.scheduler.kv_event_publisher.publish = self.reader.hears

    def credit(self, tokens):
        return self.reader.score(tokens, BLOCK)

    def ended(self):
        """It forgets a pod that has ended."""
        self.reader = LlmD()

    def close(self):
        pass


class Routed:
    """An engine that vllm-router follows; here a block in host memory is worth half of one on the
    device."""

    NOTHING = 0
    BOTH = LENGTH
    ARENA = LENGTH // 2

    def __init__(self, engine, folder):
        pytest.importorskip("vllm_router")
        self.router = KvAwareRouter(folder, endpoint_of(engine), BLOCK, host_credit=0.5)
        self.close = self.router.close

    def credit(self, tokens):
        return self.router.credits(tokens)


class Followed:
    """An engine whose cache is smaller than its arena, and a router that has heard its events."""

    def __init__(self, engine, router):
        self.engine, self.router = engine, router
        self._seeds = count(1000)
        wait_until(lambda: router.credit(self._last()))  # what is sent before it listens is lost

    def _last(self):
        """Compute a prompt as long as a window, and return it."""
        text = prompt(3 * BLOCK, seed=next(self._seeds))
        publish(self.engine, text)
        return text

    def computes(self, text=TEXT):
        publish(self.engine, text)
        last = self._last()
        wait_until(lambda: self.router.credit(last))  # it has heard all before, too
        return self.router.credit(text)

    def computes_others_until(self, credit):
        """Compute other prompts until `TEXT` is credited so; few of them are needed."""
        for seed in range(60):
            self.computes(prompt(LENGTH, seed=seed + 5))
            if self.router.credit(TEXT) == credit:
                return
        pytest.fail(f"{self.router.credit(TEXT)}, not {credit}")


@pytest.fixture
def followed(sharer, tmp_path):  # noqa: F811
    made = []

    def make(router, family="full", tells=lambda event: event):
        engine = sharer(
            family=family,
            events=KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{free_port()}"),
            usable_blocks=60,
            extra=slots(200),
        )
        connector = engine.scheduler.connector
        told = connector.take_events
        connector.take_events = lambda: [each for each in map(tells, told()) if each is not None]
        made.append(router(engine, tmp_path))
        return Followed(engine, made[-1])

    yield make
    for each in made:
        each.close()


FAMILIES = ["full", "latent", "window and full", "state and full"]
ROUTERS = [Dynamo, Scored, Routed]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_tier_is_credited_as_long_as_it_holds_a_prompt(followed, router, family):
    if router is Routed and family == "state and full":
        pytest.skip("vllm-router credits vLLM's own blocks beside states with a block at most")
    at = followed(router, family)
    assert at.computes() == router.BOTH
    at.computes_others_until(router.ARENA)
    assert at.engine.scheduler.reset_prefix_cache()
    at.computes(prompt(BLOCK, seed=4))
    assert at.router.credit(TEXT) == router.ARENA, "a reset leaves the arena as it is"
    at.computes_others_until(router.NOTHING)
    assert at.computes() == router.BOTH
    assert at.engine.scheduler.reset_prefix_cache(reset_connector=True)
    at.computes(prompt(BLOCK, seed=4))
    assert at.router.credit(TEXT) == router.NOTHING
    assert at.computes() == router.BOTH
    if router is Dynamo:
        assert at.router.indexer.duplicates() == 0
    at.engine.shutdown()
    if router is not Routed:  # vllm-router asks for /health, and sends nothing to who is not there
        at.router.ended()
        assert at.router.credit(TEXT) == router.NOTHING


@pytest.mark.parametrize("router", ROUTERS)
def test_an_arena_that_tells_nothing_is_not_credited(followed, router):
    """The control: vLLM's own events are of its own cache alone."""
    at = followed(router, tells=lambda event: None)
    at.computes()
    at.computes_others_until(router.NOTHING)


@pytest.mark.parametrize("right", [True, False], ids=["their kind", "main attention's"])
def test_blocks_of_windows_do_not_count_as_main_attention(followed, right):
    """With the kind of main attention they would: the control."""

    def of_windows(event):
        if not isinstance(event, BlockStored):
            return event
        if event.kv_cache_spec_kind == MAIN:
            return None
        return event if right else msgspec.structs.replace(event, kv_cache_spec_kind=MAIN)

    at = followed(Dynamo, "window and full", of_windows)
    at.computes()
    at.computes_others_until(Dynamo.NOTHING if right else Dynamo.ARENA)


def test_a_block_that_is_told_twice_is_counted(followed):
    """So nothing is counted elsewhere because nothing is told twice."""
    at = followed(Dynamo, tells=lambda event: msgspec.structs.replace(event, medium="GPU"))
    at.computes()
    assert at.router.indexer.duplicates() > 0
