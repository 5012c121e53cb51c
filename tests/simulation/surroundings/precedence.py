# SPDX-License-Identifier: Apache-2.0
"""Which copies of an engine go first: those that somebody waits for, but not for ever."""

from omni_connector.copy.threads import STEP_BACK_S
from tests.simulation.surroundings.world import Violation

_LEAST_S = 0.0001


class Precedence:
    """Looks at the choices of one engine's thread that saves.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._back_since: float | None = None

    def chosen(
        self, background: bool | None, free: bool, back: bool, others: bool, now: float
    ) -> None:
        """Look at a choice; see `inspection.watch_choices`.

        Raises:
            Violation: a job that nobody waits for went before one that somebody waits for, or has
                stepped back for too long.
        """
        since = self._back_since
        if background:
            self._back_since = None
            if back and others and not free and (since is None or now - since < _LEAST_S):
                raise Violation("goes_first", f"{self._name} copies what nobody waits for")
            return
        if not back:
            return
        if not others:
            raise Violation("steps_back", f"{self._name} lets nobody go first")
        self._back_since = now if since is None else since
        if now - self._back_since > STEP_BACK_S:
            raise Violation("steps_back", f"{self._name} has stepped back for too long")
