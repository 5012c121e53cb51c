# SPDX-License-Identifier: Apache-2.0
"""Mutants that only a device punishes: a fence or a wait less between a stream and what it orders.

On a CPU the forward pass and each copy are over when their calls return, so that none of these
would show there.
"""

from typing import Final

from tests.simulation.mutants.faults import mutant

_WORKER: Final = "omni_connector.vllm_v1.worker"
_STAGING: Final = "omni_connector.copy.staged"
_PINNING: Final = "omni_connector.copy.pinning"
_FINISH: Final = "                direction.empties.finish(mark)\n"
_WAIT: Final = "        call.direction.empties.wait(there)\n"

DEVICE: Final = (
    mutant(
        "device: no fence to a layer",
        "a layer is copied, hashed and published before the device has written it",
        (
            _WORKER,
            "        forward.computed(layer, self._caches.copier.fence())\n",
            "        forward.computed(layer, None)\n",
        ),
    ),
    mutant(
        "device: the first layer's fence",
        "later layers are copied when the first of the pass is there",
        (
            "omni_connector.copy.layered",
            "max((self._computed[layer] for layer in layers), key=itemgetter(0))[1]",
            "min(self._computed.values(), key=itemgetter(0))[1]",
        ),
    ),
    mutant(
        "device: no fence at the end of the pass",
        "what was not copied layer by layer is copied before the device has written it",
        (
            _WORKER,
            "forward.end(None if self._caches is None else self._caches.copier.fence())",
            "forward.end(None)",
        ),
    ),
    mutant(
        "device: a fence of the copying thread",
        "a copy marks its own thread's stream, not the engine's",
        (
            "omni_connector.copy.layered",
            "layer_range.number, *ids, goes_on, fence, of_these)",
            "layer_range.number, *ids, goes_on, self._copier.fence(), of_these)",
        ),
    ),
    mutant(
        "device: jobs without a fence",
        "blocks are read and filled while the engine's work before is still to come",
        (
            _WORKER,
            "caches.copier.fence() if fence is None else fence)",
            "fence)",
        ),
    ),
    mutant(
        "device: a save waits for nothing",
        "the stream of copies goes on although it was given a fence",
        (
            _STAGING,
            "                direction.fills.wait(call.copy.fence)\n",
            "                pass\n",
        ),
    ),
    mutant(
        "device: zeroes are not finished",
        "a load has ended while its blocks are still to be zeroed",
        (
            _STAGING,
            "                        self._groups[group].zero_each(stream, some)\n"
            "                finally:\n"
            "                    stream.finish(None)\n",
            "                        self._groups[group].zero_each(stream, some)\n"
            "                finally:\n"
            "                    pass\n",
        ),
    ),
    mutant(
        "device: one staging buffer",
        "a buffer is filled again before what was in it has arrived",
        (_STAGING, "yield _Batch(buffers[number % 2], ", "yield _Batch(buffers[0], "),
    ),
    mutant(
        "device: slots are published too soon",
        "a slot is hashed and published before the copy into it has ended",
        (
            _STAGING,
            _FINISH,
            "                if under_way:  # another batch\n    " + _FINISH,
        ),
    ),
    mutant(
        "device: the batch before is not finished",
        "of two batches the first is taken from its buffer before it is there",
        (
            _STAGING,
            _FINISH,
            "                if not under_way:  # the last one\n    " + _FINISH,
        ),
    ),
    mutant(
        "device: loads are done too soon",
        "a load is reported while the device still fills its blocks",
        (
            _STAGING,
            _FINISH,
            "                if under_way or end == self._land:\n    " + _FINISH,
        ),
        (
            _STAGING,
            " write blocks, after an error.\n                direction.finish()\n",
            "\n                if end == self._land:\n                    direction.finish()\n",
        ),
    ),
    mutant(
        "device: copies on another stream",
        "what is launched is in no order with the fence that was waited for",
        (
            _STAGING,
            "        with call.direction.fills.active():\n"
            "            sent = call.send(batch)\n"
            "            call.on_device.gather",
            "        if True:\n"
            "            sent = call.send(batch)\n"
            "            call.on_device.gather",
        ),
    ),
    mutant(
        "device: what is not pinned",
        "the device is given slots that were not pinned yet",
        (
            _STAGING,
            "(pieces < 0).any() or (rows + nbytes > self.ends[pieces]).any()",
            "(pieces < 0).any()",
        ),
    ),
    mutant(
        "device: arenas of peers stay pinned",
        "the arena of a peer that has gone is let go of while the device has it pinned",
        (
            "omni_connector.arena.arena",
            "        if pinned is not None:\n            pinned.close()\n",
            "",
        ),
    ),
    mutant(
        "device: pinned too late",
        "the arena of a peer is pinned although it was let go of",
        (
            _PINNING,
            "            self._memories.remove(memory)\n",
            "",
        ),
    ),
    mutant(
        "device: memory is pinned while graphs are captured",
        "pinning begins with the first memory, and breaks the engine's capture",
        (
            _PINNING,
            "        self._memories.append(memory)\n",
            "        self._memories.append(memory)\n        self.begin()\n",
        ),
    ),
    mutant(
        "device: a refusal is for ever",
        "what a device has refused to pin it is never asked for again",
        (
            _PINNING,
            "                piece.retry_at = now + piece.backoff.failed()\n",
            "                piece.retry_at = WOKEN\n",
        ),
    ),
    mutant(
        "device: a refusal spreads",
        "while one piece of an arena is refused, no other arena is pinned",
        (
            _PINNING,
            "                piece.retry_at = now + piece.backoff.failed()\n",
            "                self._not_before = piece.retry_at = now + piece.backoff.failed()\n",
        ),
    ),
    mutant(
        "device: nothing more of an arena after a refusal",
        "the pieces behind one that is refused wait until it is not",
        (
            _PINNING,
            "        if end > self.tried:\n",
            "        if end > self.tried and not self.refused:\n",
        ),
    ),
    mutant(
        "device: pinned in vain",
        "copies of slots that are pinned still pass through a buffer of the host",
        (
            _STAGING,
            "            self._pinned = self._pinned.beside(address, address + slots.nbytes)\n",
            "            pass\n",
        ),
    ),
    mutant(
        "device: what a peer had pinned",
        "the device is given slots of a peer's arena that were let go of",
        (
            _STAGING,
            "            self._pinned = self._pinned.without(slots.ctypes.data)\n",
            "            pass\n",
        ),
    ),
    mutant(
        "device: hashed before it is gathered",
        "a save has the checksum of what was in the staging buffer before",
        (
            _STAGING,
            "        there = call.direction.fills.mark()\n" + _WAIT,
            "        there = call.direction.empties.mark()\n"
            "        call.direction.empties.wait(call.direction.fills.mark())\n",
        ),
    ),
    mutant(
        "device: crosses before it is gathered",
        "a staging buffer is emptied before what belongs in it is there",
        (_STAGING, _WAIT, ""),
    ),
    mutant(
        "device: kernels reach what is not pinned",
        "a kernel of the device is given slots that were not pinned yet",
        (
            _STAGING,
            "by_kernel = for_kernels and pieces is not None",
            "by_kernel = for_kernels",
        ),
    ),
    mutant(
        "device: checksums are taken too soon",
        "the host reads the checksums before the device has written them",
        (
            _STAGING,
            _FINISH,
            "                early = None if sums is None else sums.clone()\n" + _FINISH,
        ),
        (
            _STAGING,
            "                    call.take(batch, sums)\n",
            "                    call.take(batch, early)\n",
        ),
    ),
    mutant(
        "device: each layer has a checksum of its own",
        "a device begins anew with each layer of a slot, and the last one's checksum is published",
        (
            _STAGING,
            "            states[:, :SUMS] = words\n",
            "",
        ),
    ),
    mutant(
        "device: layers are hashed as whole slots",
        "a device forgets that a row is a part of a slot",
        (
            _STAGING,
            "        if states is not None:  # the rows of a copy are equally far\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "device: pages of other layers",
        "of slots with other layers the device takes the first pages, not those that are read",
        (
            _STAGING,
            "            taken.append(_Taken(run.at, place, run.nbytes))\n",
            "            taken.append(_Taken(place, place, run.nbytes))\n",
        ),
    ),
    mutant(
        "device: one stream for both ways",
        "a load stands behind a save that waits for the engine's work",
        (
            _STAGING,
            "        self._loads = Direction(stream)\n",
            "        self._loads = self._saves\n",
        ),
    ),
    mutant(
        "device: its failure is not seen",
        "what a device was to copy when it failed counts as copied, and is handed to peers",
        (
            _STAGING,
            _FINISH,
            "                try:\n    "
            + _FINISH
            + "                except RuntimeError:\n                    pass\n",
        ),
        (
            _STAGING,
            " write blocks, after an error.\n                direction.finish()\n",
            "\n                try:\n                    direction.finish()\n"
            "                except RuntimeError:\n                    pass\n",
        ),
    ),
    mutant(
        "device: published at the end",
        "no slot of a copy is published before the device has copied the last one",
        (
            _STAGING,
            "                if landed is not None:\n"
            "                    landed(batch.places, call.sums[batch.places])\n",
            "                if landed is not None and batch.places.stop == len(call.sums):\n"
            "                    landed(slice(0, len(call.sums)), call.sums)\n",
        ),
    ),
    mutant(
        "device: asked again at once",
        "a thread asks without end for what a device does not pin",
        (
            _PINNING,
            "                piece.retry_at = now + piece.backoff.failed()\n",
            "                piece.retry_at = now\n",
        ),
    ),
)
