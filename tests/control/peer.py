# SPDX-License-Identifier: Apache-2.0
"""A serving engine in a process of its own, for tests that kill it.

Arguments: path of its socket, its fingerprint in JSON. It prints the token of a hand-off that
is never copied, then "parked" while a claim of it waits, and ends with its standard input.
"""

import json
import sys
import time
from pathlib import Path

import msgspec

from omni_connector.control.channel import ControlChannel
from omni_connector.control.directory import SlotDirectory
from omni_connector.control.messages import Fingerprint, Welcome
from omni_connector.control.prompt import Prompt
from omni_connector.control.server import ControlServer

fingerprint = msgspec.json.decode(sys.argv[2], type=Fingerprint)
directory = SlotDirectory(8, time.monotonic, 600.0)
server = ControlServer(
    fingerprint=fingerprint,
    welcome=Welcome(b"k" * 16, "", fingerprint, ()),
    directory=directory,
    clock=time.monotonic,
    patience=600.0,
    count=lambda name: None,
)


def tick() -> None:
    if server.has_parked:
        print("parked", flush=True)


handoff = directory.open(Prompt(token_ids=(1, 2, 3), num_tokens=3), [[None]])
assert handoff is not None
directory.seal(handoff)
channel = ControlChannel(
    fingerprint=fingerprint, server=server, listen=Path(sys.argv[1]), on_tick=tick
)
print(json.dumps(handoff.token.hex()), flush=True)
sys.stdin.read()
channel.close()
