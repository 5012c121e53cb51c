# SPDX-License-Identifier: Apache-2.0
"""What engines say of themselves in the runtime folder: whole, theirs alone, gone with them."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from omni_connector.errors import ConfigError
from omni_connector.net import status as module
from omni_connector.net.runtime import LOOPBACK_KEY, runtime_dir
from omni_connector.net.status import (
    MAX_BYTES,
    SIGN_OF_LIFE_S,
    EngineStatus,
    StatusFile,
    StatusReport,
    Usage,
    check_loopback_key,
    plain,
    read,
    sweep,
)
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock

ENGINE = EngineStatus(
    engine_id="one", role="kv_both", model="m", pid=7, started=1.0, counts={"bytes_saved": 0}
)


def encoded(**changes: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(ENGINE), **changes})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def report(place: Path, clock: FakeClock, usage: list[Usage] | None = None) -> StatusReport:
    usage = usage or [Usage()]
    return StatusReport(StatusFile(place), ENGINE, lambda: usage[0], EngineContext(clock))


def test_what_was_counted_is_read(place: Path, clock: FakeClock) -> None:
    told = report(place, clock, [Usage(8, 3, 1, 2, 1)])
    told.add({"counts": {"bytes_saved": 5, "failure:arena_full": 1}, "seconds": {"save": [1, 2]}})
    told.add({"counts": {"bytes_saved": 5, "peer:shm:configured": 1}, "seconds": {"save": [3.5]}})
    told.add({"gauges": {"leases": 9}})
    told.prompt(100, 40)
    told.prompt(10, 12)  # a request that was preempted counts its answer too
    told.tick()
    ((found,), remarks) = read(place)
    assert not remarks
    assert found.counts == {"bytes_saved": 10}
    assert found.failures == {"arena_full": 1}
    assert found.peers == {"shm:configured": 1}
    assert (found.seconds["save"].count, found.seconds["save"].sum) == (3, 6.5)
    assert (found.prompt_tokens, found.cached_tokens) == (110, 50)
    assert found.usage.slots_free == 4
    assert found.engine_id == "one"
    assert found.written > 1.6e9
    told.close()
    assert os.listdir(place) == []


def test_what_is_written_is_no_older_than_it_says(place: Path, clock: FakeClock) -> None:
    read_at: list[float] = []

    def usage() -> Usage:
        read_at.append(time.time())
        return Usage()

    told = StatusReport(StatusFile(place), ENGINE, usage, EngineContext(clock))
    assert told.current().written <= read_at[-1]
    told.tick()
    ((found,), _) = read(place)
    assert found.written <= read_at[-1]
    told.close()


def test_it_writes_what_changes_twice_a_second_and_else_a_sign_of_life(
    place: Path, clock: FakeClock
) -> None:
    told = report(place, clock)
    writes: list[bytes] = []
    told._file.write = writes.append  # type: ignore[method-assign]
    for _ in range(40):  # 20 seconds of nothing
        told.tick()
        clock.advance(0.5)
    assert len(writes) == 4
    assert 20 / len(writes) == SIGN_OF_LIFE_S
    for _ in range(40):
        told.add({"counts": {"bytes_saved": 1}})
        told.tick()
        clock.advance(0.5)
    assert len(writes) == 4 + 40
    told.close()
    clock.advance(60.0)
    told.tick()
    assert len(writes) == 44


def test_a_tick_says_whether_something_has_changed(place: Path, clock: FakeClock) -> None:
    told = report(place, clock)
    said = []
    for count in (1, 0, 0, 1, 0):
        told.add({"counts": {"bytes_saved": count}})
        said.append(told.tick())
        clock.advance(0.5)
    told.add({"counts": {"bytes_saved": 1}})
    said += [told.tick(), told.tick()]  # the second comes too early to look
    assert said == [True, False, False, True, False, True, True]
    told.close()
    assert not told.tick()


def test_a_file_is_replaced_as_a_whole_and_nobody_else_reads_it(place: Path) -> None:
    file = StatusFile(place)
    for size in (5, 500, 1):
        file.write(encoded(engine_id="x" * size))
        ((found,), _) = read(place)
        assert found.engine_id == "x" * size
    (path,) = place.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    descriptors = len(os.listdir("/proc/self/fd"))
    file.write(encoded())
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    file.close()
    file.close()
    assert os.listdir(place) == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors - 1


def test_a_file_that_is_replaced_while_it_is_opened_is_not_that_of_a_dead_engine(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StatusFile(place)
    file.write(encoded(engine_id="older"))
    opened = module.open_own_file
    writes = iter([encoded(engine_id="newer")])

    def overtaken(path: Path) -> int:
        fd = opened(path)
        for text in writes:
            file.write(text)
        return fd

    monkeypatch.setattr(module, "open_own_file", overtaken)
    ((found,), remarks) = read(place)
    assert (found.engine_id, remarks) == ("newer", [])
    file.close()


def test_what_cannot_be_written_is_told_once_and_tried_again(
    place: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = report(place, clock)
    rename = os.rename

    def full(source: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "rename", full)
    with caplog.at_level("WARNING", logger="vllm.omni_connector.status"):
        module.logger.addHandler(caplog.handler)
        for _ in range(4):
            told.tick()
            clock.advance(1.0)
        module.logger.removeHandler(caplog.handler)
    assert sum("disk full" in line for line in caplog.messages) >= 1
    assert len(set(caplog.messages)) == 1
    assert os.listdir(place) == []
    monkeypatch.setattr(os, "rename", rename)
    told.tick()
    assert len(read(place)[0]) == 1
    told.close()


def test_a_killed_engine_is_not_shown_and_its_file_goes(place: Path, clock: FakeClock) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from omni_connector.net.status import StatusFile\n"
        "file = StatusFile(Path(sys.argv[1]))\n"
        "file.write(sys.argv[2].encode())\nprint('up', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(place), encoded().decode()], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"up\n"
        assert [each.engine_id for each in read(place)[0]] == ["one"]
        sweep(place)
        assert len(os.listdir(place)) == 1
        other.send_signal(signal.SIGKILL)
    (dead,) = place.iterdir()
    hidden = place / f".{'0' * 16}.status"  # of one that was killed as it wrote
    hidden.write_bytes(dead.read_bytes()[:10])
    assert read(place) == ([], [])
    assert os.listdir(place) == [hidden.name]  # it could be one that is being written
    dead.write_bytes(encoded())
    told = report(place, clock)
    told.tick()  # engines sweep, too
    assert not dead.exists()
    assert not hidden.exists()
    assert len(os.listdir(place)) == 1
    told.close()


def test_files_that_engines_were_killed_at_hide_no_engine(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 3)
    for number in range(5):
        (place / f".{number:016}.status").touch()
    file = StatusFile(place)
    file.write(encoded())
    assert [each.engine_id for each in read(place)[0]] == ["one"]
    file.close()


def test_a_forked_process_neither_holds_nor_removes_the_file(place: Path) -> None:
    file = StatusFile(place)
    file.write(encoded())
    read_end, write_end = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        file.close()
        os.write(tell, b".")
        os.read(read_end, 1)  # it lives on
        os._exit(0)
    assert os.read(told, 1) == b"."
    for end in (read_end, told, tell):
        os.close(end)
    assert len(read(place)[0]) == 1
    file._let_go()  # as the parent's end does
    assert read(place) == ([], [])
    os.close(write_end)
    assert os.waitpid(child, 0)[1] == 0


HOSTILE = {
    "empty": b"",
    "no JSON": b"\xff\x00{",
    "a list": b"[]",
    "too large": b" " * (MAX_BYTES + 1),
    "nested": b"[" * 100_000,
    "no engine": b"{}",
    "another format": encoded(format=2),
    "a wrong type": encoded(pid="1"),
    "negative": encoded(pid=-1),
    "huge": encoded(pid=1 << 80),
    "endless": encoded(started=0).replace(b'"started":0', b'"started":1e999'),
    "never": encoded(written=1e300),
    "a long name": encoded(engine_id="x" * 1000),
    "many counts": encoded(counts={str(number): number for number in range(2000)}),
    "a count of text": encoded(failures={"x": "y"}),
    "a null": encoded(usage=None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nonsense_is_skipped_with_a_remark(place: Path, name: str) -> None:
    good, bad = StatusFile(place), StatusFile(place)
    good.write(encoded())
    bad.write(HOSTILE[name])
    found, remarks = read(place)
    assert [each.engine_id for each in found] == ["one"]
    assert len(remarks) == 1
    assert remarks[0].isprintable()
    good.close()
    bad.close()


def test_no_damage_stops_the_reader(place: Path) -> None:
    whole = msgspec.json.encode(msgspec.structs.replace(ENGINE, peers={"shm:x": 1}))
    draw = random.Random(7)
    file = StatusFile(place)
    for _ in range(500):
        text = bytearray(whole[: draw.randrange(len(whole)) if draw.random() < 0.2 else None])
        for _ in range(draw.randrange(4) if text else 0):
            text[draw.randrange(len(text))] = draw.randrange(256)
        file.write(bytes(text))
        found, remarks = read(place)
        assert len(found) + len(remarks) == 1
        assert all(each.model.isprintable() for each in found)
    file.close()


def test_what_is_no_file_is_neither_opened_nor_waited_for(place: Path) -> None:
    names = [f"{number:016x}.status" for number in range(4)]
    os.mkfifo(place / names[0])
    (place / names[1]).mkdir()
    (place / "elsewhere").write_bytes(encoded())
    (place / names[2]).symlink_to(place / "elsewhere")
    (place / "other.status").write_bytes(encoded())
    found, remarks = read(place)
    assert not found
    assert len(remarks) == 3
    sweep(place)
    assert len(os.listdir(place)) == 5


def test_texts_are_made_fit_for_a_terminal(place: Path) -> None:
    file = StatusFile(place)
    evil = "a\x1b[2Jb\n\u202e\x9bc"
    file.write(encoded(engine_id=evil, role=evil, model=evil, failures={evil: 1}))
    ((found,), _) = read(place)
    assert found.engine_id == found.role == found.model == "a?[2Jb???c"
    assert list(found.failures) == [found.model]
    file.close()
    assert plain("é 漢 ok") == "é 漢 ok"


def test_an_engine_of_a_strange_name_is_shown(place: Path, clock: FakeClock) -> None:
    engine = msgspec.structs.replace(ENGINE, engine_id="\udc80" + "x" * 2000)
    told = StatusReport(StatusFile(place), engine, Usage, EngineContext(clock))
    told.tick()
    ((found,), _) = read(place)
    assert found.engine_id.startswith("?x")
    told.close()


def test_a_file_that_is_swept_while_it_is_written_is_written_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StatusFile(place)
    flock = module.fcntl.flock
    swept = []

    def late(fd: int, how: int) -> None:
        if not swept:  # a reader looks in before the lock
            swept.extend(place.iterdir())
            for path in place.iterdir():
                path.unlink()
        flock(fd, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    file.write(encoded())
    assert swept
    assert len(read(place)[0]) == 1
    file.close()
    assert os.listdir(place) == []


@pytest.mark.parametrize("namespace", ["default", "another"])
def test_a_key_of_loopback_that_was_removed_is_missed(
    place: Path, monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(place / "run"))
    key = check_loopback_key()  # the first engine makes it
    others, has_key = StatusFile(runtime_dir(namespace)), StatusFile(runtime_dir(namespace))
    others.write(encoded(engine_id="others"))
    assert check_loopback_key() == key
    (place / "run" / LOOPBACK_KEY).unlink()
    new = check_loopback_key()
    assert new != key  # nobody has the former one
    has_key.write(encoded(engine_id="has-key", loopback_key=True))
    assert check_loopback_key() == new
    (place / "run" / LOOPBACK_KEY).unlink()
    with pytest.raises(ConfigError, match=r"was removed while .*\(has-key\).*key_file"):
        check_loopback_key()
    assert not (place / "run" / LOOPBACK_KEY).exists()
    has_key.close()
    assert check_loopback_key() != new
    others.close()
