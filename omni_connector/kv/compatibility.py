# SPDX-License-Identifier: Apache-2.0
"""What two engines must agree in before one reads the other's KV cache."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from omni_connector.kv.shapes import GroupShape, pickled
from omni_connector.kv.shapes import difference as groups_difference

# Most ranks of an engine, and most cache groups of a model. They bound messages.
MAX_RANKS: Final = 1024
MAX_GROUPS: Final = 256

Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, lt=1 << 40)]

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
        ranks: tensor-parallel size; each rank has an arena.
        groups: the cache groups, in the order in which their slots are leased.
        numerics: the settings that change what the model computes. It is left out, and not "",
            where there are none: the names of stored blocks depend on the encoded key.
        weights: identifies the files of configuration and weights. It is left out where `model` is
            a `model_id`, or where the files are unknown.
        weight_files: digest of all bytes of these files. It is left out where `model` is a
            `model_id`, where the files are unknown, and until it is made. It is no part of any
            name, because it may come at any time.
        drafter: method, weights and settings of the drafter, if it has a KV cache; else left out.
    """

    model: Text
    dtype: Text
    kv_dtype: Text
    integrity: Text
    kv_heads: Count
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    groups: Annotated[tuple[GroupShape, ...], Meta(min_length=1, max_length=MAX_GROUPS)]
    quantization: Text = ""
    overrides: Text = ""
    scales: Text = ""
    numerics: Text | UnsetType = UNSET
    weights: Text | UnsetType = UNSET
    weight_files: Text | UnsetType = UNSET
    drafter: Text | UnsetType = UNSET

    def __reduce__(self) -> tuple[Any, ...]:
        return pickled(self)

    def values(self) -> dict[str, object]:
        """All fields but the groups, by name; "" for one that is left out."""
        fields = msgspec.structs.asdict(self)
        del fields["groups"]
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
        return groups_difference(
            self.groups, self.ranks, reader.groups, reader.ranks, self.kv_heads
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
