# SPDX-License-Identifier: Apache-2.0
"""The simulation: a seed is the same schedule each time, and it sees what it is there to see."""

import importlib.util
import os
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from omni_connector.copy.host import CpuCopier
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.vllm_v1.identity import configuration_id
from omni_connector.vllm_v1.metrics import OmniStats
from tests.simulation import HASHES_VARIABLE, __main__
from tests.simulation.campaign import campaign, replayed
from tests.simulation.draws import plan_of
from tests.simulation.engines import settings
from tests.simulation.features import FEATURES
from tests.simulation.mutants import command as mutants
from tests.simulation.mutants.faults import Change
from tests.simulation.mutants.mutations import MUTANTS
from tests.simulation.plan import has_states
from tests.simulation.run import laboratory, run, told

from .beside import STORIES

pytestmark = pytest.mark.vllm


def test_a_seed_is_the_same_schedule_each_time():
    first, again = (replayed(3, None, 0) for _ in range(2))
    assert first.failure == again.failure
    assert first.plan == again.plan == plan_of(3)


@pytest.mark.beside
@pytest.mark.timeout(3600)
def test_a_seed_is_the_same_schedule_however_strings_are_hashed(stories):
    """Of other processes too, where objects lie elsewhere and vLLM draws what its hashes begin
    with."""
    first, other = (run.finish() for run in stories)
    assert first.count("the end, after") == STORIES
    assert first == other


def test_the_names_in_a_store_are_the_same_in_each_process():
    """Of files of the same age, a sweep removes the first by name."""
    shape = plan_of(0).engines[0]
    first = configuration_id(settings.vllm_config(shape, {}))
    settings.shared_config.cache_clear()  # what another process does not have
    assert configuration_id(settings.vllm_config(shape, {})) == first


def test_the_command_starts_anew_with_fixed_hashes(monkeypatch):
    began = []
    monkeypatch.setattr(os, "execv", lambda path, words: began.append((path, words)))
    monkeypatch.setattr(sys, "argv", ["ignored", "--seeds", "3"])
    monkeypatch.setenv(HASHES_VARIABLE, "7")
    __main__.with_the_same_hashes()
    __main__.with_the_same_hashes()
    words = [sys.executable, "-m", "tests.simulation", "--seeds", "3"]
    assert began == [(sys.executable, words)]
    assert os.environ[HASHES_VARIABLE] == "0"


def test_the_plans_of_seeds_differ_and_hold_all_kinds_of_engines_and_events():
    plans = [plan_of(seed) for seed in range(300)]
    assert len({str(plan.events) for plan in plans}) == 300
    shapes = [engine for plan in plans for engine in plan.engines]
    names = ("family", "block_size", "ranks", "runner", "overlap", "policy", "shares", "hosts")
    assert 10 < sum(bool(plan.engines[0].stages) for plan in plans) < 40
    for name in (*names, "caching"):
        assert len({getattr(shape, name) for shape in shapes}) > 1, name
    sizes = Counter(len({shape.block_size for shape in plan.engines}) for plan in plans)
    assert sizes[2] > 40
    assert sizes[3] > 0
    assert {plan.mapped for plan in plans} == {True, False}
    assert 50 < sum(not plan.native for plan in plans) < 100
    copied = [plan for plan in plans if max(each.ranks for each in plan.engines) >= 4]
    families = {plan.engines[0].family for plan in copied}
    assert {"full", "more", "window and full", "more and full"} <= families
    assert len({event.what for plan in plans for event in plan.events}) >= 16
    assert 60 < sum(plan.buffers > 0 for plan in plans) < 120
    assert {"failing_memory", "failing_device"} <= {name for plan in plans for name in plan.trouble}
    given = {event.how.get("inputs") for plan in plans for event in plan.events}
    for name in ("adapter", "image", "embedded", "salt"):
        assert len({getattr(inputs, name) for inputs in given if inputs is not None}) > 2, name


def test_each_feature_of_vllm_is_asked_for():
    plans = [plan_of(seed) for seed in range(60)]
    changed = {
        feature.__name__: [feature(plan, random.Random(7)) for plan in plans]
        for feature in FEATURES
    }
    shapes = [shape for plans in changed.values() for plan in plans for shape in plan.engines]
    for name in ("drafts", "drafter", "states", "late_reports", "beside", "ranks"):
        assert len({getattr(shape, name) for shape in shapes}) > 1, name
    assert {"chunk", "chunk and full"} <= {shape.family for shape in shapes}
    sizes = [{shape.ranks for shape in plan.engines} for plan in changed["_ranks"]]
    assert max(map(len, sizes)) > 1
    asked = [event.how for plan in changed["_ends"] for event in plan.events]
    assert len({how.get("answers", 1) for how in asked}) > 1
    assert len({how.get("prefill_how") for how in asked}) > 5
    assert all("converse" in {event.what for event in plan.events} for plan in changed["_sessions"])


@pytest.fixture
def counted(monkeypatch):
    """What engines count."""
    counted = Counter()
    count = OmniStats.count

    def counting(self, name, amount=1):
        counted[name] += amount
        count(self, name, amount)

    monkeypatch.setattr(OmniStats, "count", counting)
    return counted


def run_those(wanted, seeds):
    """Run the plans of these seeds that are wanted; all must hold."""
    plans = [plan_of(seed) for seed in seeds]
    with laboratory():
        for plan in plans:
            if wanted(plan):
                assert run(plan) is None


def test_engines_of_a_host_find_blocks_in_each_other_s_arenas_and_in_their_own(counted):
    run_those(
        lambda plan: plan.engines[0].hosts and not has_states(plan.engines[0].family),
        range(150, 200),
    )
    assert counted["tokens_from_host"] > 100
    assert counted["tokens_kept"] > 20
    # Slots that are evicted meanwhile are met by too few plans to count on.
    for refused in ("bad_hints", "pins_refused"):
        assert counted[refused] > 1, refused


def test_engines_of_a_host_find_states_in_each_other_s_arenas_and_in_their_own(counted):
    run_those(lambda plan: plan.engines[0].hosts and has_states(plan.engines[0].family), range(50))
    assert counted["tokens_from_host"] > 20
    assert counted["tokens_kept"] > 5


def test_engines_of_different_block_sizes_hand_off(counted):
    run_those(lambda plan: len({engine.block_size for engine in plan.engines}) > 1, range(25))
    assert counted["handoffs_received"] > 5


def test_with_machine_code_and_without_it_a_seed_is_the_same_schedule(monkeypatch):
    begin, by_layer = CpuCopier.begin, Counter()

    def beginning(self, groups, slots, count):
        states = begin(self, groups, slots, count)
        by_layer[native, "digests" if states is None else "states"] += 1
        return states

    monkeypatch.setattr(CpuCopier, "begin", beginning)
    stories = []
    with laboratory():
        for native in (True, False):
            stories.append([told(replace(plan_of(seed), native=native)) for seed in range(12)])
    assert stories[0] == stories[1]
    assert by_layer[True, "states"] > 5
    assert by_layer[False, "digests"] > 5
    assert not by_layer[False, "states"]


def test_the_time_that_passes_is_virtual():
    with laboratory():
        assert run(plan_of(1).only({0})) is None


def test_a_fault_is_found_and_told_with_few_events(monkeypatch):
    """What it is for: here leases stay until their time is over."""
    monkeypatch.setattr(SlotDirectory, "release", lambda self, token, lease: None)
    verdict = next(campaign(range(300)))
    assert verdict.failure is not None
    assert len(verdict.plan.events) <= len(plan_of(verdict.seed).events)
    numbers = {event.number for event in verdict.plan.events}
    assert replayed(verdict.seed, numbers, verdict.order).failure == verdict.failure
    assert f"--seeds {verdict.seed} " in verdict.lines(story=True)[-1]


def test_mutants_fit_the_sources():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    for mutant in MUTANTS:
        for change in mutant.changes:
            spec = importlib.util.find_spec(change.module)
            source = Path(spec.origin).read_text()
            compile(change.applied(source), mutant.name, "exec")


def test_a_mutants_place_is_a_statement_whatever_it_looks_like():
    source = "def a():\n    f(  # why\n        1,\n        2,\n    )\n\ndef b():\n    f(1, 2)\n"
    changed = Change("m:a", "f(1, 2)", "g()\nh()").applied(source)
    assert changed == "def a():\n    g()\n    h()\n\ndef b():\n    f(1, 2)\n"
    for place, old in [
        ("m", "f(1, 2)"),
        ("m:a", "f(1, 2, 3)"),
        ("m:a", "f(12"),
        ("m:c", "f(1, 2)"),
    ]:
        with pytest.raises(ValueError, match=r"places|no function"):
            Change(place, old, "").applied(source)


def test_the_table_of_mutants_is_kept_with_those_that_were_not_found(tmp_path, monkeypatch, capsys):
    found = {MUTANTS[0]: 7, MUTANTS[1]: None}

    def all_of_them(chosen, most, jobs):
        for mutant, seeds in found.items():
            yield mutants.Finding(mutant, seeds, "" if seeds is None else "wrong_answer: 3 | 4")

    monkeypatch.setattr(mutants, "_all", all_of_them)
    path = tmp_path / "mutants.md"
    assert mutants.main(["--keep", str(path), "--most", "9"]) == 1
    text = path.read_text()
    assert f"| {MUTANTS[0].name} | {MUTANTS[0].why} | 7 | wrong_answer: 3 / 4 |" in text
    assert f"| {MUTANTS[1].name} | {MUTANTS[1].why} | **not found** |" in text
    assert "1 of 2 mutants found within 9 seeds each" in text
    assert "1 of 2 mutants" in capsys.readouterr().out
    del found[MUTANTS[1]]
    assert mutants.main([]) == 0


def test_reference_and_runner_agree():
    """Without a connector nothing is compared but these two: in every family, with preemptions."""
    with laboratory():
        for seed in range(40):
            plan = plan_of(seed)
            alone = [replace(engine, role=None) for engine in plan.engines]
            events = [event for event in plan.events if event.what in ("serve", "preempt")]
            assert run(replace(plan, engines=tuple(alone), events=tuple(events))) is None
