# SPDX-License-Identifier: Apache-2.0
"""What an engine does from time to time beside its steps: on the control channel's thread, and on
the engine's own where that has ended."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from omni_connector.errors import TransportError
from omni_connector.handoff.channel import TICK_S, ControlChannel
from omni_connector.handoff.directory import SlotDirectory
from omni_connector.net.runtime import sweep

logger = logging.getLogger("vllm.omni_connector.upkeep")

_SWEEP_S: Final = 10.0


class Upkeep:
    """Ends leases in time, removes dead sockets, and keeps what is counted meanwhile.

    Args:
        folder: the runtime folder.
        clock: seconds, monotonic.

    Attributes:
        channel: on whose thread that is done.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._directory: SlotDirectory | None = None
        self._valid: Callable[[], bool] = lambda: True
        self.channel: ControlChannel | None = None
        self._next_sweep = clock() + _SWEEP_S
        self._next_expiry = clock()
        self._lock = threading.Lock()
        self._events: Counter[str] = Counter()

    def keep(self, directory: SlotDirectory, valid: Callable[[], bool]) -> None:
        """End the leases of an engine that hands off.

        Args:
            directory: its slots.
            valid: whether what these hold is of the weights that the engine has.
        """
        self._valid = valid
        self._directory = directory

    def tick(self) -> None:
        """Called about twice a second on the channel's thread."""
        self._expire()
        # An idle engine's own thread learns of a reset only with its next request.
        if self._directory is not None:
            self._directory.void_unless(self._valid)
        # The sockets of a killed engine are dead only once the last of its processes is, and
        # nobody may have been connected to it.
        if self._clock() >= self._next_sweep:
            self._next_sweep = self._clock() + _SWEEP_S
            self.sweep()

    def ended(self) -> bool:
        """Whether peers cannot reach this engine any more. Leases then end in this call, to be
        made with each step."""
        if self.channel is None or self.channel.alive:
            return False
        if self._clock() >= self._next_expiry:
            self._next_expiry = self._clock() + TICK_S
            self._expire()
        return True

    def sweep(self) -> None:
        """Remove the sockets of dead engines, unless somebody else is at it; never waits."""
        try:
            sweep(self._folder, timeout=0.0)
        except TransportError as error:  # the next sweep, of whatever engine, does it
            logger.debug("Sockets of dead engines were not removed: %s", error)

    def count(self, event: str, number: int = 1) -> None:
        """Note what happened, from any thread."""
        if number:
            with self._lock:
                self._events[event] += number

    def take(self) -> Counter[str]:
        """How often each happened since the last call."""
        with self._lock:
            events, self._events = self._events, Counter()
        return events

    def _expire(self) -> None:
        if self._directory is not None:
            self.count("handoffs_expired", self._directory.expire())
