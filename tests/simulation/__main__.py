# SPDX-License-Identifier: Apache-2.0
"""Starts the command line; see `command`."""

import os
import sys

from tests.simulation import HASHES_VARIABLE


def with_the_same_hashes() -> None:
    """Start anew where strings are hashed differently each time: vLLM goes through sets of request
    ids, and in which order would not be the seed's to draw."""
    if os.environ.get(HASHES_VARIABLE) != "0":
        os.environ[HASHES_VARIABLE] = "0"
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execv(sys.executable, command)


if __name__ == "__main__":
    with_the_same_hashes()
    from tests.simulation.command import main

    sys.exit(main())
