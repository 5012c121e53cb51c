# SPDX-License-Identifier: Apache-2.0
"""Keeps the gauges of the arena right in the API server while the engine makes no step.

vLLM carries what an engine counts to the API server with the output of a step, and an idle engine
makes none: the gauges would show the end of its last step until the next one. The engine's status
file, which its control channel writes, is newer then. A thread of the API server looks whether it
was written anew, and reads it. Just after a step the file is the older one: it is believed from its
next writing on.

An engine core on another host has no file here. Its gauges are those of its last step.
"""

import logging
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from omni_connector.errors import OmniError
from omni_connector.net.runtime import namespace_dir
from omni_connector.net.status import SIGN_OF_LIFE_S, EngineStatus, read_each, read_file

logger = logging.getLogger("vllm.omni_connector.status")

POLL_S: Final = 0.5
"""Seconds between two looks. With the engine's own delay the gauges are at most a second old."""

_SLOW_POLL_S: Final = 5.0
"""Seconds between two looks while no engine of this server has a file: it starts, or is remote."""


class SettableGauge(Protocol):
    """A gauge with its labels, as Prometheus' client and Ray's have it."""

    def set(self, value: float) -> None:
        """Replace the value."""


class LiveGauges:
    """The gauges of the engines of one server.

    Args:
        namespace: of the engines.
        gauges: by engine id, gauges by the names of `Usage`'s fields, of `Service.gauges`, and of
            the pinned bytes of `EngineStatus`.
    """

    def __init__(self, namespace: str, gauges: Mapping[str, Mapping[str, SettableGauge]]) -> None:
        self._namespace = namespace
        self._gauges = gauges
        self._stepped: dict[str, float] = {}
        # Of the engines of this server; the host may have many others.
        self._files: dict[str, Path] = {}

    def start(self) -> threading.Thread:
        """Refresh them from now on, until this object is collected or the process ends."""
        collected = threading.Event()
        reference = weakref.ref(self, lambda _: collected.set())
        thread = threading.Thread(
            target=_keep, args=(reference, collected), name="omni-live-gauges", daemon=True
        )
        thread.start()
        return thread

    def refresh(self) -> bool:
        """Set the gauges of each engine whose file is newer than its last step; returns whether
        any has a file."""
        if self._gauges.keys() - self._files.keys():
            self._search()
        for engine_id, path in list(self._files.items()):
            try:
                engine = read_file(path)
            except (OSError, ValueError):
                engine = None
            if engine is None or engine.engine_id != engine_id:
                del self._files[engine_id]
            else:
                self._show(engine)
        return bool(self._files)

    def _search(self) -> None:
        """Find the files of the engines. An engine keeps its file until it ends."""
        try:
            found, _ = read_each(namespace_dir(self._namespace))
        except (OmniError, OSError):  # no engine has made the folder yet
            return
        for path, engine in found.items():
            if engine.engine_id in self._gauges:
                self._files[engine.engine_id] = path

    def _show(self, engine: EngineStatus) -> None:
        older = self._stepped.get(engine.engine_id, 0.0) - engine.written
        # A file that is older by more than an engine's silence shows a clock that was set back.
        if 0 < older < SIGN_OF_LIFE_S:
            return
        values = msgspec.structs.asdict(engine.usage) | engine.service.gauges
        values |= {"pinned_bytes": engine.pinned_bytes, "unpinned_bytes": engine.unpinned_bytes}
        for name, gauge in self._gauges[engine.engine_id].items():
            gauge.set(values[name])

    def step(self, engine_id: str, taken: float) -> None:
        """A step has set the gauges of an engine: what its file said before no longer counts.

        Args:
            engine_id: of the engine.
            taken: when the values were taken, in seconds of Unix time, by the engine's clock.
        """
        self._stepped[engine_id] = taken


def _keep(reference: "weakref.ref[LiveGauges]", collected: threading.Event) -> None:
    while True:
        gauges: Any = reference()
        if gauges is None:
            return
        found = False
        try:
            found = gauges.refresh()
        except Exception:
            logger.exception("The gauges of idle engines could not be set; it is tried again")
        del gauges  # or nobody could collect it
        collected.wait(POLL_S if found else _SLOW_POLL_S)
