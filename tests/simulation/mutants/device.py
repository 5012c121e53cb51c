# SPDX-License-Identifier: Apache-2.0
"""Mutants that only a device punishes: a fence or a wait less between a stream and what it orders.

On a CPU the forward pass and each copy are over when their calls return, so that none of these
would show there.
"""

from typing import Final

from tests.simulation.mutants.faults import mutant

DEVICE: Final = (
    mutant(
        "device: no fence to a layer",
        "a layer is copied, hashed and published before the device has written it",
        (
            "vllm_v1.worker",
            "forward.computed(layer, self._caches.copier.fence())",
            "forward.computed(layer, None)",
        ),
    ),
    mutant(
        "device: the first layer's fence",
        "later layers are copied when the first of the pass is there",
        (
            "copy.layered",
            "max((self._computed[layer] for layer in layers), key=itemgetter(0))[1]",
            "min(self._computed.values(), key=itemgetter(0))[1]",
        ),
    ),
    mutant(
        "device: no fence at the end of the pass",
        "what was not copied layer by layer is copied before the device has written it",
        (
            "vllm_v1.worker",
            "forward.end(None if self._caches is None else self._caches.copier.fence())",
            "forward.end(None)",
        ),
    ),
    mutant(
        "device: a fence of the copying thread",
        "a copy marks its own thread's stream, not the engine's",
        (
            "copy.layered",
            "layer_range.number, *ids, goes_on, fence, of_these)",
            "layer_range.number, *ids, goes_on, self._copier.fence(), of_these)",
        ),
    ),
    mutant(
        "device: jobs without a fence",
        "blocks are read and filled while the engine's work before is still to come",
        ("vllm_v1.worker", "caches.copier.fence() if fence is None else fence)", "fence)"),
    ),
    mutant(
        "device: a save waits for nothing",
        "the stream of copies goes on although it was given a fence",
        ("copy.staged", "direction.fills.wait(call.copy.fence)", "pass"),
    ),
    mutant(
        "device: zeroes are not finished",
        "a load has ended while its blocks are still to be zeroed",
        ("copy.staged", "stream.finish(None)", "pass"),
    ),
    mutant(
        "device: one staging buffer",
        "a buffer is filled again before what was in it has arrived",
        ("copy.staged", "yield _Batch(buffers[number % 2],", "yield _Batch(buffers[0],"),
    ),
    mutant(
        "device: slots are published too soon",
        "a slot is hashed and published before the copy into it has ended",
        (
            "copy.staged",
            "direction.empties.finish(mark)",
            "if under_way:\n    direction.empties.finish(mark)",
        ),
    ),
    mutant(
        "device: the batch before is not finished",
        "of two batches the first is taken from its buffer before it is there",
        (
            "copy.staged",
            "direction.empties.finish(mark)",
            "if not under_way:\n    direction.empties.finish(mark)",
        ),
    ),
    mutant(
        "device: loads are done too soon",
        "a load is reported while the device still fills its blocks",
        (
            "copy.staged",
            "direction.empties.finish(mark)",
            "if under_way or end == self._land:\n    direction.empties.finish(mark)",
        ),
        (
            "copy.staged",
            "finally:\n    direction.finish()",
            "finally:\n    if end == self._land:\n        direction.finish()",
        ),
    ),
    mutant(
        "device: copies on another stream",
        "what is launched is in no order with the fence that was waited for",
        ("copy.staged:StagedCopier._out", "with call.direction.fills.active():", "if True:"),
    ),
    mutant(
        "device: what is not pinned",
        "the device is given slots that were not pinned yet",
        (
            "copy.staged",
            "(pieces < 0).any() or (rows + nbytes > self.ends[pieces]).any()",
            "(pieces < 0).any()",
        ),
    ),
    mutant(
        "device: arenas of peers stay pinned",
        "the arena of a peer that has gone is let go of while the device has it pinned",
        ("arena.arena", "if pinned is not None:\n    pinned.close()", ""),
    ),
    mutant(
        "device: pinned too late",
        "the arena of a peer is pinned although it was let go of",
        ("copy.pinning", "self._memories.remove(memory)", ""),
    ),
    mutant(
        "device: memory is pinned while graphs are captured",
        "pinning begins with the first memory, and breaks the engine's capture",
        (
            "copy.pinning",
            "self._memories.append(memory)",
            "self._memories.append(memory)\nself.begin()",
        ),
    ),
    mutant(
        "device: a refusal is for ever",
        "what a device has refused to pin it is never asked for again",
        ("copy.pinning", "piece.retry_at = now + piece.backoff.failed()", "piece.retry_at = WOKEN"),
    ),
    mutant(
        "device: a refusal spreads",
        "while one piece of an arena is refused, no other arena is pinned",
        (
            "copy.pinning",
            "piece.retry_at = now + piece.backoff.failed()",
            "self._not_before = piece.retry_at = now + piece.backoff.failed()",
        ),
    ),
    mutant(
        "device: nothing more of an arena after a refusal",
        "the pieces behind one that is refused wait until it is not",
        ("copy.pinning", "if end > self.tried:", "if end > self.tried and not self.refused:"),
    ),
    mutant(
        "device: pinned in vain",
        "copies of slots that are pinned still pass through a buffer of the host",
        (
            "copy.staged",
            "self._pinned = self._pinned.beside(address, address + slots.nbytes)",
            "pass",
        ),
    ),
    mutant(
        "device: what a peer had pinned",
        "the device is given slots of a peer's arena that were let go of",
        ("copy.staged", "self._pinned = self._pinned.without(slots.ctypes.data)", "pass"),
    ),
    mutant(
        "device: hashed before it is gathered",
        "a save has the checksum of what was in the staging buffer before",
        (
            "copy.staged",
            "there = call.direction.fills.mark()\ncall.direction.empties.wait(there)",
            "there = call.direction.empties.mark()\n"
            "call.direction.empties.wait(call.direction.fills.mark())",
        ),
    ),
    mutant(
        "device: crosses before it is gathered",
        "a staging buffer is emptied before what belongs in it is there",
        ("copy.staged", "call.direction.empties.wait(there)", ""),
    ),
    mutant(
        "device: kernels reach what is not pinned",
        "a kernel of the device is given slots that were not pinned yet",
        (
            "copy.staged",
            "by_kernel = for_kernels and pieces is not None",
            "by_kernel = for_kernels",
        ),
    ),
    mutant(
        "device: checksums are taken too soon",
        "the host reads the checksums before the device has written them",
        (
            "copy.staged",
            "direction.empties.finish(mark)",
            "early = None if sums is None else sums.clone()\ndirection.empties.finish(mark)",
        ),
        ("copy.staged", "call.take(batch, sums)", "call.take(batch, early)"),
    ),
    mutant(
        "device: each layer has a checksum of its own",
        "a device begins anew with each layer of a slot, and the last one's checksum is published",
        ("copy.staged", "states[:, :SUMS] = words", ""),
    ),
    mutant(
        "device: layers are hashed as whole slots",
        "a device forgets that a row is a part of a slot",
        ("copy.staged:StagedCopier._hash_there", "if states is not None:", "if False:"),
    ),
    mutant(
        "device: pages of other layers",
        "of slots with other layers the device takes the first pages, not those that are read",
        (
            "copy.staged",
            "taken.append(_Taken(run.at, place, run.nbytes))",
            "taken.append(_Taken(place, place, run.nbytes))",
        ),
    ),
    mutant(
        "device: one stream for both ways",
        "a load stands behind a save that waits for the engine's work",
        ("copy.staged", "self._loads = Direction(stream)", "self._loads = self._saves"),
    ),
    mutant(
        "device: its failure is not seen",
        "what a device was to copy when it failed counts as copied, and is handed to peers",
        (
            "copy.staged",
            "direction.empties.finish(mark)",
            "try:\n    direction.empties.finish(mark)\nexcept RuntimeError:\n    pass",
        ),
        (
            "copy.staged",
            "finally:\n    direction.finish()",
            "finally:\n    try:\n        direction.finish()\n"
            "    except RuntimeError:\n        pass",
        ),
    ),
    mutant(
        "device: published at the end",
        "no slot of a copy is published before the device has copied the last one",
        (
            "copy.staged",
            "if landed is not None:\n    landed(batch.places, call.sums[batch.places])",
            "if landed is not None and batch.places.stop == len(call.sums):\n"
            "    landed(slice(0, len(call.sums)), call.sums)",
        ),
    ),
    mutant(
        "device: asked again at once",
        "a thread asks without end for what a device does not pin",
        ("copy.pinning", "piece.retry_at = now + piece.backoff.failed()", "piece.retry_at = now"),
    ),
)
