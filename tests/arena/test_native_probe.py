# SPDX-License-Identifier: Apache-2.0
"""The machine code finds and lists what numpy finds and lists, and refuses other arrays."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.arena import block_index
from omni_connector.arena import native_probe as module
from omni_connector.arena.block_index import BlockIndex
from omni_connector.arena.format import PAGE_BYTES
from omni_connector.arena.native_probe import native_change, native_probe, native_tags
from tests import inspection

TAGS = np.random.default_rng(0).integers(1, 1 << 64, 12, np.uint64)
ALIKE = TAGS[0] ^ np.arange(12, dtype=np.uint64) * np.uint64(1 << 40)
"""Tags with one fingerprint, and in small indexes with few buckets."""

holdings = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 23)), max_size=12)


@pytest.mark.parametrize("tags", [TAGS, ALIKE], ids=["any", "alike"])
@given(held=st.lists(holdings, max_size=4), asked=st.lists(st.integers(0, 11), max_size=12))
def test_machine_code_finds_what_numpy_finds(
    tags: block_index.Tags, held: list[list[tuple[int, int]]], asked: list[int]
) -> None:
    """Whichever blocks the indexes hold, in slots that were used before too."""
    pytest.importorskip("llvmlite")
    probe = native_probe()
    assert probe is not None
    indexes = [BlockIndex.create(24, b"epoch of an aren") for _ in held]
    for index, blocks in zip(indexes, held, strict=True):
        for generation, (block, slot) in enumerate(blocks):
            index.add(tags[[block]], np.array([slot]), np.array([generation]))
    wanted = tags[asked]
    places = np.zeros((2, 3, len(asked)), np.int64)
    words = b"".join(index._words for index in indexes)
    count = probe(words, len(indexes), wanted, places[0], False)
    assert count == block_index._probe(indexes, wanted, places[1])
    for at in range(count):  # more than one index may hold a block
        owner, slot, generation = places[0, :, at].tolist()
        slots, generations = indexes[owner].find(wanted[[at]])
        assert [slot, generation] == [slots[0], generations[0]]
    native = block_index.find_each(indexes, wanted)
    with patch.object(block_index, "native_probe", lambda: None):
        assert np.array_equal(native, block_index.find_each(indexes, wanted))
    assert [each >= 0 for each in native[0].tolist()] == [
        any((index.find(wanted[[at]])[0] >= 0).all() for index in indexes)
        for at in range(len(asked))
    ]
    for index in indexes:
        index.close()


def test_it_is_compiled_with_the_first_index_and_not_with_the_first_look_up() -> None:
    native_probe.cache_clear()
    BlockIndex.create(24, b"epoch of an aren").close()
    assert native_probe.cache_info().currsize == 1


blocks = st.dictionaries(st.integers(0, 23), st.integers(0, 11))
changes = st.one_of(blocks, st.lists(st.integers(0, 23)))


@pytest.mark.parametrize("tags", [TAGS, ALIKE], ids=["any", "alike"])
@given(told=st.lists(changes, max_size=6))
def test_machine_code_lists_what_numpy_lists(
    tags: block_index.Tags, told: list[dict[int, int] | list[int]]
) -> None:
    """Word for word, full buckets and slots that are listed already among them."""
    pytest.importorskip("llvmlite")
    native = BlockIndex.create(24, b"epoch of an aren")
    with patch.object(block_index, "native_change", lambda: None):
        other = BlockIndex.create(24, b"epoch of an aren")
    for number, change in enumerate(told):
        slots = np.array(list(change), np.int64)
        for index in (native, other):
            if isinstance(change, dict):
                wanted = tags[list(change.values())]
                index.add(wanted, slots, np.full(len(slots), number))
            else:
                index.remove(slots)
        # What a cell has had is left there, as only its fingerprint says whether it has anything.
        for name in ("_fingerprints", "_checks", "_generations", "_cell_of"):
            assert np.array_equal(getattr(native, name), getattr(other, name))
        assert np.array_equal(native.find(tags), other.find(tags))
    native.close()
    other.close()


@given(
    group=st.integers(0, 99),
    hashes=st.integers(0, 40).flatmap(
        lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=5)
    ),
)
def test_machine_code_computes_the_tags_that_numpy_computes(
    group: int, hashes: list[bytes]
) -> None:
    pytest.importorskip("llvmlite")
    assert native_tags() is not None
    native = block_index.tags_of(b"model", group, hashes)
    with patch.object(block_index, "native_tags", lambda: None):
        assert native.tolist() == block_index.tags_of(b"model", group, hashes).tolist()


def test_of_slots_that_do_not_exist_nothing_is_changed() -> None:
    pytest.importorskip("llvmlite")
    with BlockIndex.create(24, b"epoch of an aren") as index:
        index.add(TAGS[:1], np.array([0]), np.array([1]))
        before = bytes(inspection.mapped(index)[PAGE_BYTES:])
        for slot in (-1, 24, 1 << 62):
            with pytest.raises(IndexError, match="of 24"):
                index.add(TAGS[:2], np.array([0, slot]), np.array([2, 2]))
            with pytest.raises(IndexError, match="of 24"):
                index.remove(np.array([0, slot]))
        assert bytes(inspection.mapped(index)[PAGE_BYTES:]) == before


def test_arrays_that_do_not_agree_are_refused() -> None:
    pytest.importorskip("llvmlite")
    change = native_change()
    assert change is not None
    with pytest.raises(ValueError, match="for 2"):
        change(b"", np.array([0, 1]), TAGS[:1], np.array([0, 1]))
    probe = native_probe()
    assert probe is not None
    tags = native_tags()
    assert tags is not None
    for hashes, size in ((bytes(31), 16), (bytes(8), 4)):
        with pytest.raises(ValueError, match="of 2 hashes"):
            tags(hashes, size, 0, np.zeros(2, np.uint64))
    for places in (np.zeros((3, 11), np.int64), np.zeros((12, 3), np.int64).T):
        with pytest.raises(ValueError, match="for 12 tags"):
            probe(b"", 0, TAGS, places, False)


@pytest.mark.usefixtures("without_llvmlite")
def test_without_a_compiler_numpy_looks_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_engine", module._engine.__wrapped__)
    with caplog.at_level("WARNING", "vllm"):
        assert native_probe.__wrapped__() is None
    assert native_change.__wrapped__() is None
    assert native_tags.__wrapped__() is None
    assert "machine code cannot be used (llvmlite" in caplog.text
