# SPDX-License-Identifier: Apache-2.0
"""Waits for objects, which another thread can end; and the threads on which asyncio's calls run."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

_THREADS: Final = 16
"""Most calls from asyncio that run at a time in a process; further ones queue."""

FIRST_PAUSE_S: Final = 0.001
"""Seconds between the first two looks for an object. Each further pause is twice as long."""

LAST_PAUSE_S: Final = 0.05
"""Longest pause between two looks, in seconds, and so the longest delay of an object that comes."""

_Result = TypeVar("_Result")


class Waits:
    """The waits that are under way, by key. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: dict[str, set[threading.Event]] = {}

    @contextmanager
    def begin(self, key: str) -> Iterator[threading.Event]:
        """While inside, a wait for a key is under way; the event is set when it is abandoned."""
        wait = threading.Event()
        with self._lock:
            self._by_key.setdefault(key, set()).add(wait)
        try:
            yield wait
        finally:
            with self._lock:
                waits = self._by_key[key]
                waits.discard(wait)
                if not waits:
                    del self._by_key[key]

    def abandon(self, key: str) -> None:
        """End the waits for a key that are under way; later ones are others."""
        with self._lock:
            for wait in self._by_key.get(key, ()):
                wait.set()


class _Pool:
    """Threads of this process, started when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_THREADS, "omni-connector-async")
            return self._executor


_pool = _Pool()


def _begin_again() -> None:
    # A forked process has none of its parent's threads, and perhaps a lock that stays held.
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=_begin_again)


async def on_a_thread(call: Callable[[], _Result]) -> _Result:
    """Await a call that may block. If the awaiting task is cancelled, the call still ends."""
    return await asyncio.get_running_loop().run_in_executor(_pool.executor(), call)
