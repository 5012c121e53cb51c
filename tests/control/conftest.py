# SPDX-License-Identifier: Apache-2.0
"""What the tests of the control room share: a clock, a fingerprint, prompts."""

from collections.abc import Callable

import pytest

from omni_connector.control.messages import Fingerprint, Welcome
from omni_connector.control.prompt import Prompt
from omni_connector.transports.base import Endpoint

from .shapes import group_shape


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fingerprint() -> Fingerprint:
    return Fingerprint(
        model="m@1",
        dtype="bfloat16",
        kv_dtype="auto",
        integrity="full",
        kv_heads=2,
        ranks=1,
        groups=(
            group_shape(),
            group_shape(kind="sliding_window", keeps="window", span=40, layers="odd"),
        ),
    )


@pytest.fixture
def welcome(fingerprint: Fingerprint) -> Welcome:
    endpoint = Endpoint(
        transport="shm", address="somewhere", epoch=b"a" * 16, n_slots=8, slot_bytes=4096
    )
    return Welcome(b"e" * 16, "sha256:16:seed", fingerprint, (endpoint,))


@pytest.fixture
def make_prompt() -> Callable[..., Prompt]:
    def make(length: int = 40, block: int = 16, **changes: object) -> Prompt:
        values: dict[str, object] = {
            "token_ids": list(range(100, 100 + length)),
            "num_tokens": length,
            "block_hashes": [bytes([i]) * 32 for i in range(length // block)],
            "hash_block_size": block,
        }
        return Prompt(**(values | changes))  # type: ignore[arg-type]

    return make
