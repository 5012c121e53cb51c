# SPDX-License-Identifier: Apache-2.0
"""What a mutant is: places of the source, and what stands there instead."""

import ast
import re
from dataclasses import dataclass
from typing import Final

_BETWEEN: Final = r"(?:\s|#[^\n]*\n)*"
"""What may stand between two tokens: white space and comments."""


@dataclass(frozen=True)
class Change:
    """One place of a module's source.

    Attributes:
        place: a module of the package; behind a colon the function, where the module has the
            statement twice.
        old: a statement, or a part of one. Line breaks, indentation, comments and a last comma
            need not be as they are in the source.
        new: what stands there instead; its lines are indented as the first of `old` is.
    """

    place: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return f"omni_connector.{self.place.partition(':')[0]}"

    def applied(self, source: str) -> str:
        """The module's source with this change.

        Raises:
            ValueError: the place is not there, or is not the only one.
        """
        first, last = _span(source, self.place.partition(":")[2])
        found = [each.span() for each in _pattern(self.old).finditer(source, first, last)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} places of {self.place} are {self.old!r}")
        [(start, end)] = found
        line = source[source.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        return source[:start] + self.new.replace("\n", f"\n{indent}") + source[end:]


def _span(source: str, function: str) -> tuple[int, int]:
    """Where the source of a function or class begins and ends; of no name, all of it."""
    if not function:
        return 0, len(source)
    found: ast.AST = ast.parse(source)
    for name in function.split("."):
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        named = [e for e in ast.walk(found) if isinstance(e, kinds) and e.name == name]
        if not named:
            raise ValueError(f"no function {function}")
        found = named[0]
    lines = source.splitlines(keepends=True)
    first, last = named[0].lineno - 1, named[0].end_lineno
    return sum(map(len, lines[:first])), sum(map(len, lines[:last]))


def _pattern(statement: str) -> re.Pattern[str]:
    tokens = re.findall(r"\w+|[^\w\s]", re.sub(r",(?=\s*[)\]}])", "", statement))
    pattern = ""
    for token in tokens:
        if token in ")]}":
            pattern += f",?{_BETWEEN}"
        pattern += (rf"\b{token}\b" if token.isidentifier() else re.escape(token)) + _BETWEEN
    return re.compile(pattern.removesuffix(_BETWEEN))


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: of it; those that begin with "defect" take the mend of one out.
        why: what is wrong.
    """

    name: str
    why: str
    changes: tuple[Change, ...]


def mutant(name: str, why: str, *changes: tuple[str, str, str]) -> Mutant:
    """One of these changes: its place, what stands there, what stands there instead."""
    return Mutant(name, why, tuple(Change(*change) for change in changes))
