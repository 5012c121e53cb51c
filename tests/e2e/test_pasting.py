# SPDX-License-Identifier: Apache-2.0
"""A reader pastes README and docs/, block by block, and sees what the pages promise.

Each scene lives in network namespaces of its own, so that ports and addresses are those of the
pages. Only what a reader would replace is replaced: see `tests/docs/uses.py`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.testing.engines import EngineError
from tests.docs import uses
from tests.docs.pages import ROOT, block
from tests.docs.terminal import PastingError, Terminal, after

from . import netns
from .configurations import CONFIGURATIONS
from .families import BY_RECIPE
from .pool import Pool, PooledEngine, engine_environment

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(netns.obstacle()), reason=netns.obstacle() or ""),
]

ROUTER_S = 60.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
LONG = "The quick brown fox jumps over the lazy dog, and nobody asks it why. " * 12


@dataclass(slots=True)
class PastedEngine(PooledEngine):
    """What a reader's `vllm serve MODEL …` starts, with a small model and a small KV cache."""

    pasted: tuple[str, ...] = ()

    def server_arguments(self) -> list[str]:
        """The reader's arguments after what makes the engine small."""
        assert self.pasted[:2] == ("serve", "MODEL")
        return [
            *("--model", str(self.model), "--served-model-name", "MODEL", "--enforce-eager"),
            *("--kv-cache-memory-bytes", str(64 << 20), "--chat-template", TEMPLATE),
            *BY_RECIPE["llama"].arguments,
            *CONFIGURATIONS["share"].arguments,
            *self.pasted[2:],
        ]

    def healthy(self) -> bool:
        """Never asked: only its own host reaches it. See `Reader.wait`."""
        raise NotImplementedError


class Reader:
    """Who pastes into a terminal of one host, and what this has started.

    Args:
        pool: knows how engines are started quickly.
        folder: the reader's home.
        host: the network namespace of the host.
        core: of its engines, the first and the following ones.
    """

    def __init__(self, pool: Pool, folder: Path, host: str, core: int = 0) -> None:
        self.folder = folder
        self._pool, self._host, self._core = pool, host, core
        self._environment = {
            **engine_environment(pool.runtime),
            RUNTIME_DIR_VARIABLE: str(pool.runtime.with_name(f"docs-{host}")),
            "OMNI_CONNECTOR_ARENA_GIB": "0.125",
        }
        self.engines: list[PastedEngine] = []
        self.terminal = Terminal(folder, self._environment, host=host)

    def paste(self, paste: uses.Paste, known: Mapping[str, str]) -> str:
        """What the block prints, once that is what its page promises; its servers are started."""
        text = paste.filled(block(paste.page, paste.start).text, known)
        printed = self.terminal.expect(text, paste.prints, paste.status)
        for words in self.terminal.servers():
            self.serve(words)
        return printed

    def serve(self, words: list[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a `vllm` with these arguments."""
        engine = PastedEngine(
            self._pool.model("llama"),
            self.folder / f"engine-{len(self.engines)}.log",
            environment={
                **self._environment,
                "VLLM_CPU_OMP_THREADS_BIND": str((self._core + len(self.engines)) % 2),
                **(environment or {}),
            },
            fork_server=self._pool.fork_server(),
            host=self._host,
            pasted=tuple(words),
        )
        engine.start()
        self.engines.append(engine)

    def wait(self, timeout: float = 120.0) -> None:
        """Wait until all engines answer.

        Raises:
            EngineError: one has ended, or does not within `timeout` seconds.
        """
        for engine in self.engines:
            port = after(list(engine.pasted), "--port") if "--port" in engine.pasted else "8000"
            try:
                self.answers(port, timeout, engine)
            except PastingError as error:
                raise EngineError(f"an engine does not answer:\n{engine.log_tail()}") from error

    def answers(self, port: str, timeout: float, engine: PastedEngine | None = None) -> None:
        """Wait until a server of this host is healthy."""

        def healthy(printed: str) -> bool:
            assert engine is None or engine.alive, engine.log_tail()
            return "200" in printed

        ask = f"curl -s -m 5 -o healthy -w '%{{http_code}}' http://127.0.0.1:{port}/health"
        self.terminal.until(healthy, ask, timeout)

    def completion(self, port: str, prompt: str, **fields: Any) -> dict[str, Any]:
        """What a server of this host answers."""
        body = {"model": "MODEL", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        status, printed = self.terminal.paste(
            f"curl -s http://127.0.0.1:{port}/v1/completions "
            f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
        )
        assert status == 0, self.terminal.logs()
        answer: dict[str, Any] = json.loads(printed)
        return answer

    def counts(self, port: str, name: str) -> float:
        """A counter of an engine of this host."""
        _, printed = self.terminal.paste(f"curl -s http://127.0.0.1:{port}/metrics")
        lines = [
            line for line in printed.splitlines() if line.startswith(f"vllm:omni_connector_{name}")
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def close(self) -> None:
        """Stop everything. Idempotent."""
        for engine in self.engines:
            engine.stop()
        self.terminal.close()


@contextmanager
def reader(pool: Pool, folder: Path, host: str, core: int = 0) -> Iterator[Reader]:
    """Who pastes on a host; nothing of it is left afterwards."""
    folder.mkdir()
    found = Reader(pool, folder, host, core)
    try:
        yield found
    finally:
        found.close()


def test_one_host(engine_pool: Pool, tmp_path: Path) -> None:
    """Quickstart, then what pages tell of running engines."""
    with netns.two_hosts() as cable, reader(engine_pool, tmp_path / "home", cable.left.name) as who:
        (who.folder / "prompt.txt").write_text(LONG)
        (who.folder / "spans").mkdir()
        known = {uses.FOLDER: str(who.folder / "spans")}
        for paste in uses.ONE_HOST:
            if paste.start == "pip install vllm-router":
                who.wait()  # a router that is there before its engines looks for them seldom
            if paste.page == "docs/quickstart.md" and paste.start == "curl http":
                who.answers("8000", ROUTER_S)
                listed = json.loads(who.terminal.paste("omni-connector top --once --json")[1])
                started = sorted(listed["engines"], key=lambda engine: float(engine["started"]))
                assert len(started) == 2
                known |= {
                    uses.PREFILL_ID: started[0]["engine_id"],
                    uses.DECODE_ID: started[1]["engine_id"],
                }
            if paste.page == "docs/shared-prefix.md" and paste.start == "omni-connector explain":
                computed = who.completion("8100", LONG)
            who.paste(paste, known)
        assert who.terminal.paste("omni-connector dashboard > grafana.json")[0] == 0
        assert json.loads((who.folder / "grafana.json").read_text())["panels"]
        found = who.completion("8200", LONG)
        assert found["choices"][0]["text"] == computed["choices"][0]["text"]
        assert who.counts("8200", "tokens_from_host_total") > 0, "README: engines of a host share"


def test_a_promise_that_is_not_kept_is_found(tmp_path: Path) -> None:
    """The control: what does not come, and what fails, is no success."""
    with Terminal(tmp_path, {}) as terminal:
        with pytest.raises(PastingError, match="without"):
            terminal.expect("echo nothing", ["handed off"], within=1.0)
        with pytest.raises(PastingError, match="status 3 for 0"):
            terminal.expect("(exit 3)", [], within=1.0)


def test_two_hosts(engine_pool: Pool, tmp_path: Path) -> None:
    """Between hosts: a key, two addresses, and bytes through Mooncake."""
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with ExitStack() as stack:
        cable = stack.enter_context(netns.two_hosts("10.0.0"))
        home = tmp_path / "prefill"
        prefill = stack.enter_context(reader(engine_pool, home, cable.left.name))
        decode = stack.enter_context(
            reader(engine_pool, tmp_path / "decode", cable.right.name, core=1)
        )
        known = {uses.FOLDER: str(home)}  # the key is copied by being in the same place
        for paste in uses.TWO_HOSTS["prefill"]:
            prefill.paste(paste, known)
        for paste in uses.TWO_HOSTS["decode"]:
            if paste.start == "vllm-router":
                prefill.wait()
                decode.wait()
            decode.paste(paste, known)
        decode.answers("30000", ROUTER_S)
        answer = decode.completion("30000", LONG)
        assert (
            answer["choices"][0]["text"] == prefill.completion("8100", LONG)["choices"][0]["text"]
        )
        decode.terminal.expect(
            "curl -s http://127.0.0.1:8200/metrics | grep omni_connector",
            [
                r"handoffs_received_total{.*} 1\.0",
                r'peers_total{.*reason="nearer_ones_cannot",transport="mooncake"} 1\.0',
            ],
        )
        [line] = uses.PRINTED
        shown = block(*line).text.split("tcp://")[0]
        assert f"{shown}tcp://10.0.0.1:" in decode.engines[0].log.read_text()


def test_a_folder(engine_pool: Pool, tmp_path: Path) -> None:
    """A store in a folder, in which blocks outlive their engine."""
    with netns.two_hosts() as cable, reader(engine_pool, tmp_path / "home", cable.left.name) as who:
        disk = tmp_path / "disk"
        disk.mkdir(mode=0o755)
        [paste] = uses.A_FOLDER
        who.paste(paste, {uses.FOLDER: str(disk)})
        who.wait()
        computed = who.completion("8100", LONG)
        blocks = f"find {disk}/omni/kv -type f -name '*.kv'"
        who.terminal.until(lambda told: bool(told.strip()), blocks, 60.0)
        # The others follow.
        lately = f"{blocks} -newermt '2 seconds ago'"
        who.terminal.until(lambda told: not told.strip(), lately, 60.0)
        who.engines.pop().stop()
        who.terminal.paste('vllm serve MODEL --port 8100 --kv-transfer-config "$KV"')
        who.serve(*who.terminal.servers())
        who.wait()
        assert who.completion("8100", LONG)["choices"] == computed["choices"]
        assert who.counts("8100", "tokens_shared_total") > 0


def test_the_compose_file(engine_pool: Pool, tmp_path: Path) -> None:
    """Its services as processes: each engine in a network of its own, the volume in common."""
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    with ExitStack() as stack:
        cable = stack.enter_context(netns.two_hosts())
        hosts = {"prefill": cable.left, "decode": cable.right}
        engines = {
            name: stack.enter_context(reader(engine_pool, tmp_path / name, host.name, core))
            for core, (name, host) in enumerate(hosts.items())
        }
        volume = engine_pool.runtime.with_name("docs-volume")
        volume.mkdir(mode=0o755)
        for name, who in engines.items():
            model, *arguments = services[name]["command"]
            assert model.startswith("${MODEL")
            given = services[name]["environment"]
            assert str(given["OMNI_CONNECTOR_RUNTIME_DIR"]).startswith("/run/omni/")
            folder = str(given["OMNI_CONNECTOR_RUNTIME_DIR"]).replace("/run/omni", str(volume))
            who.serve(
                ["serve", "MODEL", "--host", "0.0.0.0", *arguments], {RUNTIME_DIR_VARIABLE: folder}
            )
        for who in engines.values():
            who.wait()
        command = services["router"]["command"][2]
        for name, host in hosts.items():
            assert f"http://{name}:8000" in command
            command = command.replace(f"http://{name}:8000", f"http://{host.address}:8000")
        router = command.replace("--port 8000", "--port 8001")  # in a network of its own, there
        engines["decode"].terminal.paste(router)
        engines["decode"].answers("8001", ROUTER_S)
        answer = engines["decode"].completion("8001", LONG)
        engines["decode"].terminal.expect(
            "curl -s http://127.0.0.1:8000/metrics",
            [r"omni_connector_handoffs_received_total{.*} 1\.0"],
        )
        again = engines["decode"].completion("8001", LONG)
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        # docs/troubleshooting.md: usage counts them
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
