# SPDX-License-Identifier: Apache-2.0
"""`FileBlockStore`: KV blocks as files of a folder, on a disk or on a network file system.

Files are read and written through the kernel's page cache. A disk or a server that hangs cannot be
told to stop: so every call is made on a thread that the caller stops waiting for at its timeout,
and that changes no row from then on.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, Protocol, TypeVar

import numpy as np

from omni_connector.arena.pool import pages
from omni_connector.config import FileStoreSettings
from omni_connector.errors import ConfigError, TransportError
from omni_connector.net.warnings import Warnings
from omni_connector.runtime.backoff import Backoff
from omni_connector.runtime.blocking_calls import CallThreads
from omni_connector.runtime.turns import StartTurns, Turns, TurnThread
from omni_connector.stores.block_store import BlockStore, Rows, check_rows, in_pages
from omni_connector.stores.file_folder import GONE, BlockFolder
from omni_connector.stores.file_sweep import Sweeper

logger = logging.getLogger("vllm.omni_connector.store")

CLOSE_S: Final = 5.0
"""Longest wait of `close` for a sweep, in seconds."""

# Longest wait for the folder to open, in seconds. It goes on opening in the background.
_OPEN_S: Final = 5.0

# Seconds after which the thread looks again at a step of a sweep that hangs.
_STEP_S: Final = 10.0

# Seconds after which a call without any answer has met a file system that hangs.
_HANGS_S: Final = 0.1

# Most calls at a time, each on a thread of its own. It bounds the threads that hang.
_MAX_CALLS: Final = 16

# A look-up that one thread has not ended after `_ALONE_S` seconds waits for a server or a disk.
# Then up to `_BESIDE` more threads ask beside it, each for `_A_THREAD` keys at least. They are
# threads of their own, so that a hanging look-up leaves the other threads to puts and gets.
_ALONE_S: Final = 0.002
_BESIDE: Final = 7
_A_THREAD: Final = 16

# Seconds after which a folder that hangs or fails is tried again: at first, and at most.
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0

# A file is told as used at most so often, and the blocks of a prompt in an order in which its last
# block is the first to be swept.
_TOUCH_S: Final = 60.0
_TOUCH_STEP_NS: Final = 1000

# Errors of one file, which cost its block alone: its owner forbids it, or its place on the disk is
# broken. A disk that breaks while it is written to takes other blocks no better.
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})
_BROKEN: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})

# Bytes that are read from the disk at a time, into memory of the reading thread.
_BOUNCE_BYTES: Final = 1 << 20

_Result = TypeVar("_Result")


class FileCall:
    """One call: its questions, which several threads answer, and its answers.

    Its caller may stop waiting for it.

    Args:
        questions: each answers for one key.

    Attributes:
        lock: is held where a row is written to, and where the caller gives up.
        ended: is set once all questions are answered, or one has failed.
        answers: one for each question.
        answered: how many questions have been dealt with.
        error: why no more questions are answered.
        later: calls that are made when all is answered; nobody waits for them.
        given_up: nobody waits any more: nothing may be written to rows, or stored.
    """

    def __init__(self, questions: "Sequence[_Question]") -> None:
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.answers = [False] * len(questions)
        self.answered = 0
        self.error: BaseException | None = None
        self.later: deque[Callable[[], object]] = deque()
        self.given_up = False
        self._questions = questions
        self._next = 0

    def wanted(self) -> bool:
        """Whether somebody waits for the rest of the answers."""
        return not self.given_up

    def step(self) -> bool:
        """Answer the next question, on any thread; returns whether there may be more to do."""
        number = self.take()
        if number is not None:
            return self.answer(number)
        try:
            what = self.later.popleft()
        except IndexError:
            return False
        what()
        return True

    def take(self) -> int | None:
        """The next question that nobody answers yet; None where there is none, or none counts."""
        with self.lock:
            number = self._next
            if number == len(self._questions) or not self.wanted() or self.error is not None:
                return None
            self._next += 1
            return number

    def answer(self, number: int) -> bool:
        """Answer a question; returns whether there may be more to do."""
        try:
            found = self._questions[number](self)
        except BaseException as error:  # noqa: BLE001 - its caller hears of it
            self.fail(error)
            return False
        with self.lock:
            if self.wanted():
                self.answers[number] = found
                self.answered += 1
            if self.answered == len(self._questions):
                self.ended.set()
        return True

    def fail(self, error: BaseException) -> None:
        """Answer no more questions."""
        with self.lock:
            self.error = self.error or error
        self.ended.set()


_Question = Callable[[FileCall], bool]
"""Answers for one key, within a call."""


class _LoggedBackoff(Backoff):
    """When one kind of call may be made again after the file system has failed it.

    Args:
        what: fails, for the log.
        of_a_file: codes of errors that cost one block, and do not count here.
        clock: seconds, monotonic.
    """

    def __init__(self, what: str, of_a_file: frozenset[int], clock: Callable[[], float]) -> None:
        super().__init__(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, clock)
        self.of_a_file: Final = of_a_file
        self._what = what

    def failed_by(self, why: str) -> None:
        if not self.failing:
            logger.warning(
                "%s: %s. Blocks count as missing, and it is tried again from time to time",
                self._what,
                why,
            )
        self.failed()

    def worked(self) -> None:
        if self.failing:
            logger.info("%s: this works again", self._what)
        super().worked()


class Calls(Protocol):
    """Makes calls that may take long; see `CallThreads`."""

    def start(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Make a call; its result or its exception is in the future once it has ended.

        Raises:
            TransportError: it cannot be made.
        """

    def close(self) -> None:
        """Start nothing more. Idempotent."""


class FileBlockStore(BlockStore):
    """Blocks in the files of a folder that any number of processes and hosts may share.

    An engine that puts blocks also sweeps: once the folder is nearly full, a thread of its own
    removes the blocks that were asked for longest ago.

    Args:
        settings: where the folder is, and how large it may become.
        clock: seconds, monotonic.
        start: starts the thread that sweeps.
        sweeps: whether it sweeps.
        wall: nanoseconds since the epoch, as files have them.
        folder: where the blocks are; None takes that of the settings.
        calls: makes calls that may take long; None uses threads.

    Raises:
        ConfigError: the folder cannot be made, or others could forge blocks in it. A file system
            that fails otherwise is no error: it is tried again.
    """

    def __init__(
        self,
        settings: FileStoreSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        start: StartTurns = TurnThread,
        sweeps: bool = True,
        wall: Callable[[], int] = time.time_ns,
        folder: BlockFolder | None = None,
        calls: Calls | None = None,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._start = start
        self._sweeps = sweeps
        self._folder = folder or BlockFolder(settings.path)
        self._sweeper = Sweeper(
            self._folder, settings.size_bytes(), clock, lambda: self._wall() / 1e9
        )
        self._calls = calls or CallThreads("omni-store-files", _MAX_CALLS)
        self._beside = CallThreads("omni-store-files", _BESIDE)
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._closed = False
        self._prepared = False
        self._sweeping: Turns | None = None
        self._pieces: Generator[None, None, None] | None = None
        self._step: Future[bool] | None = None
        self._warnings = Warnings(logger)
        self._lookups, self._puts, self._gets = (
            _LoggedBackoff(
                f"The store of files at {settings.path} fails to {verb} blocks", of_a_file, clock
            )
            for verb, of_a_file in (
                ("look up", _FORBIDDEN | _BROKEN),
                ("store", _FORBIDDEN),
                ("load", _FORBIDDEN | _BROKEN),
            )
        )
        opening = self._calls.start(self._prepare)
        wait([opening], _OPEN_S)
        if opening.done() and isinstance(error := opening.exception(), ConfigError):
            self._calls.close()
            self._beside.close()
            raise error

    @property
    def failures(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._failures)

    def exists(self, keys: Sequence[str], *, timeout: float) -> list[bool]:
        now = self._wall()
        asked = [
            partial(self._look_up, key, now - i * _TOUCH_STEP_NS) for i, key in enumerate(keys)
        ]
        return self._in_time(self._lookups, asked, timeout, beside=True)

    def buffer(self, rows: int, row_bytes: int) -> Rows:
        stride = in_pages(row_bytes)
        return pages(rows * stride).reshape(rows, stride)[:, :row_bytes]

    def put(
        self, keys: Sequence[str], rows: Rows, lengths: Sequence[int], *, timeout: float
    ) -> list[bool]:
        stored = self._in_time(self._puts, _for_each(self._put, keys, rows, lengths), timeout)
        self._see_to_sweeping()
        return stored

    def get(
        self, keys: Sequence[str], rows: Rows, lengths: Sequence[int], *, timeout: float
    ) -> list[bool]:
        return self._in_time(self._gets, _for_each(self._get, keys, rows, lengths), timeout)

    def discard(self, keys: Sequence[str], *, timeout: float) -> None:
        self._in_time(self._puts, [partial(self._discard, key) for key in keys], timeout)

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
            sweeping = self._sweeping
        if closed:
            return
        if sweeping is not None:
            sweeping.wake()
            sweeping.join(CLOSE_S)
        self._calls.close()
        self._beside.close()

    # Calls, on threads that nobody has to wait for.

    def _in_time(
        self,
        backoff: _LoggedBackoff,
        questions: Sequence[_Question],
        timeout: float,
        *,
        beside: bool = False,
    ) -> list[bool]:
        """The answers to these questions; False for each that does not come in time.

        Args:
            beside: whether several threads may ask, where one is slow.
        """
        count = len(questions)
        call = FileCall([partial(self._answered, backoff, each) for each in questions])
        if not count or self._closed:
            return call.answers
        if backoff.active:
            self._count("backed off", count)
            return call.answers
        try:
            self._begin(call)
        except TransportError:  # all threads for calls hang
            self._count("busy", count)
            return call.answers
        alone = min(timeout, _ALONE_S) if beside else timeout
        ended = self._await(call, alone)
        if not ended and alone < timeout:
            with contextlib.suppress(TransportError):  # threads that were started go on
                for _ in range(min(_BESIDE, (count - call.answered) // _A_THREAD)):
                    self._begin(call, beside=True)
            ended = self._await(call, timeout - alone)
        with call.lock:
            call.given_up = True
            answers, answered, error = list(call.answers), call.answered, call.error
        if error is None:
            if ended:
                backoff.worked()
            elif answered < count:
                self._count("timeout", count - answered)
                if not answered and timeout >= _HANGS_S:
                    backoff.failed_by(f"it did not answer in {timeout:g} s")
            return answers
        self._prepared = False  # somebody may have removed the folder
        self._count(_kind(error), count - answered)
        backoff.failed_by(str(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._sweeper.no_room()
        elif not isinstance(error, OSError | ConfigError):
            logger.error("This should not happen; please report it", exc_info=error)
        return answers

    def _answered(self, backoff: _LoggedBackoff, ask: _Question, call: FileCall) -> bool:
        """Answer a question; where its file fails, and no more, its block is missing."""
        try:
            return ask(call)
        except OSError as error:
            if error.errno not in backoff.of_a_file:
                raise
            self._prepared = False  # the folder may be another one by now, or have other rights
            self._count(_kind(error), 1)
            self._warnings.warn("A block of the store of files counts as missing: %s", error)
            return False

    def _begin(self, call: FileCall, *, beside: bool = False) -> None:
        """Have one thread more answer the questions of a call.

        Raises:
            TransportError: too many calls hang.
        """
        (self._beside if beside else self._calls).start(partial(self._work, call))

    def _await(self, call: FileCall, seconds: float) -> bool:
        """Wait until a call has ended, or for so long; returns whether it has."""
        return call.ended.wait(seconds)

    def _work(self, call: FileCall) -> None:
        try:
            if not self._prepared:
                self._prepare()
        except BaseException as error:  # noqa: BLE001 - its caller hears of it
            call.fail(error)
            return
        while call.step():
            pass

    def _prepare(self) -> None:
        self._folder.prepare()
        self._prepared = True

    def _look_up(self, key: str, now_ns: int, call: FileCall) -> bool:
        path = self._folder.path_of(key)
        status = self._folder.status(path)
        if status is None:
            return False
        if _is_old(status, now_ns):
            call.later.append(partial(self._folder.touch, path, now_ns))
        return True

    def _put(self, key: str, row: Rows, call: FileCall) -> bool:
        path = self._folder.path_of(key)
        try:
            status = self._folder.status(path)
        except OSError as error:
            if error.errno not in _BROKEN:
                raise
            status = None  # a new file takes its place
        if status is not None and status.st_size == row.nbytes:
            now_ns = self._wall()
            if _is_old(status, now_ns):
                self._folder.touch(path, now_ns)
            return True
        stored = self._folder.write(path, row.data, call.wanted)
        self._sweeper.add(in_pages(row.nbytes))
        return stored

    def _get(self, key: str, row: Rows, call: FileCall) -> bool:
        path = self._folder.path_of(key)
        try:
            return self._read_file(path, row, call)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._count("missing", 1)
            return False

    def _read_file(self, path: str, row: Rows, call: FileCall) -> bool:
        try:
            fd = self._folder.open(path)
            try:
                if os.fstat(fd).st_size == row.nbytes:
                    return _read(fd, row, call)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in _BROKEN:
                self._folder.remove(path)
            raise
        self._count("other length", 1)
        self._folder.remove(path)
        return False

    def _discard(self, key: str, call: FileCall) -> bool:
        return self._folder.remove(self._folder.path_of(key))

    def _count(self, kind: str, number: int) -> None:
        with self._lock:
            self._failures[kind] += number

    # Sweeping.

    def _see_to_sweeping(self) -> None:
        with self._lock:
            if self._sweeping is None and self._sweeps and not self._closed:
                self._sweeping = self._start("omni-store-sweep", self._turn)
            sweeping = self._sweeping
        if sweeping is not None and self._sweeper.urgent():
            sweeping.wake()

    def _turn(self) -> float | None:
        if self._closed:
            if self._pieces is not None and self._step is None:
                self._pieces.close()  # so that others may sweep
            return None
        if self._step is None:
            if self._pieces is None:
                if seconds := self._sweeper.due():
                    return seconds
                self._pieces = self._sweeper.sweep()
            pieces = self._pieces
            try:
                self._step = self._calls.start(lambda: next(pieces, True) is True)
            except TransportError:  # all threads for calls hang
                return _STEP_S
        began = self._clock()
        wait([self._step], _STEP_S)
        if not self._step.done():
            return _STEP_S
        step, self._step = self._step, None
        error = step.exception()
        if error is not None:
            self._count(_kind(error), 1)
            logger.debug("The store of files at %s was not swept: %s", self._folder.path, error)
        if error is not None or step.result():
            self._pieces = None
            return max(self._sweeper.due(), _FIRST_PAUSE_S)
        return 4 * (self._clock() - began)  # a large folder is no reason to keep a core busy


def _for_each(
    move: Callable[[str, Rows, FileCall], bool],
    keys: Sequence[str],
    rows: Rows,
    lengths: Sequence[int],
) -> list[_Question]:
    """A question for each key, about the first `lengths` bytes of its row."""
    check_rows(keys, rows, lengths)
    return [
        partial(move, key, row[:length])
        for key, row, length in zip(keys, rows, lengths, strict=True)
    ]


def _read(fd: int, row: Rows, call: FileCall) -> bool:
    """Read a whole file into a row, if all of it comes while the caller waits."""
    at = 0
    while at < row.nbytes:
        with call.lock:
            if not call.wanted():
                return False
            got = _from_page_cache(fd, row[at:], at)
        if got is None:
            # The disk may take any time, so these bytes pass through memory that only we have.
            bounce = np.empty(min(row.nbytes - at, _BOUNCE_BYTES), np.uint8)
            got = os.preadv(fd, [bounce.data], at)
            with call.lock:
                if not call.wanted():
                    return False
                np.copyto(row[at : at + got], bounce[:got])
        if got == 0:
            return False  # cut short meanwhile
        at += got
    return True


def _from_page_cache(fd: int, row: Rows, at: int) -> int | None:
    """Read what needs no disk, into a row; returns how many bytes, None where that is nothing."""
    try:
        return os.preadv(fd, [row.data], at, os.RWF_NOWAIT)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return None  # this file system cannot tell
        raise


def _is_old(status: os.stat_result, now_ns: int) -> bool:
    return abs(now_ns - status.st_mtime_ns) > _TOUCH_S * 1e9


def _kind(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, "OSError")
    return "refused" if isinstance(error, ConfigError) else type(error).__name__
