# SPDX-License-Identifier: Apache-2.0
"""Mutants of the epochs of the weights."""

from typing import Final

from tests.simulation.mutants.faults import mutant

WEIGHTS: Final = (
    mutant(
        "all weights have one digest",
        "engines of other weights share, and an engine does not notice new ones",
        (
            "identity.epochs",
            "digest = _joined(each.content for each in digests)",
            'digest = "constant"',
        ),
    ),
    mutant(
        "the first rank answers for all",
        "ranks that have other weights than the first are not noticed",
        (
            "identity.epochs",
            "_joined(each.content for each in digests)",
            "_joined(each.content for each in digests[:1])",
        ),
    ),
    mutant(
        "the weights are asked for at the reset",
        "weights that come between the reset and the next request are not noticed",
        (
            "identity.epochs",
            "self._deadline = None\nself._answers.clear()",
            "self._answers.clear()\nself.known = self.readable",
        ),
    ),
    mutant(
        "nobody waits for the weights",
        "requests after a reset load KV before it is known whose it is",
        (
            "vllm_v1.scheduler",
            "if not self._weights.known and self._waits_for_weights(state):",
            "self._weights.ask()\nif False:",
        ),
    ),
    mutant(
        "who shares nothing waits for no weights",
        "an engine that only hands off computes prompts before it first knows its weights",
        (
            "vllm_v1.scheduler",
            "return self._weights.waits and not self._weights.begun",
            "return False",
        ),
    ),
    mutant(
        "a failed reset is not minded",
        "weights that come with a reset that fails are not noticed",
        ("identity.epochs", "self._attempted = True", "pass"),
    ),
    mutant(
        "engines of all weights lease",
        "a hand-off is given to an engine of other weights",
        (
            "identity.epochs",
            "return None if self.digest == other.digest else",
            "return None if True else",
        ),
    ),
    mutant(
        "calls to the workers are not minded",
        "weights that come by a call, and without a reset, are not noticed",
        (
            "identity.epochs",
            '"""All workers are called, which may change their weights."""\nself.times += 1',
            "pass",
        ),
    ),
    mutant(
        "a cache of two weights is shared",
        "after new weights and a failed reset the engine shares what it computes upon old KV",
        ("identity.epochs", "mixed = (changed or first) and not self._was_reset", "mixed = False"),
    ),
    mutant(
        "what is computed meanwhile is kept",
        "blocks that are computed before the weights are known are kept under the former name",
        ("prefix.shared_prefix", "if not step.known:", "if False:"),
    ),
    mutant(
        "former weights count as changed",
        "after an update and the first weights again nothing of the first epoch is found",
        (
            "identity.epochs",
            "digest = _joined(each.content for each in digests)",
            "digest = _joined([str(self.number), *(d.content for d in digests)])",
        ),
    ),
)
