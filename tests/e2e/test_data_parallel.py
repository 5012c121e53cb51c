# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel engines a side, each side behind one server, and the router before both."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from omni_connector.cli.engines import Router
from omni_connector.net.keys import write_new_key
from omni_connector.testing import reference
from omni_connector.testing.engines import PREFILL_PARAMS, Client, Engine, completion
from omni_connector.testing.ports import free_ports

from .harness import Case
from .pool import Pool
from .prompts import MAX_TOKENS, new_salt

pytestmark = pytest.mark.e2e

RANKS = (0, 1)


@pytest.fixture(scope="module", params=["one-folder", "listen"])
def sides(
    request: pytest.FixtureRequest, engine_pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode server; with `listen` their runtime folders are apart."""
    if request.param == "listen":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    key = tmp_path_factory.mktemp("key") / "key"
    write_new_key(key)
    between: dict[str, dict[str, Any]] = {"prefill": {}, "decode": {}}
    if request.param == "listen":
        address = {"key_file": str(key), "peers": ["127.0.0.1"]}
        between["prefill"] = {**address, "listen": f"127.0.0.1:{free_ports(len(RANKS))}"}
        between["decode"] = address
    with ExitStack() as stack:
        engines = []
        for side, extra in between.items():
            folder = engine_pool.runtime
            if request.param == "listen":
                folder = folder.with_name(f"dp-{side}")
                folder.mkdir(mode=0o700)
            engine = engine_pool.new(
                f"hasty-{side}",
                connector={"handoff_ttl_s": 60.0, **extra},
                arguments=("--data-parallel-size", str(len(RANKS))),
                environment={
                    "OMNI_CONNECTOR_RUNTIME_DIR": str(folder),
                    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
                },
            )
            stack.callback(engine.stop)
            engine.start()
            engines.append(engine)
        for engine in engines:
            engine.wait_ready()
        yield engines[0], engines[1]


def ask(engine: Engine, rank: int, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of one data-parallel rank of a server."""
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    with engine.client() as client:
        client.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = client.connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        assert response.status == 200, answer
        return answer


def received(engine: Engine) -> dict[str, float]:
    """Hand-offs that each rank has received."""
    samples = engine.samples("vllm:omni_connector_handoffs_received_total")
    return {labels["engine"]: value for labels, value in samples}


@pytest.mark.shows(
    "two data-parallel ranks a side",
    control="e2e/test_negative_control.py::test_a_connector_that_moves_nothing_is_noticed",
)
@pytest.mark.supports("data parallel, two ranks a side", "Llama")
def test_each_rank_hands_off_to_each(sides: tuple[Engine, Engine], cases: dict[str, Case]) -> None:
    prefill, decode = sides
    case = cases["not-aligned"]
    owners = set()
    for first in RANKS:
        for second in RANKS:
            salt, before = new_salt(), received(decode)
            body = completion(
                case.prompt, max_tokens=1, cache_salt=salt, kv_transfer_params=dict(PREFILL_PARAMS)
            )
            params = ask(prefill, first, body)["kv_transfer_params"]
            owners.add(params["remote_engine_id"])
            body = completion(
                case.prompt,
                max_tokens=MAX_TOKENS,
                cache_salt=salt,
                kv_transfer_params=params,
                **reference.LOGPROBS,
            )
            case.check(reference.Answer.of(ask(decode, second, body)))
            after = received(decode)
            got = {rank for rank, value in after.items() if value > before.get(rank, 0.0)}
            assert got == {str(second)}, "that rank, and no other, has loaded it"
    assert len(owners) == len(RANKS)
    assert not decode.metric("vllm:omni_connector_failures_total")


def test_a_router_chooses_among_all(
    sides: tuple[Engine, Engine], cases: dict[str, Case], tmp_path: Path
) -> None:
    prefill, decode = sides
    router = Router(prefill.port, decode.port, tmp_path / "router.log")
    case, before = cases["not-aligned"], sum(received(decode).values())
    try:
        router.start()
        router.wait_ready(60.0)
        with Client(router.port) as client:
            for _ in range(8):
                salt = new_salt()
                case.check(
                    reference.ask(client, case.prompt, max_tokens=MAX_TOKENS, cache_salt=salt)
                )
    finally:
        router.stop()
    assert sum(received(decode).values()) - before == 8
    assert not decode.metric("vllm:omni_connector_failures_total")
