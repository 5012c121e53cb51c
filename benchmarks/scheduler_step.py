# SPDX-License-Identifier: Apache-2.0
"""What the connector adds to an engine's step when there is nothing to move.

vLLM's real scheduler runs in this process with 1, 64 and 256 decoding requests; the model is
left out (every request gets a token at once). With 256, another run has 32 requests beside them
that wait for room in a full arena, and others have blocks of 16 tokens, which the arena keeps when
an answer ends. Each method of the connector that vLLM calls is
timed, and the times of a step are added up, for the scheduler half and for the worker half.
Beside OmniKVConnector stands a connector whose methods do nothing.

    python benchmarks/scheduler_step.py [--quick] [--rounds 3]

writes results/scheduler_step.md and results/scheduler_step.png beside this file.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from machine import machine
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from omni_connector.plugin import register
from omni_connector.testing import no_op
from omni_connector.testing.models import make_model
from tests.simulation.engines import lifecycles

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
RUNNING = (1, 64, 256)
WAITING = 32
MANY = 64  # requests that pin their blocks
TARGET_US = 20.0
LAYERS, HEADS, HEAD_SIZE = 4, 1, 8
LARGE, SMALL = 128, 16  # tokens of a block
PROMPT = 200
# Prompts that are handed off take two slots of 32 KiB each; this many fill the small arena.
FULL_GIB, FULL = 0.001, 16
HANDED_OFF = {"do_remote_decode": True, "do_remote_prefill": False}
# More tokens than steps: requests that were prefilled first must not end before the others.
SPARE = 100
OURS = "OmniKVConnector"
CONNECTORS: dict[str, dict[str, Any]] = {
    OURS: {"kv_connector_extra_config": {"arena_gib": 0.25}},
    "NoOpConnector": {"kv_connector_module_path": no_op.MODULE},
}
SCHEDULER_METHODS = (
    "build_connector_meta",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "get_num_new_matched_tokens",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "request_finished_all_groups",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
)


@dataclass
class Stopwatch:
    """Adds up the time spent in methods of one object, calls among them counted once.

    Attributes:
        seconds, processor: since the last `take`; the second of this thread's processor time.
    """

    seconds: float = 0.0
    processor: float = 0.0
    _inside: bool = False

    def watch(self, target: Any, methods: tuple[str, ...]) -> None:
        for name in methods:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return method(*args, **kwargs)
            self._inside = True
            used, start = time.thread_time(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self.processor += time.thread_time() - used
                self._inside = False

        return timed

    def take(self) -> tuple[float, float]:
        taken = self.seconds, self.processor
        self.seconds = self.processor = 0.0
        return taken


@dataclass(frozen=True)
class Scene:
    """How many requests decode, how many wait for room, the tokens of a block, and of those that
    decode, the number that pin their blocks."""

    running: int
    waiting: int = 0
    block: int = LARGE
    pins: int = 0

    def __str__(self) -> str:
        waiting = f" + {self.waiting}" if self.waiting else ""
        filling = ", filling" if self.block == SMALL else ""
        pins = f", {self.pins} pins" if self.pins else ""
        return f"{self.running}{waiting}{filling}{pins}"


@dataclass
class Times:
    """Microseconds: of the connector's halves in each step, and of the scheduler's whole step."""

    half: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    worker: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    admission: float = 0.0
    end: float = 0.0


Results = dict[tuple[str, Scene], list[Times]]
"""Of each connector and scene, the rounds."""


class Engine:
    """vLLM's scheduler and both halves of a connector, without a model."""

    def __init__(self, model: Path, connector: str, scene: Scene, steps: int) -> None:
        requests = scene.running + scene.waiting
        longest = PROMPT + scene.block + steps + SPARE
        blocks = 1 + (requests + FULL) * (-(-longest // scene.block) + 1)
        self._block = scene.block
        self._scene = scene
        self.config = vllm_config(model, connector, scene, blocks)
        cache = kv_cache_config(blocks, scene.block)
        device = torch.device("cpu")
        self.worker: Any = KVConnectorFactory.create_connector(
            config=self.config, role=KVConnectorRole.WORKER, kv_cache_config=cache
        )
        self.worker.register_kv_caches(
            allocate_kv_cache(cache, device, KVCacheLayout.LBHNC, [scene.block])
        )
        # Its interface does not name what is used here of vLLM's own schedulers.
        made: Any = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = made(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=scene.block,
            hash_block_size=scene.block,
            log_stats=True,
        )
        handshake = self.worker.get_handshake_metadata()
        if handshake is not None:
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(scene.block, hash_fn)
        self.stopwatch = Stopwatch()
        self.stopwatch.watch(self.scheduler.connector, SCHEDULER_METHODS)

    def add(self, number: int, max_tokens: int, *, handed_off: bool = False) -> None:
        extra: dict[str, Any] | None = None
        if handed_off:
            extra = {"kv_transfer_params": dict(HANDED_OFF)}
        elif number < self._scene.pins:
            extra = {"kv_transfer_params": {"omni": {"pin_s": 600.0 + number}}}
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra
        )
        # Where blocks shall fill in each step, each begins its answer at another place in one.
        length = PROMPT + (number % SMALL if self._block == SMALL else 0)
        prompt = [(number * 7 + i * 3) % 500 for i in range(length)]
        kind = "handed" if handed_off else "decodes"
        request = Request(
            f"{kind}-{number}",
            prompt,
            sampling,
            None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)

    def step(self) -> tuple[float, float]:
        """One step; seconds of the scheduler, and of the worker half."""
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        middle = time.perf_counter()
        connector_output = self._work(scheduled)
        worked = time.perf_counter()
        output = self._output(scheduled, connector_output)
        built = time.perf_counter()
        self.scheduler.update_from_output(scheduled, output)
        end = time.perf_counter()
        return middle - start + end - built, worked - middle

    def _work(self, scheduled: SchedulerOutput) -> KVConnectorOutput:
        worker = self.worker
        metadata = scheduled.kv_connector_metadata
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        return lifecycles.connector_output(worker, scheduled)

    def _output(
        self, scheduled: SchedulerOutput, connector_output: KVConnectorOutput
    ) -> ModelRunnerOutput:
        ids = list(scheduled.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [5] if requests[i].num_computed_tokens >= requests[i].num_prompt_tokens else []
            for i in ids
        ]
        return lifecycles.model_output(ids, sampled, connector_output)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def vllm_config(model: Path, connector: str, scene: Scene, blocks: int) -> VllmConfig:
    settings = dict(CONNECTORS[connector])
    if scene.waiting:
        settings["kv_connector_extra_config"] = {"arena_gib": FULL_GIB, "arena_wait_s": 1e6}
    transfer = KVTransferConfig(kv_connector=connector, kv_role="kv_both", **settings)
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=8192),
        cache_config=CacheConfig(block_size=scene.block, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=8192,
            is_encoder_decoder=False,
            max_num_seqs=scene.running + scene.waiting,
            max_num_batched_tokens=8192,
            enable_chunked_prefill=True,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    config.parallel_config.rank = 0
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks = blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def kv_cache_config(blocks: int, block: int) -> KVCacheConfig:
    """One group of full attention; its pages are small, as nothing is put in them."""
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    spec = FullAttentionSpec(
        block_size=block, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )
    page = spec.page_size_bytes
    tensor = KVCacheTensor(
        size=LAYERS * page * blocks,
        layers=layers,
        layer_stride=page * blocks,
        block_stride=page,
    )
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
        kv_cache_layout="LBHNC",
        hash_block_size=block,
    )


@contextlib.contextmanager
def engine(model: Path, connector: str, scene: Scene, steps: int) -> Iterator[Engine]:
    made = Engine(model, connector, scene, steps)
    try:
        yield made
    finally:
        made.close()


def measure(model: Path, connector: str, scene: Scene, steps: int) -> Times:
    """Times of `steps` steps in which requests decode, others wait, and nothing else happens."""
    times = Times()
    running, waiting = scene.running, scene.waiting
    with engine(model, connector, scene, steps) as made:
        for number in range(FULL if waiting else 0):
            made.add(10_000 + number, 1, handed_off=True)
        while made.scheduler.requests:
            made.step()
        for number in range(waiting):
            # Prompts of their own: an equal one would share the slots of a hand-off that has some.
            made.add(20_100 + number, 1, handed_off=True)
        for number in range(running):
            made.add(number, steps + SPARE)
        requests = made.scheduler.requests
        made.stopwatch.take()
        while any(
            r.num_computed_tokens < r.num_prompt_tokens
            for name, r in requests.items()
            if name.startswith("decodes")
        ):
            made.step()
        times.admission = 1e6 * made.stopwatch.take()[0] / running
        for number in range(steps):
            whole, worker = made.step()
            half, processor = made.stopwatch.take()
            if number >= warm_up(steps):
                times.half.append(1e6 * half)
                times.processor.append(1e6 * processor)
                times.worker.append(1e6 * worker)
                times.step.append(1e6 * whole)
        if len(made.scheduler.running) != running:
            raise RuntimeError(f"{len(made.scheduler.running)} requests run, not {running}")
        if len(requests) != running + waiting:
            raise RuntimeError(f"{len(requests) - running} requests wait, not {waiting}")
        ends = []
        for name in [each for each in requests if each.startswith("decodes")]:
            made.scheduler.finish_requests([name], RequestStatus.FINISHED_STOPPED)
            made.step()  # its copies begin
            ends.append(1e6 * made.stopwatch.take()[0])
        times.end = statistics.median(ends)
    return times


def warm_up(steps: int) -> int:
    """The first of so many steps, which do not count."""
    return steps // 10


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def figures(times: Times) -> tuple[float, ...]:
    """The numbers of a row, in the order of its columns."""
    half, worker, step = (statistics.median(v) for v in (times.half, times.worker, times.step))
    mean, processor = statistics.mean(times.half), statistics.mean(times.processor)
    part = 100 * mean / statistics.mean(times.step)
    slowest, most = p99(times.half), p99(times.processor)
    return half, mean, slowest, processor, most, worker, step, part, times.admission, times.end


def row(connector: str, scene: Scene, rounds: Sequence[Times]) -> str:
    """Medians of the rounds."""
    columns = zip(*map(figures, rounds), strict=True)
    cells = [f"{statistics.median(column):.1f}" for column in columns]
    return f"| {' | '.join([connector, str(scene), *cells])} |"


def spread(scene: Scene, rounds: Sequence[Times]) -> str:
    """The lowest and the highest round of what there are targets for."""
    columns = list(zip(*map(figures, rounds), strict=True))[:3]
    cells = [f"{min(column):.1f} to {max(column):.1f}" for column in columns]
    return f"| {' | '.join([str(scene), *cells])} |"


def markdown(results: Results, command: str, steps: int) -> str:
    rounds = len(next(iter(results.values())))
    lines = [
        "# The connector's part of a step with nothing to move",
        "",
        f"`{command}`: {machine()}.",
        "",
        f"Microseconds, medians of {steps - warm_up(steps)} steps of vLLM's scheduler with "
        f"requests that decode; of {rounds} rounds, each in the reverse order of the one before, "
        "the medians. *scheduler half*: inside the connector's methods; *step*: scheduling and "
        "updating, the connector included; *processor*: what the scheduler half used of it, and "
        "the reading of the clocks around each call; *% of step*: of the means; *worker half*: all "
        "its methods in one step; *admission*: scheduler half for one new request, from its "
        "arrival to the end of its prefill; *end*: scheduler half for one request that ends, and "
        f"for the step after it. Its answer has {steps} tokens.",
        "",
        f"*256 + {WAITING}*: beside them {WAITING} requests wait for room in a full arena. "
        f"Hand-offs hold all its slots. Target: {TARGET_US:.0f} µs for the scheduler half in each "
        f"row. *filling*: blocks of {SMALL} tokens instead of {LARGE}, so that each answer has "
        f"{steps // SMALL} or {steps // SMALL + 1}, which are kept when it ends. *pins*: so many "
        "of the requests pin their blocks.",
        "",
        "| connector | running | scheduler half | its mean | 99 % | processor: mean | 99 % "
        "| worker half | step | % of step | admission | end |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [row(*key, times) for key, times in results.items()]
    if rounds > 1:
        lines += ["", f"Of OmniKVConnector, the lowest and the highest of the {rounds} rounds:", ""]
        lines += ["| running | scheduler half | its mean | 99 % |", "|---|---:|---:|---:|"]
        lines += [spread(scene, each) for (name, scene), each in results.items() if name == OURS]
    lines += ["", "![Both halves by number of running requests](scheduler_step.png)"]
    return "\n".join([*lines, ""])


def plot(results: Results, path: Path) -> None:
    """Both halves by number of running requests."""
    figure, axes = plt.subplots(figsize=(6.5, 4.5), layout="constrained")
    for connector, colour in zip(CONNECTORS, ("tab:blue", "tab:gray"), strict=True):
        for part, style in (("half", "o-"), ("worker", "s:")):
            values = [
                statistics.median(
                    statistics.median(getattr(times, part))
                    for times in results[connector, Scene(running)]
                )
                for running in RUNNING
            ]
            label = f"{connector}, {'scheduler' if part == 'half' else 'worker'} half"
            axes.plot(RUNNING, values, style, color=colour, label=label)
    axes.axhline(TARGET_US, color="tab:red", linestyle=":", label="target")
    axes.set(xlabel="running requests", ylabel="µs a step (median)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(RUNNING, [str(each) for each in RUNNING])
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.suptitle("A step with nothing to move")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, and write the table and the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--rounds", type=int, help="3 by default, and 1 with --quick")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    steps = 200 if arguments.quick else 1000
    register()
    with tempfile.TemporaryDirectory(prefix="omni-", dir="/tmp") as folder:
        os.environ["OMNI_CONNECTOR_RUNTIME_DIR"] = str(Path(folder) / "run")
        model = make_model("llama", Path(folder) / "model")
        most = max(RUNNING)
        scenes = [*map(Scene, RUNNING), Scene(most, WAITING), Scene(most, block=SMALL)]
        scenes.append(Scene(most, block=SMALL, pins=MANY))
        kinds = [
            (connector, scene)
            for scene in scenes
            for connector in CONNECTORS
            if connector == OURS or not (scene.waiting or scene.pins)
        ]
        results: Results = {kind: [] for kind in kinds}
        for number in range(rounds):
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                times = measure(model, *kind, steps)
                results[kind].append(times)
                print(row(*kind, [times]), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python benchmarks/scheduler_step.py", *sys.argv[1:]])
    (arguments.output / "scheduler_step.md").write_text(markdown(results, command, steps))
    plot(results, arguments.output / "scheduler_step.png")


if __name__ == "__main__":
    main()
