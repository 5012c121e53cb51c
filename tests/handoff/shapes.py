# SPDX-License-Identifier: Apache-2.0
"""Cache groups for the tests of the control room."""

from typing import Any

from omni_connector.kv.shapes import GroupShape


def group_shape(**changes: Any) -> GroupShape:
    """Two layers of full attention of two heads, in blocks of 16 tokens; or something like it."""
    values: dict[str, Any] = {
        "kind": "full_attention",
        "block_size": 16,
        "keeps": "all",
        "layers": "even",
        "pages": ("H2.N16.C64", "H2.N16.C64"),
    }
    return GroupShape(**(values | changes))
