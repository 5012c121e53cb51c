# SPDX-License-Identifier: Apache-2.0
"""systemd, as far as it keeps descriptors of a service over a restart.

sd_notify(3) and sd_listen_fds(3) say what the socket takes, and how descriptors come back.
"""

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

_MOST_DESCRIPTORS: Final = 8  # in one message
_OUT_OF_THE_WAY: Final = 200  # of what the descriptors are put at in the service

# Puts the descriptors where a service looks for them, and becomes the service.
_START: Final = """
import os, sys
for number, descriptor in enumerate(map(int, sys.argv[1].split(',')), 3):
    os.dup2(descriptor, number)
    os.close(descriptor)
os.environ['LISTEN_PID'] = str(os.getpid())
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Systemd:
    """The descriptor store of one service.

    Args:
        folder: for its socket; short, as paths of sockets are.
        most: descriptors that it keeps; more are refused, as systemd does.
    """

    def __init__(self, folder: Path, most: int = 64) -> None:
        self.most = most
        self._path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(os.fspath(self._path))
        self._socket.setblocking(False)
        self._kept: list[tuple[str, int]] = []

    @property
    def environment(self) -> dict[str, str]:
        """What each process of the service finds in its environment."""
        return {"NOTIFY_SOCKET": os.fspath(self._path), "FDSTORE": str(self.most)}

    @property
    def kept(self) -> list[tuple[str, int]]:
        """Names and descriptors that are kept now."""
        while True:
            try:
                self._take()
            except BlockingIOError:
                return self._kept

    def listen_environment(self) -> dict[str, str]:
        """What the main process of the next start finds, besides `LISTEN_PID`."""
        kept = self.kept
        names = ":".join(name for name, _ in kept)
        return {"LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": names}

    def launch(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        """Start the service with what is kept."""
        if not self.kept:
            return _launched(command, {**environment, **self.environment}, output, ())
        moved = [fcntl.fcntl(each, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for _, each in self.kept]
        try:
            numbers = ",".join(map(str, moved))
            command = [sys.executable, "-c", _START, numbers, *command]
            environment = {**environment, **self.environment, **self.listen_environment()}
            return _launched(command, environment, output, moved)
        finally:
            for each in moved:
                os.close(each)

    def close(self) -> None:
        """Close all that is kept. Idempotent."""
        while self._kept:
            os.close(self._kept.pop()[1])
        self._socket.close()

    def _take(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._socket, 4096, _MOST_DESCRIPTORS)
        fields = dict(line.split("=", 1) for line in message.decode("ascii").splitlines())
        name = fields["FDNAME"]
        assert len(name) <= 255
        assert ":" not in name
        if "FDSTOREREMOVE" in fields:
            for each in [each for each in self._kept if each[0] == name]:
                self._kept.remove(each)
                os.close(each[1])
        assert bool(descriptors) == ("FDSTORE" in fields)
        for descriptor in descriptors:
            if len(self._kept) < self.most:
                self._kept.append((name, descriptor))
            else:
                os.close(descriptor)


def _launched(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: IO[bytes],
    descriptors: Sequence[int],
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        pass_fds=descriptors,
        start_new_session=True,
    )
