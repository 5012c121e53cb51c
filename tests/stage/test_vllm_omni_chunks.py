# SPDX-License-Identifier: Apache-2.0
"""Chunk pipelines of vLLM-Omni over our connectors: its own adapter on both sides, in processes."""

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_connector.objects.factory import ConnectorSpec
from omni_connector.objects.transfer_config import load_omni_transfer_config
from omni_connector.testing.ports import free_port

from ..masters import Master, lender
from ..patience import PATIENCE_S
from .chunks import LARGE, SMALL, Host, RemoteStage, codes_of, host_of

# What a pipeline is given to use ours. Other makers' engines are replaced by the one that we have.
OURS = {
    "SharedMemoryConnector": "OmniSharedMemoryConnector",
    "MooncakeStoreConnector": "OmniMooncakeStoreConnector",
    "MooncakeTransferEngineConnector": "OmniMooncakeTransferEngineConnector",
    "MoriTransferEngineConnector": "OmniMooncakeTransferEngineConnector",
    "NixlConnector": "OmniMooncakeTransferEngineConnector",
    "YuanrongTransferEngineConnector": "OmniMooncakeTransferEngineConnector",
}
PIPELINES = 110
"""In the wheel; 65 of them name connectors."""

GIVEN_UP_S = 1.0
"""Seconds without a chunk after which vLLM-Omni gives up a request, where one is to be given up."""


def deploys(vllm_omni: Path) -> list[Path]:
    found = sorted((vllm_omni / "vllm_omni" / "deploy").glob("*.yaml"))
    assert len(found) == PIPELINES
    return found


def specs(vllm_omni: Path) -> dict[str, ConnectorSpec]:
    """Of each connector name that the wheel's pipelines use, the one with most settings."""
    found: dict[str, ConnectorSpec] = {}
    for path in deploys(vllm_omni):
        for each in (yaml.safe_load(path.read_text()).get("connectors") or {}).values():
            if "name" in each:
                spec = ConnectorSpec(each["name"], each.get("extra") or {})
                before = found.setdefault(spec.name, spec)
                if len(spec.extra) > len(before.extra):
                    found[spec.name] = spec
    return found


@pytest.fixture(scope="module")
def host(vllm_omni: Path, runtime: Path) -> Iterator[Host]:
    """The process that has the wheel loaded."""
    with host_of("chunks", vllm_omni, runtime) as made:
        yield made


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    running = Master(tmp_path_factory.mktemp("master"))
    running.start()
    with lender(running):
        yield running
    running.kill()


@pytest.fixture
def stage(host: Host) -> Iterator[Callable[..., RemoteStage]]:
    """Forks stages, and ends them with the test."""
    forked: list[RemoteStage] = []

    def fork(*arguments: Any) -> RemoteStage:
        forked.append(RemoteStage(host, *arguments))
        return forked[-1]

    yield fork
    for each in forked:
        each.close()


@pytest.fixture(params=sorted({*OURS, "their own"}))
def connector(
    request: pytest.FixtureRequest, vllm_omni: Path, tmp_path: Path
) -> Callable[[int], dict[str, Any]]:
    """The connector of a stage, with the settings that a pipeline of the wheel gives it.

    vLLM-Omni's own shared memory takes the same tests, which shows that they ask no more.
    """
    name = request.param
    ours = OURS.get(name, "SharedMemoryConnector")
    known = specs(vllm_omni)
    assert known.keys() <= OURS.keys()
    extra = dict(known[name].extra) if name in known else {}
    if "Mooncake" in ours:
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    if ours == "OmniMooncakeStoreConnector":
        extra |= {"master": request.getfixturevalue("master").address, "segment_gib": 0}
    elif ours == "OmniMooncakeTransferEngineConnector":
        # The pipelines are those of hosts with RDMA and addresses of their own.
        extra |= {"zmq_port": free_port(), "host": "127.0.0.1", "protocol": "tcp"}
        extra |= {"memory_pool_size": 64 << 20, "memory_pool_device": "cpu"}
    elif ours == "OmniSharedMemoryConnector":
        extra |= {"object_gib": 0.0625}
    namespace = {} if ours == "SharedMemoryConnector" else {"namespace": tmp_path.name}

    def of(stage: int) -> dict[str, Any]:
        role = {"role": "receiver", "from_stage": stage - 1} if stage else {"role": "sender"}
        given = extra | role
        if "engine" not in ours.lower():
            given |= namespace
        return {"name": ours, "extra": given}

    return of


Connector = Callable[[int], dict[str, Any]]
Fork = Callable[..., RemoteStage]


@pytest.fixture
def name() -> Iterator[str]:
    """A request id that nobody else on this machine uses."""
    name = f"r-{uuid.uuid4().hex}"
    yield name
    for lock in Path("/dev/shm").glob(f"shm_{name}*.lock"):  # their connector leaves it
        lock.unlink()


def whole(seeds: list[int], size: int) -> list[tuple[list[int], int, bool]]:
    return [(codes_of(seed), size, True) for seed in seeds]


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_all_chunks_of_a_request_arrive_in_their_order(
    connector: Connector, stage: Fork, name: str, size: int
) -> None:
    sender, receiver = stage(0, connector(0)), stage(1, connector(1))
    seeds = list(range(100, 112))
    receiver.begin("receive", name, PATIENCE_S)
    sender("send", name, seeds, size)
    assert sender("sent", PATIENCE_S) == {}
    assert receiver.end() == (whole(seeds, size), True, False)


def test_a_receiver_that_comes_late_gets_all_chunks(
    connector: Connector, stage: Fork, name: str
) -> None:
    sender = stage(0, connector(0))
    sender("send", name, [5, 6, 7], SMALL)
    assert sender("sent", PATIENCE_S) == {}
    receiver = stage(1, connector(1))
    assert receiver("receive", name, PATIENCE_S) == (whole([5, 6, 7], SMALL), True, False)


def test_a_request_whose_sender_has_failed_is_given_up_and_others_are_not(
    connector: Connector, stage: Fork, name: str
) -> None:
    failing, receiver = stage(0, connector(0)), stage(1, connector(1))
    failing("send", name, [1, 2, 3], SMALL, ends=False)
    assert failing("put", name, 3, PATIENCE_S) == 3
    found = receiver("receive", name, PATIENCE_S, most=2)
    assert found == (whole([1, 2], SMALL), False, False)
    failing.kill()
    assert receiver("receive", f"{name}-never", GIVEN_UP_S) == ([], False, True)
    sender = stage(0, connector(0))
    sender("send", f"{name}-next", [8, 9], SMALL)
    found = receiver("receive", f"{name}-next", PATIENCE_S)
    assert found == (whole([8, 9], SMALL), True, False)


def test_a_sender_goes_on_when_its_receiver_has_failed(
    connector: Connector, stage: Fork, name: str
) -> None:
    sender, failing = stage(0, connector(0)), stage(1, connector(1))
    sender("send", name, [1, 2], SMALL, ends=False)
    assert failing("receive", name, PATIENCE_S, most=1)[0] == whole([1], SMALL)
    failing.kill()
    sender("send", f"{name}-next", [4, 5, 6], SMALL)
    receiver = stage(1, connector(1))
    found = receiver("receive", f"{name}-next", PATIENCE_S)
    assert found == (whole([4, 5, 6], SMALL), True, False)


def test_a_request_whose_id_was_used_before_gets_its_own_chunks(
    connector: Connector, stage: Fork, name: str
) -> None:
    sender, receiver = stage(0, connector(0)), stage(1, connector(1))
    for first in (10, 20, 30):
        seeds = list(range(first, first + 4))
        # It waits before there is anything to get.
        receiver.begin("receive", name, PATIENCE_S)
        time.sleep(0.05)
        sender("send", name, seeds, SMALL)
        assert receiver.end() == (whole(seeds, SMALL), True, False)
        assert sender("sent", PATIENCE_S) == {}


def test_chunks_of_an_aborted_request_are_not_those_of_the_next_one_of_its_id(
    connector: Connector, stage: Fork, name: str
) -> None:
    sender, receiver = stage(0, connector(0)), stage(1, connector(1))
    sender("send", name, [1, 2, 3, 4], SMALL, ends=False)
    assert sender("put", name, 4, PATIENCE_S) == 4
    assert receiver("receive", name, PATIENCE_S, most=1)[0] == whole([1], SMALL)
    sender("abort", name, PATIENCE_S)
    receiver.begin("receive", name, PATIENCE_S)
    time.sleep(0.05)
    sender("send", name, [7, 8, 9], SMALL)
    assert receiver.end() == (whole([7, 8, 9], SMALL), True, False)


@pytest.mark.parametrize("ttl_s", [0.1, 300.0], ids=["short", "control"])
def test_chunks_that_a_receiver_has_left_make_room_when_their_time_is_over(
    stage: Fork, name: str, tmp_path: Path, ttl_s: float
) -> None:
    """vLLM-Omni frees the chunks of a request that its sender has ended only when they are got."""
    extra = {"object_gib": 1 / 32, "buffer_ttl_seconds": ttl_s, "namespace": tmp_path.name}
    connector = {"name": "OmniSharedMemoryConnector", "extra": extra}
    sender, receiver = stage(0, connector), stage(1, connector)
    failed = []
    for number in range(8):  # 12 MiB each, of 32
        sender("send", f"{name}-{number}", [1, 2, 3], LARGE)
        failed.append(sender("sent", PATIENCE_S) != {})
        if not failed[-1]:
            found = receiver("receive", f"{name}-{number}", PATIENCE_S, most=1)
            assert found == (whole([1], LARGE), False, False)
        time.sleep(0.2)
    assert any(failed) == (ttl_s == 300.0)


def test_the_connectors_of_all_its_pipelines_are_read_as_it_reads_them(
    vllm_omni: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = json.loads(
        subprocess.run(
            [sys.executable, "-m", "tests.stage.pipelines", str(vllm_omni)],
            stdout=subprocess.PIPE,
            check=True,
            timeout=PATIENCE_S * 4,
            cwd=Path(__file__).parents[2],
        ).stdout
    )
    for path in deploys(vllm_omni):
        ours = load_omni_transfer_config(path)
        assert ours is not None
        found = {" ".join(edge): [each.name, each.extra] for edge, each in ours.connectors.items()}
        assert found == theirs[path.name], path.name


def test_a_mistyped_setting_of_a_pipeline_is_refused(connector: Connector, stage: Fork) -> None:
    given = connector(0)
    if not given["name"].startswith("Omni"):
        pytest.skip("theirs takes anything")
    given["extra"]["object_timeuot"] = 5
    with pytest.raises(RuntimeError, match="did you mean 'object_timeout'"):
        stage(0, given)
