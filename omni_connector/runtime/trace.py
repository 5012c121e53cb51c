# SPDX-License-Identifier: Apache-2.0
"""Spans of time that requests and jobs spend in each half of an engine, as a Chrome trace.

Each half writes its spans to a file of its own. A line of the file is one event of a Chrome trace.
Times are microseconds of CLOCK_MONOTONIC, which all processes of a host share. Spans hold request
ids, numbers and names, and nothing of a prompt.

    python -m omni_connector.runtime.trace FOLDER > trace.json

makes one Chrome trace of all files in a folder. Open it in chrome://tracing or ui.perfetto.dev.
"""

import logging
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from omni_connector.errors import ConfigError
from omni_connector.runtime.turns import StartTurns, Turns, TurnThread

logger = logging.getLogger("vllm.omni_connector.runtime.trace")

MAX_SPANS: Final = 1 << 16
"""Most spans that wait to be written. While there are as many, new ones are dropped."""

_WRITE_S: Final = 0.5
"""Seconds between two writes. A process that is killed loses the spans of at most this time."""

_CLOSE_S: Final = 2.0
"""Longest wait of `close` for the last write, in seconds; the disk may be slow."""

Value = str | int | None

now = time.monotonic_ns


class Span(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An event of a Chrome trace.

    Attributes:
        ph: its kind. `X` is a span that starts at `ts` and lasts `dur`; `M` gives a process the
            name in `args`.
        cat: the half of the engine.
        pid, tid: ids of process and thread.
        ts, dur: microseconds.
        id: the request or job of a span that may overlap others of its thread; else "".
        thread: the name of the thread `tid`.
    """

    name: str
    ph: str
    cat: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    id: str = ""
    thread: str = ""
    args: dict[str, Value] = {}


class Trace:
    """Drops the spans of one half of an engine; `FileTrace` writes them.

    Any thread may call these methods. None waits for a disk, except `close`, and none raises.

    Attributes:
        is_recording: whether spans are written. Callers skip what only a span needs if not.
    """

    is_recording: bool = False

    def span(self, name: str, began: int, id: str = "", **args: Value) -> None:
        """Record a span that ends now.

        Args:
            name: name of the span.
            began: its start, as `now` returned it (ns).
            id: see `Span`.
            args: shown with the span; None values are dropped. The job that this thread works on
                is added.
        """

    def works_on(self, job_id: int | None) -> None:
        """Note that the calling thread works on this job from now on; None: on no job."""

    def phase(self, name: str, began: int, ended: int, request_id: str) -> None:
        """Record a phase of a request: its start and its end, as `now` returned them (ns)."""

    def close(self) -> None:
        """Write the spans that wait, and end the thread. Idempotent."""


NO_TRACE: Final = Trace()
"""A trace that drops every span."""


class FileTrace(Trace):
    """Writes the spans to a file.

    Args:
        folder: folder of the file; it is made if missing.
        engine_id, half: whose spans these are; both are part of the file's name.
        start: starts the thread that writes. It starts with the first span.

    Raises:
        ConfigError: the folder cannot be made.
    """

    is_recording = True

    def __init__(
        self, folder: str, engine_id: str, half: str, start: StartTurns = TurnThread
    ) -> None:
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"trace: the folder {folder!r} cannot be made: {error}") from error
        self._engine_id = engine_id
        self._half = half
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in engine_id)[:100]
        self._path = Path(folder, f"{safe}-{half}-{os.getpid()}.jsonl")
        self._start = start
        self._starting = threading.Lock()
        self._thread: Turns | None = None
        self._file: int | None = None
        self._spans: deque[Span] = deque()
        self._left_out = 0
        self._off = False
        self._closing = False
        self._of_thread = threading.local()

    def span(self, name: str, began: int, id: str = "", **args: Value) -> None:
        self._record(name, began, now(), id, args)

    def _record(
        self, name: str, began: int, ended: int, id: str, args: Mapping[str, Value]
    ) -> None:
        if self._off:
            return
        if len(self._spans) >= MAX_SPANS:
            self._left_out += 1
            return
        job = getattr(self._of_thread, "job_id", None)
        known = {key: each for key, each in {"job": job, **args}.items() if each is not None}
        self._spans.append(
            Span(
                name=name,
                ph="X",
                cat=self._half,
                pid=os.getpid(),
                tid=threading.get_native_id(),
                ts=began / 1000,
                dur=(ended - began) / 1000,
                id=id,
                thread=threading.current_thread().name,
                args=known,
            )
        )
        if self._thread is None:
            self._start_writing()

    def _start_writing(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing:
                self._thread = self._start("omni-trace", self._turn)

    def works_on(self, job_id: int | None) -> None:
        self._of_thread.job_id = job_id

    def phase(self, name: str, began: int, ended: int, request_id: str) -> None:
        self._record(name, began, ended, request_id, {"request": request_id})

    def close(self) -> None:
        with self._starting:
            self._closing = True
        if self._thread is not None:
            self._thread.wake()
            self._thread.join(_CLOSE_S)

    def _turn(self) -> float | None:
        last = self._closing
        if self._off:
            return None
        try:
            self._write()
        except (OSError, ValueError) as error:
            logger.warning("No more spans are traced: %s cannot be written: %s", self._path, error)
            self._off = True
            self._spans.clear()
        if last and self._left_out:
            logger.warning("%d spans are missing in %s", self._left_out, self._path)
        if not (last or self._off):
            return _WRITE_S
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return None

    def _write(self) -> None:
        lines: list[Span] = []
        if self._file is None:
            # O_NONBLOCK: opening a pipe without a reader fails at once instead of blocking.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError("it is not a file of this user")
            name: dict[str, Value] = {"name": f"{self._engine_id} {self._half}"}
            lines.append(Span(name="process_name", ph="M", pid=os.getpid(), args=name))
        lines += [self._spans.popleft() for _ in range(len(self._spans))]
        text = b"".join(map(self._line, lines))
        if os.write(self._file, text) < len(text):
            raise OSError("it was not written whole")

    def _line(self, span: Span) -> bytes:
        try:
            return msgspec.json.encode(span) + b"\n"
        except UnicodeError:  # a client's request id holds half a surrogate pair
            self._left_out += 1
            return b""


def _name(kind: str, name: Value, **where: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", **where, "args": {"name": name}}


def spans(folder: Path) -> Iterator[tuple[Path, Span]]:
    """Yield each event in the files of a folder and its subfolders, with the file's path."""
    for path in sorted(folder.rglob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                yield path, msgspec.json.decode(line, type=Span)
            except (msgspec.DecodeError, UnicodeError):  # the process was killed while writing
                continue


def merge(folder: Path) -> bytes:
    """Return all events in a folder as one Chrome trace, in JSON. Processes whose files lie in a
    subfolder are named after that subfolder."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    for path, span in spans(folder):
        if span.ph == "M":
            name = span.args.get("name")
            named = f"{path.parent.name} ({name})" if path.parent != folder else name
            events.append(_name("process_name", named, pid=span.pid))
            continue
        threads[span.pid, span.tid] = span.thread
        place = {"cat": span.cat, "pid": span.pid, "tid": span.tid, "ts": span.ts}
        event = {"name": span.name, "ph": "X", **place, "dur": span.dur, "args": span.args}
        if span.id:  # `X` events of one thread must not overlap; `b` and `e` may
            del event["dur"]
            event |= {"ph": "b", "id2": {"local": span.id}}
            events += [event, {**event, "ph": "e", "ts": span.ts + span.dur, "args": {}}]
        else:
            events.append(event)
    events += [_name("thread_name", name, pid=pid, tid=tid) for (pid, tid), name in threads.items()]
    events.sort(key=lambda event: event.get("ts", 0.0))
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def main(arguments: Sequence[str]) -> int:
    """Print the Chrome trace of a folder; return the exit status."""
    try:
        if len(arguments) != 1 or not Path(arguments[0]).is_dir():
            raise OSError("usage: python -m omni_connector.runtime.trace FOLDER > trace.json")
        sys.stdout.buffer.write(merge(Path(arguments[0])))
        sys.stdout.buffer.flush()
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
