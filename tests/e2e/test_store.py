# SPDX-License-Identifier: Apache-2.0
"""Two engines that know nothing of each other share prefixes in a real Mooncake Store.

The answers are those of an engine that has no connector, and the KV is compared byte for byte.
"""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from omni_connector.testing import reference
from omni_connector.testing.engines import Engine

from ..masters import Master
from ..patience import STORE_S
from . import kv
from .configurations import BLOCK
from .harness import PROMPTS, Case, ask, counted, publish, shareable
from .pool import Member, Pool
from .prompts import new_salt

pytest.importorskip("mooncake.store", exc_type=ImportError)

pytestmark = pytest.mark.e2e

# A lookup and a load wait for `STORE_S` each. This stops a hang.
ANSWER_S = 120.0


@dataclass
class Sharers:
    """An engine that stores prefixes, one that finds them, and their store."""

    master: Master
    writing: Member
    reading: Member

    @property
    def writer(self) -> Engine:
        return self.writing.engine

    @property
    def reader(self) -> Engine:
        return self.reading.engine

    def count(self, counter: str, **labels: str) -> float:
        """What the reader has counted."""
        return counted(self.reader, counter, **labels)

    def failed(self, kind: str) -> float:
        return self.count("failures", kind=kind)

    def publish(self, prompt: list[int], salt: str) -> None:
        """Have the writer compute a prompt, and wait until its full blocks are in the store."""
        publish(self.writer, prompt, salt, "blocks_stored", len(prompt) // BLOCK)

    def share(self, prompt: list[int], salt: str | None = None) -> reference.Answer:
        """Let the writer compute it, then ask the reader, whose blocks hold nobody's bytes."""
        salt = salt or new_salt()
        self.publish(prompt, salt)
        self.reading.probe.spoil()
        return ask(self.reader, prompt, salt)


@pytest.fixture(scope="module")
def sharers(engine_pool: Pool) -> Iterator[Sharers]:
    master = Master(engine_pool.folder)
    master.start()
    store = {"master": master.address, "segment_gib": 0.125, "lookup_timeout_s": STORE_S}
    engines = [engine_pool.new("store", connector={"store": store}) for _ in range(2)]
    try:
        for engine in engines:
            engine.start()
        yield Sharers(master, *(engine_pool.adopt(engine) for engine in engines))
    finally:
        for engine in engines:
            engine.stop()
        master.kill()


def test_a_prefix_is_found_by_another_engine(sharers: Sharers, case: Case) -> None:
    before, failures = sharers.count("tokens_shared"), sharers.count("failures")
    answer = sharers.share(case.prompt)
    case.check(answer)
    assert sharers.count("tokens_shared") - before == shareable(case.prompt)
    assert sharers.count("failures") == failures


def test_the_very_bytes_arrive(sharers: Sharers, cases: dict[str, Case]) -> None:
    prompt = cases["two-thousand-not-aligned"].prompt
    sharers.share(prompt)
    # The latest requests are those of `publish`, which end when its blocks are stored.
    prefilled = sharers.writing.probe.read_all("prefilled")
    sent = [each for [each] in prefilled if each.prompt == prompt][-1]
    (found,) = sharers.reading.probe.read("first")
    assert found.prompt == prompt
    assert found.computed == shareable(prompt)
    kv.require_same_kv([sent], [found], shareable(prompt))


def test_prompts_share_what_they_have_in_common(sharers: Sharers, cases: dict[str, Case]) -> None:
    salt, before = new_salt(), sharers.count("tokens_shared")
    sharers.publish(cases["two-thousand"].prompt, salt)
    case = cases["shares-a-prefix"]
    sharers.reading.probe.spoil()
    answer = ask(sharers.reader, case.prompt, salt)
    case.check(answer)
    assert sharers.count("tokens_shared") - before == 1024


@pytest.mark.parametrize("name", [name for name in PROMPTS if shareable(PROMPTS[name])])
def test_a_store_that_delivers_nothing_is_noticed(
    sharers: Sharers, cases: dict[str, Case], name: str
) -> None:
    sharers.reading.probe.call("store_delivers", "nothing")
    try:
        answer = sharers.share(cases[name].prompt)
    finally:
        sharers.reading.probe.call("store_delivers", "all")
    with pytest.raises(AssertionError, match=r"token \d+"):
        cases[name].check(answer)


def test_wrong_bytes_are_computed_anew(sharers: Sharers, cases: dict[str, Case]) -> None:
    kind = "store_checksum_mismatch"
    before, failed = sharers.count("tokens_shared"), sharers.failed(kind)
    case = cases["not-aligned"]
    sharers.reading.probe.call("store_delivers", "wrong")
    try:
        answer = sharers.share(case.prompt)
    finally:
        sharers.reading.probe.call("store_delivers", "all")
    case.check(answer)
    assert sharers.count("tokens_shared") == before
    assert sharers.failed(kind) == failed + 1


@pytest.fixture
def many(cases: dict[str, Case]) -> list[Case]:
    """What is asked while something happens to the store."""
    return [case for case in cases.values() if shareable(case.prompt)] * 2


def require_answer(sharers: Sharers, case: Case, salt: str) -> None:
    """The right answer, whatever the store does."""
    case.check(ask(sharers.reader, case.prompt, salt, timeout=ANSWER_S))


def wait_until_shared(sharers: Sharers, case: Case, timeout: float = 60.0) -> None:
    """Wait until a prompt of the writer is found by the reader."""
    deadline, before = time.monotonic() + timeout, sharers.count("tokens_shared")
    while sharers.count("tokens_shared") == before:
        assert time.monotonic() < deadline, sharers.reader.log_tail()
        salt = new_salt()
        ask(sharers.writer, case.prompt, salt)
        time.sleep(0.5)  # its blocks are on their way
        require_answer(sharers, case, salt)


def test_a_store_that_hangs_holds_up_nobody(sharers: Sharers, many: list[Case]) -> None:
    salts = [new_salt() for _ in many]
    for case, salt in zip(many, salts, strict=True):
        sharers.publish(case.prompt, salt)
    sharers.master.stop()
    try:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(require_answer, [sharers] * len(many), many, salts))
    finally:
        sharers.master.go_on()
    wait_until_shared(sharers, many[0])


def test_a_store_that_is_killed_while_it_is_read(sharers: Sharers, many: list[Case]) -> None:
    salts = [new_salt() for _ in many]
    for case, salt in zip(many, salts, strict=True):
        sharers.publish(case.prompt, salt)
    shared, failures = sharers.count("tokens_shared"), sharers.count("failures")
    sharers.reading.probe.spoil()
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(require_answer, sharers, *each) for each in zip(many, salts, strict=True)
        ]
        asked[0].result()
        sharers.master.kill()
        for each in asked:
            each.result()
    assert sharers.count("tokens_shared") > shared
    assert sharers.count("failures") > failures
    for case in many[:3]:
        require_answer(sharers, case, new_salt())
    # The next one on the same address knows nothing, and is found by both.
    sharers.master.start()
    wait_until_shared(sharers, many[0])
