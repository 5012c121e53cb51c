# SPDX-License-Identifier: Apache-2.0
"""The phases of a request, and the ways between them.

The connector hears of a request only when vLLM arrives at one of its calls. Each call enters a
phase; a way that the table lacks means that vLLM does what nobody here has thought of.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """How far a request is. The names are those of the spans in a trace."""

    ARRIVED = "arrived"
    """vLLM has named it, and has not asked yet what can be loaded."""
    UNKNOWN = "unknown"
    """It waits until its weights or its adapter are known."""
    LEASE = "lease"
    """It waits for a lease on its KV, from the engine that has computed its prompt."""
    LOOKUP = "lookup"
    """It waits until it is known what arenas and stores have of its prompt."""
    QUEUED = "queued"
    """It is to be handed off, and waits for slots in the arena and for its first step."""
    ROOM = "room"
    """It is known what can be loaded; it waits until vLLM allocates blocks."""
    LOAD = "load"
    """Its KV is being loaded."""
    SCHEDULING = "scheduling"
    """It has its blocks, and waits for a step."""
    COMPUTING = "computing"
    """Steps compute it. One that vLLM has preempted stays so until vLLM asks again."""
    ENDED = "ended"
    """vLLM has told of its end."""


_WAITING: Final = frozenset({Phase.UNKNOWN, Phase.LEASE, Phase.LOOKUP, Phase.QUEUED, Phase.ROOM})
_ENDS: Final = frozenset({Phase.ENDED})

WAYS: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.ARRIVED: _WAITING | {Phase.SCHEDULING} | _ENDS,
    Phase.UNKNOWN: _WAITING | {Phase.SCHEDULING} | _ENDS,
    Phase.LEASE: _WAITING | {Phase.SCHEDULING} | _ENDS,
    Phase.LOOKUP: _WAITING | {Phase.SCHEDULING} | _ENDS,
    Phase.QUEUED: _WAITING | {Phase.COMPUTING} | _ENDS,
    Phase.ROOM: _WAITING | {Phase.LOAD, Phase.SCHEDULING} | _ENDS,
    Phase.LOAD: frozenset({Phase.SCHEDULING}) | _ENDS,
    Phase.SCHEDULING: _WAITING | {Phase.COMPUTING} | _ENDS,
    Phase.COMPUTING: _WAITING | _ENDS,
    Phase.ENDED: frozenset(),
}
"""From each phase the ones that may follow it. A request may wait for one thing after the other,
and for the same again: weights change, leases grow old, and vLLM preempts."""
