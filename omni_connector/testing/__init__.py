# SPDX-License-Identifier: Apache-2.0
"""Tools for testing what is built on, or beside, this package.

`TransportConformance`, the suite that every transport has to pass, needs pytest and Hypothesis
and is imported on first use.
"""

from typing import TYPE_CHECKING

from omni_connector.testing.clock import FakeClock
from omni_connector.testing.faults import FaultyConnector

if TYPE_CHECKING:
    from omni_connector.testing.conformance import TransportConformance

__all__ = ["FakeClock", "FaultyConnector", "TransportConformance"]


def __getattr__(name: str) -> object:
    if name != "TransportConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from omni_connector.testing.conformance import TransportConformance

    return TransportConformance
