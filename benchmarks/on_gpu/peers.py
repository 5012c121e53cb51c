# SPDX-License-Identifier: Apache-2.0
"""Device memory of another process, by a descriptor that a Unix socket passes: read before and
after that process was killed.

    python -m on_gpu.peers SOCKET DEVICE BYTES

is the other process.
"""

import socket
import statistics
import subprocess
import sys
import time
from importlib import import_module
from typing import Final

import torch

from on_gpu.accelerator import MIB, Accelerator, Report, Sizes, gb_s

_ANSWER_S: Final = 30.0


def measure(device: Accelerator, sizes: Sizes, report: Report) -> None:
    """Attach the memory, pull it, kill its owner, pull it again, and let go of it."""
    nbytes = sizes.shared
    mine, theirs = socket.socketpair()
    mine.settimeout(_ANSWER_S)
    made = f"{type(device).__module__}:{type(device).__qualname__}"
    command = [sys.executable, "-m", "on_gpu.peers", str(theirs.fileno()), made, str(nbytes)]
    owner = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        _, descriptors, _, _ = socket.recv_fds(mine, 1, 1)
        if not descriptors:
            raise RuntimeError("the other process has sent no descriptor")
        target = torch.zeros(nbytes, dtype=torch.int8, device=device.device)
        free = device.free()
        began = time.perf_counter()
        memory, let_go = device.attach(descriptors[0], nbytes)
        report("attach", ms=round((time.perf_counter() - began) * 1e3, 2))
        wanted = content(nbytes, device.device)
        report("pull", owner="alive", **_pull(device, memory, target, wanted, sizes.repeats))
        target.zero_()
        # It is killed while pulls are under way.
        for number in range(8):
            target.copy_(memory)
            if number == 4:
                owner.kill()
        owner.wait(_ANSWER_S)
        device.synchronize()
        report("killed midway", same_bytes=bool(target.equal(wanted)))
        report("pull", owner="killed", **_pull(device, memory, target, wanted, sizes.repeats))
        kept = device.free()
        del memory
        let_go()
        device.synchronize()
        freed = round((device.free() - kept) / MIB, 1)
        report("let go", mib_freed=freed, mib_taken=round((free - device.free()) / MIB, 1))
    finally:
        owner.kill()
        owner.wait()
        mine.close()


def content(nbytes: int, device: str) -> torch.Tensor:
    """What the other process writes."""
    draw = torch.Generator(device).manual_seed(9)
    return torch.randint(-128, 128, (nbytes,), dtype=torch.int8, device=device, generator=draw)


def _pull(
    device: Accelerator,
    memory: torch.Tensor,
    target: torch.Tensor,
    wanted: torch.Tensor,
    repeats: int,
) -> dict[str, object]:
    target.zero_()
    seconds = []
    for _ in range(repeats + 1):
        device.synchronize()
        began = time.perf_counter()
        target.copy_(memory)
        device.synchronize()
        seconds.append(time.perf_counter() - began)
    rate = gb_s(memory.numel(), statistics.median(seconds[1:]))
    return {"gb_s": rate, "same_bytes": bool(target.equal(wanted))}


def own(descriptor: int, made: str, nbytes: int) -> None:
    """Make the memory, send its descriptor, and wait to be killed."""
    place, _, name = made.partition(":")
    device: Accelerator = getattr(import_module(place), name)()
    memory, shared = device.shareable(nbytes)
    memory.copy_(content(nbytes, device.device))
    device.synchronize()
    with socket.socket(fileno=descriptor) as theirs:
        socket.send_fds(theirs, [b"x"], [shared])
        theirs.recv(1)


if __name__ == "__main__":
    own(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
