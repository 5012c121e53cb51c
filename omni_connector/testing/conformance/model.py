# SPDX-License-Identifier: Apache-2.0
"""A connector's objects beside a model of them, by a Hypothesis state machine."""

import itertools
import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from omni_connector.objects.codec import encode
from omni_connector.testing.conformance.base import ObjectFixtures, Open
from omni_connector.testing.conformance.values import OBJECTS, same

REQUESTS = ("req-1", "req-10", "req-1-0", "a", "é", "a_b", "b_a", "a_0")
KEY_SHAPES = ("{}", "omni_0_to_1_kv_cache_{}", "{}_0_0_0_1")


class ObjectModel(ObjectFixtures):
    """Any sequence of `put`, `get` and `cleanup`."""

    def test_objects_agree_with_a_model(self, open_connector: Open) -> None:
        suite = self
        senders = [open_connector(), open_connector()]
        receiver = open_connector()

        class ObjectMachine(RuleBasedStateMachine):
            def __init__(self) -> None:
                super().__init__()
                for sender in senders:
                    for rid, shape in itertools.product(REQUESTS, KEY_SHAPES):
                        sender.cleanup(shape.format(rid))
                # Per sender: key -> (when, value, slots), and what request a key is of.
                self.model: list[dict[str, tuple[int, Any, int]]] = [{}, {}]
                # Per sender: keys of what was got, the one got longest ago first.
                self.got: list[list[str]] = [[], []]
                # Per sender of a store: keys that it has put and not cleaned up. Another sender may
                # have replaced the object without its knowledge.
                self.put_here: list[set[str]] = [set(), set()]
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
                slots=st.floats(0.0, 9.0),
                fill=st.integers(0, 255),
            )
            def put_long(self, who: int, request: str, shape: str, slots: float, fill: int) -> None:
                content = bytes([fill]) * int(slots * suite.object_slot_bytes)
                self.record(who, shape.format(request), content)

            def record(self, who: int, key: str, value: Any) -> None:
                stored = sum(part.nbytes for part in encode(value))
                needed = math.ceil(stored / suite.object_slot_bytes)
                ok, _, metadata = senders[who].put("0", "1", key, value)
                own, got = self.model[who], self.got[who]
                if suite.object_slots is not None:
                    self.make_room(who, key, needed, suite.object_slots, ok)
                assert ok == (metadata is not None)
                if ok:
                    if senders[who].is_store:  # the object of the other sender is replaced
                        self.model[1 - who].pop(key, None)
                        self.put_here[who].add(key)
                    self.now += 1
                    own[key] = self.now, value, needed
                    if key in got:
                        got.remove(key)

            def make_room(
                self, who: int, key: str, needed: int, object_slots: int, ok: bool
            ) -> None:
                """Evict what the sender must have evicted."""
                own = self.model[who]
                plans = [self.evicted(who, key, needed, object_slots)]
                if suite.scattered_bytes:
                    # Only the sender knows whether the room was scattered.
                    more = math.ceil(suite.scattered_bytes / suite.object_slot_bytes)
                    plans.append(self.evicted(who, key, needed + more, object_slots))
                    left = senders[who].health()["objects"]
                    plans = [
                        plan
                        for plan in plans
                        if plan is None or len((own.keys() - plan) | {key}) == left
                    ]
                possible = [plan for plan in plans if (plan is not None) == ok]
                assert possible
                for each in possible[0] or ():
                    self.got[who].remove(each)
                    del own[each]

            def evicted(
                self, who: int, key: str, needed: int, object_slots: int
            ) -> list[str] | None:
                """What has to go for an object; None if that is not enough."""
                own = self.model[who]
                free = object_slots - sum(slots for _, _, slots in own.values())
                replaced = own[key][2] if key in own else 0
                evictable = [other for other in self.got[who] if other != key]
                most = free + sum(own[other][2] for other in evictable)
                if needed > most + replaced:
                    return None
                if needed > most:
                    free += replaced
                gone: list[str] = []
                while needed > free:
                    gone.append(evictable.pop(0))
                    free += own[gone[-1]][2]
                return gone

            @rule(request=st.sampled_from(REQUESTS), shape=st.sampled_from(KEY_SHAPES))
            def get(self, request: str, shape: str) -> None:
                key = shape.format(request)
                held = [who for who, own in enumerate(self.model) if key in own]
                found = receiver.get("0", "1", key)
                if not held:
                    assert found is None
                    return
                newest = max(held, key=lambda who: self.model[who][key][0])
                assert found is not None
                assert same(self.model[newest][key][1], found[0])
                if key in self.got[newest]:
                    self.got[newest].remove(key)
                self.got[newest].append(key)
                # Peers that have answered this one know that the receiver has got that one.
                assert receiver.get("0", "1", "never put") is None

            @rule(who=st.integers(0, 1), request=st.sampled_from(REQUESTS))
            def cleanup(self, who: int, request: str) -> None:
                senders[who].cleanup(request)
                keys = {shape.format(request) for shape in KEY_SHAPES}
                if request in self.model[who] or request in self.put_here[who]:
                    keys = {request}
                self.put_here[who] -= keys
                for key in keys:
                    self.model[who].pop(key, None)
                    if key in self.got[who]:
                        self.got[who].remove(key)

        run_state_machine_as_test(
            ObjectMachine, settings=settings(max_examples=25, stateful_step_count=20, deadline=None)
        )
