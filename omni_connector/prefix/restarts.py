# SPDX-License-Identifier: Apache-2.0
"""What an engine has kept, over a restart of its service: systemd keeps the descriptors meanwhile.

Where another engine of the host shares, what an engine has kept outlives it as an orphan there (see
`neighbours`). Where none does, systemd can keep it, if the unit of the service has
`FileDescriptorStoreMax`: each rank leaves its arena there, and the scheduler half its index, with a
label that says what belongs together.

systemd passes them to the main process of the next start, which is vLLM's API server and has no
model. So that process stands in for the engine that has ended: at a socket in the runtime folder
it gives index and arenas, as the engine did. The successor meets it as it meets any neighbour, and
maps them. Then the stand-in goes, so that they are an orphan like others, for `orphan_s` seconds.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from omni_connector.arena.arena import Arena, memfd
from omni_connector.errors import OmniError, ProtocolError
from omni_connector.net import runtime, service_manager
from omni_connector.net.forks import forget_in_child
from omni_connector.net.packets import PACKAGE, Refusal
from omni_connector.net.unix import Listener
from omni_connector.prefix.neighbours import (
    INDEX_KIND,
    AskIndex,
    AskOrphan,
    GiveIndex,
    Hits,
    memory_is_short,
)
from omni_connector.runtime.context import PROCESS_CONTEXT, EngineContext
from omni_connector.transports import Endpoint
from omni_connector.transports.shm import Attach, AttachReply, SharedMemoryTransport

logger = logging.getLogger("vllm.omni_connector.sharing")

PREFIX: Final = "omni-kv-"
"""Names of descriptors in systemd's store begin with this."""

WAIT_S: Final = 1800.0
"""Seconds for which a stand-in waits until an engine has attached the arenas. Loading a large model
takes most of it."""

STAY_S: Final = 5.0
"""Seconds for which a stand-in stays after that, for the scheduler half to hear it of its ranks,
which it asks at least once a second."""

_NOT_LEFT: Final = "What this engine keeps does not outlive a restart of its service: %s"

_TURN_S: Final = 1.0
_CLOSE_S: Final = 6.0  # the listener's thread is waited for, too
_MAX_LABEL_BYTES: Final = 16 << 20  # as many endpoints as `GiveIndex` can have
_QUESTIONS: Final = msgspec.msgpack.Decoder(AskIndex | AskOrphan | Hits | Attach)


class Label(Struct, frozen=True, tag="label"):
    """Says which of the descriptors in the store belong together.

    Attributes:
        namespace: of the engine.
        gives: what the engine answered to those who asked for its index.
    """

    namespace: Annotated[str, Meta(max_length=4096)]
    gives: GiveIndex


_LABELS: Final = msgspec.msgpack.Decoder(Label)


def leave_arena(environ: Mapping[str, str], arena: Arena) -> None:
    """Have systemd keep an arena, if it keeps anything for this service."""
    if service_manager.keeps_descriptors(environ):
        _leave(environ, _arena_name(arena.epoch), arena.fd)


def leave_index(environ: Mapping[str, str], label: Label, index_fd: int) -> None:
    """Have systemd keep an index and its label, if it keeps anything for this service."""
    if not service_manager.keeps_descriptors(environ):
        return
    epoch = label.gives.epoch
    _leave(environ, _index_name(epoch), index_fd)
    try:
        with open(memfd("omni-connector-label"), "wb", buffering=0) as file:
            file.write(msgspec.msgpack.encode(label))
            # The last of all: without it nothing of the rest is used.
            _leave(environ, _label_name(epoch), file.fileno())
    except OSError as error:
        logger.warning(_NOT_LEFT, error)


@functools.cache
def stand_in_here() -> "tuple[StandIn, ...]":
    """Stand in for those whose descriptors systemd has passed to this process, once."""
    return tuple(stand_in(os.environ, PROCESS_CONTEXT))


def stand_in(environ: Mapping[str, str], context: EngineContext) -> "list[StandIn]":
    """Stand in for the engines whose descriptors systemd has passed to this process.

    What is malformed, or not whole, is given up, and systemd forgets it.

    Args:
        environ: of this process as it was started; it is called once.
        context: clock and threads.
    """
    left = service_manager.received(environ, PREFIX)
    stand_ins: list[StandIn] = []
    used: set[str] = set()
    for name in [name for name in left if name.startswith(_label_name(b""))]:
        try:
            label = _LABELS.decode(_read(left[name]))
            arenas = {each.epoch: _arena_name(each.epoch) for each in mapped(label.gives)}
            index = _index_name(label.gives.epoch)
            parts = frozenset({name, index, *arenas.values()})
            descriptors = {epoch: left[each] for epoch, each in arenas.items()}
            forget = functools.partial(_forget, environ, parts)
            stand_ins.append(StandIn(label, left[index], descriptors, context, forget))
            used |= parts
        except (OmniError, OSError, KeyError, msgspec.MsgspecError) as error:
            logger.warning(
                "What an engine kept before this service was restarted cannot be used: %r", error
            )
    for descriptor in left.values():
        os.close(descriptor)  # a stand-in has its own
    _forget(environ, left.keys() - used)
    return stand_ins


def mapped(gives: GiveIndex) -> list[Endpoint]:
    """The endpoint of each rank's arena at which processes of the host map it.

    Raises:
        ProtocolError: a rank has none.
    """
    kind = SharedMemoryTransport.transport
    found = [next((e for e in rank if e.transport == kind), None) for rank in gives.arenas]
    endpoints = [each for each in found if each is not None]
    if len(endpoints) != len(found):
        raise ProtocolError("an arena cannot be mapped by processes of the host")
    return endpoints


class StandIn:
    """Gives index and arenas of an engine that has ended, as that engine did, to those that meet
    it.

    Args:
        label: of the engine.
        index_fd: its index; duplicated.
        arena_fds: its arenas by their epochs; duplicated.
        context: clock and threads.
        on_end: called when it ends.
        memory_is_short: whether what is kept has to make room.

    Raises:
        OmniError: the runtime folder cannot be had, or nobody can listen there.
        OSError: there are no more descriptors.
    """

    def __init__(
        self,
        label: Label,
        index_fd: int,
        arena_fds: Mapping[bytes, int],
        context: EngineContext,
        on_end: Callable[[], object] = lambda: None,
        memory_is_short: Callable[[], bool] = memory_is_short,
    ) -> None:
        self._clock = context.clock
        self._on_end = on_end
        self._memory_is_short = memory_is_short
        self._until = context.clock() + WAIT_S
        self._unasked = set(arena_fds)
        self._closing = False
        folder = runtime.runtime_dir(label.namespace)
        # By its epoch: an engine that was restarted twice may have had one id.
        name = f"restarted:{label.gives.epoch.hex()}"
        path = runtime.socket_path(folder, name, kind=INDEX_KIND)
        endpoints = mapped(label.gives)
        self._index = msgspec.structs.replace(
            label.gives,
            arenas=tuple((msgspec.structs.replace(e, address=str(path)),) for e in endpoints),
            orphans=(),
        )
        self._replies = {
            each.epoch: AttachReply(each.epoch, each.n_slots, each.slot_bytes) for each in endpoints
        }
        with contextlib.ExitStack() as undo:
            self._descriptors: dict[bytes, int] = {}
            undo.callback(self._let_go)
            for epoch, descriptor in {label.gives.epoch: index_fd, **arena_fds}.items():
                self._descriptors[epoch] = os.dup(descriptor)
            self._listener = Listener(_QUESTIONS, self._answer)
            undo.callback(self._listener.close)
            self._listener.add(path)
            forget_in_child(self, StandIn._let_go)
            self._thread = context.start("omni-restarts", self._turn, end=self._end)
            undo.pop_all()

    def close(self) -> None:
        """End it, and wait for that. Idempotent."""
        self._closing = True
        self._thread.wake()
        self._thread.join(_CLOSE_S)

    def _turn(self) -> float | None:
        over = self._closing or self._clock() >= self._until or self._memory_is_short()
        return None if over else _TURN_S

    def _end(self) -> None:
        # Engines that are connected see the connection end, and count the arena as an orphan.
        self._listener.close()
        self._let_go()
        self._on_end()

    def _answer(self, question: Struct) -> tuple[Struct | None, int | None]:
        # On the listener's thread, which has ended when the descriptors are closed.
        if isinstance(question, AskIndex):
            return self._index, os.dup(self._descriptors[self._index.epoch])
        if isinstance(question, Attach) and question.epoch in self._replies:
            self._attached(question.epoch)
            return self._replies[question.epoch], os.dup(self._descriptors[question.epoch])
        if isinstance(question, Hits):  # nothing is evicted here
            return None, None
        return Refusal("there is no such arena here", package=PACKAGE), None

    def _attached(self, epoch: bytes) -> None:
        self._unasked.discard(epoch)
        if not self._unasked:
            self._until = min(self._until, self._clock() + STAY_S)

    def _let_go(self) -> None:
        # Also in a process that was forked, which must not keep the memory.
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _leave(environ: Mapping[str, str], name: str, descriptor: int) -> None:
    try:
        service_manager.store(environ, name, descriptor)
    except OmniError as error:
        logger.warning(_NOT_LEFT, error)


def _forget(environ: Mapping[str, str], names: Iterable[str]) -> None:
    for name in names:
        try:
            service_manager.forget(environ, name)
        except OmniError as error:
            logger.warning("systemd goes on keeping memory of an engine that has ended: %s", error)


def _read(descriptor: int) -> bytes:
    if os.fstat(descriptor).st_size > _MAX_LABEL_BYTES:
        raise ProtocolError("its label is too long")
    return os.pread(descriptor, _MAX_LABEL_BYTES, 0)


def _label_name(epoch: bytes) -> str:
    return f"{PREFIX}label-{epoch.hex()}"


def _index_name(epoch: bytes) -> str:
    return f"{PREFIX}index-{epoch.hex()}"


def _arena_name(epoch: bytes) -> str:
    return f"{PREFIX}arena-{epoch.hex()}"
