# SPDX-License-Identifier: Apache-2.0
"""The store of files: what it does beyond `BlockStore`, and what may go wrong with a disk."""

import contextlib
import errno
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.config import FileStoreSettings
from omni_connector.errors import ConfigError
from omni_connector.stores import file_folder, file_store
from omni_connector.stores.file_folder import BlockFolder
from omni_connector.stores.file_store import FileBlockStore, FileCall
from omni_connector.stores.file_sweep import Sweeper
from omni_connector.testing.clock import FakeClock
from tests.patience import wait_until

from .conformance import TIMEOUT_S, BlockStoreConformance, fill, name

__all__ = ["name"]  # a fixture

LONG_AGO_NS = 10**18
MINUTE_NS = 60 * 10**9
KEYS = [f"key{i}" for i in range(8)]
PAGE = 4096
Open = Callable[..., FileBlockStore]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def connect(folder: Path) -> Iterator[Open]:
    opened: list[FileBlockStore] = []

    def connect(**options: Any) -> FileBlockStore:
        opened.append(FileBlockStore(FileStoreSettings(path=str(folder), gib=1), **options))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


class Still:
    """A thread that makes no turns."""

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def wake(self) -> None:
        pass

    def join(self, timeout: float) -> None:
        pass

    def is_alive(self) -> bool:
        return False


@pytest.fixture
def store(connect: Open) -> FileBlockStore:
    """It does not sweep by itself."""
    return connect(start=Still)


class TestFileBlockStore(BlockStoreConformance):
    def another(self, request: pytest.FixtureRequest) -> FileBlockStore:
        connect: Open = request.getfixturevalue("connect")
        return connect()


def put(store: FileBlockStore, keys: list[str] = KEYS, value: int = 1) -> list[bool]:
    rows = store.buffer(len(keys), PAGE)
    rows[:] = value
    return store.put(keys, rows, [PAGE] * len(keys), timeout=TIMEOUT_S)


def get(store: FileBlockStore, keys: list[str] = KEYS, timeout: float = TIMEOUT_S) -> list[bool]:
    return store.get(keys, store.buffer(len(keys), PAGE), [PAGE] * len(keys), timeout=timeout)


def used(store: FileBlockStore, keys: list[str]) -> list[bool]:
    """Look keys up, and wait until their files are told as used, which no look-up waits for."""
    found = store.exists(keys, timeout=TIMEOUT_S)
    wait_until(lambda: is_idle(store))
    return found


def is_idle(store: FileBlockStore) -> bool:
    """Whether none of its threads makes a call."""
    return all(each._threads == each._idle for each in (store._calls, store._beside))


def path_of(folder: Path, key: str) -> Path:
    return Path(BlockFolder(str(folder)).path_of(key))


def names(folder: Path) -> set[str]:
    """All files below the folder."""
    return {each.name for each in folder.rglob("*") if each.is_file()}


def sweep(sweeper: Sweeper) -> None:
    for _ in sweeper.sweep():
        pass


# The folder


@given(st.lists(st.text(), unique=True, max_size=20))
def test_every_key_has_a_file_of_its_own_in_the_folder(keys: list[str]) -> None:
    paths = [BlockFolder("/kv").path_of(key) for key in keys]
    assert len(set(paths)) == len(keys)
    assert all(os.path.normpath(each) == each and each.startswith("/kv/") for each in paths)


@pytest.mark.parametrize("key", ["../../x", "/etc/passwd", "a\0b", "\ud800", "", "x" * 5000])
def test_any_text_is_a_key(store: FileBlockStore, folder: Path, key: str) -> None:
    assert put(store, [key]) == [True]
    assert get(store, [key]) == [True]
    assert path_of(folder, key).is_file()


def test_the_folder_is_private(store: FileBlockStore, folder: Path) -> None:
    put(store, ["a"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert path_of(folder, "a").parent.stat().st_mode & 0o777 == 0o700
    assert path_of(folder, "a").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_can_write_to_is_refused(connect: Open, folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    with pytest.raises(ConfigError, match=r"others can write to .*chmod it to 700"):
        connect()


def test_a_folder_of_another_user_is_refused(
    connect: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    owner = folder.stat().st_uid
    monkeypatch.setattr(file_folder.os, "geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(ConfigError, match=f"belongs to user {owner}"):
            connect()
    else:  # root can write to any folder, so that one of root's is no worse
        connect()


def test_a_parent_that_is_missing_is_named(connect: Open, folder: Path) -> None:
    folder.parent.rmdir()
    with pytest.raises(ConfigError, match=f"mount or make {folder.parent} first"):
        connect()


def test_a_parent_in_which_others_can_rename_the_folder_is_refused(
    connect: Open, folder: Path
) -> None:
    folder.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others can write to the parent folder .*sticky bit"):
        connect()
    assert not folder.exists()
    folder.parent.chmod(0o1777)
    connect()


def test_a_parent_of_another_user_is_refused(
    connect: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        found = real(path, **options)
        if str(path) != str(folder.parent):
            return found
        return os.stat_result((*found[:4], os.geteuid() + 7, *found[5:]))

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(ConfigError, match=f"parent folder .* belongs to user {os.geteuid() + 7}"):
        connect()


def test_a_link_is_followed_to_a_parent_that_is_checked_too(
    connect: Open, folder: Path, tmp_path: Path
) -> None:
    (open_to_all := tmp_path / "open").mkdir()
    (open_to_all / "kv").mkdir(mode=0o700)
    open_to_all.chmod(0o777)
    folder.symlink_to(open_to_all / "kv")
    with pytest.raises(ConfigError, match=f"others can write to the parent folder {open_to_all}"):
        connect()


@pytest.mark.parametrize("what", ["pipe", "link", "link to a pipe", "socket", "folder"])
def test_what_is_no_file_is_no_block_and_holds_nobody_up(
    store: FileBlockStore, folder: Path, tmp_path: Path, what: str
) -> None:
    assert all(put(store))
    bad = path_of(folder, KEYS[3])
    if what == "link":
        bad.rename(tmp_path / "elsewhere")
        bad.symlink_to(tmp_path / "elsewhere")
    else:
        bad.unlink()
    if what == "pipe":
        os.mkfifo(bad)
    elif what == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        bad.symlink_to(tmp_path / "pipe")
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(bad.parent):
            bound.bind(bad.name)
    elif what == "folder":
        bad.mkdir()
    others = [key != KEYS[3] for key in KEYS]
    assert store.exists(KEYS, timeout=TIMEOUT_S) == others
    assert get(store) == others
    assert store.failures == {"missing": 1}
    if what != "folder":
        assert all(put(store))
        assert all(get(store))


def test_what_is_no_folder_is_refused(connect: Open, folder: Path) -> None:
    folder.touch(0o600)
    with pytest.raises(ConfigError, match="is no folder"):
        connect()


def test_a_folder_that_was_removed_is_made_again(store: FileBlockStore, folder: Path) -> None:
    assert all(put(store))
    subprocess.run(["rm", "-r", str(folder)], check=True)
    assert not any(get(store))
    assert not any(put(store))
    store._puts.worked()
    assert all(put(store))


# Restarts, and what is left of writers


_WRITER = """
import os, sys
from omni_connector.config import FileStoreSettings
from omni_connector.stores.file_store import FileBlockStore, FileCall
store = FileBlockStore(FileStoreSettings(path=sys.argv[1], gib=1))
rows = store.buffer(16, 100_000)
print("ready", flush=True)
if sys.argv[2] == "dies":
    os.rename = lambda *paths: os._exit(9)
for number in range(8):
    keys = [f"shared/{number}/{i}" for i in range(16)]
    for i, key in enumerate(keys):
        rows[i] = (number * 16 + i) % 256
    assert all(store.put(keys, rows, [100_000] * 16, timeout=60))
    assert all(store.get(keys, rows, [100_000] * 16, timeout=60))
    assert all((rows[i] == (number * 16 + i) % 256).all() for i in range(16))
store.close()
"""


def writer(folder: Path, how: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _WRITER, str(folder), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_put_the_same_blocks_beside_a_sweeper(folder: Path) -> None:
    writers = [writer(folder), writer(folder)]
    for each in writers:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    sweeper = Sweeper(BlockFolder(str(folder)), 1 << 30)
    while any(each.poll() is None for each in writers):
        sweeper.add(1 << 30)  # so that it scans
        sweep(sweeper)
        time.sleep(0.05)
    assert [each.communicate()[1] or each.returncode for each in writers] == [0, 0]
    assert sum(each.endswith(".kv") for each in names(folder)) == 128
    assert not [each for each in names(folder) if each.endswith(".new")]


def test_what_a_killed_writer_leaves_is_no_block_and_is_swept_later(
    connect: Open, folder: Path
) -> None:
    killed = writer(folder, "dies")
    killed.communicate(timeout=60)
    assert killed.returncode == 9
    (left,) = folder.rglob("*.new")
    store = connect()
    assert not any(store.exists([f"shared/0/{i}" for i in range(16)], timeout=TIMEOUT_S))
    sweep(Sweeper(BlockFolder(str(folder)), 1 << 30))
    assert left.exists()  # its writer might be slow
    os.utime(left, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.utime(folder / ".sweep", ns=(LONG_AGO_NS, LONG_AGO_NS))
    sweep(Sweeper(BlockFolder(str(folder)), 1 << 30))
    assert not left.exists()


# Disks that fail


@pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE + 1])
def test_a_torn_file_is_a_miss_and_goes(store: FileBlockStore, folder: Path, length: int) -> None:
    assert all(put(store))
    os.truncate(path_of(folder, KEYS[3]), length)
    assert get(store) == [key != KEYS[3] for key in KEYS]
    assert store.failures == {"other length": 1}
    assert not path_of(folder, KEYS[3]).exists()
    assert all(put(store))
    assert all(get(store))


def test_a_torn_file_is_replaced_by_who_puts_it(store: FileBlockStore, folder: Path) -> None:
    assert all(put(store))
    os.truncate(path_of(folder, KEYS[3]), 7)
    assert all(put(store))
    assert all(get(store))


class Disk:
    """Stands in for a call of the system, and fails it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.code = 0
        self.asked = 0
        self._real = getattr(os, call)
        monkeypatch.setattr(os, call, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if str(args[0]).isdigit() or "/kv/" in str(args[0]):
            self.asked += 1
            if self.code:
                raise OSError(self.code, os.strerror(self.code))
        return self._real(*args, **options)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "rename"])
def test_a_disk_that_takes_nothing_is_left_alone_for_a_while(
    connect: Open,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
    call: str,
) -> None:
    caplog.set_level(logging.INFO, "vllm.omni_connector.store")
    clock = FakeClock()
    store = connect(clock=clock)
    assert all(put(store, ["before"]))
    disk = Disk(monkeypatch, call)
    disk.code = code
    kind = errno.errorcode[code]
    assert put(store) == [False] * 8
    assert store.failures == {kind: 8}
    asked = disk.asked
    assert put(store) == [False] * 8
    assert store.failures == {kind: 8, "backed off": 8}
    assert disk.asked == asked == 1
    assert get(store, ["before"]) == [True]  # reading is another matter
    clock.advance(1.1)
    assert put(store) == [False] * 8
    clock.advance(1.1)
    assert put(store) == [False] * 8  # the pause grows
    assert store.failures == {kind: 16, "backed off": 16}
    assert not [each for each in names(folder) if each.endswith(".new")]
    disk.code = 0
    clock.advance(60)
    assert all(put(store))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert os.strerror(code) in messages[0]
    assert "works again" in messages[1]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["stat", "open", "preadv"])
def test_a_file_that_fails_costs_its_block_and_no_other(
    store: FileBlockStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    assert all(put(store))
    bad = str(path_of(folder, KEYS[3]))
    real = getattr(os, call)

    def fails(which: Any, *args: Any, **options: Any) -> Any:
        name = os.readlink(f"/proc/self/fd/{which}") if isinstance(which, int) else str(which)
        if name == bad:
            raise OSError(code, os.strerror(code), bad)
        return real(which, *args, **options)

    monkeypatch.setattr(os, call, fails)
    others = [key != KEYS[3] for key in KEYS]
    if call == "stat":
        assert store.exists(KEYS, timeout=TIMEOUT_S) == others
        assert store.exists(KEYS[3:], timeout=TIMEOUT_S) == others[3:]
    else:
        assert get(store, KEYS[3:4]) == [False]
        assert get(store) == others
    assert store.failures[errno.errorcode[code]] >= 1
    assert "backed off" not in store.failures
    assert [each for each in caplog.messages if bad in each]
    assert os.path.lexists(bad) == (call == "stat" or code == errno.EACCES)
    if code == errno.EIO:
        assert all(put(store)), "it is written again"


def test_what_this_user_may_not_read_is_no_block_and_is_written_again(
    store: FileBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(put(store))
    path_of(folder, KEYS[3]).chmod(0o644)
    before = [path_of(folder, key).stat().st_ino for key in KEYS]
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    open_to_all = [key == KEYS[3] for key in KEYS]
    assert store.exists(KEYS, timeout=TIMEOUT_S) == open_to_all
    assert all(put(store))
    after = [path_of(folder, key).stat().st_ino for key in KEYS]
    assert [a == b for a, b in zip(before, after, strict=True)] == open_to_all


@pytest.mark.parametrize("call", ["stat", "open", "fstat", "preadv"])
def test_a_file_that_another_host_has_removed_is_missing_and_the_others_are_not(
    store: FileBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    assert all(put(store))
    stale = str(path_of(folder, KEYS[1]))
    real, handles = getattr(os, call), set[int]()
    opens = os.open

    def open_(path: Any, *args: Any, **options: Any) -> int:
        fd = opens(path, *args, **options)
        (handles.add if path == stale else handles.discard)(fd)
        return fd

    def fails(which: Any, *args: Any, **options: Any) -> Any:
        if which == stale or which in handles:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(which, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, call, fails)
    others = [each != KEYS[1] for each in KEYS]
    for _ in range(2):
        if call == "stat":
            assert store.exists(KEYS, timeout=TIMEOUT_S) == others
            assert all(put(store)), "it is written again"
        else:
            assert get(store, KEYS) == others
    assert set(store.failures) <= {"missing"}


class Hang:
    """Makes a call of the system hang until told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.go_on = threading.Event()
        self.hanging = 0
        real = getattr(os, call)

        def hang(*args: Any, **options: Any) -> Any:
            if "files" in threading.current_thread().name:
                self.hanging += 1
                self.go_on.wait(60)
            return real(*args, **options)

        monkeypatch.setattr(os, call, hang)


@pytest.mark.parametrize("call", ["open", "fstat", "preadv", "close"])
def test_a_hanging_read_ends_at_its_timeout_and_changes_no_row_later(
    connect: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = connect(start=Still, clock=FakeClock())
    assert all(put(store))
    rows = store.buffer(8, PAGE)
    if call == "preadv":  # as a file that is not in the page cache
        monkeypatch.setattr(file_store, "_from_page_cache", lambda *args: None)
    hang = Hang(monkeypatch, call)
    began = time.monotonic()
    assert store.get(KEYS, rows, [PAGE] * 8, timeout=0.3) == [False] * 8
    assert time.monotonic() - began >= 0.3
    assert store.failures == {"timeout": 8}
    if call != "close":
        assert not rows.any()
    rows[:] = 7
    hang.go_on.set()
    assert not any(get(store))  # left alone for a while
    store.close()
    for thread in threading.enumerate():
        if thread.name == "omni-store-files":
            thread.join(TIMEOUT_S)
    assert (rows == 7).all()


def test_a_put_that_hangs_stores_nothing_later(
    store: FileBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = store.buffer(1, PAGE)
    hang = Hang(monkeypatch, "write")
    assert store.put(["a"], rows, [PAGE], timeout=0.2) == [False]
    rows[:] = 7
    hang.go_on.set()
    wait_until(lambda: not [each for each in names(folder) if each.endswith(".new")])
    assert store.exists(["a"], timeout=TIMEOUT_S) == [False]


def test_no_more_threads_hang_than_a_few(
    connect: Open, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    store = connect(clock=clock)
    hang = Hang(monkeypatch, "stat")
    for _ in range(20):
        assert store.exists(["a"], timeout=0.1) == [False]
        clock.advance(100)
    wait_until(lambda: hang.hanging == 16)
    assert store.failures == {"timeout": 16, "busy": 4}
    hang.go_on.set()


def test_a_file_system_that_hangs_at_the_start_does_not_hold_up_the_engine(
    connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "_OPEN_S", 0.1)
    hang = Hang(monkeypatch, "mkdir")
    store = connect()
    assert store.exists(KEYS, timeout=0.2) == [False] * 8
    hang.go_on.set()
    store._lookups.worked()
    assert all(put(store))


def time_ends(monkeypatch: pytest.MonkeyPatch, *, answers: int) -> None:
    """From now on the time of a call is over when it has so many answers."""

    def awaits(self: FileBlockStore, call: FileCall, seconds: float) -> bool:
        if seconds > file_store._ALONE_S:
            wait_until(lambda: call.answered >= answers)
        return False

    monkeypatch.setattr(FileBlockStore, "_await", awaits)


def watched(monkeypatch: pytest.MonkeyPatch, look: Callable[[int], object]) -> list[str]:
    """Have each look at a file call `look` with its number; the paths that are looked at."""
    real, looks, lock = os.stat, list[str](), threading.Lock()

    def stat(path: Any, **options: Any) -> os.stat_result:
        if "/kv/" in str(path):
            with lock:
                looks.append(str(path))
                number = len(looks)
            look(number)
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    return looks


def test_many_slow_looks_are_side_by_side(
    store: FileBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"{i}" for i in range(256)]
    assert all(put(store, keys[::2]))
    together = threading.Barrier(8, timeout=TIMEOUT_S)
    looks = watched(monkeypatch, lambda number: number <= 8 and together.wait())
    assert store.exists(keys, timeout=TIMEOUT_S) == [True, False] * 128
    assert len(looks) == 256


def test_of_looks_that_take_too_long_the_first_count(
    store: FileBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"{i}" for i in range(256)]
    assert all(put(store, keys))
    go_on = threading.Event()
    looks = watched(monkeypatch, lambda number: number <= 100 or go_on.wait(TIMEOUT_S))
    time_ends(monkeypatch, answers=100)
    found = store.exists(keys, timeout=TIMEOUT_S)
    assert sum(found) == 100
    assert all(found[:92])  # those asked at once end in any order
    assert store.failures == {"timeout": 156}
    go_on.set()
    wait_until(lambda: is_idle(store))
    assert len(looks) <= 108, "who has given up asks no more"
    monkeypatch.undo()
    assert all(store.exists(keys, timeout=TIMEOUT_S)), "slow is not dead"


def test_no_look_waits_for_the_times_of_files(
    store: FileBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(put(store))
    for key in KEYS:
        age(folder, key, 10)
    real, go_on = os.utime, threading.Event()

    def utime(path: Any, **options: Any) -> None:
        go_on.wait(2 * TIMEOUT_S)
        real(path, **options)

    monkeypatch.setattr(os, "utime", utime)
    assert all(store.exists(KEYS, timeout=TIMEOUT_S))
    go_on.set()
    assert all(used(store, KEYS))
    assert all(path_of(folder, key).stat().st_mtime > time.time() - 300 for key in KEYS)


def test_a_file_that_is_not_in_the_page_cache_is_read(
    store: FileBlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, back = store.buffer(2, (3 << 20) + 5), store.buffer(2, (3 << 20) + 5)
    fill(rows)
    lengths = [rows.shape[1]] * 2
    assert all(store.put(KEYS[:2], rows, lengths, timeout=TIMEOUT_S))
    real, turns = file_store._from_page_cache, itertools.count()

    def now_and_then(fd: int, row: Any, at: int) -> int | None:
        return None if next(turns) % 2 else real(fd, row[:1000], at)

    monkeypatch.setattr(file_store, "_from_page_cache", now_and_then)
    assert all(store.get(KEYS[:2], back, lengths, timeout=TIMEOUT_S))
    assert np.array_equal(rows, back)
    assert next(turns) > 4


# Sweeping


def age(folder: Path, key: str, minutes: float) -> None:
    when = time.time_ns() - int(minutes * MINUTE_NS)
    os.utime(path_of(folder, key), ns=(when, when))


def test_what_was_asked_for_longest_ago_is_swept(store: FileBlockStore, folder: Path) -> None:
    assert all(put(store))
    for i, key in enumerate(KEYS):
        age(folder, key, 10 + i)
    assert used(store, KEYS[-1:]) == [True]
    sweep(Sweeper(BlockFolder(str(folder)), 5 * PAGE))
    left = [key for key in KEYS if path_of(folder, key).exists()]
    assert left == [*KEYS[:3], KEYS[-1]]  # at most 0.9 of five pages


def test_of_a_prompt_the_end_goes_first(store: FileBlockStore, folder: Path) -> None:
    assert all(put(store))
    for i, key in enumerate(KEYS):
        age(folder, key, 10 - i)
    assert all(used(store, KEYS))
    sweep(Sweeper(BlockFolder(str(folder)), 5 * PAGE))
    assert [key for key in KEYS if path_of(folder, key).exists()] == KEYS[:4]


def test_a_file_is_touched_once_a_minute(store: FileBlockStore, folder: Path) -> None:
    assert all(put(store))
    age(folder, KEYS[0], 0.5)
    before = path_of(folder, KEYS[0]).stat().st_mtime_ns
    used(store, KEYS[:1])
    assert path_of(folder, KEYS[0]).stat().st_mtime_ns == before
    age(folder, KEYS[0], 2)
    used(store, KEYS[:1])
    assert path_of(folder, KEYS[0]).stat().st_mtime_ns > before


@given(
    ages=st.lists(st.integers(0, 5), max_size=12),
    limit=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 3), min_size=12, max_size=12),
)
def test_a_sweep_keeps_to_the_size_and_takes_the_oldest(
    tmp_path_factory: pytest.TempPathFactory, ages: list[int], limit: int, sizes: list[int]
) -> None:
    folder = BlockFolder(str(tmp_path_factory.mktemp("kv")))
    for i, each in enumerate(ages):
        path = folder.path_of(str(i))
        assert folder.write(path, memoryview(bytes(sizes[i] * PAGE)), lambda: True)
        when = LONG_AGO_NS - each
        os.utime(path, ns=(when, when))
    total = sum(sizes[: len(ages)])
    sweep(Sweeper(folder, limit * PAGE))
    left = [i for i in range(len(ages)) if os.path.exists(folder.path_of(str(i)))]
    kept = sum(sizes[i] for i in left)
    if total <= 0.95 * limit:
        assert kept == total
    else:
        assert kept <= 0.9 * limit
        assert kept > 0.9 * limit - 3 or kept == 0
    gone = set(range(len(ages))) - set(left)
    assert not gone or not left or min(ages[i] for i in gone) >= max(ages[i] for i in left)


def test_one_sweeps_at_a_time_and_the_others_hear_of_it(
    store: FileBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(put(store))
    clock = FakeClock()
    one, other = (Sweeper(BlockFolder(str(folder)), 1 << 30, clock) for _ in range(2))
    pieces = one.sweep()
    next(pieces)
    sweep(other)
    assert other._total is None
    assert other.due() == pytest.approx(10)
    for _ in pieces:
        pass
    monkeypatch.setattr(BlockFolder, "files", None)  # the other reads what the first has found
    sweep(other)
    assert one._total == other._total == 8 * PAGE
    assert other.due() > 100
    other.add(1 << 29)
    assert other.due() < 10
    monkeypatch.undo()
    smaller = Sweeper(BlockFolder(str(folder)), 5 * PAGE, clock)  # to which that is too much
    sweep(smaller)
    assert smaller._total == 4 * PAGE


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_swept(
    store: FileBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)
    assert all(put(store))
    for i, key in enumerate(KEYS):
        age(folder, key, 10 + i)
    one, other = (Sweeper(BlockFolder(str(folder)), 5 * PAGE) for _ in range(2))
    for _ in itertools.zip_longest(one.sweep(), other.sweep()):
        pass
    assert sum(path_of(folder, key).exists() for key in KEYS) == 4


def test_a_store_that_is_closed_in_a_sweep_leaves_no_lock(connect: Open, folder: Path) -> None:
    turns: list[Callable[[], float | None]] = []

    class Driven(Still):
        def __init__(self, name: str, turn: Callable[[], float | None], **options: object) -> None:
            turns.append(turn)

    store = connect(start=Driven)
    assert all(put(store))
    (turn,) = turns
    assert turn() is not None
    other = Sweeper(BlockFolder(str(folder)), 5 * PAGE)
    sweep(other)
    assert other._total is None
    store.close()
    assert turn() is None
    other = Sweeper(BlockFolder(str(folder)), 5 * PAGE)
    sweep(other)
    assert other._total == 4 * PAGE


def test_files_of_others_stay(store: FileBlockStore, folder: Path) -> None:
    assert all(put(store))
    part = path_of(folder, KEYS[0]).parent
    for place in (folder / "mine.kv", part / "notes.txt", part / "x.new"):
        place.write_text("mine")
        os.utime(place, ns=(LONG_AGO_NS, LONG_AGO_NS))
    sweep(Sweeper(BlockFolder(str(folder)), 1))
    assert {"mine.kv", "notes.txt", "x.new"} <= names(folder)
    assert not any(each.endswith(".kv") for each in names(folder) - {"mine.kv"})


def test_without_a_size_it_is_a_tenth_of_what_would_be_free(
    store: FileBlockStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(put(store))
    monkeypatch.setattr(BlockFolder, "free_bytes", lambda self: 42 * PAGE)
    sweep(Sweeper(BlockFolder(str(folder)), None))
    assert sum(path_of(folder, key).exists() for key in KEYS) == 4


@pytest.mark.parametrize(
    ("free", "limit", "left"),
    [(0, 1 << 40, 7), (1 << 40, 1 << 39, 8)],
    ids=["full disk", "quota used up"],
)
def test_where_there_is_no_room_old_blocks_make_some(
    store: FileBlockStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    limit: int,
    left: int,
) -> None:
    assert all(put(store))
    monkeypatch.setattr(BlockFolder, "free_bytes", lambda self: free)
    sweeper = Sweeper(BlockFolder(str(folder)), limit)
    sweep(sweeper)
    assert sum(path_of(folder, key).exists() for key in KEYS) == left
    sweeper.no_room()
    sweep(sweeper)
    assert sum(path_of(folder, key).exists() for key in KEYS) == left - 1


def test_who_puts_blocks_sweeps(connect: Open, folder: Path) -> None:
    settings = FileStoreSettings(path=str(folder), gib=64 * PAGE / (1 << 30))
    clock = FakeClock()
    store = FileBlockStore(settings, clock=clock)
    for number in range(20):
        assert all(put(store, [f"{number}/{i}" for i in range(8)]))

    def swept() -> bool:
        assert store._sweeping is not None
        clock.advance(1.0)  # a sweep that is held up rests for four times as long
        store._sweeping.wake()
        return sum(each.endswith(".kv") for each in names(folder)) <= 61

    wait_until(swept)
    sweeping = store._sweeping
    store.close()
    assert sweeping is not None
    assert not sweeping.is_alive()
