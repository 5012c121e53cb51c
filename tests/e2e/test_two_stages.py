# SPDX-License-Identifier: Apache-2.0
"""Two real stages: a vLLM engine, and four ranks that denoise with its KV under guidance.

The ranks share a request's two branches, and each branch's heads. They are on the engine's host
(shared memory), and on another one (Mooncake). What they compute is compared with what one process
computes from the KV of transformers, which never saw vLLM or this package.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_connector.net.keys import write_new_key
from omni_connector.stage.ports import kv_port
from omni_connector.testing.engines import Process

from . import netns, stage_programs
from .pool import Pool, engine_environment

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(netns.obstacle()), reason=netns.obstacle() or ""),
]

RANKS = range(4)
ANSWER_S = 120.0
PATIENCE_S = 30.0
LENGTHS = {"prompt": 300, "companion": 41}
OBJECT_BYTES = 4 * 2 * 2 * 64 * 4
"""Of one token's KV: layers, key and value, heads, elements, bytes of a float32."""


@dataclass
class Stage:
    """A process of a stage, which is given orders in a folder."""

    process: Process
    folder: Path
    log: Path
    orders: int = field(default=0)

    def order(self, **order: Any) -> Callable[[], Any]:
        """Give an order; what returns its answer, or raises AssertionError after ANSWER_S."""
        path = self.folder / f"{self.orders}.order"
        self.orders += 1
        new = path.with_suffix(".new-order")
        new.write_text(json.dumps(order))
        new.rename(path)

        def answer() -> Any:
            said, deadline = path.with_suffix(".said"), time.monotonic() + ANSWER_S
            while not said.exists():
                assert self.process.poll() is None, self.log.read_text()[-6000:]
                assert time.monotonic() < deadline, f"no answer:\n{self.log.read_text()[-6000:]}"
                time.sleep(0.02)
            return json.loads(said.read_text())

        return answer

    def kill(self) -> None:
        """SIGKILL to all of it. Idempotent."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(30.0)


@dataclass
class Stages:
    """The engine, and for each transport four ranks that receive."""

    engine: Stage
    ranks: Mapping[str, list[Stage]]
    senders: Mapping[str, Any]

    def send(self, by: str, *, cleanup: tuple[str, ...] = (), **requests: str) -> dict[str, Any]:
        """Send prompts as requests; what the engine's stage says of it."""
        said: dict[str, Any] = self.engine.order(by=by, send=requests, cleanup=cleanup)()
        return said

    def receive(self, by: str, request: str, companion: str, **order: Any) -> list[dict[str, Any]]:
        """Have all ranks receive and denoise; what each says."""
        order = {"timeout": PATIENCE_S, "sender": self.senders[by], **order}
        answers = [
            rank.order(by=by, request=request, companion=companion, **order)
            for rank in self.ranks[by]
        ]
        return [answer() for answer in answers]


@pytest.fixture(scope="module")
def stages(engine_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages]:
    folder = tmp_path_factory.mktemp("stages")
    key = folder / "key"
    write_new_key(key)
    with ExitStack() as stack:
        cable = stack.enter_context(netns.two_hosts())
        own, other = cable.left, cable.right

        def start(name: str, stage: str, host: netns.Host, **setting: Any) -> Stage:
            home = folder / name
            home.mkdir()
            log = home / "log"
            runtime = engine_pool.runtime.with_name(f"stages-{host.name}")
            environment = {
                **os.environ,
                **engine_environment(runtime),
                "GLOO_SOCKET_IFNAME": "lo",
                "HF_HUB_OFFLINE": "1",
                "TMPDIR": str(home),
                "VLLM_CPU_OMP_THREADS_BIND": "0",
            }
            with log.open("wb") as output:
                process = engine_pool.fork_server().start(
                    stage_programs.__name__,
                    [stage, str(home), json.dumps(setting)],
                    environment,
                    output,
                    host=host.name,
                )
            made = Stage(process, home, log)
            stack.callback(made.kill)
            return made

        transfer_engine = {"type": "MooncakeTransferEngineConnector", "key_file": str(key)}
        shared = {"type": "SharedMemoryConnector"}
        # Room for the KV of a few requests, and no more.
        room = 6 * sum(LENGTHS.values()) * OBJECT_BYTES
        engine = start(
            "engine",
            "autoregressive",
            own,
            model=str(engine_pool.model("llama")),
            prompts=prompts(),
            senders={
                "shm": {**shared, "object_gib": room / (1 << 30)},
                "mooncake": {**transfer_engine, "host": own.address, "memory_pool_size": room},
            },
        )
        sender = {"host": own.address, "zmq_port": kv_port(50051, 0)}
        receivers = {
            "shm": (own, shared),
            "mooncake": (other, {**transfer_engine, "host": other.address, "role": "receiver"}),
        }
        ranks = {
            by: [
                start(
                    f"{by}-{rank}",
                    "rank",
                    host,
                    rank=rank,
                    meeting=str(folder / f"{by}-meeting"),
                    receivers={by: connector},
                )
                for rank in RANKS
            ]
            for by, (host, connector) in receivers.items()
        }
        yield Stages(engine, ranks, {"shm": None, "mooncake": sender})


def prompts() -> dict[str, list[int]]:
    """A prompt, and the shorter one that guidance leads away from."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(3, 500, (length,), generator=draw).tolist()
        for name, length in LENGTHS.items()
    }


@pytest.fixture(scope="module")
def expected(engine_pool: Pool) -> torch.Tensor:
    """The guided latents of one process, with the KV that transformers computes."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        engine_pool.model("llama"), dtype=torch.float32
    )
    branches = []
    for prompt in prompts().values():
        with torch.no_grad():
            past = reference(torch.tensor([prompt]), use_cache=True).past_key_values
        keys = [layer.keys[0].transpose(0, 1) for layer in past.layers]
        values = [layer.values[0].transpose(0, 1) for layer in past.layers]
        _, heads, dim = keys[0].shape
        denoiser = stage_programs.example().Denoiser(heads, dim, len(keys))
        branches.append(denoiser(keys, values))
    return stage_programs.guided(*branches)


def off(said: dict[str, Any], expected: torch.Tensor) -> float:
    """How far latents are from the right ones, in parts of their size."""
    return float((torch.tensor(said["latents"]) - expected).abs().max() / expected.abs().max())


BOTH = pytest.mark.parametrize("by", ["shm", "mooncake"])


@BOTH
def test_four_ranks_denoise_with_the_kv_of_the_engine(
    stages: Stages, expected: torch.Tensor, by: str
) -> None:
    for _ in range(2):  # the second time as another request of the same id
        said = stages.send(by, right="prompt", away="companion")
        assert said == {"ids": ["away", "right"], "failures": {}}
        for answer in stages.receive(by, "right", "away"):
            assert answer["came"]
            assert off(answer, expected) < 1e-4
    # The control: with the branches changed over, the same ranks compute something else.
    stages.send(by, right="prompt", away="companion")
    for answer in stages.receive(by, "away", "right"):
        assert answer["came"]
        assert off(answer, expected) > 1e-2


@BOTH
def test_receivers_that_come_late_get_it_all_the_same(
    stages: Stages, expected: torch.Tensor, by: str
) -> None:
    stages.send(by, early="prompt", too="companion")
    for answer in stages.receive(by, "early", "too", late={"1": 1.0, "2": 0.5}):
        assert answer["came"]
        assert off(answer, expected) < 1e-4


@BOTH
def test_what_was_never_sent_comes_to_no_rank(stages: Stages, by: str) -> None:
    stages.send(by, alone="companion")
    for answer in stages.receive(by, "nobody's", "alone", timeout=1.0):
        assert not answer["came"]
    stages.send(by, cleanup=("alone",))


@BOTH
def test_a_full_memory_fails_a_send_and_gives_the_ids_back(
    stages: Stages, expected: torch.Tensor, by: str
) -> None:
    names = [f"{by}-{number}" for number in range(12)]
    said = stages.send(by, **dict.fromkeys(names, "prompt"))
    assert said["ids"] == sorted(names), "the blocks of failed sends may be used again, too"
    assert said["failures"], "twelve requests should not fit"
    assert set(said["failures"]) < set(names)
    stages.send(by, cleanup=(*names, "right", "away", "early", "too"))
    said = stages.send(by, after="prompt", that="companion")
    assert not said["failures"]
    for answer in stages.receive(by, "after", "that"):
        assert answer["came"]
        assert off(answer, expected) < 1e-4


def test_a_sender_that_is_killed_leaves_no_rank_waiting(stages: Stages) -> None:
    """The last test of these: the engine's stage is gone afterwards."""
    for by in stages.ranks:
        stages.send(by, left="prompt", behind="companion")
    stages.engine.kill()
    for by in stages.ranks:
        for answer in stages.receive(by, "left", "behind", timeout=2.0):
            assert not answer["came"]
            assert "latents" not in answer
