# SPDX-License-Identifier: Apache-2.0
"""Hand-offs between two engines: the tokens and log-probabilities of the same-path reference.

The decode engine's blocks hold other requests' KV from the start, and test_negative_control.py
shows that the same comparison fails for a connector that moves nothing.
"""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from omni_connector.cli.engines import Router
from omni_connector.testing import reference
from omni_connector.testing.engines import PREFILL_PARAMS, Client, completion

from .harness import BLOCK, BLOCK_BYTES, ROUNDING, Case, Pair, new_salt

pytestmark = pytest.mark.e2e


def test_answer_is_bit_for_bit_the_reference(pair: Pair, case: Case) -> None:
    pair.hand_off(case.prompt).require_same(case.reference)


def test_bytes_moved_are_those_of_the_prompt(pair: Pair, cases: dict[str, Case]) -> None:
    case = cases["two-thousand-not-aligned"]
    before = pair.count(pair.decode_engine, "bytes_loaded")
    received = pair.count(pair.decode_engine, "handoffs_received")
    pair.hand_off(case.prompt).require_same(case.reference)
    moved = pair.count(pair.decode_engine, "bytes_loaded") - before
    assert moved == -(-len(case.prompt) // BLOCK) * BLOCK_BYTES
    assert pair.count(pair.decode_engine, "handoffs_received") - received == 1


def test_a_prefix_that_decode_holds_is_not_moved(pair: Pair, cases: dict[str, Case]) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    pair.decode(case.prompt[: 8 * BLOCK], salt, max_tokens=1)
    before = pair.count(pair.decode_engine, "bytes_loaded")
    pair.hand_off(case.prompt, salt).require_same(case.reference)
    moved = pair.count(pair.decode_engine, "bytes_loaded") - before
    assert moved == (-(-len(case.prompt) // BLOCK) - 8) * BLOCK_BYTES


def test_prompts_that_share_a_prefix_on_the_prefill_engine(
    pair: Pair, cases: dict[str, Case]
) -> None:
    salt = new_salt()
    for name in ("two-thousand", "shares-a-prefix", "two-thousand"):
        params = pair.prefill(cases[name].prompt, salt)
        pair.decode(cases[name].prompt, salt, params).require_same(cases[name].reference)


def test_many_hand_offs_at_once(pair: Pair, cases: dict[str, Case]) -> None:
    todo = list(cases.values()) * 2
    with ThreadPoolExecutor(len(todo)) as pool:
        answers = list(pool.map(lambda case: pair.hand_off(case.prompt), todo))
    for case, answer in zip(todo, answers, strict=True):
        answer.require_same(case.reference, tolerance=ROUNDING)


def test_params_of_another_prompt_are_refused(pair: Pair, cases: dict[str, Case]) -> None:
    mine, other, salt = cases["two-thousand"], cases["shares-a-prefix"], new_salt()
    before = pair.count(pair.decode_engine, "failures")
    params = pair.prefill(other.prompt, salt)
    answer = pair.decode(mine.prompt, salt, params)
    answer.require_same(mine.reference, tolerance=ROUNDING)
    assert pair.count(pair.decode_engine, "failures") == before + 1


def test_params_of_another_salt_are_refused(pair: Pair, cases: dict[str, Case]) -> None:
    case = cases["not-aligned"]
    before = pair.count(pair.decode_engine, "failures")
    params = pair.prefill(case.prompt, new_salt())
    answer = pair.decode(case.prompt, new_salt(), params)
    answer.require_same(case.reference, tolerance=ROUNDING)
    assert pair.count(pair.decode_engine, "failures") == before + 1


def test_expired_params_are_computed_locally(pair: Pair, cases: dict[str, Case]) -> None:
    case, salt = cases["not-aligned"], new_salt()
    params = pair.prefill(case.prompt, salt)
    pair.wait_until_idle(pair.prefill_engine)
    before = pair.count(pair.decode_engine, "failures")
    answer = pair.decode(case.prompt, salt, params)
    answer.require_same(case.reference, tolerance=ROUNDING)
    assert pair.count(pair.decode_engine, "failures") == before + 1


WRONG: list[Any] = [None, 0, -1, 1.5, "x", "", "y" * 100_000, [], [[0]], {}, {"a": [1]}, True]


def test_malformed_params_are_computed_locally(pair: Pair, cases: dict[str, Case]) -> None:
    case = cases["within-a-block"]
    good = pair.prefill(case.prompt, new_salt())
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
    before = pair.count(pair.decode_engine, "failures")
    for params in spoiled:
        answer = pair.decode(case.prompt, new_salt(), params)
        answer.require_same(case.reference, tolerance=ROUNDING)
    refused = pair.count(pair.decode_engine, "failures") - before
    # Keys that only NIXL reads may hold anything; do_remote_prefill false asks for nothing.
    ours = [key for key in good if key.startswith("omni_") or key == "remote_engine_id"]
    assert refused >= len(ours) * len(WRONG)
    assert refused <= len(spoiled)


def test_malformed_prefill_params_do_not_stop_the_prefill_engine(
    pair: Pair, cases: dict[str, Case]
) -> None:
    case = cases["within-a-block"]
    for key in PREFILL_PARAMS:
        for value in WRONG:
            params = {**PREFILL_PARAMS, key: value}
            answer = reference.ask(
                pair.prefill_engine,
                case.prompt,
                max_tokens=1,
                cache_salt=new_salt(),
                kv_transfer_params=params,
            )
            assert answer.tokens == case.reference.tokens[:1]
    pair.hand_off(case.prompt).require_same(case.reference)


def test_params_can_be_used_once_more_or_are_refused(pair: Pair, cases: dict[str, Case]) -> None:
    case, salt = cases["not-aligned"], new_salt()
    params = pair.prefill(case.prompt, salt)
    for _ in range(3):
        answer = pair.decode(case.prompt, salt, copy.deepcopy(params))
        answer.require_same(case.reference, tolerance=ROUNDING)


def send_and_leave(client: Client, body: dict[str, Any], after: float) -> None:
    """Send a completion and close the connection `after` seconds later, answered or not."""
    client.send("/v1/completions", body)
    time.sleep(after)
    client.close()


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.2])
def test_a_prefill_request_that_is_aborted_leaves_nothing(
    pair: Pair, cases: dict[str, Case], after: float
) -> None:
    case = cases["two-thousand"]
    body = completion(
        case.prompt,
        max_tokens=1,
        cache_salt=new_salt(),
        kv_transfer_params=dict(PREFILL_PARAMS),
    )
    send_and_leave(pair.prefill_engine.client(), body, after)
    pair.wait_until_idle()
    pair.hand_off(case.prompt).require_same(case.reference)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.1])
def test_a_decode_request_that_is_aborted_leaves_nothing(
    pair: Pair, cases: dict[str, Case], after: float
) -> None:
    case, salt = cases["two-thousand"], new_salt()
    params = pair.prefill(case.prompt, salt)
    body = completion(case.prompt, max_tokens=500, cache_salt=salt, kv_transfer_params=params)
    send_and_leave(pair.decode_engine.client(), body, after)
    pair.wait_until_idle()
    pair.hand_off(case.prompt).require_same(case.reference)


def test_aborts_among_hand_offs_do_not_disturb_them(pair: Pair, cases: dict[str, Case]) -> None:
    case, steady = cases["two-thousand"], cases["shares-a-prefix"]
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
                pair.hand_off(steady.prompt).require_same(steady.reference, tolerance=ROUNDING)
        finally:
            stop.set()
        leaving.result(timeout=60)
    pair.wait_until_idle()


def test_through_the_official_router(pair: Pair, cases: dict[str, Case], tmp_path: Path) -> None:
    pytest.importorskip("vllm_router")
    ports = (pair.prefill_engine.port, pair.decode_engine.port)
    before = pair.count(pair.decode_engine, "handoffs_received")
    chosen = [cases[name] for name in ("within-a-block", "two-blocks", "two-thousand")]
    router = Router(*ports, tmp_path / "router.log")
    router.start()
    try:
        router.wait_ready(60.0)
        with Client(router.port) as client:
            for case in chosen:
                # The router reads and writes numbers anew: the last digit may change.
                answer = reference.ask(client, case.prompt)
                answer.require_same(case.reference, tolerance=1e-12)
    finally:
        router.stop()
    received = pair.count(pair.decode_engine, "handoffs_received") - before
    assert received == len(chosen)
