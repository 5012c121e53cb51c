# SPDX-License-Identifier: Apache-2.0
"""Copies between this engine's KV blocks and the slots of arenas, as jobs of the workers.

The scheduler halves of hand-off and prefix send specs (`jobs`, `prefix_jobs`): blocks, slots,
generations; `held_blocks` has the ledger of the jobs under way, and their blocks. In a worker, copy
`threads` do them piece by piece: a save fills slots of the own arena and commits them, with the
layers if it can (`layered`); a load fills blocks from a peer's slots (`load_plans` says which from
which), whose generations, keys and checksums it compares (`loading`). A copier (`copier`) moves the
bytes, on the `host` or `staged` through a device's stream. What ended, and how, goes back. Slots go
from arena to arena without a job (`arena_copies`).
"""
