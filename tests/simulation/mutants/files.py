# SPDX-License-Identifier: Apache-2.0
"""Mutants of a store of files and its sweeps."""

from typing import Final

from tests.simulation.mutants.faults import mutant

FILES: Final = (
    mutant(
        "what nobody else can find is stored",
        "an engine of unknown weights fills the store with blocks under a prefix of its own",
        (
            "omni_connector.prefix.shared_prefix",
            "        self.saves.stores = weights is not None\n",
            "        self.saves.stores = True\n",
        ),
    ),
    mutant(
        "the newest files are swept",
        "a sweep removes what was asked for last",
        (
            "omni_connector.stores.file_sweep",
            "                file.used_ns < newest or (file.used_ns == newest and excess > 0)\n",
            "                file.used_ns > newest or (file.used_ns == newest and excess > 0)\n",
        ),
    ),
    mutant(
        "nobody sweeps",
        "the files grow beyond the size of the store",
        (
            "omni_connector.stores.file_sweep",
            "            if total is None or total > _HIGH * self._limit:\n",
            "            if False:\n",
        ),
    ),
    mutant(
        "a sweep removes all",
        "what is younger than the oldest files goes, too",
        (
            "omni_connector.stores.file_sweep",
            "        newest = used[order[np.searchsorted(np.cumsum(taken[order]), excess)]]\n",
            "        newest = used.max()\n",
        ),
    ),
)
