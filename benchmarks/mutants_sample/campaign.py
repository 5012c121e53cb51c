# SPDX-License-Identifier: Apache-2.0
"""Asks about one mutant after the other, round by round."""

import argparse
import time
from dataclasses import dataclass, field
from typing import Final

from benchmarks.mutants_sample.answers import Kept, told
from benchmarks.mutants_sample.asking import (
    FIRST_FILES,
    FIRST_S,
    FIRST_TESTS,
    Answer,
    Measured,
    Round,
    asking_seeds,
    asking_tests,
    preload,
    unsure,
)
from benchmarks.mutants_sample.making import Mutation

_POLL_S: Final = 0.05


@dataclass
class _Case:
    number: int
    mutation: Mutation
    tests: list[str]
    seeds: list[int]
    began: float = field(default_factory=time.monotonic)
    asked: int = 0
    suspect: Answer | None = None
    round: Round | None = None
    next: int = 0


def ask_about(wanted: list[tuple[int, Mutation]], kept: Kept, options: argparse.Namespace) -> None:
    """Ask, and keep the answers."""
    measured = Measured(options.folder)
    preload()
    logs = options.folder / "logs"
    logs.mkdir(exist_ok=True)
    cases: list[_Case] = []
    waiting = list(reversed(wanted))
    try:
        while waiting or cases:
            while waiting and len(cases) < options.jobs:
                number, mutation = waiting.pop()
                cases.append(_case(number, mutation, measured, kept, options))
            for case in list(cases):
                if _turn(case, measured, kept, options):
                    cases.remove(case)
                    print(f"{len(waiting) + len(cases)} left", flush=True)
            time.sleep(_POLL_S)
    finally:
        for case in cases:
            if case.round is not None:
                case.round.stop()


def _case(
    number: int, mutation: Mutation, measured: Measured, kept: Kept, options: argparse.Namespace
) -> _Case:
    tests = measured.tests(mutation)
    killer = kept.found(mutation)
    if killer in tests:
        tests.remove(killer)
        tests.insert(0, killer)
    seeds = measured.seeds(mutation)[: options.most_seeds]
    if killer is not None and killer.startswith("seed "):
        seed = int(killer.split()[1])
        seeds = [seed, *(each for each in seeds if each != seed)]
    return _Case(number, mutation, tests, seeds)


def _turn(case: _Case, measured: Measured, kept: Kept, options: argparse.Namespace) -> bool:
    """Go on with a mutant; True when all about it is known."""
    if case.round is None:
        case.round = _next_round(case, measured, options)
        if case.round is None:
            kept.add(case.mutation, None, "", case.asked, time.monotonic() - case.began)
            print(f"{case.number}. SURVIVES {case.asked} {told(case.mutation)}", flush=True)
            return True
        return False
    answer = case.round.poll()
    if answer is None:
        return False
    case.round = None
    if case.suspect is not None:  # this was the unchanged code
        suspect = case.suspect
        case.suspect = None
        if answer.by is not None:
            print(
                f"{case.number}. fails unchanged, too: {answer.by} {answer.how[:200]}", flush=True
            )
            case.next -= 1
            _without(case, suspect)
            return False
        return _found(case, suspect, kept)
    case.asked += answer.asked
    if answer.by is None:
        return False
    if unsure(answer, measured):
        case.suspect = answer
        return False
    return _found(case, answer, kept)


def _found(case: _Case, answer: Answer, kept: Kept) -> bool:
    seconds = time.monotonic() - case.began
    kept.add(case.mutation, answer.by, answer.how[:500], case.asked, seconds)
    print(
        f"{case.number}. found by {answer.by} ({seconds:.0f} s): {answer.how[:120]!r}", flush=True
    )
    return True


def _without(case: _Case, answer: Answer) -> None:
    case.tests = [test for test in case.tests if test != answer.by]
    case.seeds = [seed for seed in case.seeds if f"seed {seed}" != answer.by]


def _next_round(case: _Case, measured: Measured, options: argparse.Namespace) -> Round | None:
    log = options.folder / "logs" / f"{case.number}.log"
    if case.suspect is not None:
        by = case.suspect.by or ""
        if by.startswith("seed "):
            return Round(None, asking_seeds([int(by.split()[1])]), 60.0, log)
        return Round(None, asking_tests([by]), 60.0, log)
    while case.next < options.rounds:
        case.next += 1
        if case.next < 3:
            first = _within(_nearest(case.tests), FIRST_S, measured)
            tests = first
            if case.next == 2:
                rest = [test for test in case.tests if test not in set(first)]
                tests = _within(rest, options.most_s, measured)
            if tests:
                return Round(case.mutation, asking_tests(tests), measured.seconds(tests), log)
        elif case.seeds:
            names = [str(seed) for seed in case.seeds]
            return Round(case.mutation, asking_seeds(case.seeds), measured.seconds(names), log)
    return None


def _nearest(tests: list[str]) -> list[str]:
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))[:FIRST_FILES]
    return [test for test in tests if test.partition("::")[0] in files][:FIRST_TESTS]


def _within(tests: list[str], seconds: float, measured: Measured) -> list[str]:
    chosen: list[str] = []
    left = seconds
    for test in tests:
        took = measured.seconds([test])
        if took <= left:
            left -= took
            chosen.append(test)
    return chosen
