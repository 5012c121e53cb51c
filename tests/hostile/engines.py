# SPDX-License-Identifier: Apache-2.0
"""What a client says in its requests, followed through whole engines; it needs vLLM."""

import gc
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from omni_connector.handoff.channel import TICK_S
from tests import inspection
from tests.hostile.mutation import distort_value
from tests.hostile.settings import PARAMS
from tests.hostile.trial import Parser
from tests.simulation.check import leftovers, sizes
from tests.simulation.clients import HANDOFF, TIMEOUT_S, Sent, text
from tests.simulation.cluster import Cluster
from tests.simulation.engines.engine import SimulatedEngine
from tests.simulation.engines.settings import HANDOFF_TTL_S, EngineShape
from tests.simulation.plan import Plan
from tests.simulation.run import laboratory
from tests.simulation.surroundings.world import Violation

_LENGTH: Final = 13
_LENGTHS: Final = (1, 2, _LENGTH, _LENGTH, _LENGTH)
_RIGHT: Final = frozenset({"handoffs_offered", "handoffs_received"})


def _shape(name: str) -> EngineShape:
    """Of an engine that hands off and takes hand-offs, and shortens prompts to do so."""
    return EngineShape(
        name=name,
        role="kv_both",
        family="window and full",
        blocks=24,
        block_size=4,
        ranks=1,
        step_tokens=64,
        long_prefill=0,
        seqs=4,
        overlap=False,
        priorities=False,
        policy="fail",
        runner="v1",
        caching=False,
        slots=24,
        shares=False,
        integrity="full",
        zeroes=False,
        step_s=0.0,
    )


class _Engines:
    """Two engines of a simulation, and a client that sends anything."""

    def __init__(self) -> None:
        shapes = tuple(map(_shape, ("B0", "B1")))
        self.cluster = Cluster(Plan("hostile params", shapes, (), 0.0, mapped=True, piece_bytes=1))
        self.cluster.excuses = True  # what fails is told below
        self._counted: Counter[str] = Counter()
        self._failed: list[str] = []
        self._before = {engine: sizes(engine) for engine in self.engines}
        self._answer: dict[str, Any] = {}

    @property
    def engines(self) -> list[SimulatedEngine]:
        return list(self.cluster.engines.values())

    def watch(self, stack: ExitStack) -> None:
        """Note what the halves beside vLLM's schedulers count."""
        for engine in self.engines:
            stats = inspection.stats(engine.halves[0])
            count, fail = stats.count, stats.fail

            def counted(name: str, number: int = 1, *, inner: Any = count) -> None:
                self._counted[name] += number
                inner(name, number)

            def failed(kind: str, number: int = 1, *, inner: Any = fail) -> None:
                self._failed.append(kind)
                inner(kind, number)

            stack.enter_context(patch.object(stats, "count", counted))
            stack.enter_context(patch.object(stats, "fail", failed))

    def request(self, engine: int, length: int, params: Any) -> tuple[bool | str, Any]:
        """Send a request, and wait for its end: what became of its params, and the answer's.

        Raises:
            AssertionError: it does not end well, or something else than it has.
        """
        world, target = self.cluster.world, self.engines[engine]
        self._counted.clear()
        self._failed.clear()
        world.story.clear()
        ends: list[tuple[Any, bool]] = []
        sent = Sent(
            f"r{world.acts}", target, 2, world.now + TIMEOUT_S, lambda *end: ends.append(end)
        )
        self.cluster.sent[sent.request_id] = sent
        target.submit(sent.request_id, text(0, length), 2, params=params)
        try:
            world.run(lambda: bool(ends) and target.idle, sent.deadline)
        except Violation as violation:
            raise AssertionError(str(violation)) from violation
        assert ends, "the request does not end"
        assert ends[0][1], "the request fails"
        assert sent.tokens in (1, 2)
        accepted = any(self._counted[each] for each in _RIGHT)
        return accepted or (self._failed[-1] if self._failed else "wants nothing"), ends[0][0]

    def glance(self, engine: int, length: int, params: Any) -> bool | str:
        """The same of a request that is aborted before vLLM schedules it: quicker."""
        world, connector = self.cluster.world, self.engines[engine].scheduler.connector
        self._failed.clear()
        world.story.clear()
        request = Request(
            request_id=f"g{world.acts}",
            prompt_token_ids=text(0, length),
            sampling_params=SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": params}),
            pooling_params=None,
        )
        connector.on_new_request(request)
        for _ in range(2):
            waits = connector.get_num_new_matched_tokens(request, 0)[0] is None
            world.run(lambda: False, world.now)
        request.status = RequestStatus.FINISHED_ABORTED
        assert connector.request_finished_all_groups(request, ()) == (False, None)
        world.run(lambda: False, world.now)
        if self._failed:
            return self._failed[-1]
        return "waits" if waits else "aborted"

    def answer(self) -> dict[str, Any]:
        """The params of a hand-off of the first engine that nobody has leased."""
        token = bytes.fromhex(self._answer.get("omni_token", ""))
        if all(each.token != token for each in inspection.handoffs(self.engines[0].halves[0])):
            accepted, self._answer = self.request(0, _LENGTH, dict(HANDOFF))
            assert accepted is True, "an honest wish is refused"
        return self._answer

    def check(self) -> None:
        """Raise unless an honest hand-off still arrives, and nothing is left behind."""
        accepted, _ = self.request(1, _LENGTH, dict(self.answer()))
        assert accepted is True, f"an honest hand-off does not arrive: {accepted}"
        world = self.cluster.world
        for _ in range(3):
            world.advance(HANDOFF_TTL_S)
            world.run(lambda: False, world.now + 2 * TICK_S)
        for engine in self.engines:
            left = leftovers(engine, self._before[engine])
            assert not left, f"{engine.name} keeps {left[:6]}"


@contextmanager
def params() -> Iterator[Parser]:
    """`kv_transfer_params` of requests to engines: vLLM's schedulers, and our halves of them."""
    with ExitStack() as stack:
        stack.enter_context(laboratory())
        gc.enable()  # which schedules are too short for
        engines = _Engines()
        stack.callback(engines.cluster.close)
        engines.watch(stack)

        def make(rng: random.Random) -> tuple[bool, int, int, Any]:
            whole, engine, length = rng.random() < 0.05, rng.randrange(2), rng.choice(_LENGTHS)
            honest = rng.choice((engines.answer(), engines.answer(), rng.choice(PARAMS)))
            return whole, engine, length, distort_value(honest, rng)

        def parse(hostile: tuple[bool, int, int, Any]) -> bool | str:
            whole, *asked = hostile
            try:
                SamplingParams(extra_args={"kv_transfer_params": asked[2]})
            except (VLLMValidationError, RecursionError):  # where it arrives, and on no engine
                return "refused by vLLM"
            return engines.request(*asked)[0] if whole else engines.glance(*asked)

        yield Parser("params of requests", make, parse, (), engines.check)
