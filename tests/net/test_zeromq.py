# SPDX-License-Identifier: Apache-2.0
"""Contexts of ZeroMQ, and descriptors."""

import contextlib
import os
import traceback
from pathlib import Path

import pytest
import zmq

from omni_connector.errors import TransportError
from omni_connector.net.links import ZmqSockets

from ..descriptors import spare

ENOUGH = 12


def _use_a_context(count: int, address: Path) -> None:
    with spare(count):
        if not count:
            with pytest.raises(TransportError, match="raise `ulimit -n`"):
                ZmqSockets()
            return
        try:
            sockets = ZmqSockets()
        except TransportError:
            assert count < ENOUGH
            return
    with spare(count), contextlib.suppress(zmq.ZMQError):
        sockets.link(str(address), None).close()
    sockets.close()


@pytest.mark.parametrize("count", range(ENOUGH + 1))
def test_without_descriptors_a_context_is_an_error_and_not_the_end(count: int, place: Path) -> None:
    child = os.fork()  # as libzmq would end the whole process
    if not child:
        code = 1
        try:
            _use_a_context(count, place / "nobody.sock")
            code = 0
        except BaseException:  # noqa: BLE001 - the child ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
