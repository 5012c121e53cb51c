# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between two engines: the answers of the same-path reference, and the very same KV.

The decode engine's blocks hold noise before each hand-off, and test_negative_control.py shows that
the same comparison fails for a connector that moves nothing.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from omni_connector.cli.engines import Router
from omni_connector.testing import reference
from omni_connector.testing.engines import PREFILL_PARAMS, Client, completion

from .configurations import BLOCK
from .harness import BLOCK_BYTES, Case, Pair
from .pool import Pool
from .prompts import MAX_TOKENS, new_salt

pytestmark = pytest.mark.e2e


@pytest.fixture
def hasty(pool: Pool) -> Pair:
    """Engines that wait for a short time only."""
    return Pair.of(*pool.take(("hasty-prefill", "llama", ""), ("hasty-decode", "llama", "")))


def test_answer_is_the_reference_and_kv_the_senders(pair: Pair, case: Case) -> None:
    case.check(pair.hand_off(case.prompt))
    pair.require_same_kv(case.prompt)


def test_bytes_moved_are_those_of_the_prompt(pair: Pair, cases: dict[str, Case]) -> None:
    case = cases["two-thousand-not-aligned"]
    before = pair.count(pair.decode_engine, "bytes_loaded")
    received = pair.received()
    case.check(pair.hand_off(case.prompt))
    moved = pair.count(pair.decode_engine, "bytes_loaded") - before
    assert moved == -(-len(case.prompt) // BLOCK) * BLOCK_BYTES
    assert pair.received() - received == 1


def test_layers_are_copied_while_others_are_computed(pair: Pair, cases: dict[str, Case]) -> None:
    """Which of them is drawn by the machine: that some are says the counter."""
    case = cases["two-thousand-not-aligned"]
    before = pair.count(pair.prefill_engine, "bytes_saved_early")
    end = time.monotonic() + 60
    while pair.count(pair.prefill_engine, "bytes_saved_early") == before:
        assert time.monotonic() < end
        case.check(pair.hand_off(case.prompt))


def test_a_prefix_that_decode_holds_is_not_moved(pair: Pair, cases: dict[str, Case]) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    pair.decode(case.prompt[: 8 * BLOCK], salt, max_tokens=1)
    before = pair.count(pair.decode_engine, "bytes_loaded")
    case.check(pair.hand_off(case.prompt, salt))
    moved = pair.count(pair.decode_engine, "bytes_loaded") - before
    assert moved == (-(-len(case.prompt) // BLOCK) - 8) * BLOCK_BYTES


def test_many_hand_offs_at_once(pair: Pair, cases: dict[str, Case]) -> None:
    todo = list(cases.values()) * 2
    pair.decode_probe.spoil()

    def hand_off(case: Case) -> reference.Answer:
        params = pair.prefill(case.prompt, salt := new_salt())
        return pair.decode(case.prompt, salt, params)

    with ThreadPoolExecutor(len(todo)) as threads:
        answers = list(threads.map(hand_off, todo))
    for case, answer in zip(todo, answers, strict=True):
        case.check(answer)


def test_params_of_another_prompt_are_refused(pair: Pair, cases: dict[str, Case]) -> None:
    mine, other, salt = cases["two-thousand"], cases["shares-a-prefix"], new_salt()
    before = pair.failures()
    params = pair.prefill(other.prompt, salt)
    answer = pair.decode(mine.prompt, salt, params)
    mine.check(answer)
    assert pair.failures() == before + 1
    other.check(pair.decode(other.prompt, salt, params))


def test_expired_params_are_computed_locally(hasty: Pair, cases: dict[str, Case]) -> None:
    case, salt = cases["not-aligned"], new_salt()
    params = hasty.prefill(case.prompt, salt)
    hasty.wait_until_idle(hasty.prefill_engine)
    before = hasty.failures()
    answer = hasty.decode(case.prompt, salt, params)
    case.check(answer)
    assert hasty.failures() == before + 1


AT_ONCE = 6
WRONG: list[Any] = [None, 0, -1, 1.5, "x", "", "y" * 100_000, [], [[0]], {}, {"a": [1]}, True]


def test_malformed_params_are_computed_locally(hasty: Pair, cases: dict[str, Case]) -> None:
    case, salt, pair = cases["within-a-block"], new_salt(), hasty
    good = pair.prefill(case.prompt, salt)
    spoiled: list[dict[str, Any]] = [
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {**good, "remote_host": "192.0.2.1", "remote_port": 9},
        {**good, "remote_engine_id": "../../../etc/passwd"},
        {**good, "omni_token": "0" * len(good["omni_token"])},
        {**good, "omni_epoch": "0" * len(good["omni_epoch"])},
    ]
    nixl = {k: v for k, v in good.items() if not k.startswith("omni_")}
    spoiled.append({**nixl, "remote_host": "localhost", "remote_port": 5600})
    for key in good:
        spoiled.append({k: v for k, v in good.items() if k != key})
        spoiled.extend({**good, key: value} for value in WRONG)
    before = pair.failures()

    def decode(params: dict[str, Any]) -> reference.Answer:
        return pair.decode(case.prompt, new_salt(), params)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for answer in threads.map(decode, spoiled):
            case.check(answer)
    refused = pair.failures() - before
    # Keys that only NIXL reads may hold anything; do_remote_prefill false asks for nothing.
    ours = [key for key in good if key.startswith("omni_") or key == "remote_engine_id"]
    assert refused >= len(ours) * len(WRONG)
    assert refused <= len(spoiled)
    case.check(pair.decode(case.prompt, salt, good))


def test_malformed_prefill_params_do_not_stop_the_prefill_engine(
    hasty: Pair, cases: dict[str, Case]
) -> None:
    case, pair = cases["within-a-block"], hasty

    def ask(params: dict[str, Any]) -> reference.Answer:
        return reference.ask(
            pair.prefill_engine,
            case.prompt,
            max_tokens=1,
            cache_salt=new_salt(),
            kv_transfer_params=params,
        )

    spoiled = [{**PREFILL_PARAMS, key: value} for key in PREFILL_PARAMS for value in WRONG]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for answer in threads.map(ask, spoiled):
            assert answer.tokens == case.reference.tokens[:1]
    case.check(pair.hand_off(case.prompt))


def send_and_leave(client: Client, body: dict[str, Any], after: float) -> None:
    """Send a completion and close the connection `after` seconds later, answered or not."""
    client.send("/v1/completions", body)
    time.sleep(after)
    client.close()


def test_prefill_requests_that_are_aborted_leave_nothing(
    hasty: Pair, cases: dict[str, Case]
) -> None:
    case, pair = cases["two-thousand"], hasty
    for after in (0.0, 0.01, 0.05, 0.2):
        body = completion(
            case.prompt,
            max_tokens=1,
            cache_salt=new_salt(),
            kv_transfer_params=dict(PREFILL_PARAMS),
        )
        send_and_leave(pair.prefill_engine.client(), body, after)
        case.check(pair.hand_off(case.prompt))
    pair.wait_until_idle()
    case.check(pair.hand_off(case.prompt))


def test_decode_requests_that_are_aborted_leave_nothing(pair: Pair, cases: dict[str, Case]) -> None:
    case = cases["two-thousand"]
    for after in (0.0, 0.005, 0.02, 0.1):
        params = pair.prefill(case.prompt, salt := new_salt())
        body = completion(case.prompt, max_tokens=500, cache_salt=salt, kv_transfer_params=params)
        send_and_leave(pair.decode_engine.client(), body, after)
        case.check(pair.hand_off(case.prompt))
    pair.wait_until_idle()
    case.check(pair.hand_off(case.prompt))


def test_aborts_among_hand_offs_do_not_disturb_them(hasty: Pair, cases: dict[str, Case]) -> None:
    case, steady, pair = cases["two-thousand"], cases["shares-a-prefix"], hasty
    stop = threading.Event()

    def leave_again_and_again() -> None:
        delay = 0.0
        while not stop.is_set():
            salt = new_salt()
            params = pair.prefill(case.prompt, salt)
            body = completion(
                case.prompt, max_tokens=100, cache_salt=salt, kv_transfer_params=params
            )
            send_and_leave(pair.decode_engine.client(), body, delay % 0.05)
            delay += 0.007

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(leave_again_and_again)
        try:
            for _ in range(8):
                steady.check(pair.hand_off(steady.prompt))
        finally:
            stop.set()
        leaving.result(timeout=60)
    pair.wait_until_idle()


def test_through_the_official_router(pair: Pair, cases: dict[str, Case], tmp_path: Path) -> None:
    pytest.importorskip("vllm_router")
    ports = (pair.prefill_engine.port, pair.decode_engine.port)
    before = pair.received()
    chosen = [cases[name] for name in ("within-a-block", "two-blocks", "two-thousand")]
    router = Router(*ports, tmp_path / "router.log")
    router.start()
    try:
        router.wait_ready(60.0)
        with Client(router.port) as client:
            for case in chosen:
                case.check(reference.ask(client, case.prompt, max_tokens=MAX_TOKENS))
    finally:
        router.stop()
    received = pair.received() - before
    assert received == len(chosen)
