# SPDX-License-Identifier: Apache-2.0
import fcntl
import os
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest

from omni_connector.errors import ConfigError, TransportError
from omni_connector.net.runtime import (
    RUNTIME_DIR_VARIABLE,
    check_private,
    listen,
    locked,
    of_kernel,
    runtime_dir,
    socket_path,
    sweep,
    tidy,
)


def dead_socket(path: Path, kind: int = socket.SOCK_SEQPACKET) -> None:
    with socket.socket(socket.AF_UNIX, kind) as bound:
        bound.bind(str(path))


@pytest.fixture(autouse=True)
def _no_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNTIME_DIR_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def test_folder_is_made_private_for_the_user(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, base in (
        ("XDG_RUNTIME_DIR", place / "omni-connector"),
        (RUNTIME_DIR_VARIABLE, place),
    ):
        monkeypatch.setenv(variable, str(place))
        for _ in range(2):
            folder = runtime_dir("team-a")
            assert folder.parent == base / "team-a"
            for each in (folder, folder.parent, base):
                assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_temporary_folder_is_the_last_resort(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    file = place / "file"
    file.touch()
    wanted = of_kernel(place / f"omni-connector-{os.geteuid()}" / "default")
    for xdg in ("", "relative", str(place / "missing"), str(file)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", xdg)
        assert runtime_dir() == wanted


@pytest.mark.parametrize("writable", [True, False])
def test_without_a_temporary_folder_the_working_directory_is_none(
    place: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    """As where /tmp is read-only: Python takes the working directory, if that is not."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    folders = [str(place / "missing"), *([os.getcwd()] if writable else [])]
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: folders)
    with pytest.raises(ConfigError, match=f"set {RUNTIME_DIR_VARIABLE} to a folder"):
        runtime_dir()
    assert list(place.iterdir()) == []
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place / "run"))
    assert runtime_dir().is_relative_to(place / "run")


def test_a_temporary_folder_in_which_the_engine_runs_is_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("TMPDIR", f"{place}/")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert runtime_dir().is_relative_to(place)


def test_a_working_directory_that_was_removed_is_no_hindrance(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    (place / "gone").mkdir()
    monkeypatch.chdir(place / "gone")
    (place / "gone").rmdir()
    assert runtime_dir().is_relative_to(place)


def test_runtime_folder_of_another_user_is_not_taken_over(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    xdg = place / "run-user-1000"
    xdg.mkdir(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(xdg))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        runtime_dir()
    assert list(xdg.iterdir()) == []


@pytest.mark.parametrize(
    "namespace", ["", ".", "..", "../up", "a/b", "x" * 300, "é", "\udc80", "\0"]
)
def test_any_namespace_is_one_folder_of_its_own(
    place: Path, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place))
    folder = runtime_dir(namespace)
    assert folder.parent.parent == place
    assert folder.is_dir()
    assert folder != runtime_dir()


def test_unsafe_folders_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loose, link, file = place / "loose", place / "link", place / "file"
    loose.mkdir()
    loose.chmod(0o750)
    (place / "real").mkdir(0o700)
    link.symlink_to(place / "real")
    file.touch()
    for unsafe, message in (
        (loose, "open to others"),
        (link, "symbolic links"),
        (file, "no folder"),
        (place / "missing", "cannot look"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_private(unsafe)
    for folder, message in (
        (str(loose), "open to others"),
        ("relative", "absolute"),
        (str(place / "no" / "parent"), "cannot make"),
    ):
        monkeypatch.setenv(RUNTIME_DIR_VARIABLE, folder)
        with pytest.raises(ConfigError, match=message):
            runtime_dir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        check_private(place)


def test_who_names_a_folder_that_is_open_to_others_is_told_of_one_that_works(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.chmod(0o777)
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place))
    with pytest.raises(ConfigError, match="mode 777") as raised:
        runtime_dir()
    advised = str(raised.value).rpartition("=")[2]
    assert advised == str(place / "omni")
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, advised)
    assert runtime_dir().is_dir()
    assert stat.S_IMODE(place.stat().st_mode) == 0o777


@pytest.mark.parametrize("name", ["", "/", "../x", "n" * 10_000, "é", "\udc80", "a\0b"])
def test_any_name_is_a_socket(place: Path, name: str) -> None:
    path = socket_path(place, name, kind="a-")
    assert path.parent == place
    assert path == socket_path(place, name, kind="a-")
    assert path != socket_path(place, name + "x", kind="a-")
    with listen(path):
        assert path.is_socket()


def test_folder_too_long_for_sockets_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=RUNTIME_DIR_VARIABLE):
        socket_path(place / ("x" * 80), "name", kind="a-")


def test_socket_is_bound_elsewhere_until_it_listens(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = socket_path(place, "name")
    seen: list[bool] = []
    rename = os.rename

    def watched(source: Path, target: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            seen.append(path.exists())
            seen.append(probe.connect_ex(str(source)) == 0)
        rename(source, target)

    monkeypatch.setattr(os, "rename", watched)
    listen(path).close()
    assert seen == [False, True]


def test_two_cannot_listen_at_one_path_but_one_replaces_the_dead(place: Path) -> None:
    path = socket_path(place, "name")
    dead_socket(path)
    with listen(path), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))
        with pytest.raises(TransportError, match="already"):
            listen(path)
    assert os.listdir(place) == [path.name]


def test_sweep_removes_only_dead_sockets(place: Path) -> None:
    dead_socket(place / "dead.sock")
    dead_socket(place / "stream.sock", socket.SOCK_STREAM)
    dead_socket(place / ".0123.new")
    (place / "file.sock").touch()
    (place / "folder").mkdir()
    with (
        listen(place / "alive.sock"),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other_kind,
        listen(place / "full.sock", backlog=0) as full,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting,
    ):
        other_kind.bind(str(place / "zmq.sock"))
        other_kind.listen()
        waiting.connect(str(place / "full.sock"))
        assert full.fileno() >= 0
        removed = sweep(place)
        assert sorted(removed) == [".0123.new", "dead.sock", "stream.sock"]
        assert sorted(os.listdir(place)) == [
            "alive.sock",
            "file.sock",
            "folder",
            "full.sock",
            "zmq.sock",
        ]
        assert sweep(place) == []


def test_sweep_leaves_a_socket_that_is_about_to_listen(place: Path) -> None:
    with (
        locked(place),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as about,
    ):
        about.bind(str(place / ".about.new"))
        with pytest.raises(TransportError, match="locked"):
            sweep(place, timeout=0.05)
        assert os.listdir(place) == [".about.new"]


def test_a_process_that_is_forked_under_the_lock_does_not_keep_it(place: Path) -> None:
    asked, ask = os.pipe()
    with locked(place):
        child = os.fork()
        if not child:
            os.read(asked, 1)
            os._exit(0)
    try:
        with locked(place, timeout=0.05):
            pass
    finally:
        os.write(ask, b".")
        os.waitpid(child, 0)
    os.close(asked)
    os.close(ask)


def test_a_process_that_is_forked_under_the_lock_does_not_give_it_back(place: Path) -> None:
    lock = locked(place)
    with lock:
        child = os.fork()
        if not child:
            lock.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(TransportError), locked(place, timeout=0.05):
            pass
    with locked(place, timeout=0.05):
        assert os.listdir(place) == []


def test_listening_gives_up_when_the_folder_stays_locked(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked.__wrapped__, "__kwdefaults__", {"timeout": 0.05})
    fd = os.open(place, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(TransportError, match="locked by another process"):
        listen(place / "name.sock")
    os.close(fd)
    assert os.listdir(place) == []


def test_failure_to_listen_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, target: Path) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "rename", broken)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="cannot listen"):
        listen(place / "name.sock")
    assert os.listdir(place) == []
    assert len(os.listdir("/proc/self/fd")) <= before


def test_folder_that_is_gone_is_an_error_of_ours(place: Path) -> None:
    for call in (lambda: sweep(place / "gone"), lambda: listen(place / "gone" / "x.sock")):
        with pytest.raises(TransportError):
            call()


def test_a_locked_folder_holds_nobody_up(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place / "dead.sock"))
    with locked(place), monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
        tidy(place)
    assert (place / "dead.sock").exists()
    tidy(place)
    assert not (place / "dead.sock").exists()
