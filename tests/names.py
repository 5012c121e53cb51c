# SPDX-License-Identifier: Apache-2.0
"""The names that pages, docstrings and comments use, and whether the code has them.

A name is an identifier (dotted or not), a path, an option, a metric or a thread between backticks,
and any word with an underscore or a capital inside.
"""

import ast
import io
import keyword
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from omni_connector.runtime.metric_names import COUNTERS, GAUGES, SECONDS

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "omni_connector"
METRIC: Final = "omni_connector_"
METRICS: Final = frozenset(
    {f"{name}_total" for name in (*COUNTERS, "failures", "tokens_missed", "peers")}
    | {f"{name}_seconds" for name in SECONDS}
    | {*GAUGES}
)

_CODE: Final = ("omni_connector", "tests", "benchmarks", "scripts", "examples")
_DATA: Final = ("*.c", "*.toml", "*.yaml", "*.yml", "*.json", "Makefile", "*.sh")
_SPAN: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
_PATH: Final = re.compile(r"[\w.-]*(/[\w.-]+)*(/|\.(py|md|c|h|ll|toml|json|jsonl|sh|yml))")
_WORD: Final = re.compile(
    r"(?<![\w./:`$-])(?:[a-z]+(?:_[a-z0-9]+)+|[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]*)+)(?![\w-])"
)
_TREE: Final = re.compile(r"^ *([\w/]+(?:/|\.py)) ")
_OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-])")
_THREAD: Final = re.compile(r"omni-[a-z]+(?:-[a-z]+)*")
_BARE: Final = re.compile(
    r"(?<![\w/.:-])omni_connector(?:\.\w+)+|\bOMNI_CONNECTOR_[A-Z_]+[A-Z]\b"
    rf"|vllm:{METRIC}[a-z_]+[a-z]\b"
)


class Use(NamedTuple):
    """A name, and where a text uses it."""

    where: str
    name: str


@dataclass
class Names:
    """What the code has.

    Attributes:
        words: identifiers, wherever they are defined or used, also within strings of the code.
        options: of command lines.
        threads: names of threads, and of programs with such names.
        members: of classes by name: what their bodies and their `self` have.
        bases: of classes by name.
        modules: what modules define, by their name without folders.
        files: all files, from the root of the repository.
    """

    words: set[str] = field(default_factory=lambda: {*keyword.kwlist})
    options: set[str] = field(default_factory=set)
    threads: set[str] = field(default_factory=set)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)
    modules: dict[str, set[str]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        """Whether there is something of this name."""
        name = name.removesuffix("()")
        if name.startswith("--"):
            return name in self.options or name[2:].replace("-", "_") in self.words
        if _THREAD.fullmatch(name):
            return name in self.threads
        bare = name.removeprefix("vllm:").removeprefix(METRIC)
        if bare != name and name not in self.words:
            return bare in METRICS
        if _PATH.fullmatch(name):
            return self._path(name)
        parts = name.split(".")
        if len(parts) > 2 and parts[1] in self.modules and parts[0] not in self.modules:
            return False  # a module of a folder that is not there
        return self._word(parts[0]) and all(self._member(*pair) for pair in pairwise(parts))

    def _word(self, word: str) -> bool:
        setting = word.removeprefix("OMNI_CONNECTOR_").lower()
        return word in self.modules or word in METRICS or bool(self.words & {word, setting})

    def _path(self, path: str) -> bool:
        end = path.rstrip("/")
        folders = path.endswith("/")
        return any(
            f"/{each}".endswith(f"/{end}") or (folders and f"/{end}/" in f"/{each}")
            for each in self.files
        )

    def _member(self, owner: str, member: str) -> bool:
        if owner in self.members:
            bases = self.bases[owner] - {owner}
            return member in self.members[owner] or any(self._member(b, member) for b in bases)
        if owner in self.modules:
            return member in self.modules[owner] or self._named_after_class(owner, member)
        return self._word(member)  # of somebody else, or of an object

    def _named_after_class(self, name: str, member: str) -> bool:
        """Whether `name` is the end of a class's name, as with `directory`, a `SlotDirectory`."""
        return any(
            member in members
            for owner, members in self.members.items()
            if owner.lower().endswith(name)
        )

    def add(self, tree: ast.Module, module: str) -> None:
        """Take the names of a module."""
        texts = {id(node) for node in _docstrings(tree)}
        own = self.modules.setdefault(module, set())
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    self.words.add(name)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        own.add(name)
                case ast.keyword(arg=str(name)):
                    self.words.add(name)
                case ast.alias(name=name, asname=other):
                    self.words |= {*name.split("."), *filter(None, [other])}
                    own.add(other or name.split(".")[0])
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    self.words.add(name)
                    own.add(name)
                case ast.ClassDef(name=name):
                    self.words.add(name)
                    own.add(name)
                    self._add_class(node)
                case ast.Constant(value=str(text)) if id(node) not in texts:
                    self.options |= set(_OPTION.findall(text))
                    self.threads |= set(_THREAD.findall(text))
                    whole = bool(re.fullmatch(r"[\w.:/-]+", text))
                    self.words |= {w for w in re.findall(r"\w+", text) if whole or "_" in w}

    def _add_class(self, node: ast.ClassDef) -> None:
        members = self.members.setdefault(node.name, set())
        bases = self.bases.setdefault(node.name, set())
        bases |= {ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases}
        for inner in ast.walk(node):
            match inner:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    members.add(name)
                case ast.ClassDef(name=name) if inner is not node:
                    members.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                    if isinstance(inner.ctx, ast.Store):
                        members.add(name)
        for line in node.body:
            match line:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    members.add(name)
                case ast.Assign(targets=targets):
                    members |= {each.id for each in targets if isinstance(each, ast.Name)}


def sources() -> Iterator[Path]:
    """Every Python file of the repository."""
    for folder in _CODE:
        yield from sorted((ROOT / folder).rglob("*.py"))


def pages() -> list[Path]:
    """The pages that users and developers read, but the changelog: it may name what has gone."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def names() -> Names:
    """What the code of this repository has. The tests of this module are left out: they make names
    up."""
    found = Names()
    for path in sources():
        if path.name == "test_names.py":
            continue
        module = path.parent.name if path.name == "__init__.py" else path.stem
        found.add(_tree(path), module)
    for folder in (ROOT, *(ROOT / each for each in (*_CODE, "docs", ".github"))):
        for path in folder.rglob("*") if folder != ROOT else folder.iterdir():
            if path.is_file() and "__pycache__" not in path.parts:
                found.files.add(str(path.relative_to(ROOT)))
    for name in found.files:
        parts = Path(name).with_suffix("").parts
        for owner, inside in pairwise(parts):
            found.modules.setdefault(owner, set()).add(inside)
    for name in sorted(found.files):
        if any(Path(name).match(pattern) for pattern in _DATA) and "results" not in name:
            text = (ROOT / name).read_text(encoding="utf-8")
            if len(text) < 1 << 17:
                found.words |= set(re.findall(r"\b[a-zA-Z_]\w*", text))
    return found


def used_in_page(text: str, where: str) -> Iterator[Use]:
    """The names that a Markdown text uses. Of its examples only options and what is surely ours."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= line.startswith("```")
        example = fenced or line.startswith(("    ", "```"))
        found = [*_OPTION.findall(line), *_found(line, spans=not example)]
        found += _TREE.findall(line) if fenced else []
        yield from (Use(f"{where}:{number}", name) for name in dict.fromkeys(found))


def used_in_code(source: str, where: str) -> Iterator[Use]:
    """The names that the docstrings and comments of a module use."""
    texts = [(node.lineno, node.value) for node in _docstrings(ast.parse(source))]
    comments = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(each.start[0], each.string) for each in comments if each.type == tokenize.COMMENT]
    for first, text in texts:
        for number, line in enumerate(str(text).splitlines(), start=first):
            found = dict.fromkeys(_found(line, spans=True))
            yield from (Use(f"{where}:{number}", name) for name in found)


def _found(line: str, *, spans: bool) -> Iterator[str]:
    yield from (*_BARE.findall(line), *_WORD.findall(line))
    for span in _SPAN.findall(line) if spans else ():
        if any(pattern.fullmatch(span) for pattern in (_IDENTIFIER, _PATH, _OPTION, _THREAD)):
            yield span


def missing(uses: Iterable[Use]) -> list[Use]:
    """The uses whose names the code does not have."""
    has = cache(names().has)
    return [use for use in uses if not has(use.name)]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts that stand alone: docstrings, and what stands below an attribute or a constant."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as text):
                yield text
