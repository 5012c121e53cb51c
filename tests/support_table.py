# SPDX-License-Identifier: Apache-2.0
"""Writes `docs/models.md` and `docs/internals/shown.md` from the marks of the tests.

`@pytest.mark.supports(feature, *families, refused=reason)` says that a test shows a feature, for
the families named, else for the one that its parameter `family` is, else for all; `refused` says
that what it shows is the refusal.

`@pytest.mark.shows(what, control=test)` says that a test of any folder shows something, and which
test is its control: there a connector moves nothing, or less or other bytes, and the same
comparison fails. A control is in the same file, or is given as `folder/file.py::test`.

`python -m tests.support_table` writes the pages; a test compares them with the marks.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
END_TO_END = TESTS / "e2e"
PAGES = (ROOT / "docs" / "models.md", ROOT / "docs" / "internals" / "shown.md")
"""For users, of which only the table is written here; and all that the tests show."""
COLUMNS = {
    "hand-off": ("hand-off",),
    "shared prefixes": (
        "prefixes shared by engines of PP 2",
        "the next turn goes on within a block",
    ),
    "other tensor-parallel size": ("TP 2 to TP 1", "TP 1 to TP 2"),
    "other block size": ("larger to smaller blocks", "smaller to larger blocks"),
    "pipeline stages, equal or other": ("PP 2 to PP 2", "PP 2 to PP 1", "PP 1 to PP 2"),
    "drafter with KV": ("speculative decoding by EAGLE", "speculative decoding by MTP"),
}
"""Of the page for users: what shows each with real engines, one of them or several."""
STATES = (
    *("yes", "yes, [with their states](#recurrent-states)", "yes", "yes", "yes"),
    "of equally many drafts",
)
BESIDE = {"Gemma 3": ("yes",) * 5 + ("on both sides",), "Qwen3-Next": STATES, "LFM2": STATES}
"""What a family has without real engines, where that is not a plain yes."""
OTHERS = {
    "Llama 4": ("chunked local attention and full attention", *("yes",) * 6),
    "DeepSeek V3.2": ("sparse MLA with an indexer", "yes", "yes", "yes", "no", "yes", ""),
    "Mamba 1 and 2, Kimi Linear, MiniMax, Bailing": (
        "states, alone or beside attention or MLA",
        *STATES,
    ),
    "DeepSeek-V4.1, Qwen3.8 next, GLM-5.3 flash": (
        "with [circular buffers](#circular-buffers)",
        *("yes", "yes, without the buffers", "yes", "if the buffers are equal", ""),
        "of equally many drafts",
    ),
    "DeepSeek-V4.1": (
        "windows with [bounded replay](#bounded-replay)",
        *("yes", "yes, without the windows", "yes", "yes", "", ""),
    ),
    "encoder-decoder models, HiSparse, DFlash, DSpark": ("", "refused at the start", *("",) * 5),
}
"""Families that no real engine has run with here."""
BEGIN = "<!-- `python -m tests.support_table` writes what stands from here -->\n"
END = "<!-- to here -->\n"
SHOWN_HEAD = """\
# What the tests show

<!-- Written by `python -m tests.support_table` from the marks of the tests; do not edit. -->

## With real engines

What `make test` checks with real vLLM engines on CPUs, by cache family; an empty field is not
tested. "hand-off" compares answers with an engine that has no connector, and the KV byte for byte
with the prefill engine's; a connector that moves nothing fails it. The features in the rows below
it are compared with the answers of a decode engine that computes the prompt itself.

"""
SHOWN = """
## Each with its control

These are checked with real engines (`e2e`), or with vLLM's scheduler and a made-up model that reads
every byte of its KV, or with vLLM's own layers, kernels and caches. The control is a test in which
nothing is moved, or less, or other bytes: there the same comparison fails.

"""


NAME = "support table"


@dataclass(frozen=True)
class Shown:
    """A row of the second table.

    Attributes:
        what: is shown.
        file: of the test, relative to the folder of all tests.
        test, control: names of functions.
    """

    what: str
    file: str
    test: str
    control: str

    @property
    def cells(self) -> tuple[str, str, str]:
        """Of a row."""
        return self.what, f"{_sentence(self.test)} (`{self.file}`)", _sentence(self.control)


def shown(tests: Path = TESTS) -> list[Shown]:
    """What the marks `shows` say, by file and line.

    Raises:
        ValueError: a mark names a control that does not exist.
    """
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        if "pytest.mark.shows" not in (text := path.read_text()):
            continue
        functions = _functions(text)
        for test, function in functions.items():
            for what, control in _marks(function):
                file, _, name = control.rpartition("::")
                others = _functions((tests / file).read_text()) if file else functions
                if name not in others or not name.startswith("test_"):
                    raise ValueError(f"{path}: {test} has no control {control}")
                found.append(Shown(what, str(path.relative_to(tests)), test, name))
    return found


def _sentence(test: str) -> str:
    """The name of a test as it is read."""
    names = {"kv": "KV", "vllm": "vLLM"}
    return " ".join(names.get(word, word) for word in test.removeprefix("test_").split("_"))


def _functions(text: str) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}


def _marks(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """What a test shows, and with which control."""
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
            (what,) = mark.args
            (control,) = mark.keywords
            yield ast.literal_eval(what), ast.literal_eval(control.value)


class Table:
    """A pytest plugin that gathers the marks of what is collected.

    Attributes:
        families: name to what it caches, in the order of the page.
        cells: by feature and family, "yes" or the reason of the refusal.
        files: those whose tests were collected.
    """

    def __init__(self) -> None:
        self.families: dict[str, str] = {}
        self.cells: dict[str, dict[str, str]] = {}
        self.files: set[Path] = set()

    @pytest.hookimpl(tryfirst=True)  # before options leave some out
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items = [item for item in items if END_TO_END in item.path.parents]
        self.files |= {item.path for item in items}
        for item in items:
            callspec = getattr(item, "callspec", None)
            family = callspec.params.get("family") if callspec else None
            if family is not None and hasattr(family, "caches"):
                self.families.setdefault(family.name, family.caches)
        for item in items:
            callspec = getattr(item, "callspec", None)
            family = callspec.params.get("family") if callspec else None
            for mark in reversed(list(item.iter_markers("supports"))):
                feature, *named = mark.args
                refused = mark.kwargs.get("refused")
                names = named or ([family.name] if family is not None else list(self.families))
                for name in names:
                    if family is None or name == family.name:
                        row = self.cells.setdefault(feature, {})
                        row[name] = refused or row.get(name, "yes")

    def pages(self) -> tuple[str, str]:
        """What `PAGES` should be."""
        unknown = {name for row in self.cells.values() for name in row} - set(self.families)
        if unknown:
            raise ValueError(f"marks name unknown families: {sorted(unknown)}")
        return self._for_users(), self._shown()

    def _for_users(self) -> str:
        rows = [("family", "caches", *COLUMNS)]
        for name, caches in self.families.items():
            beside = BESIDE.get(name, ("yes",) * len(COLUMNS))
            cells = [
                "**yes**" if any(self.cells[each].get(name) == "yes" for each in features) else cell
                for features, cell in zip(COLUMNS.values(), beside, strict=True)
            ]
            rows.append((name, caches, *cells))
        rows += [(name, *cells) for name, cells in OTHERS.items()]
        before, begin, rest = PAGES[0].read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        return before + begin + _table(rows) + end + after

    def _shown(self) -> str:
        notes: list[str] = []

        def cell(value: str) -> str:
            if value in ("", "yes"):
                return value
            if value not in notes:
                notes.append(value)
            return f"no ({notes.index(value) + 1})"

        rows = [("", *self.families), ("caches", *self.families.values())]
        for feature, values in self.cells.items():
            rows.append((feature, *(cell(values.get(name, "")) for name in self.families)))
        text = SHOWN_HEAD + _table(rows) + ("\n" if notes else "")
        text += "".join(
            f"{number}. {note[0].upper()}{note[1:]}.\n" for number, note in enumerate(notes, 1)
        )
        return text + SHOWN + _table([("", "shown by", "control"), *(row.cells for row in shown())])


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def pages_of(config: pytest.Config) -> tuple[str, str] | None:
    """The pages that this run's own tests make, if all end-to-end tests were collected for it."""
    table = config.pluginmanager.get_plugin(NAME)
    if any("::" in argument for argument in config.args):
        return None
    if not isinstance(table, Table) or table.files != set(END_TO_END.rglob("test_*.py")):
        return None
    return table.pages()


def collect() -> tuple[str, str]:
    """Collect the end-to-end tests and return the pages that they make."""
    table = Table()
    arguments = ["--collect-only", "-qq", "--no-summary", str(END_TO_END)]
    status = pytest.main(arguments, plugins=[table])
    if status != pytest.ExitCode.OK:
        raise SystemExit(f"the tests could not be collected: {status}")
    return table.pages()


if __name__ == "__main__":
    for path, text in zip(PAGES, collect(), strict=True):
        if sys.argv[1:] != ["--check"]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            raise SystemExit(f"{path} is out of date: run `python -m tests.support_table`")
