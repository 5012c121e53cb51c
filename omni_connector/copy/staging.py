# SPDX-License-Identifier: Apache-2.0
"""The streams and staging buffers of a device's copies: some for saves, others for loads.

All memory is allocated at the start. vLLM's profiling does not know of it, and what it leaves may
be taken by the time of the first copy.
"""

import logging
import threading
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_connector.copy.stream import Stream

logger = logging.getLogger("vllm.omni_connector.staging")

WORDS: Final = 1 << 14
"""Block ids and addresses of one batch, at most."""


class Staging:
    """A buffer on the device and one on the host that a batch passes through.

    Args:
        stream: of the device.
        nbytes: of each.

    Attributes:
        rows: on the device, int8 `(nbytes,)`.
        bounced: on the host, for slots that are not pinned, int8 `(nbytes,)`.
        sums: on the host, where the device writes checksums, int64 `(WORDS,)`.

    Raises:
        RuntimeError: there is no memory.
    """

    def __init__(self, stream: Stream, nbytes: int) -> None:
        self.rows = stream.device_buffer(nbytes)
        self.bounced = stream.host_buffer(nbytes)
        self._there = stream.device_buffer(8 * WORDS).view(torch.int64)
        self._here, self.sums = stream.host_buffer(16 * WORDS).view(torch.int64).view(2, WORDS)

    def send(self, stream: Stream, words: NDArray[np.int64]) -> torch.Tensor:
        """Have the device copy ids or addresses `(n,)`; returns where they are there, then."""
        here = self._here[: len(words)]
        there = self._there[: len(words)]
        here.numpy()[:] = words
        stream.launch(partial(there.copy_, here, non_blocking=True), host=here)
        return there


class Direction:
    """The saves of one copier, or its loads and zeroing.

    Saves gather blocks into a buffer on one stream, and copy it to the host on another. While the
    bus is busy with one buffer, the other is gathered. Loads take the same steps backwards.

    Args:
        stream: of the device, beside which the streams are made.

    Attributes:
        fills, empties: the streams of the work that writes the buffers, and of what reads them.
        lock: held during a copy, as the buffers serve one at a time.
        buffers: two of them, which the batches of a copy take in turns; none where the device has
            no memory.
    """

    def __init__(self, stream: Stream) -> None:
        self.fills = stream.beside()
        self.empties = stream.beside()
        self.lock = threading.Lock()
        self.buffers: tuple[Staging, ...] = ()

    def allocate(self, nbytes: int) -> None:
        """Allocate two buffers, and the memory that hashing their content needs.

        Args:
            nbytes: of each buffer.

        Raises:
            RuntimeError: there is no memory.
        """
        self.buffers = Staging(self.fills, nbytes), Staging(self.fills, nbytes)
        self.empties.prepare_hash(nbytes)

    def finish(self) -> None:
        """Block until all work is done.

        Raises:
            RuntimeError: the device has failed.
        """
        self.fills.finish(None)
        self.empties.finish(None)

    def close(self) -> None:
        """Close the streams."""
        self.fills.close()
        self.empties.close()


def allocate(directions: tuple[Direction, ...], slot_bytes: int, staging_bytes: int) -> int:
    """Allocate the buffers of all directions: of `staging_bytes`, or smaller ones where memory
    lacks.

    Returns:
        Slots that a buffer holds; 0 where there is no memory for one.
    """
    wanted = rows = max(1, staging_bytes // slot_bytes)
    while rows:
        try:
            for each in directions:
                each.allocate(rows * slot_bytes)
            break
        except RuntimeError as error:
            for each in directions:
                each.buffers = ()
            reason = str(error).partition("\n")[0]
            rows //= 2
    if rows < wanted:
        logger.warning(
            "The device has no memory for staging buffers of %.1f MiB each (%s). %s; see "
            "docs/gpu-hosts.md",
            wanted * slot_bytes / 2**20,
            reason,
            f"They have {rows * slot_bytes / 2**20:.1f} MiB, and copies are slower"
            if rows
            else "No KV is saved or loaded, and all prompts are computed",
        )
    return rows
