# SPDX-License-Identifier: Apache-2.0
"""The digest of a model's files: which configuration and which weights lie in them.

It is the same wherever the files lie, in every process. Of weights it is a sample, because all of
their bytes would take as long to read as vLLM takes to load them:

- of safetensors the header, the size, and `_PIECE` bytes at up to 64 places across each tensor;
  of a model with many tensors fewer places each, two at least;
- of a blob in Hugging Face's cache also its name, which is the digest of all its bytes;
- of any other file its size, its modification time, and 64 KiB at each end.

So at most 4 MiB are read beside the headers, or 128 bytes of each tensor where there are more than
32,768 tensors, or 128 KiB of each file that is not safetensors.

>>> places(1000, 3)
[(0, 64), (468, 64), (936, 64)]
>>> places(100, 3)
[(0, 100)]
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from omni_connector.errors import OmniError
from omni_connector.runtime.blocking_calls import CallThreads

SAFETENSORS: Final = ".safetensors"
OTHER_WEIGHTS: Final = frozenset({".bin", ".pt", ".pth", ".gguf", ".tensors"})

_PIECE: Final = 64  # bytes
_PLACES: Final = 65_536  # of all tensors together
_MOST_PLACES: Final = 64  # of one tensor
_LEAST_PLACES: Final = 2
_END_BYTES: Final = 64 << 10
_MAX_FILES: Final = 4096
_MAX_TENSORS: Final = 1 << 20
# A header is no longer in files that the safetensors library reads.
_MAX_HEADER: Final = 100_000_000
_MAX_HEADERS: Final = 512 << 20
_MAX_CONFIGURATION: Final = 16 << 20

# Longest wait for all files of a model, which vLLM itself has just read.
_DEADLINE_S: Final = 60.0
_AT_ONCE: Final = 8

# What a configuration says of where it lies and what wrote it.
NOT_THE_MODEL: Final = ("_name_or_path", "transformers_version", "_commit_hash")

# Beside `config.json` these change what is computed: settings of quantization, and how images,
# video and audio become inputs.
_CONFIGURATIONS: Final = ("config.json", "params.json")
_CONFIGURATION_PARTS: Final = ("quant", "preprocessor_config", "processor_config")

_Result = TypeVar("_Result")


class UnknownFilesError(Exception):
    """What a model's files contain cannot be known; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of one model.

    Attributes:
        folder: in which they lie, whatever its name.
        configuration: what is read as JSON; told by content.
        weights: told by samples.
    """

    folder: Path
    configuration: tuple[Path, ...]
    weights: tuple[Path, ...]


def files_of(folder: Path, *, all_formats: bool = False, code: bool = False) -> ModelFiles:
    """The files in a folder from which vLLM may load a model.

    Files of other formats count only where there are no safetensors, unless `all_formats`.

    Args:
        code: whether Python files count too, as a part of the configuration.

    Raises:
        UnknownFilesError: there are no weights.
        OSError: the folder cannot be read.
    """
    top = sorted(each for each in folder.iterdir() if each.is_file())
    below = sorted(
        each
        for part in sorted(folder.iterdir())
        # vLLM ignores the folder `original` by default; hidden folders are of tools.
        if part.is_dir() and part.name != "original" and not part.name.startswith(".")
        for each in part.iterdir()
        if each.suffix == SAFETENSORS and each.is_file()
    )
    weights = [each for each in top if each.suffix == SAFETENSORS] + below
    if all_formats or not weights:
        weights += [each for each in top if each.suffix in OTHER_WEIGHTS]
    if not weights:
        raise UnknownFilesError(f"there are no weights in {folder}")
    return ModelFiles(folder, tuple(configuration_files(folder, code=code)), tuple(sorted(weights)))


def configuration_files(folder: Path, *, code: bool = False) -> list[Path]:
    """The files of a folder that say how a model computes, in order."""
    return sorted(
        each
        for each in folder.iterdir()
        if each.is_file()
        and (
            each.name in _CONFIGURATIONS
            or (each.suffix == ".json" and any(part in each.name for part in _CONFIGURATION_PARTS))
            or (code and each.suffix == ".py")
        )
    )


def digest_of_files(files: ModelFiles, unchanged_since: float) -> str:
    """32 hex digits that tell these files from others.

    Args:
        unchanged_since: seconds since the epoch. What was written later may not be what vLLM has
            loaded. Blobs of Hugging Face's cache are excepted, because vLLM downloads them itself.

    Raises:
        UnknownFilesError: a file was written later, is beyond a bound, or the file system does not
            answer in time.
        OSError: a file cannot be read.
    """
    threads = CallThreads("omni-weights", _AT_ONCE)
    try:
        return _Digest(threads, unchanged_since).of(files)
    except (FutureTimeoutError, OmniError) as error:
        raise UnknownFilesError(f"the files were not read in {_DEADLINE_S:g} s") from error
    finally:
        threads.close()


def process_began() -> float:
    """When this process was started, in seconds since the epoch; 0.01 s too early at most."""
    # The name of the program, in parentheses, may contain anything.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def places(size: int, number: int) -> list[tuple[int, int]]:
    """Offsets and lengths of `number` pieces across `size` bytes; all bytes if they are few."""
    if size <= number * _PIECE:
        return [(0, size)] if size else []
    return [(i * (size - _PIECE) // (number - 1), _PIECE) for i in range(number)]


@dataclass(frozen=True, slots=True)
class _Safetensors:
    """What the beginning of a file of safetensors says.

    Attributes:
        header: all of it.
        tensors: where each lies in the file, from and to.
    """

    header: bytes
    tensors: list[tuple[int, int]]


class _Digest:
    """Reads the files of one model, several of them at once.

    Args:
        threads: that read.
        unchanged_since: as in `digest_of_files`.
    """

    def __init__(self, threads: CallThreads, unchanged_since: float) -> None:
        self._threads = threads
        self._unchanged_since = unchanged_since
        self._deadline = time.monotonic() + _DEADLINE_S

    def of(self, files: ModelFiles) -> str:
        """See `digest_of_files`."""
        if len(files.weights) > _MAX_FILES:
            raise UnknownFilesError(f"there are more than {_MAX_FILES} files of weights")
        before = self._each(file_version, [*files.configuration, *files.weights])
        for version in before:
            if not version.blob and version.changed > self._unchanged_since:
                raise UnknownFilesError(f"{version.path} was written after this process began")
        hasher = hashlib.blake2b(digest_size=16)
        for path, content in zip(
            files.configuration,
            self._each(canonical_configuration, files.configuration),
            strict=True,
        ):
            hasher.update(msgspec.msgpack.encode((path.name, content)))
        headers = self._headers(files.weights)
        tensors = sum(len(header.tensors) for header in headers if header is not None)
        if tensors > _MAX_TENSORS:
            raise UnknownFilesError(f"there are more than {_MAX_TENSORS} tensors")
        number = max(_LEAST_PLACES, min(_MOST_PLACES, _PLACES // max(1, tensors)))
        digests = self._each(
            lambda pair: _weights(pair[0], pair[1], number),
            list(zip(files.weights, headers, strict=True)),
        )
        for path, digest in zip(files.weights, digests, strict=True):
            name = os.path.relpath(path, files.folder)
            hasher.update(msgspec.msgpack.encode((name, blob_name(path), digest)))
        if self._each(file_version, [*files.configuration, *files.weights]) != before:
            raise UnknownFilesError("the files are being written")
        return hasher.hexdigest()

    def _headers(self, paths: Sequence[Path]) -> list[_Safetensors | None]:
        size = 0
        found = []
        for header in self._each(_header, paths):
            size += 0 if header is None else len(header.header)
            if size > _MAX_HEADERS:
                raise UnknownFilesError(f"the headers have more than {_MAX_HEADERS} bytes")
            found.append(header)
        return found

    def _each(self, read: Callable[[Any], _Result], of: Sequence[Any]) -> list[_Result]:
        """What `read` returns of each, in order; one thread reads every eighth of them."""
        lanes = [of[lane::_AT_ONCE] for lane in range(min(_AT_ONCE, len(of)))]
        calls = [self._threads.start(partial(self._lane, read, lane)) for lane in lanes]
        found = [call.result(max(0.0, self._deadline - time.monotonic())) for call in calls]
        return [found[i % _AT_ONCE][i // _AT_ONCE] for i in range(len(of))]

    def _lane(self, read: Callable[[Any], _Result], of: Iterable[Any]) -> list[_Result]:
        found = []
        for each in of:
            if time.monotonic() > self._deadline:
                raise FutureTimeoutError
            found.append(read(each))
        return found


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A file, as it was at one moment.

    Attributes:
        blob: whether it is a blob of Hugging Face's cache.
        changed: seconds since the epoch, of its own change, of its folder's, or of the symbolic
            links on its path.
    """

    path: Path
    blob: bool
    changed: float
    size: int
    inode: tuple[int, int]


def file_version(path: Path) -> FileVersion:
    """A file as it is now.

    Raises:
        OSError: it is not there.
    """
    found = path.stat()
    folder = path.parent
    changed = [found.st_ctime, folder.stat().st_ctime]
    for part in (path, folder, *folder.absolute().parents):
        link = part.lstat()
        if stat.S_ISLNK(link.st_mode):
            changed.append(link.st_ctime)
    return FileVersion(
        path, bool(blob_name(path)), max(changed), found.st_size, (found.st_dev, found.st_ino)
    )


def blob_name(path: Path) -> str:
    """The name of the blob of Hugging Face's cache to which a file is a link; "" for another."""
    if not path.is_symlink():
        return ""
    target = path.resolve()
    digits = set(target.name) <= set("0123456789abcdef") and len(target.name) in (40, 64)
    return target.name if digits and target.parent.name == "blobs" else ""


def canonical_configuration(path: Path) -> bytes:
    """The content of a file of the configuration, without what says nothing of the model.

    Raises:
        UnknownFilesError: it is too large.
        OSError: it cannot be read.
    """
    if path.stat().st_size > _MAX_CONFIGURATION:
        raise UnknownFilesError(f"{path} has more than {_MAX_CONFIGURATION} bytes")
    content = path.read_bytes()
    try:
        said = json.loads(content)
    except ValueError:
        return content
    if isinstance(said, dict):
        said = {name: said[name] for name in said if name not in NOT_THE_MODEL}
    return json.dumps(said, sort_keys=True).encode()


def _header(path: Path) -> _Safetensors | None:
    """The header of a file of safetensors; None for any other file."""
    if path.suffix != SAFETENSORS:
        return None
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            return None
        header = file.read(length)
    try:
        tensors = list(_tensors(json.loads(header), 8 + length, size))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return _Safetensors(header, tensors)


def _tensors(said: dict[str, Any], start: int, size: int) -> Iterable[tuple[int, int]]:
    for name, tensor in said.items():
        if name == "__metadata__":
            continue
        first, end = tensor["data_offsets"]
        if not (isinstance(first, int) and isinstance(end, int) and 0 <= first <= end):
            raise ValueError(f"offsets of {name}")
        if start + end > size:
            raise ValueError(f"{name} ends behind the file")
        yield start + first, start + end


def _weights(path: Path, header: _Safetensors | None, number: int) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        descriptor = file.fileno()
        found = os.fstat(descriptor)
        if header is None:
            size = found.st_size
            hasher.update(msgspec.msgpack.encode((size, found.st_mtime_ns)))
            hasher.update(os.pread(descriptor, _END_BYTES, 0))
            hasher.update(os.pread(descriptor, _END_BYTES, max(0, size - _END_BYTES)))
            return hasher.digest()
        hasher.update(msgspec.msgpack.encode((found.st_size, header.header)))
        for first, end in header.tensors:
            for offset, length in places(end - first, number):
                piece = os.pread(descriptor, length, first + offset)
                if len(piece) < length:
                    raise OSError(f"{path} ends early")
                hasher.update(piece)
    return hasher.digest()
