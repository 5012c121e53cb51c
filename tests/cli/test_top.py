# SPDX-License-Identifier: Apache-2.0
"""`omni-connector top`, over files made by hand."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from omni_connector.cli import doctor
from omni_connector.cli import top as module
from omni_connector.cli.main import main
from omni_connector.cli.readings import SILENT_S, History, Reading, hit_rates
from omni_connector.cli.top import document
from omni_connector.cli.top_view import bar, screen
from omni_connector.config import OmniConfig
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE, runtime_dir
from omni_connector.net.status import (
    SIGN_OF_LIFE_S,
    Durations,
    EngineStatus,
    StatusFile,
    StatusReport,
    Usage,
    label,
)
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import TurnThread, take_ended_threads
from omni_connector.testing import FakeClock

Make = Callable[..., StatusFile]
ENGINE = EngineStatus(
    engine_id="prefill",
    role="kv_producer",
    model="llama@main",
    pid=7,
    vllm="0.32.0",
    omni_connector="0.1.0",
    arena_bytes=1 << 20,
    started=1.0,
    usage=Usage(10, 4, 3, 1, 2),
    prompt_tokens=1000,
    cached_tokens=600,
    counts={"bytes_saved": 0, "bytes_loaded": 0, "handoffs_offered": 0, "tokens_loaded": 250},
    failures={"arena_full": 2},
    seconds={"save": Durations(4, 0.01)},
)


def engine(**changes: Any) -> EngineStatus:
    return msgspec.structs.replace(ENGINE, **changes)


@pytest.fixture(autouse=True)
def _place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place))


@pytest.fixture
def make() -> Iterator[Make]:
    made = []

    def make(namespace: str = "default", **changes: Any) -> StatusFile:
        made.append(StatusFile(runtime_dir(namespace)))
        write(made[-1], **changes)
        return made[-1]

    yield make
    for file in made:
        file.close()


def write(file: StatusFile, **changes: Any) -> None:
    file.write(msgspec.json.encode(engine(**{"written": time.time(), **changes})))


def text(reading: Reading, history: History | None = None, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(screen(reading, history or History(), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["top", "--once", "--json", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def test_one_json_document_tells_all(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make()
    make(engine_id="decode", role="kv_consumer", usage=Usage(), counts={"bytes_loaded": 5})
    told = asked(capsys)
    assert set(told) == {"format", "time", "namespace", "folder", "engines", "total", "remarks"}
    assert told["format"] == 1
    assert told["namespace"] == "default"
    decode, prefill = told["engines"]
    assert decode["engine_id"] == "decode"
    assert prefill["state"] == "live"
    assert prefill["usage"] == {
        "slots_total": 10,
        "slots_in_use": 4,
        "slots_cached": 3,
        "slots_free": 3,
        "leases": 1,
        "handoffs_open": 2,
        "slots_pinned": 0,
    }
    assert prefill["hit_rates"] == {
        "own": 0.35,
        "arena": 0.0,
        "host": 0.0,
        "peer": 0.25,
        "store": 0.0,
        "other": 0.0,
    }
    assert prefill["seconds"] == {"save": {"count": 4, "sum": 0.01}}
    assert prefill["rates"] is None  # one look tells none
    assert told["total"]["counts"]["bytes_loaded"] == 5
    assert told["total"]["failures"] == {"arena_full": 4}
    assert told["total"]["usage"]["slots_total"] == 10


def test_the_documented_fields_are_those_of_the_document(make: Make) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    make()
    told = document(Reading.take("default"), History())
    fields = {*told, *told["engines"][0], *told["engines"][0]["usage"], *told["total"]}
    missing = {name for name in fields if f"`{name}`" not in page}
    assert not missing


def test_a_namespace_is_looked_at_by_itself(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("team-a", engine_id="a")
    make("team-b", engine_id="b")
    assert [each["engine_id"] for each in asked(capsys, "--namespace", "team-a")["engines"]] == [
        "a"
    ]
    monkeypatch.setenv("OMNI_CONNECTOR_NAMESPACE", "team-b")
    assert [each["engine_id"] for each in asked(capsys)["engines"]] == ["b"]
    assert asked(capsys, "--namespace", "\udc80")["engines"] == []


def test_where_nobody_is_it_says_what_to_do(
    make: Make, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    make("team-a")
    assert main(["top", "--once"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "No engine of namespace default" in said
    assert "There are engines in team-a" in said
    assert "--namespace" in said
    assert RUNTIME_DIR_VARIABLE in said


def test_rates_are_those_between_two_writings(make: Make) -> None:
    history = History()
    file = make(written=1000.0)

    def look(now: float) -> Any:
        reading = Reading.take("default")
        history.add(reading)
        return history.rates(reading.engines[0], now)

    assert look(1000.0) is None
    write(
        file,
        written=1002.0,
        counts={"bytes_saved": 4_000_000, "blocks_saved": 6},
        failures={"arena_full": 2, "stale_slot": 1},
    )
    rates = look(1002.5)
    assert rates == {"bytes_saved": 2e6, "blocks_saved": 3.0, "failures": 0.5}
    assert look(1003.5) == rates  # nothing was written since, which is soon to come
    assert set(look(1006.0).values()) == {0.0}  # nothing has changed since
    write(file, written=1007.0, counts={"bytes_saved": 0}, failures={})  # a liar
    assert look(1007.0) == {"bytes_saved": 0.0, "failures": 0.0}
    write(file, written=1008.0, started=2.0)  # another engine of the same name
    assert look(1008.0) is None


def test_a_clock_that_is_set_back_costs_one_rate(make: Make) -> None:
    history = History()
    for written, loaded in ((1000.0, 0), (1002.0, 200), (400.0, 300), (402.0, 700)):
        now = engine(written=written, counts={"bytes_loaded": loaded})
        reading = Reading("default", Path("/"), written, [now])
        history.add(reading)
        rates = history.rates(now, written)
        assert rates is None if written in (1000.0, 400.0) else rates is not None
    assert rates is not None
    assert rates["bytes_loaded"] == 200.0


def test_rates_of_engines_add_up(make: Make) -> None:
    history = History()
    files = [make(engine_id=name, written=1000.0) for name in "ab"]
    for now, saved in ((1000.0, 0), (1001.0, 3_000_000)):
        for file, name in zip(files, "ab", strict=True):
            write(file, engine_id=name, written=now, counts={"bytes_saved": saved})
        reading = Reading.take("default")
        history.add(reading)
    reading = Reading("default", reading.folder, 1001.0, reading.engines)
    assert history.total(reading) == {"bytes_saved": 6e6, "failures": 0.0}
    assert document(reading, history)["total"]["rates"]["bytes_saved"] == 6e6
    seen = text(reading, history)
    assert "6.0" in seen
    assert "2 engines" in seen


def test_hits_are_parts_of_the_prompts() -> None:
    assert set(hit_rates([]).values()) == {None}
    skewed = engine(prompt_tokens=10, cached_tokens=0, counts={"tokens_loaded": 20})
    assert set(hit_rates([skewed]).values()) == {0.0, 1.0}


def test_an_engine_that_writes_no_more_is_silent() -> None:
    reading = Reading("default", Path("/x"), 1000.0, [engine(written=1000.0 - SILENT_S - 1)])
    assert reading.state(reading.engines[0]) == "silent"
    assert "silent" in text(reading)
    reading = Reading("d", Path("/x"), 1000.0)
    assert reading.state(engine(written=1000.0 + SILENT_S - 1)) == "live"
    # It has written nothing since the clock was set back.
    assert reading.state(engine(written=2000.0)) == "silent"


@pytest.mark.parametrize("steps", [False, True], ids=["idle", "after a step"])
def test_an_engine_that_has_lost_a_thread_says_so(make: Make, steps: bool) -> None:
    look = dict(doctor.CHECKS_OF_SETTINGS)["engines"]
    clock = FakeClock()
    report = StatusReport(make(), engine(), Usage, EngineContext(clock))
    assert report.tick()
    assert "lost" not in text(Reading.take("default"))
    assert look(OmniConfig()) == "1 in namespace default; none has lost a thread"
    TurnThread("omni-test", lambda: 1 / 0).join(60.0)
    if steps:
        stats = {f"failure:thread_ended:{name}": 1 for name in take_ended_threads()}
        report.add({"counts": stats})
    clock.advance(SIGN_OF_LIFE_S)
    assert report.tick()
    remark = "prefill has lost threads (omni-test), and its log says why: restart it"
    reading = Reading.take("default")
    assert reading.remarks == [remark]
    assert remark in text(reading)
    assert document(reading, History())["engines"][0]["failures"] == {"thread_ended:omni-test": 1}
    with pytest.raises(doctor.CheckFailedError, match="has lost threads"):
        look(OmniConfig())


def test_an_engine_with_memory_that_is_not_pinned_says_so(make: Make) -> None:
    look = dict(doctor.CHECKS_OF_SETTINGS)["engines"]
    clock = FakeClock()
    report = StatusReport(make(), engine(), Usage, EngineContext(clock))
    for pinned, unpinned, remarks in (
        (3 << 30, 0, []),
        (
            *(1 << 30, 2 << 30),
            [
                "GPUs of prefill have not pinned 2.0 of 3.0 GiB of arenas, which they copy at a "
                "fraction of the speed; its log may say why"
            ],
        ),
    ):
        report.pinned(pinned, unpinned)
        clock.advance(SIGN_OF_LIFE_S)
        assert report.tick()
        reading = Reading.take("default")
        assert reading.remarks == remarks
        assert reading.total().unpinned_bytes == unpinned
        told = "1 in namespace default; none has lost a thread"
        assert look(OmniConfig()) == "; ".join([told, *remarks])


def test_the_bar_shows_each_state_that_there_is() -> None:
    assert bar(Usage(1000, 1, 1)).plain == "#=..........\n1+1/1000"
    assert bar(Usage(8, 8, 0)).plain == "############\n8+0/8"
    assert bar(Usage(4, 4, 9)).plain == "############\n4+9/4"  # nonsense keeps its width
    assert bar(Usage()).plain == "no arena"


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_tables_show_engines_failures_and_times(width: int) -> None:
    engines = [engine(engine_id=f"engine-[bold]{number}", written=1000.0) for number in range(3)]
    reading = Reading("default", Path("/x"), 1000.0, engines, ["x.status was skipped: [red]"])
    seen = text(reading, width=width)
    assert all(len(line) <= width for line in seen.splitlines())
    if width == 200:
        assert "engine-[bold]1" in seen  # no markup
        assert "llama@main" in seen
        assert "35/0/0/25/0 %" in seen
        assert "arena_full" in seen
        assert "2.50" in seen  # milliseconds of a save
        assert "[red]" in seen


def test_dead_and_hostile_files_are_no_engines(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runtime_dir("default")
    dead = folder / f"{'d' * 16}.status"
    dead.write_bytes(msgspec.json.encode(ENGINE))
    liar = StatusFile(folder)
    liar.write(b'{"engine_id": 1}')
    make(engine_id="\x1b]0;owned\x07")
    told = asked(capsys)
    assert [each["engine_id"] for each in told["engines"]] == ["?]0;owned?"]
    assert len(told["remarks"]) == 1
    assert not dead.exists()
    assert main(["top", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "was skipped" in shown
    assert "\x1b]0" not in shown
    liar.close()


def test_without_a_terminal_it_prints_once(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make()
    assert main(["top"]) == 0
    assert "prefill" in capsys.readouterr().out


def test_without_rich_only_json_is_left(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert main(["top", "--once"]) == 2
    assert "omni-connector[cli]" in capsys.readouterr().err
    assert asked(capsys)["engines"]


def test_no_folder_is_made_for_a_namespace_that_is_looked_at(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for root in (place, place / "missing"):
        monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(root))
        assert asked(capsys, "--namespace", "misspelt")["engines"] == []
        assert main(["top", "--once", "--namespace", "misspelt"]) == 0
        assert "No engine of namespace misspelt" in " ".join(capsys.readouterr().out.split())
    assert not list(place.iterdir())


def test_an_output_that_takes_nothing_is_an_error_of_one_line(place: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            _command("--json", "--once"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "No space left on device" in ended.stderr


def test_an_unsafe_folder_is_an_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place.chmod(0o755)
    assert main(["top", "--once", "--json"]) == 2
    assert "open to others" in capsys.readouterr().err
    place.chmod(0o700)


@pytest.mark.parametrize("interval", ["0", "nan", "-1", "x", "1e9"])
def test_an_interval_that_makes_no_sense_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["top", "--interval", interval])
    assert end.value.code == 2
    assert "--interval" in capsys.readouterr().err


def _command(*arguments: str) -> list[str]:
    # What runs in the background of a shell inherits that SIGINT is ignored.
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from omni_connector.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return [sys.executable, "-c", script, "top", "--interval", "0.1", *arguments]


def test_json_goes_on_until_it_is_interrupted(make: Make) -> None:
    make()
    with subprocess.Popen(_command("--json"), stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        for _ in range(2):
            assert json.loads(running.stdout.readline())["engines"]
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 0


def test_json_ends_with_its_reader(make: Make) -> None:
    make()
    with subprocess.Popen(
        _command("--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.wait(60) == 0
        assert running.stderr.read() == b""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_terminal_is_left_as_it_was(make: Make, number: signal.Signals, status: int) -> None:
    make()
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        _command(), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as running:
        os.close(theirs)
        seen = b""
        while b"prefill" not in seen:
            seen += os.read(ours, 65536)
        running.send_signal(number)
        try:
            while more := os.read(ours, 65536):
                seen += more
        except OSError:  # how the end of a terminal is read
            pass
        assert running.wait(60) == status
    os.close(ours)
    assert b"\x1b[?1049h" in seen  # a screen of its own
    assert b"\x1b[?1049l" in seen.partition(b"\x1b[?1049h")[2]
    assert b"Traceback" not in seen


def test_eighty_columns_tell_which_engine_is_which() -> None:
    drawn = "1c9e4f0a-3c56-4f9e-9d2b-6f1a0c7d8e9f"
    ours = engine(
        engine_id=drawn, model="/models/of/ours/Llama-3.1-8B-Instruct", host="node-7", pid=4711
    )
    reading = Reading("default", Path("/x"), 1000.0, [ours])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(reading, History(), 80))
    lines = console.export_text().splitlines()
    [where] = [line.split() for line in lines if "4711" in line]
    assert where == ["1c9e4f0a", "kv_producer", "node-7", "4711", "Llama-3.1-8B-Instruct"]
    assert max(map(len, lines)) <= 80
    assert drawn not in "".join(lines)


@pytest.mark.parametrize(
    ("engine_id", "name"),
    [
        ("1c9e4f0a-3c56-4f9e-9d2b-6f1a0c7d8e9f", "1c9e4f0a"),
        ("1c9e4f0a-3c56-4f9e-9d2b-6f1a0c7d8e9f_dp1", "1c9e4f0a_dp1"),
        ("prefill-on-the-third-floor", "prefill-on-the-third-floor"),
        ("", ""),
    ],
)
def test_ids_that_were_drawn_are_cut(engine_id: str, name: str) -> None:
    assert label(engine_id) == name
