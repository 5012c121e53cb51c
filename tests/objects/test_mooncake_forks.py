# SPDX-License-Identifier: Apache-2.0
"""Processes that are forked from one that has put objects: these stay its own."""

import os

import pytest

from omni_connector.objects.mooncake import MooncakeTransferEngineConnector

pytest.importorskip("mooncake.engine", exc_type=ImportError)

pytestmark = pytest.mark.usefixtures("reused_engines")


def test_a_child_leaves_the_objects_of_its_parent() -> None:
    with (
        MooncakeTransferEngineConnector(zmq_port=0) as sender,
        MooncakeTransferEngineConnector(zmq_port=0, role="receiver") as receiver,
    ):
        assert sender.put("0", "1", "req-1", b"x" * 5000)[0]
        metadata = sender.put("0", "1", "req-1-again", b"y" * 5000)[2]
        child = os.fork()
        if not child:
            code = 1
            try:
                sender.cleanup("req-1")
                code = int(sender.put("0", "1", "another", b"z")[0])
                sender.close()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        for key, content in (("req-1", b"x" * 5000), ("req-1-again", b"y" * 5000)):
            assert receiver.get("0", "1", key, metadata) == (content, 5000)
