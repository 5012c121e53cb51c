# SPDX-License-Identifier: Apache-2.0
"""Mutants of drains and roles; see `simulation.operators`."""

from typing import Final

from tests.simulation.mutants.faults import mutant

OPERATORS: Final = (
    mutant(
        "a drain that does nothing",
        "an engine that vLLM shuts down takes the hand-offs with it that it holds",
        (
            "handoff.serving",
            "return self._leave_by is not None and self.busy() and self._clock() < self._leave_by",
            "return False",
        ),
    ),
    mutant(
        "a drain without end",
        "an engine that vLLM shuts down waits for hand-offs as long as nobody fetches them",
        ("handoff.serving", "self.busy() and self._clock() < self._leave_by", "self.busy()"),
    ),
    mutant(
        "a draining engine goes on",
        "an engine that drains offers new hand-offs",
        ("handoff.serving", "if self.draining:\n    return DRAINING", ""),
    ),
    mutant(
        "drained while hand-offs are open",
        "an engine says that it is drained although peers may still fetch from it",
        (
            "handoff.serving",
            'return "draining" if self._requests or self.busy() else "drained"',
            'return "draining" if self._requests else "drained"',
        ),
    ),
    mutant(
        "drained while requests run",
        "an engine says that it is drained although it has requests",
        (
            "handoff.serving",
            'return "draining" if self._requests or self.busy() else "drained"',
            'return "draining" if self.busy() else "drained"',
        ),
    ),
    mutant(
        "never drained",
        "requests that have ended are not forgotten",
        ("requests.state", "del self[request_id]", ""),
    ),
    mutant(
        "a draining engine fetches nothing",
        "prefills that are finished are computed once more by an engine that drains",
        (
            "handoff.serving",
            'return PREFILL_ROLE if self._role == "prefill" else None',
            'return DRAINING if self.draining else PREFILL_ROLE if self._role == "prefill" '
            "else None",
        ),
    ),
    mutant(
        "a decode role offers",
        "an engine of the decode role offers new hand-offs",
        (
            "handoff.serving",
            'return DECODE_ROLE if self._role == "decode" else None',
            "return None",
        ),
    ),
    mutant(
        "an impossible role",
        "an engine takes a role that its configuration does not allow",
        ("handoff.serving", "if orders.role and orders.role not in self._roles:", "if False:"),
    ),
)
