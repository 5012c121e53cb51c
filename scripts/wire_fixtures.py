#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what this version of the package sends, shares and stores, for the tests of later ones.

    python scripts/wire_fixtures.py           writes tests/fixtures/<version>/
    python scripts/wire_fixtures.py --check   fails where the files there differ from them

Each release has a folder, which stays. `tests/upgrade` reads all of them: a later version has to
understand a file, or to refuse it with one line that names both versions. Nothing in a file is
drawn at random, so that the same version always writes the same bytes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from omni_connector import __version__
from omni_connector.arena.block_index import header_bytes
from omni_connector.arena.format import ArenaGeometry
from omni_connector.handoff.messages import (
    Handshake,
    HandshakeReply,
    LeaseDenied,
    LeaseGranted,
    LeaseRequest,
    Refused,
    Release,
    encode,
)
from omni_connector.handoff.params import handoff_answer, no_handoff_answer
from omni_connector.identity.epochs import WeightsName
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.net.peers import HostPort
from omni_connector.net.status import EngineStatus
from omni_connector.objects.exchange import Read
from omni_connector.objects.manifest import Version
from omni_connector.objects.object_store import StoredObject
from omni_connector.objects.peer import Find, Found, Missing
from omni_connector.prefix.attaching import AskAttached, Attached
from omni_connector.prefix.neighbours import AskIndex, GiveIndex, Hits
from omni_connector.stores.shared_blocks import add_trailer
from omni_connector.transports.base import Endpoint
from omni_connector.transports.shm import Attach, AttachReply

FOLDER: Final = Path(__file__).parents[1] / "tests" / "fixtures"
EPOCH: Final = b"e" * 16
TOKEN: Final = b"t" * 16
DIGEST: Final = b"d" * 32
WEIGHTS: Final = WeightsName("0f" * 16, "1e" * 16, "2d" * 16, changed=True)
STORE_KEY: Final = "default/0123/0.0/abcd"
SLOTS: Final = 8
SLOT_BYTES: Final = 4096


def compatibility() -> CompatibilityKey:
    """A key with all fields."""
    return CompatibilityKey(
        model="m@1",
        dtype="bfloat16",
        kv_dtype="auto",
        integrity="full",
        kv_heads=2,
        ranks=1,
        groups=(
            GroupShape(
                kind="full_attention",
                block_size=16,
                attention_type="all",
                window=0,
                layers="0123456789abcdef",
                replicated=False,
                attention="FLASH_ATTN",
                pages=("BLHNC",),
                names=("model.layers.0.self_attn.attn",),
            ),
        ),
        quantization="fp8 1",
        overrides="o",
        scales="s",
        numerics="n",
        weights="w",
        weight_files="f",
        stripes=1,
        shards=1,
    )


def endpoint() -> Endpoint:
    """Where an arena is."""
    return Endpoint(
        transport="shm",
        address="/run/user/1/omni-connector/default/0/a-0.sock",
        epoch=EPOCH,
        n_slots=SLOTS,
        slot_bytes=SLOT_BYTES,
    )


def store_entry() -> bytes:
    """An entry of a store: a block of 64 bytes, and its trailer."""
    row = np.zeros(96, np.uint8)
    row[:64] = np.arange(64, dtype=np.uint8)
    return row[: add_trailer(row, 64, 1234, STORE_KEY)].tobytes()


def manifest() -> bytes:
    """The manifest of an object of two fragments."""
    return Version(5 << 20, 3 << 20, b"v" * 16, DIGEST, 77).encode()


def status() -> bytes:
    """A status file."""
    return msgspec.json.encode(
        EngineStatus(
            engine_id="engine",
            role="kv_both",
            model="m@1",
            vllm="0.32.0",
            ranks=1,
            arena_bytes=SLOTS * SLOT_BYTES,
            counts={"handoffs_sent": 1},
            pid=1,
            omni_connector=__version__,
            started=1.0,
            written=2.0,
        )
    )


def _params() -> bytes:
    answer = handoff_answer(
        engine_id="engine",
        request_id="request",
        epoch=EPOCH,
        token=TOKEN,
        num_tokens=40,
        tokens_ahead=1,
        tp_size=1,
        address=HostPort("10.0.0.1", 14000),
    )
    return json.dumps(answer, sort_keys=True).encode()


def _packed(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


FILES: Final[dict[str, Callable[[], bytes]]] = {
    "handoff.request.handshake": lambda: encode(Handshake.of(compatibility())),
    "handoff.request.lease": lambda: encode(LeaseRequest(3, TOKEN, 40, DIGEST, "blocks")),
    "handoff.request.lease-weights": lambda: encode(
        LeaseRequest(3, TOKEN, 40, DIGEST, "blocks", WEIGHTS)
    ),
    "handoff.request.release": lambda: encode(Release(TOKEN, 3)),
    "handoff.reply.handshake": lambda: encode(
        HandshakeReply(EPOCH, "sha256:16:seed", compatibility(), ((endpoint(),),))
    ),
    "handoff.reply.refused": lambda: encode(Refused("dtype", "a", "b")),
    "handoff.reply.granted": lambda: encode(LeaseGranted(3, 40, (0,), (((0, 1), (5, 2)),), 12.5)),
    "handoff.reply.granted-weights": lambda: encode(
        LeaseGranted(3, 40, (0,), (((0, 1), (5, 2)),), 12.5, WEIGHTS)
    ),
    "handoff.reply.denied": lambda: encode(LeaseDenied(3, "unknown_token")),
    "params.handoff": _params,
    "params.none": lambda: json.dumps(no_handoff_answer("arena_full"), sort_keys=True).encode(),
    "shm.question.attach": lambda: _packed(Attach(EPOCH)),
    "shm.answer.attached": lambda: _packed(AttachReply(EPOCH, SLOTS, SLOT_BYTES)),
    "shm.answer.refusal": lambda: _packed(Refusal("no", package=PACKAGE)),
    "index.question.ask": lambda: _packed(AskIndex()),
    "index.question.hits": lambda: _packed(Hits(b"\0" * 8, b"\1" * 8)),
    "index.answer.give": lambda: _packed(GiveIndex(TOKEN, EPOCH, SLOTS, ((endpoint(),),))),
    "rank.question.attached": lambda: _packed(AskAttached((endpoint(),))),
    "rank.answer.attached": lambda: _packed(Attached(True)),
    "objects.question.find": lambda: _packed(Find(DIGEST)),
    "objects.question.read": lambda: _packed(Read(EPOCH, DIGEST, 7)),
    "objects.answer.found": lambda: _packed(
        Found(DIGEST, endpoint(), StoredObject(3, 7, ((0, 2),), 5000))
    ),
    "objects.answer.missing": lambda: _packed(Missing(DIGEST)),
    "arena.superblock": lambda: ArenaGeometry(SLOTS, SLOT_BYTES).superblock(EPOCH),
    "index.header": lambda: header_bytes(SLOTS, EPOCH),
    "store.entry": store_entry,
    "object.manifest": manifest,
    "status": status,
}
"""By the name of a file: what makes its bytes."""


def main() -> int:
    """Write or check the files of this version; 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    folder = FOLDER / __version__
    different = []
    for name, make in FILES.items():
        path = folder / f"{name}.bin"
        if check:
            if not path.exists() or path.read_bytes() != make():
                different.append(name)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make())
    for name in different:
        print(f"{folder / name}.bin is not what this version writes")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
