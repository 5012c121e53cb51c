# SPDX-License-Identifier: Apache-2.0
"""`python -m omni_connector` is the command `omni-connector`."""

import sys

from omni_connector.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
