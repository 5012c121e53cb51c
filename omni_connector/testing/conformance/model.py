# SPDX-License-Identifier: Apache-2.0
"""A transport's objects beside a model of them, by a Hypothesis state machine."""

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from omni_connector.testing.conformance.base import Conformance, Open
from omni_connector.testing.conformance.values import OBJECTS, same
from omni_connector.transports.codec import encode

REQUESTS = ("req-1", "req-10", "req-1-0", "a", "é", "a.b")
KEY_SHAPES = ("{}", "omni_0_to_1_kv_cache_{}", "{}_0_0_0_1", "{}_chunk")


class ObjectModelConformance(Conformance):
    """Any sequence of `put`, `get` and `cleanup`."""

    def test_objects_agree_with_a_model(self, open_connector: Open) -> None:
        suite = self
        senders = [open_connector(), open_connector()]
        receiver = open_connector()

        class ObjectMachine(RuleBasedStateMachine):
            def __init__(self) -> None:
                super().__init__()
                for sender, rid in ((s, r) for s in senders for r in REQUESTS):
                    sender.cleanup(rid)
                # Per sender: key -> (when, value, slots), and what request a key is of.
                self.model: list[dict[str, tuple[int, Any, int]]] = [{}, {}]
                self.now = 0

            @rule(
                who=st.integers(0, 1),
                request=st.sampled_from(REQUESTS),
                shape=st.sampled_from(KEY_SHAPES),
                value=OBJECTS,
            )
            def put(self, who: int, request: str, shape: str, value: Any) -> None:
                self.record(who, shape.format(request), value)

            @rule(
                who=st.integers(0, 1),
                request=st.sampled_from(REQUESTS),
                shape=st.sampled_from(KEY_SHAPES),
                slots=st.floats(0.0, 6.0),
                fill=st.integers(0, 255),
            )
            def put_long(self, who: int, request: str, shape: str, slots: float, fill: int) -> None:
                content = bytes([fill]) * int(slots * suite.object_slot_bytes)
                self.record(who, shape.format(request), content)

            def record(self, who: int, key: str, value: Any) -> None:
                stored = sum(part.nbytes for part in encode(value))
                needed = math.ceil(stored / suite.object_slot_bytes)
                ok, _, metadata = senders[who].put("0", "1", key, value)
                own = self.model[who]
                taken = sum(slots for other, (_, _, slots) in own.items() if other != key)
                if suite.object_slots is not None:
                    assert ok == (taken + needed <= suite.object_slots)
                assert ok == (metadata is not None)
                if ok:
                    self.now += 1
                    own[key] = self.now, value, needed

            @rule(request=st.sampled_from(REQUESTS), shape=st.sampled_from(KEY_SHAPES))
            def get(self, request: str, shape: str) -> None:
                key = shape.format(request)
                held = [own[key] for own in self.model if key in own]
                found = receiver.get("0", "1", key)
                if not held:
                    assert found is None
                else:
                    assert found is not None
                    assert same(max(held, key=lambda entry: entry[0])[1], found[0])

            @rule(who=st.integers(0, 1), request=st.sampled_from(REQUESTS))
            def cleanup(self, who: int, request: str) -> None:
                senders[who].cleanup(request)
                for shape in KEY_SHAPES:
                    self.model[who].pop(shape.format(request), None)

        run_state_machine_as_test(
            ObjectMachine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
        )
