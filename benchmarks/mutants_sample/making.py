# SPDX-License-Identifier: Apache-2.0
"""Makes the mutants of a module with mutmut's operators, and draws a sample of them by seed.

A mutant is known by its module, its function, the text of its line, the operator, and its number
among those that have all of this in common. So a change elsewhere in a module leaves the sample as
it is: it has the mutants with the lowest hash of seed and identity.
"""

import ast
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation import mutators

from benchmarks.mutants_sample.measuring import ROOT, SUBJECTS

RULES: Final = (
    "literal strings: texts for people, and names that writers and readers take from one place",
    "what is logged, and the arguments of an exception that is raised",
    "`__repr__` and `__str__`",
    "annotations, `TYPE_CHECKING` blocks, `cast`, `TypeVar`, imports, `__all__`, `__slots__`",
    "decorators, and functions that have no body",
    "`assert`, and `strict=` of `zip`: they hold in code that is right",
    "`None` in place of `False`, which is as false, or of a text for people",
    "arguments of `max` and `min` in another order",
    "arguments of `len` and `isinstance` (mutmut's own rule)",
    "`copy/cuda.py`, which only a GPU executes",
    "a change that leaves the syntax tree as it was, or no valid one",
)

_UNTOUCHED: Final = frozenset({"copy/cuda.py"})
_LOGGING: Final = frozenset(
    {"debug", "info", "warning", "error", "exception", "critical", "warn_once", "warning_once"}
)
_TYPING_CALLS: Final = frozenset({"cast", "TypeVar", "NewType", "getLogger", "len", "isinstance"})
_BUILT_IN_TYPES: Final = frozenset({"int", "str", "bytes", "dict", "list", "tuple", "None"})
_TEXT_METHODS: Final = frozenset({"__repr__", "__str__"})
_DECLARED: Final = frozenset({"__all__", "__slots__", "logger"})

Operator = Callable[[Any], Iterable[cst.CSTNode]]


def drop_statement(node: cst.SimpleStatementLine) -> Iterable[cst.SimpleStatementLine]:
    """`pass` where a call stood, or something was returned, raised, deleted, or kept elsewhere
    than in a variable. mutmut has no such operator.
    """
    if len(node.body) != 1:
        return
    small = node.body[0]
    kept = isinstance(small, cst.Assign) and not any(
        isinstance(target.target, cst.Name | cst.Tuple) for target in small.targets
    )
    called = isinstance(small, cst.Expr) and not isinstance(
        small.value, cst.BaseString | cst.Ellipsis
    )
    kinds = cst.AugAssign | cst.Return | cst.Raise | cst.Del | cst.Break | cst.Continue
    if kept or called or isinstance(small, kinds):
        yield node.with_changes(body=[cst.Pass()])


def swap_arguments(node: cst.Call) -> Iterable[cst.Call]:
    """`f(b, a)` for `f(a, b)`, of neighbours without names. mutmut has no such operator."""
    for at, (first, second) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if first.star or second.star or first.keyword or second.keyword:
            continue
        swapped = [first.with_changes(value=second.value), second.with_changes(value=first.value)]
        yield node.with_changes(args=[*node.args[:at], *swapped, *node.args[at + 2 :]])


_NARROWER: Final[dict[str, Any]] = {
    "operator_swap_op": cst.BinaryOperation
    | cst.UnaryOperation
    | cst.BooleanOperation
    | cst.ComparisonTarget
    | cst.AugAssign
}
"""mutmut tries these on nodes of all kinds, which takes most of the time."""

OPERATORS: Final[Sequence[tuple[Any, Operator]]] = (
    *(
        (_NARROWER.get(operator.__name__, kind), operator)
        for kind, operator in mutators.mutation_operators
        if operator.__name__ != "operator_string"
    ),
    (cst.SimpleStatementLine, drop_statement),
    (cst.Call, swap_arguments),
)

KINDS: Final = {
    "condition turned": ("swap_op", "keywords", "remove_unary_ops", "if_exp"),
    "statement dropped": ("drop_statement", "assignment", "augmented_assignment", "match"),
    "constant moved": (
        "number",
        "name",
        "lambda",
        "symmetric_string_methods_swap",
        "unsymmetrical_string_methods_swap",
    ),
    "argument swapped or dropped": ("swap_arguments", "arg_removal", "dict_arguments"),
}
"""Each has the same part of a sample; else four of ten would be arguments that are dropped."""


@dataclass(frozen=True)
class Mutation:
    """A mutant.

    Attributes:
        path: of the module, below `omni_connector`.
        function: where it is, with its classes; empty for what a module does when imported.
        text: of the line, without what it is indented by.
        operator: of the library.
        number: among those that have all of the above in common.
        lines: of the statement: first and last; of a compound statement, of its head.
        in_function: whether it is in one, and not in what a module does when it is imported.
        names: that an assignment outside of functions binds, whose readers may see the mutant.
        source: of the module with it.
    """

    path: str
    function: str
    text: str
    operator: str
    number: int
    lines: tuple[int, int]
    in_function: bool
    names: tuple[str, ...]
    source: str = ""

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return next(kind for kind, operators in KINDS.items() if self.operator in operators)

    @property
    def identity(self) -> str:
        """What it is known by."""
        return "\n".join((self.path, self.function, self.text, self.operator, str(self.number)))

    def key(self, seed: int) -> str:
        """Its place in the sample of this seed."""
        return hashlib.sha256(f"{seed}\n{self.identity}".encode()).hexdigest()

    @property
    def module(self) -> str:
        """Its name, as it is imported."""
        name = "omni_connector." + self.path.removesuffix(".py").replace("/", ".")
        return name.removesuffix(".__init__")


def sample(seed: int, number: int, folder: Path) -> tuple[list[Mutation], int]:
    """Of each kind as many, those with the lowest keys that change something; how many there are.

    They are ordered by their keys.

    Args:
        folder: keeps what was drawn, as that takes a minute, until one of the sources changes.
    """
    kept = folder / "sample.json"
    of = f"{seed} {number} {_sources()}"
    if kept.exists():
        drawn = json.loads(kept.read_text(encoding="utf-8"))
        if drawn["of"] == of:
            return [Mutation(**each) for each in drawn["chosen"]], drawn["all"]
    chosen, everyone = _draw(seed, number)
    fields = [asdict(each) for each in chosen]
    kept.write_text(json.dumps({"of": of, "all": everyone, "chosen": fields}), encoding="utf-8")
    return chosen, everyone


def _sources() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for subject in SUBJECTS:
        for path in sorted((ROOT / "omni_connector" / subject).glob("**/*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _draw(seed: int, number: int) -> tuple[list[Mutation], int]:
    ordered = sorted(everything(), key=lambda each: each[0].key(seed))
    chosen: list[Mutation] = []
    for operators in KINDS.values():
        made = (
            replace(mutation, source=make())
            for mutation, make in ordered
            if mutation.operator in operators
        )
        chosen += itertools.islice(filter(differs, made), number // len(KINDS))
    return sorted(chosen, key=lambda mutation: mutation.key(seed)), len(ordered)


def differs(mutation: Mutation) -> bool:
    """Whether its source is valid, and another than it was."""
    before = (ROOT / "omni_connector" / mutation.path).read_text(encoding="utf-8")
    try:
        after = ast.parse(mutation.source)
        compile(after, mutation.path, "exec")
    except SyntaxError:
        return False
    return ast.dump(after) != ast.dump(ast.parse(before))


def everything() -> Iterator[tuple[Mutation, Callable[[], str]]]:
    """All mutants of the subjects, without their sources, and what makes these."""
    package = ROOT / "omni_connector"
    for subject in SUBJECTS:
        for path in sorted((package / subject).glob("**/*.py")):
            name = str(path.relative_to(package))
            if name not in _UNTOUCHED:
                yield from mutations(name, path)


def mutations(name: str, path: Path) -> list[tuple[Mutation, Callable[[], str]]]:
    """All mutants of a file."""
    source = path.read_text(encoding="utf-8")
    wrapper = MetadataWrapper(cst.parse_module(source))
    maker = _Maker(name, source, wrapper.module)
    wrapper.visit(maker)
    return maker.made


class _Maker(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self, name: str, source: str, module: cst.Module) -> None:
        super().__init__()
        self.made: list[tuple[Mutation, Callable[[], str]]] = []
        self._name = name
        self._lines = source.splitlines()
        self._module = module
        self._within: list[str] = []
        self._functions = 0
        self._counted: Counter[tuple[str, ...]] = Counter()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._excluded(node):
            return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for mutated in operator(node):
                    if not _same(node, mutated):
                        self._note(node, operator.__name__.removeprefix("operator_"), mutated)
        if isinstance(node, cst.ClassDef | cst.FunctionDef):
            self._within.append(node.name.value)
            self._functions += isinstance(node, cst.FunctionDef)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        entered = isinstance(original_node, cst.ClassDef | cst.FunctionDef)
        if entered and not self._excluded(original_node):
            self._within.pop()
            self._functions -= isinstance(original_node, cst.FunctionDef)

    def _excluded(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom():
                return True
            case cst.Assert() | cst.Arg(keyword=cst.Name(value="strict")):
                return True
            case cst.FunctionDef():
                return node.name.value in _TEXT_METHODS or _bodiless(node)
            case cst.If(test=cst.Name(value="TYPE_CHECKING")):
                return True
            case cst.AnnAssign(target=cst.Name(value=name)) if name in _DECLARED:
                return True
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
                return name in _DECLARED or (not self._functions and _is_type(node.value))
            case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call(func=function))]):
                return _last_name(function) in _LOGGING
            case cst.Call(func=function) if _last_name(function) in _TYPING_CALLS:
                return True
            case cst.Call():
                return isinstance(self.get_metadata(ParentNodeProvider, node), cst.Raise)
        return False

    def _note(self, node: cst.CSTNode, operator: str, mutated: cst.CSTNode) -> None:
        place: CodeRange | None = self.get_metadata(PositionProvider, node, None)
        if place is None:
            return
        text = self._lines[place.start.line - 1].strip()
        function = ".".join(self._within)
        alike = (function, text, operator)
        self._counted[alike] += 1
        statement = self._statement(node)
        lines: CodeRange = self.get_metadata(PositionProvider, statement)
        last = lines.end.line
        if isinstance(statement, cst.BaseCompoundStatement):
            inner = statement.cases[0] if isinstance(statement, cst.Match) else statement.body
            body: CodeRange = self.get_metadata(PositionProvider, inner)
            last = max(lines.start.line, body.start.line - 1)
        mutation = Mutation(
            self._name,
            function,
            text,
            operator,
            self._counted[alike],
            (lines.start.line, last),
            self._functions > 0,
            () if self._functions else _bound(statement),
        )
        self.made.append((mutation, lambda: self._source(node, mutated)))

    def _source(self, node: cst.CSTNode, mutated: cst.CSTNode) -> str:
        changed = self._module.deep_replace(node, mutated)
        assert isinstance(changed, cst.Module)
        return changed.code

    def _statement(self, node: cst.CSTNode) -> cst.CSTNode:
        while not isinstance(node, cst.BaseStatement):
            node = self.get_metadata(ParentNodeProvider, node)
        return node


def _same(node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
    """Whether a rule says that this changes nothing."""
    match node, mutated:
        case (cst.Assign() | cst.AnnAssign(), cst.Assign() | cst.AnnAssign()):
            return _is_false(node.value) and not _is_false(mutated.value)
        case (cst.Call(), cst.Call()):
            gone = [each for each in node.args if each not in mutated.args]
            keywords = [each.keyword.value for each in gone if each.keyword]
            if keywords == ["strict"]:
                return True
            if len(node.args) != len(mutated.args):
                return False
            if len(gone) == 1:
                return _is_false(gone[0].value) or _is_text(gone[0].value)
            return _last_name(node.func) in {"max", "min"}
    return False


def _is_text(value: cst.BaseExpression) -> bool:
    """Whether this is a literal that people read: one with a space."""
    if isinstance(value, cst.SimpleString):
        return " " in value.value
    return isinstance(value, cst.FormattedString) and any(
        isinstance(part, cst.FormattedStringText) and " " in part.value for part in value.parts
    )


def _is_false(value: cst.BaseExpression | None) -> bool:
    return isinstance(value, cst.Name) and value.value == "False"


def _bodiless(node: cst.FunctionDef) -> bool:
    body = node.body.body
    for each in body:
        if isinstance(each, cst.SimpleStatementLine):
            if all(
                isinstance(small, cst.Pass)
                or (
                    isinstance(small, cst.Expr)
                    and isinstance(small.value, cst.Ellipsis | cst.BaseString)
                )
                for small in each.body
            ):
                continue
        elif isinstance(each, cst.Expr) and isinstance(each.value, cst.Ellipsis):
            continue
        return False
    return True


def _is_type(value: cst.BaseExpression) -> bool:
    """`X | Y`, `dict[str, int]`, `A`: an alias of a type outside of functions."""
    match value:
        case cst.BinaryOperation(operator=cst.BitOr(), left=left, right=right):
            return _is_type(left) and _is_type(right)
        case cst.Subscript(value=inner):
            return _is_type(inner)
        case cst.Attribute():
            return _last_name(value)[:1].isupper()
        case cst.Name(value=name):
            private = name.startswith("_") and name[1:2].isupper() and not name.isupper()
            return private or name[:1].isupper() or name in _BUILT_IN_TYPES
    return False


def _last_name(function: cst.BaseExpression) -> str:
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def _bound(statement: cst.CSTNode) -> tuple[str, ...]:
    if not isinstance(statement, cst.SimpleStatementLine):
        return ()
    names: list[str] = []
    for small in statement.body:
        if isinstance(small, cst.Assign):
            targets = [target.target for target in small.targets]
        elif isinstance(small, cst.AnnAssign):
            targets = [small.target]
        else:
            continue
        names += [target.value for target in targets if isinstance(target, cst.Name)]
    return tuple(names)
