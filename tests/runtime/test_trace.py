# SPDX-License-Identifier: Apache-2.0
"""Spans: what is written of them, how much, and as whose; and that nothing breaks an engine."""

import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from omni_connector.copy.threads import Outcome, traced
from omni_connector.errors import ConfigError
from omni_connector.runtime import trace as module
from omni_connector.runtime.trace import NO_TRACE, FileTrace, Span, merge, now, spans
from omni_connector.runtime.turns import Turn


class Held:
    """A thread whose turns a test makes."""

    def __init__(self, name: str, turn: Turn) -> None:
        self.turn = turn
        self.ended = False

    def wake(self) -> None:
        pass

    def join(self, timeout: float) -> None:
        while self.turn() is not None:
            pass
        self.ended = True

    def is_alive(self) -> bool:
        return not self.ended


def start(name: str, turn: Turn, **options: Any) -> Held:
    return Held(name, turn)


def lasting(folder: Path, name: str = "") -> list[Span]:
    """The spans in a folder, without the names of processes and threads."""
    return [span for _, span in spans(folder) if span.ph == "X" and name in span.name]


def test_a_span_tells_when_where_and_what(tmp_path: Path) -> None:
    trace = FileTrace(str(tmp_path), "engine", "worker0")
    began = now()
    trace.span("save", began, "save 3", bytes=4096, failure=None)
    ended = now()
    trace.close()
    (span,) = lasting(tmp_path)
    assert (span.name, span.cat, span.id, span.args) == (
        "save",
        "worker0",
        "save 3",
        {"bytes": 4096},
    )
    assert span.ts == began / 1000
    assert 0 <= span.dur <= (ended - began) / 1000
    assert span.tid == threading.get_native_id()


def test_only_the_user_can_read_the_file_which_is_of_one_process_and_half(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for half in ("scheduler", "worker0"):
        trace = FileTrace(str(folder), "../engine", half)
        trace.span("x", now())
        trace.close()
    first, second = sorted(folder.iterdir())
    assert first.name.startswith(".._engine-scheduler-")
    assert second.name.startswith(".._engine-worker0-")
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_without_a_span_there_is_no_thread_and_no_file(tmp_path: Path) -> None:
    threads = threading.active_count()
    trace = FileTrace(str(tmp_path), "engine", "scheduler")
    assert threading.active_count() <= threads
    trace.close()
    trace.close()
    assert not list(tmp_path.iterdir())
    assert json.loads(merge(tmp_path))["traceEvents"] == []
    assert not NO_TRACE.is_recording
    NO_TRACE.phase("lease", now(), now(), "r")
    NO_TRACE.close()


def test_a_phase_is_a_span_of_its_request(tmp_path: Path) -> None:
    trace = FileTrace(str(tmp_path), "engine", "scheduler")
    trace.phase("queued", 1_000_000, 3_000_000, "r")
    trace.close()
    [queued] = lasting(tmp_path)
    assert (queued.name, queued.ts, queued.dur) == ("queued", 1_000.0, 2_000.0)
    assert queued.id == queued.args["request"] == "r"


def test_no_more_spans_wait_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_SPANS", 3)
    monkeypatch.setattr(module, "logger", logging.getLogger("trace"))
    trace = FileTrace(str(tmp_path), "engine", "worker0", start)
    for number in range(5):
        trace.span(f"span {number}", now())
    assert trace._thread is not None
    trace._turn()
    trace.span("later", now())
    trace.close()
    assert [span.name for span in lasting(tmp_path)] == ["span 0", "span 1", "span 2", "later"]
    assert "2 spans are missing" in caplog.text


def test_a_folder_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file" / "x"), "a\0b"):
        with pytest.raises(ConfigError, match=r"^trace: the folder .* cannot be made"):
            FileTrace(folder, "engine", "scheduler")


@pytest.mark.parametrize("how", ["gone", "full", "pipe", "link"])
def test_a_file_that_cannot_be_written_ends_the_trace_with_one_warning(
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "logger", logging.getLogger("trace"))
    folder = tmp_path / "folder"
    trace = FileTrace(str(folder), "engine", "scheduler", start)
    reader = -1
    if how == "gone":
        folder.rmdir()
    elif how == "pipe":  # somebody reads from it
        os.mkfifo(trace._path)
        reader = os.open(trace._path, os.O_RDONLY | os.O_NONBLOCK)
    elif how == "link":
        trace._path.symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(module.os, "write", lambda file, text: len(text) // 2)
    trace.span("a", now())
    assert trace._turn() is None
    trace.span("b", now())
    trace.close()
    assert not trace._spans
    assert len(caplog.records) == 1
    assert "No more spans are traced" in caplog.text
    assert not (tmp_path / "elsewhere").exists()
    if reader >= 0:
        assert os.read(reader, 1) == b""
        os.close(reader)


def test_an_id_that_is_no_text_costs_its_own_spans_only(tmp_path: Path) -> None:
    trace = FileTrace(str(tmp_path), "engine", "scheduler")
    for request_id in ("good", "bad \ud800", "good"):
        trace.phase("lease", now(), now(), request_id)
    trace.close()
    assert [span.id for span in lasting(tmp_path)] == ["good", "good"]


def test_work_is_traced_from_its_first_piece_to_its_end_with_its_parts(tmp_path: Path) -> None:
    trace = FileTrace(str(tmp_path), "engine", "worker0")

    def work(cancelled):
        trace.span("part", now())
        yield True
        return Outcome(7, blocks=2, size=10)

    pieces = traced(trace, "save", 7, work, "r")(lambda: False)
    assert next(pieces) is True
    trace.span("between", now())
    with pytest.raises(StopIteration) as end:
        next(pieces)
    assert end.value.value == Outcome(7, blocks=2, size=10)
    trace.close()
    part, between, save = lasting(tmp_path)
    assert part.args == {"job": 7}
    assert between.args == {}
    assert save.args == {"job": 7, "request": "r", "blocks": 2, "bytes": 10}
    assert save.ts <= part.ts


def test_work_that_raises_or_is_dropped_is_traced_too(tmp_path: Path) -> None:
    trace = FileTrace(str(tmp_path), "engine", "worker0")
    closed = []

    def work(cancelled):
        try:
            yield True
            raise RuntimeError
        finally:
            closed.append(True)

    dropped = traced(trace, "load", 1, work)(lambda: False)
    next(dropped)
    dropped.close()
    failing = traced(trace, "load", 2, work)(lambda: False)
    next(failing)
    with pytest.raises(RuntimeError):
        next(failing)
    trace.close()
    assert [span.args["failure"] for span in lasting(tmp_path)] == ["job_failed"] * 2
    assert closed == [True] * 2


def test_files_become_one_chrome_trace(tmp_path: Path) -> None:
    for name in ("prefill", "decode"):
        trace = FileTrace(str(tmp_path / name), f"id of {name}", "worker0")
        trace.span("part", now(), layer="layer 1")
        trace.span("save", now(), "save 1", job=1)
        trace.close()
    with next(tmp_path.rglob("*.jsonl")).open("ab") as file:
        file.write(b'{"name": "cut o')
    merged = json.loads(merge(tmp_path))
    events = merged["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"prefill (id of prefill worker0)", "decode (id of decode worker0)"}
    assert sum(e["name"] == "thread_name" for e in events) == 1
    parts = [e for e in events if e["name"] == "part"]
    assert [e["ph"] for e in parts] == ["X", "X"]
    assert all({"ts", "dur", "pid", "tid"} <= e.keys() for e in parts)
    # Spans that may overlap begin and end by themselves.
    begin, end, *_ = (e for e in events if e["name"] == "save")
    assert (begin["ph"], end["ph"]) == ("b", "e")
    assert begin["ts"] <= end["ts"]
    assert begin["id2"] == end["id2"]
    assert begin["args"] == {"job": 1}


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["a", "b"]])
def test_without_a_folder_it_says_how_it_is_called(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert module.main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "usage: python -m omni_connector.runtime.trace FOLDER > trace.json\n",
    )
