# SPDX-License-Identifier: Apache-2.0
"""The one tensor of all layers that model runners before vLLM 0.30 may allocate."""

from typing import Any

from omni_connector.errors import LayoutError


def cross_layer_dims(attn_backend: Any) -> str:
    """The dimensions of such a tensor.

    One letter for each, in the order of the tensor: L layers, B blocks, N tokens, H heads, C
    content, to which the pair of K and V belongs. An example is `BLCNHC`.

    Raises:
        LayoutError: the backend puts into one dimension what must be told apart.
    """
    sizes = {"B": 7, "N": 64, "H": 8, "C": 128}

    def shape(**changed: int) -> tuple[int, ...]:
        blocks, tokens, heads, content = (sizes | changed).values()
        return tuple(attn_backend.get_kv_cache_shape(blocks, tokens, heads, content))

    usual = shape()
    # A dimension belongs to the argument that it grows with.
    grown = {letter: shape(**{letter: 2 * size}) for letter, size in sizes.items()}
    names = ["L"]
    for i, size in enumerate(usual):
        letters = [letter for letter in sizes if grown[letter][i] != size]
        if "C" in letters:
            letters = [letter for letter in letters if letter != "H"]  # heads within the content
        if len(letters) > 1:
            raise LayoutError(
                f"{attn_backend.__name__}: dimension {i} of its KV cache {usual} holds several "
                f"things: {letters}"
            )
        names += letters or ["C"]
    try:
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    except (AttributeError, NotImplementedError):  # the runner then allocates it unchanged
        order = range(len(names))
    return "".join(names[i] for i in order)
