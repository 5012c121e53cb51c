# SPDX-License-Identifier: Apache-2.0
"""Trying a parser on hostile inputs, and telling what became of them."""

import random
import reprlib
import resource
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

PEAK_BYTES: Final = 8 << 20
"""What one input may take while it is parsed, where it has a few kilobytes itself."""

SLOWEST_S: Final = 10.0


class UnsafeParserError(AssertionError):
    """A parser answered an input with anything but a typed error or a clean refusal."""


@dataclass(slots=True)
class Parser:
    """What turns bytes of others into values.

    Attributes:
        name: for people.
        make: makes an input; asked again for each.
        parse: takes an input. It returns whether that was accepted, or the name of its refusal.
        refusals: what it may raise.
        alive: raises unless everything behind it still works; called now and then.
    """

    name: str
    make: Callable[[random.Random], Any]
    parse: Callable[[Any], bool | str]
    refusals: tuple[type[Exception], ...]
    alive: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Tally:
    """What became of the inputs of one parser.

    Attributes:
        name: the parser's.
        inputs: how many there were.
        refused: how many were refused, by the name of the error or refusal.
        seconds: of the process's own time that parsing took, without the making of inputs.
        slowest_s: the longest that one input took.
        peak_bytes: the most memory that Python took for one input; 0 where that was not measured.
        grown_bytes: how much larger the process's memory has become.
    """

    name: str
    inputs: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    grown_bytes: int = 0

    @property
    def accepted(self) -> int:
        """Inputs that were still, or again, valid."""
        return self.inputs - self.refused.total()


def attack(parser: Parser, count: int, seed: int, *, traced: int = 1000) -> Tally:
    """Give a parser `count` inputs.

    Args:
        parser: which.
        count: how many inputs.
        seed: of the inputs; with the same one they are the same.
        traced: of how many, the first ones, the memory that they take is measured, and bounded;
            that takes several times as long.

    Raises:
        UnsafeParserError: an input ended in another error than it may, took too long or too much
            memory, or broke what is behind the parser. It names seed, number and input.
    """
    rng = random.Random(f"{seed}/{parser.name}")
    tally = Tally(parser.name)
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        if traced:
            tracemalloc.start()
        for number in range(count):
            if number == traced:
                tracemalloc.stop()
            hostile = parser.make(rng)
            where = f"{parser.name}, seed {seed}, input {number}: "
            try:
                _try(parser, hostile, tally, traced=number < traced)
                if number % 1000 == 999 or number == count - 1:
                    parser.alive()
            except UnsafeParserError as error:
                raise UnsafeParserError(f"{where}{error}; {_shown(hostile)}") from error
            except Exception as error:
                raise UnsafeParserError(
                    f"{where}{type(error).__name__}: {error}; {_shown(hostile)}"
                ) from error
    finally:
        tracemalloc.stop()
    tally.grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started)
    return tally


def _try(parser: Parser, hostile: Any, tally: Tally, *, traced: bool) -> None:
    before = 0
    if traced:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
    start = time.process_time()
    try:
        answer = parser.parse(hostile)
    except parser.refusals as error:
        answer = type(error).__name__
    took = time.process_time() - start
    tally.inputs += 1
    tally.seconds += took
    tally.slowest_s = max(tally.slowest_s, took)
    if took > SLOWEST_S:
        raise UnsafeParserError(f"it took {took:.1f} s")
    if traced:
        taken = tracemalloc.get_traced_memory()[1] - before
        tally.peak_bytes = max(tally.peak_bytes, taken)
        if taken > PEAK_BYTES:
            raise UnsafeParserError(f"it took {taken} bytes of memory")
    if answer is not True:
        tally.refused[answer or "refused"] += 1


def _shown(hostile: object) -> str:
    if isinstance(hostile, bytes):
        return hostile[:400].hex()
    shown = reprlib.Repr()
    shown.maxstring = shown.maxother = 400
    return shown.repr(hostile)
