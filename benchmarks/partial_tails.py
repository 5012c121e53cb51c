# SPDX-License-Identifier: Apache-2.0
"""Tokens of conversations that need not be computed, with blocks as large as those of Qwen3-Next.

The turns of `traces.dialogues` go to one engine, or to two in turn, which share through arenas, or
through the files of a folder alone. Each turn sends
all that was said before. Engines are vLLM's scheduler and both halves of the connector, in this
process, around the toy model of the tests, with one group of full attention and three with states.
Each configuration is replayed twice: with tails (`prefix.tails`), and with full blocks alone.

    python benchmarks/partial_tails.py [--sessions 8] [--turns 10] [--quick]

writes results/partial_tails.md beside this file. The exit status is 1 if an answer was wrong.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

from traces import Turn, dialogues

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from omni_connector.vllm_v1 import assembly  # noqa: E402
from tests import inspection, toy  # noqa: E402
from tests.vllm_v1.harness import GIB, InProcessEngine, wait  # noqa: E402
from tests.vllm_v1.stores import landed  # noqa: E402

RESULTS: Final = Path(__file__).parent / "results"
FAMILY: Final = "three states and full"
BLOCKS: Final = (784, 2096)
LONGEST: Final = toy.MAX_LENGTH - 64
"""Tokens of the longest conversation; further turns of it are left out."""
VOCABULARY: Final = range(3, toy.VOCAB)
PLENTY: Final = 1 << 30
"""Bytes of an arena that evicts nothing."""
SHARED_TOKENS: Final = 400
"""Tokens with which all conversations begin."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration.

    Attributes:
        block_size: tokens.
        engines: how many take turns.
        slots: of an arena; 0 for as many as are asked for.
        stores: whether they share through a folder, and have no arenas.
    """

    block_size: int
    engines: int
    slots: int = 0
    stores: bool = False

    def __str__(self) -> str:
        arena = f", {self.slots} slots each" if self.slots else ""
        if self.stores:
            arena = ", a folder in place of arenas"
        return f"{self.block_size:,} tokens | {self.engines}{arena}"


@dataclass(slots=True)
class Counted:
    """Tokens of the prompts of a replay, by where their KV came from.

    Attributes:
        all: of all prompts.
        known: of the turn before in the same conversation, all but the last of its answer.
        cached: in vLLM's own cache.
        loaded: from arenas or the folder.
    """

    all: int = 0
    known: int = 0
    cached: int = 0
    loaded: int = 0

    @property
    def computed(self) -> int:
        """Those that were computed."""
        return self.all - self.cached - self.loaded


@contextmanager
def engines_of(setting: Setting, model: Path, *, tails: bool) -> Iterator[list[InProcessEngine]]:
    """Engines that have met."""
    kinds = toy.GROUPS[FAMILY]
    slot = setting.block_size * toy.HEADS * 2 * toy.HEAD_SIZE * 2 * toy.LAYERS
    slot = -(-slot // 4096) * 4096
    size = setting.slots * slot if setting.slots else PLENTY
    keeps = assembly.keeps_tails if tails else lambda groups: False
    made: list[InProcessEngine] = []
    extra: dict[str, Any] = {"share": True, "arena_gib": size / GIB}
    if setting.stores:
        folder = tempfile.mkdtemp(dir=model.parent)
        extra = {"store": {"path": folder, "gib": 4, "lookup_timeout_s": 30}}
    with mock.patch.object(assembly, "keeps_tails", keeps):
        try:
            for _ in range(setting.engines):
                made.append(
                    InProcessEngine(
                        model,
                        "kv_both",
                        extra=extra,
                        family=FAMILY,
                        block_size=setting.block_size,
                        usable_blocks=100 * len(kinds),
                        instant_copies=True,
                    )
                )
            for each in () if setting.stores else made:
                neighbours = inspection.neighbours(each.half)
                neighbours.look()
                wait(lambda of=neighbours: len(of.present()) == len(made) - 1)  # type: ignore[misc]
            yield made
        finally:
            for each in made:
                each.shutdown()


def answered(engine: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """An answer; all copies have ended after it."""
    answer: list[int] = engine.generate(prompt, tokens).tokens
    return answer


def replay(
    setting: Setting, turns: Sequence[Turn], model: Path, expected: list[list[int]], *, tails: bool
) -> Counted:
    """Send all turns, each when the one before is answered.

    Args:
        expected: the answers, in order; is filled by the first replay.

    Raises:
        ValueError: an answer was wrong.
    """
    counted = Counted()
    shared = [VOCABULARY[(7 * at) % len(VOCABULARY)] for at in range(SHARED_TOKENS)]
    said: dict[int, list[int]] = {}
    first = not expected
    with engines_of(setting, model, tails=tails) as engines:
        number = 0
        for turn in turns:
            before = said.get(turn.session, shared)
            prompt = before + turn.question
            if len(prompt) + turn.answer > LONGEST:
                continue
            answer = answered(engines[number % len(engines)], prompt, turn.answer)
            if setting.stores:
                landed(*engines)
            if first:
                expected.append(answer)
            elif answer != expected[number]:
                raise ValueError(f"{setting}: turn {number} is answered wrong")
            counted.all += len(prompt)
            counted.known += len(before) - 1 if turn.session in said else 0
            said[turn.session] = prompt + answer
            number += 1
        for each in engines:
            counted.cached += each.count("tokens_cached")
            sources = ("tokens_kept", "tokens_from_host", "tokens_shared")
            counted.loaded += sum(map(each.count, sources))
    return counted


def main() -> int:
    """Replay all configurations, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    sessions, most = (3, 4) if options.quick else (options.sessions, options.turns)
    turns = dialogues(sessions, most, VOCABULARY)
    toy.GROUPS[FAMILY] = ("state", "state", "state", "full")
    settings = [Setting(size, count) for size in BLOCKS for count in (1, 2)]
    settings.append(Setting(BLOCKS[0], 2, slots=60))
    settings += [Setting(size, 2, stores=True) for size in BLOCKS]
    expected: list[list[int]] = []
    rows = []
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as runtime:
        os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = runtime
        model = toy.write_model(Path(tempfile.mkdtemp(dir=runtime)))
        for setting in settings:
            before = replay(setting, turns, model, expected, tails=False)
            after = replay(setting, turns, model, expected, tails=True)
            rows.append((setting, before, after))
            print(setting, before, after, flush=True)
    write(rows, sessions, most)
    return 0


def write(rows: Sequence[tuple[Setting, Counted, Counted]], sessions: int, turns: int) -> None:
    """Write results/partial_tails.md."""
    lines = [
        "# Hits within blocks, in conversations",
        "",
        "`python benchmarks/partial_tails.py`: counts, which depend on no speed.",
        "",
        f"{sessions} conversations of {turns} turns, {LONGEST:,} tokens at most, with questions "
        "and answers as long as in LMSYS-Chat-1M on average, behind "
        f"{SHARED_TOKENS} tokens that all begin with. Each turn repeats the answers token by "
        "token. "
        "A hit is a token of a prompt that is not computed, here in percent of the tokens that the "
        "turn before had computed. Hits in vLLM's own cache, which holds all full blocks of an "
        "engine, are counted, too.",
        "",
        "| blocks | engines | hits, full blocks alone | hits, with tails | computed tokens |",
        "|---|---|---:|---:|---:|",
    ]
    for setting, before, after in rows:
        hits = [f"{100 * (of.cached + of.loaded) / of.known:.1f} %" for of in (before, after)]
        left = f"{before.computed:,} → {after.computed:,}"
        lines.append(f"| {setting} | {hits[0]} | {hits[1]} | {left} |")
    lines.append("")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "partial_tails.md").write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
