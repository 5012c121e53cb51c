# SPDX-License-Identifier: Apache-2.0
"""What is known of a request is in its `RequestState`; which objects keep maps by request id all
the same."""

import ast
from collections.abc import Iterator
from pathlib import Path

import omni_connector

PACKAGE = Path(omni_connector.__file__).parent

MAPS = {
    ("vllm_v1/scheduler.py", "_states"): "the one home: `Requests`",
    ("prefix/shared_prefix.py", "requests"): "the same, as a step has it",
    ("vllm_v1/outcomes.py", "_loads_left"): "of a worker, whose process has no RequestState",
    ("stage/link.py", "_keys"): "of stages, whose requests no scheduler of vLLM's has",
    ("stage/manager.py", "last_failures"): "the same; public",
    ("objects/base.py", "key"): "none: a text that has the id in it",
}
"""Each with why it is one. `requests/` itself is left out."""


def maps_by_request_id(tree: ast.AST) -> Iterator[str]:
    """Attributes of objects that are asked for what belongs to a request id."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            of, key = node.value, node.slice
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            of, key = node.comparators[0], node.left
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("get", "pop", "setdefault")
            and node.args
        ):
            of, key = node.func.value, node.args[0]
        else:
            continue
        named = isinstance(key, ast.Name) and key.id.endswith("request_id")
        asked = isinstance(key, ast.Attribute) and key.attr == "request_id"
        if isinstance(of, ast.Attribute) and (named or asked):
            yield of.attr


def test_a_map_is_seen_however_it_is_asked() -> None:
    asked = """
self._a[request.request_id] = 1
self._b.pop(request_id, None)
request_id in self._c
step.d[spec.request_id] -= 1
local[request_id], self._e[key]
"""
    assert set(maps_by_request_id(ast.parse(asked))) == {"_a", "_b", "_c", "d"}


def test_what_is_known_of_a_request_has_one_home() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "requests"
        for name in maps_by_request_id(ast.parse(path.read_text()))
    }
    assert found == MAPS.keys()
