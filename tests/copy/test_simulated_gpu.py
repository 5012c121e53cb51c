# SPDX-License-Identifier: Apache-2.0
"""What copies wait for, on the clock of `benchmarks/simulated_gpu.py`: the same each time."""

import sys
from pathlib import Path

import numpy as np
import pytest

from omni_connector.copy.copier import BlockCopy
from omni_connector.copy.staged import StagedCopier
from omni_connector.kv.canonical import SlotLayout, canonicalize

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield pytest.importorskip("simulated_gpu")
    for name in ("simulated_gpu", "copying_rank", "machine"):
        sys.modules.pop(name, None)


def test_the_device_copies_on_while_slots_are_published(kv, simulated):
    """As long as publishing takes less time than the copies, it costs none but the last one's."""
    cache = kv.build("LBHNC", 32, [[kv.Shape(1, 1, 1, 1 << 20)]], seed=1)
    canonical = canonicalize(cache.groups, cache.views, cache.num_blocks)
    layout = SlotLayout.of(canonical)
    clock = simulated.Clock()
    stream = simulated.TimedStream(clock)
    copier = StagedCopier(canonical, layout, stream, staging_bytes=4 * layout.slot_bytes)
    slots = np.zeros((32, layout.slot_bytes), np.uint8)
    assert copier.pin(slots) == 0
    every = np.arange(32)

    def seconds(publishing):
        clock.reset()
        copy = BlockCopy(0, every, slots, every, checksum=True)
        copier.save(copy, landed=lambda some, sums: clock.spend(publishing))
        return clock.now

    alone = seconds(0.0)
    a_batch = 4 * layout.slot_bytes / simulated.BUS
    assert alone > 8 * a_batch
    assert seconds(a_batch / 4) < alone + a_batch
    assert seconds(10 * a_batch) > 80 * a_batch  # it counts at all


def test_copies_by_layer_and_loads_beside_them_wait_for_what_they_copy_alone(simulated):
    save, load, by_layer, behind_ms, beside = simulated.figures(64 << 20)
    assert save > 0.8
    assert load > 0.8
    assert by_layer < save  # its layers are there one by one
    # After a pass of 256 ms a layer is left, and to hash all of them would take as long as two.
    assert behind_ms < 0.2
    assert beside > 0.99


def test_no_step_waits_while_the_arena_of_a_neighbour_is_pinned(simulated):
    longest, _, seconds = simulated.pinning(neighbour=True)
    assert longest < 1e-6
    assert seconds < 10.0  # of 64 GiB
    assert simulated.pinning(neighbour=False)[0] > 10.0  # the clock counts it
