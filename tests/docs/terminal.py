# SPDX-License-Identifier: Apache-2.0
"""A shell that a reader pastes into.

Servers go into the background, as in a terminal of their own: `vllm` writes down its arguments, and
the test starts that server; the router and Mooncake's master start at once. `pip install` and
`apt-get install` say whether what they name is there, and install nothing.
"""

import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

_BACKGROUND = ("vllm-router", "mooncake_master")

_PRELUDE = r"""
vllm() {{
    local file="$OMNI_TERMINAL/$EPOCHREALTIME"
    printf '%s\0' "$@" >"$file.new" && mv "$file.new" "$file.vllm"
}}
pip() {{ {python} -m tests.docs.installed "${{@:2}}"; }}
apt-get() {{ :; }}
"""

_IN_BACKGROUND = r"""
{name}() {{ command {name} "$@" >"$OMNI_TERMINAL/{name}.log" 2>&1 & }}
"""

_RECORDED = r"""
{name}() {{
    local file="$OMNI_TERMINAL/$EPOCHREALTIME"
    printf '%s\0' {name} "$@" >"$file.new" && mv "$file.new" "$file.command"
}}
"""


class PastingError(AssertionError):
    """What a page promises did not come; the message holds what came."""


class Terminal:
    """A bash with these functions.

    Args:
        folder: the reader's home, in which the shell begins; exists.
        environment: of the shell, beside this process's.
        host: the network namespace it lives in; None for this process's.
        recorded: commands that only write down their arguments, for `recorded`.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        host: str | None = None,
        recorded: Iterable[str] = (),
    ) -> None:
        self._folder = folder
        self._notes = folder / "terminal"
        self._notes.mkdir()
        self._lines: queue.Queue[str] = queue.Queue()
        python = Path(sys.executable)
        inside = ["ip", "netns", "exec", host] if host else []
        self._process = subprocess.Popen(
            [*inside, "bash", "--noprofile", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                **environment,
                "PATH": f"{python.parent}:{os.environ['PATH']}",
                "HOME": str(folder),
                "COLUMNS": "120",
                "OMNI_TERMINAL": str(self._notes),
            },
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._send(_PRELUDE.format(python=shlex.quote(str(python))))
        for name in _BACKGROUND:
            self._send(_IN_BACKGROUND.format(name=name))
        for name in recorded:
            self._send(_RECORDED.format(name=name))

    def paste(self, text: str, timeout: float = 60.0) -> tuple[int, str]:
        """What the shell does with a text: the last command's status, and what it all printed.

        Raises:
            PastingError: it is not done after `timeout` seconds.
        """
        end = uuid.uuid4().hex
        self._send(f"{text}\nprintf '\\n%s %d\\n' {end} $?\n")
        deadline = time.monotonic() + timeout
        printed: list[str] = []
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                shown = "".join(printed)
                raise PastingError(f"not done in {timeout:.0f} s:\n{text}\n{shown}") from None
            if line.startswith(end):
                return int(line.split()[1]), "".join(printed)
            printed.append(line)

    def expect(self, text: str, prints: Iterable[str], status: int = 0, within: float = 60) -> str:
        """Paste, again and again until it ends with this status and prints all these patterns.

        A reader who looks too early looks again: metrics come a moment after the answer.

        Raises:
            PastingError: it never does within so many seconds.
        """
        deadline = time.monotonic() + within
        wanted = list(prints)
        while True:
            code, printed = self.paste(text, within)
            missing = [each for each in wanted if not re.search(each, printed)]
            if code == status and not missing:
                return printed
            if time.monotonic() > deadline:
                raise PastingError(
                    f"status {code} for {status}, without {missing}:\n{text}\n{printed}"
                )
            time.sleep(0.5)

    def until(self, done: Callable[[str], bool], text: str, timeout: float) -> str:
        """What a text printed when that was enough; PastingError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not done(printed := self.paste(text)[1]):
            if time.monotonic() > deadline:
                raise PastingError(f"not within {timeout:.0f} s: {text}\n{printed}\n{self.logs()}")
            time.sleep(0.2)
        return printed

    def servers(self) -> list[list[str]]:
        """Arguments of each `vllm` since the last call, in order."""
        return [words for _, words in self._take("*.vllm")]

    def recorded(self) -> list[list[str]]:
        """Each recorded command since the last call, in order; also those in the background."""
        self.paste("wait")
        return [words for _, words in self._take("*.command")]

    def logs(self) -> str:
        """The ends of what servers in the background have printed."""
        logs = sorted(self._notes.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs)

    def close(self) -> None:
        """End the shell and what it has started. Idempotent."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def _take(self, pattern: str) -> list[tuple[str, list[str]]]:
        found: list[tuple[str, list[str]]] = []
        for path in sorted(self._notes.glob(pattern)):
            found.append((path.name, path.read_text().split("\0")[:-1]))
            path.unlink()
        return found


def after(words: list[str], option: str) -> Any:
    """The value of an option on a command line."""
    return words[words.index(option) + 1]
