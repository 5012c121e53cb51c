# SPDX-License-Identifier: Apache-2.0
"""What a hand-off between two vLLM engines costs, beside a memcpy of the same bytes.

For each prompt length: a fresh prompt is prefilled on the prefill engine (not timed); its
`kv_transfer_params` go to the decode engine at once, and the time to the first token is taken
at a client with a kept-alive connection; then the same prompt is sent to the decode engine
again, which now holds its KV. The difference is the cost of the hand-off. It is divided by the
time of one numpy memcpy of the bytes of that KV, taken right after.

Beside OmniKVConnector stand vLLM's floor, a connector that moves nothing and says so at once,
and NixlConnector where nixl is installed.

    python benchmarks/handoff.py [--quick]
    PYTHONPATH=tests/e2e/site python benchmarks/handoff.py    where the kernel is Linux 6.18

writes results/handoff.md and results/handoff.png beside this file, and with `--default-arena`
results/handoff_default_arena.md and .png, beside NixlConnector results/handoff_nixl.md and .png.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl
import numpy as np
from machine import machine, yields

from omni_connector.testing import no_op
from omni_connector.testing.engines import Client, Engine, completion, prefill
from omni_connector.testing.models import make_model
from omni_connector.testing.ports import free_port

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
BLOCK = 128
TOKEN_BYTES = 128 << 10  # 16 layers x 8 heads x 128 x (K, V) x 4 bytes
LENGTHS = (256, 1024, 2048, 8192)
KV_CACHE_BYTES = 1280 << 20
ARENA_GIB = 1.25
HANDOFF_TTL_S = 30
PAUSE_S = 0.05
FLOOR = (
    "NoOpConnector moves nothing and completes at once: what vLLM itself needs. The decode engine "
    "computes one token of a prompt in both runs, in one step: tokens that are loaded or cached do "
    "not count against the 2,048 that vLLM's servers compute in a step on CPUs. A prompt of 2,049 "
    "takes the prefill engine two steps, which are not timed."
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One hand-off; all times in seconds. `plain` is that of the yardstick."""

    remote: float
    local: float
    plain: float

    @property
    def cost(self) -> float:
        return self.remote - self.local

    @property
    def ratio(self) -> float:
        return self.cost / self.plain


class Memcpy:
    """Times one numpy copy between two buffers whose pages are all there."""

    def __init__(self, max_bytes: int) -> None:
        self._source = np.full(max_bytes, 1, np.uint8)
        self._target = np.full(max_bytes, 2, np.uint8)

    def seconds(self, size: int) -> float:
        start = time.perf_counter()
        np.copyto(self._target[:size], self._source[:size])
        return time.perf_counter() - start


def connectors() -> dict[str, dict[str, Any]]:
    """The `--kv-transfer-config` of each connector that is compared, without its role."""
    extra = {"arena_gib": ARENA_GIB, "handoff_ttl_s": HANDOFF_TTL_S}
    found: dict[str, dict[str, Any]] = {
        "OmniKVConnector": {"kv_connector_extra_config": extra},
        "NoOpConnector": {"kv_connector_module_path": no_op.MODULE},
    }
    if importlib.util.find_spec("nixl") is not None:
        found["NixlConnector"] = {"kv_buffer_device": "cpu"}
    return found


class Yardstick(Protocol):
    """What the cost of a hand-off is divided by."""

    def seconds(self, size: int) -> float:
        """Time of moving as many bytes in the plainest way."""


@contextlib.contextmanager
def engines(
    name: str, config: Mapping[str, Any], model: Path, folder: Path
) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine, each on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    root = str(Path(__file__).parents[1])
    pair = []
    for number, role in enumerate(("kv_producer", "kv_consumer")):
        role_config = {"kv_connector": name, "kv_role": role, **config}
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
            "OMNI_CONNECTOR_RUNTIME_DIR": str(folder / "run"),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            # A connection waits while the other engine prefills.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        }
        pair.append(
            Engine(
                model,
                folder / f"{name}-{role}.log",
                role_config,
                # vLLM computes float32 on every CPU alike.
                arguments=("--max-model-len", "9216", "--dtype", "float32"),
                environment=environment,
                core=cores[number % len(cores)],
                kv_cache_bytes=KV_CACHE_BYTES,
            )
        )
    try:
        for engine in pair:
            engine.start()
        for engine in pair:
            engine.wait_ready(240.0)
        yield pair[0], pair[1]
    finally:
        for engine in pair:
            engine.stop()


def first_token_seconds(client: Client, body: dict[str, Any]) -> float:
    start = time.perf_counter()
    client.post("/v1/completions", body)
    return time.perf_counter() - start


def random_prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(3, 512) for _ in range(tokens)]


def hand_off(
    prefiller: Client, decoder: Client, draw: random.Random, tokens: int, yardstick: Yardstick
) -> Sample:
    """Hand one fresh prompt off. One token more than whole blocks: the decode engine computes
    exactly one token, in the hand-off and in the local hit alike."""
    prompt = random_prompt(draw, tokens + 1)
    params = prefill(prefiller, prompt)
    body = completion(prompt, max_tokens=1)
    remote = first_token_seconds(decoder, {**body, "kv_transfer_params": params})
    time.sleep(PAUSE_S)
    local = first_token_seconds(decoder, body)
    return Sample(remote, local, yardstick.seconds(tokens * TOKEN_BYTES))


def measure(
    name: str,
    config: Mapping[str, Any],
    model: Path,
    folder: Path,
    lengths: tuple[int, ...],
    repeats: int,
    yardstick: Yardstick,
) -> dict[int, list[Sample]]:
    """All samples of one connector, by prompt length."""
    draw = random.Random(name)
    with (
        engines(name, config, model, folder) as (first, second),
        first.client() as prefiller,
        second.client() as decoder,
    ):
        # Every block and slot that will be used is written once before anything is timed; the
        # decode engine computes a prompt too, as not every connector writes there.
        longest = max(lengths)
        for _ in range(KV_CACHE_BYTES // (longest * TOKEN_BYTES) + 1):
            hand_off(prefiller, decoder, draw, longest, yardstick)
            first_token_seconds(decoder, completion(random_prompt(draw, longest), max_tokens=1))
        samples = {}
        for tokens in lengths:
            for _ in range(2):
                hand_off(prefiller, decoder, draw, tokens, yardstick)
            samples[tokens] = [
                hand_off(prefiller, decoder, draw, tokens, yardstick) for _ in range(repeats)
            ]
            if name == "OmniKVConnector":
                require_loaded(second, tokens)
            print(f"{name:16} {summary(tokens, samples[tokens])}", flush=True)
        return samples


def require_loaded(decode: Engine, tokens: int) -> None:
    """Raise RuntimeError if a hand-off was computed locally: its time would mean nothing."""
    failures = decode.samples("vllm:omni_connector_failures_total")
    if failures:
        raise RuntimeError(f"hand-offs of {tokens} tokens failed: {failures}")


def median(values: list[float]) -> float:
    return statistics.median(values)


def summary(tokens: int, samples: list[Sample]) -> str:
    remote, local, plain, cost = (
        1e3 * median([getattr(sample, field) for sample in samples])
        for field in ("remote", "local", "plain", "cost")
    )
    ratio = median([sample.ratio for sample in samples])
    return (
        f"| {tokens} | {tokens * TOKEN_BYTES >> 20} | {remote:.1f} | {local:.1f} | {cost:.1f} "
        f"| {plain:.1f} | {ratio:.1f} |"
    )


def markdown(
    results: dict[str, dict[int, list[Sample]]],
    command: str,
    repeats: int,
    title: str = "Hand-off between two vLLM engines",
    where: str = "on the prefill engine",
    *,
    picture: str,
) -> str:
    """The table. `where` says where the KV is when a prompt is *remote*."""
    lines = [
        f"# {title}",
        "",
        f"`{command}`: {machine()}.{yields()}",
        "",
        "Model of 128 KiB of KV a token, one core an engine. Milliseconds at a client, medians of "
        f"{repeats}. *remote*: first token with the KV {where}; *local*: with the "
        "KV on the decode engine; *cost*: remote - local, paired; *memcpy*: one numpy copy of the "
        "bytes; *ratio*: cost / memcpy, paired.",
    ]
    if "NoOpConnector" in results:
        lines += ["", FLOOR]
    for name, by_length in results.items():
        lines += ["", f"## {name}", ""]
        lines += ["| tokens | MiB | remote | local | cost | memcpy | ratio |"]
        lines += ["|---:|---:|---:|---:|---:|---:|---:|"]
        lines += [summary(tokens, samples) for tokens, samples in by_length.items()]
    return "\n".join([*lines, "", picture, ""])


def plot(results: dict[str, dict[int, list[Sample]]], path: Path, what: str = "a hand-off") -> None:
    """Cost by prompt length, beside one memcpy. A median of no time has no place on this scale."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    lengths = list(next(iter(results.values())))
    for name, by_length in results.items():
        cost = [1e3 * median([s.cost for s in samples]) for samples in by_length.values()]
        axes.plot(
            list(by_length), [each if each > 0 else math.nan for each in cost], "o-", label=name
        )
    memcpy = [
        1e3 * median([s.plain for by_length in results.values() for s in by_length[length]])
        for length in lengths
    ]
    axes.plot(lengths, memcpy, "k--", label="one memcpy of the same bytes")
    axes.set(title=f"What {what} adds to the first token", ylabel="milliseconds (median)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{each:,}" for each in lengths])
    axes.set_xlabel("tokens of the prompt (128 KiB of KV each)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer runs, no peers")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--connector", action="append", choices=list(connectors()))
    parser.add_argument("--repeats", type=int, help="hand-offs of each length")
    parser.add_argument(
        "--default-arena",
        action="store_true",
        help="of the size that the engine chooses: most hand-offs are in slots never used before",
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    names = arguments.connector or (["OmniKVConnector"] if quick else list(connectors()))
    lengths = (256, 2048) if quick else LENGTHS
    repeats = arguments.repeats or (5 if quick else 7)
    # Asked to end, stop the engines on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    memcpy = Memcpy(max(lengths) * TOKEN_BYTES)
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/handoff.py", *sys.argv[1:]])
    page = "handoff_default_arena" if arguments.default_arena else "handoff"
    if "NixlConnector" in names:
        page = "handoff_nixl"
    picture = f"![What a hand-off costs, in copies of its bytes]({page}.png)"
    results = {}
    # Short, because the paths of Unix sockets are.
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        model = make_model("llama-wide", Path(folder) / "model")
        for name in names:
            config = connectors()[name]
            if name == "OmniKVConnector" and arguments.default_arena:
                del config["kv_connector_extra_config"]["arena_gib"]
            results[name] = measure(name, config, model, Path(folder), lengths, repeats, memcpy)
            # Written after each connector, so that a run cut short leaves what it measured.
            text = markdown(results, command, repeats, picture=picture)
            (arguments.output / f"{page}.md").write_text(text)
            plot(results, arguments.output / f"{page}.png")


if __name__ == "__main__":
    main()
