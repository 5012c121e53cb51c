# SPDX-License-Identifier: Apache-2.0
"""Tools for testing what is built on, or beside, this package.

`TransportConformance`, the suite that every transport has to pass, `ObjectConformance`, that of
connectors that pass objects, and `StoreConformance`, that of stores, need pytest and Hypothesis and
are imported on first use.
"""

from typing import TYPE_CHECKING

from omni_connector.testing.clock import FakeClock
from omni_connector.testing.faults import FaultyTransport

if TYPE_CHECKING:
    from omni_connector.testing.conformance import (
        ObjectConformance,
        StoreConformance,
        TransportConformance,
    )

_SUITES = ("ObjectConformance", "StoreConformance", "TransportConformance")

__all__ = [
    "FakeClock",
    "FaultyTransport",
    "ObjectConformance",
    "StoreConformance",
    "TransportConformance",
]


def __getattr__(name: str) -> object:
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from omni_connector.testing import conformance

    return getattr(conformance, name)
