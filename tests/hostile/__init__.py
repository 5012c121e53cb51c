# SPDX-License-Identifier: Apache-2.0
"""Hostile bytes: what each parser of this package does with inputs that nobody honest sends.

`PARSERS` names them; `attack` tries one. An input ends in a typed error or a clean refusal, in
bounded time and memory, and everything behind the parser goes on; anything else is an
`UnsafeParserError`. `mutation` makes the inputs, of honest ones, by bytes and by structure.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Final

from tests.hostile.trial import Parser, Tally, UnsafeParserError, attack

__all__ = ["FOLLOWED", "PARSERS", "Parser", "Tally", "UnsafeParserError", "attack", "opened"]

PARSERS: Final = (
    "control.requests",
    "control.answers",
    "channels.serving",
    "channels.asking",
    "channels.object_questions",
    "loads.answers",
    "engines.params",
    "explain.questions",
    "explain.answers",
    "arenas.superblocks",
    "arenas.indexes",
    "arenas.neighbours",
    "arenas.mapped_headers",
    "arenas.fetched_headers",
    "arenas.object_places",
    "arenas.socket_questions",
    "payloads.objects",
    "payloads.packed_kv",
    "payloads.unpacked_kv",
    "settings.params",
    "settings.configurations",
    "settings.pipelines",
    "settings.hints",
    "settings.object_keys",
)
"""Module here, and function in it. Functions of `payloads` need torch, those of `loads` and
`engines` need vLLM."""

FOLLOWED: Final = frozenset(name for name in PARSERS if name.startswith(("channels", "loads")))
"""Parsers that go on through sockets, threads and waits to what follows from a message. They are
slower, and get the same messages as the others."""


def opened(name: str) -> AbstractContextManager[Parser]:
    """One of `PARSERS`, with what it needs."""
    module, _, function = name.partition(".")
    factory: Callable[[], AbstractContextManager[Parser]] = getattr(
        import_module(f"{__name__}.{module}"), function
    )
    return factory()
