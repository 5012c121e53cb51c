# SPDX-License-Identifier: Apache-2.0
"""Calls into libraries without deadlines, on threads that nobody has to wait for.

These calls are no turns (see `omni_connector.turns`), because nobody can end them.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from omni_connector.errors import TransportError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Call(Generic[_Result]):
    """A call that ends once; its methods may be called from any thread.

    It does what a `concurrent.futures.Future` does, except cancelling, at a fraction of the cost:
    there is one lock, and whoever waits for it is woken once.
    """

    def __init__(self) -> None:
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._done = False
        # Held until the call has ended.
        self._running = threading.Lock()
        self._running.acquire()
        self._callbacks: deque[Callable[[Call[_Result]], object]] = deque()

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._done

    def wait(self, timeout: float) -> bool:
        """Wait `timeout` seconds at most for the end; returns `done`."""
        if not self._done and self._running.acquire(timeout=max(0.0, timeout)):
            self._running.release()
        return self._done

    def result(self, timeout: float = 0.0) -> _Result:
        """What the call has returned; raises what it has raised.

        Raises:
            TimeoutError: it does not end within `timeout` seconds.
        """
        if not self.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def exception(self) -> BaseException | None:
        """What the call has raised; None while it has not ended."""
        return self._error

    def add_done_callback(self, callback: "Callable[[Call[_Result]], object]") -> None:
        """Call this with the call itself: at once if it is done, else on the thread that ends it.

        What the callback raises is logged.
        """
        self._callbacks.append(callback)
        if self._done:
            self._call_back()

    def set_result(self, result: _Result) -> None:
        """End the call."""
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """End the call."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._done = True
        self._running.release()
        self._call_back()

    def _call_back(self) -> None:
        # Two threads may be here at once. The one that takes a callback out makes it.
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except Exception:
                logger.exception("What follows a call failed; please report it")


class CallThreads:
    """Threads for calls that may take long to return, or may never return.

    A caller may stop waiting for a call, which keeps its thread until it ends. The threads are
    daemons: a call that never ends does not keep the process alive.

    Args:
        name: of the threads.
        limit: how many calls may be under way, those that nobody waits for any more included.
        end: is called once, after `close` and after the last call has ended.
    """

    def __init__(self, name: str, limit: int, end: Callable[[], object] = lambda: None) -> None:
        self._name: Final = name
        self._limit: Final = limit
        self._end: Final = end
        self._calls: queue.SimpleQueue[tuple[Call[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def start(self, call: Callable[[], _Result]) -> Call[_Result]:
        """Make a call on a thread; returns at once.

        Raises:
            TransportError: too many calls are under way, no thread can be started, or this is
                closed.
        """
        started: Call[_Result] = Call()
        with self._lock:
            if self._closed:
                raise TransportError("the connector is closed")
            if self._idle:
                self._idle -= 1
            elif self._threads < self._limit:
                self._start()
            else:
                raise TransportError(f"{self._limit} calls are under way on {self._name}")
            self._calls.put((started, call))
        return started

    def close(self) -> None:
        """Start nothing more; threads end with their calls. Idempotent."""
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
        except RuntimeError as error:  # the system allows no more threads
            raise TransportError(str(error)) from error
        self._threads += 1

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            started, call = item
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
                self._rest()
                started.set_exception(error)
            else:
                self._rest()
                started.set_result(result)
            # Let go of the arguments now, not when the next call comes.
            del item, started, call
        with self._lock:
            self._threads -= 1
            last = not self._threads
        if last:
            self._end()

    def _rest(self) -> None:
        with self._lock:
            self._idle += 1
