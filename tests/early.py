# SPDX-License-Identifier: Apache-2.0
"""Fixtures that take long, in processes of their own, begin before the first test."""

import pytest


def begin(request: pytest.FixtureRequest, *names: str) -> None:
    """Set up each of these fixtures of the session that a test of this run asks for.

    Nothing is set up if processes share the tests: each process sees all tests, and would set up
    fixtures that only another one needs.
    """
    if hasattr(request.config, "workerinput"):
        return
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in names:
        if name in asked:
            request.getfixturevalue(name)
