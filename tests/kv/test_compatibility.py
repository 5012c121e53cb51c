# SPDX-License-Identifier: Apache-2.0
"""The compatibility key: what it compares, and how it is encoded."""

import pickle
import sys
import types
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from omni_connector.kv.compatibility import MAX_STAGES, CompatibilityKey, most_shards, most_stripes
from omni_connector.kv.shapes import GroupShape
from omni_connector.kv.stripes import SlotGroup

from .shapes import compatibility_key, group_shape

ORDINARY = compatibility_key()


@pytest.mark.parametrize(
    "field", ["model", "dtype", "quantization", "overrides", "scales", "numerics", "integrity"]
)
def test_a_reader_that_differs_is_told_the_field_and_both_values(field: str) -> None:
    other = compatibility_key(**{field: "another"})
    ours = ORDINARY.values()[field]
    assert ORDINARY.difference(other) == (field, ours, "another")
    assert other.difference(ORDINARY) == (field, "another", ours)
    assert other.difference(other) is None


def test_names_count_only_where_the_weights_of_one_side_are_unknown() -> None:
    known = compatibility_key(weights="w")
    assert known.difference(compatibility_key(model="another", weights="w")) is None
    assert known.difference(compatibility_key(weights="v")) == ("weights", "w", "v")
    assert known.difference(ORDINARY) is None
    other = compatibility_key(model="another")
    assert known.difference(other) == ("model", "m@1", "another")
    assert other.difference(known) == ("model", "another", "m@1")


def test_between_other_layouts_the_files_count_where_both_are_known() -> None:
    """The weights in memory of 1 rank and of 2 differ although the model is the same."""
    one = compatibility_key(weights="w", weight_files="f")
    two = compatibility_key(ranks=2, weights="v", weight_files="f")
    fits = one.difference(two)
    assert fits is None or fits[0] not in ("weights", "weight_files", "model")
    renamed = msgspec.structs.replace(two, model="another")
    assert one.difference(renamed) == fits
    other = msgspec.structs.replace(two, weight_files="g")
    assert one.difference(other) == ("weight_files", "f", "g")
    assert other.difference(one) == ("weight_files", "g", "f")


@pytest.mark.parametrize("untold", ["one", "other"])
def test_until_both_files_are_known_the_names_count(untold: str) -> None:
    one = compatibility_key(weights="w", weight_files="f")
    other = compatibility_key(ranks=2, weights="v", weight_files="g", model="another")
    if untold == "one":
        one = msgspec.structs.replace(one, weight_files=msgspec.UNSET)
    else:
        other = msgspec.structs.replace(other, weight_files=msgspec.UNSET)
    assert one.difference(other) == ("model", "m@1", "another")


def test_between_equal_layouts_the_files_count_where_the_memory_is_unknown() -> None:
    assert compatibility_key(weight_files="f").difference(compatibility_key(weight_files="g")) == (
        ("weight_files", "f", "g")
    )
    known = compatibility_key(weights="w", weight_files="f")
    assert known.difference(compatibility_key(weights="w", weight_files="g")) is None


def test_what_is_left_out_is_told_as_an_empty_text() -> None:
    values = ORDINARY.values()
    assert values["numerics"] == ""
    assert "groups" not in values
    others = {"groups", "later_stages", "drafter_layers", "stripes", "shards"}
    assert set(values) | others == set(CompatibilityKey.__struct_fields__)


def test_an_ordinary_key_has_the_fields_that_stores_know() -> None:
    # The names of stored blocks are digests of it: with another field none would be found again.
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(ORDINARY))
    assert [*encoded] == [
        "model",
        "dtype",
        "kv_dtype",
        "integrity",
        "kv_heads",
        "ranks",
        "groups",
        "quantization",
        "overrides",
        "scales",
    ]
    (group,) = encoded["groups"]
    assert [*group] == [
        "kind",
        "block_size",
        "attention_type",
        "window",
        "layers",
        "replicated",
        "attention",
        "pages",
    ]


@pytest.mark.parametrize(
    "key",
    [
        ORDINARY,
        compatibility_key(numerics="LongRoPE factors=long"),
        compatibility_key(groups=(group_shape(states="3x7 float16"),)),
    ],
)
def test_a_key_travels(key: CompatibilityKey) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(key), type=CompatibilityKey) == key


@pytest.mark.parametrize("value", [ORDINARY, ORDINARY.groups[0]], ids=["key", "shape"])
def test_keys_and_shapes_go_to_workers_whatever_modules_there_are(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pickles what its workers are told. pickle looks for UNSET in all modules, and modules of
    transformers raise when they are looked at without torchvision."""

    class Module(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(sys, "modules", {"a": Module("a"), **sys.modules})
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301 - our own bytes


def said(**changes: object) -> CompatibilityKey:
    """As another engine may have said it."""
    values = msgspec.to_builtins(ORDINARY) | changes
    return msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=CompatibilityKey)


def stage(**changes: object) -> list[GroupShape]:
    return [group_shape(**changes)]


def test_stage_is_compared_with_stage() -> None:
    one, other = said(later_stages=[stage(layers="b")]), said(later_stages=[stage(layers="c")])
    assert one.difference(said(later_stages=[stage(layers="b")])) is None
    assert one.difference(other) == ("layers of group 0 of pipeline stage 1", "b", "c")
    assert one.difference(ORDINARY) == ("pipeline stages", 2, 1)
    assert ORDINARY.difference(one) == ("pipeline stages", 1, 2)
    assert ORDINARY.num_arenas == 1
    assert said(ranks=4, later_stages=[stage(layers="b")] * 2).num_arenas == 12


def named(*stages: str) -> CompatibilityKey:
    """Of an engine whose stages have these layers, a letter each."""
    groups = [
        stage(layers=names, names=tuple(names), pages=("H2.N16.C64",) * len(names))
        for names in stages
    ]
    return said(groups=groups[0], **({"later_stages": groups[1:]} if groups[1:] else {}))


@pytest.mark.parametrize("reader", ["abcd", "a bcd", "ab cd", "abc d", "a b c d", "ac bd"])
@pytest.mark.parametrize("source", ["abcd", "ab cd", "a b cd", "bd ac"])
def test_engines_with_the_same_layers_in_other_stages_can_read_each_other(
    source: str, reader: str
) -> None:
    one, other = named(*source.split()), named(*reader.split())
    assert one.difference(other) is None
    assert one.has_bytes_of(other) == (source == reader)


@pytest.mark.parametrize(
    ("source", "reader", "only"),
    [
        ("ab c", "abcd", ("no others", "d")),  # a stage is missing
        ("ab cd", "abc", ("d", "no others")),
        ("ab cd", "ab", ("c, d", "no others")),
        ("abcd", "ef gh", ("a, b, c, d", "e, f, g, h")),
    ],
)
def test_layers_that_one_engine_lacks_are_named(
    source: str, reader: str, only: tuple[str, str]
) -> None:
    difference = named(*source.split()).difference(named(*reader.split()))
    assert difference == ("layers of group 0", *only)


def test_ten_thousand_layers_are_refused_by_the_first_names() -> None:
    names = tuple(f"layer.{i}" for i in range(10_000))
    many = stage(layers="m", names=names, pages=("H2.N16.C64",) * 10_000)
    difference = named("ab", "cd").difference(said(groups=many))
    assert difference is not None
    assert difference[0] == "layers of group 0"
    assert len(str(difference[2])) < 100


def test_other_stages_are_compared_layer_by_layer() -> None:
    one, other = named("ab", "cd"), named("abcd")
    turned = ("H2.N16.C64", "H2.N16.C64", "N16.H2.C64", "H2.N8.C64")
    [group] = other.groups
    other = msgspec.structs.replace(other, groups=(msgspec.structs.replace(group, pages=turned),))
    difference = one.difference(other)
    assert difference is not None
    assert "a page of 8 tokens in a block of 16" in difference[0]
    assert difference[0].endswith("pipeline stages 1 and 0, group 0")


def test_weights_in_memory_are_not_compared_between_other_stages() -> None:
    one = msgspec.structs.replace(named("ab", "cd"), weights="w")
    other = msgspec.structs.replace(named("abcd"), weights="v")
    assert one.difference(other) is None
    alike = msgspec.structs.replace(named("ab", "cd"), weights="v")
    assert one.difference(alike) == ("weights", "w", "v")


def test_bytes_are_the_same_only_if_they_are_in_all_stages() -> None:
    one = said(later_stages=[stage(layers="b")])
    assert one.has_bytes_of(one)
    turned = stage(layers="b", pages=("N16.H2.C64", "H2.N16.C64"))
    assert not one.has_bytes_of(said(later_stages=[turned]))
    assert one.difference(said(later_stages=[turned])) is None


def test_a_stage_without_layers_of_a_group_is_read_by_one_like_it() -> None:
    """However it comes that the names of both are alike."""
    without = said(later_stages=[stage(layers="", pages=())])
    assert without.difference(without) is None
    difference = without.difference(said(later_stages=[stage(layers="")]))
    assert difference is not None
    assert "pages of group 0 (full_attention)" in difference[0]
    assert difference[0].endswith("of pipeline stage 1")


def copied(*copies: int, **changes: object) -> list[Any]:
    """A group of two layers, of whose only head on each rank there are so many copies; as a peer
    would tell it."""
    [group] = msgspec.to_builtins(stage(pages=("H1.N16.C64", "H1.N16.C64")))
    return [{**group, "copies": copies, **changes}]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"later_stages": [stage(block_size=32)]}, "pipeline stage 1 has other cache groups"),
        ({"later_stages": [stage(), stage() * 2]}, "pipeline stage 2 has other cache groups"),
        ({"later_stages": [stage(kind="mla_attention")]}, "stage 1 has other cache groups"),
        ({"ranks": 1000, "later_stages": [stage()]}, "2000 ranks of 2 pipeline stages"),
        ({"groups": stage(pages=())}, "no layer keeps anything in group 0"),
        (
            {"groups": stage(pages=()), "later_stages": [stage(pages=())]},
            "no layer keeps anything in group 0",
        ),
        (
            {"groups": stage(names=("a", "b")), "later_stages": [stage(names=("c", "a"))]},
            "layer a is in several pipeline stages or groups",
        ),
        (
            {"groups": [*stage(names=("a", "b")), *stage(names=("b", "c"))]},
            "layer b is in several pipeline stages or groups",
        ),
        ({"ranks": 2, "stripes": 2}, "2 stripes of 2 ranks"),  # each rank has heads of its own
        ({"ranks": 4, "stripes": 3, "groups": stage(replicated=True)}, "3 stripes of 4 ranks"),
        ({"ranks": 4, "stripes": 8, "groups": stage(replicated=True)}, "8 stripes of 4 ranks"),
        ({"ranks": 8, "stripes": 4, "groups": copied(2, 2)}, "4 stripes of 8 ranks"),
        ({"ranks": 8, "stripes": 4, "groups": copied(4, 2)}, "4 stripes of 8 ranks"),
        (
            {"ranks": 8, "stripes": 4, "groups": [*copied(4, 4), *stage(names=("c", "d"))]},
            "4 stripes of 8 ranks",
        ),
        ({"ranks": 8, "groups": copied(3, 3)}, "3 copies of a head on 8 ranks"),
        ({"ranks": 8, "groups": copied(2, 16)}, "16 copies of a head on 8 ranks"),
        ({"groups": copied(2, 2)}, "2 copies of a head on 1 ranks"),
        ({"ranks": 8, "groups": copied(2)}, "copies of the heads of 1 of 2 pages"),
        ({"ranks": 8, "groups": copied(2, 2, pages=("H2.N16.C64",) * 2)}, "2 copies of 2 heads"),
        ({"ranks": 8, "groups": copied(2, 2, replicated=True)}, "copies of the heads of a full"),
        ({"ranks": 8, "groups": copied(0, 2)}, "groups.*copies"),
        ({"ranks": 8, "groups": copied(1 << 20, 2)}, "groups.*copies"),
        ({"ranks": 4, "stripes": (2, 2), "groups": copied(2, 2)}, "stripes of 2 pipeline stages"),
        (
            {
                "ranks": 4,
                "stripes": (2, 2),
                "groups": copied(2, 2),
                "later_stages": [copied(1, 1, layers="b")],
            },
            "2 stripes of 4 ranks",
        ),
        ({"ranks": 4, "stripes": (2,), "groups": copied(2, 2)}, "stripes"),
        ({"ranks": 4, "stripes": (0, 2), "groups": copied(2, 2)}, "stripes"),
        ({"stripes": 2, "groups": stage(replicated=True)}, "2 stripes of 1 ranks"),
        (
            {
                "ranks": 2,
                "stripes": 2,
                "groups": stage(replicated=True),
                "later_stages": [stage()],
            },
            "2 stripes of 2 ranks",
        ),
        ({"ranks": 4, "shards": 2}, "2 shards of 4 ranks"),
        ({"ranks": 4, "shards": 2, "groups": stage(replicated=True)}, "2 shards of 4 ranks"),
        (
            {
                "ranks": 4,
                "shards": 3,
                "groups": [*stage(replicated=True, names=("y", "z")), *stage()],
            },
            "3 shards of 4 ranks",
        ),
        ({"ranks": 2, "stripes": 2, "shards": 2, "groups": stage(replicated=True)}, "shards of"),
        ({"shards": 0}, "shards"),
        ({"stripes": 0}, "stripes"),
        ({"stripes": 1 << 20}, "stripes"),
        ({"later_stages": []}, "length"),
        ({"later_stages": [[]]}, "length"),
        ({"later_stages": [stage()] * MAX_STAGES}, "length"),
    ],
)
def test_stages_that_cannot_be_are_malformed(changes: dict[str, object], told: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=told):
        said(**changes)


def test_stripes_are_any_part_of_the_ranks_that_hold_the_same() -> None:
    for stripes in (1, 2, 4):
        key = said(ranks=8, stripes=stripes, groups=copied(4, 4))
        assert key.arenas_of(0, 5) == tuple(range(5 - 5 % stripes, 5 - 5 % stripes + stripes))
    groups = [*copied(4, 2), *stage(replicated=True, pages=("N16.C64",), layers="l")]
    assert most_stripes(said(ranks=8, groups=groups).groups, 8) == 2
    assert said(ranks=8, stripes=2, groups=groups).num_stripes == 2


def test_each_stage_has_stripes_of_its_own() -> None:
    later = [copied(2, 2, layers="b"), copied(2, 1, layers="c")]
    key = said(ranks=4, stripes=(4, 2, 1), groups=copied(4, 4), later_stages=later)
    assert key.read_by_ranks == (
        *[(0, 1, 2, 3)] * 4,
        *[(4, 5), (4, 5), (6, 7), (6, 7)],
        *[(8,), (9,), (10,), (11,)],
    )
    assert key.stripes_by_arena == (4, 4, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1)
    same = msgspec.structs.replace(key, stripes=(2, 2, 1))
    assert key.difference(same) is None
    assert not key.has_bytes_of(same)
    assert key.has_bytes_of(key)
    assert key.difference(msgspec.structs.replace(key, stripes=UNSET)) == (
        "stripes of slots",
        (4, 2, 1),
        "not known to this version",
    )
    assert key.of_sharing() == msgspec.structs.replace(key, stripes=UNSET).of_sharing()


def test_stripes_of_one_number_are_the_same_however_they_are_told() -> None:
    later = [copied(2, 2, layers="b")]
    key = said(ranks=4, stripes=2, groups=copied(2, 2), later_stages=later)
    assert key.has_bytes_of(msgspec.structs.replace(key, stripes=(2, 2)))


def replicated(ranks: int, stripes: int | None, stages: int = 1) -> CompatibilityKey:
    """Of an engine whose ranks hold the same bytes."""

    def latent(number: int) -> list[GroupShape]:
        return stage(replicated=True, pages=("N16.C64",), layers=str(number))

    changes: dict[str, object] = {"ranks": ranks, "groups": latent(0)}
    if stripes is not None:
        changes["stripes"] = stripes
    if stages > 1:
        changes["later_stages"] = [latent(number) for number in range(1, stages)]
    return said(**changes)


def test_slots_are_read_of_all_ranks_of_a_stage_over_which_they_are_spread() -> None:
    assert replicated(2, 2, stages=2).read_by_ranks == ((0, 1), (0, 1), (2, 3), (2, 3))
    assert replicated(2, 1, stages=2).read_by_ranks == ((0,), (1,), (2,), (3,))
    assert replicated(3, None).read_by_ranks == ((0,), (1,), (2,))


@pytest.mark.parametrize("reader", [(1, 1), (2, 1), (2, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("source", [(1, 1), (2, 1), (2, 2), (4, 4), (2, None)], ids=str)
def test_engines_that_spread_their_slots_otherwise_read_each_other(
    source: tuple[int, int | None], reader: tuple[int, int]
) -> None:
    one, other = replicated(*source), replicated(*reader)
    assert one.difference(other) is None
    alike = source[0] == reader[0] and (source[1] or 1) == reader[1]
    assert one.has_bytes_of(other) == alike


def test_who_knows_no_stripes_reads_none() -> None:
    older = replicated(2, None)
    assert replicated(2, 2).difference(older) == (
        "stripes of slots",
        2,
        "not known to this version",
    )
    assert replicated(2, 1).difference(older) is None
    assert older.difference(replicated(2, 2)) is None


def divided(ranks: int, shards: int | None) -> CompatibilityKey:
    """Of an engine whose ranks hold the same bytes of the first group, and others of the second."""
    own = stage(pages=("N16.C64",), layers="own", names=("own",))
    latent = stage(replicated=True, pages=("N16.C64",), layers="latent", names=("latent",))
    changes = {} if shards is None else {"stripes": 1, "shards": shards}
    return said(ranks=ranks, groups=[*latent, *own], **changes)


def test_blocks_of_which_ranks_hold_different_bytes_have_a_slot_in_each_stripe() -> None:
    key = divided(4, 4)
    assert [(each.group, each.stripe) for each in key.slot_groups] == [
        (0, None),
        *((1, stripe) for stripe in range(4)),
    ]
    assert key.slot_group_ranges == [range(1), range(1, 5)]
    assert key.num_stripes == 4
    assert key.read_by_ranks == ((0, 1, 2, 3),) * 4
    assert most_shards(key.groups, 4) == 4
    assert most_shards(key.groups[:1], 4) == most_shards(key.groups[1:], 4) == 1
    plain = divided(4, 1)
    assert plain.slot_groups == (SlotGroup(0), SlotGroup(1))


def test_who_knows_no_shards_reads_none() -> None:
    older = divided(4, None)
    assert divided(4, 2).difference(older) == ("stripes of slots", 2, "not known to this version")
    older = msgspec.structs.replace(older, stripes=1)
    assert divided(4, 2).difference(older) == ("shards of blocks", 2, "not known to this version")
    assert divided(4, 1).difference(older) is None
    assert older.difference(divided(4, 2)) is None
    assert divided(4, 2).of_sharing() == older.of_sharing()


@pytest.mark.parametrize("source", [1, 2, 4])
@pytest.mark.parametrize("reader", [1, 2, 4])
def test_slots_are_read_as_they_are_where_blocks_are_divided_alike(
    source: int, reader: int
) -> None:
    assert divided(4, source).difference(divided(4, reader)) is None
    assert divided(4, source).has_bytes_of(divided(4, reader)) == (source == reader)


def test_most_groups_of_slots_are_bounded() -> None:
    many = [*divided(4, 1).groups[:1], *stage(pages=("N16.C64",), names=("x",)) * 100]
    assert most_shards(many, 4) == 1


def replaced(key: CompatibilityKey, **changes: object) -> CompatibilityKey:
    return msgspec.structs.replace(key, **changes)


def with_names(key: CompatibilityKey) -> CompatibilityKey:
    """The same, with names of the layers of both its stages."""
    [first], [later] = key.stages
    groups = replaced(first, names=("a", "b")), replaced(later, names=("c", "d"))
    return replaced(key, groups=groups[:1], later_stages=(groups[1:],))


TWO_STAGES = said(later_stages=[stage(layers="cd")])
HEADS = ("H1.N16.C64", "H1.N16.C64")


@pytest.mark.parametrize(
    ("told", "untold"),
    [
        (replaced(ORDINARY, weight_files="f"), ORDINARY),
        (with_names(TWO_STAGES), TWO_STAGES),
        (said(ranks=8, groups=copied(2, 2)), said(ranks=8, groups=stage(pages=HEADS))),
        (replicated(2, 2), replicated(2, None)),
        (divided(4, 2), divided(4, None)),
        (
            said(groups=stage(names=("a", "X")), drafter="mtp 0", drafter_layers=("X",)),
            said(groups=stage(names=("a", "X")), drafter="mtp 0"),
        ),
    ],
    ids=["files", "names", "copies", "stripes", "shards", "drafter"],
)
def test_what_only_readers_are_told_changes_no_name_of_what_is_shared(
    told: CompatibilityKey, untold: CompatibilityKey
) -> None:
    assert told != untold
    assert told.of_sharing() == untold.of_sharing()
    assert ORDINARY.of_sharing() == ORDINARY
