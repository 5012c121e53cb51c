# SPDX-License-Identifier: Apache-2.0
"""Many requests of all kinds to a few real engines, and whether every answer is the reference's.

Two engines share their prefixes and hand prompts to each other. All the while a third joins them,
is killed in the middle of its work or drains and ends, and is started again. Meanwhile the two are
given other weights and other roles. The prompts are few, so that their answers are known, and share
prefixes. Clients go away in the middle of an answer, or never fetch what was prefilled for them.
With a KV cache and arenas that are too small for the prompts, requests are preempted and blocks
evicted.
"""

import contextlib
import http.client
import itertools
import json
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omni_connector.identity.kept_digests import IN_RUNTIME
from omni_connector.net import runtime, status
from omni_connector.net.orders import DRAIN, ROLE, ROLES, Service, give_order, take_back
from omni_connector.testing import reference
from omni_connector.testing.engines import Engine, EngineError, completion, prefill
from omni_connector.testing.reference import LOGPROBS, ROUNDING, Answer

BLOCK: Final = 128
MOST_TOKENS: Final = 32
"""Tokens of the longest answer, and of each reference."""
MAX_MODEL_LEN: Final = 2048
SLOT_BYTES: Final = BLOCK * 4096  # of the model `llama`
KV_CACHE_BYTES: Final = 24 * SLOT_BYTES
"""Size of the KV cache with which requests are preempted."""
SETTINGS: Final = {
    "arena_gib": 40 * SLOT_BYTES / 2**30,
    "handoff_ttl_s": 5.0,
    "arena_wait_s": 2.0,
    "load_timeout_s": 30.0,
}
"""What the engines' connector is told; their policy for failed loads is `recompute`."""

ENVIRONMENT: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
"""Variables of the engines: on a CPU oneDNN keeps what it computes with for each number of tokens,
in up to half a gigabyte, which would hide what is lost elsewhere."""
KINDS: Final = ("own", "shared", "files", "threads")
_CLIENTS: Final = 8
_SAMPLE_S: Final = 1.0
_LIFE_S: Final = 6.0
_CHANGE_S: Final = 4.0  # between two changes of weights or of a role, at most
_OBEY_S: Final = 60.0  # in which an engine does what it is told
_GAUGES: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:omni_connector_slots_in_use",
    "vllm:omni_connector_leases",
)
_GONE: Final = (OSError, http.client.HTTPException, EngineError)

_Series = dict[str, list[int]]


def make_prompts(families: int, each: int, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts. The prompts of a family begin with the same blocks."""
    draw = random.Random(seed)
    prompts = []
    for _ in range(families):
        common = [draw.randrange(3, 512) for _ in range(8 * BLOCK)]
        for number in range(each):
            blocks = draw.randint(1, 8)
            # Every other answer begins at the end of a block, so that it needs another one.
            rest = draw.randrange(2, 2 * BLOCK) if number % 2 else draw.randint(1, 2) * BLOCK - 4
            prompts.append(common[: blocks * BLOCK] + [draw.randrange(3, 512) for _ in range(rest)])
    return prompts


def references(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """What an engine answers that moves nothing."""
    return [reference.ask(engine, prompt, max_tokens=MOST_TOKENS) for prompt in prompts]


@dataclass
class Report:
    """What came of it.

    Attributes:
        answered: requests by their kind.
        wrong: what was wrong with each answer that was not the reference's.
        broken: requests that got no answer, of engines that were not killed.
        lives: how often the third engine has ended.
        changes: what was done to engines, by its kind: each end of the third one is a `kill` or a
            `drain`; the two had a `refit` or another `role`.
        usage: by engine and process, what `/proc` says at each look: bytes of resident memory of
            its own (`own`) and of `shared` memory, such as arenas; open `files`; `threads`.
        counts: what the two engines have counted, by metric.
        memory: files in /dev/shm that any of the engines has used, whether they are there still or
            not.
    """

    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    lives: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    usage: dict[str, _Series] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    memory: set[Path] = field(default_factory=set)

    def growth(self, kind: str) -> dict[str, float]:
        """By process, the median of the last quarter less that of the second."""
        found = {}
        for process, series in self.usage.items():
            values, quarter = series[kind], max(1, len(series[kind]) // 4)
            second = values[quarter : 2 * quarter] or values
            found[process] = statistics.median(values[-quarter:]) - statistics.median(second)
        return found


class _Admission:
    """Lets requests ask an engine, except while its weights change."""

    def __init__(self) -> None:
        self._asking = 0
        self._closed = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """For as long as a request asks the engine."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._asking += 1
        try:
            yield
        finally:
            with self._changed:
                self._asking -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """While nobody asks the engine."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._asking)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class _Member:
    """One of the engines, which runs with one of several sets of weights.

    Attributes:
        weights: the number of the set.
        mortal: whether it is killed in the middle of its work.
    """

    def __init__(self, engine: Engine, mortal: bool = False) -> None:
        self.engine = engine
        self.weights = 0
        self.mortal = mortal
        self.admission = _Admission()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's answer, which may be empty."""
        with self.engine.client() as client:
            client.send(path, body)
            response = client.connection.getresponse()
            text = response.read()
        if response.status != 200:
            raise EngineError(f"{path}: {response.status} {text[:200]!r}")
        return json.loads(text) if text.strip() else {}

    def refit(self, number: int, path: Path) -> None:
        """Give it other weights, as a trainer does: pause, load, reset, resume."""
        with self.admission.closed():
            self.post("/pause?mode=wait", {})
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            self.post("/collective_rpc", load)
            until(
                lambda: self.post("/reset_prefix_cache", {})["success"],
                _OBEY_S,
                "its cache could not be reset",
            )
            self.post("/resume", {})
            self.weights = number

    def order(self, folder: Path, kind: str, text: str, obeyed: Callable[[Service], bool]) -> Path:
        """Give it an order, and wait until it obeys; return its status file."""
        processes = {int(process.name) for process in self.engine.processes()}

        def said() -> tuple[Path, Service] | None:
            for namespace in _namespaces(folder):
                for file, each in status.read_each(namespace)[0].items():
                    if each.pid in processes:
                        return file, each.service
            return None

        until(said, _OBEY_S, "no status file")
        found = said()
        assert found is not None
        give_order(found[0], kind, text)
        until(lambda: (now := said()) and obeyed(now[1]), _OBEY_S, f"{kind} {text} not obeyed")
        return found[0]


class Soak:
    """A run of it.

    Args:
        engines: the two that run throughout. They are ready, and have the first weights.
        third: makes the engine that comes and goes, not started yet.
        prompts: as `make_prompts` makes them.
        expected: for each set of weights the answer to each prompt, of `MOST_TOKENS` tokens.
        weights: folder of each set; with one the engines keep it.
        folder: the runtime folder of the engines.
        seed: of what is asked, and of what happens to the engines.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        third: Callable[[], Engine],
        prompts: Sequence[list[int]],
        expected: Sequence[Sequence[Answer]],
        weights: Sequence[Path],
        folder: Path,
        seed: int = 0,
    ) -> None:
        self.report = Report()
        self._members = [_Member(engine) for engine in engines]
        self._new_third = third
        self._third: _Member | None = None
        self._prompts = prompts
        self._expected = expected
        self._weights = weights
        self._folder = folder
        self._seed = seed
        self._numbers = itertools.count()
        self._ended = threading.Event()
        self._until = float("inf")
        self._lock = threading.Lock()

    def run(self, requests: int, least_lives: int = 1, seconds: float = float("inf")) -> Report:
        """Send so many requests, and more until the third engine has ended often enough.

        Args:
            seconds: after which nothing more is sent.
        """
        self._until = time.monotonic() + seconds
        with ThreadPoolExecutor(_CLIENTS + 3) as threads:
            beside = [
                threads.submit(self._lives, least_lives),
                threads.submit(self._changes),
                threads.submit(self._looks),
            ]
            clients = [threads.submit(self._client, requests, least_lives) for _ in range(_CLIENTS)]
            try:
                for client in clients:
                    client.result()
            finally:
                self._ended.set()
            for each in beside:
                each.result()
        return self.report

    def _client(self, requests: int, least_lives: int) -> None:
        while (number := next(self._numbers)) < requests or self.report.lives < least_lives:
            if self._ended.is_set() or time.monotonic() > self._until:
                return
            draw = random.Random(f"{self._seed}/{number}")
            with self._stops_all():
                self._request(draw, number)

    def _request(self, draw: random.Random, number: int) -> None:
        here, there = draw.sample(self._members, 2)
        which, tokens = draw.randrange(len(self._prompts)), draw.randint(1, MOST_TOKENS)
        prompt, third = self._prompts[which], self._third
        kinds = {"plain": 50, "hand-off": 25, "abort": 15, "abandoned": 2}
        if third is not None:
            kinds |= {"third": 8, "hand-off from third": 5}
        [kind] = draw.choices(list(kinds), list(kinds.values()))
        if "third" in kind:
            assert third is not None
            there, here = (third, third) if kind == "third" else (third, here)
        mortal = there.mortal
        fields: dict[str, Any] = {"max_tokens": tokens, **LOGPROBS}
        try:
            if kind == "abandoned" or "hand-off" in kind:
                with there.admission.request():
                    fields["kv_transfer_params"] = prefill(there.engine, prompt)
                mortal = False  # from here on it has to work
            if kind == "abort":
                with here.admission.request():
                    _go_away(here.engine, prompt, draw.randint(0, tokens), fields)
            elif kind != "abandoned":
                with here.admission.request():
                    answer, weights = here.engine.complete(prompt, **fields), here.weights
                self._check(f"{number} ({kind})", which, answer, weights)
        except _GONE as error:
            if not mortal:
                self.report.broken.append(f"request {number} ({kind}): {error!r}")
            kind = f"{kind}, killed"
        with self._lock:
            self.report.answered[kind] += 1

    def _check(self, request: str, which: int, response: dict[str, Any], weights: int) -> None:
        answer, whole = Answer.of(response), self._expected[weights][which]
        count = len(answer.tokens)
        expected = Answer(whole.tokens[:count], whole.logprobs[:count], whole.likeliest[:count])
        try:
            answer.require_same(expected, tolerance=ROUNDING)
        except AssertionError as error:
            length = len(self._prompts[which])
            self.report.wrong.append(
                f"request {request}, weights {weights}, prompt {which} of {length}: {error}"
            )

    @contextlib.contextmanager
    def _stops_all(self) -> Iterator[None]:
        """All threads end when one fails."""
        try:
            yield
        except BaseException:
            self._ended.set()
            raise

    def _lives(self, least: int) -> None:
        """The third engine lives, and ends while it has requests, again and again."""
        draw = random.Random(self._seed)
        while self.report.lives < least or not self._ended.is_set():
            engine, killed = self._new_third(), draw.random() < 0.7
            with self._stops_all():
                try:
                    engine.start()
                    engine.wait_ready()
                    third = self._third = _Member(engine, mortal=killed)
                    self._ended.wait(draw.uniform(0.25, 1.0) * _LIFE_S)
                    self._third = None
                    if killed:
                        engine.kill()
                    else:
                        self._leave(third)
                    self.report.lives += 1
                    self.report.changes["kill" if killed else "drain"] += 1
                finally:
                    self._third = None
                    engine.stop()
            if self._ended.is_set():
                return

    def _leave(self, member: _Member) -> None:
        """Drain an engine, and have it end once it has nothing left."""
        member.order(self._folder, DRAIN, "", lambda service: service.phase == "drained")
        with member.admission.closed():  # those that were about to ask have their answers, too
            assert member.engine.process is not None
            member.engine.process.send_signal(signal.SIGTERM)
            until(lambda: not any(member.engine.processes()), _OBEY_S, "a drained engine runs")

    def _changes(self) -> None:
        """The two engines are given other weights and other roles, one after the other."""
        draw = random.Random(f"{self._seed}/changes")
        kinds = ["role"] if len(self._weights) == 1 else ["refit", "role"]
        ordered: set[Path] = set()
        while not self._ended.wait(draw.uniform(0.25, 1.0) * _CHANGE_S):
            member, kind = draw.choice(self._members), draw.choice(kinds)
            with self._stops_all():
                if kind == "refit":
                    number = draw.randrange(len(self._weights))
                    member.refit(number, self._weights[number])
                else:
                    role = draw.choice(ROLES)
                    obeyed = lambda service, role=role: service.role == role  # noqa: E731
                    ordered.add(member.order(self._folder, ROLE, role, obeyed))
                self.report.changes[kind] += 1
        for file in ordered:
            take_back(file, ROLE)

    def _looks(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for number, member in enumerate(self._members):
                for process in member.engine.processes():
                    self._look(f"engine {number}", process)
            third = self._third
            for member in self._members if third is None else (*self._members, third):
                for process in member.engine.processes():
                    self.report.memory |= shared_memory(process)

    def _look(self, engine: str, process: Path) -> None:
        name = f"{engine}: {(process / 'comm').read_text().strip()} {process.name}"
        lines = (process / "status").read_text().splitlines()
        said = dict(line.split(":", 1) for line in lines)
        series = self.report.usage.setdefault(name, {kind: [] for kind in KINDS})
        series["own"].append(int(said["RssAnon"].split()[0]) << 10)
        series["shared"].append(int(said["RssShmem"].split()[0]) << 10)
        series["threads"].append(int(said["Threads"]))
        series["files"].append(len(list((process / "fd").iterdir())))


def held(engine: Engine) -> dict[str, float]:
    """What an engine without requests still holds, by metric."""
    engine.complete([5, 6, 7], max_tokens=1)  # an idle engine reports with its next step only
    return {gauge: value for gauge, value in engine.metrics(*_GAUGES).items() if value}


def shared_memory(process: Path) -> set[Path]:
    """Files of shared memory that a process maps or holds open.

    Args:
        process: its folder in /proc.
    """
    used: set[Path] = set()
    with contextlib.suppress(OSError):  # it has ended
        used |= {Path(line.split(maxsplit=5)[-1].strip()) for line in (process / "maps").open()}
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                used.add(fd.readlink())
    return {path for path in used if path.parent == Path("/dev/shm") and path.exists()}


def until(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it does not hold after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} after {timeout:g} s"
        time.sleep(0.3)


def files(folder: Path) -> set[str]:
    """What lies in a runtime folder and below, without its subfolders, the user's key, and the
    digests that are kept for later engines."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_dir()
        and path.name != runtime.LOOPBACK_KEY
        and path.relative_to(folder).parts[0] != IN_RUNTIME
    }


def sweep(folder: Path) -> None:
    """Remove what dead engines have left in a runtime folder and below, as living ones do."""
    for namespace in _namespaces(folder):
        runtime.sweep(namespace)
        status.sweep(namespace)


def _namespaces(folder: Path) -> list[Path]:
    """The folders of this kernel's engines, one for each namespace."""
    return [
        runtime.of_kernel(path) for path in folder.iterdir() if runtime.of_kernel(path).is_dir()
    ]


def _go_away(engine: Engine, prompt: list[int], events: int, fields: dict[str, Any]) -> None:
    """Ask, and close the connection after so many events of the answer."""
    path, body = "/v1/completions", completion(prompt, **fields)
    with engine.client() as client:
        if not events:
            client.send(path, body)
        for _ in itertools.islice(client.stream(path, body) if events else (), events):
            pass
