# SPDX-License-Identifier: Apache-2.0
"""The memory of an arena is there before it is used, and nobody suffers from it."""

import contextlib
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_connector.arena import arena as arena_module
from omni_connector.arena import populate
from omni_connector.arena import prefault as module
from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.prefault import Prefaulter, ReaderPrefaulter
from omni_connector.runtime.turns import COPIES
from tests.patience import wait_until

MIB = 1 << 20
SIZE = 9 * MIB + 4096
WINDOW = 4 * MIB


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Once vLLM is imported, its logger passes nothing on."""
    monkeypatch.setattr(module.logger, "propagate", False)
    level = module.logger.level
    module.logger.setLevel(logging.INFO)  # not the attribute: what is heard is also remembered
    module.logger.addHandler(caplog.handler)
    yield
    module.logger.removeHandler(caplog.handler)
    module.logger.setLevel(level)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE", False)  # other tests may keep all cores busy
    monkeypatch.setattr(module, "_WINDOW", WINDOW)
    monkeypatch.setattr(module, "_LARGE", 0)


class Memory:
    """A memfd and its owner's mapping."""

    def __init__(self, size: int = SIZE) -> None:
        self.fd = os.memfd_create("omni-connector-test")
        os.ftruncate(self.fd, size)
        self.mapped = mmap.mmap(self.fd, size)

    @property
    def allocated(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def memory() -> Iterator[Memory]:
    there = Memory()
    yield there
    os.close(there.fd)


def resident(mapped: mmap.mmap) -> int:
    """Bytes of a mapping whose pages this process has mapped."""
    with memoryview(mapped) as view:
        start = f"{module.np.frombuffer(view, module.np.uint8).ctypes.data:x}-"
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef":
            inside = line.startswith(start)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("there is no such mapping")


def finished(prefaulter: Prefaulter | ReaderPrefaulter) -> bool:
    return not prefaulter._thread.is_alive()


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Arenas and indexes that are mapped here; other tests' may be, until they are collected."""
    return Path("/proc/self/maps").read_text().count("omni-connector")


def test_all_of_it_is_allocated_and_mapped(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_fds()
    memory.mapped[5 * MIB] = 9
    prefaulter = Prefaulter(memory.fd, memory.mapped)
    wait_until(lambda: finished(prefaulter))
    assert memory.allocated >= SIZE
    assert resident(memory.mapped) >= SIZE
    assert memory.mapped[5 * MIB] == 9
    assert memory.mapped[6 * MIB] == 0
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "The arena's memory is allocated" in caplog.text
    prefaulter.stop()
    prefaulter.stop()
    assert open_fds() <= before
    memory.mapped.close()


def test_a_small_arena_needs_no_process(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE", SIZE + 1)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with COPIES:
        prefaulter = Prefaulter(memory.fd, memory.mapped)
        assert memory.allocated == 0
    wait_until(lambda: finished(prefaulter))
    assert memory.allocated >= SIZE
    prefaulter.stop()


def test_a_kernel_without_population_gets_the_memory_too(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = Path(populate.__file__).read_text().replace("POPULATE_READ = 22", "POPULATE_READ = 9999")
    (tmp_path / "old.py").write_text(old)
    monkeypatch.setattr(populate, "__file__", str(tmp_path / "old.py"))
    monkeypatch.setattr(module, "MADV_POPULATE_WRITE", 9999)
    prefaulter = Prefaulter(memory.fd, memory.mapped)
    wait_until(lambda: finished(prefaulter))
    assert memory.allocated >= SIZE
    prefaulter.stop()


def test_nothing_is_allocated_while_a_copy_runs_and_then_near_to_its_cores(memory: Memory) -> None:
    core = min(os.sched_getaffinity(0))
    with COPIES:
        prefaulter = Prefaulter(memory.fd, memory.mapped, cores=[core])
        wait_until(lambda: prefaulter._process is not None)
        process = prefaulter._process
        assert process is not None
        maps = Path(f"/proc/{process.pid}/maps")
        wait_until(lambda: "omni-connector-copies" in maps.read_text())
        wait_until(lambda: "omni-connector-test" in maps.read_text())
        assert os.sched_getaffinity(process.pid) == {core}
        assert memory.allocated == 0
        assert not finished(prefaulter)
        assert COPIES.running
    assert not COPIES.running
    wait_until(lambda: finished(prefaulter))
    assert memory.allocated >= SIZE
    prefaulter.stop()


def test_a_slot_that_is_used_before_its_turn_is_there_at_once() -> None:
    with COPIES, Arena.create(64, MIB, prefault=True) as arena:
        arena.begin_write(40, 1)
        there = os.fstat(arena.fd).st_blocks * 512
        assert MIB <= there <= 5 * MIB
        arena.begin_write(40, 2)
        assert os.fstat(arena.fd).st_blocks * 512 == there


def test_memory_that_others_need_is_left_to_them(
    memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    left = iter([module.spared_bytes() + 100 * MIB, module.spared_bytes() + 100 * MIB, 1 << 20])
    told: list[int] = []
    prefaulter = Prefaulter(
        memory.fd, memory.mapped, available=lambda: next(left), populated=told.append
    )
    wait_until(lambda: finished(prefaulter))
    assert told == [WINDOW, 2 * WINDOW]
    assert 2 * WINDOW <= memory.allocated < SIZE
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Stopped allocating" in record.message
    prefaulter.touch(SIZE - 4096, SIZE)
    assert memory.allocated >= SIZE
    prefaulter.stop()


def test_a_process_that_does_not_start_or_ends_is_said_once(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    prefaulter = Prefaulter(memory.fd, memory.mapped)
    wait_until(lambda: finished(prefaulter))
    prefaulter.stop()
    monkeypatch.setattr(sys, "executable", "/bin/true")
    prefaulter = Prefaulter(memory.fd, memory.mapped)
    wait_until(lambda: finished(prefaulter))
    prefaulter.stop()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all("first hand-offs take longer" in record.message for record in caplog.records)
    assert memory.allocated == 0


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05])
def test_closing_meanwhile_leaves_nothing(delay: float, caplog: pytest.LogCaptureFixture) -> None:
    before, mapped = open_fds(), mappings()
    arena = Arena.create(512, MIB, prefault=True)
    time.sleep(delay)
    process = arena._prefaulter and arena._prefaulter._process
    arena.close()
    assert process is None or process.returncode is not None
    assert open_fds() <= before
    assert mappings() <= mapped
    assert not [record for record in caplog.records if record.levelname != "INFO"]


def test_the_process_ends_with_the_one_that_started_it() -> None:
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\n"
            "from omni_connector.arena import prefault\n"
            "from omni_connector.arena.arena import Arena\n"
            "from omni_connector.runtime.turns import COPIES\n"
            "prefault._IDLE = False\n"
            "with COPIES:\n"
            "    arena = Arena.create(64, 1 << 20, prefault=True)\n"
            "    while arena._prefaulter._process is None: time.sleep(0.001)\n"
            "    print(arena._prefaulter._process.pid, flush=True)\n"
            "    time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_until(gone)


def test_the_process_ends_though_another_one_holds_its_input_open(memory: Memory) -> None:
    zero = os.open("/dev/zero", os.O_RDONLY)
    numbers = (os.getppid(), memory.fd, zero, SIZE, SIZE, 0, *os.sched_getaffinity(0))
    orphan = subprocess.Popen(
        [sys.executable, "-I", "-S", populate.__file__, *map(str, numbers)],
        stdin=subprocess.PIPE,
        pass_fds=(memory.fd, zero),
    )
    os.close(zero)
    assert orphan.wait(60) == 0
    assert orphan.stdin is not None
    orphan.stdin.close()


def reader_of(memory: Memory) -> mmap.mmap:
    return mmap.mmap(memory.fd, SIZE, prot=mmap.PROT_READ)


def test_a_reader_maps_what_is_there_and_allocates_nothing(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 0.005)
    monkeypatch.setattr(module, "_WAITS", 1 << 30)
    before = open_fds()
    memory.mapped[: 5 * MIB] = bytes(5 * MIB)
    mapped = reader_of(memory)
    prefaulter = ReaderPrefaulter(memory.fd, mapped)
    wait_until(lambda: resident(mapped) >= 4 * MIB)
    assert memory.allocated == 5 * MIB
    assert not finished(prefaulter)
    memory.mapped[:] = bytes(SIZE)
    wait_until(lambda: finished(prefaulter))
    assert resident(mapped) >= SIZE
    prefaulter.stop()
    mapped.close()
    assert len(open_fds()) <= len(before)


def test_a_reader_maps_nothing_while_a_copy_runs(memory: Memory) -> None:
    memory.mapped[:] = bytes(SIZE)
    mapped = reader_of(memory)
    with COPIES:
        prefaulter = ReaderPrefaulter(memory.fd, mapped)
        time.sleep(0.2)
        assert resident(mapped) == 0
        assert not finished(prefaulter)
    wait_until(lambda: finished(prefaulter))
    assert resident(mapped) >= SIZE
    prefaulter.stop()
    mapped.close()


def test_a_reader_gives_up_where_nothing_comes(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 0.001)
    prefaulter = ReaderPrefaulter(memory.fd, mapped := reader_of(memory))
    wait_until(lambda: finished(prefaulter))
    assert memory.allocated == 0
    prefaulter.stop()
    mapped.close()


def test_an_arena_is_mapped_in_advance_once_it_is_read() -> None:
    before, threads = open_fds(), threading.active_count()
    with Arena.create(64, MIB) as arena:
        for reads in (False, True):
            with ArenaView.open(
                arena.fd, epoch=arena.epoch, n_slots=64, slot_bytes=MIB, prefault=True
            ) as view:
                assert view._prefaulter is None
                if reads:
                    assert not view.slots[3].any()
                    assert view._prefaulter is not None
    assert open_fds() <= before
    assert threading.active_count() <= threads


class Device:
    """Notes what it is told of a peer's arena; see `Pins`."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self._slots: NDArray[np.uint8] | None = None

    def follow(self, slots: NDArray[np.uint8]) -> "Device":
        assert not slots.flags.writeable
        self._slots = slots
        return self

    def populated(self, end: int) -> None:
        assert self._slots is not None
        self.ends.append(end)

    def close(self) -> None:
        slots, self._slots = self._slots, None
        assert slots is not None
        assert slots.any()  # still mapped

    @property
    def follows(self) -> bool:
        return self._slots is not None


@contextlib.contextmanager
def half_allocated() -> Iterator[tuple[Arena, ArenaView]]:
    """An arena of 64 slots of 1 MiB, of which 32 have memory, and a view of it."""
    with (
        # With huge pages, memory would be there beyond what is written.
        mock.patch.object(arena_module.mmap, "MADV_HUGEPAGE", mmap.MADV_NOHUGEPAGE),
        Arena.create(64, MIB) as arena,
    ):
        arena.begin_write(0, 1)  # the headers have memory, too
        arena.slots[:32] = 1
        with ArenaView.open(
            arena.fd, epoch=arena.epoch, n_slots=64, slot_bytes=MIB, prefault=True
        ) as view:
            yield arena, view


def test_what_is_allocated_of_a_peer_s_arena_is_told_to_who_pins_it_until_it_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WINDOW", 4 * MIB)
    device = Device()
    before = mappings()
    with half_allocated() as (arena, view):
        view.pin_with(device)
        assert device.follows
        assert not device.ends  # nobody reads it
        assert view.slots[0].any()
        wait_until(lambda: device.ends and device.ends[-1] == 31)  # the last may end in no step
        assert device.ends == sorted(set(device.ends))
        assert len(device.ends) == 8
        assert os.fstat(arena.fd).st_blocks * 512 < 33 * MIB  # the owner has no more memory
    assert not device.follows
    view.mapped_until(64 * MIB)
    assert device.ends[-1] == 31
    assert mappings() <= before


def test_what_is_allocated_after_a_long_pause_is_told_once_slots_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 0.001)
    device = Device()
    before, mapped = open_fds(), mappings()
    with half_allocated() as (arena, view):
        view.pin_with(device)
        assert view.slots[0].any()
        first = view._prefaulter
        wait_until(lambda: first is not None and first.gave_up)
        assert device.ends[-1] == 31
        arena.slots[32:] = 1
        assert view._prefaulter is first  # nobody reads it
        assert view.slots[0].any()
        assert view._prefaulter is not first
        wait_until(lambda: device.ends[-1] == 64)
        assert device.ends == sorted(set(device.ends))
    assert not device.follows
    assert open_fds() <= before
    assert mappings() <= mapped


@pytest.mark.parametrize("broken", ["os.dup", "threading.Thread.start"])
def test_a_view_that_cannot_be_mapped_in_advance_is_read_nevertheless(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*arguments: object) -> NoReturn:
        raise (OSError if broken == "os.dup" else RuntimeError)("no more")

    before = len(os.listdir("/proc/self/fd"))
    with Arena.create(1, 4096) as arena:
        with monkeypatch.context() as patch:
            patch.setattr(broken, no_more)
            view = ArenaView.open(
                arena.fd, epoch=arena.epoch, n_slots=1, slot_bytes=4096, prefault=True
            )
            assert not view.slots.any()
        arena.begin_write(0, 1)
        arena.publish(0, 1, b"key", 0, 0)
        assert view.verify(0, 1).key == b"key"
        view.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("large", [0, 1 << 40])
def test_the_end_of_the_whole_slots_that_are_populated_is_told_and_no_other_is(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device pins what is told: pinned memory is allocated."""
    monkeypatch.setattr(module, "_LARGE", large)
    told: list[int] = []
    allocated: list[bool] = []

    def populated(slots: NDArray[np.uint8], end: int) -> None:
        assert slots.ctypes.data == arena.slots.ctypes.data
        told.append(end)
        there = os.fstat(arena.fd).st_blocks * 512
        allocated.append(there >= end * slots.shape[1])

    with COPIES:  # so that the arena is known before anything is told
        arena = Arena.create(9, MIB, prefault=True, populated=populated)
    with arena:
        wait_until(lambda: told and told[-1] == 9)
        assert told == sorted(set(told))
        assert all(allocated)
        assert (len(told) > 1) == (not large)
