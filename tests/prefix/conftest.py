# SPDX-License-Identifier: Apache-2.0
import pytest

from ..patience import lengthen

DEADLINES = (
    "omni_connector.prefix.attaching._ANSWER_S",
    "omni_connector.prefix.neighbours._ANSWER_S",
    "omni_connector.prefix.neighbours._CONNECT_S",
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for each other, and for their ranks, as long as a busy machine takes."""
    lengthen(monkeypatch, DEADLINES)
