# SPDX-License-Identifier: Apache-2.0
"""What both halves take from the process and the host around them.

The simulation gives its own: a clock that it moves, randomness from its seed, and turns and
messages in the order that it draws.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omni_connector.config import OmniConfig, StoreSettings
from omni_connector.kv import BlockCopier, CanonicalKVCaches, SlotLayout, make_copier
from omni_connector.net.links import Sockets, ZmqSockets
from omni_connector.prefix.block_store import BlockStore, MooncakeBlockStore
from omni_connector.transports.choice import Transports, make_transports
from omni_connector.turns import StartTurns, TurnThread


@dataclass(frozen=True)
class Surroundings:
    """Clock, randomness, threads, and the ways to other processes.

    Attributes:
        clock: seconds, monotonic.
        randbytes: so many bytes that nobody can guess.
        start: starts a thread.
        sockets: opens those of the control channel.
        transports: opens those that a configuration asks for.
        block_store: opens a client of the shared store, which lends so many bytes of memory.
        copier: makes what copies between KV blocks and slots.
        populate: whether the arena's memory is allocated ahead of its use, in a thread.
    """

    clock: Callable[[], float] = time.monotonic
    randbytes: Callable[[int], bytes] = secrets.token_bytes
    start: StartTurns = TurnThread
    sockets: Callable[[], Sockets] = ZmqSockets
    transports: Callable[[OmniConfig], Transports] = make_transports
    block_store: Callable[[StoreSettings, int], BlockStore] = MooncakeBlockStore
    copier: Callable[[CanonicalKVCaches, SlotLayout], BlockCopier] = make_copier
    populate: bool = True


SURROUNDINGS: Final = Surroundings()
"""Those of an engine in production."""
