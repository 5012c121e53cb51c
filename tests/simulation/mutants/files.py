# SPDX-License-Identifier: Apache-2.0
"""Mutants of a store of files and its sweeps."""

from typing import Final

from tests.simulation.mutants.faults import mutant

FILES: Final = (
    mutant(
        "what nobody else can find is stored",
        "an engine of unknown weights fills the store with blocks under a prefix of its own",
        (
            "prefix.shared_prefix",
            "self.saves.stores = weights is not None",
            "self.saves.stores = True",
        ),
    ),
    mutant(
        "the newest files are swept",
        "a sweep removes what was asked for last",
        (
            "stores.file_sweep",
            "file.used_ns < newest or (file.used_ns == newest and excess > 0)",
            "file.used_ns > newest or (file.used_ns == newest and excess > 0)",
        ),
    ),
    mutant(
        "nobody sweeps",
        "the files grow beyond the size of the store",
        ("stores.file_sweep", "if total is None or total > _HIGH * self._limit:", "if False:"),
    ),
    mutant(
        "a sweep removes all",
        "what is younger than the oldest files goes, too",
        (
            "stores.file_sweep",
            "newest = used[order[np.searchsorted(np.cumsum(taken[order]), excess)]]",
            "newest = used.max()",
        ),
    ),
)
