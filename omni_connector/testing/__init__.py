# SPDX-License-Identifier: Apache-2.0
"""Tools for testing what is built on, or beside, this package.

`TransportConformance`, the suite that every transport has to pass, `ObjectConformance`, that of
connectors that pass objects, and `StoreConformance`, that of stores, need pytest and Hypothesis
(`pip install 'omni-connector[testing]'`) and are imported on first use.
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
    try:
        from omni_connector.testing import conformance
    except ModuleNotFoundError as error:
        if error.name not in ("hypothesis", "pytest"):
            raise
        raise ModuleNotFoundError(
            f"{name} needs {error.name}: pip install 'omni-connector[testing]'", name=error.name
        ) from error

    return getattr(conformance, name)
