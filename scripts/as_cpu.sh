#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a command as on a lesser CPU:   scripts/as_cpu.sh avx2 make test
#
#   avx2     no AVX-512, no AMX, no AVX-VNNI
#   avx512   AVX-512 without BF16 and FP16, no AMX
#
# torch, oneDNN and MKL have variables for that (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA,
# MKL_ENABLE_INSTRUCTIONS); vLLM's own kernels have none: they go by what torch.cpu says, which asks
# CPUID. So CPUID itself answers less here (scripts/cpuid_mask.c), to all processes of the command.
# It needs a C compiler, glibc on x86-64, and a CPU whose CPUID can fault: cpuid_fault in
# /proc/cpuinfo, which goes on naming all the flags there are.
set -euo pipefail

die() { printf 'as_cpu: %s\n' "$*" >&2; exit 2; }

case ${1:-} in avx2 | avx512) level=$1 ;; *) die "first argument: avx2 or avx512" ;; esac
shift
[ $# -gt 0 ] || die "no command to run"
grep -qw cpuid_fault /proc/cpuinfo || die "this CPU's CPUID cannot fault: restrict what has" \
    "variables: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d /tmp/as_cpu.XXXXXX)  # LD_PRELOAD takes no path with a space
trap 'rm -rf "$folder"' EXIT
"${CC:-cc}" -O2 -Wall -Wextra -shared -fPIC -o "$folder/cpuid_mask.so" "$here/cpuid_mask.c"

# Within a command of its own it takes the place of the outer one.
others=$(tr ' ' ':' <<<"${LD_PRELOAD:-}" | tr ':' '\n' | grep -v '/cpuid_mask\.so$' | paste -sd: || true)
CPUID_MASK=$level LD_PRELOAD="$folder/cpuid_mask.so${others:+:$others}" "$@"
