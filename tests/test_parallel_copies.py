# SPDX-License-Identifier: Apache-2.0
"""The model of `benchmarks/parallel_copies.py`: how its threads share cores, GIL and bandwidth."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield pytest.importorskip("parallel_copies")
    for name in ("parallel_copies", "load_beside_save", "unlike_engines", "data_plane"):
        sys.modules.pop(name, None)


def after(clock, *threads):
    for acts in threads:
        clock.start(iter(acts))
    return clock.run()


def constants(model, **changed):
    free = {"load_piece": 0.0, "save_piece": 0.0, "part": 0.0, "wake": 0.0, "late": 0.0}
    rates = {"load": 10e9, "save": 10e9, "fetch": 10e9, "bandwidth": math.inf}
    return model.Constants(**{**rates, **free, **changed})


def test_copies_share_cores_and_then_bandwidth(model):
    copy = [("copy", 10.0, 2.0)]
    assert after(model.Clock(1, math.inf), copy) == pytest.approx(5.0)
    assert after(model.Clock(1, math.inf), copy, copy) == pytest.approx(10.0)
    assert after(model.Clock(2, math.inf), copy, copy) == pytest.approx(5.0)
    assert after(model.Clock(2, 2.0), copy, copy) == pytest.approx(10.0)
    assert after(model.Clock(4, 3.0), copy) == pytest.approx(5.0)


def test_one_thread_at_a_time_runs_python(model):
    python = [("python", 3.0)]
    assert after(model.Clock(8, math.inf), python, python) == pytest.approx(6.0)
    assert after(model.Clock(8, math.inf), python, [("copy", 6.0, 1.0)]) == pytest.approx(6.0)
    assert after(model.Clock(1, math.inf), python, [("copy", 3.0, 1.0)]) == pytest.approx(6.0)


def test_a_thread_that_sleeps_or_waits_takes_nothing(model):
    ended = []

    def waits():
        yield "wait", lambda: bool(ended)
        yield "python", 1.0

    def ends():
        yield "sleep", 2.0
        ended.append(1)

    clock = model.Clock(1, math.inf)
    assert after(clock, waits(), ends(), [("copy", 2.0, 1.0)]) == pytest.approx(3.0)
    with pytest.raises(SystemExit):
        after(model.Clock(1, math.inf), [("wait", lambda: False)])


@pytest.mark.parametrize("kind", ["load", "save", "fetch", "load and save"])
def test_without_python_and_bound_a_kind_is_as_fast_as_its_threads(model, kind):
    whole = constants(model)
    one = model.modelled(kind, 1, whole, 1) / 1e9
    assert one == pytest.approx(5.0 if kind == "fetch" else 10.0)
    four = model.modelled(kind, 16, whole, 4) / 1e9
    assert four == pytest.approx({"fetch": 10.0, "load and save": 40.0}.get(kind, 40.0), rel=0.25)


def test_more_cores_make_no_copy_slower(model):
    whole = constants(model, bandwidth=25e9, load_piece=1e-4, save_piece=1e-4, wake=1e-5)
    for kind in model.KINDS:
        speeds = [model.modelled(kind, cores, whole, 4) for cores in model.CORES]
        assert all(later >= earlier * 0.999 for earlier, later in pairwise(speeds))
        assert speeds[-1] <= 25e9
