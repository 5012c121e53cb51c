# SPDX-License-Identifier: Apache-2.0
"""All parts in one process, so that torch is imported once."""

from importlib import import_module

from on_gpu.command import PARTS


def measure(device, sizes, report) -> None:
    for part in PARTS:
        import_module(f"on_gpu.{part.name}").measure(device, sizes, report)
        report("done", name=part.name)
