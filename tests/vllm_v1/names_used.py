# SPDX-License-Identifier: Apache-2.0
"""Which names of vLLM this package's source uses, found by reading it.

Imports say which classes of vLLM a file knows. Annotations, its own and vLLM's, say which of these
a name, an attribute or a result is. Each attribute of such an object is a use. What has no
annotation that leads to vLLM is not seen.
"""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

import omni_connector

PACKAGE = Path(omni_connector.__file__).parent

FOLDERS = ("plugin.py", "vllm_v1", "copy", "handoff", "identity", "prefix")
"""What is read of the package: that which sees objects of vLLM in an engine."""

PROTOCOLS = {
    "EngineBlock": "vllm.v1.core.kv_cache_utils:KVCacheBlock",
    "EnginePool": "vllm.v1.core.block_pool:BlockPool",
    "RequestBlocks": "vllm.v1.core.kv_cache_manager:KVCacheBlocks",
    "EngineRequest": "vllm.v1.request:Request",
    "AdaptedRequest": "vllm.v1.request:Request",
    "EngineStep": "vllm.v1.core.sched.output:SchedulerOutput",
    "BlockHashes": "vllm.v1.core.block_pool:BlockPool",
    "Adapter": "vllm.lora.request:LoRARequest",
}
"""Classes of vLLM that folders which do not import it read, by the name of the protocol."""

_SPECS = "vllm.v1.kv_cache_interface"

_MANY = re.compile(
    r"\b(list|tuple|dict|set|frozenset|deque|Sequence|Iterable|Iterator|Mapping|Collection)\b",
    re.IGNORECASE,
)
_SAME = ("list", "tuple", "sorted", "reversed", "set", "iter")  # their elements are the argument's


class Use(NamedTuple):
    """One use of a name of vLLM.

    Attributes:
        owner: module, or class as `module:name`.
        name: of the module or the class.
        needed: whether the code has no other way without it.
    """

    owner: str
    name: str
    needed: bool


class Kind(NamedTuple):
    """What an expression is: a module, a class or function, an instance, or many instances."""

    what: Any
    form: str


def uses() -> dict[Use, str]:
    """All uses, and where the first of each is."""
    found: dict[Use, str] = {}
    for folder in FOLDERS:
        path = PACKAGE / folder
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if file.name == "vllm_names.py":  # the table
                continue
            for use, line in _File(file).uses():
                found.setdefault(use, f"{file.relative_to(PACKAGE)}:{line}")
    needed = {use[:2] for use in found if use.needed}
    return {use: where for use, where in found.items() if use.needed or use[:2] not in needed}


def load(name: str) -> Any:
    """What `module:name` is."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split(".") if path else ():
        found = getattr(found, part)
    return found


class _File(ast.NodeVisitor):
    def __init__(self, file: Path) -> None:
        self._tree = ast.parse(file.read_text())
        self._foreign = file.parent.name != "vllm_v1"
        self._found: list[tuple[Use, int]] = []
        self._names: dict[str, Kind] = {}
        self._env: dict[str, list[Kind]] = {}
        self._bases: list[Any] = []
        self._own: set[str] = set()
        self._fields: dict[str, Kind] = {}
        self._optional = False

    def uses(self) -> Iterator[tuple[Use, int]]:
        for name, cls in PROTOCOLS.items():
            self._names[name] = Kind(load(cls), "instance")
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and _is_vllm(node.module):
                for alias in node.names:
                    self._learn(node.module or "", alias)
        self.visit(self._tree)
        return iter(self._found)

    def _learn(self, module: str, alias: ast.alias) -> None:
        try:
            what = load(f"{module}:{alias.name}")
        except (ImportError, AttributeError):
            try:
                what = importlib.import_module(f"{module}.{alias.name}")
            except ImportError:
                return  # of another version
        kind = Kind(what, "module" if isinstance(what, ModuleType) else "name")
        if _is_vllm(type(what).__module__):  # an instance, such as `current_platform`
            kind = Kind(type(what), "instance")
        self._names[alias.asname or alias.name] = kind

    def _use(self, owner: str, name: str, node: ast.AST, *, needed: bool = True) -> None:
        found = None if name.startswith("__") else _defining(owner, name)
        if found is not None:  # else it is of another version, or a class of this package adds it
            needed = needed and not self._optional
            self._found.append((Use(found, name, needed), getattr(node, "lineno", 0)))

    # Statements

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if _is_vllm(node.module):
            for alias in node.names:
                self._use(node.module or "", alias.name, node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> None:
        caught = {ast.unparse(each.type) for each in node.handlers if each.type is not None}
        before = self._optional
        self._optional = before or bool(caught & {"ImportError", "AttributeError", "Exception"})
        for each in node.body:
            self.visit(each)
        self._optional = before
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if node.name in PROTOCOLS:
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    self._use(PROTOCOLS[node.name], each.name, each)
            return
        before = self._bases, self._own, self._fields
        bases = [self._kind(each) for each in node.bases]
        self._bases = [each.what for each in bases if each is not None and each.form == "name"]
        self._own, self._fields = set(), {}
        for each in ast.walk(node):
            self._note_field(each)
        for each in node.body:
            self.visit(each)
        self._bases, self._own, self._fields = before

    def _note_field(self, node: ast.AST) -> None:
        """A field, property or method of a class of this package."""
        if isinstance(node, ast.FunctionDef):
            self._own.add(node.name)
            kind = self._annotated(node.returns)
            if kind is not None:
                self._fields[node.name] = kind
            parameters = {each.arg: self._annotated(each.annotation) for each in _arguments(node)}
            for each in ast.walk(node):
                target = each.targets[0] if isinstance(each, ast.Assign) else None
                value = each.value if isinstance(each, ast.Assign) else None
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    self._own.add(target.attr)
                    kind = parameters.get(value.id) if isinstance(value, ast.Name) else None
                    if kind is not None:
                        self._fields.setdefault(target.attr, kind)
        if isinstance(node, ast.AnnAssign):
            name = node.target.attr if isinstance(node.target, ast.Attribute) else None
            name = node.target.id if isinstance(node.target, ast.Name) else name
            kind = self._annotated(node.annotation)
            if name is not None:
                self._own.add(name)
            if name is not None and kind is not None:
                self._fields[name] = kind

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        before = dict(self._env)
        for each in _arguments(node):
            self._env.pop(each.arg, None)
            kind = self._annotated(each.annotation)
            if self._foreign and each.arg == "request" and ast.unparse(each.annotation) == "Any":
                kind = self._names["EngineRequest"]
            if kind is not None:
                self._env[each.arg] = [kind]
        for statement in node.body:
            self.visit(statement)
        self._env = before

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            self._bind(target, self._kind(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        kind = self._annotated(node.annotation) or (node.value and self._kind(node.value))
        self._bind(node.target, kind)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self._kind(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind_each(node.target, node.iter)
        for each in (*node.body, *node.orelse):
            self.visit(each)

    def _comprehension(self, node: Any) -> None:
        before = dict(self._env)
        for each in node.generators:
            self.visit(each.iter)
            self._bind_each(each.target, each.iter)
            for condition in each.ifs:
                self.visit(condition)
        for name in ("elt", "key", "value"):
            if hasattr(node, name):
                self.visit(getattr(node, name))
        self._env = before

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def _bind(self, target: ast.expr, kind: Kind | None) -> None:
        if isinstance(target, ast.Name):
            self._env.pop(target.id, None)
            if kind is not None:
                self._env[target.id] = [kind]

    def _bind_each(self, target: ast.expr, iterable: ast.expr) -> None:
        if isinstance(iterable, ast.Call) and isinstance(target, ast.Tuple):
            called = ast.unparse(iterable.func)
            if called == "zip" and len(iterable.args) == len(target.elts):
                for each, argument in zip(target.elts, iterable.args, strict=True):
                    self._bind_each(each, argument)
                return
            if called == "enumerate":
                self._bind_each(target.elts[1], iterable.args[0])
                return
            if called.endswith(".items"):
                self._bind(target.elts[1], _one(self._kind(iterable)))
                return
        for each in target.elts if isinstance(target, ast.Tuple) else [target]:
            self._bind(each, None if isinstance(target, ast.Tuple) else _one(self._kind(iterable)))

    # Expressions

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.visit(node.value)
        for kind in self._kinds(node.value):
            owner = _owner(kind)
            if owner is not None and (_has(kind, node.attr) or len(self._kinds(node.value)) == 1):
                self._use(owner, node.attr, node)
                return
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            for base in self._bases:
                if node.attr not in self._own and _has(Kind(base, "instance"), node.attr):
                    self._use(_name(base), node.attr, node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if called in ("getattr", "hasattr", "setattr") and isinstance(node.args[1], ast.Constant):
            needed = called == "getattr" and len(node.args) == 2
            for kind in self._kinds(node.args[0]):
                if (owner := _owner(kind)) is not None:
                    self._use(owner, str(node.args[1].value), node, needed=needed)
        if called == "isinstance" and isinstance(node.args[0], ast.Name):
            kind = self._kind(node.args[1])
            if kind is not None:
                self._env.setdefault(node.args[0].id, []).append(Kind(kind.what, "instance"))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        """A table whose keys are names of classes of KV cache specs."""
        specs = importlib.import_module(_SPECS)
        for each in node.keys:
            name = each.value if isinstance(each, ast.Constant) else None
            if isinstance(name, str) and isinstance(getattr(specs, name, None), type):
                self._use(_SPECS, name, node, needed=False)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """`module:name`, as the module of patches names what it patches."""
        if isinstance(node.value, str) and re.fullmatch(r"vllm\.[\w.]*:[\w.]+", node.value):
            module, _, path = node.value.partition(":")
            first, _, second = path.partition(".")
            self._use(module, first, node, needed=False)
            if second:
                self._use(f"{module}:{first}", second, node, needed=False)

    def _kind(self, node: ast.expr) -> Kind | None:
        return next(iter(self._kinds(node)), None)

    def _kinds(self, node: ast.expr) -> list[Kind]:
        if isinstance(node, ast.Name):
            if node.id in self._env:
                return self._env[node.id]
            known = self._names.get(node.id)
            return [known] if known is not None and node.id not in PROTOCOLS else []
        found: Kind | None = None
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found = self._fields.get(node.attr)
                if found is None:
                    told = (_attribute(Kind(each, "instance"), node.attr) for each in self._bases)
                    found = next((each for each in told if each is not None), None)
            else:
                told = (_attribute(each, node.attr) for each in self._kinds(node.value))
                found = next((each for each in told if each is not None), None)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in _SAME and node.args:
                return self._kinds(node.args[0])
            if called.endswith((".values", ".items", ".get", ".pop", ".copy")):
                inner = (
                    self._kind(node.func.value) if isinstance(node.func, ast.Attribute) else None
                )
                if inner is not None and inner.form == "many":
                    return [inner if called.endswith(("s", "y")) else _one(inner) or inner]
            if called == "getattr" and isinstance(node.args[1], ast.Constant):
                kind = self._kind(node.args[0])
                found = None if kind is None else _attribute(kind, str(node.args[1].value))
            else:
                kind = self._kind(node.func)
                if kind is not None and kind.form == "name":
                    found = _result(kind.what)
        elif isinstance(node, ast.Subscript):
            kind = self._kind(node.value)
            found = kind if isinstance(node.slice, ast.Slice) else _one(kind)
        elif isinstance(node, ast.BoolOp):
            told = (self._kind(each) for each in reversed(node.values))
            found = next((each for each in told if each is not None), None)
        elif isinstance(node, ast.IfExp):
            found = self._kind(node.body) or self._kind(node.orelse)
        elif isinstance(node, ast.NamedExpr):
            found = self._kind(node.value)
        return [] if found is None else [found]

    def _annotated(self, node: ast.expr | None) -> Kind | None:
        if node is None:
            return None
        text = ast.unparse(node).replace("'", "")
        for word in re.findall(r"\w+", text):
            known = self._names.get(word)
            if known is not None and isinstance(known.what, type):
                return Kind(known.what, _form(text))
        return None


def _is_vllm(module: str | None) -> bool:
    return module is not None and re.match(r"vllm\b", module) is not None


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    given = node.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def _form(annotation: str) -> str:
    if _MANY.search(annotation):
        return "many"
    return "name" if re.search(r"\btype\[", annotation) else "instance"


def _one(kind: Kind | None) -> Kind | None:
    return Kind(kind.what, "instance") if kind is not None and kind.form == "many" else None


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _owner(kind: Kind) -> str | None:
    """What an attribute of this belongs to; None where it is no name of vLLM's."""
    if kind.form == "module":
        return str(kind.what.__name__)
    if kind.form == "many" or not isinstance(kind.what, type) or not _is_vllm(kind.what.__module__):
        return None
    return _name(kind.what)


def _defining(owner: str, name: str) -> str | None:
    """The module, or the class of vLLM's, that an attribute is defined in."""
    module = owner.partition(":")[0]
    if not _is_vllm(module):
        return None
    try:
        what = load(owner)
    except ImportError:
        return None  # of another version
    if not isinstance(what, type):
        return owner if hasattr(what, name) or _is_submodule(owner, name) else None
    # What is told of any spec of a KV cache may be in some of them only.
    some = _subclasses(what) if module == _SPECS else ()
    for cls in (*what.__mro__, *some):
        if _is_vllm(cls.__module__) and (name in cls.__dict__ or name in _fields_of(cls)):
            return _name(cls)
    return None


def _subclasses(cls: type) -> Iterator[type]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _is_submodule(module: str, name: str) -> bool:
    try:
        return importlib.import_module(f"{module}.{name}") is not None
    except ImportError:
        return False


def _has(kind: Kind, name: str) -> bool:
    if not isinstance(kind.what, type):
        return hasattr(kind.what, name)
    return hasattr(kind.what, name) or any(name in _fields_of(each) for each in kind.what.__mro__)


def _attribute(kind: Kind, name: str) -> Kind | None:
    """What an attribute is, as vLLM's annotations say."""
    if kind.form == "module":
        found = getattr(kind.what, name, None)
        return None if found is None else Kind(found, "name")
    if kind.form == "many" or not isinstance(kind.what, type):
        return None
    for cls in kind.what.__mro__:
        if name in _fields_of(cls):
            return _resolve(_fields_of(cls)[name], cls.__module__)
        found = cls.__dict__.get(name)
        if isinstance(found, property | functools.cached_property):
            made = found.fget if isinstance(found, property) else found.func
            return _result(made)
        if isinstance(found, classmethod | staticmethod):
            return Kind(found.__func__, "name")
        if inspect.isfunction(found):
            return Kind(found, "name")
        if found is not None and isinstance(found, cls):  # a member of an enumeration
            return Kind(cls, "instance")
    return None


def _result(called: Any) -> Kind | None:
    if isinstance(called, type):
        return Kind(called, "instance")
    if not inspect.isfunction(called):
        return None
    told = called.__annotations__.get("return")
    return None if told is None else _resolve(told, called.__module__)


@functools.cache
def _fields_of(cls: type) -> dict[str, Any]:
    """The fields of a class of vLLM, and their annotations in it or in its `__init__`."""
    found = dict(inspect.get_annotations(cls))
    made = cls.__dict__.get("__init__")
    if not _is_vllm(cls.__module__) or not inspect.isfunction(made):
        return found
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(made))).body
    except (OSError, SyntaxError, TypeError):  # made by a decorator
        return found
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(target, ast.Attribute) or ast.unparse(target.value) != "self":
            continue
        told: Any = ""
        if isinstance(node, ast.AnnAssign):
            told = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            told = made.__annotations__.get(node.value.id, "")
        found.setdefault(target.attr, told)
    return found


def _resolve(annotation: Any, module: str) -> Kind | None:
    if isinstance(annotation, type) and _is_vllm(annotation.__module__):
        return Kind(annotation, "instance")
    text = annotation if isinstance(annotation, str) else str(annotation)
    names = vars(sys.modules[module])
    for word in re.findall(r"[\w.]+", text):
        last = word.rpartition(".")[2]
        cls = names.get(last) or _classes().get(last)
        if isinstance(cls, type) and _is_vllm(cls.__module__):
            return Kind(cls, _form(text))
    return None


@functools.cache
def _classes() -> dict[str, type]:
    """The classes of vLLM that are loaded, by their names."""
    found: dict[str, type] = {}
    for name, module in sorted(sys.modules.items()):
        for each in list(vars(module).values()) if _is_vllm(name) else ():
            if isinstance(each, type) and each.__module__ == name:
                found.setdefault(each.__name__, each)
    return found


def without(use: Use, patch: pytest.MonkeyPatch) -> None:
    """Take a name away from vLLM, as far as anybody can see."""
    owner = load(use.owner)
    if isinstance(owner, ModuleType):
        if f"{use.owner}.{use.name}" in sys.modules:
            patch.setitem(sys.modules, f"{use.owner}.{use.name}", None)
        if use.name in vars(owner):
            patch.delattr(owner, use.name)
        make = getattr(owner, "__getattr__", None)
        if make is not None:

            def others(name: str) -> Any:
                if name == use.name:
                    raise AttributeError(f"module {use.owner!r} has no attribute {name!r}")
                return make(name)

            patch.setattr(owner, "__getattr__", others)
        return
    bases = [each for each in owner.__mro__ if _is_vllm(each.__module__)]
    for cls in {each for base in bases for each in (base, *_subclasses(base))}:
        for fields in ("__annotations__", "__dataclass_fields__", "_member_map_"):
            if use.name in cls.__dict__.get(fields, {}):
                patch.delitem(cls.__dict__[fields], use.name)
        if use.name in cls.__dict__.get("_member_names_", []):  # of an enumeration
            left = [each for each in cls._member_names_ if each != use.name]
            patch.setattr(cls, "_member_names_", left)
        elif use.name in cls.__dict__:
            patch.delattr(cls, use.name)
        made = cls.__dict__.get("__init__")
        made = None if made is None else inspect.unwrap(made)
        if inspect.isfunction(made) and use.name in made.__code__.co_names:
            names = tuple("_" if each == use.name else each for each in made.__code__.co_names)
            patch.setattr(made, "__code__", made.__code__.replace(co_names=names))
