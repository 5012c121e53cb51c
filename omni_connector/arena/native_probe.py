# SPDX-License-Identifier: Apache-2.0
"""The look-up of a prompt's leading blocks in the indexes of many engines, in one call.

numpy takes about ten microseconds for each index it asks, however few blocks it asks for, and a
hundred for a thousand blocks. The loop in kernels/probe.c asks one index after the other for each
block, beginning with that which had the block before. It keeps the GIL: the scheduler waits for the
answer. Where it cannot be compiled, `native_probe` is None.
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

NativeProbe = Callable[[bytes, int, NDArray[np.uint64], NDArray[np.int64]], int]
"""Given indexes (`struct index` of each), their number, tags (blocks,) and an array (3, blocks), it
returns how many leading blocks they have, and writes for each its index, slot and generation. The
caller answers for the memory until the call has ended."""


@functools.cache
def native_probe() -> NativeProbe | None:
    """The loop, compiled at the first call; None where it cannot be had."""
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
    run = ctypes.PYFUNCTYPE(
        number, ctypes.c_char_p, number, pointer, number, pointer, pointer, pointer
    )(engine.get_function_address("probe"))

    def probe(
        indexes: bytes, count: int, tags: NDArray[np.uint64], places: NDArray[np.int64]
    ) -> int:
        if places.shape != (3, len(tags)) or not places.flags.c_contiguous:
            raise ValueError(f"places {places.shape} for {len(tags)} tags")
        tags = np.ascontiguousarray(tags, np.uint64)
        start, step = places.ctypes.data, places.strides[0]
        return int(
            run(indexes, count, tags.ctypes.data, len(tags), start, start + step, start + 2 * step)
        )

    probe.engine = engine  # type: ignore[attr-defined]  # the code is gone with it
    return probe
