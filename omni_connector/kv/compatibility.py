# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree in before one reads the other's KV cache."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omni_connector.kv.shapes import GroupShape, pickled, same_bytes
from omni_connector.kv.shapes import difference as groups_difference

# Most ranks of an engine, of all its pipeline stages; most cache groups of a model, and most
# pipeline stages. They bound messages.
MAX_RANKS: Final = 1024
MAX_GROUPS: Final = 256
MAX_STAGES: Final = 256

Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]
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
        later_stages: the same groups with the layers of each pipeline stage after the first; left
            out where there is one stage.

    Raises:
        ValueError: pipeline stages have other groups than the first, or too many ranks; or a group
            has no page in any stage.
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
    later_stages: (
        Annotated[tuple[Groups, ...], Meta(min_length=1, max_length=MAX_STAGES - 1)] | UnsetType
    ) = UNSET

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

    @property
    def stages(self) -> tuple[tuple[GroupShape, ...], ...]:
        """The groups of each pipeline stage, with its layers."""
        return (self.groups, *(self.later_stages or ()))

    @property
    def num_arenas(self) -> int:
        """Ranks of all pipeline stages. Rank r of stage s has arena `s * ranks + r`."""
        return self.ranks * len(self.stages)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled(self)

    def values(self) -> dict[str, object]:
        """All fields but the groups, by name; "" for one that is left out."""
        fields = msgspec.structs.asdict(self)
        del fields["groups"], fields["later_stages"]
        return {name: "" if value is UNSET else value for name, value in fields.items()}

    def of_sharing(self) -> "CompatibilityKey":
        """The same without a name that says less than the weights do; equal for all that share."""
        model = "" if self.weights else self.model
        return msgspec.structs.replace(self, model=model, weight_files=UNSET)

    def difference(self, reader: "CompatibilityKey") -> tuple[str, object, object] | None:
        """Why `reader` cannot read our slots: what differs, with both values; None if it can."""
        ours, theirs = self.values(), reader.values()
        for field in (self._tells_weights(reader), *_BESIDES):
            if ours[field] != theirs[field]:
                return field, ours[field], theirs[field]
        if len(self.stages) != len(reader.stages):
            return "pipeline stages", len(self.stages), len(reader.stages)
        # Stage i is read by stage i alone, and only if both have the same layers.
        for number, groups in enumerate(zip(self.stages, reader.stages, strict=True)):
            source, target = groups
            found = groups_difference(source, self.ranks, target, reader.ranks, self.kv_heads)
            if found is not None:
                field, ours_there, theirs_there = found
                where = f" of pipeline stage {number}" if self.later_stages else ""
                return f"{field}{where}", ours_there, theirs_there
        return None

    def has_bytes_of(self, reader: "CompatibilityKey") -> bool:
        """Whether the slots of each rank hold the bytes of the blocks of that rank of `reader`,
        which can read them."""
        return self.ranks == reader.ranks and all(
            same_bytes(source, target)
            for stages in zip(self.stages, reader.stages, strict=True)
            for source, target in zip(*stages, strict=True)
        )

    def _tells_weights(self, reader: "CompatibilityKey") -> str:
        """The field that tells whether both engines were started with the same weights.

        Samples of files tell it at once, and digests of all their bytes once they are made. Dummy
        weights are drawn for each rank, so `weights` are compared only between engines of as many
        ranks. The model's name counts where one of the two knows nothing else.
        """
        if self.weights and reader.weights and self.ranks == reader.ranks:
            return "weights"
        return "weight_files" if self.weight_files and reader.weight_files else "model"
