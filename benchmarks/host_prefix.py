# SPDX-License-Identifier: Apache-2.0
"""What a prefix from the arena of another engine of the host costs, beside a memcpy of its bytes.

For each prompt length: one engine computes a fresh prompt (not timed) and keeps its blocks in its
arena; then another engine is asked the same, and again, when it holds the KV itself. The time to
the first token is taken at a client with a kept-alive connection. The difference is the cost of the
hit. It is divided by the time of one numpy memcpy of the bytes of that KV, taken right after.

Beside OmniKVConnector stands LMCache's multi-process mode where lmcache is installed.

    python benchmarks/host_prefix.py [--quick]

writes results/host_prefix.md and results/host_prefix.png beside this file.
"""

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import handoff
import lmcache_server
from handoff import ARENA_GIB, TOKEN_BYTES, Memcpy, Sample, first_token_seconds, random_prompt

from omni_connector.testing.engines import Client, Engine, completion
from omni_connector.testing.models import make_model

NAME = "OmniKVConnector"
# Of longer prompts only what a quarter of this KV cache has room for is shared.
LENGTHS = (256, 1024, 2048)
CONFIG = {"kv_connector_extra_config": {"arena_gib": ARENA_GIB, "share": True}}
SAVED_S = 0.5  # a prompt of the longest is in the arena by then
MEET_S = 20.0
BLOCK = 128
LMCACHE_GIB = 2
# Of each connector: what counts the tokens that an engine got from another one.
SHARED = {
    NAME: "vllm:omni_connector_tokens_from_host_total",
    lmcache_server.NAME: "vllm:external_prefix_cache_hits_total",
}


def hit(writer: Client, reader: Client, draw: random.Random, tokens: int, memcpy: Memcpy) -> Sample:
    """Share one fresh prompt. One token more than whole blocks, as in `handoff.hand_off`."""
    body = completion(random_prompt(draw, tokens + 1), max_tokens=1)
    writer.post("/v1/completions", body)
    time.sleep(SAVED_S)
    remote = first_token_seconds(reader, body)
    time.sleep(handoff.PAUSE_S)
    local = first_token_seconds(reader, body)
    return Sample(remote, local, memcpy.seconds(tokens * TOKEN_BYTES))


@contextlib.contextmanager
def configuration(name: str, folder: Path) -> Iterator[Mapping[str, Any]]:
    """The engines' `--kv-transfer-config`; the server that it may need runs meanwhile."""
    if name == NAME:
        yield CONFIG
        return
    with lmcache_server.server(folder, LMCACHE_GIB) as config:
        yield config


def measure(
    name: str, model: Path, folder: Path, lengths: tuple[int, ...], repeats: int, memcpy: Memcpy
) -> dict[int, list[Sample]]:
    """All samples of one connector, by prompt length.

    Raises:
        RuntimeError: the engines do not meet, or a prompt was computed twice.
    """
    draw = random.Random(0)

    def shared(engine: Engine) -> float:
        return engine.metric(SHARED[name])

    with (
        configuration(name, folder) as config,
        handoff.engines(name, config, model, folder) as (first, second),
        first.client() as writer,
        second.client() as reader,
    ):
        end = time.monotonic() + MEET_S
        while not shared(second):
            if time.monotonic() > end:
                raise RuntimeError(f"the engines do not meet:\n{second.log_tail()}")
            hit(writer, reader, draw, 2 * BLOCK, memcpy)
        # Every block and slot that will be used is touched once before anything is timed.
        longest = max(lengths)
        for _ in range(handoff.KV_CACHE_BYTES // (longest * TOKEN_BYTES) + 1):
            hit(writer, reader, draw, longest, memcpy)
        samples = {}
        for tokens in lengths:
            before = shared(second)
            samples[tokens] = [hit(writer, reader, draw, tokens, memcpy) for _ in range(repeats)]
            if (found := shared(second) - before) != repeats * tokens:
                raise RuntimeError(f"{found:.0f} of {repeats * tokens} tokens were shared")
            print(f"{name:18} {handoff.summary(tokens, samples[tokens])}", flush=True)
        return samples


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer runs, no peer")
    parser.add_argument("--output", type=Path, default=handoff.RESULTS, help="folder of results")
    parser.add_argument("--connector", action="append", choices=list(SHARED))
    arguments = parser.parse_args()
    lengths = (256, 2048) if arguments.quick else LENGTHS
    repeats = 5 if arguments.quick else 9
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    memcpy = Memcpy(max(lengths) * TOKEN_BYTES)
    arguments.output.mkdir(parents=True, exist_ok=True)
    names = arguments.connector or [NAME]
    if not arguments.connector and not arguments.quick and lmcache_server.installed():
        names.append(lmcache_server.NAME)
    command = " ".join(["python benchmarks/host_prefix.py", *sys.argv[1:]])
    title = "A prefix from the arena of another engine of the host"
    results = {}
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        model = make_model("llama-wide", Path(folder) / "model")
        for name in names:
            results[name] = measure(name, model, Path(folder), lengths, repeats, memcpy)
            # Written after each connector, so that a run cut short leaves what it measured.
            text = handoff.markdown(
                results,
                command,
                repeats,
                title,
                "in the arena of another engine",
                picture="![What a hit costs, in copies of its bytes](host_prefix.png)",
            )
            (arguments.output / "host_prefix.md").write_text(text)
            handoff.plot(results, arguments.output / "host_prefix.png", "a hit")


if __name__ == "__main__":
    main()
