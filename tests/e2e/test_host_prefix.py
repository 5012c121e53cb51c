# SPDX-License-Identifier: Apache-2.0
"""Engines of a host that know nothing of each other share prefixes through their arenas.

The answers are those of an engine that has no connector, and the KV is compared byte for byte.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from omni_connector.testing import reference
from omni_connector.testing.engines import Engine

from . import kv
from .configurations import BLOCK
from .harness import PROMPTS, WAIT_S, Case, ask, counted, publish, shareable
from .pool import Member, Pool, engine_environment
from .prompts import new_salt, random_prompt

pytestmark = pytest.mark.e2e

ORPHAN = "Found blocks of an engine that has ended"


@dataclass
class Host:
    """An engine that computes prefixes, and one that finds them in its arena."""

    pool: Pool
    writing: Member
    reading: Member

    def count(self, counter: str) -> float:
        """What the reader has counted."""
        return counted(self.reading.engine, counter)

    def publish(self, prompt: list[int], salt: str, writer: Engine | None = None) -> None:
        """Have the writer compute a prompt, and wait until its full blocks are in its arena."""
        blocks = len(prompt) // BLOCK
        publish(writer or self.writing.engine, prompt, salt, "blocks_saved", blocks)

    def share(self, prompt: list[int]) -> reference.Answer:
        """Let the writer compute it, then ask the reader, whose blocks hold nobody's bytes."""
        salt = new_salt()
        self.publish(prompt, salt)
        self.reading.probe.spoil()
        return ask(self.reading.engine, prompt, salt)


@pytest.fixture(scope="module")
def host(engine_pool: Pool) -> Iterator[Host]:
    engines = [engine_pool.new("share") for _ in range(2)]
    try:
        for engine in engines:
            engine.start()
        host = Host(engine_pool, *(engine_pool.adopt(engine) for engine in engines))
        prompt, deadline = random_prompt(11, 2 * BLOCK + 1), time.monotonic() + WAIT_S
        while not host.count("tokens_from_host"):  # until they have met
            assert time.monotonic() < deadline, engines[1].log_tail()
            salt = new_salt()
            host.publish(prompt, salt)
            ask(engines[1], prompt, salt)
        yield host
    finally:
        for engine in engines:
            engine.stop()


def test_a_prefix_is_found_in_the_arena_of_another_engine(host: Host, case: Case) -> None:
    before, failures = host.count("tokens_from_host"), host.count("failures")
    case.check(host.share(case.prompt))
    assert host.count("tokens_from_host") - before == shareable(case.prompt)
    assert host.count("failures") == failures


def cache(host: Host, *words: str) -> list[dict[str, Any]]:
    """What `omni-connector cache` prints of engines."""
    done = subprocess.run(
        [sys.executable, "-m", "omni_connector", "cache", *words, "--json"],
        env={**os.environ, **engine_environment(host.pool.runtime)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    document = json.loads(done.stdout)
    assert done.returncode == 0, document
    engines: list[dict[str, Any]] = document["engines"]
    return engines


def test_the_very_bytes_are_moved_to_the_other_arena(host: Host, cases: dict[str, Case]) -> None:
    case, salt = cases["two-thousand-not-aligned"], new_salt()
    host.publish(case.prompt, salt)
    listed = {each["engine_id"]: each["prompts"] for each in cache(host, "ls")}
    latest = {engine: prompts[0] for engine, prompts in listed.items() if prompts}
    writer = min(latest, key=lambda engine: latest[engine]["age"])
    prompt = latest[writer]
    assert prompt["kept"] == len(case.prompt) // BLOCK * BLOCK
    (reader,) = listed.keys() - {writer}
    moved = cache(host, "move", prompt["name"], reader)
    blocks = len(case.prompt) // BLOCK
    assert moved == [
        {"engine_id": reader, "blocks": blocks},
        {"engine_id": writer, "dropped": blocks},
    ]
    before = host.count("tokens_kept"), host.count("tokens_from_host")
    host.reading.probe.spoil()
    case.check(ask(host.reading.engine, case.prompt, salt))
    after = host.count("tokens_kept"), host.count("tokens_from_host")
    assert (after[0] - before[0], after[1] - before[1]) == (shareable(case.prompt), 0)
    prefilled = host.writing.probe.read_all("prefilled")
    sent = [each for [each] in prefilled if each.prompt == case.prompt][-1]
    (found,) = host.reading.probe.read("first")
    kv.require_same_kv([sent], [found], shareable(case.prompt))


def test_the_very_bytes_arrive(host: Host, cases: dict[str, Case]) -> None:
    prompt = cases["two-thousand-not-aligned"].prompt
    host.share(prompt)
    # The latest requests are those of `publish`, which end when its blocks are saved.
    prefilled = host.writing.probe.read_all("prefilled")
    sent = [each for [each] in prefilled if each.prompt == prompt][-1]
    (found,) = host.reading.probe.read("first")
    assert found.prompt == prompt
    assert found.computed == shareable(prompt)
    kv.require_same_kv([sent], [found], shareable(prompt))


@pytest.mark.parametrize("name", [name for name in PROMPTS if shareable(PROMPTS[name])])
def test_an_arena_that_delivers_nothing_is_noticed(
    host: Host, cases: dict[str, Case], name: str
) -> None:
    host.reading.probe.call("host_delivers", "nothing")
    try:
        answer = host.share(cases[name].prompt)
    finally:
        host.reading.probe.call("host_delivers", "all")
    with pytest.raises(AssertionError, match=r"token \d+"):
        cases[name].check(answer)


def explain(host: Host, *arguments: str) -> list[dict[str, Any]]:
    """What `omni-connector explain` says of each engine."""
    command = [sys.executable, "-m", "omni_connector.cli.main", "explain", "--json", *arguments]
    environment = {**os.environ, **engine_environment(host.pool.runtime)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert not document["remarks"]
    engines: list[dict[str, Any]] = document["engines"]
    return engines


def test_what_is_explained_is_what_happens(host: Host) -> None:
    prompt, salt = random_prompt(29, 5 * BLOCK + 3), new_salt()
    ids = ["--tokens", ",".join(map(str, prompt))]
    nobody = explain(host, *ids, "--salt", salt)
    assert [each["missing"]["cause"] for each in nobody] == ["never_seen"] * 2
    host.publish(prompt, salt)
    sources = [each["sources"] for each in explain(host, *ids, "--salt", salt)]
    assert sorted(each["host"] for each in sources) == [0, shareable(prompt)]
    assert sorted(each["own"] for each in sources) == [0, shareable(prompt)]
    before = host.count("tokens_from_host")
    ask(host.reading.engine, prompt, salt)
    assert host.count("tokens_from_host") - before == shareable(prompt)
    sources = [each["sources"] for each in explain(host, *ids, "--salt", salt)]
    assert [each["own"] for each in sources] == [shareable(prompt)] * 2
    causes = {each["missing"]["cause"] for each in explain(host, *ids)}
    assert causes == {"other_salt"}


def test_a_text_is_explained_by_the_tokenizer_of_the_engine(host: Host) -> None:
    text = "The prefix cache of a host has no server. " * 30
    (tokens,) = {each["tokens"] for each in explain(host, text)}
    with host.reading.engine.client() as client:
        assert tokens == client.post("/tokenize", {"prompt": text})["count"]


def test_a_killed_engine_takes_no_answer_with_it_and_its_successor_starts_warm(
    host: Host, cases: dict[str, Case]
) -> None:
    case, salts = cases["two-thousand"], [new_salt() for _ in range(3)]
    third = host.pool.new("share")
    try:
        third.start()
        third.wait_ready()
        for salt in salts:
            host.publish(case.prompt, salt, third)
        third.kill()
    finally:
        third.stop()
    # One of another namespace is the control: it finds nothing.
    successors = [
        host.pool.new("share"),
        host.pool.new("share", connector={"namespace": "elsewhere"}),
    ]
    found, failures = host.count("tokens_from_host"), host.count("failures")
    try:
        for each in successors:
            each.start()
        case.check(ask(host.reading.engine, case.prompt, salts[0]))
        assert host.count("tokens_from_host") - found == shareable(case.prompt)
        assert host.count("failures") == failures
        for each in successors:
            each.wait_ready()
        warm, cold = successors
        deadline = time.monotonic() + WAIT_S
        while ORPHAN not in warm.log.read_text(errors="replace"):
            assert time.monotonic() < deadline, warm.log.read_text(errors="replace")[-20000:]
            time.sleep(0.1)
        for each, salt, tokens in (
            (cold, salts[1], 0),
            (warm, salts[2], shareable(case.prompt)),
        ):
            case.check(ask(each, case.prompt, salt))
            assert each.metric("vllm:omni_connector_tokens_from_host_total") == tokens
    finally:
        for each in successors:
            each.stop()
