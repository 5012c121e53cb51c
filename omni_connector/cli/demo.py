# SPDX-License-Identifier: Apache-2.0
"""`omni-connector demo`: one vLLM engine hands KV cache to another, measured and checked.

Each prompt is answered three times.

1. Through the router: the prefill engine computes the prompt, and the decode engine loads its KV.
   The decode engine has not seen the prompt before, so its own cache cannot replace missing bytes.
2. By the decode engine alone, which now has the KV in its cache.
3. By the decode engine without any KV. This answer is the reference, as none of its KV came through
   the connector.

The reference is computed along the same numeric path (see `omni_connector.testing.reference`).
Therefore its tokens must be the same, and its log-probabilities equal except for rounding. The
engines use float32, whose rounding is equally small on every CPU.
"""

import contextlib
import http.client
import logging
import random
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from omni_connector.cli.engines import Deployment, make_engines, running
from omni_connector.errors import ConfigError
from omni_connector.plugin import CONNECTOR_NAME
from omni_connector.runtime.trace import FileTrace, merge, now
from omni_connector.testing.engines import Client, Engine, EngineError, completion

LENGTHS: Final = (513, 1000, 2049)
"""Tokens of the prompts, around whole numbers of blocks. A shorter one is computed as fast as it is
handed off."""

FAMILY: Final = "llama-wide"
KV_TRANSFER_CONFIG: Final[Mapping[str, Any]] = {
    "kv_connector": CONNECTOR_NAME,
    "kv_role": "kv_both",
}

_ARGUMENTS: Final = (
    *("--logits-processors", "omni_connector.testing.reference:ForcedFirstToken"),
    *("--dtype", "float32", "--max-model-len", "4096"),
)
_NEW_TOKENS: Final = 16
"""Tokens of each answer."""

_VOCABULARY: Final = range(3, 512)
"""Token ids of the prompts."""

_STATS_S: Final = 5.0
"""Longest wait for an engine's statistics after an answer, in seconds."""

_WRITTEN_S: Final = 1.2
"""Seconds until an engine has written its spans; it writes every 0.5 s."""

_TTFT: Final = "vllm:time_to_first_token_seconds"
_BYTES: Final = "vllm:omni_connector_bytes_loaded_total"
_TOKENS: Final = "vllm:omni_connector_tokens_loaded_total"
_HANDOFF: Final = (
    "vllm:omni_connector_claim_seconds_sum",
    "vllm:omni_connector_load_seconds_sum",
)
_RAISED: Final = re.compile(r"\b[A-Z]\w*(Error|Exception): .*")


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured with one prompt.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens_moved: prompt tokens whose KV the decode engine counts as loaded.
        bytes_moved: bytes that the decode engine counts as loaded.
        handoff_s: seconds from the lease request to the prefill engine until the KV was loaded.
        prefill_s: seconds that the prefill engine took.
        ttft_s: seconds to the first token at the decode engine: with the KV handed off, with the
            KV in its cache, and without KV.
        same_tokens: whether the answer after the hand-off equals the reference: the same tokens,
            or equally likely ones, with the same log-probabilities.
    """

    prompt_tokens: int
    tokens_moved: int
    bytes_moved: int
    handoff_s: float
    prefill_s: float
    ttft_s: tuple[float, float, float]
    same_tokens: bool

    def problems(self) -> list[str]:
        """Return one sentence for each thing that is wrong."""
        found = []
        # The decode engine computes the last prompt token, as it needs that token's logits.
        if self.tokens_moved < self.prompt_tokens - 1 or self.bytes_moved <= 0:
            found.append(
                f"{self.prompt_tokens} tokens: KV of {self.tokens_moved} tokens "
                f"({self.bytes_moved} bytes) moved, expected {self.prompt_tokens - 1} tokens"
            )
        if not self.same_tokens:
            found.append(f"{self.prompt_tokens} tokens: the answer differs from the reference")
        return found


class Metrics:
    """Samples of an engine's `/metrics`, summed over their labels."""

    def __init__(self, text: str) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                total = self._samples.get(sample.name, 0.0) + float(sample.value)
                self._samples[sample.name] = total

    @classmethod
    def of(cls, engine: Engine) -> "Metrics":
        """Get the samples of an engine."""
        with engine.client() as client:
            return cls(client.get("/metrics").decode())

    def since(self, before: "Metrics", name: str) -> float:
        """Return by how much a sample has grown; 0 if there is no such sample."""
        return self._samples.get(name, 0.0) - before._samples.get(name, 0.0)


def measure(deployment: Deployment, prompt: Sequence[int], salt: str) -> Result:
    """Answer a prompt by hand-off, from local KV and by recomputation, and compare.

    Args:
        deployment: running and idle; it must not have seen this prompt before.
        prompt: token ids.
        salt: keeps the prefix caches of the reference and of the other answers apart.

    Raises:
        EngineError: an engine or the router answered with an error.
    """
    from omni_connector.testing.reference import LOGPROBS, ROUNDING, Answer, same_path

    prefill, decode = deployment.prefill, deployment.decode
    fields = {"max_tokens": _NEW_TOKENS, "cache_salt": salt}
    start, idle = Metrics.of(decode), Metrics.of(prefill)
    with Client(deployment.router.port) as client:
        handed = Answer.of(client.post("/v1/completions", completion(prompt, **LOGPROBS, **fields)))
    after_handoff = _settled(decode, start, tokens_loaded=len(prompt) - 1)
    prefilled = _settled(prefill, idle)
    with decode.client() as client:
        client.complete(prompt, **LOGPROBS, **fields)
        after_local = _settled(decode, after_handoff)
        reference = same_path(client, prompt, max_tokens=_NEW_TOKENS)
        end = _settled(decode, after_local)
    ttft = f"{_TTFT}_sum"
    return Result(
        prompt_tokens=len(prompt),
        tokens_moved=int(after_handoff.since(start, _TOKENS)),
        bytes_moved=int(after_handoff.since(start, _BYTES)),
        handoff_s=sum(after_handoff.since(start, name) for name in _HANDOFF),
        prefill_s=prefilled.since(idle, ttft),
        ttft_s=(
            after_handoff.since(start, ttft),
            after_local.since(after_handoff, ttft),
            end.since(after_local, ttft),
        ),
        same_tokens=handed.agrees(reference, tolerance=ROUNDING),
    )


def _trace_client(
    deployment: Deployment, folder: Path, lengths: Sequence[int], draw: random.Random
) -> None:
    """Send a new prompt of each length through the router, and trace a client's view of it."""
    trace = FileTrace(str(folder), "user", "client")
    with contextlib.closing(trace), Client(deployment.router.port) as client:
        for length in lengths:
            prompt = draw.choices(_VOCABULARY, k=length)
            sent = now()
            events = client.stream("/v1/completions", completion(prompt, max_tokens=_NEW_TOKENS))
            for number, _ in enumerate(events):
                if number == 0:
                    trace.span("first token", sent, tokens=length)
            trace.span("answer", sent, tokens=length)
    time.sleep(_WRITTEN_S)


def _settled(engine: Engine, before: Metrics, *, tokens_loaded: int = 0) -> Metrics:
    # An engine publishes statistics one or two steps after the answer. If a hand-off moved nothing,
    # they never change. Then the deadline ends the wait, and `Result.problems` reports it.
    deadline = time.monotonic() + _STATS_S
    while True:
        now = Metrics.of(engine)
        answered = now.since(before, f"{_TTFT}_count") >= 1
        if answered and now.since(before, _TOKENS) >= tokens_loaded:
            return now
        if time.monotonic() >= deadline:
            return now
        time.sleep(0.02)


def median(results: Sequence[Result]) -> Result:
    """Merge results of prompts of one length: the medians of times, the worst of the checks."""
    middle = statistics.median
    handed, local, recomputed = zip(*(result.ttft_s for result in results), strict=True)
    return Result(
        prompt_tokens=results[0].prompt_tokens,
        tokens_moved=min(result.tokens_moved for result in results),
        bytes_moved=min(result.bytes_moved for result in results),
        handoff_s=middle(result.handoff_s for result in results),
        prefill_s=middle(result.prefill_s for result in results),
        ttft_s=(middle(handed), middle(local), middle(recomputed)),
        same_tokens=all(result.same_tokens for result in results),
    )


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="KV cache handed from the prefill engine to the decode engine")
    for heading in (
        *("prompt\ntokens", "MB\nmoved", "hand-off\nms"),
        *("TTFT ms\nhand-off", "TTFT ms\nKV local", "TTFT ms\nrecomputed"),
        "prefill and\nTTFT ms",
    ):
        table.add_column(heading, justify="right")
    table.add_column("same\ntokens", justify="center")
    for result in results:
        table.add_row(
            str(result.prompt_tokens),
            f"{result.bytes_moved / 1e6:.1f}",
            f"{result.handoff_s * 1e3:.1f}",
            *(f"{seconds * 1e3:.0f}" for seconds in result.ttft_s),
            f"{(result.prefill_s + result.ttft_s[0]) * 1e3:.0f}",
            "yes" if result.same_tokens else "[bold red]NO",
        )
    return table


_LEGEND = """\
TTFT: time to the first token, from the request's arrival at the decode engine.
KV local: the same prompt again; only whole blocks are cached, the rest is computed.
recomputed: without any KV. prefill and TTFT: all that a client waits for after a hand-off; the
prefill engine computes the prompt, and the decode engine has this time for answers.
same tokens: the answers after the hand-off and after the
recomputation are the same, token by token and in their log-probabilities."""


def _make_model(cache: Path) -> Path:
    from omni_connector.testing.models import make_model

    return make_model(FAMILY, cache.resolve() / FAMILY)


def _load_reference() -> None:
    # The import loads vLLM, which takes some seconds and logs warnings to the terminal.
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import omni_connector.testing.reference  # noqa: F401
    finally:
        logger.setLevel(level)


def demo(
    *,
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 3,
    cache: Path,
    logs: Path | None = None,
    kv_transfer_config: Mapping[str, Any] = KV_TRANSFER_CONFIG,
    trace: Path | None = None,
) -> int:
    """Run the demo, print its table, and return the exit status: 0 only if every check passed.

    Args:
        lengths: lengths of the prompts, in tokens.
        rounds: prompts of each length.
        cache: folder in which the generated model is kept.
        logs: folder for logs; None for a temporary one, which is kept only if the demo fails.
        kv_transfer_config: the configuration of both engines.
        trace: file to which a Chrome trace is written; None for no trace.

    Raises:
        ConfigError: a folder cannot be made.
    """
    console = Console()
    if find_spec("vllm_router") is None:
        console.print("The demo needs vllm-router: pip install 'omni-connector\\[demo]'")
        return 2
    _make_folder("--cache", cache)
    folder = logs or Path(tempfile.mkdtemp(prefix="omni-connector-demo-"))
    _make_folder("--logs", folder)
    keep = True
    # A new folder: an earlier demo with the same `logs` has left spans of its own.
    spans = None if trace is None else Path(tempfile.mkdtemp(prefix="spans-", dir=folder))
    try:
        results = _measure_all(console, lengths, rounds, cache, folder, kv_transfer_config, spans)
        console.print(_table(results))
        console.print(_LEGEND, soft_wrap=True)
        problems = [problem for result in results for problem in result.problems()]
        for problem in problems:
            console.print(f"[bold red]Wrong:[/] {problem}")
        told = trace is None or spans is None or _write_trace(console, spans, trace)
        keep = bool(problems) or not told
    except (EngineError, OSError, http.client.HTTPException) as error:
        said = str(error).splitlines() or [type(error).__name__]
        console.print(f"[bold red]Failed:[/] {escape(said[0])}")
        for name, line in _first_errors(folder):
            console.print(f"{name}: {escape(line)}")
    except (KeyboardInterrupt, SystemExit):
        keep = False
        raise
    finally:
        if logs is None and not keep:
            shutil.rmtree(folder, ignore_errors=True)
    if keep:
        console.print(f"What the engines and the router said is in {folder}")
        return 1
    return 0


def _make_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: the folder cannot be made: {error}") from error


def _write_trace(console: Console, spans: Path, file: Path) -> bool:
    try:
        file.write_bytes(merge(spans))
    except OSError as error:
        console.print(f"[bold red]Failed:[/] the trace was not written: {escape(str(error))}")
        return False
    console.print(
        f"{escape(str(file))} says where the time went: open it in chrome://tracing or "
        "https://ui.perfetto.dev",
        soft_wrap=True,
    )
    return True


def _first_errors(logs: Path) -> list[tuple[str, str]]:
    # The first error of a log is the cause; later ones follow from it.
    found = []
    for log in sorted(logs.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            error = _RAISED.search(line)
            # vLLM's warnings name exceptions that nothing has raised.
            if error is not None and "WARNING" not in line:
                found.append((log.stem, error[0]))
                break
    return found


def _measure_all(
    console: Console,
    lengths: Sequence[int],
    rounds: int,
    cache: Path,
    logs: Path,
    kv_transfer_config: Mapping[str, Any],
    spans: Path | None = None,
) -> list[Result]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
    with progress:
        todo = progress.add_task("making the model", total=2 + len(lengths) * (rounds + 1))
        model = _make_model(cache)
        progress.update(todo, advance=1, description="starting two engines and the router")
        prefill, decode = make_engines(
            model, logs, kv_transfer_config, arguments=_ARGUMENTS, trace=spans
        )
        with running(prefill, decode, logs, meanwhile=_load_reference) as deployment:
            progress.update(todo, advance=1, description="warming up")
            draw = random.Random(0)
            # The first hand-off also connects the engines, and the first prompt of a length may
            # compile; neither is to be measured.
            for length in lengths:
                measure(deployment, draw.choices(_VOCABULARY, k=length), f"{length}-warm-up")
                progress.advance(todo)
            results = []
            for length in lengths:
                of_length = []
                for number in range(rounds):
                    progress.update(todo, description=f"{length} prompt tokens")
                    prompt = draw.choices(_VOCABULARY, k=length)
                    of_length.append(measure(deployment, prompt, f"{length}-{number}"))
                    progress.advance(todo)
                results.append(median(of_length))
            if spans is not None:
                progress.update(todo, description="tracing")
                _trace_client(deployment, spans / "client", lengths, draw)
            progress.update(todo, description="stopping the engines")
        progress.update(todo, description="done")
    return results
