# SPDX-License-Identifier: Apache-2.0
"""What takes long, and goes on in processes of its own, begins before the first test."""

import pytest


def begin(request: pytest.FixtureRequest, *names: str) -> None:
    """Set up those of these fixtures of the session that any test of this run asks for.

    Not where processes share the tests: each has those of all, and would begin what is another's.
    """
    if hasattr(request.config, "workerinput"):
        return
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in names:
        if name in asked:
            request.getfixturevalue(name)
