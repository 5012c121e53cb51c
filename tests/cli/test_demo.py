# SPDX-License-Identifier: Apache-2.0
"""What the demo accepts, and that it stops at nothing less than moved KV and equal tokens."""

import http.client
import json
from pathlib import Path

import pytest

from omni_connector.cli import demo as module
from omni_connector.cli.demo import Metrics, Result, demo, median
from omni_connector.cli.engines import make_engines
from omni_connector.cli.main import main
from omni_connector.runtime.trace import FileTrace, now

GOOD = Result(
    prompt_tokens=100,
    tokens_moved=99,
    bytes_moved=6_488_064,
    handoff_s=0.005,
    prefill_s=0.25,
    ttft_s=(0.03, 0.02, 0.2),
    same_tokens=True,
)


def _but(**changes: object) -> Result:
    fields = {name: getattr(GOOD, name) for name in Result.__dataclass_fields__}
    return Result(**{**fields, **changes})


def test_a_good_result_has_no_problem() -> None:
    assert GOOD.problems() == []


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (_but(same_tokens=False), "differs"),
        (_but(tokens_moved=0, bytes_moved=0), "KV of 0 tokens"),
        (_but(tokens_moved=98), "KV of 98 tokens"),
        (_but(bytes_moved=0), "0 bytes"),
    ],
)
def test_other_tokens_and_kv_that_did_not_move_are_problems(result: Result, words: str) -> None:
    (problem,) = result.problems()
    assert words in problem


def test_the_median_of_results_hides_no_bad_one() -> None:
    slow = _but(handoff_s=0.5, prefill_s=0.9, ttft_s=(0.9, 0.8, 0.7))
    assert median([GOOD, slow, GOOD]) == GOOD
    assert median([GOOD, _but(same_tokens=False), GOOD]).problems()
    assert median([GOOD, GOOD, _but(tokens_moved=3)]).problems()


def test_metrics_are_summed_over_labels_and_absent_ones_are_zero() -> None:
    before = Metrics('# TYPE a counter\na_total{x="1"} 2.0\na_total{x="2"} 3.0\n')
    after = Metrics('# TYPE a counter\na_total{x="1"} 4.0\na_total{x="2"} 3.5\n')
    assert after.since(before, "a_total") == 2.5
    assert after.since(before, "b_total") == 0.0


def test_without_the_router_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert demo(cache=tmp_path) == 2
    assert "omni-connector[demo]" in capsys.readouterr().out


@pytest.mark.parametrize("fails", [True, False])
def test_it_fails_and_keeps_the_logs_when_a_row_is_wrong(
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "logs"
    rows = [GOOD, _but(same_tokens=not fails)]
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module.tempfile, "mkdtemp", lambda prefix: str(folder))
    monkeypatch.setattr(module, "_measure_all", lambda *arguments: rows)
    assert demo(cache=tmp_path) == int(fails)
    assert folder.exists() == fails
    assert ("NO" in capsys.readouterr().out) == fails


def test_a_trace_is_written_and_it_says_how_to_open_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_all(*arguments: object) -> list[Result]:
        spans = arguments[-1]
        assert isinstance(spans, Path)
        trace = FileTrace(str(spans / "client"), "user", "client")
        trace.span("first token", now(), tokens=100)
        trace.close()
        return [GOOD]

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "_measure_all", measure_all)
    file = tmp_path / "trace.json"
    assert demo(cache=tmp_path, trace=file) == 0
    assert "chrome://tracing" in capsys.readouterr().out
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["name"] for event in events} == {"process_name", "thread_name", "first token"}
    assert demo(cache=tmp_path, logs=tmp_path, trace=tmp_path / "absent" / "trace.json") == 1
    assert "the trace was not written" in capsys.readouterr().out


def test_each_engine_is_told_of_a_folder_for_its_spans(tmp_path: Path) -> None:
    for engine, name in zip(
        make_engines(tmp_path, tmp_path, {}, trace=tmp_path), ("prefill", "decode"), strict=True
    ):
        assert engine.environment["OMNI_CONNECTOR_TRACE"] == str(tmp_path / name)
    for engine in make_engines(tmp_path, tmp_path, {}):
        assert "OMNI_CONNECTOR_TRACE" not in engine.environment


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_demo_leaves_no_logs(
    how: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*arguments: object) -> list[Result]:
        raise how

    folder = tmp_path / "logs"
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module.tempfile, "mkdtemp", lambda prefix: str(folder))
    monkeypatch.setattr(module, "_measure_all", end)
    with pytest.raises(how):
        demo(cache=tmp_path)
    assert not folder.exists()


def test_of_a_broken_start_the_first_error_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> list[Result]:
        (tmp_path / "decode.log").write_text(
            "WARNING errors like `OSError: [Errno 24]` may follow\n"
            "ERROR ValueError: no room\nOSError: 2\n"
        )
        raise module.EngineError("engine died while starting:\n...")

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "_measure_all", fail)
    assert demo(cache=tmp_path, logs=tmp_path) == 1
    out = capsys.readouterr().out
    assert "engine died while starting" in out
    assert "decode: ValueError: no room" in out
    assert "OSError" not in out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (http.client.RemoteDisconnected("closed without response"), "closed without response"),
        (ConnectionRefusedError(), "ConnectionRefusedError"),
    ],
)
def test_an_engine_that_dies_ends_the_demo_with_a_line(
    error: Exception,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def die(*arguments: object) -> list[Result]:
        raise error

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "_measure_all", die)
    assert demo(cache=tmp_path, logs=tmp_path) == 1
    assert f"Failed: {said}" in capsys.readouterr().out


def test_traces_of_two_demos_with_the_same_logs_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    def measure(*arguments: object) -> list[Result]:
        folders.append(arguments[-1])
        return []

    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "_measure_all", measure)
    for _ in range(2):
        assert demo(cache=tmp_path, logs=tmp_path, trace=tmp_path / "trace.json") == 0
    assert folders[0] != folders[1]


@pytest.mark.parametrize("option", ["--cache", "--logs"])
def test_a_folder_that_cannot_be_made_is_an_error_of_one_line(
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("omni_connector.cli.main.require_supported_vllm", lambda: None)
    monkeypatch.setattr(module, "find_spec", lambda name: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "file"
    file.touch()
    assert main(["demo", option, str(file / "folder")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"omni-connector: {option}: the folder cannot be made:")
