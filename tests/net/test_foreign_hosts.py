# SPDX-License-Identifier: Apache-2.0
"""A runtime folder that several hosts, or containers of one host, see."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector.net import runtime
from omni_connector.net.links import ZmqSockets
from omni_connector.net.runtime import (
    FOREIGN_SILENCE_S,
    RUNTIME_DIR_VARIABLE,
    listen,
    of_kernel,
    runtime_dir,
    sweep,
    tidy,
)
from omni_connector.transports.shm import SharedMemoryTransport


@pytest.fixture(autouse=True)
def _shared(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(place / "run"))


def on_host(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this process is one of another kernel."""
    boot = place / f"boot-{name}"
    boot.write_text(f"{name}\n")
    monkeypatch.setattr(runtime, "_BOOT_ID", boot, raising=False)


def refusing(path: Path) -> Path:
    """A socket as every kernel but its own sees it, however alive it is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
        bound.bind(str(path))
    return path


def test_live_sockets_of_another_host_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host("one", place, monkeypatch)
    theirs = refusing(runtime_dir() / "i-0123.sock")
    on_host("other", place, monkeypatch)
    ours = refusing(runtime_dir() / "i-4567.sock")
    tidy(runtime_dir())
    transport = SharedMemoryTransport()
    assert transport.sockets(re.compile("i-")) == []
    transport.sweep()
    transport.close()
    assert theirs.exists()
    assert not ours.exists()
    on_host("one", place, monkeypatch)
    assert sweep(runtime_dir()) == [theirs.name], "and its own engines know that it is dead"


def test_engines_of_two_hosts_may_have_one_name(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    sockets = []
    for host in ("one", "other"):
        on_host(host, place, monkeypatch)
        paths.append(runtime_dir() / "i-0123.sock")
        sockets.append(listen(paths[-1]))
    assert all(not runtime.is_dead(path) for path in paths)
    for each in sockets:
        each.close()


_CONTAINER = """
import sys
from omni_connector.net.runtime import listen, runtime_dir, sweep
folder = runtime_dir()
listener = listen(folder / "i-0123.sock")
print(folder, flush=True)
sys.stdin.readline()
print(sweep(folder), flush=True)
"""


def test_containers_of_one_kernel_meet(place: Path) -> None:
    apart = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--ipc", "--pid", "--fork"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no namespaces")
    ours = listen(runtime_dir() / "i-4567.sock")
    command = [*apart, sys.executable, "-c", _CONTAINER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as container:
        assert container.stdin is not None
        assert container.stdout is not None
        folder = Path(container.stdout.readline().strip())
        assert folder == runtime_dir()
        assert sweep(folder) == []
        assert not runtime.is_dead(folder / "i-0123.sock")
        container.stdin.write("\n")
        container.stdin.flush()
        assert container.stdout.readline() == "[]\n"
    ours.close()
    assert sorted(sweep(folder)) == ["i-0123.sock", "i-4567.sock"]


def test_sockets_of_another_mount_are_another_hosts(tmp_path: Path) -> None:
    assert of_kernel(tmp_path).name != of_kernel(Path("/proc")).name
    assert of_kernel(tmp_path).name == of_kernel(tmp_path / "not" / "yet").name


def test_a_kernel_that_has_no_boot_id_is_known_by_its_host_name(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_BOOT_ID", place / "missing")
    one = runtime_dir()
    assert one == runtime_dir()
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert one != runtime_dir()


def test_what_an_earlier_boot_has_left_goes_after_a_week(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {}
    for host in ("silent", "lively", "open"):
        on_host(host, place, monkeypatch)
        left[host] = runtime_dir()
        refusing(left[host] / "i-0123.sock")
    (keep := place / "run" / "default" / "notes").mkdir()
    left["open"].chmod(0o755)
    on_host("this", place, monkeypatch)
    own = runtime_dir()
    long_ago = own.stat().st_mtime - FOREIGN_SILENCE_S - 60
    for folder in (left["silent"], left["open"], keep, own):
        os.utime(folder, (long_ago, long_ago))
    os.utime(left["lively"], (long_ago + 120, long_ago + 120))
    sweep(own)
    assert sorted(own.parent.iterdir()) == sorted([left["lively"], left["open"], keep, own])


def test_a_sweep_says_that_its_host_lives(place: Path) -> None:
    folder = runtime_dir()
    os.utime(folder, (0, 0))
    sweep(folder)
    assert folder.stat().st_mtime > FOREIGN_SILENCE_S


def test_no_folder_but_that_of_a_kernel_has_its_neighbours_swept(place: Path) -> None:
    (other := place / "01234567").mkdir(0o700)
    os.utime(other, (0, 0))
    (mine := place / "mine").mkdir(0o700)
    sweep(mine)
    assert other.is_dir()


def test_an_engine_that_ends_leaves_the_socket_that_took_its_place(place: Path) -> None:
    path = runtime_dir() / "p.sock"
    first, second = ZmqSockets(), ZmqSockets()
    routers = [first.serve(path)]
    path.unlink()
    routers.append(second.serve(path))
    for _ in range(2):
        first.close()
        assert path.is_socket()
    second.close()
    assert all(router.closed for router in routers)
    assert not path.exists()
