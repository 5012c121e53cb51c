# SPDX-License-Identifier: Apache-2.0
"""Damaged KV payloads by the million: each is a ValueError or a valid payload, nothing else.

    python benchmarks/fuzz_payload.py [--cases 1000000] [--seed N]

Payloads of every dtype are damaged as bytes (flipped, cut, copied about, random) and as headers
(values of other types and sizes, in fields that are there or not), and read from bytes; every
eighth is read from a tensor too. What is read is packed and read again, and must come out the
same. Prints cases a second and how many were valid; anything else stops it, with the case.
"""

import argparse
import json
import random
import resource
import struct
import time
from collections.abc import Callable
from typing import Any

import torch

from omni_connector.stage.payload import DTYPES, KVCacheTransferData

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30,
    1.0, 0.5, -0.0, 1e308, "", "x", "0", "key_cache_0", "value_cache_1", "key_cache_-1", "uint8",
    "float32", "bool", "complex128", "float", "Tensor", [], [0], [1, 1], [0, 2**62, 2**62],
    [-1, -1], [2**32, 2**32], [1] * 70, {}, {"a": 1}, [[1]],
)  # fmt: skip


def seeds() -> list[bytes]:
    """Payloads to damage: all dtypes, no layers, absent layers, shapes down to none."""
    payloads = [KVCacheTransferData("", {}, [], {})]
    for number, dtype in enumerate(DTYPES.values()):
        keys = [torch.ones(2, 1, 3).to(dtype), None, torch.ones(()).to(dtype)]
        values = [torch.ones(0, 4).to(dtype), torch.ones(5).to(dtype)]
        blocks = {"key_cache": keys, "value_cache": values[: number % 3]}
        metadata = {"block_size": 16, "seq_len": 2, "dtype": "auto", "extra": [1.5, None, {"ä": 1}]}
        payloads.append(KVCacheTransferData(f"req/{number}", blocks, [3, 1, 2], metadata))
    return [payload.to_bytes() for payload in payloads]


def flip(packed: bytearray, rng: random.Random) -> bytearray:
    """Flip some bits."""
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
    return packed


def cut(packed: bytearray, rng: random.Random) -> bytearray:
    """Take bytes out, at an end or between."""
    start, end = sorted(rng.randrange(len(packed) + 1) for _ in range(2))
    return rng.choice((packed[:start], packed[end:], packed[:start] + packed[end:]))


def copy(packed: bytearray, rng: random.Random) -> bytearray:
    """Put bytes of the payload in another place."""
    start, end, place = (rng.randrange(len(packed) + 1) for _ in range(3))
    packed[place:place] = packed[start : min(end, start + 40)]
    return packed


def noise(packed: bytearray, rng: random.Random) -> bytearray:
    """Random bytes: in places, at the start, or all."""
    place = rng.randrange(len(packed))
    random_bytes = rng.randbytes(rng.randrange(1, 12))
    if rng.random() < 0.2:
        return bytearray(random_bytes)
    packed[place : place + len(random_bytes)] = random_bytes
    return packed


def header(packed: bytearray, rng: random.Random) -> bytearray:
    """Change values of the header, which stays JSON of the right length."""
    (length,) = struct.unpack(">I", packed[:4])
    fields = json.loads(packed[4 : 4 + length])
    for _ in range(rng.choice((1, 1, 2, 3))):
        target = fields
        if fields.get("td") and isinstance(fields["td"], list) and rng.random() < 0.7:
            target = rng.choice(fields["td"])
        if not isinstance(target, dict):
            continue
        name = rng.choice([*target, "x", "d", "zz"])
        action = rng.random()
        if action < 0.1:
            target.pop(name, None)
        elif action < 0.3 and isinstance(target.get(name), int):
            target[name] += rng.choice((-1, 1, 4, 2**32, 2**63))
        elif action < 0.4 and isinstance(target.get(name), list):
            target[name] = target[name] * 2
        else:
            target[name] = rng.choice(ODD)
    text = json.dumps(fields, separators=(",", ":")).encode()
    return bytearray(struct.pack(">I", len(text)) + text + packed[4 + length :])


DAMAGE: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    flip, cut, copy, noise, header, header, header,
)  # fmt: skip


def is_valid(packed: bytes, *, as_tensor: bool) -> bool:
    """Whether a payload can be read; one that can is checked."""
    try:
        found = KVCacheTransferData.from_bytes(packed)
    except ValueError:
        found = None
    if as_tensor and packed:
        tensor = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        try:
            copies = KVCacheTransferData.from_bytes_device(tensor)
        except ValueError:
            copies = None
        if (copies is None) != (found is None):
            raise AssertionError("read from bytes, and not from a tensor, or the other way")
    if found is None:
        return False
    again = KVCacheTransferData(**found).to_bytes()
    if KVCacheTransferData(**KVCacheTransferData.from_bytes(again)).to_bytes() != again:
        raise AssertionError("packed again it reads otherwise")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(options.seed)
    originals = seeds()
    for original in originals:
        assert is_valid(original, as_tensor=True)
    valid, start = 0, time.perf_counter()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(options.cases):
        packed = bytes(rng.choice(DAMAGE)(bytearray(rng.choice(originals)), rng))
        try:
            valid += is_valid(packed, as_tensor=number % 8 == 0)
        except BaseException:
            print(f"case {number} of seed {options.seed}: {packed.hex()}")
            raise
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    print(
        f"{options.cases} cases in {seconds:.1f} s, {options.cases / seconds:.0f} a second: "
        f"{valid} valid, {options.cases - valid} refused; memory grew by {grown / 1024:.0f} MiB"
    )


if __name__ == "__main__":
    main()
