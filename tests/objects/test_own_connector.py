# SPDX-License-Identifier: Apache-2.0
"""A connector written from the page alone passes the suite; one that lacks a part does not."""

from pathlib import Path
from typing import Any

import pytest

from omni_connector.objects.base import OmniConnector
from omni_connector.testing.conformance import StoreConformance, objects

from ..docs.pages import block

SOURCE = block("docs/objects.md", "import hashlib").text
SUITE = block("docs/objects.md", "class TestMyConnector").text


def written(source: str = SOURCE) -> Any:
    """The suite of a connector with this source."""
    names: dict[str, Any] = {"StoreConformance": StoreConformance}
    exec(source, names)
    exec(SUITE, names)
    return names["TestMyConnector"]


class TestOfThePage(written()):  # type: ignore[misc]
    """All of the suite."""


@pytest.mark.parametrize(
    ("right", "wrong", "test"),
    [
        ("if self.consumes:", "if False:", "what_was_got_by_who_consumes_is_gone_for_everybody"),
        ("is_store = True", "is_store = False", "what_was_got_is_reaped_and_nothing_else"),
        ("is_store = True", "is_store = False", "object_outlives_its_sender_in_a_store_only"),
        ('{"status": "closed"} if self._closed else {}', "{}", "closed_connector_does_nothing"),
        ("raise ConnectorClosedError(", "raise RuntimeError(", "closed_connector_does_nothing"),
        ("raise ConnectorClosedError(", "raise TransportError(", "closing_ends_a_wait"),
        (
            "objects_of(request_id, self._stored.items())",
            "[path for path, key in self._stored.items() if request_id in key.key]",
            "cleanup_takes_all_of_a_request_and_nothing_else",
        ),
        ("key.digest.hex()", "key.key", "object_never_put_is_none"),
    ],
)
def test_the_suite_refuses_a_connector_without(
    right: str, wrong: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert right in SOURCE
    opened: list[OmniConnector] = []

    def passes(source: str, place: Path) -> None:
        place.mkdir()
        suite = written(source)()

        def connect() -> OmniConnector:
            opened.append(suite.connect(place))
            return opened[-1]

        getattr(suite, f"test_{test}")(connect)

    passes(SOURCE, tmp_path / "right")
    monkeypatch.setattr(objects, "WAIT_S", 0.1)  # for what never comes
    with pytest.raises((AssertionError, RuntimeError, OSError)):
        passes(SOURCE.replace(right, wrong), tmp_path / "wrong")
    for each in opened:
        each.close()
