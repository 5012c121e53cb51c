# SPDX-License-Identifier: Apache-2.0
"""Starts the command line; see `command`."""

import os
import sys

_HASHES = "PYTHONHASHSEED"  # a seed is the same schedule only with the same hashes

if __name__ == "__main__":
    if os.environ.get(_HASHES) != "0":
        os.environ[_HASHES] = "0"
        command = [sys.executable, "-m", "benchmarks.mutants_sample", *sys.argv[1:]]
        os.execv(sys.executable, command)
    from benchmarks.mutants_sample.command import main

    sys.exit(main())
