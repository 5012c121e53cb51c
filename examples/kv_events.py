# SPDX-License-Identifier: Apache-2.0
"""Print the KV events of vLLM engines on this host: what a router subscribes to.

Start this first, then engines whose `--kv-events-config` names the same endpoint.
"""

import sys

import msgspec
import zmq

socket = zmq.Context().socket(zmq.SUB)
socket.bind(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5557")
socket.subscribe(b"")
while True:
    topic, _, batch = socket.recv_multipart()
    for event in msgspec.msgpack.decode(batch)[1]:
        words = [topic.decode() + event["type"]]
        if "block_hashes" in event:  # else all blocks were cleared
            kind = event.get("kv_cache_spec_kind") or ""
            words += [str(len(event["block_hashes"])), event["medium"] or "", kind]
        print(*words, flush=True)
