# SPDX-License-Identifier: Apache-2.0
"""A serving engine in a process of its own, for tests that kill it.

Arguments: path of its socket, its compatibility key in JSON. It prints the token of a hand-off
that is never copied, then "pending" while a lease request for it waits, and ends with its standard
input.
"""

import sys
import time
from pathlib import Path

import msgspec

from omni_connector.handoff.channel import ControlChannel
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.handoff.messages import HandshakeReply
from omni_connector.handoff.prompt import Prompt
from omni_connector.handoff.server import ControlServer
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.runtime.context import PROCESS_CONTEXT
from omni_connector.transports.base import Endpoint

compatibility = msgspec.json.decode(sys.argv[2], type=CompatibilityKey)
directory = SlotDirectory(8, PROCESS_CONTEXT, 600.0)
endpoint = Endpoint(
    transport="shm", address="somewhere", epoch=b"a" * 16, n_slots=8, slot_bytes=4096
)
server = ControlServer(
    compatibility=compatibility,
    handshake_reply=HandshakeReply(b"k" * 16, "", compatibility, ((endpoint,),)),
    directory=directory,
    clock=time.monotonic,
    pending_timeout=600.0,
    count=lambda name: None,
)


def tick() -> None:
    if server.has_pending:
        print("pending", flush=True)


handoff = directory.open(Prompt(token_ids=(1, 2, 3), num_tokens=3), [[None]])
assert handoff is not None
directory.commit(handoff)
channel = ControlChannel(
    compatibility=compatibility,
    server=server,
    listen=Path(sys.argv[1]),
    on_tick=tick,
)
print(handoff.token.hex(), flush=True)
sys.stdin.read()
channel.close()
