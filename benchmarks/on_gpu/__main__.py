# SPDX-License-Identifier: Apache-2.0
"""What a GPU does with the connector's copies, without vLLM.

    python -m benchmarks.on_gpu --out FOLDER [--only capture,copies,...] [--quick]

Five parts, each in a process of its own with a time limit of its own, five minutes in all:

- capture: CUDA graphs are captured while a thread pins an arena.
- copies: saves and loads of a KV cache, in two layouts, beside one plain copy of as many bytes.
- forward: a forward pass with saves and loads beside it.
- pages: scattered pages, copied by one call of the driver for all, and by one kernel.
- peers: device memory of another process, by a descriptor, also after that process was killed.

FOLDER gets a file of JSON lines, one for each figure, as it comes; the same as tables in markdown,
anew after each part; and a log of each part. A part that fails or hangs ends with a line
that says so, and the next part begins. The exit status is 1 if one did. It needs torch, triton, and
what the package itself needs (`msgspec`, `numpy`, `pyzmq`, `xxhash`).
"""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main(__doc__.partition("\n")[0]))
