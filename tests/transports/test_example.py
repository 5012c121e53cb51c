# SPDX-License-Identifier: Apache-2.0
"""The transport of `examples/` keeps the contract, and has as many lines as its page says."""

import importlib.util
from pathlib import Path
from typing import Any

from omni_connector.testing import TransportConformance

EXAMPLE = Path(__file__).parents[2] / "examples" / "proc_transport.py"


def load() -> Any:
    """The module, which is in no package."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestExample(TransportConformance):
    transport = load().ProcTransport

    def connect(self, place: Path) -> Any:
        return self.transport(folder=place)
