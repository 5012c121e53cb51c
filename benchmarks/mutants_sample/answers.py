# SPDX-License-Identifier: Apache-2.0
"""What was found about each mutant, kept from one run to the next; and how a mutant is shown."""

import difflib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.mutants_sample.making import Mutation
from benchmarks.mutants_sample.measuring import ROOT


class Kept:
    """The answers, which stay from one run to the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answers: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                answer = json.loads(line)
                self._answers[answer["identity"]] = answer

    def add(self, mutation: Mutation, by: str | None, how: str, asked: int, seconds: float) -> None:
        """What was found about a mutant."""
        answer = {
            "identity": mutation.identity,
            "module": _digest(mutation),
            "by": by,
            "how": how,
            "asked": asked,
            "seconds": round(seconds, 1),
        }
        self._answers[mutation.identity] = answer
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(answer) + "\n")

    def answered(self, mutation: Mutation) -> bool:
        """Whether it was asked about."""
        return mutation.identity in self._answers

    def holds(self, mutation: Mutation) -> bool:
        """Whether it was asked about, and its module is as it was then."""
        answer = self._answers.get(mutation.identity)
        return answer is not None and answer["module"] == _digest(mutation)

    def found(self, mutation: Mutation) -> str | None:
        """The test or seed that found it."""
        by: str | None = self._answers.get(mutation.identity, {}).get("by")
        return by

    def how(self, mutation: Mutation) -> str:
        """The words in which it failed."""
        how: str = self._answers[mutation.identity]["how"]
        return how

    def asked(self, mutation: Mutation) -> int:
        """How many tests and seeds passed with it."""
        asked: int = self._answers[mutation.identity]["asked"]
        return asked


def _digest(mutation: Mutation) -> str:
    source = (ROOT / "omni_connector" / mutation.path).read_bytes()
    return hashlib.sha256(source).hexdigest()[:16]


def changes(mutation: Mutation) -> Iterator[str]:
    """The lines that change, as `-` and `+`."""
    before = (ROOT / "omni_connector" / mutation.path).read_text(encoding="utf-8").splitlines()
    for line in difflib.unified_diff(before, mutation.source.splitlines(), n=0, lineterm=""):
        if not line.startswith(("---", "+++", "@@")):
            yield line


def told(mutation: Mutation) -> str:
    """Where it is and what it changes."""
    where = f"{mutation.path}:{mutation.lines[0]} {mutation.function} ({mutation.operator})"
    return "\n".join((where, *(f"    {line}" for line in changes(mutation))))
