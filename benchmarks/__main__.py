# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks, each in a process of its own.

    python -m benchmarks [--quick]

Arguments are passed on; each benchmark knows `--quick`. Each writes its page anew, without what was
written by hand below its tables. `device` is run where PyTorch finds a GPU. Left out are what needs
another option (`partial_tails.py --without-thoughts`, `handoff.py --default-arena`) and the
mutants of the tests (`make mutants`, `make mutants-sample`).

To compare one with that of another commit: `python benchmarks/paired.py`.
"""

import subprocess
import sys
from pathlib import Path

import torch

BENCHMARKS = (
    "simulated_gpu",
    "weights_digest",
    "scheduler_step",
    "many_engines",
    "admission",
    "objects",
    "chunks",
    "store",
    "file_store",
    "transfer_engine",
    "handoff",
    "host_prefix",
    "conversations",
    "partial_tails",
    "serving",
    "nothing_found",
    "share_cost",
    "acceptance",
    "hostile_bytes",
    "wrong_answers",
    "rolling_restarts",
    "soak",
)
ON_A_GPU = ("device",)


def main() -> int:
    here = Path(__file__).parent
    failed = []
    for name in (*BENCHMARKS, *(ON_A_GPU if torch.cuda.is_available() else ())):
        print(f"== {name}", flush=True)
        command = [sys.executable, str(here / f"{name}.py"), *sys.argv[1:]]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
