# SPDX-License-Identifier: Apache-2.0
"""Blocks that have filled, as steps collect them to consider them together."""

from dataclasses import dataclass, field

import numpy as np

from omni_connector.prefix.hints import NO_HINTS, FilledBlocks, Hints


@dataclass(slots=True, eq=False)
class FilledRuns:
    """Blocks of one group that are considered together, in the order of their requests and tokens.

    Attributes:
        keys, hashes, block_ids: of each block. A key may be there more than once.
        runs: for consecutive blocks their number, and the `Candidate.prompt` of all.
        hints: of each run.
        hinted: whether any block has hints.
    """

    keys: list[bytes] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    hints: list[Hints] = field(default_factory=list)
    hinted: bool = False

    def add(
        self,
        keys: list[bytes],
        hashes: list[bytes],
        block_ids: list[int],
        *,
        prompt: int,
        hints: Hints,
    ) -> None:
        """Append blocks of one prompt."""
        self.keys += keys
        self.hashes += hashes
        self.block_ids += block_ids
        self.runs.append((len(keys), prompt))
        self.hints.append(hints)
        self.hinted = self.hinted or hints is not NO_HINTS

    def blocks(self) -> FilledBlocks:
        """All of them, each key once, with the hints of all its requests."""
        counts, prompts = np.array(self.runs, np.int64).reshape(-1, 2).T
        hints: list[Hints] | None = None
        if self.hinted:
            pairs = zip(self.hints, counts.tolist(), strict=True)
            hints = [each for each, count in pairs for _ in range(count)]
        return FilledBlocks(
            self.keys,
            self.hashes,
            np.array(self.block_ids, np.int64),
            prompts.repeat(counts),
            hints,
        ).each_once()
