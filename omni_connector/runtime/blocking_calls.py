# SPDX-License-Identifier: Apache-2.0
"""Calls into libraries that take no timeout, on threads that a caller can abandon.

Such a call is no turn (see `omni_connector.runtime.turns`), because nothing can end it.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from omni_connector.errors import TransportError

_Result = TypeVar("_Result")

_known: Final[weakref.WeakSet["CallThreads"]] = weakref.WeakSet()


class CallThreads:
    """Threads for calls that may take long to return, or may never return.

    A caller may stop waiting for a call. The call keeps its thread until it returns. The threads
    are daemons, so a call that never returns does not keep the process alive. A forked child has
    none of its parent's calls, and starts threads of its own.

    Args:
        name: name of the threads.
        limit: most calls that may run at a time. Abandoned calls count too.
        end: called once, after `close` and after the last call has returned.
    """

    def __init__(self, name: str, limit: int, end: Callable[[], object] = lambda: None) -> None:
        self._name: Final = name
        self._limit: Final = limit
        self._end: Final = end
        self._closed = False
        self._begin()
        _known.add(self)

    def _begin(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    def start(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Make a call on a thread; returns at once. Until it begins, it can be cancelled.

        Raises:
            TransportError: too many calls are under way, no thread can be started, or this is
                closed.
        """
        future: Future[_Result] = Future()
        with self._lock:
            if self._closed:
                raise TransportError("the connector is closed")
            if self._idle:
                self._idle -= 1
            elif self._threads < self._limit:
                self._start()
            else:
                raise TransportError(f"{self._limit} calls are under way on {self._name}")
            self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Start no more calls. Each thread ends with its call. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unused = not self._threads
            for _ in range(self._threads):
                self._calls.put(None)
        if unused:
            self._end()

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            raise TransportError(str(error)) from error
        self._threads += 1

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                self._rest()
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                self._rest()
                future.set_exception(error)
            else:
                self._rest()
                future.set_result(result)
            # Free the call's arguments now, not when the next call comes.
            del item, future, call
        with self._lock:
            self._threads -= 1
            last = not self._threads
        if last:
            self._end()

    def _rest(self) -> None:
        with self._lock:
            self._idle += 1


def _in_child() -> None:
    for threads in list(_known):
        threads._begin()


os.register_at_fork(after_in_child=_in_child)
