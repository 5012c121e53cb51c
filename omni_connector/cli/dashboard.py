# SPDX-License-Identifier: Apache-2.0
"""`omni-connector dashboard`: files for Grafana and Prometheus, as they lie in the wheel."""

import sys
from importlib.resources import files
from typing import Final

FILES: Final = {
    "grafana": "grafana.json",
    "alerts": "alerts.yml",
    "prometheus": "prometheus.yml",
}
"""Files by the names under which the command prints them."""


def dashboard(what: str) -> int:
    """Print a file; return the exit status.

    Args:
        what: a key of `FILES`.
    """
    place = files("omni_connector.cli") / "dashboards" / FILES[what]
    sys.stdout.write(place.read_text("utf-8"))
    return 0
