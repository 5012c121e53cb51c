# SPDX-License-Identifier: Apache-2.0
"""Which layers an engine reads of one that has no drafter, or that alone has one."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.kv.compatibility import CompatibilityKey, LayerPlaces
from omni_connector.kv.convert import page_starts
from omni_connector.kv.heads import HeadSlice
from omni_connector.kv.shapes import GroupShape, converter

from .shapes import compatibility_key, group_shape

PAGE = "H2.N16.C64"
PAGE_BYTES = 2 * 16 * 64


def group(names: str) -> GroupShape:
    """A group with these layers, a letter each."""
    pages = (PAGE,) * len(names)
    return group_shape(layers=names, names=tuple(names), pages=pages)


def engine(*groups: str, stages: tuple[str, ...] = ()) -> CompatibilityKey:
    """One whose groups have these layers; those of its drafter are capitals.

    Args:
        stages: of the later pipeline stages, the layers of the only group.
    """
    drafters = tuple(sorted(name for names in groups for name in names if name.isupper()))
    changes: dict[str, object] = {"groups": tuple(map(group, groups))}
    if drafters:
        changes |= {"drafter": "mtp 0", "drafter_layers": drafters}
    if stages:
        changes["later_stages"] = tuple((group(each),) for each in stages)
    return compatibility_key(**changes)


@pytest.mark.parametrize(
    ("source", "reader", "read_from"),
    [
        (["abc"], ["abcX"], (0,)),
        (["abc"], ["Xabc"], (0,)),
        (["abc"], ["abc", "XY"], (0, None)),
        (["ab", "cd"], ["cdX", "ab"], (1, 0)),
        (["abcd"], ["ab", "cdX"], (0, 0)),  # each reads its pages of the same slots
        (["abcX"], ["abc"], (0,)),
        (["X", "abc"], ["abc"], (1,)),
        (["aXb", "cd"], ["ab", "cd"], (0, 1)),
        (["abX"], ["abX"], (0,)),
    ],
    ids=str,
)
def test_each_group_is_read_from_the_one_that_has_its_layers(
    source: list[str], reader: list[str], read_from: tuple[int | None, ...]
) -> None:
    one, other = engine(*source), engine(*reader)
    assert one.difference(other) is None
    assert one.groups_read_by(other) == read_from
    assert one.has_bytes_of(other) == (source == reader)
    assert one.lacks_drafter_of(other) == ("X" not in str(source))


def test_a_drafter_is_read_beside_pipeline_stages() -> None:
    one, other = engine("ab", stages=("cd",)), engine("abcdX")
    assert one.difference(other) is None
    assert other.difference(one) is None
    places = LayerPlaces.of(one)
    assert places is not None
    assert places.read_by(other.groups[0]) == [
        (0, 0, [(0, 0), (1, 1)]),
        (1, 0, [(0, 2), (1, 3)]),
    ]


@pytest.mark.parametrize(
    ("source", "reader", "told"),
    [
        (["ab"], ["abcX"], ("layers of group 0", "no others", "c")),
        (["abcd"], ["abcX"], ("layers of group 0", "d", "no others")),
        (["abX"], ["abc"], ("layers of group 0", "no others", "c")),
        (["abcX"], ["ab"], ("layers of group 0", "c", "no others")),
        (["ab", "c"], ["abcX"], ("groups that have the layers of group 0", 2, 1)),
        (["ab", "c"], ["abX"], ("layers of group 1", "c", "no others")),
    ],
    ids=str,
)
def test_layers_of_the_model_that_one_engine_lacks_are_named(
    source: list[str], reader: list[str], told: tuple[str, object, object]
) -> None:
    assert engine(*source).difference(engine(*reader)) == told


def test_a_layer_of_the_model_named_like_one_of_the_peers_drafter_is_not_read_from_it() -> None:
    model = compatibility_key(groups=(group("abX"),))
    told = "layers of group 0"
    for one, other in ((engine("abX"), model), (model, engine("abX"))):
        difference = one.difference(other)
        assert difference is not None
        assert difference[0] == told


def test_what_a_peer_calls_its_drafters_is_no_excuse_for_layers_that_it_lacks() -> None:
    lies = msgspec.structs.replace(engine("abX"), drafter_layers=("a", "b", "X"))
    assert lies.difference(engine("ab")) == ("layers of group 0", "no others", "a, b")


def test_drafters_that_differ_and_drafters_without_names_are_refused() -> None:
    other = msgspec.structs.replace(engine("abX"), drafter="eagle 0")
    assert engine("abX").difference(other) == ("drafter", "mtp 0", "eagle 0")
    unknown = msgspec.structs.replace(engine("abX"), drafter_layers=msgspec.UNSET)
    assert engine("ab").difference(unknown) == ("drafter", "", "mtp 0")
    assert unknown.difference(engine("ab")) == ("drafter", "mtp 0", "")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"drafter_layers": ("b", "z")}, "drafter's layer z is in no group"),
        ({"drafter": msgspec.UNSET}, "no drafter"),
        ({"drafter_layers": ()}, "length"),
        ({"drafter_layers": ("x" * 2000,)}, "length"),
    ],
    ids=str,
)
def test_layers_of_a_drafter_that_cannot_be_are_malformed(
    changes: dict[str, object], told: str
) -> None:
    made = msgspec.structs.asdict(engine("abX")) | changes
    encoded = msgspec.msgpack.encode({k: v for k, v in made.items() if v is not msgspec.UNSET})
    with pytest.raises(msgspec.ValidationError, match=told):
        msgspec.msgpack.decode(encoded, type=CompatibilityKey)


@st.composite
def grouped(draw: st.DrawFn, layers: str) -> list[str]:
    """These layers in groups, in any order."""
    shuffled = draw(st.permutations(layers))
    ends = sorted(draw(st.sets(st.integers(1, len(layers) - 1))) | {0, len(layers)})
    return ["".join(shuffled[begin:end]) for begin, end in pairwise(ends)]


@given(grouped("abcde"), grouped("abcdeXY"))
def test_every_page_is_read_from_its_layer(source: list[str], reader: list[str]) -> None:
    """A page is filled with the letter of its layer; those of the drafter are left zero."""
    one, other = engine(*source), engine(*reader)
    readable = all(sum(bool(set(there) & set(here)) for there in source) < 2 for here in reader)
    assert (one.difference(other) is None) == readable
    if not readable:
        return
    places = LayerPlaces.of(one)
    assert places is not None
    heads = HeadSlice(0, 0, 2)
    for read_from, names, shape in zip(
        one.groups_read_by(other), reader, other.groups, strict=True
    ):
        made = np.zeros(PAGE_BYTES * len(names), np.uint8)
        for part in places.read_by(shape):
            assert part.group == read_from
            theirs = one.groups[part.group]
            slot = np.repeat(np.frombuffer(source[part.group].encode(), np.uint8), PAGE_BYTES)
            converts = converter(theirs, shape, places=part.places, like_ranks=True)
            converts.copy(slot, 0, made, 0, [heads] * len(part.places), end_token=16)
        expected = "".join("\0" if name.isupper() else name for name in names)
        assert page_starts(shape.pages)[-1] == len(made)
        assert made[::PAGE_BYTES].tobytes().decode() == expected
        assert (made.reshape(len(names), -1) == made[::PAGE_BYTES, None]).all()


@given(grouped("abcdeXY"), grouped("abcde"))
def test_a_drafter_of_the_other_side_is_left_out_wherever_it_is(
    source: list[str], reader: list[str]
) -> None:
    one, other = engine(*source), engine(*reader)
    of_model = ["".join(n for n in names if n.islower()) for names in source]
    readable = all(sum(bool(set(of) & set(here)) for of in of_model) < 2 for here in reader)
    assert (one.difference(other) is None) == readable
    if readable:
        read_from = one.groups_read_by(other)
        assert all(
            set(names) <= set(source[number])
            for names, number in zip(reader, read_from, strict=True)
            if number is not None
        )
        assert None not in read_from
