# SPDX-License-Identifier: Apache-2.0
"""What the parts of the conformance suite have in common: the fixtures."""

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from omni_connector.arena.arena import Arena
from omni_connector.objects.base import OmniConnector
from omni_connector.transports.base import ArenaTransport, Endpoint, RemoteArena

N_SLOTS = 6
SLOT_BYTES = 8192
ATTACH_S = 20.0

Open = Callable[[], OmniConnector]
OpenTransport = Callable[[], ArenaTransport]
Connector = TypeVar("Connector", OmniConnector, ArenaTransport)


class Conformance(ABC, Generic[Connector]):
    """The connectors of a test."""

    @abstractmethod
    def connect(self, place: Path) -> Connector:
        """A new one; those made for the same place, a private folder, find each other."""

    @pytest.fixture
    def place(self) -> Iterator[Path]:
        """A private folder whose path is short enough for sockets."""
        folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
        yield folder
        shutil.rmtree(folder)

    @pytest.fixture
    def open_connector(self, place: Path) -> Iterator[Callable[[], Connector]]:
        """Makes connectors, and closes them at the end."""
        with ExitStack() as stack:
            yield lambda: stack.enter_context(self.connect(place))


class ObjectFixtures(Conformance[OmniConnector]):
    """How much the connectors of a test have room for.

    Attributes:
        object_slot_bytes: granularity in which objects take room.
        object_slots: how many of those a connector made by `connect` has; None where a store
            behind it sets no limit that a test could reach.
        scattered_bytes: bytes that an object takes beyond its own where its room is scattered.
    """

    object_slot_bytes: int
    object_slots: int | None
    scattered_bytes: int = 0


class ArenaFixtures(Conformance[ArenaTransport]):
    """The arenas of a test of a transport."""

    @pytest.fixture
    def arena(self) -> Iterator[Arena]:
        """An arena of this process."""
        with Arena.create(N_SLOTS, SLOT_BYTES) as arena:
            yield arena

    @pytest.fixture
    def endpoint(self, open_connector: OpenTransport, arena: Arena) -> Endpoint:
        """Where that arena is exported."""
        return open_connector().export(arena, "engine-0/rank-0")

    @pytest.fixture
    def remote(self, open_connector: OpenTransport, endpoint: Endpoint) -> Iterator[RemoteArena]:
        """That arena as a peer has it."""
        with open_connector().attach(endpoint, timeout=ATTACH_S) as remote:
            yield remote
