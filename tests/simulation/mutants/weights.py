# SPDX-License-Identifier: Apache-2.0
"""Mutants of the epochs of the weights."""

from typing import Final

from tests.simulation.mutants.faults import mutant

WEIGHTS: Final = (
    mutant(
        "all weights have one digest",
        "engines of other weights share, and an engine does not notice new ones",
        (
            "omni_connector.identity.epochs",
            "            digest = _joined(each.content for each in digests)\n",
            '            digest = "constant"\n',
        ),
    ),
    mutant(
        "the first rank answers for all",
        "ranks that have other weights than the first are not noticed",
        (
            "omni_connector.identity.epochs",
            "_joined(each.content for each in digests)",
            "_joined(each.content for each in digests[:1])",
        ),
    ),
    mutant(
        "the weights are asked for at the reset",
        "weights that come between the reset and the next request are not noticed",
        (
            "omni_connector.identity.epochs",
            "        self._deadline = None\n        self._answers.clear()\n        return True\n",
            "        self._answers.clear()\n        self.known = self.readable\n"
            "        return True\n",
        ),
    ),
    mutant(
        "nobody waits for the weights",
        "requests after a reset load KV before it is known whose it is",
        (
            "omni_connector.vllm_v1.scheduler",
            "        if not self._weights.known and self._waits_for_weights(state):",
            "        self._weights.ask()\n        if False:",
        ),
    ),
    mutant(
        "who shares nothing waits for no weights",
        "an engine that only hands off computes prompts before it first knows its weights",
        (
            "omni_connector.vllm_v1.scheduler",
            "            return self._weights.waits and not self._weights.begun\n",
            "            return False\n",
        ),
    ),
    mutant(
        "a failed reset is not minded",
        "weights that come with a reset that fails are not noticed",
        (
            "omni_connector.identity.epochs",
            "        self._attempted = True\n",
            "        pass\n",
        ),
    ),
    mutant(
        "engines of all weights lease",
        "a hand-off is given to an engine of other weights",
        (
            "omni_connector.identity.epochs",
            "            return None if self.digest == other.digest else",
            "            return None if True else",
        ),
    ),
    mutant(
        "calls to the workers are not minded",
        "weights that come by a call, and without a reset, are not noticed",
        (
            "omni_connector.identity.epochs",
            '        """All workers are called, which may change their weights."""\n'
            "        self.times += 1\n",
            "        pass\n",
        ),
    ),
    mutant(
        "a cache of two weights is shared",
        "after new weights and a failed reset the engine shares what it computes upon old KV",
        (
            "omni_connector.identity.epochs",
            "        mixed = (changed or first) and not self._was_reset\n",
            "        mixed = False\n",
        ),
    ),
    mutant(
        "what is computed meanwhile is kept",
        "blocks that are computed before the weights are known are kept under the former name",
        (
            "omni_connector.prefix.shared_prefix",
            "        if not step.known:\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "former weights count as changed",
        "after an update and the first weights again nothing of the first epoch is found",
        (
            "omni_connector.identity.epochs",
            "            digest = _joined(each.content for each in digests)\n",
            "            digest = _joined([str(self.number), *(d.content for d in digests)])\n",
        ),
    ),
)
