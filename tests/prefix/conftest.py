# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator

import pytest

from ..patience import lengthen

DEADLINES = (
    "omni_connector.prefix.attaching._ANSWER_S",
    "omni_connector.prefix.neighbours._ANSWER_S",
    "omni_connector.prefix.neighbours._CONNECT_S",
)


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Engines wait for each other, and for their ranks, as long as a busy machine takes; those that
    a module's tests share, too."""
    with pytest.MonkeyPatch.context() as patch:
        lengthen(patch, DEADLINES)
        yield
