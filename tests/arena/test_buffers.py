# SPDX-License-Identifier: Apache-2.0
import collections
import gc
import mmap
from collections.abc import Callable

import numpy as np
import pytest

from omni_connector.arena import buffers as module
from omni_connector.arena.buffers import LARGE_BYTES, Buffers
from omni_connector.errors import TransportError


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_large_buffers_lie_on_pages() -> None:
    buffers = Buffers()
    for nbytes in (LARGE_BYTES, LARGE_BYTES + 1, 3 * LARGE_BYTES):
        buffer = buffers.take(nbytes)
        assert (buffer.size, address(buffer) % mmap.PAGESIZE) == (nbytes, 0)
        buffer[-1] = 1


@pytest.mark.parametrize("nbytes", [0, 1, LARGE_BYTES - 1])
def test_small_buffers_have_their_size(nbytes: int) -> None:
    kept = [Buffers().take(nbytes) for _ in range(20)]
    assert {buffer.size for buffer in kept} == {nbytes}
    if nbytes:  # numpy gives an empty one no place of its own
        assert {address(buffer) % 64 for buffer in kept} == {0}


def test_buffer_is_used_again_once_every_view_of_it_is_gone() -> None:
    buffers = Buffers()
    first = buffers.take(4 * LARGE_BYTES)
    at = address(first)
    view = np.frombuffer(memoryview(first)[100:200], np.uint8)
    del first
    second = buffers.take(4 * LARGE_BYTES)
    assert address(second) != at
    del view
    assert address(buffers.take(3 * LARGE_BYTES)) == at


@pytest.mark.parametrize(
    "view_of",
    [
        lambda a: a[10:20],
        lambda a: a[10:20][2:][::2],
        lambda a: a.reshape(64, -1)[3],
        lambda a: a.view(np.int64)[1:],
        lambda a: a.data[5:9],
        lambda a: np.frombuffer(a.data, np.int32)[7:].reshape(-1, 1),
        lambda a: memoryview(a.view(np.int16))[1:].cast("B"),
    ],
    ids=range(7),
)
def test_any_view_keeps_its_buffer(view_of: Callable[[np.ndarray], object]) -> None:
    buffers = Buffers()
    buffer = buffers.take(LARGE_BYTES)
    at = address(buffer)
    view = view_of(buffer)
    del buffer
    taken = [buffers.take(LARGE_BYTES) for _ in range(2)]
    assert at not in [address(each) for each in taken]
    del view
    assert at == address(buffers.take(LARGE_BYTES))


def test_tensor_keeps_its_buffer() -> None:
    torch = pytest.importorskip("torch")
    buffers = Buffers()
    tensor = torch.from_numpy(buffers.take(LARGE_BYTES))[64:128].view(torch.int64)
    tensor[:] = 5
    gc.collect()
    buffers.take(LARGE_BYTES)[:] = 0
    buffers.close()
    assert tensor.tolist() == [5] * 8


def test_much_smaller_object_does_not_take_a_large_buffer() -> None:
    buffers = Buffers()
    at = address(buffers.take(8 * LARGE_BYTES))
    small = buffers.take(3 * LARGE_BYTES)
    assert not at <= address(small) < at + 8 * LARGE_BYTES
    del small
    assert address(buffers.take(8 * LARGE_BYTES)) == at


def test_only_the_largest_that_came_back_is_kept() -> None:
    buffers = Buffers()
    taken = [buffers.take(size * LARGE_BYTES) for size in (2, 6, 4)]
    del taken
    assert [len(pages) for pages in buffers._spare] == [6 * LARGE_BYTES]


def test_closed_buffers_keep_nothing() -> None:
    buffers = Buffers()
    held = buffers.take(LARGE_BYTES)
    buffers.take(LARGE_BYTES)
    for _ in range(2):
        buffers.close()
    held[:] = 1
    del held
    assert not buffers._spare


def test_spare_that_is_taken_while_another_comes_back_is_no_error() -> None:
    class Taken(collections.deque[mmap.mmap]):
        def __len__(self) -> int:  # whoever asks whether there is one finds it gone
            length = super().__len__()
            self.clear()
            return length

    buffers = Buffers()
    buffers._spare = Taken([mmap.mmap(-1, LARGE_BYTES)], maxlen=1)
    pages = mmap.mmap(-1, LARGE_BYTES)
    buffers._give_back(pages)
    assert buffers._spare.pop() is pages


def test_kernel_that_takes_no_advice_is_good_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    monkeypatch.setattr(module, "_MADV_FREE", 9999)
    buffers = Buffers()
    at = address(buffers.take(LARGE_BYTES))
    assert address(buffers.take(LARGE_BYTES)) == at


def test_what_no_machine_has_is_an_error() -> None:
    for nbytes in (1 << 50, 1 << 62):
        with pytest.raises(TransportError, match="no memory"):
            Buffers().take(nbytes)
