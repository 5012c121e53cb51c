# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's own diffusion runner receives KV: with our manager, and with its own over our
connector.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE

from ..patience import PATIENCE_S
from .caches import Sequence, sequence
from .chunks import Host, RemoteStage, host_of
from .connectors import send
from .shared import shared_manager

CONNECTORS = {"our": "SharedMemoryConnector", "their": "OmniSharedMemoryConnector"}


@pytest.fixture(scope="module")
def host(vllm_omni: Path, runtime: Path) -> Iterator[Host]:
    """The process that has the wheel loaded."""
    with host_of("runner", vllm_omni, runtime) as made:
        yield made


Sizes = tuple[int, int, int] | None


@pytest.fixture
def ranks(host: Host, tmp_path: Path) -> Iterator[Callable[..., list[RemoteStage]]]:
    """Forks all ranks of a stage, and ends them with the test.

    Ranks that another one gives KV to look for senders where there are none.
    """
    forked: list[RemoteStage] = []

    def fork(sizes: Sizes, whose: str = "our", **settings: Any) -> list[RemoteStage]:
        branches, heads, sequence = sizes or (1, 1, 2)
        companions = settings.pop("companions", True)
        meeting = str(tmp_path / f"meeting{len(forked)}")
        for rank in range(branches * heads * sequence):
            own = dict(settings)
            if rank >= heads:  # vLLM-Omni counts tensor-parallel ranks first
                own["connector_config"] = {"type": CONNECTORS[whose], "namespace": "nowhere"}
            forked.append(
                RemoteStage(host, "rank", rank, meeting, sizes, whose, own, companions, wait=False)
            )
        for each in forked:
            each.begun()
        return forked

    yield fork
    for each in forked:
        each.close()


@pytest.fixture
def sends(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, list[Sequence]], None]]:
    """Sends a request from as many tensor-parallel ranks as there are parts of it."""
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(runtime))
    senders: dict[tuple[int, int], Any] = {}

    def of(request: str, parts: list[Sequence | None]) -> None:
        for rank, part in enumerate(parts):
            place = rank, len(parts)
            if place not in senders:
                senders[place] = shared_manager(
                    need_recv_cache=False, tp_rank=rank, tp_size=len(parts)
                )
            assert part is None or send(senders[place], part, request)

    yield of
    for each in senders.values():
        each.close()


@pytest.fixture
def name() -> str:
    """A request id that no other test uses."""
    return f"r-{uuid.uuid4().hex}"


def _all(ranks: list[RemoteStage], method: str, *arguments: Any) -> list[Any]:
    for rank in ranks:
        rank.begin(method, *arguments)
    return [_rounded(rank.end()) for rank in ranks]


def _rounded(found: Any) -> Any:
    return [round(each, 4) for each in found] if isinstance(found, list) else found


def _sum(seed: int) -> float:
    seq = sequence(seed=seed)
    return round(float(seq.key.double().sum() + seq.value.double().sum()), 4)


def _heads(seed: int) -> list[float]:
    seq = sequence(seed=seed)
    return (seq.key.double().sum((0, 2)) + seq.value.double().sum((0, 2))).tolist()


def _parts(seed: int, heads: int) -> list[Sequence]:
    return [sequence(seed=seed + 10 * rank) for rank in range(heads)]


# Ranks that share branches, are tensor-parallel, and share a sequence.
SIZES = [
    (1, 1, 1), (2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2),
    (2, 2, 2),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("whose", ["our", "their"])
def test_each_rank_computes_with_the_kv_of_its_branch_and_heads(
    ranks: Any, sends: Any, name: str, whose: str, sizes: tuple[int, int, int]
) -> None:
    branches, heads, _ = sizes
    seeds = dict(zip(["", "-text", "-img"][: 2 if branches == 2 else 3], (1, 2, 3), strict=False))
    stage = ranks(sizes, whose)
    for again in range(2):  # the second time with the branches changed over
        for branch, seed in seeds.items():
            sends(f"{name}{again}{branch}", _parts(seed, heads))
        roles = [f"cfg{branch.replace('-', '_')}" for branch in seeds][1:]
        others = [f"{name}{again}{branch}" for branch in seeds][1:]
        companions = dict(zip(roles, others[::-1] if again else others, strict=True))
        found = _all(stage, "execute", f"{name}{again}", companions)
        own = [1, *([3, 2] if again and len(seeds) == 3 else [2, 3])][: len(seeds)]
        wanted = [[_sum(seed + 10 * (rank % heads)) for seed in own] for rank in range(len(stage))]
        assert found == wanted


def test_a_stage_that_computes_step_by_step_receives_the_same(
    ranks: Any, sends: Any, name: str
) -> None:
    sends(name, _parts(1, 2))
    sends(f"{name}-text", _parts(2, 2))
    found = _all(ranks((2, 2, 1)), "step", name, {"cfg_text": f"{name}-text"})
    assert found == [[_sum(1), _sum(2)], [_sum(11), _sum(12)]] * 2


def test_without_vllm_omnis_groups_rank_0_of_the_world_gives_to_all(
    ranks: Any, sends: Any, name: str
) -> None:
    sends(name, _parts(1, 1))
    assert _all(ranks(None), "execute", name) == [[_sum(1), 0.0, _sum(1)]] * 2


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 1), (2, 2), (1, 2)])
def test_its_autoregressive_runner_sends_what_its_diffusion_runner_receives(
    host: Host, ranks: Any, name: str, senders: int, receivers: int
) -> None:
    sending = [RemoteStage(host, "sender", rank, senders, receivers) for rank in range(senders)]
    for rank, each in enumerate(sending):
        # Its scheduler frees the blocks of these.
        assert each("send", name, 1 + 10 * rank) == ["own"]
    stage = ranks((1, receivers, 1), rank_mapping={"from_tp": senders, "to_tp": receivers})
    found = [each[0] for each in _all(stage, "execute", name)]
    heads = [_heads(1 + 10 * rank) for rank in range(senders)]
    shares = len(heads) * 2 // receivers  # each sequence has two heads
    every = [head for both in heads for head in both]
    wanted = [sum(every[shares * rank : shares * (rank + 1)]) for rank in range(receivers)]
    assert found == pytest.approx(wanted, abs=1e-3)
    for each in sending:
        each.close()


LACKS: dict[str, tuple[list[Any], list[Any]]] = {
    "half": ([sequence(seed=1), None], _parts(2, 2)),
    "the branch of one": (_parts(1, 2), [sequence(seed=2), None]),
    "other lengths": ([sequence(10, seed=1), sequence(11, seed=11)], _parts(2, 2)),
    "all": ([None, None], [None, None]),
}


@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2, 1)], ids=str)
def test_tensor_parallel_ranks_use_what_came_to_all_of_them_or_nothing(
    ranks: Any, sends: Any, name: str, lack: str, sizes: tuple[int, int, int]
) -> None:
    for request, parts in zip((name, f"{name}-text"), LACKS[lack], strict=True):
        sends(request, parts)
    stage = ranks(sizes, recv_timeout=0.3)
    companions = {"cfg_text": f"{name}-text"}
    assert _all(stage, "execute", name, companions) == [None] * len(stage)
    sends(f"{name}-next", _parts(1, 2))
    assert None not in _all(stage, "execute", f"{name}-next")


def test_ranks_that_do_not_agree_would_part(ranks: Any, sends: Any, name: str) -> None:
    """The control of the above."""
    sends(name, [sequence(seed=1), None])
    stage = ranks((1, 2, 1), recv_timeout=0.3)
    _all(stage, "stubborn")
    assert _all(stage, "execute", name) == [[_sum(1), 0.0, _sum(1)], None]


@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 1, 1)], ids=str)
def test_a_rank_that_dies_leaves_no_other_waiting(
    ranks: Any, sends: Any, name: str, sizes: tuple[int, int, int]
) -> None:
    sends(name, _parts(1, sizes[1]))
    first, second = ranks(sizes)
    second.kill()
    first.begin("execute", name)
    assert first.end().startswith("RuntimeError")


def test_ranks_wait_for_one_that_is_late(ranks: Any, sends: Any, name: str) -> None:
    sends(name, _parts(1, 2))
    first, second = ranks((1, 2, 1), recv_timeout=0.2)
    first.begin("execute", name)
    time.sleep(0.5)
    second.begin("execute", name)
    found = [_rounded(rank.end()) for rank in (first, second)]
    assert found == [[_sum(1), 0.0, _sum(1)], [_sum(11), 0.0, _sum(11)]]


def test_its_runner_prefetches_with_its_own_manager_over_our_connector(
    ranks: Any, sends: Any, name: str
) -> None:
    sends(f"{name}-a", _parts(1, 1))
    sends(f"{name}-b", _parts(2, 1))
    [rank] = ranks(
        (1, 1, 1), "their", companions=False, enable_kv_async_prefetch=True, recv_timeout=1.0
    )
    rank.begin("execute", f"{name}-a", None, f"{name}-b")
    assert _rounded(rank.end()) == [_sum(1), 0.0, _sum(1)]
    assert rank("prefetched", PATIENCE_S)
    # By now its sender has something else under this id.
    sends(f"{name}-b", _parts(3, 1))
    assert _rounded(rank("execute", f"{name}-b")) == [_sum(2), 0.0, _sum(2)]
    # The control: what was not prefetched is received when it is asked for.
    sends(f"{name}-c", _parts(1, 1))
    sends(f"{name}-c", _parts(3, 1))
    assert _rounded(rank("execute", f"{name}-c")) == [_sum(3), 0.0, _sum(3)]


def test_its_worker_may_pause_at_any_time(ranks: Any) -> None:
    [rank] = ranks((1, 1, 1))
    assert rank("prefetched", 0.0)
