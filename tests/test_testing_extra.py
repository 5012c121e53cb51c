# SPDX-License-Identifier: Apache-2.0
"""Whoever lacks pytest or Hypothesis is told which extra brings them."""

import sys

import pytest

from omni_connector import testing


@pytest.mark.parametrize("missing", ["hypothesis", "pytest"])
def test_a_suite_names_the_extra_that_it_needs(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("omni_connector.testing.conf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(testing, "conformance", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {missing}.*omni-connector\[testing\]"):
        testing.TransportConformance  # noqa: B018
