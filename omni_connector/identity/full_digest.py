# SPDX-License-Identifier: Apache-2.0
"""The digest of all bytes of a model's files, made in the background.

Engines of other layouts (tensor-parallel size, hardware, repacked quantization) compare it when
they hand off: what their memories hold differs, although they have loaded the same files. No start
waits for it. A process at idle priority (`hash_files`) reads the files, and each file's digest is
kept (`kept_digests`), so that the next engine reads nothing. Of a large file in Hugging Face's
cache nothing is read either, because its name there is the SHA-256 of its content.
"""

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from omni_connector.errors import OmniError
from omni_connector.identity import hash_files
from omni_connector.identity.kept_digests import FileState, KeptDigests
from omni_connector.identity.weight_files import (
    FileVersion,
    ModelFiles,
    UnknownFilesError,
    blob_name,
    canonical_configuration,
    file_version,
)
from omni_connector.runtime.context import EngineContext
from omni_connector.runtime.turns import Turns

logger = logging.getLogger("vllm.omni_connector.identity")

# Seconds between two looks at the process that hashes, or at the lock of another engine.
_LOOK_S: Final = 0.25

# Longest time for all files, in seconds: a terabyte at 50 MB/s takes six hours.
_DEADLINE_S: Final = 6 * 3600.0

# Most files that are hashed at once. One core hashes 0.5 to 2 GB/s.
_THREADS: Final = 4

_CLOSE_S: Final = 5.0
"""Longest wait, in seconds, for the thread to end at `close`."""

_SHA256_CHARS: Final = 64

_IDLE = True
"""Whether the process runs at idle priority. Tests that wait for it set this to False."""

_CORES: Final = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset({0})
"""The cores of this process, read before vLLM pins its threads."""


class _Line(msgspec.Struct, frozen=True):
    """What the process says of one file."""

    position: Annotated[int, Meta(ge=0)]
    sha256: str = ""
    version: FileState = (0, 0, 0, 0)
    error: str = ""


class WeightFilesDigest:
    """Makes the digest on a thread of its own, and tells it once.

    Args:
        find: names the files; called on the thread, may read folders. A text instead of files is
            the digest itself. None: the operator names the model, and no digest is made.
        unchanged_since: returns seconds since the epoch. What was written later may not be what
            vLLM has loaded.
        tell: called on the thread with the digest, 32 hex digits.
        context: clock, and what starts the thread.
    """

    def __init__(
        self,
        find: Callable[[], ModelFiles | str | None],
        unchanged_since: Callable[[], float],
        tell: Callable[[str], object],
        context: EngineContext,
    ) -> None:
        self._find = find
        self._unchanged_since = unchanged_since
        self._tell = tell
        self._clock = context.clock
        self._deadline = context.clock() + _DEADLINE_S
        self._closing = False
        self._files: ModelFiles | None = None
        self._before: list[FileVersion] = []
        self._known: dict[Path, str] = {}
        self._missing: dict[Path, list[Path]] = {}  # files without a digest, by their folder
        self._kept: KeptDigests | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Turns = context.start("omni-weight-files", self._turn, end=self._end)

    def close(self) -> None:
        """End the process and the thread, within `_CLOSE_S` seconds. Idempotent."""
        self._closing = True
        self._thread.wake()
        process = self._process
        if process is not None:
            process.kill()
        self._thread.join(_CLOSE_S)

    def _turn(self) -> float | None:
        if self._closing:
            return None
        try:
            return self._go_on()
        except (UnknownFilesError, OSError, OmniError, ValueError) as error:
            if not self._closing:
                logger.warning(
                    "The weights' files have no digest: %s. Engines of other layouts compare only "
                    "the model's name with this one's. Set `model_id` to the same name on all "
                    "engines that have the same weights",
                    error,
                )
            return None

    def _go_on(self) -> float | None:
        if self._clock() >= self._deadline:
            raise UnknownFilesError(f"the files were not read in {_DEADLINE_S / 3600:g} hours")
        if self._files is None:
            found = self._find()
            if found is None:
                return None
            if isinstance(found, str):
                self._tell(found)
                return None
            self._begin(found)
        if self._process is not None:
            return self._collect(self._process)
        while self._missing:
            folder, paths = next(iter(self._missing.items()))
            kept = self._kept = self._kept or KeptDigests(folder)
            if not kept.acquire():
                return _LOOK_S  # another engine hashes them, and keeps what it finds
            still = []
            for path in paths:
                digest = kept.digest(path)
                if digest is None:
                    still.append(path)
                else:
                    self._known[path] = digest
            if still:
                self._missing[folder] = still
                self._start(still)
                return 0.0
            self._next_folder()
        self._finish()
        return None

    def _begin(self, files: ModelFiles) -> None:
        self._before = self._versions(files)
        since = self._unchanged_since()
        for version in self._before:
            if not version.blob and version.changed > since:
                raise UnknownFilesError(f"{version.path} was written after this process began")
        missing: defaultdict[Path, list[Path]] = defaultdict(list)
        for path in files.weights:
            name = blob_name(path)
            if len(name) == _SHA256_CHARS:
                self._known[path] = name
            else:
                target = path.resolve(strict=True)
                missing[target.parent].append(target)
        self._missing = dict(missing)
        self._files = files

    def _start(self, paths: list[Path]) -> None:
        numbers = (os.getpid(), _IDLE, _THREADS, *sorted(_CORES))
        arguments = [str(int(number)) for number in numbers]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", hash_files.__file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        if self._closing:
            process.kill()
        assert process.stdin is not None
        # If it has ended already, `_collect` notices.
        with contextlib.suppress(BrokenPipeError), process.stdin as names:
            names.write(b"".join(os.fsencode(path) + b"\0" for path in paths))
        process.stdin = None  # else `communicate` would flush it

    def _collect(self, process: "subprocess.Popen[bytes]") -> float | None:
        folder, paths = next(iter(self._missing.items()))
        try:
            said, _ = process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            return 0.0
        self._process = None
        found: dict[Path, tuple[FileState, str]] = {}
        for text in said.splitlines():
            line = msgspec.json.decode(text, type=_Line)
            if line.error:
                raise UnknownFilesError(line.error)
            found[paths[line.position]] = line.version, line.sha256
        if process.returncode or len(found) < len(paths):
            raise UnknownFilesError("the process that reads them has ended")
        self._known |= {path: digest for path, (_, digest) in found.items()}
        assert self._kept is not None
        try:
            self._kept.keep({path.name: each for path, each in found.items()})
        except OSError as error:  # the next engine computes them again
            logger.info(
                "The digests of the weights in %s are not kept, so that the next engine reads the "
                "files again: %s",
                folder,
                error,
            )
        self._next_folder()
        return 0.0

    def _next_folder(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None
        del self._missing[next(iter(self._missing))]

    def _finish(self) -> None:
        files = self._files
        assert files is not None
        hasher = hashlib.blake2b(digest_size=16, person=b"weight files")
        for path in files.configuration:
            hasher.update(msgspec.msgpack.encode((path.name, canonical_configuration(path))))
        for path in files.weights:
            digest = self._known.get(path) or self._known[path.resolve(strict=True)]
            name = os.path.relpath(path, files.folder)
            hasher.update(msgspec.msgpack.encode((name, digest)))
        if self._versions(files) != self._before:
            raise UnknownFilesError("the files changed while they were read")
        self._tell(hasher.hexdigest())

    def _versions(self, files: ModelFiles) -> list[FileVersion]:
        return [file_version(path) for path in (*files.configuration, *files.weights)]

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._kept is not None:
            self._kept.close()
