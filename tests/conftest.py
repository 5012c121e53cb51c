# SPDX-License-Identifier: Apache-2.0
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from omni_connector.transports.mooncake_engine import Engine

from . import machine, support_table

# How long an example takes, and how long it takes to make one, says nothing but how busy the
# machine is; what must not take long is limited by the tests' own deadlines.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Have the marks of this run's tests at hand."""
    config.pluginmanager.register(support_table.Table(), support_table.NAME)


def pytest_report_header() -> list[str]:
    """What these tests run on, for whoever reads the log of a failure."""
    return machine.lines()


def pytest_collection_finish() -> None:
    """Tensors of these tests are small: torch's threads cost more than they do, and more beside
    the threads that the tests are about.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def reused_engines() -> Iterator[None]:
    """Engines of Mooncake are used by one connector after the other: each takes 1 s to end."""
    unused: list[Any] = []
    start, close = Engine._start, Engine.close

    def take(self: Engine, host: str) -> Any:
        return unused.pop() if unused and host == "127.0.0.1" else start(self, host)

    def keep(self: Engine) -> None:
        engine = self._engine
        close(self)
        if engine is not None:
            unused.append(getattr(engine, "inner", engine))  # what a test has put around it

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_start", take)
        patch.setattr(Engine, "close", keep)
        yield
