# SPDX-License-Identifier: Apache-2.0
"""The process of one part: `python -m on_gpu.part MODULE NAME RESULTS DEVICE [--quick]`."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from on_gpu.command import put


def run(module: str, name: str, results: Path, device: str, *, quick: bool) -> None:
    """Measure one part."""
    part = import_module(module)
    from machine import machine

    from on_gpu.accelerator import QUICK, WHOLE, Accelerator

    place, _, made = device.partition(":")
    accelerator: Accelerator = getattr(import_module(place), made)()
    put(results, part=name, about=f"{accelerator.name}; {machine()}.")

    def report(step: str, **fields: Any) -> None:
        put(results, part=name, step=step, **fields)

    part.measure(accelerator, QUICK if quick else WHOLE, report)


if __name__ == "__main__":
    module, name, results, device, *rest = sys.argv[1:]
    run(module, name, Path(results), device, quick=rest == ["--quick"])
