# SPDX-License-Identifier: Apache-2.0
import pytest

from omni_connector.testing import FakeClock


def test_clock_moves_only_when_told() -> None:
    clock = FakeClock(5.0)
    assert (clock(), clock(), clock.ns()) == (5.0, 5.0, 5_000_000_000)
    clock.advance(1.5)
    clock.sleep(0.5)
    assert clock() == 7.0


def test_clock_never_goes_back() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
    assert clock() == 1000.0
