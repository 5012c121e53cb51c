# SPDX-License-Identifier: Apache-2.0
"""A stage in a process of its own: does what it reads from stdin, a line of JSON each.

`{"send": id, "seed": n}` sends a request of `sequence(seed=n)`; `{"receive": id, "timeout": s}`
receives one. Both are answered with a line of JSON.
"""

import json
import sys
import time

import pytest

from ..patience import lengthen_objects
from .caches import sequence
from .connectors import send
from .shared import shared_manager


def main() -> None:
    lengthen_objects(pytest.MonkeyPatch())
    print(json.dumps("ready"), flush=True)
    with shared_manager() as kv:
        for line in sys.stdin:
            order = json.loads(line)
            if "send" in order:
                answer = send(kv, sequence(seed=order["seed"]), order["send"])
            else:
                kv.config.recv_timeout = order["timeout"]
                start = time.monotonic()
                data, _ = kv.receive_kv_cache_for_request(order["receive"])
                answer = {
                    "seconds": time.monotonic() - start,
                    "key": data and data["layer_blocks"]["key_cache"][0].tolist(),
                }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
