# SPDX-License-Identifier: Apache-2.0
"""Runs every benchmark, each in a process of its own; arguments are passed on to all of them.

    python -m benchmarks [--quick]

To compare one with that of another commit: `python benchmarks/paired.py`.
"""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = (
    "data_plane",
    "load_beside_save",
    "parallel_copies",
    "fresh_arena",
    "weights_digest",
    "scheduler_step",
    "handoff_open",
    "scale",
    "cluster",
    "many_engines",
    "block_index",
    "eviction",
    "admission",
    "objects",
    "store",
    "file_store",
    "transfer_engine",
    "handoff",
    "short_handoffs",
    "host_prefix",
    "conversations",
    "partial_tails",
    "killed_engine",
    "timeline",
    "serving",
    "serving_prefixes",
    "acceptance",
    "weight_files",
    "hostile_bytes",
)


def main() -> int:
    here = Path(__file__).parent
    failed = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        command = [sys.executable, str(here / f"{name}.py"), *sys.argv[1:]]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
