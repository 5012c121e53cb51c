# SPDX-License-Identifier: Apache-2.0
"""Tokens of conversations that need not be computed, with blocks as large as those of Qwen3-Next.

The turns of `traces.dialogues` go to one engine, or to two in turn, which share through arenas, or
through the files of a folder alone. Each turn sends
all that was said before; or all but the first half of each answer, as templates of chats do that
leave out thoughts. Engines are vLLM's scheduler and both halves of the connector, in this
process, around the toy model of the tests, with one group of full attention and three with states.
Each configuration is replayed three times: with full blocks alone, with the ends of requests within
blocks (`prefix.tails`), and with the ends of prompts, too.

    python benchmarks/partial_tails.py [--sessions 8] [--turns 10] [--quick] [--without-thoughts]

writes results/partial_tails.md beside this file, or results/prompt_tails.md of turns that leave out
thoughts. The exit status is 1 if an answer was wrong.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args
from unittest import mock

from traces import Turn, dialogues

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from omni_connector.prefix.saves import PrefixSaves  # noqa: E402
from omni_connector.prefix.tails import keeps_tails  # noqa: E402
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


UNIT: Final = 16
"""Tokens of `--prefix-match-unit`, where it is set."""

PROMPT_ENDS: Final = {
    "_keep_prompt": lambda *args: None,
    "keep_boundary": lambda *args: None,
}
"""Takes the place of what keeps the ends of prompts."""

OPENED: Final = (1, 2)
"""Tokens with which a template opens thoughts at the end of a prompt."""

Template = Literal["whole", "without thoughts", "thoughts opened"]
"""A turn repeats all that was said before; it leaves out the first half of each answer; or each
prompt ends with `OPENED`, too, which the next turn leaves out with the half of the answer."""

THOUGHTS: Final[tuple[Template, ...]] = ("without thoughts", "thoughts opened")

Keeping = Literal["full blocks", "ends of requests", "ends of prompts"]
"""What is kept, each with those before it. The last one is all that the connector keeps."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration.

    Attributes:
        block_size: tokens.
        engines: how many take turns.
        slots: of an arena; 0 for as many as are asked for.
        stores: whether they share through a folder, and have no arenas.
        template: what the next turn repeats of a turn.
        match_unit: `--prefix-match-unit`; 0: as vLLM chooses it.
    """

    block_size: int
    engines: int
    slots: int = 0
    stores: bool = False
    template: "Template" = "whole"
    match_unit: int = 0

    def __str__(self) -> str:
        arena = f", {self.slots} slots each" if self.slots else ""
        if self.stores:
            arena = ", a folder in place of arenas"
        unit = f", `--prefix-match-unit {self.match_unit}`" if self.match_unit else ""
        return f"{self.block_size:,} tokens | {self.engines}{arena}{unit}"


@dataclass(slots=True)
class Counted:
    """Tokens of the prompts of a replay, by where their KV came from.

    Attributes:
        all: of all prompts.
        known: of the turn before in the same conversation, those that the turn repeats from the
            beginning on, and that were computed.
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
def engines_of(setting: Setting, model: Path, keeping: Keeping) -> Iterator[list[InProcessEngine]]:
    """Engines that have met."""
    kinds = toy.GROUPS[FAMILY]
    slot = setting.block_size * toy.HEADS * 2 * toy.HEAD_SIZE * 2 * toy.LAYERS
    slot = -(-slot // 4096) * 4096
    size = setting.slots * slot if setting.slots else PLENTY
    keeps = (lambda groups: False) if keeping == "full blocks" else keeps_tails
    methods = {name: getattr(PrefixSaves, name) for name in PROMPT_ENDS}
    if keeping != "ends of prompts":
        methods = PROMPT_ENDS
    made: list[InProcessEngine] = []
    extra: dict[str, Any] = {"share": True, "arena_gib": size / GIB}
    if setting.stores:
        folder = tempfile.mkdtemp(dir=model.parent)
        extra = {"store": {"path": folder, "gib": 4, "lookup_timeout_s": 30}}
    with (
        mock.patch.object(assembly, "keeps_tails", keeps),
        mock.patch.multiple(PrefixSaves, **methods),
    ):
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
                        match_unit=setting.match_unit,
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
    setting: Setting,
    turns: Sequence[Turn],
    model: Path,
    expected: list[list[int]],
    keeping: Keeping,
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
    repeated: dict[int, int] = {}
    first = not expected
    with engines_of(setting, model, keeping) as engines:
        number = 0
        for turn in turns:
            before = said.get(turn.session, shared)
            prompt = before + turn.question
            repeats = len(prompt)
            if setting.template == "thoughts opened":
                prompt += OPENED
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
            counted.known += repeated.get(turn.session, 0)
            if setting.template == "whole":
                said[turn.session] = prompt + answer
                repeated[turn.session] = len(prompt) + len(answer) - 1
            else:
                said[turn.session] = prompt[:repeats] + answer[len(answer) // 2 :]
                repeated[turn.session] = repeats
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
    parser.add_argument("--without-thoughts", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    sessions, most = (3, 4) if options.quick else (options.sessions, options.turns)
    turns = dialogues(sessions, most, VOCABULARY)
    toy.GROUPS[FAMILY] = ("state", "state", "state", "full")
    settings = [Setting(size, count) for size in BLOCKS for count in (1, 2)]
    settings.append(Setting(BLOCKS[0], 2, slots=60))
    settings += [Setting(size, 2, stores=True) for size in BLOCKS]
    if options.without_thoughts:
        settings = [
            Setting(size, 2, template=template, match_unit=unit)
            for template in THOUGHTS
            for size in BLOCKS
            for unit in (0, UNIT)
        ]
    expected: dict[Template, list[list[int]]] = {each: [] for each in get_args(Template)}
    rows = []
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as runtime:
        os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = runtime
        model = toy.write_model(Path(tempfile.mkdtemp(dir=runtime)))
        for setting in settings:
            counts = [
                replay(setting, turns, model, expected[setting.template], keeping)
                for keeping in COLUMNS
            ]
            rows.append((setting, counts))
            print(setting, *counts, flush=True)
    name = "prompt_tails" if options.without_thoughts else "partial_tails"
    write(options.output / f"{name}.md", rows, sessions, most)
    return 0


COLUMNS: Final[dict[Keeping, str]] = {
    "full blocks": "hits, full blocks alone",
    "ends of requests": "hits, with ends of requests",
    "ends of prompts": "hits, with tails",
}

HEADS: Final[dict[Template, str]] = {
    "whole": "Each turn repeats the answers token by token, so that the ends of prompts are of no "
    "use. In few slots they take the room of others, and what is evicted differs from run to run.",
    "without thoughts": "Each turn leaves out the first half of each answer, as templates do with "
    "thoughts. Counted are hits among the tokens of the prompt before.",
    "thoughts opened": f"The same, and each prompt ends with {len(OPENED)} tokens that open the "
    "thoughts, which the next turn leaves out as well.",
}


def write(
    page: Path,
    rows: Sequence[tuple[Setting, list[Counted]]],
    sessions: int,
    turns: int,
) -> None:
    """Write the page."""
    option = " --without-thoughts" if page.stem == "prompt_tails" else ""
    lines = [
        "# Hits within blocks, in conversations" + (" without thoughts" if option else ""),
        "",
        f"`python benchmarks/partial_tails.py{option}`: counts, which depend on no speed.",
        "",
        f"{sessions} conversations of {turns} turns, {LONGEST:,} tokens at most, with questions "
        "and answers as long as in LMSYS-Chat-1M on average, behind "
        f"{SHARED_TOKENS} tokens that all begin with. "
        "A hit is a token of a prompt that is not computed, here in percent of the tokens that the "
        "turn before had computed and that are repeated. Hits in vLLM's own cache, which holds all "
        "full blocks of an engine, are counted, too, so that there may be more than 100 %.",
        "",
        "There is no row for larger blocks, such as those of 8,960 tokens that some models have: "
        f"no conversation of {LONGEST:,} tokens would fill one.",
        "",
    ]
    for template, head in HEADS.items():
        if template not in {setting.template for setting, _ in rows}:
            continue
        lines += [
            head,
            "",
            f"| blocks | engines | {' | '.join(COLUMNS.values())} | computed tokens |",
            f"|---|---|{'---:|' * len(COLUMNS)}---:|",
        ]
        for setting, counts in rows:
            if setting.template != template:
                continue
            hits = [f"{100 * (of.cached + of.loaded) / of.known:.1f} %" for of in counts]
            left = " → ".join(f"{of.computed:,}" for of in counts)
            lines.append(f"| {setting} | {' | '.join(hits)} | {left} |")
        lines.append("")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
