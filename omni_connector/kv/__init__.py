# SPDX-License-Identifier: Apache-2.0
"""What a KV cache is: its canonical form, and the slots that hold its blocks.

In come the tensors that an engine registers; out go the bytes of a block, as few regular segments
(`canonical`, `segments`). `shapes` and `compatibility` tell which engines may read each other's
slots, `convert` and `heads` make a peer's slots ours, and `spans` names the blocks of a transfer.
"""
