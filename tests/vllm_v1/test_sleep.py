# SPDX-License-Identifier: Apache-2.0
"""Engines that sleep, wake up and are paused: what vLLM's `EngineCore` does then, by its own code.

After sleep the KV cache lies at the same addresses and holds whatever bytes.
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.request import RequestStatus

from tests.toy import BLOCK

from .harness import HANDOFF, InProcessEngine, assert_clean, hand_off, prompt, wait

pytestmark = pytest.mark.vllm

PROMPT = prompt(6 * BLOCK - 3)


class Executor:
    """The workers of an engine, as far as sleep goes."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._engine = engine
        self.is_sleeping = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def sleep(self, level: int) -> None:
        """See vLLM's `Worker.sleep`."""
        self._tell("unregister_kv_caches")
        self.is_sleeping = True
        self._engine.runner.spoil(list(range(self._engine.kv_config.num_blocks)), level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """See vLLM's `Worker.wake_up`."""
        self.is_sleeping = False
        self._tell("restore_kv_caches")

    def _tell(self, hook: str) -> None:
        for worker in self._engine.workers:
            getattr(worker, hook, lambda: None)()  # from vLLM 0.33 on

    def get_kv_connector_handshake_metadata(self) -> list[dict[tuple[int, int], Any] | None]:
        """See vLLM's `Worker`."""
        told = enumerate(worker.get_handshake_metadata() for worker in self._engine.workers)
        return [None if said is None else {(0, rank): said} for rank, said in told]


class Core(EngineCoreProc):
    """vLLM's engine core around an engine of these tests, without processes."""

    def __init__(self, engine: InProcessEngine) -> None:
        self.scheduler = engine.scheduler
        self.model_executor: Any = Executor(engine)
        self.mm_receiver_cache = None
        self.engines_running = False
        self.batch_queue = None
        self.reject_new_requests = False
        self.told: list[str] = []
        self._idle_state_callbacks: list[Any] = []

    def __del__(self) -> None:
        """Nothing of vLLM's is left to end."""

    def _send_finish_outputs_to_client(self, req_ids: list[str], *args: Any) -> None:
        self.told += req_ids

    def _send_abort_outputs(self, aborted: Any) -> None:
        """To clients that nobody waits for."""


class KeepingCore(Core):
    """Like that of a newer vLLM that is asked to sleep without clearing the connector's cache."""

    def _reset_caches(self, *args: Any, **options: Any) -> None:
        super()._reset_caches(*args, **{**options, "reset_connector": False})


def sleep_and_wake(*engines: InProcessEngine, level: int = 1, core_class: Any = Core) -> None:
    """As vLLM's dev endpoints `/sleep` and `/wake_up` do."""
    for engine in engines:
        core = core_class(engine)
        assert core.sleep(level) is None
        core.wake_up()
        assert not core.is_scheduler_paused()
        # Before 0.33 vLLM does not tell it again.
        [told] = core.model_executor.get_kv_connector_handshake_metadata()
        engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told or {})


@pytest.mark.parametrize("family", ["full", "window", "all three"])
def test_engines_that_have_slept_hand_off(engine, family):
    prefill, decode = engine("kv_producer", family=family), engine("kv_consumer", family=family)
    halves = prefill.half, decode.half
    right = engine(family=family).generate(PROMPT, 6).tokens
    for number in (1, 2):
        assert hand_off(prefill, decode, PROMPT) == right
        assert decode.count("handoffs_received") == number
        assert_clean(prefill, decode)
        sleep_and_wake(prefill, decode)
        assert (prefill.half, decode.half) == halves  # no second server, nor a second arena
    assert decode.generate(PROMPT, 6).tokens == right  # of what slept, nothing is cached


def test_under_multi_connector(engine, tokens):
    prefill, decode = (
        engine(role, connector="MultiConnector") for role in ("kv_producer", "kv_consumer")
    )
    sleep_and_wake(prefill, decode)
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)
    assert decode.count("handoffs_received") == 1


def test_new_weights_come_while_it_sleeps(engine):
    prefill, decode, alone = engine("kv_producer"), engine("kv_consumer"), engine()
    before = prefill.generate(PROMPT, params=HANDOFF).params
    for each in (prefill, decode, alone):
        each.runner.weights = b"new"
    sleep_and_wake(prefill, decode, level=2)
    right = alone.generate(PROMPT, 6).tokens
    assert decode.generate(PROMPT, 6, params=before).tokens == right
    assert decode.failures() == {"other_weights": 1}
    assert hand_off(prefill, decode, PROMPT) == right
    assert decode.count("handoffs_received") == 1
    assert_clean(prefill, decode)


def test_a_prefix_from_before_is_not_found_after(engine, tokens):
    sharer = engine("kv_both", extra={"share": True})
    for _ in range(2):
        assert sharer.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)
        assert_clean(sharer)
        sleep_and_wake(sharer)
    assert sharer.count("tokens_kept") == 0


@pytest.mark.parametrize("level", [1, 2])
def test_where_vllm_keeps_the_cache_of_the_connector_a_prefix_is_found_after(engine, tokens, level):
    sharer = engine("kv_both", extra={"share": True})
    for _ in range(2):
        assert sharer.generate(PROMPT, 6).tokens == tokens(PROMPT, 6)
        assert_clean(sharer)
        sleep_and_wake(sharer, level=level, core_class=KeepingCore)
    assert sharer.count("tokens_kept") > 0
    # Unless other weights came meanwhile.
    found = sharer.count("tokens_kept")
    sharer.runner.weights = b"new"
    sleep_and_wake(sharer, level=level, core_class=KeepingCore)
    assert sharer.generate(PROMPT, 6).tokens == engine(weights=b"new").generate(PROMPT, 6).tokens
    assert sharer.count("tokens_kept") == found


def test_it_does_not_fall_asleep_while_blocks_are_copied(engine, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    held = prefill.hold(saves=True)
    handed = prefill.submit(PROMPT, params=HANDOFF)
    prefill.run(lambda: prefill.done(handed))
    wait(held.waiting.is_set)
    core = Core(prefill)
    asleep = core.sleep(1, mode="wait")
    assert asleep is not None  # it goes on stepping
    assert not core.model_executor.is_sleeping
    held.open()
    prefill.settle()
    core._notify_idle_state_callbacks()
    assert asleep.done()
    assert core.model_executor.is_sleeping
    core.wake_up()
    assert hand_off(prefill, decode, PROMPT) == tokens(PROMPT, 6)


def test_a_request_that_a_paused_engine_refuses_lets_go_of_its_kv(engine):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    params = prefill.generate(PROMPT, params=HANDOFF).params
    assert prefill.usage[0] > 0
    core = Core(decode)
    core.pause_scheduler("abort", clear_cache=False)
    core.reject_new_requests = True
    request = decode.request(PROMPT, params=params)
    refuse = getattr(core, "_reject_add_while_paused", None)
    if refuse is None:  # before vLLM 0.33 such requests wait, unless their client refuses them
        request.abort_immediately = True
        core.add_request(request)
    else:
        assert refuse(request)
        assert core.told == [request.request_id]
    wait(lambda: prefill.usage[0] == 0)
    assert request.status == RequestStatus.FINISHED_ABORTED
    core.resume_scheduler()
    assert_clean(prefill, decode)
