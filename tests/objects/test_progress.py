# SPDX-License-Identifier: Apache-2.0
"""The progress of large objects in the log."""

import logging

import numpy as np
import pytest

from omni_connector.objects import progress
from omni_connector.objects.progress import STEPS, progress_of
from omni_connector.objects.shm import SharedMemoryConnector

logger = logging.getLogger("omni_connector.objects.test")


def test_each_eighth_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    total = progress.LARGE_BYTES
    now = iter(range(1000))
    copied = progress_of(logger, "storing", "object 7", total, clock=lambda: float(next(now)))
    for _ in range(64):
        copied(total // 64)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == STEPS
    assert said[0] == "storing object 7: 8 of 64 MiB after 1.000 s"
    assert said[-1] == "storing object 7: 64 of 64 MiB after 8.000 s"


@pytest.mark.parametrize(
    ("level", "total"), [(logging.INFO, progress.LARGE_BYTES), (logging.DEBUG, 1 << 20)]
)
def test_nobody_is_told_of_small_objects_or_without_debug(
    caplog: pytest.LogCaptureFixture, level: int, total: int
) -> None:
    caplog.set_level(level)
    copied = progress_of(logger, "storing", "object 7", total)
    copied(total)
    assert caplog.records == []


def test_storing_and_reading_are_both_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path
) -> None:
    monkeypatch.setattr(progress, "LARGE_BYTES", 1 << 20)
    caplog.set_level(logging.DEBUG, logger="omni_connector.objects")
    with SharedMemoryConnector(folder=tmp_path, object_gib=1 / 64) as connector:
        assert connector.put("0", "1", "large", np.zeros(8 << 20, np.uint8))[0]
        assert connector.get("0", "1", "large") is not None
    said = [record.getMessage() for record in caplog.records]
    assert any("storing 'large' from stage 0 to 1: 8 of 8 MiB" in each for each in said)
    assert any("reading object" in each and "8 of 8 MiB" in each for each in said)
