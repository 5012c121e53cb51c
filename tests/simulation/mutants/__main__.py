# SPDX-License-Identifier: Apache-2.0
"""Starts the command line; see `command`."""

import sys

from tests.simulation.mutants.command import main

if __name__ == "__main__":
    sys.exit(main())
