# SPDX-License-Identifier: Apache-2.0
"""What an engine does from time to time beside its steps. The control channel's thread does it, or
the engine's own after that thread has ended."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from omni_connector.handoff.channel import TICK_S, ControlChannel
from omni_connector.handoff.leases import SlotDirectory
from omni_connector.net.runtime import tidy
from omni_connector.runtime.context import EngineContext

# Seconds between two looks for sockets of dead engines. They do no harm meanwhile.
_SWEEP_S: Final = 10.0


class PeriodicTasks:
    """Ends leases when their time is over, removes dead sockets, and counts events of all threads.

    Args:
        folder: the runtime folder.
        context: clock and locks.
        directory: whose leases it ends. None where nothing is handed off.
        tell: writes the engine's status to the folder, and returns whether it has changed; not
            called on the engine's thread.

    Attributes:
        channel: its thread calls `tick`.
        rests: whether there was nothing to tell the last time, and nothing is handed off.
        events: how often each event has happened since the last `take`.
    """

    def __init__(
        self,
        folder: Path,
        context: EngineContext,
        directory: SlotDirectory | None = None,
        tell: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder = folder
        self._clock = context.clock
        self._directory = directory
        self._tell = tell
        self.channel: ControlChannel | None = None
        self.rests = False
        self._next_sweep = context.clock() + _SWEEP_S
        self._next_expiry = context.clock()
        self._lock = context.lock()
        self.events: defaultdict[str, int] = defaultdict(int)

    def tick(self) -> None:
        """Do what is due; called about twice a second, or less often while the engine rests."""
        self._expire()
        # The sockets of a killed engine are dead only when all its processes are, and no engine
        # may have been connected to it.
        if self._clock() >= self._next_sweep:
            self._next_sweep = self._clock() + _SWEEP_S
            tidy(self._folder)
        told = self._tell()
        self.rests = not told and (self._directory is None or not self._directory.num_handoffs)

    def ended(self) -> bool:
        """Whether the control channel has ended. Each step calls this: it then ends the leases."""
        if self.channel is None:
            return False
        if self.channel.alive:
            if self.rests:
                self.rests = False
                self.channel.stir()
            return False
        if self._clock() >= self._next_expiry:
            self._next_expiry = self._clock() + TICK_S
            self._expire()
        return True

    def count(self, event: str, number: int = 1) -> None:
        """Count an event, from any thread."""
        if number:
            with self._lock:
                self.events[event] += number

    def take(self) -> dict[str, int]:
        """How often each event has happened since the last call."""
        with self._lock:
            events, self.events = self.events, defaultdict(int)
        return events

    def _expire(self) -> None:
        if self._directory is not None:
            self.count("handoffs_expired", self._directory.expire())
