# SPDX-License-Identifier: Apache-2.0
"""What a mutant is: places of the source, and what stands there instead."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One place of a module's source."""

    module: str
    old: str
    new: str


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
    """One of these changes: module, what stands there, what stands there instead."""
    return Mutant(name, why, tuple(Change(*change) for change in changes))
