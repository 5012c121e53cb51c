# SPDX-License-Identifier: Apache-2.0
"""Copies between this engine's KV blocks and the slots of arenas, as jobs of the workers.

The scheduler halves of hand-off and prefix send specs (`jobs`, `prefix_jobs`): blocks, slots,
generations. A save fills slots of the own arena and commits them; a load fills blocks from a peer's
slots, whose generations, keys and checksums it compares (`loading`). What ended, and how, goes
back.
"""
