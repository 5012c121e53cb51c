# SPDX-License-Identifier: Apache-2.0
"""Tools for testing what is built on, or beside, this package.

`omni_connector.testing.conformance` has the suite that every transport has to pass; it is
imported by itself because it needs pytest and Hypothesis.
"""

from omni_connector.testing.clock import FakeClock
from omni_connector.testing.faults import FaultyConnector

__all__ = ["FakeClock", "FaultyConnector"]
