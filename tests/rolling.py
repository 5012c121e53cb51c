# SPDX-License-Identifier: Apache-2.0
"""Engines behind vllm-router that are restarted one after the other, while clients ask.

Two engines prefill and two decode. The clients know the router alone, and never ask twice. Each
answer is compared with that of an engine without connector. What the engines count is read from
their status files all the while, as it goes with them.
"""

import contextlib
import http.client
import itertools
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omni_connector.cli.engines import Router
from omni_connector.net import status
from omni_connector.net.runtime import of_kernel
from omni_connector.net.status import EngineStatus
from omni_connector.testing.engines import Client, Engine, EngineError
from omni_connector.testing.reference import LOGPROBS, ROUNDING, Answer

MIDDLEWARE: Final = "omni_connector.vllm_v1.drain_middleware.DrainMiddleware"
QUIET_S: Final = 3.0
"""`drain_quiet_s` of the engines: longer than the router looks away, and than a prefill takes."""

TIMEOUT_S: Final = 60
"""`--shutdown-timeout` of the engines."""

ARGUMENTS: Final = ("--shutdown-timeout", str(TIMEOUT_S), "--middleware", MIDDLEWARE)
"""Of the engines' servers, on top of what they are started with otherwise."""

MOST_TOKENS: Final = 16
_LOOK_S: Final = 0.15
_WRITTEN_S: Final = 20.0
_ROUTER_S: Final = 60.0
_GONE: Final = (OSError, http.client.HTTPException, EngineError, ValueError)

Make = Callable[[str, int | None], Engine]
"""Makes an engine of a side, `prefill` or `decode`, not started; at a port if one is given."""


class RouterOfMany(Router):
    """The router of several engines of each side, which looks at `/health` each second."""

    def __init__(self, prefill: Sequence[int], decode: Sequence[int], log: Path) -> None:
        super().__init__(prefill[0], decode[0], log)
        self._prefill = prefill
        self._decode = decode

    def routes(self) -> list[str]:
        """The options that tell the router which engines there are, and how it looks at them."""
        routes = ["--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        for port in self._prefill:
            routes += ["--prefill", f"http://127.0.0.1:{port}"]
        for port in self._decode:
            routes += ["--decode", f"http://127.0.0.1:{port}"]
        routes += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        return [*routes, "--health-success-threshold", "1", "--health-check-timeout-secs", "5"]


@dataclass
class Outcome:
    """What came of the requests.

    Attributes:
        answered: requests that were answered.
        lost: what happened to each that was not.
        wrong: what was wrong with each answer that was not the reference's.
        restarts: of engines, by side.
        killed: engines that had to be killed, as they did not end.
        exits: seconds from SIGTERM to the end of the last process of each engine.
        lives: what each engine said last, by its status file.
    """

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    restarts: Counter[str] = field(default_factory=Counter)
    killed: int = 0
    exits: list[float] = field(default_factory=list)
    lives: dict[Path, EngineStatus] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """A counter of all engines together, of those that have ended too."""
        return sum(each.counts.get(name, 0) for each in list(self.lives.values()))

    def failures(self) -> Counter[str]:
        """Failures of all of them, by kind."""
        failures: Counter[str] = Counter()
        for each in self.lives.values():
            failures.update(each.failures)
        return failures

    @property
    def wasted(self) -> int:
        """Finished prefills that were offered, and whose KV no decode engine has loaded."""
        return self.count("handoffs_offered") - self.count("handoffs_received")


class Rolling:
    """Four engines, the router in front of them, and its clients.

    Args:
        make: makes the engines.
        runtime: their runtime folder, in which nobody else is.
        log: of the router.
        prompts: what is asked, again and again, each time with another `cache_salt`.
        expected: the answer to each, of `MOST_TOKENS` tokens.
        rest_s: how long each client rests after an answer while an engine starts, or is waited for
            in vain, in seconds. A start takes longer beside many requests.
    """

    def __init__(
        self,
        make: Make,
        runtime: Path,
        log: Path,
        prompts: Sequence[list[int]],
        expected: Sequence[Answer],
        rest_s: float = 0.0,
    ) -> None:
        self.outcome = Outcome()  # of the latest run
        self._make = make
        self._runtime = runtime
        self._prompts = prompts
        self._expected = expected
        self._rest_s = rest_s
        self.engines = {side: [make(side, None) for _ in range(2)] for side in SIDES}
        ports = [[each.port for each in self.engines[side]] for side in SIDES]
        self._router = RouterOfMany(*ports, log)
        self._acted = threading.Event()
        self._ended = threading.Event()
        self._resting = threading.Event()
        self._lock = threading.Lock()
        self._numbers = itertools.count()  # of the requests that were sent

    def start(self) -> None:
        """Start all of them, and wait until they answer."""
        engines = [each for side in SIDES for each in self.engines[side]]
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        self._router.start()
        self._router.wait_ready(_ROUTER_S)

    def stop(self) -> None:
        """Stop all of them, whatever has happened."""
        self._ended.set()
        self._router.stop()
        for side in SIDES:
            for engine in self.engines[side]:
                engine.kill()

    def run(self, act: Callable[[], object], clients: int, requests: int = 0) -> Outcome:
        """Let clients ask while something is done, and until so many requests were sent."""
        self.outcome = Outcome()
        self._acted.clear()
        self._ended.clear()
        self._numbers = itertools.count()
        with ThreadPoolExecutor(clients + 1) as threads:
            look = threads.submit(self._look)
            asking = [threads.submit(self._client, requests) for _ in range(clients)]
            try:
                act()
                self._acted.set()
                for each in asking:
                    each.result()
                # Whatever was handed off is loaded by now; the files are written once a second, or
                # later on a busy machine.
                time.sleep(4 * status.WRITE_S)
                deadline = time.monotonic() + _WRITTEN_S
                while self.outcome.wasted > 0 and time.monotonic() < deadline:
                    time.sleep(_LOOK_S)
            finally:
                self._ended.set()
            look.result()
        return self.outcome

    def restart(self, side: str, number: int) -> None:
        """Have one engine end, and start another at its port."""
        old = self.engines[side][number]
        assert old.process is not None
        began = time.monotonic()
        old.process.send_signal(signal.SIGTERM)
        while any(old.processes()):
            if time.monotonic() > began + 2 * TIMEOUT_S:
                self.outcome.killed += 1
                break
            time.sleep(0.05)
        self.outcome.exits.append(time.monotonic() - began)
        old.kill()  # removes what belongs to it
        self.engines[side][number] = new = self._make(side, old.port)
        with self._rests():
            new.start()
            new.wait_ready()
            self._wait_routed(new)
        self.outcome.restarts[side] += 1

    def stop_undrained(self, side: str, number: int, timeout: float) -> None:
        """Have vLLM shut an engine down by its own means alone, as it does on SIGINT. When a
        request is lost, or after so many seconds, the server is killed: it may wait for ever for
        requests that its engine has not answered. No other engine is started."""
        engine = self.engines[side][number]
        assert engine.process is not None
        engine.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + timeout
        with self._rests():
            while any(engine.processes()) and not self.outcome.lost and time.monotonic() < deadline:
                time.sleep(0.1)
            engine.kill()

    @contextlib.contextmanager
    def _rests(self) -> Iterator[None]:
        self._resting.set()
        try:
            yield
        finally:
            self._resting.clear()

    def _wait_routed(self, engine: Engine) -> None:
        """Until the router sends requests to an engine again: else its side has none left when the
        other one is restarted."""
        deadline = time.monotonic() + _ROUTER_S
        while not engine.metric("vllm:request_success_total"):
            assert time.monotonic() < deadline, "the router does not use an engine that is back"
            time.sleep(0.2)

    def _client(self, requests: int) -> None:
        """Ask until the act has ended, and so many requests were sent."""
        while not self._ended.is_set():
            number = next(self._numbers)
            if self._acted.is_set() and number >= requests:
                return
            self._request(random.Random(f"{self._runtime}/{number}"))
            if self._resting.is_set():
                self._ended.wait(self._rest_s)

    def _request(self, draw: random.Random) -> None:
        which, tokens = draw.randrange(len(self._prompts)), draw.randint(2, MOST_TOKENS)
        prompt, whole = self._prompts[which], self._expected[which]
        fields: dict[str, Any] = {
            "max_tokens": tokens,
            "cache_salt": str(draw.random()),
            **LOGPROBS,
        }
        lost = wrong = ""
        try:
            with Client(self._router.port, timeout=2 * TIMEOUT_S) as client:
                answer = client.complete(prompt, **fields)
            if (reason := answer["choices"][0]["finish_reason"]) != "length":
                lost = f"its answer ended by {reason!r}"
            else:
                wrong = _difference(Answer.of(answer), whole, tokens)
        except _GONE as error:
            lost = repr(error)
        at = time.strftime("%H:%M:%S")
        with self._lock:
            if lost:
                self.outcome.lost.append(f"{at}: {lost}")
            else:
                self.outcome.answered += 1
            if wrong:
                self.outcome.wrong.append(f"{at}: prompt {which}: {wrong}")

    def _look(self) -> None:
        folder = of_kernel(self._runtime / "default")
        while not self._ended.wait(_LOOK_S):
            self.outcome.lives |= status.read_each(folder)[0]


SIDES: Final = ("prefill", "decode")


def _difference(answer: Answer, whole: Answer, tokens: int) -> str:
    expected = Answer(whole.tokens[:tokens], whole.logprobs[:tokens], whole.likeliest[:tokens])
    try:
        answer.require_same(expected, tolerance=ROUNDING)
    except AssertionError as error:
        return str(error)
    return ""
