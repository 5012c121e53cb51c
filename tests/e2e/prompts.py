# SPDX-License-Identifier: Apache-2.0
"""Prompts, and what keeps them apart."""

import random
import uuid

MAX_TOKENS = 8


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt that shares no block with one of another seed."""
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(length)]


def new_salt() -> str:
    """A `cache_salt` that makes any prompt unknown to the caches of all engines."""
    return uuid.uuid4().hex
