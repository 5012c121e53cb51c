# SPDX-License-Identifier: Apache-2.0
"""Checks of omni-connector under vLLM's CUDA build, on one GPU; none of them has run on one yet.

    python benchmarks/gpu/probe.py CHECK...

Each result becomes a line of JSON in the folder `OUT` (default: `gpu_probe`), as it comes, beside
the logs of all engines. The checks stand in CHECKS at the end, with their limits in seconds. Each
runs in a process of its own; one that fails or hangs does not stop the next. Engines are processes,
too, asked by lines of JSON; nothing of one outlives its check. Models have random weights and are
made at the first use. `KIT_BUDGET_S` bounds all checks together.

A reference is a lone engine's answer, or the engine's own after a full local hit. `exact` counts
answers whose tokens and log-probabilities are the same, `ties` those that part where two tokens
were nearly alike, and `wrong` all others: none, except of the connector that moves nothing.

`KIT_LAYERS=0`, which rows of the matrix set, is for a shim that keeps saves from following layers;
without one they follow in all rows, and `early` says so.
"""

import contextlib
import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
OUT = Path(os.environ.get("OUT") or "gpu_probe").resolve()
WORK = Path(os.environ.get("KIT_WORK") or f"{tempfile.gettempdir()}/omni-probe-{os.getuid()}")
GHOST = bool(os.environ.get("KIT_GHOST"))
MIB = 1 << 20
BACKEND = os.environ.get("KIT_BACKEND", "TRITON_ATTN")
DTYPE = "bfloat16" if BACKEND == "FLASH_ATTN" else "float32"  # FlashAttention has no float32
EXACT = 1e-3 if GHOST else 0.0


def put(**fields):
    """Write one result, at once."""
    fields = {
        "check": os.environ.get("KIT_CHECK", "?"),
        "t": round(time.time() - START, 1),
        **fields,
    }
    line = json.dumps(fields)
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line[:1500], flush=True)


START = float(os.environ.get("KIT_START") or time.time())


def short(text):
    """The beginning and the end of a message."""
    return text if len(text) <= 2400 else f"{text[:800]} [...] {text[-1500:]}"


def guarded(name, function, *args, **options):
    """Run one part of a check; a failure is a result."""
    begun = time.monotonic()
    try:
        fields = function(*args, **options)
        put(part=name, s=round(time.monotonic() - begun, 2), **{"ok": True, **(fields or {})})
    except Exception as error:  # noqa: BLE001 - it becomes a result
        put(
            part=name,
            ok=False,
            s=round(time.monotonic() - begun, 2),
            error=short(f"{type(error).__name__}: {error}"),
            where=traceback.format_exc()[-600:],
        )


# ---------------------------------------------------------------- models, prompts, comparisons


def model(kind):
    """A model of random weights, made once."""
    from omni_connector.testing import models

    if kind == "copies":
        # 32 layers x 8 heads x 128 x (K, V) x 2 bytes: 128 KiB of KV a token for little compute.
        layers = 4 if GHOST else 32
        models._RECIPES["kit-copies"] = models._Recipe(
            "LlamaConfig",
            "LlamaForCausalLM",
            {
                "hidden_size": 256,
                "intermediate_size": 256,
                "num_hidden_layers": layers,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
            dtype=__import__("torch").bfloat16,
        )
        kind = "kit-copies"
    WORK.mkdir(parents=True, exist_ok=True)
    return str(models.make_model(kind, WORK / "models" / kind))


def prompt(seed, length):
    return random.Random(f"kit {seed} {length}").choices(range(10, 500), k=length)


def compare(got, wanted, tolerance):
    """How two answers differ: tokens, and log-probabilities up to where the tokens part."""
    worst, parted = 0.0, None
    for at, (a, b) in enumerate(zip(got["tokens"], wanted["tokens"], strict=False)):
        if a != b:
            top = dict(map(tuple, wanted["top"][at]))
            gap = top[b] - top[a] if a in top else math.inf
            parted = {"at": at, "gap": gap, "tie": gap <= tolerance}
            break
        worst = max(worst, abs(got["logprobs"][at] - wanted["logprobs"][at]))
    same = parted is None and len(got["tokens"]) == len(wanted["tokens"])
    return {"same": same, "diff": worst, "parted": parted}


def verdict(pairs, tolerance):
    """Sum of many comparisons."""
    each = [compare(got, wanted, tolerance) for got, wanted in pairs]
    wrong = [
        one for one in each if not one["same"] and not (one["parted"] and one["parted"]["tie"])
    ]
    return {
        "answers": len(each),
        "same": sum(one["same"] for one in each),
        "exact": sum(one["same"] and one["diff"] <= EXACT for one in each),
        "ties": len(each) - len(wrong) - sum(one["same"] for one in each),
        "wrong": len(wrong),
        "worst_logprob_diff": max((one["diff"] for one in each), default=0.0),
        "ok": not wrong,
        **({"first_wrong": wrong[0]["parted"]} if wrong else {}),
    }


PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# ---------------------------------------------------------------- engines


class Engine:
    """One vLLM `LLM` in a process group of its own."""

    def __init__(
        self,
        name,
        kind="llama",
        connector=None,
        *,
        runner=2,
        asynchronous=True,
        graphs=False,
        compiled=False,
        layers=True,
        kv_mib=256,
        length=2048,
        dtype=DTYPE,
        role="kv_both",
        arena_gib=0.0625 if GHOST else 1.0,
        extra=None,
        sleep=False,
        backend=BACKEND,
        batch=None,
        sequences=32,
        eager_policy=None,
        settings=None,
        environment=None,
    ):
        self.name = name
        config = None
        if connector == "omni":
            config = {
                "kv_connector": "OmniKVConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    **({"arena_gib": arena_gib} if arena_gib is not None else {}),
                    **(extra or {}),
                },
            }
        elif connector == "noop":
            config = {
                "kv_connector": "NoOpConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "omni_connector.testing.no_op",
            }
        elif connector == "offloading":
            config = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": 4 << 30 if not GHOST else 64 << 20,
                    **(extra or {}),
                },
            }
        arguments = {
            "model": model(kind),
            "dtype": dtype,
            "max_model_len": length,
            "seed": 0,
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": kv_mib * MIB,
            "max_num_seqs": sequences,
            "max_num_batched_tokens": batch or length,
            "async_scheduling": asynchronous,
            "enforce_eager": not graphs,
            "enable_sleep_mode": sleep,
            "disable_log_stats": False,
            "logprobs_mode": "raw_logprobs",
            **(settings or {}),
        }
        if backend:
            arguments["attention_backend"] = backend
        if graphs and not compiled:
            # Graphs without torch.compile: a start of seconds.
            arguments["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            }
        elif graphs:
            arguments["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
        environment = {
            **os.environ,
            "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
            "KIT_LAYERS": str(int(layers)),
            "OMNI_CONNECTOR_RUNTIME_DIR": str(WORK / "run"),
            "VLLM_LOGGING_LEVEL": "INFO",
            **(environment or {}),
        }
        (WORK / "run").mkdir(parents=True, exist_ok=True)
        os.chmod(WORK / "run", 0o700)
        logs = WORK / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{os.environ.get('KIT_CHECK', 'x')}-{name}.log"
        answers, write = os.pipe()
        self.answers = os.fdopen(answers, "rb")
        self.buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--engine", str(write)],
            stdin=subprocess.PIPE,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=[write],
            start_new_session=True,
            cwd=str(WORK),
        )
        os.close(write)
        ENGINES.append(self)
        self.send({"arguments": arguments, "connector": config})

    def send(self, message):
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self, timeout):
        deadline = time.monotonic() + timeout
        while b"\n" not in self.buffer:
            ready = select.select([self.answers], [], [], max(0, deadline - time.monotonic()))[0]
            more = os.read(self.answers.fileno(), 1 << 20) if ready else b""
            if not more:
                state = self.process.poll()
                raise RuntimeError(
                    f"engine {self.name}: "
                    + (f"no answer in {timeout:.0f} s" if not ready else f"died ({state})")
                    + "\n"
                    + self.tail()
                )
            self.buffer += more
        line, self.buffer = self.buffer.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"engine {self.name}: {answer['error']}")
        return answer["value"]

    def call(self, what, timeout=120, **fields):
        self.send({"call": what, **fields})
        return self.receive(timeout)

    def tail(self):
        lines = self.log.read_text(errors="replace").splitlines()
        told = [line for line in lines if "Error" in line or "error:" in line][-4:]
        return "\n".join([*told, "...", *lines[-12:]])[-2500:]

    def ready(self, timeout=1200 if GHOST else 110):
        return self.receive(timeout)

    def said(self, text, timeout):
        """Whether its log has a line with `text` within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while text not in self.log.read_text(errors="replace"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def run(self, requests, timeout=240, **fields):
        return self.call("run", timeout, requests=requests, **fields)

    def ask(self, tokens, count=8, params=None, **fields):
        """One request, alone."""
        return self.run([{"prompt": tokens, "count": count, "params": params}], **fields)[0]

    def metrics(self, flush=True):
        if flush:
            self.ask([11, 12, 13], 1)
        return self.call("metrics")

    def end(self):
        with contextlib.suppress(Exception):
            self.call("quit", 20)
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


ENGINES = []


@contextlib.contextmanager
def engines(**made):
    """Start engines together; names to functions that make them. Those that fail are left out."""
    begun = time.monotonic()
    started, up = {}, {}
    try:
        for name, make in made.items():
            started[name] = make(name)
        for name, each in started.items():
            try:
                up[name] = each.ready() | {"waited_s": round(time.monotonic() - begun, 1)}
            except Exception as error:  # noqa: BLE001 - it becomes a result
                put(part=f"start {name}", ok=False, error=short(str(error)))
        put(part="start", ok=len(up) == len(made), s=round(time.monotonic() - begun, 1), engines=up)
        yield {name: started[name] for name in up}
    finally:
        for each in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 8
        for each in started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGKILL)


def grouped(made, groups, up, parts):
    """Run parts, each as soon as the engines that it needs are there: all engines together, or,
    without a GPU, one group at a time. KIT_ONLY names engines, of which alone parts are run."""
    only = set(filter(None, os.environ.get("KIT_ONLY", "").split(","))) or set(made)
    made = {name: make for name, make in made.items() if name in only}
    groups = [[name for name in group if name in made] for group in groups]
    for group in filter(None, groups if GHOST else [list(made)]):
        with engines(**{name: made[name] for name in group}) as started:
            up.clear()
            up.update(started)
            for part, needs, function in parts:
                if set(needs) <= set(up):
                    guarded(part, function)
                elif set(needs) <= set(group):
                    put(part=part, ok=False, error="an engine that it needs has not started")


def engine_child(descriptor):
    """The engine's side of `Engine`."""
    answers = os.fdopen(descriptor, "wb")

    def answer(**fields):
        answers.write(json.dumps(fields).encode() + b"\n")
        answers.flush()

    first = json.loads(sys.stdin.readline())
    begun = time.monotonic()
    try:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig
        from vllm.sampling_params import RequestOutputKind

        imported = time.monotonic()
        options = {}
        if first["connector"]:
            options["kv_transfer_config"] = KVTransferConfig(**first["connector"])
        llm = LLM(**first["arguments"], **options)
        engine = llm.llm_engine
        answer(
            value={
                "import_s": round(imported - begun, 1),
                "start_s": round(time.monotonic() - imported, 1),
            }
        )
    except BaseException as error:
        traceback.print_exc()
        answer(error=f"start: {type(error).__name__}: {error}"[-2000:])
        raise

    numbers = iter(range(1 << 60))

    def run(requests, aborts=None, wave=None):
        """Run requests together; `aborts`: {index: tokens after which it is aborted}; `wave`: how
        many may be in the engine at once."""
        aborts = {int(index): after for index, after in (aborts or {}).items()}
        states, waiting, live = {}, list(enumerate(requests))[::-1], {}
        results = [None] * len(requests)

        def add():
            index, one = waiting.pop()
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=one["count"],
                ignore_eos=True,
                logprobs=5,
                detokenize=False,
                output_kind=RequestOutputKind.CUMULATIVE,
                extra_args={"kv_transfer_params": one["params"]} if one.get("params") else None,
            )
            name = f"kit-{next(numbers)}"
            live[name] = index
            states[index] = {"begun": time.perf_counter()}
            engine.add_request(name, {"prompt_token_ids": one["prompt"]}, sampling)

        while waiting or live:
            while waiting and (wave is None or len(live) < wave):
                add()
            if not engine.has_unfinished_requests():
                break
            for output in engine.step():
                name = output.request_id
                index = live.get(name)
                if index is None:
                    continue
                state, out = states[index], output.outputs[0]
                now = time.perf_counter()
                if out.token_ids:
                    state.setdefault("first", now)
                if output.finished or (index in aborts and len(out.token_ids) >= aborts[index]):
                    if not output.finished:
                        engine.abort_request([name], internal=False)
                    del live[name]
                    rows = out.logprobs or []
                    results[index] = {
                        "tokens": list(out.token_ids),
                        "logprobs": [
                            row[token].logprob
                            for token, row in zip(out.token_ids, rows, strict=False)
                        ],
                        "top": [
                            [(token, one.logprob) for token, one in row.items()] for row in rows
                        ],
                        "cached": output.num_cached_tokens,
                        "params": output.kv_transfer_params,
                        "ttft_ms": 1e3 * (state.get("first", now) - state["begun"]),
                        "ms": 1e3 * (now - state["begun"]),
                        "aborted": not output.finished,
                        "reason": out.finish_reason,
                    }
        return results

    def metrics():
        found = {}
        for each in llm.get_metrics():
            if not any(
                part in each.name
                for part in ("omni", "kv_offload", "preempt", "external", "prefix_cache")
            ):
                continue
            name = each.name.removeprefix("vllm:").removeprefix("omni_connector_")
            labels = {
                k: v
                for k, v in each.labels.items()
                if k not in ("model_name", "engine", "engine_id", "name", "role")
            }
            if labels:
                name += "{" + ",".join(sorted(labels.values())) + "}"
            if hasattr(each, "value"):
                found[name] = found.get(name, 0) + each.value
            elif hasattr(each, "count"):
                found[f"{name}_count"] = found.get(f"{name}_count", 0) + each.count
                found[f"{name}_sum"] = found.get(f"{name}_sum", 0) + each.sum
        return {name: value for name, value in found.items() if value}

    def reset():
        """Empty vLLM's own prefix cache; blocks under a copy make it wait."""
        for _ in range(40):
            if llm.reset_prefix_cache():
                return True
            time.sleep(0.05)
            run([{"prompt": [11, 12, 13], "count": 1}])
        raise RuntimeError("reset_prefix_cache was refused for 2 s: blocks are held")

    calls = {
        "run": run,
        "metrics": metrics,
        "reset": reset,
        "sleep": lambda level=1: llm.sleep(level),
        "wake": lambda: llm.wake_up(),
    }
    while True:
        line = sys.stdin.readline()
        if not line:
            break
        asked = json.loads(line)
        name = asked.pop("call")
        if name == "quit":
            answer(value=None)
            break
        try:
            answer(value=calls[name](**asked))
        except Exception as error:  # noqa: BLE001 - it becomes a result
            traceback.print_exc()
            answer(error=f"{name}: {type(error).__name__}: {error}"[-2000:])


# ---------------------------------------------------------------- checks


def check_machine():
    """The kit itself: versions, vLLM's operators on this GPU, rates of plain copies."""
    import torch

    guarded(
        "versions",
        lambda: {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": sys.version.split()[0],
            "device": torch.cuda.get_device_name(0),
            "free_total": torch.cuda.mem_get_info(),
            "cores": os.cpu_count(),
            **_imports(),
        },
    )
    guarded("memory", _memory)
    guarded("operators", _operators)
    guarded("flash_attention_3", _fa3)
    # vLLM looks at a model's class in a process of its own and keeps what it saw: once for all.
    guarded("model_class", _inspect)
    if not GHOST:
        guarded("copies", _plain_copies, [1 << 24, 1 << 27, 1 << 30])


def _inspect():
    from vllm import ModelRegistry

    ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
    model("llama")
    model("copies")


def _memory():
    """A machine's memory may grow as it is used: use some, before arenas want it."""

    def available():
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return {
            name: round(int(lines[name].split()[0]) / MIB, 1)
            for name in ("MemTotal", "MemAvailable")
        }

    before, begun = available(), time.monotonic()
    grow = 1 if GHOST else 24
    code = (
        "import time, sys\nkept, end = [], time.monotonic() + 12\n"
        f"while len(kept) < {grow} and time.monotonic() < end:\n"
        "    kept.append(bytearray(b'x') * (1 << 30))\nprint(len(kept))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=40
    )
    shm = os.statvfs("/dev/shm")
    return {
        "before_gib": before,
        "after_gib": available(),
        "used_gib": done.stdout.strip(),
        "code": done.returncode,
        "grow_s": round(time.monotonic() - begun, 1),
        "dev_shm_gib": round(shm.f_blocks * shm.f_frsize / (1 << 30), 1),
    }


def _imports():
    import importlib.metadata as metadata

    import vllm

    versions = {}
    for each in (
        "vllm",
        "transformers",
        "triton",
        "numpy",
        "typing_extensions",
        "protobuf",
        "anyio",
    ):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[each] = metadata.version(each)
    from vllm.platforms import current_platform

    return {
        "versions": versions,
        "platform": type(current_platform).__name__,
        "vllm": vllm.__version__,
    }


def _operators():
    import torch
    import vllm._custom_ops as ops

    torch.manual_seed(0)
    cuda = "cuda"
    x = torch.randn(64, 512, device=cuda, dtype=torch.bfloat16)
    w = torch.randn(512, device=cuda, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    told = {}

    def near(name, a, b, limit):
        told[name] = float((a.float() - b.float()).abs().max())
        if not told[name] <= limit:
            raise AssertionError(f"{name} is off by {told[name]}")

    torch.ops._C.rms_norm(out, x, w, 1e-6)
    f = x.float()
    near("rms_norm", out, f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float(), 0.1)
    half = torch.empty(64, 256, device=cuda, dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(half, x)
    near("silu_and_mul", half, torch.nn.functional.silu(f[:, :256]) * f[:, 256:], 0.1)
    residual = torch.randn_like(x)
    a, r = x.clone(), residual.clone()
    torch.ops._C.fused_add_rms_norm(a, r, w, 1e-6)
    near("fused_add_rms_norm", r, f + residual.float(), 0.1)
    positions = torch.arange(64, device=cuda)
    cache = torch.randn(128, 64, device=cuda, dtype=torch.bfloat16)
    q = torch.randn(64, 8 * 64, device=cuda, dtype=torch.bfloat16)
    before = q.clone()
    torch.ops._C.rotary_embedding(positions, q, None, 64, cache, True)
    c, s = cache[:64].float().chunk(2, -1)
    p, t = before.view(64, 8, 64).float().chunk(2, -1)
    c, s = c.unsqueeze(1), s.unsqueeze(1)
    near("rotary_embedding", q.view(64, 8, 64), torch.cat([p * c - t * s, t * c + p * s], -1), 0.2)
    if not GHOST:
        torch.cuda.synchronize()
    del ops
    return {"off_by": told}


def _fa3():
    import torch
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    if not interface.FA3_AVAILABLE:
        return {"ok": None, "why": str(interface.FA3_UNAVAILABLE_REASON)[:300]}
    q = torch.randn(128, 8, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn_like(q), torch.randn_like(q)
    starts = torch.tensor([0, 128], device="cuda", dtype=torch.int32)
    out = interface.flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=128,
        cu_seqlens_q=starts,
        max_seqlen_k=128,
        cu_seqlens_k=starts,
        causal=True,
        fa_version=3,
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1).float() for each in (q, k, v)), is_causal=True
    ).transpose(0, 1)
    off = float((out.float() - wanted).abs().max())
    return {"off_by": off, "ok": off < 0.05}


def _plain_copies(sizes):
    """One cudaMemcpyAsync between the device and pinned memory, the best and the median of 9."""
    import torch

    found = {}
    for size in sizes:
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for way, target, source in (("d2h", host, device), ("h2d", device, host)):
            times = []
            for _ in range(10):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                target.copy_(source, non_blocking=True)
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            times = sorted(times[1:])
            found[f"{way} {size >> 20} MiB"] = {
                "ms": round(times[4], 3),
                "best_ms": round(times[0], 3),
                "GBps": round(size / times[4] / 1e6, 2),
            }
    return {"copies": found}


def hand_off(prefill, decode, tokens, count=8, **fields):
    """One hand-off; returns the decode engine's answer and the prefill engine's."""
    first = prefill.ask(tokens, 1, dict(PREFILL), **fields)
    if not first["params"]:
        raise AssertionError("the prefill engine answered without kv_transfer_params")
    return decode.ask(tokens, count, first["params"], **fields), first


def own_reference(engine, tokens, count=8):
    """The same engine's answer on its own: computed, then with all full blocks from its cache, the
    path that a hand-off of a prompt of k*16+1 tokens takes."""
    engine.call("reset")
    engine.ask(tokens, 1)
    return engine.ask(tokens, count)


LENGTHS = [17, 50] if GHOST else [17, 33, 129, 257, 300, 513, 1025, 1500, 1985]
# Log-probability between two tokens up to which another one may win; Triton multiplies float32 in
# TF32. A reference on the same path is exact all the same.
TIE = {"float32": 0.02, "bfloat16": 0.15}


def check_base():
    """(a) hand-off, (b) shared prefix, (c) negative control."""
    apart = {"share": False}
    beside = {"namespace": "kit-b", "handoff": False}
    made = {
        "lone": lambda n: Engine(n),
        "noop": lambda n: Engine(n, connector="noop"),
        "prefill": lambda n: Engine(n, connector="omni", extra=apart),
        "decode": lambda n: Engine(n, connector="omni", extra=apart),
        "here": lambda n: Engine(n, connector="omni", extra=beside),
        "there": lambda n: Engine(n, connector="omni", extra=beside),
    }
    base = _Base()
    grouped(
        made, [["lone", "noop"], ["prefill", "decode"], ["here", "there"]], base.up, base.parts()
    )


class _Base:
    """The parts of `check_base`."""

    def __init__(self):
        self.tie = TIE[DTYPE]
        self.up = {}
        self.prompts = [prompt("base", length) for length in LENGTHS]
        self.many = [
            prompt(f"many {i}", 40 if GHOST else 400 + 13 * i) for i in range(3 if GHOST else 24)
        ]
        self.common = [prompt(f"shared {i}", max(32, n // 16 * 16)) for i, n in enumerate(LENGTHS)]
        self.tails = [
            [common + prompt(f"tail {i} {k}", 9) for k in range(2)]
            for i, common in enumerate(self.common)
        ]
        self.again = prompt("again", LENGTHS[-1])

    def parts(self):
        return [
            ("lone engine", ["lone"], self.lone),
            ("c negative control", ["noop"], self.control),
            ("a hand-off", ["prefill", "decode"], self.handed),
            ("a hand-offs together", ["prefill", "decode"], self.together),
            ("c nothing asked, nothing loaded", ["decode"], self.unasked),
            ("b shared prefix", ["here", "there"], self.shared),
            ("b own arena after a reset", ["here"], self.own_arena),
        ]

    def lone(self):
        lone = self.up["lone"]
        self.wanted = [own_reference(lone, tokens) for tokens in self.prompts]
        lone.call("reset")
        plain = [lone.ask(tokens) for tokens in self.prompts]
        self.wanted_many = lone.run([{"prompt": p, "count": 16} for p in self.many])
        self.wanted_tails = [lone.ask(tails[1]) for tails in self.tails]
        self.wanted_again = lone.ask(self.again)
        return verdict(list(zip(plain, self.wanted, strict=True)), self.tie)

    def handed(self):
        prefill, decode = self.up["prefill"], self.up["decode"]
        got = [hand_off(prefill, decode, tokens)[0] for tokens in self.prompts]
        moved, saved = decode.metrics(), prefill.metrics()
        found = verdict(list(zip(got, self.wanted, strict=True)), self.tie)
        found["cached"] = [a["cached"] for a in got]
        found["cached_wanted"] = [len(tokens) - 1 for tokens in self.prompts]
        found["decode"], found["prefill"] = _counts(moved), _counts(saved)
        found["ttft_ms"] = [round(a["ttft_ms"], 1) for a in got]
        found["ok"] = found["ok"] and moved.get("handoffs_received", 0) == len(self.prompts)
        return found

    def together(self):
        first = self.up["prefill"].run(
            [{"prompt": p, "count": 1, "params": dict(PREFILL)} for p in self.many]
        )
        got = self.up["decode"].run(
            [
                {"prompt": p, "count": 16, "params": f["params"]}
                for p, f in zip(self.many, first, strict=True)
            ]
        )
        return verdict(list(zip(got, self.wanted_many, strict=True)), self.tie)

    def control(self):
        noop, got = self.up["noop"], []
        for tokens in self.prompts:
            noop.ask(tokens, 1, dict(PREFILL))
            noop.call("reset")
            # Other bytes must lie in the blocks that are then "loaded" into.
            noop.ask(prompt("other", len(tokens)), 1)
            noop.call("reset")
            got.append(noop.ask(tokens, 8, {"do_remote_prefill": True, "do_remote_decode": False}))
        found = verdict(list(zip(got, self.wanted, strict=True)), self.tie)
        loaded = noop.metrics().get("bytes_loaded", 0)
        # This one must be wrong: else the check of hand-offs cannot see the KV.
        return {
            **found,
            "ok": found["wrong"] >= len(got) - 1 and loaded == 0,
            "bytes_loaded": loaded,
        }

    def unasked(self):
        decode = self.up["decode"]
        before = decode.metrics()
        decode.call("reset")
        got = [decode.ask(prompt("unasked", n)) for n in LENGTHS[:3]]
        after = decode.metrics()
        names = ("bytes_loaded", "handoffs_received", "tokens_from_host", "tokens_kept")
        moved = {k: after.get(k, 0) - before.get(k, 0) for k in names}
        return {"moved": moved, "cached": [a["cached"] for a in got], "ok": not any(moved.values())}

    def shared(self):
        here, there, got = self.up["here"], self.up["there"], []
        for tails in self.tails:
            here.ask(tails[0], 2)
            if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
                here.metrics()  # an engine in this process makes no step of its own
            time.sleep(1.0 if GHOST else 0.3)
            got.append(there.ask(tails[1]))
        found = verdict(list(zip(got, self.wanted_tails, strict=True)), self.tie)
        metrics = there.metrics()
        found["cached_of"] = [(a["cached"], len(c)) for a, c in zip(got, self.common, strict=True)]
        found |= {"there": _counts(metrics), "here": _counts(here.metrics())}
        found["ok"] = found["ok"] and metrics.get("tokens_from_host", 0) > 0
        return found

    def own_arena(self):
        here = self.up["here"]
        here.ask(self.again)
        time.sleep(0.3)
        here.call("reset")
        got = here.ask(self.again)
        found = verdict([(got, self.wanted_again)], self.tie)
        kept = here.metrics().get("tokens_kept", 0)
        return {
            **found,
            "cached": got["cached"],
            "tokens_kept": kept,
            "ok": found["ok"] and kept > 0,
        }


def _counts(metrics):
    wanted = (
        "bytes_",
        "blocks_",
        "tokens_",
        "handoffs_",
        "save",
        "load",
        "share",
        "fail",
        "kv_offload",
        "num_preempt",
        "preempt",
    )
    return {
        k: round(v, 6)
        for k, v in metrics.items()
        if k.startswith(wanted) and not k.endswith("_created")
    }


def check_start():
    """Engines with CUDA graphs and the default arena start as soon as one without the connector,
    hand off, and the decode engine outlives the prefill engine."""
    options = {"graphs": not GHOST, **({} if GHOST else {"arena_gib": None})}
    made = {
        "plain": lambda n: Engine(n, graphs=not GHOST),
        "prefill": lambda n: Engine(n, connector="omni", extra={"share": False}, **options),
        "decode": lambda n: Engine(n, connector="omni", extra={"share": False}, **options),
    }
    up = {}
    prompts = [prompt("start", length) for length in LENGTHS]

    def handed():
        got = [hand_off(up["prefill"], up["decode"], tokens)[0] for tokens in prompts]
        received = up["decode"].metrics().get("handoffs_received", 0)
        wanted = [own_reference(up["decode"], tokens) for tokens in prompts]
        found = verdict(list(zip(got, wanted, strict=True)), TIE[DTYPE])
        return {**found, "received": received, "ok": found["ok"] and received == len(prompts)}

    def killed():
        """Half of the hand-offs are fetched while the prefill engine is killed, half after."""
        decode = up["decode"]
        later = [prompt("killed", length) for length in LENGTHS]
        first = [up["prefill"].ask(tokens, 1, dict(PREFILL)) for tokens in later]
        requests = [
            {"prompt": tokens, "count": 8, "params": one["params"]}
            for tokens, one in zip(later, first, strict=True)
        ]
        half = len(requests) // 2
        kill = threading.Timer(0.02, os.killpg, (up["prefill"].process.pid, signal.SIGKILL))
        kill.start()
        got = decode.run(requests[:half])
        kill.join()
        begun = time.monotonic()
        got += decode.run(requests[half:])
        seconds = time.monotonic() - begun
        metrics = decode.metrics()
        wanted = [own_reference(decode, tokens) for tokens in later]
        found = verdict(list(zip(got, wanted, strict=True)), TIE[DTYPE])
        return {**found, "after_it_s": round(seconds, 2), "decode": _counts(metrics)}

    both = ["prefill", "decode"]
    parts = [
        ("start: hand-offs", both, handed),
        ("start: kill -9 of the prefill engine", both, killed),
    ]
    grouped(made, [["plain"], both], up, parts)


def check_figures():
    """(d), (f): what a hand-off costs, with 128 KiB of KV a token."""
    big = {
        "kind": "copies",
        "dtype": "bfloat16",
        "length": 512 if GHOST else 12288,
        "kv_mib": 64 if GHOST else 6144,
        "sequences": 4,
    }
    arena = {"arena_gib": 0.0625 if GHOST else 6.0}
    sizes = [64, 128] if GHOST else [1024, 4096, 8192, 12000]
    repeats = 2 if GHOST else 5
    bytes_a_token = (4 if GHOST else 32) * 8 * 128 * 2 * 2
    alone = {**arena, "handoff": False, "namespace": "kit-own"}
    made = {
        "prefill": lambda n: Engine(n, connector="omni", extra={**arena, "share": False}, **big),
        "decode": lambda n: Engine(n, connector="omni", extra={**arena, "share": False}, **big),
        "own": lambda n: Engine(n, connector="omni", extra=alone, **big),
        "offload": lambda n: Engine(
            n,
            connector="offloading",
            extra={} if GHOST else {"cpu_bytes_to_use": 6 << 30},
            **big,
            environment={"KIT_GHOST_OFFLOAD": "1"} if GHOST else {},
        ),
        "noop": lambda n: Engine(n, connector="noop", **big),
    }
    up = {}
    if not GHOST:
        guarded("plain copies", _plain_copies, [size * bytes_a_token for size in sizes])

    def moved(engine, before, after):
        return {
            k: round(after.get(k, 0) - before.get(k, 0), 6)
            for k in after
            if k.startswith(
                ("bytes_", "save_", "load_", "share_", "claim_", "kv_offload", "failure")
            )
            and not k.endswith("_created")
            and after.get(k, 0) != before.get(k, 0)
        }

    def handed(size):
        rows, pairs = [], []
        for turn in range(repeats):
            tokens = prompt(f"figure {turn}", size + 1)
            p0, d0 = up["prefill"].metrics(), up["decode"].metrics()
            got, first = hand_off(up["prefill"], up["decode"], tokens, 4)
            p1, d1 = up["prefill"].metrics(), up["decode"].metrics()
            local = up["decode"].ask(tokens, 4)
            # What the prefill engine answers from its own cache: computed there, the same path.
            pairs.append((got, up["prefill"].ask(tokens, 4)))
            alone = up["prefill"].ask(prompt(f"figure alone {turn}", size + 1), 1)
            rows.append(
                {
                    "prefill_ms": round(first["ms"], 2),
                    "prefill_without_save_ms": round(alone["ms"], 2),
                    "ttft_ms": round(got["ttft_ms"], 2),
                    "local_ttft_ms": round(local["ttft_ms"], 2),
                    "handoff_ms": round(got["ttft_ms"] - local["ttft_ms"], 2),
                    "cached": got["cached"],
                    "p": moved("p", p0, p1),
                    "d": moved("d", d0, d1),
                }
            )
        best = min(row["handoff_ms"] for row in rows[1:] or rows)
        size_bytes = size * bytes_a_token
        return {
            "tokens": size,
            "bytes": size_bytes,
            "best_handoff_ms": best,
            "best_GBps": round(size_bytes / max(best, 1e-3) / 1e6, 2),
            "rows": rows,
            **verdict(pairs, TIE["bfloat16"]),
        }

    def tier(name, size):
        rows, pairs = [], []
        engine = up[name]
        for turn in range(repeats):
            tokens = prompt(f"tier {turn}", size + 1)
            before = engine.metrics()
            computed = engine.ask(tokens, 4)
            time.sleep(0.3)
            middle = engine.metrics()
            engine.call("reset")
            loaded = engine.ask(tokens, 4)
            after = engine.metrics()
            local = engine.ask(tokens, 4)
            pairs.append((loaded, computed))
            rows.append(
                {
                    "computed_ttft_ms": round(computed["ttft_ms"], 2),
                    "loaded_ttft_ms": round(loaded["ttft_ms"], 2),
                    "local_ttft_ms": round(local["ttft_ms"], 2),
                    "cached": loaded["cached"],
                    "load_ms": round(loaded["ttft_ms"] - local["ttft_ms"], 2),
                    "save": moved(name, before, middle),
                    "load": moved(name, middle, after),
                }
            )
        best = min(row["load_ms"] for row in rows[1:] or rows)
        size_bytes = size * bytes_a_token
        return {
            "tokens": size,
            "bytes": size_bytes,
            "best_load_ms": best,
            "best_GBps": round(size_bytes / max(best, 1e-3) / 1e6, 2),
            "rows": rows,
            **verdict(pairs, TIE["bfloat16"]),
        }

    def floor(size):
        """vLLM's own cost of a load that moves nothing."""
        tokens = [prompt(f"floor {turn}", size + 1) for turn in range(repeats)]
        rows = []
        for each in tokens:
            got = up["noop"].ask(each, 4, {"do_remote_prefill": True, "do_remote_decode": False})
            local = up["noop"].ask(each, 4)
            rows.append(round(got["ttft_ms"] - local["ttft_ms"], 2))
        return {"tokens": size, "noop_ms": rows}

    def warm():
        """Arenas allocated and pinned, the peer's arena attached and registered."""
        said = {
            name: each.said("memory is allocated", 25)
            for name, each in up.items()
            if name in ("prefill", "decode", "own")
        }
        rows = []
        for turn in range(2 if GHOST else 4):
            tokens = prompt(f"warm {turn}", sizes[-1] + 1)
            got, first = hand_off(up["prefill"], up["decode"], tokens, 4)
            rows.append({"ttft_ms": round(got["ttft_ms"], 1), "prefill_ms": round(first["ms"], 1)})
            time.sleep(0 if GHOST else 1.5)
        return {"allocated": said, "first_handoffs": rows}

    parts = [("d warm", ["prefill", "decode"], warm)]
    for size in sizes:
        parts += [
            (f"d hand-off {size}", ["prefill", "decode"], lambda s=size: handed(s)),
            (f"d own arena {size}", ["own"], lambda s=size: tier("own", s)),
            (f"d OffloadingConnector {size}", ["offload"], lambda s=size: tier("offload", s)),
            (f"d floor {size}", ["noop"], lambda s=size: floor(s)),
        ]
    grouped(made, [["prefill", "decode"], ["own", "offload"], ["noop"]], up, parts)


# name: runner, asynchronous, graphs, compiled, layers, backend, dtype
MATRIX = {
    "v2-async-eager-layers": (2, True, False, False, True, "TRITON_ATTN", "float32"),
    "v2-sync-graphs": (2, False, True, False, False, "TRITON_ATTN", "float32"),
    "v1-async-graphs-layers": (1, True, True, False, True, "TRITON_ATTN", "float32"),
    "v1-sync-eager": (1, False, False, False, False, "TRITON_ATTN", "float32"),
    "v2-async-compiled-layers": (2, True, True, True, True, "TRITON_ATTN", "bfloat16"),
    "v1-sync-compiled-layers": (1, False, True, True, True, "TRITON_ATTN", "bfloat16"),
    "v2-async-graphs": (2, True, True, False, False, "TRITON_ATTN", "bfloat16"),
    "v1-async-eager": (1, True, False, False, False, "TRITON_ATTN", "bfloat16"),
}
FLASH = {
    "v2-flash-layers": (2, True, False, False, True, "FLASH_ATTN", "bfloat16"),
    "v2-flash-compiled": (2, True, True, True, True, "FLASH_ATTN", "bfloat16"),
    "v1-flash-graphs": (1, False, True, True, False, "FLASH_ATTN", "bfloat16"),
}


def check_matrix(table=None):
    """(e): runners, scheduling, graphs, saves that follow the layers."""
    table = dict(table or MATRIX)
    if GHOST:
        table = {name: row for name, row in table.items() if not row[3] and not row[2]}
    at_once = 1 if GHOST else 4
    names = list(table)
    for begin in range(0, len(names), at_once):
        made = {}
        for name in names[begin : begin + at_once]:
            for side in "pd":
                made[f"{name}/{side}"] = partial(_engine_of_matrix, row=table[name])
        with engines(**made) as up:
            for name in names[begin : begin + at_once]:
                guarded(f"e {name}", _one_of_matrix, up, name, table[name])


def _engine_of_matrix(name, row):
    runner, asynchronous, graphs, compiled, layers, backend, dtype = row
    return Engine(
        name.replace("/", "-"),
        connector="omni",
        runner=runner,
        asynchronous=asynchronous,
        graphs=graphs,
        compiled=compiled,
        layers=layers,
        backend=backend,
        dtype=dtype,
        batch=512 if not GHOST else 64,
        extra={"share": False, "namespace": name.split("/")[0]},
    )


def _one_of_matrix(up, name, row):
    prefill, decode = up[f"{name}/p"], up[f"{name}/d"]
    prompts = [prompt(f"matrix {i}", n) for i, n in enumerate(LENGTHS)]
    got = [hand_off(prefill, decode, tokens, 12)[0] for tokens in prompts]
    many = [
        prompt(f"matrix many {i}", 40 if GHOST else 300 + 31 * i) for i in range(3 if GHOST else 12)
    ]
    first = prefill.run([{"prompt": p, "count": 1, "params": dict(PREFILL)} for p in many])
    together = decode.run(
        [
            {"prompt": p, "count": 12, "params": f["params"]}
            for p, f in zip(many, first, strict=True)
        ]
    )
    moved, saved = decode.metrics(), prefill.metrics()
    wanted = [own_reference(decode, tokens, 12) for tokens in prompts]
    decode.call("reset")
    wanted_many = decode.run([{"prompt": p, "count": 12} for p in many])
    alone = verdict(list(zip(got, wanted, strict=True)), TIE[row[-1]])
    batch = verdict(list(zip(together, wanted_many, strict=True)), TIE[row[-1]])
    received = moved.get("handoffs_received", 0)
    return {
        "ok": alone["ok"] and batch["ok"] and received == len(prompts) + len(many),
        "one": alone,
        "together": batch,
        "received": received,
        "early": saved.get("bytes_saved_early", 0),
        "saved": saved.get("bytes_saved", 0),
        "decode": _counts(moved),
    }


def check_flash():
    """The matrix's hand-offs with FlashAttention 3, vLLM's default on Hopper."""
    check_matrix(FLASH)


def check_stress():
    """(g): 200 requests, preemptions, aborts, sleep and wake; answers equal a lone engine's."""
    count = 8 if GHOST else 200
    # Room for a few requests only: 4 layers x 2 heads x 64 x (K, V) x 4 bytes = 4 KiB a token.
    small = {
        "sequences": 16,
        "length": 128 if GHOST else 1024,
        "batch": 128 if GHOST else 1024,
        "sleep": not GHOST,
    }
    kv = 1 if GHOST else 20
    made = {
        "lone": lambda n: Engine(n, kv_mib=256 if not GHOST else 8, **{**small, "sleep": False}),
        "prefill": lambda n: Engine(
            n, connector="omni", kv_mib=64 if not GHOST else 8, **small, extra={}
        ),
        "decode": lambda n: Engine(n, connector="omni", kv_mib=kv, **small, extra={}),
    }
    up = {}
    draw = random.Random(7)
    heads = [prompt(f"head {i}", 32 if GHOST else 256) for i in range(8)]
    prompts = [
        draw.choice(heads) + prompt(f"stress {i}", draw.randrange(5, 30 if GHOST else 500))
        for i in range(count)
    ]
    answer = 24 if GHOST else 96
    wanted = {}

    def lone():
        answers = up["lone"].run([{"prompt": p, "count": answer} for p in prompts], timeout=300)
        wanted.update(enumerate(answers))

    def half(name, indexes):
        chosen = [prompts[i] for i in indexes]
        aborts = {
            k: draw.randrange(1, answer // 2) for k in range(len(chosen)) if draw.random() < 0.15
        }
        early = {k: 1 for k in range(len(chosen)) if draw.random() < 0.05}
        first = up["prefill"].run(
            [{"prompt": p, "count": 1, "params": dict(PREFILL)} for p in chosen],
            wave=24,
            timeout=200,
        )
        # Some hand-offs are never fetched: those prompts are computed again.
        requests = [
            {"prompt": p, "count": answer, "params": f["params"] if k % 11 else None}
            for k, (p, f) in enumerate(zip(chosen, first, strict=True))
        ]
        got = up["decode"].run(requests, aborts={**aborts, **early}, timeout=280)
        pairs = [
            (g, wanted[i]) for g, i in zip(got, indexes, strict=True) if g and not g["aborted"]
        ]
        lost = sum(g is None for g in got)
        metrics = up["decode"].metrics()
        found = verdict(pairs, TIE[DTYPE])
        return {
            **found,
            "aborted": sum(bool(g and g["aborted"]) for g in got),
            "lost": lost,
            "reasons": sorted({g["reason"] or "-" for g in got if g}),
            "decode": _counts(metrics),
            "prefill": _counts(up["prefill"].metrics()),
            "ok": found["ok"] and not lost and bool(pairs),
        }

    def slept(level):
        both = ("decode", "prefill")
        asleep = [up[name].call("sleep", 60, level=level) for name in both]
        awake = [up[name].call("wake", 60) for name in both]
        return {"asleep": asleep, "awake": awake}

    both = ["prefill", "decode"]
    first, second = list(range(count // 2)), list(range(count // 2, count))
    done = []

    def half_of(name, indexes):
        done.append(name)
        return half(name, indexes)

    sleeps = [
        ("g sleep and wake", both, lambda: slept(1)),
        ("g sleep and wake again", both, lambda: slept(1)),
    ]
    parts = [
        ("g lone engine", ["lone"], lone),
        ("g first half", both, lambda: half_of("first", first)),
        *([] if GHOST else sleeps),  # cumem needs a device
        ("g second half", both, lambda: half_of("second", second)),
    ]
    grouped(made, [["lone"], both], up, parts)
    if not done and wanted and not GHOST:
        small["sleep"] = False
        put(part="g without sleep mode", ok=None)
        rest = {name: make for name, make in made.items() if name in both}
        grouped(rest, [both], up, [parts[1], parts[-1]])


CHECKS = {
    "machine": (check_machine, 90),
    "start": (check_start, 150),
    "base": (check_base, 200),
    "figures": (check_figures, 240),
    "matrix": (check_matrix, 300),
    "flash": (check_flash, 150),
    "stress": (check_stress, 240),
}


def main():
    if sys.argv[1:2] == ["--engine"]:
        engine_child(int(sys.argv[2]))
        return
    if sys.argv[1:2] == ["--check"]:
        CHECKS[sys.argv[2]][0]()
        return
    budget = float(os.environ.get("KIT_BUDGET_S", "560"))
    factor = 20 if GHOST else 1
    for name in sys.argv[1:] or list(CHECKS):
        limit = min(CHECKS[name][1] * factor, budget * factor - (time.time() - START))
        if limit < 20:
            put(part=name, ok=False, error="no time left")
            continue
        environment = {**os.environ, "KIT_CHECK": name, "KIT_START": str(START)}
        child = subprocess.Popen([sys.executable, str(HERE), "--check", name], env=environment)
        os.environ["KIT_CHECK"] = name
        try:
            code = child.wait(limit)
            put(part="end", ok=code == 0, code=code)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGTERM)  # its engines end with it
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(12)
            child.kill()
            put(part="end", ok=False, error=f"not done in {limit:.0f} s")
        _pack_logs()


def _pack_logs():
    logs = sorted((WORK / "logs").glob("*.log"))
    with tarfile.open(OUT / "logs.tar.gz", "w:gz") as packed:
        for each in logs:
            if each.stat().st_size > 2 * MIB:
                text = each.read_bytes()
                each.write_bytes(text[:MIB] + b"\n[...]\n" + text[-MIB:])
            packed.add(each, each.name)


if __name__ == "__main__":
    if "--check" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
