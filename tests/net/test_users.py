# SPDX-License-Identifier: Apache-2.0
"""Users of other user namespaces are others, whatever number the kernel gives them here."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_connector.net.users import lacks_users, other_user

OVERFLOW = 65534
EVERYBODY = "0 0 4294967295\n"
A_RANGE = "0 200000 65536\n"
NAMESPACES = "other user namespaces"


def kernel(root: Path, uid_map: str | None, overflow: int = OVERFLOW) -> Path:
    """A root folder with what the kernel says of user ids."""
    for name, text in (
        ("proc/self/uid_map", uid_map),
        ("proc/sys/kernel/overflowuid", str(overflow)),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "peer", "uid_map", "expected"),
    [
        (1000, 1000, EVERYBODY, None),
        (1000, 1001, EVERYBODY, "user 1001, not 1000; go away"),
        (1000, OVERFLOW, EVERYBODY, "user 65534, not 1000; go away"),
        (OVERFLOW, OVERFLOW, EVERYBODY, None),
        (OVERFLOW, OVERFLOW, "0 0 2147483647\n2147483647 2147483647 2147483648\n", None),
        (OVERFLOW, OVERFLOW, None, None),
        (1000, 1000, A_RANGE, None),
        (1000, OVERFLOW, A_RANGE, NAMESPACES),
        (OVERFLOW, OVERFLOW, A_RANGE, NAMESPACES),
        (OVERFLOW, OVERFLOW, "", NAMESPACES),
    ],
)
def test_only_who_is_certainly_this_user_is_no_other(
    own: int,
    peer: int,
    uid_map: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: own)
    other = other_user(peer, "go away", kernel(tmp_path, uid_map))
    if expected is None:
        assert other is None
    else:
        assert other is not None
        assert expected in other


def test_the_kernels_own_overflow_id_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    assert NAMESPACES in (other_user(7, "", kernel(tmp_path, A_RANGE, overflow=7)) or "")
    assert lacks_users(tmp_path)


# Runs as a user of a namespace of its own, and listens there.
_IN_A_NAMESPACE = """
import ctypes, os, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0, "no user namespaces"
print("apart", flush=True)
sys.stdin.readline()
import logging, time
from pathlib import Path
from omni_connector.errors import OmniError
from omni_connector.net.runtime import runtime_dir, socket_path
from omni_connector.net.unix import Connection, Listener
from tests.net.test_unix import QUESTIONS, ANSWERS, Ask, agree
logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
path = socket_path(Path(sys.argv[2]), "peer", kind="a-")
os.setresuid(*[int(sys.argv[1])] * 3)
listener = Listener(QUESTIONS, agree)
listener.add(path)
print("listens", path, flush=True)
sys.stdin.readline()
try:
    runtime_dir()
    connection = Connection(path, time.monotonic() + 20)
    print("own", connection.ask(Ask(b""), ANSWERS, time.monotonic() + 20)[0], flush=True)
except OmniError as error:
    print("refused", error, flush=True)
listener.close()
"""


@contextlib.contextmanager
def listening(uid: int, folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A process that listens as this user of a namespace with a range of ids; and where."""
    with subprocess.Popen(
        [sys.executable, "-c", _IN_A_NAMESPACE, str(uid), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMNI_CONNECTOR_RUNTIME_DIR": str(folder)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "apart\n":
                pytest.skip("no user namespaces can be made here")
            Path(f"/proc/{process.pid}/uid_map").write_text(A_RANGE)
            os.chown(folder, int(A_RANGE.split()[1]) + uid, -1)
            process.stdin.write("\n")
            process.stdin.flush()
            yield process, process.stdout.readline().split()[1]
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may map a range of ids")
@pytest.mark.parametrize("uid", [1000, OVERFLOW])
def test_a_peer_of_another_namespace_is_refused(uid: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="omni-", dir="/tmp"))
    try:
        with listening(uid, folder) as (process, path):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
                peer.settimeout(30)
                peer.connect(path)  # as root of the first namespace, who may open any folder
                assert peer.recv(1) == b""
            said, _ = process.communicate("\n", timeout=60)
    finally:
        shutil.rmtree(folder)
    log = [line for line in said.splitlines() if line.startswith("LOG Refused a peer of ")]
    assert log
    assert all(NAMESPACES in line for line in log)
    # It answers peers of its own namespace, if it can tell them from all others.
    if uid == OVERFLOW:
        assert "refused the runtime folder" in said
        assert "run engines as another user" in said
    else:
        assert "own Yes()" in said
