# SPDX-License-Identifier: Apache-2.0
"""`omni-connector explain`, asking an engine that hashes by itself and caches some blocks."""

import io
import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from omni_connector.cli import explain as module
from omni_connector.cli import explain_view
from omni_connector.cli import explained as explained_module
from omni_connector.cli.explain import Asking
from omni_connector.cli.explained import (
    Answer,
    AskedEngine,
    Explanation,
    explained,
)
from omni_connector.cli.main import main
from omni_connector.errors import ConfigError, OmniError
from omni_connector.net.packets import read_answer
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE, runtime_dir
from omni_connector.net.status import EngineStatus, StatusFile
from omni_connector.prefix.explain import (
    AskEngine,
    Explained,
    FoundTail,
    Miss,
    Place,
    ThisEngine,
    Tokenizer,
)
from omni_connector.prefix.explainer import Explainer
from tests.hostile import explain as hostile
from tests.hostile.mutation import distort_msgpack

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
TOKENS = list(range(100))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Explainer]:
    with hostile.explainer("engine-\x1b[31m7") as engine:
        folder = engine._engine.folder
        monkeypatch.setattr(module, "existing_folder", lambda namespace: folder)
        monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(folder))
        yield engine


@pytest.fixture
def asked(engine: Explainer) -> Iterator[AskedEngine]:
    (found,), remarks = module._engines(engine._engine.folder)
    assert not remarks
    yield found
    found.close()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["explain", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_tokens_of_a_prompt_are_accounted_for(
    engine: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    document = told(capsys, "--tokens", json.dumps(TOKENS))
    assert document["format"] == 1
    assert document["remarks"] == []
    (found,) = document["engines"]
    assert found["engine_id"] == "engine-?[31m7"
    assert found["tokens"] == 100
    assert found["computed"] + sum(found["sources"].values()) == 100
    assert found["remarks"] == ["it does not use the arenas of this host (`share` is off)"]
    runs = found["groups"][0]["runs"]
    assert sum(run["blocks"] for run in runs) == 6
    assert [run["end_token"] for run in runs][-1] == 96


def test_the_documented_fields_are_those_of_the_document(
    engine: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page.split("## The document of `omni-connector explain`")[1].split("\n## ")[0]
    names = set(re.findall(r"`(\w+)`", section))

    def fields(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from value
            for part in value.values():
                yield from fields(part)
        elif isinstance(value, list):
            for part in value:
                yield from fields(part)

    for salt in "abcdefgh":  # one of them has not all blocks in the cache
        document = told(capsys, "--tokens", json.dumps(TOKENS), "--salt", salt)
        if document["engines"][0]["missing"]:
            break
    assert document["engines"][0]["missing"]
    assert set(fields(document)) <= names


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100, 2000])
def test_a_prompt_of_any_length(asked: AskedEngine, length: int) -> None:
    found = explained(asked, [], list(range(length)), "s")
    assert found.tokens == length
    assert found.computed is not None
    assert found.computed >= 1
    assert found.computed + sum(found.sources.values()) == length
    if found.missing is not None:
        assert found.missing.first_token + found.missing.tokens < length


def test_a_prompt_that_takes_too_long_is_called_too_long(
    engine: Explainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explained_module, "_IN_ALL_S", 0.0)
    assert main(["explain", "--json", "--tokens", json.dumps(TOKENS)]) == 1
    (remark,) = json.loads(capsys.readouterr().out)["remarks"]
    assert "the prompt is too long to be explained within 0 s: it has 100 tokens" in remark


def test_a_prompt_of_too_many_tokens_is_called_so(
    engine: Explainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 99)
    assert main(["explain", "--json", "--tokens", json.dumps(TOKENS)]) == 2
    assert "from 1 to 99 tokens, not 100" in capsys.readouterr().err


@pytest.fixture
def at(asked: AskedEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., AskedEngine]:
    """Makes engines at sockets of the host that differ from `asked`, and that have nothing."""

    class Stub:
        def __init__(self, this: ThisEngine) -> None:
            self.this = this

        def ask(self, question: Any, answers: Any, deadline: float) -> tuple[Any, None]:
            known = not (self.this.alone and self.this.unsettled)
            found = Explained(known=known, sources={}, groups=((), ()))
            return self.this if isinstance(question, AskEngine) else found, None

    def make(socket: str, **changes: Any) -> AskedEngine:
        this = msgspec.structs.replace(
            asked.engine, engine_id=socket, socket=socket, shares=True, **changes
        )
        monkeypatch.setattr(explained_module, "Connection", lambda path, deadline: Stub(this))
        return AskedEngine(Path(socket))

    return make


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"alone": True, "unsettled": True}, "the weights of it are not known yet"),
        ({"alone": True}, "the weights of it are not known"),
        ({"weights": "others"}, "it has other weights in its memory"),
        ({"traits": {}, "alone": True}, "another model: None, here 'm@1'"),
    ],
)
def test_an_engine_is_shared_with_or_apart_and_never_both(
    at: Callable[..., AskedEngine], changes: dict[str, Any], why: str | None
) -> None:
    other = at("i-2", **changes)
    found = explained(at("i-1", neighbours=("i-2", "i-3")), [other], TOKENS, None)
    assert found.apart.get("i-2") == why
    assert found.shares_with == (["i-2", "i-3"] if why is None else ["i-3"])


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"alone": True, "problem": "\x1b"}, "that it shares with nobody: ?"),
        ({"alone": True, "unsettled": True}, "its weights are not known yet"),
        ({"unsettled": True}, "its weights may be others"),
    ],
)
def test_what_is_not_known_of_weights_is_said(
    at: Callable[..., AskedEngine], changes: dict[str, Any], remark: str
) -> None:
    found = explained(at("i-1", neighbours=("i-2",), **changes), [at("i-2")], TOKENS, None)
    (said,) = found.remarks
    assert remark in said
    assert (found.computed is None) == ("not known yet" in remark)
    assert (found.shares_with == []) == changes.get("alone", False)


def test_an_engine_that_answers_nonsense_is_an_error_of_ours(
    engine: Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    ends: set[str] = set()

    class Liar:
        def ask(self, question: Any, answers: Any, deadline: float) -> tuple[Any, None]:
            packet = msgspec.msgpack.encode(engine.answer(question)[0])
            if rng.random() < 0.3:
                packet = distort_msgpack(packet, rng)
            return read_answer(packet, [], answers)[0], None

        def close(self) -> None:
            pass

    monkeypatch.setattr(explained_module, "Connection", lambda path, deadline: Liar())
    for _ in range(400):
        try:
            found = explained(AskedEngine(Path("liar")), [], TOKENS, None)
        except OmniError as error:
            ends.add(type(error).__name__)
        else:
            ends.add(type(found).__name__)
    assert {"Explanation", "ProtocolError"} <= ends


def test_texts_become_tokens_by_the_tokenizer_of_the_engine(
    engine: Explainer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    seen: list[tuple[Tokenizer, str]] = []

    def tokenizer(which: Tokenizer, trusts_code: bool) -> Any:
        def tokens(text: str) -> Any:
            seen.append((which, text))
            return SimpleNamespace(input_ids=[5] * len(text))

        return tokens

    monkeypatch.setattr(module, "_tokenizer", tokenizer)
    file = tmp_path / "prompt"
    file.write_text("four", encoding="utf-8")
    assert told(capsys, "--file", str(file))["engines"][0]["tokens"] == 4
    assert told(capsys, "hello")["engines"][0]["tokens"] == 5
    monkeypatch.setattr("sys.stdin", io.StringIO("in"))
    assert told(capsys, "-")["engines"][0]["tokens"] == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("[1, 2, 3]\n"))
    assert told(capsys, "--tokens", "-")["engines"][0]["tokens"] == 3
    assert [text for _, text in seen] == ["four", "hello", "in"]
    assert seen[0][0].name == "t"


@pytest.mark.vllm
def test_a_tokenizer_is_loaded_from_where_the_engine_has_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from omni_connector.testing import models

    models._write_tokenizer(tmp_path, models._RECIPES["llama"])
    ids = Asking("some text", None, None).ids(Tokenizer(str(tmp_path)))
    assert 1 <= len(ids) <= len("some text")
    with pytest.raises(ConfigError, match="cannot be used"):
        Asking("text", None, None).ids(Tokenizer(str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "--tokens", "1"],
        ["--tokens", "1,x"],
        ["--tokens", "[1, -2]"],
        ["--tokens", "1.5"],
        ["--tokens", ""],
        ["--file", "/nowhere/at/all"],
    ],
)
def test_what_makes_no_sense_ends_with_status_2(
    engine: Explainer, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    assert capsys.readouterr().err.startswith("omni-connector: ")


def test_a_tokenizer_that_cannot_be_loaded_is_said(
    engine: Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(which: Tokenizer, trusts_code: bool) -> Any:
        raise OSError("it is not here")

    monkeypatch.setattr(module, "_tokenizer", fails)
    with pytest.raises(ConfigError, match="give the prompt as --tokens"):
        Asking("text", None, None).ids(Tokenizer("t"))


@pytest.mark.parametrize(
    ("which", "why"),
    [
        (Tokenizer("/t", trust_remote_code=True), "--trust-remote-code"),
        (Tokenizer("here"), "a folder here has its name"),
        (Tokenizer("/\x1b]0;t\x07", trust_remote_code=True), "the tokenizer /[^\x1b\x07]* cannot"),
    ],
)
def test_a_socket_does_not_say_which_code_runs(
    which: Tokenizer, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=why):
        Asking("text", None, None).ids(which)


def test_an_engine_whose_tokenizer_is_not_here_is_a_remark(
    engine: Explainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = Asking.ids
    calls: list[Tokenizer] = []

    def once(asking: Asking, tokenizer: Tokenizer) -> list[int]:
        calls.append(tokenizer)
        if len(calls) == 1:
            raise ConfigError("it is not here")
        return ids(asking, tokenizer)

    monkeypatch.setattr(Asking, "ids", once)
    with hostile.explainer("another", engine._engine.folder):
        document = told(capsys, "--tokens", "1,2,3")
    assert len(document["engines"]) == 1
    assert "it is not here" in " ".join(document["remarks"])


def test_a_salt_that_no_request_can_have_ends_with_status_2(
    engine: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--tokens", "1", "--salt", "\udcff"]) == 2


def test_a_socket_that_a_killed_engine_has_left_is_nothing_to_remark(
    engine: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    left = engine._engine.folder / "e-0123456789abcdef01234567.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(left))
    assert told(capsys, "--tokens", "1")["remarks"] == []
    left.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(left))
        other.listen()
        (remark,) = told(capsys, "--tokens", "1")["remarks"]
    assert left.name in remark


def test_where_the_last_engine_has_gone_this_is_said(
    engine: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.close()
    assert main(["explain", "--tokens", "1"]) == 1
    assert "No engine that shares prefixes of namespace default" in words(capsys)


def words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_an_id_that_no_engine_has_is_said(
    engine: Explainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--tokens", "1", "--engine", "other"]) == 1
    said = words(capsys)
    assert "that shares prefixes has an id that begins with other. There are engine-" in said
    assert "first miss" not in said


def test_where_there_is_no_engine_other_namespaces_are_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place))
    file = StatusFile(runtime_dir("team-a"))
    file.write(msgspec.json.encode(EngineStatus(engine_id="a", role="kv_both", model="m")))
    assert main(["explain", "--tokens", "1"]) == 1
    said = words(capsys)
    assert "No engine that shares prefixes of namespace default" in said
    assert "There are engines in team-a" in said
    assert main(["explain", "--tokens", "1", "--json", "--namespace", "tema-a"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["engines"] == []
    assert "team-a" in document["remarks"][0]
    assert [each.name for each in place.iterdir()] == ["team-a"]  # of those asked for none is made
    file.close()


def test_the_table_has_a_row_for_each_engine() -> None:
    miss = Miss(2, 32, 48, "evicted", ("b",))
    run = {"first_block": 0, "blocks": 1, "first_token": 0, "end_token": 16, "engine": ""}
    runs = [{**run, "source": source} for source in ("own", "arena", "store", "missing")]
    runs.append({**run, "source": "host", "engine": "b"})
    group = {"kind": "full", "block_size": 16, "runs": runs}
    first = Explanation(
        engine_id="a",
        model="m",
        tokens=100,
        computed=68,
        sources={Place.OWN: 16, Place.ARENA: 0, Place.HOST: 16, Place.STORE: 0},
        groups=[group, {**group, "kind": "window", "runs": []}],
        tail=FoundTail(2, 32, 39, Place.HOST, "engine-9"),
        missing=miss,
        shares_with=["b"],
        apart={"c": "another model: 'x', here 'm'"},
        requests={"lookup": 2},
        remarks=[],
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(explain_view.screen(Answer("default", "/f", 0.0, [first], ["odd"])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in (
        *("0-15 own KV cache", "0-15 arena of b", "16 other arenas", "68 of 100", "window:"),
        *("token 32: evicted from its arena, or passed over", "the arena of b", "odd"),
        "a: has requests with this prompt: 2 in the phase lookup",
        *("a: shares with b", "a: does not share with c: another model"),
        "32-38 arena of engine-9, where another has ended",
    ):
        assert part in text, part
