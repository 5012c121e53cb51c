# SPDX-License-Identifier: Apache-2.0
"""Cache groups, and what peers compare of them."""

from typing import Any

from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.shapes import GroupShape


def group_shape(**changes: Any) -> GroupShape:
    """Two layers of full attention of two heads, in blocks of 16 tokens; or something like it."""
    values: dict[str, Any] = {
        "kind": "full_attention",
        "block_size": 16,
        "attention_type": "all",
        "layers": "even",
        "pages": ("H2.N16.C64", "H2.N16.C64"),
    }
    return GroupShape(**(values | changes))


def compatibility_key(**changes: Any) -> CompatibilityKey:
    """Of an engine of one rank with one group; or of one that is something like it."""
    values: dict[str, Any] = {
        "model": "m@1",
        "dtype": "bfloat16",
        "kv_dtype": "auto",
        "integrity": "full",
        "kv_heads": 2,
        "ranks": 1,
        "groups": (group_shape(),),
    }
    return CompatibilityKey(**(values | changes))
