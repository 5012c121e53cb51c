# SPDX-License-Identifier: Apache-2.0
"""What a KV cache is: its canonical form, the slots that hold its blocks, and copying.

In come the tensors that an engine registers; out go the bytes of a block, as few regular segments
(`canonical`, `segments`), and copiers between blocks and slots (`copying`, `staging`, `layered`).
`shapes` and `compatibility` tell which engines may read each other's slots, `convert` and `heads`
make a peer's slots ours, and `ledger` keeps the jobs that copy (`spans`).
"""
