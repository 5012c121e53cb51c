# SPDX-License-Identifier: Apache-2.0
"""Objects to send, and whether what arrived is what was sent."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

ARRAY_DTYPES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=50)
)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Arrays of any dtype that can be sent, of no to three dimensions, in any memory order."""
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    seed = draw(st.integers(0, 255))
    content = (np.arange(np.prod(shape, dtype=int)) * 7 + seed) % 100
    found: NDArray[Any] = content.astype(dtype).reshape(shape)
    change = draw(st.sampled_from(("none", "swapped", "fortran", "reversed", "read-only")))
    if change == "swapped":
        found = found.astype(dtype.newbyteorder("S"))
    elif change == "fortran":
        found = np.asarray(found, order="F")
    elif change == "reversed" and found.ndim:
        found = found[::-1]
    elif change == "read-only":
        found.flags.writeable = False
    return found


OBJECTS: st.SearchStrategy[Any] = st.recursive(
    _SCALARS | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)


def same(sent: Any, found: Any) -> bool:
    """Whether an object arrived as it was sent: types, dtypes, shapes and every byte."""
    if isinstance(sent, np.ndarray):
        native = sent.astype(sent.dtype.newbyteorder("="))
        return (
            isinstance(found, np.ndarray)
            and (found.dtype, found.shape) == (native.dtype, native.shape)
            and found.tobytes() == native.tobytes()
        )
    if isinstance(sent, dict):
        return (
            isinstance(found, dict)
            and list(sent) == list(found)
            and all(same(value, found[key]) for key, value in sent.items())
        )
    if isinstance(sent, list):
        return (
            isinstance(found, list)
            and len(sent) == len(found)
            and all(same(*pair) for pair in zip(sent, found, strict=True))
        )
    return type(sent) is type(found) and bool(sent == found)
