# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree in before one reads the other's KV cache."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omni_connector.errors import LayoutError
from omni_connector.kv.shapes import GroupShape, converter, pickled, same_bytes
from omni_connector.kv.shapes import difference as groups_difference
from omni_connector.kv.stripes import SlotGroup, owning_arenas, slot_group_ranges, slot_groups_of

# Most ranks of an engine, of all its pipeline stages; most cache groups of a model, most pipeline
# stages, and most layers of a drafter. They bound messages.
MAX_RANKS: Final = 1024
MAX_GROUPS: Final = 256
MAX_STAGES: Final = 256
MAX_DRAFTER_LAYERS: Final = 1024

Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
Stripes = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Groups = Annotated[tuple[GroupShape, ...], Meta(min_length=1, max_length=MAX_GROUPS)]

_BESIDES: Final = (
    "dtype",
    "quantization",
    "overrides",
    "kv_dtype",
    "scales",
    "numerics",
    "drafter",
    "integrity",
    "kv_heads",
)


class CompatibilityKey(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine keeps in its slots.

    Attributes:
        model: `model_id`, or the model's name and revision.
        dtype: dtype of the weights and activations.
        kv_dtype: dtype of the KV cache.
        quantization: method and settings of the weights' quantization; "" where there is none.
        overrides: identifies the changes to the model's configuration; "" where there are none.
        scales: identifies the scales that quantize keys, values and attention; "" where all are 1.
        integrity: whether slots carry checksums.
        kv_heads: KV heads of the whole model; 0 where it has no attention.
        ranks: tensor-parallel size. Each rank of each pipeline stage has an arena.
        groups: the cache groups, in the order in which their slots are leased; with the layers of
            the first pipeline stage.
        numerics: the settings that change what the model computes. It is left out, and not "",
            where there are none: the names of stored blocks depend on the encoded key.
        weights: identifies the files of configuration and weights. It is left out where `model` is
            a `model_id`, or where the files are unknown.
        weight_files: digest of all bytes of these files. It is left out where `model` is a
            `model_id`, where the files are unknown, and until it is made. It is no part of any
            name, because it may come at any time.
        drafter: method, weights and settings of the drafter, if it has a KV cache; else left out.
        drafter_layers: names of the drafter's layers, which an engine without a drafter has not;
            left out where there are none, or where they are not known.
        later_stages: the same groups with the layers of each pipeline stage after the first; left
            out where there is one stage.
        stripes: tensor-parallel ranks over which slots are spread; see `kv.stripes`. One number
            for each pipeline stage where these differ. Left out by engines of versions that know no
            stripes, and in names of stored blocks.
        shards: into how many shards a block is divided, in groups of which ranks hold different
            bytes, so that slots of the other groups are spread over as many ranks; 1 where no block
            is divided. If it is more, `stripes` is 1. Left out by engines of versions that know no
            shards, and in names of stored blocks.

    Raises:
        ValueError: pipeline stages have other groups than the first, or too many ranks; or a group
            has no page in any stage; or slots are spread of which ranks hold different bytes; or
            blocks are divided of which they hold the same; or ranks cannot have as many copies of a
            head.
    """

    model: Text
    dtype: Text
    kv_dtype: Text
    integrity: Text
    kv_heads: Count
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    groups: Groups
    quantization: Text = ""
    overrides: Text = ""
    scales: Text = ""
    numerics: Text | UnsetType = UNSET
    weights: Text | UnsetType = UNSET
    weight_files: Text | UnsetType = UNSET
    drafter: Text | UnsetType = UNSET
    drafter_layers: (
        Annotated[tuple[Text, ...], Meta(min_length=1, max_length=MAX_DRAFTER_LAYERS)] | UnsetType
    ) = UNSET
    later_stages: (
        Annotated[tuple[Groups, ...], Meta(min_length=1, max_length=MAX_STAGES - 1)] | UnsetType
    ) = UNSET
    stripes: (
        Stripes
        | Annotated[tuple[Stripes, ...], Meta(min_length=2, max_length=MAX_STAGES)]
        | UnsetType
    ) = UNSET
    shards: Stripes | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.num_arenas > MAX_RANKS:
            raise ValueError(f"{self.num_arenas} ranks of {len(self.stages)} pipeline stages")
        own = [each.block_table for each in self.groups]
        for number, stage in enumerate(self.stages[1:], 1):
            if [each.block_table for each in stage] != own:
                raise ValueError(f"pipeline stage {number} has other cache groups than stage 0")
        for number, group in enumerate(zip(*self.stages, strict=True)):
            if not any(shape.pages for shape in group):
                raise ValueError(f"no layer keeps anything in group {number}")
        named = Counter(
            name for stage in self.stages for group in stage for name in group.names or ()
        )
        if twice := [name for name, times in named.items() if times > 1]:
            raise ValueError(f"layer {twice[0]} is in several pipeline stages or groups")
        if self.drafter_layers and (unknown := set(self.drafter_layers) - named.keys()):
            raise ValueError(f"the drafter's layer {min(unknown)} is in no group")
        if self.drafter_layers and self.drafter is UNSET:
            raise ValueError("layers of a drafter, but no drafter")
        copies = (each for groups in self.stages for group in groups for each in group.copies or ())
        if odd := [each for each in copies if self.ranks % each]:
            raise ValueError(f"{odd[0]} copies of a head on {self.ranks} ranks")
        if len(self.stripes_by_stage) != len(self.stages):
            raise ValueError(f"stripes of {len(self.stripes_by_stage)} pipeline stages")
        for groups, stripes in zip(self.stages, self.stripes_by_stage, strict=True):
            if self.num_shards == 1 and most_stripes(groups, self.ranks) % stripes:
                raise ValueError(f"{stripes} stripes of {self.ranks} ranks")
        if self.num_shards > 1:
            self._check_shards()

    def _check_shards(self) -> None:
        if self.later_stages or self.stripes not in (UNSET, 1):
            raise ValueError("shards of several pipeline stages, or beside stripes")
        if most_shards(self.groups, self.ranks) % self.num_shards:
            raise ValueError(f"{self.num_shards} shards of {self.ranks} ranks")

    @property
    def num_shards(self) -> int:
        """Into how many shards a block is divided, in the groups of which blocks are; else 1."""
        return self.shards or 1

    @property
    def slot_groups(self) -> tuple[SlotGroup, ...]:
        """The slot groups, in the order in which their slots are leased."""
        copies = [group.num_copies(self.ranks) for group in self.groups]
        return slot_groups_of(copies, self.num_shards)

    @property
    def slot_group_ranges(self) -> list[range]:
        """For each group the numbers of its slot groups."""
        return slot_group_ranges(self.slot_groups)

    @property
    def stages(self) -> tuple[tuple[GroupShape, ...], ...]:
        """The groups of each pipeline stage, with its layers."""
        return (self.groups, *(self.later_stages or ()))

    @property
    def num_arenas(self) -> int:
        """Ranks of all pipeline stages. Rank r of stage s has arena `s * ranks + r`."""
        return self.ranks * len(self.stages)

    @property
    def stripes_by_stage(self) -> tuple[int, ...]:
        """Ranks of each pipeline stage over which slots are spread; 1: every rank has all slots."""
        if self.num_shards > 1:
            return (self.num_shards,)
        if isinstance(self.stripes, tuple):
            return self.stripes
        return (self.stripes or 1,) * len(self.stages)

    @property
    def num_stripes(self) -> tuple[int, ...] | int:
        """The same, as one number where it is the same of all pipeline stages."""
        stripes = self.stripes_by_stage
        return stripes if len(set(stripes)) > 1 else stripes[0]

    @property
    def stripes_by_arena(self) -> tuple[int, ...]:
        """The same of each rank, stage by stage."""
        return tuple(each for each in self.stripes_by_stage for _ in range(self.ranks))

    def arenas_of(self, stage: int, rank: int) -> tuple[int, ...]:
        """The arenas that have the bytes of one rank; see `kv.stripes.owning_arenas`."""
        return owning_arenas(stage, rank, self.ranks, self.stripes_by_stage[stage])

    @property
    def read_by_ranks(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, stage by stage, the arenas that it reads of an engine like this one, and
        of this engine itself."""
        ranks = (divmod(number, self.ranks) for number in range(self.num_arenas))
        return tuple(self.arenas_of(stage, rank) for stage, rank in ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled(self)

    def values(self) -> dict[str, object]:
        """All fields but groups, layers, stripes and shards, by name; "" for one that is left
        out."""
        fields = msgspec.structs.asdict(self)
        for name in ("groups", "later_stages", "drafter_layers", "stripes", "shards"):
            del fields[name]
        return {name: "" if value is UNSET else value for name, value in fields.items()}

    def of_sharing(self) -> "CompatibilityKey":
        """The same without names of layers, what kernels keep and how ranks share out states, as
        digests, kernels and shapes say as much, without a name of the model that says less than
        the weights do, and without stripes, shards and copies of heads; equal for all that
        share."""
        model = "" if self.weights else self.model
        first, *later = (
            tuple(
                msgspec.structs.replace(group, names=UNSET, kept=UNSET, cut=UNSET, copies=UNSET)
                for group in stage
            )
            for stage in self.stages
        )
        return msgspec.structs.replace(
            self,
            model=model,
            weight_files=UNSET,
            drafter_layers=UNSET,
            groups=first,
            later_stages=tuple(later) or UNSET,
            stripes=UNSET,
            shards=UNSET,
        )

    def difference(self, reader: "CompatibilityKey") -> tuple[str, object, object] | None:
        """Why `reader` cannot read our slots: what differs, with both values; None if it can."""
        ours, theirs = self.values(), reader.values()
        for field in (self._tells_weights(reader), *_BESIDES):
            if field == "drafter" and self._one_drafts(reader):
                continue
            if ours[field] != theirs[field]:
                return field, ours[field], theirs[field]
        if self.num_stripes != 1 and reader.stripes is UNSET:
            return "stripes of slots", self.num_stripes, "not known to this version"
        if self.num_shards != 1 and reader.shards is UNSET:
            return "shards of blocks", self.num_shards, "not known to this version"
        if self._one_drafts(reader) or not self.has_layers_of(reader):
            places, theirs_placed = LayerPlaces.of(self), LayerPlaces.of(reader)
            if places is not None and theirs_placed is not None:
                return self._difference_by_layer(reader, places, theirs_placed)
            if self._one_drafts(reader):  # which layers are the drafter's cannot be told
                return "drafter", ours["drafter"], theirs["drafter"]
            if len(self.stages) != len(reader.stages):
                return "pipeline stages", len(self.stages), len(reader.stages)
        for number, groups in enumerate(zip(self.stages, reader.stages, strict=True)):
            source, target = groups
            found = groups_difference(source, self.ranks, target, reader.ranks, self.kv_heads)
            if found is not None:
                field, ours_there, theirs_there = found
                where = f" of pipeline stage {number}" if self.later_stages else ""
                return f"{field}{where}", ours_there, theirs_there
        return None

    def has_stages_of(self, reader: "CompatibilityKey") -> bool:
        """Whether both spread the model's layers over as many pipeline stages in the same way."""
        if not self.later_stages and not reader.later_stages:
            return True
        return self.has_layers_of(reader)

    def has_layers_of(self, reader: "CompatibilityKey") -> bool:
        """Whether both have the same layers in each group of each pipeline stage.

        Then group j of stage i is read by group j of stage i alone.
        """
        return [[group.layers for group in stage] for stage in self.stages] == [
            [group.layers for group in stage] for stage in reader.stages
        ]

    def groups_read_by(self, reader: "CompatibilityKey") -> tuple[int | None, ...]:
        """For each group of an engine that can read our slots, the group of ours that it is read
        from; None for one of which we have no layer: a drafter's."""
        places = None if self.has_layers_of(reader) else LayerPlaces.of(self)
        if places is None:
            return tuple(range(len(reader.groups)))
        return tuple(
            places.group_of(name for shape in shapes for name in shape.names or ())
            for shapes in zip(*reader.stages, strict=True)
        )

    def lacks_drafter_of(self, reader: "CompatibilityKey") -> bool:
        """Whether our slots have nothing of the layers of the reader's drafter."""
        return self.drafter is UNSET and reader.drafter is not UNSET

    def _one_drafts(self, reader: "CompatibilityKey") -> bool:
        """Whether one of both engines has a drafter, whose layers it names, and the other none."""
        if reader.drafter is UNSET:
            return bool(self.drafter_layers)
        return bool(reader.drafter_layers) and self.drafter is UNSET

    def _difference_by_layer(
        self, reader: "CompatibilityKey", ours: "LayerPlaces", theirs: "LayerPlaces"
    ) -> tuple[str, object, object] | None:
        """The same of engines that have other layers in their groups or pipeline stages.

        Layers of a drafter that only one of both has are left out.
        """
        if not self._one_drafts(reader) and len(self.groups) != len(reader.groups):
            return groups_difference(
                self.groups, self.ranks, reader.groups, reader.ranks, self.kv_heads
            )
        # Each side's word counts for its own layers only.
        read = theirs.without(reader.drafter_layers if self.lacks_drafter_of(reader) else UNSET)
        kept = ours.without(self.drafter_layers if reader.lacks_drafter_of(self) else UNSET)
        for number in range(len(reader.groups)):
            there = read.of_group(number)
            groups = {kept.layers[name].group for name in there & kept.layers.keys()}
            if len(groups) > 1:
                return f"groups that have the layers of group {number}", len(groups), 1
            here = kept.of_group(groups.pop() if groups else number)
            if not there <= here:
                only = sorted(here - read.layers.keys())[:4], sorted(there - here)[:4]
                return f"layers of group {number}", _listed(only[0]), _listed(only[1])
        for number in range(len(self.groups)):
            if unread := kept.of_group(number) - read.layers.keys():
                return f"layers of group {number}", _listed(sorted(unread)[:4]), _listed(())
        for stage, shapes in enumerate(reader.stages):
            for number, target in enumerate(shapes):
                for part in ours.read_by(target):
                    source = self.stages[part.stage][part.group]
                    found = self._difference_of_layers(reader, source, target, part.places)
                    if found is not None:
                        field, ours_there, theirs_there = found
                        where = f"{part.stage} and {stage}, group {number}"
                        return f"{field}, pipeline stages {where}", ours_there, theirs_there
        return None

    def _difference_of_layers(
        self,
        reader: "CompatibilityKey",
        source: GroupShape,
        target: GroupShape,
        places: Sequence[tuple[int, int]],
    ) -> tuple[str, object, object] | None:
        here = source.of_layers([at for at, _ in places])
        there = target.of_layers([at for _, at in places])
        found = groups_difference((here,), self.ranks, (there,), reader.ranks, self.kv_heads)
        # States of other numbers of ranks are not rewritten by a converter.
        if found is None and (source.attention_type != "last" or self.ranks == reader.ranks):
            try:
                converter(source, target, places=places, like_ranks=self.ranks == reader.ranks)
            except LayoutError as error:
                return f"pages ({error})", here.pages[0], there.pages[0]
        return found

    def has_bytes_of(self, reader: "CompatibilityKey") -> bool:
        """Whether the slots of each rank hold the bytes of the blocks of that rank of `reader`,
        which can read them and spreads its own slots in the same way."""
        return (
            self.ranks == reader.ranks
            and self.num_stripes == reader.num_stripes
            and self.slot_groups == reader.slot_groups
            and self.has_layers_of(reader)
            and all(
                same_bytes(source, target)
                for stages in zip(self.stages, reader.stages, strict=True)
                for source, target in zip(*stages, strict=True)
            )
        )

    def _tells_weights(self, reader: "CompatibilityKey") -> str:
        """The field that tells whether both engines were started with the same weights.

        Samples of files tell it at once, and digests of all their bytes once they are made. Dummy
        weights are drawn for each rank, so `weights` are compared only between engines of as many
        ranks. The model's name counts where one of the two knows nothing else.
        """
        alike = self.ranks == reader.ranks and self.has_stages_of(reader)
        if self.weights and reader.weights and alike:
            return "weights"
        return "weight_files" if self.weight_files and reader.weight_files else "model"


def most_stripes(groups: Iterable[GroupShape], ranks: int) -> int:
    """Tensor-parallel ranks over which slots can be spread: as many consecutive ones hold the same
    bytes of every group. All, if no rank holds any.

    Args:
        groups: of one pipeline stage.
        ranks: tensor-parallel size.
    """
    return gcd(ranks, *(group.num_copies(ranks) for group in groups))


def most_shards(groups: Sequence[GroupShape], ranks: int) -> int:
    """Shards into which blocks of some groups can be divided, so that slots of the other groups are
    spread: as many consecutive ranks hold the same bytes of each of the others. 1 where slots of
    all groups can be spread, or of none.

    Args:
        groups: of one pipeline stage, the only one.
        ranks: tensor-parallel size.
    """
    copies = [group.num_copies(ranks) for group in groups]
    several = [number for number in copies if number > 1]
    if not several or most_stripes(groups, ranks) > 1:
        return 1
    shards = gcd(ranks, *several)
    return shards if len(slot_groups_of(copies, shards)) <= MAX_GROUPS else 1


class LayerPlace(NamedTuple):
    """Where an engine keeps a layer: group, pipeline stage, and place among the pages there."""

    group: int
    stage: int
    at: int


class LayersRead(NamedTuple):
    """What a cache group reads of one pipeline stage of another engine.

    Attributes:
        stage, group: of the other engine.
        places: for each layer that both have, the places of its page there and here.
    """

    stage: int
    group: int
    places: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class LayerPlaces:
    """Where an engine keeps its layers.

    Attributes:
        layers: by name.
    """

    layers: dict[str, LayerPlace]

    @classmethod
    def of(cls, key: CompatibilityKey) -> "LayerPlaces | None":
        """Those of an engine; None if it does not tell the names of all."""
        layers: dict[str, LayerPlace] = {}
        for stage, shapes in enumerate(key.stages):
            for group, shape in enumerate(shapes):
                if shape.names is UNSET:
                    return None
                for at, name in enumerate(shape.names):
                    layers[name] = LayerPlace(group, stage, at)
        return cls(layers)

    def without(self, names: Iterable[str] | UnsetType) -> "LayerPlaces":
        """The same without these layers, where any are named."""
        left_out = frozenset() if names is UNSET else frozenset(names)
        return LayerPlaces({n: place for n, place in self.layers.items() if n not in left_out})

    def of_group(self, number: int) -> set[str]:
        """The names of the layers of a group, in all pipeline stages."""
        return {name for name, place in self.layers.items() if place.group == number}

    def read_by(self, reader: GroupShape) -> list[LayersRead]:
        """What a group of another engine reads, by our pipeline stages. Layers that we have not
        are left out.

        Args:
            reader: the group, in one pipeline stage.
        """
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for own, name in enumerate(reader.names or ()):
            place = self.layers.get(name)
            if place is not None:
                found.setdefault((place.stage, place.group), []).append((place.at, own))
        return [LayersRead(stage, group, pairs) for (stage, group), pairs in sorted(found.items())]

    def group_of(self, names: Iterable[str]) -> int | None:
        """The group that has the first of these layers that there are; None if there are none."""
        return next((self.layers[name].group for name in names if name in self.layers), None)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "no others"
