# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one that has put objects: these stay its own."""

import os

import pytest

from omni_connector.errors import TransportError
from omni_connector.transports.mooncake import MooncakeConnector

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("reused_engines")


def test_a_child_leaves_the_objects_of_its_parent() -> None:
    with MooncakeConnector() as sender, MooncakeConnector() as receiver:
        assert sender.put("0", "1", "req-1", b"x" * 5000)[0]
        metadata = sender.put("0", "1", "req-1-again", b"y" * 5000)[2]
        child = os.fork()
        if not child:
            code = 1
            try:
                sender.cleanup("req-1")
                try:
                    sender._objects.store(None, [])  # type: ignore[arg-type]
                except TransportError as error:
                    code = 0 if "forked" in str(error) else 2
                sender._objects.close()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        for key, content in (("req-1", b"x" * 5000), ("req-1-again", b"y" * 5000)):
            assert receiver.get("0", "1", key, metadata) == (content, 5000)
