# SPDX-License-Identifier: Apache-2.0
"""A copier whose copies raise now and then, or take a while."""

from collections.abc import Mapping
from typing import Any

from omni_connector.copy.copier import BlockCopier
from tests.simulation.surroundings.world import World


class TroubledCopier:
    """Passes everything on, later, or raises.

    Args:
        raising: how often a `save` or a `load` does.
        slow: seconds that a `save` takes at most, before it reads the blocks, and a `load`, before
            it reads the slots.
    """

    def __init__(
        self,
        world: World,
        raising: Mapping[str, float],
        slow: Mapping[str, float],
        inner: BlockCopier,
    ) -> None:
        self._world = world
        self._raising = raising
        self._slow = slow
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def save(self, *args: Any, **kwargs: Any) -> Any:
        self._strike("save")
        return self._inner.save(*args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> Any:
        self._strike("load")
        return self._inner.load(*args, **kwargs)

    def load_pages(self, *args: Any, **kwargs: Any) -> Any:
        self._strike("load")
        return self._inner.load_pages(*args, **kwargs)

    def _strike(self, verb: str) -> None:
        if self._slow[verb]:
            self._world.wait(self._slow[verb] * self._world.draw.random())
        if self._world.chance(self._raising[verb]):
            self._world.tell(f"a {verb} raises")
            raise RuntimeError(f"this {verb} raises")
