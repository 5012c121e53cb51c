# SPDX-License-Identifier: Apache-2.0
"""Looks up a prompt's leading blocks in the indexes of many engines, in one call of machine code.

numpy takes about 10 us for each index, however few blocks it looks up, and 100 us for a thousand
blocks. The loop in kernels/probe.c looks up each block first in the index that had the block
before, then in the others. It keeps the GIL, because the scheduler waits for the answer. Where it
cannot be compiled, `native_probe` returns None.
"""

import ctypes
import functools
import logging
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from omni_connector.runtime.machine_code import CodeDeniedError, compiled, kernel

logger = logging.getLogger("vllm.omni_connector.native")

NativeProbe = Callable[[bytes, int, NDArray[np.uint64], NDArray[np.int64], bool], int]
"""Takes the indexes (`struct index` of each, joined), their number, tags (blocks,), an array
(3, blocks) that it fills with each block's index, slot and generation, and whether to look up all
blocks. Else it stops at the first block that no index has. Returns the number of blocks that were
looked up, but for that one. With all blocks looked up, -1 stands for those that no index has. The
caller keeps all of that memory valid during the call."""


@functools.cache
def native_probe() -> NativeProbe | None:
    """The loop, compiled at the first call; None if that fails."""
    try:
        if sys.byteorder != "little":
            raise OSError("the lowest byte of a word is not its first")
        engine = compiled(kernel(__name__, "probe"))
    except CodeDeniedError:  # which `compiled` has said
        return None
    except Exception as error:  # noqa: BLE001 - whatever it is, numpy does the work
        logger.warning("blocks are looked up by numpy: there is no native look-up (%s)", error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    arguments = ctypes.c_char_p, number, pointer, number, pointer, pointer, pointer
    leading = ctypes.PYFUNCTYPE(number, *arguments)(engine.get_function_address("probe"))
    each = ctypes.PYFUNCTYPE(None, *arguments)(engine.get_function_address("probe_each"))

    def probe(
        indexes: bytes,
        count: int,
        tags: NDArray[np.uint64],
        places: NDArray[np.int64],
        all_blocks: bool,
    ) -> int:
        if places.shape != (3, len(tags)) or not places.flags.c_contiguous:
            raise ValueError(f"places {places.shape} for {len(tags)} tags")
        tags = np.ascontiguousarray(tags, np.uint64)
        start, step = places.ctypes.data, places.strides[0]
        given = indexes, count, tags.ctypes.data, len(tags), start, start + step, start + 2 * step
        if all_blocks:
            each(*given)
            return len(tags)
        return int(leading(*given))

    probe.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    return probe
