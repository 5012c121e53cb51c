# SPDX-License-Identifier: Apache-2.0
"""Scripts and benchmarks, which are in no package, as modules for tests."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def module_at(path: Path) -> Any:
    """The module of a file, run once more."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where data classes look themselves up
    spec.loader.exec_module(module)
    return module
