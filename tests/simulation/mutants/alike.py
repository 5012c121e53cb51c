# SPDX-License-Identifier: Apache-2.0
"""Mutants that take one thing for another of its name; see `simulation.alike`."""

from typing import Final

from tests.simulation.mutants.faults import mutant

ALIKE: Final = (
    mutant(
        "an unused adapter is replaced unnoticed",
        "blocks of an adapter wait to be kept while vLLM computes them anew with another one",
        ("vllm_v1.scheduler", "if replaced is not None:", "if replaced is Replaced.IN_USE:"),
    ),
    mutant(
        "a void copy is told the workers",
        "a copy of what another adapter has computed begins, and is cancelled too late",
        (
            "prefix.saves:PrefixSaves._void",
            "if jobs.pop(job_id, None) is not None:",
            "if False:",
        ),
    ),
    mutant(
        "a reset waits for what waits for a step",
        "the last blocks of a request that has just ended keep a reset from being made",
        ("vllm_v1.scheduler:OmniScheduler.settle", "self._shared.saves.withdraw()", "pass"),
    ),
    mutant(
        "what waits stays where an adapter was replaced",
        "only copies that are on their way are void",
        ("prefix.saves:PrefixSaves.distrust", "self.suspend()", ""),
    ),
    mutant(
        "copies are of whoever has the id",
        "copies of a request that is over count as those of the request that has its id now",
        (
            "handoff.sender",
            "del self._copying[job_id]",
            "del self._copying[job_id]\n"
            "named = [each for each in self.admitted\n"
            "    if each.request.request_id == send.request.request_id]\n"
            "latest = named[-1] if named else send\n"
            "if latest is not send:\n"
            "    send, handoff = latest, latest.handoff or handoff",
        ),
    ),
)
