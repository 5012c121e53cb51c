# SPDX-License-Identifier: Apache-2.0
"""Engines that find each other's blocks in their arenas, or in a store."""

from tests import inspection
from tests.simulation import check

from .harness import assert_clean, wait
from .stores import PREFIX, landed


class Place:
    """Where engines find each other's blocks."""

    def __init__(self, engine, extra, counter):
        self._engine = engine
        self._extra = extra
        self._made = []
        self._counter = counter

    def __call__(self, role="kv_both", **options):
        options = {"usable_blocks": 120, **options}  # copies under way may hold a quarter
        self._made.append(self._engine(role, extra=self._extra, **options))
        if "share" in self._extra:
            for each in self._made:
                neighbours = inspection.neighbours(each.half)
                neighbours.look()
                wait(lambda of=neighbours: len(of.present()) == len(self._made) - 1)
                each._before = check.sizes(each)
        return self._made[-1]

    def settle(self, *engines):
        """Wait until all that engines have computed is where others find it."""
        assert_clean(*engines)
        if "store" in self._extra:
            landed(*engines)

    def loaded(self, engine):
        """Tokens that were not computed."""
        return engine.count(self._counter)


def publish(place, engine, text=PREFIX, **options):
    """Have an engine compute a prompt; its answer, once others find it."""
    answer = engine.generate(text, **options).tokens
    place.settle(engine)
    return answer


def ask(place, engine, text, expected, count=6):
    """What an engine loads for a prompt; its answer has to be what is expected."""
    before = place.loaded(engine)
    assert engine.generate(text, count).tokens == expected.generate(text, count).tokens
    return place.loaded(engine) - before
