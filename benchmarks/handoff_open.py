# SPDX-License-Identifier: Apache-2.0
"""What a hand-off of 128k tokens costs on the engine's thread before its prefill begins.

vLLM's own block pool stands beside it in the same run, as the machine's measure: it allocates as
many blocks, which the same thread does for the same prompt anyway.

    python benchmarks/handoff_open.py [--quick]

writes results/handoff_open.md beside this file. Each figure is the least of several medians.
"""

import argparse
import hashlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import machine
from vllm.v1.core.block_pool import BlockPool

from omni_connector.handoff.leases import Handoff, SlotDirectory
from omni_connector.handoff.prompt import Prompt, PromptRules
from omni_connector.handoff.sender import HandoffSender
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.runtime.context import PROCESS_CONTEXT

RESULTS = Path(__file__).parent / "results"
BLOCKS, BLOCK = 8192, 16
SLOTS = 5 * BLOCKS
TARGET_MS = 1.0
# How many of its first blocks a prompt has in common with the one before.
CASES = {"nothing in common": 0, "half in common": BLOCKS // 2, "all but the last": BLOCKS - 1}


def hashes(number: int, common: int) -> list[bytes]:
    names = ["same"] * common + [str(number)] * (BLOCKS - common)
    before, found = b"", []
    for name in names:
        before = hashlib.sha256(before + name.encode()).digest()
        found.append(before)
    return found


def sender(directory: SlotDirectory) -> HandoffSender:
    shape = GroupShape(
        kind="full_attention",
        block_size=BLOCK,
        attention_type="all",
        layers="0",
        pages=(f"H8.N{BLOCK}.C256",),
    )
    compatibility = CompatibilityKey(
        model="benchmark",
        dtype="bfloat16",
        kv_dtype="auto",
        integrity="full",
        kv_heads=8,
        ranks=1,
        groups=(shape,),
    )
    ledger: Any = None  # no copy is made
    return HandoffSender(
        rules=PromptRules(lambda *_: None),
        alone=True,
        ended=lambda: False,
        directory=directory,
        ledger=ledger,
        compatibility=compatibility,
        group_ids=(0,),
        engine_id="benchmark",
        epoch=b"",
        address=None,
        arena_wait=10.0,
        context=PROCESS_CONTEXT,
        on_complete=lambda: None,
    )


def copied(directory: SlotDirectory, handoff: Handoff) -> None:
    blocks = directory.copying(handoff, [(0, i) for i in range(BLOCKS)])
    assert blocks is not None
    directory.filled(handoff, blocks)
    directory.close(handoff.token)


def ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def opening(common: int, repeats: int) -> float:
    """Milliseconds of both calls in which the sender prepares a hand-off, in a warm arena."""
    directory = SlotDirectory(SLOTS, PROCESS_CONTEXT, 120.0)
    times = []
    for number in range(repeats + 6):
        prompt = Prompt(
            token_ids=range(BLOCKS * BLOCK),
            num_tokens=BLOCKS * BLOCK,
            block_hashes=hashes(number, common),
            hash_block_size=BLOCK,
        )
        half = sender(directory)
        request: Any = SimpleNamespace(request_id=str(number))

        def prepare(half: HandoffSender = half, request: Any = request, p: Prompt = prompt) -> None:
            if not half.may_schedule(half.add(request, p)):
                raise RuntimeError("the arena has no room")

        spent = ms(prepare)
        if number >= 6:  # the arena is full from here on
            times.append(spent)
        [send] = half.admitted
        handoff = send.handoff
        assert handoff is not None
        copied(directory, handoff)
    return statistics.median(times)


def allocating(repeats: int) -> float:
    """Milliseconds in which vLLM's block pool gives as many blocks."""
    pool = BlockPool(num_gpu_blocks=BLOCKS + 1, enable_caching=True, hash_block_size=BLOCK)
    times = []
    for _ in range(repeats):
        blocks: list[Any] = []

        def take(taken: list[Any] = blocks) -> None:
            taken += pool.get_new_blocks(BLOCKS)

        times.append(ms(take))
        pool.free_blocks(reversed(blocks))
    return statistics.median(times)


def markdown(opens: dict[str, float], pool: float, command: str) -> str:
    lines = [
        "# Preparing a hand-off of 128k tokens",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"Milliseconds on the engine's thread for {BLOCKS} blocks in an arena of {SLOTS} slots, "
        "all in use or cached. *of vLLM's*: against vLLM's block pool, which gives as many blocks "
        f"in {pool:.2f} ms in the same run. Target: under {TARGET_MS:g} ms.",
        "",
        "| with the prompt before | ms | of vLLM's |",
        "|---|---:|---:|",
    ]
    lines += [f"| {name} | {each:.2f} | {each / pool:.2f} |" for name, each in opens.items()]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    rounds, repeats = (2, 5) if arguments.quick else (5, 15)
    opens = dict.fromkeys(CASES, float("inf"))
    pool = float("inf")
    for _ in range(rounds):
        pool = min(pool, allocating(repeats))
        for name, common in CASES.items():
            opens[name] = min(opens[name], opening(common, repeats))
    command = "python benchmarks/handoff_open.py" + (" --quick" if arguments.quick else "")
    text = markdown(opens, pool, command)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "handoff_open.md").write_text(text)


if __name__ == "__main__":
    main()
