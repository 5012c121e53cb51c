# SPDX-License-Identifier: Apache-2.0
"""The digest of all bytes of a model's files, and what of it is kept for the next engine."""

import hashlib
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omni_connector.identity import full_digest, hash_files
from omni_connector.identity.full_digest import WeightFilesDigest
from omni_connector.identity.kept_digests import BESIDE, KeptDigests, state_of
from omni_connector.identity.weight_files import ModelFiles, UnknownFilesError, files_of
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.runtime.context import PROCESS_CONTEXT
from tests.patience import wait_until

LONG = 60.0  # a deadline that only a hang reaches


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A runtime folder of its own, and no waiting for a processor that is idle."""
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(tmp_path / "run"))
    monkeypatch.setattr(full_digest, "_IDLE", False)
    monkeypatch.setattr(full_digest, "_LOOK_S", 0.02)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[str]":
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.put(record.getMessage())

    logger = logging.getLogger("vllm.omni_connector.identity")
    monkeypatch.setattr(logger, "handlers", [Keep(logging.WARNING)])
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"hidden_size": 8, "_name_or_path": "here"}')
    (made / "model-1.safetensors").write_bytes(os.urandom(10_000_000))
    (made / "model-2.safetensors").write_bytes(os.urandom(100))
    return made


class Engine:
    """Makes a digest, and notes which files were read for it."""

    def __init__(
        self,
        find: Callable[[], ModelFiles | str | None],
        since: float = math.inf,
    ) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.digest = WeightFilesDigest(find, lambda: since, self.told.put, PROCESS_CONTEXT)

    @property
    def ended(self) -> bool:
        self.digest._thread.join(LONG)
        return not self.digest._thread.is_alive()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(folder: Path, since: float = math.inf) -> Engine:
        made.append(Engine(lambda: files_of(folder), since))
        return made[-1]

    yield make
    for each in made:
        each.digest.close()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that processes were started to read."""
    names: list[str] = []
    start = WeightFilesDigest._start

    def noted(self: WeightFilesDigest, paths: list[Path]) -> None:
        names.extend(path.name for path in paths)
        start(self, paths)

    monkeypatch.setattr(WeightFilesDigest, "_start", noted)
    return names


def told(engine: Engine) -> str:
    return engine.told.get(timeout=LONG)


def test_equal_files_have_equal_digests_wherever_they_lie(
    engine: MakeEngine, model: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(model, elsewhere)
    (elsewhere / "config.json").write_text('{"_name_or_path": "there", "hidden_size": 8}')
    (elsewhere / "README.md").write_text("hello")
    assert told(engine(model)) == told(engine(elsewhere))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        *(  # samples see few of them
            lambda model, byte=byte: flip(model / "model-1.safetensors", byte)
            for byte in (0, 64, 123_457, 9_999_999)
        ),
        lambda model: (model / "config.json").write_text('{"hidden_size": 9}'),
        lambda model: (model / "model-2.safetensors").rename(model / "model-3.safetensors"),
        lambda model: (model / "model-3.safetensors").write_bytes(b"more"),
        lambda model: (model / "model-2.safetensors").unlink(),
    ],
    ids=[*range(4), "configuration", "name", "another file", "one less"],
)
def test_every_byte_and_what_is_in_the_folder_counts(
    engine: MakeEngine, model: Path, change: Callable[[Path], object]
) -> None:
    before = told(engine(model))
    change(model)
    assert told(engine(model)) != before


def test_the_second_engine_reads_only_what_was_written_again(
    engine: MakeEngine, model: Path, read: list[str]
) -> None:
    first = told(engine(model))
    assert sorted(read) == ["model-1.safetensors", "model-2.safetensors"]
    read.clear()
    assert told(engine(model)) == first
    assert read == []
    (model / "model-2.safetensors").write_bytes(b"x" * 100)
    assert told(engine(model)) != first
    assert read == ["model-2.safetensors"]


def test_engines_that_start_at_once_read_the_files_once(
    engine: MakeEngine, model: Path, read: list[str]
) -> None:
    engines = [engine(model) for _ in range(4)]
    assert len({told(each) for each in engines}) == 1
    assert sorted(read) == ["model-1.safetensors", "model-2.safetensors"]


def test_nothing_is_written_beside_the_weights(engine: MakeEngine, model: Path) -> None:
    """An engine that has started before would take the folder for a changed one."""
    before = model.stat().st_ctime_ns
    told(engine(model))
    assert model.stat().st_ctime_ns == before


def test_a_folder_for_them_beside_the_weights_is_used(
    engine: MakeEngine, model: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / BESIDE).mkdir(mode=0o755)
    first = told(engine(model))
    assert [each.name for each in (model / BESIDE).iterdir()] == ["digests.json"]
    read.clear()
    # Another runtime folder, as of another host or after a restart of it.
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(model.parent / "another"))
    assert told(engine(model)) == first
    assert read == []


def test_a_folder_that_others_may_write_to_is_not(engine: MakeEngine, model: Path) -> None:
    (model / BESIDE).mkdir()
    (model / BESIDE).chmod(0o777)
    told(engine(model))
    assert not list((model / BESIDE).iterdir())


def _kept(model: Path) -> Path:
    return KeptDigests(model).path


@pytest.mark.parametrize(
    "hostile",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b"{" * 100_000),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b" " * ((4 << 20) + 1)),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":2')),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"files":{"', b'"files":[{"')),
        lambda path: path.chmod(0o666),
        lambda path: path.chmod(0o620),
        lambda path: (path.rename(path.with_name("real")), path.symlink_to("real")),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=[
        *("torn", "nested", "empty", "long", "another format", "another shape"),
        *("anybody's", "the group's", "a link", "a pipe"),
    ],
)
def test_entries_that_are_torn_or_not_trusted_are_computed_again(
    engine: MakeEngine, model: Path, read: list[str], hostile: Callable[[Path], object]
) -> None:
    first = told(engine(model))
    forged = _kept(model).read_bytes()
    digest = hashlib.sha256((model / "model-2.safetensors").read_bytes()).hexdigest()
    assert digest.encode() in forged
    _kept(model).write_bytes(forged.replace(digest.encode(), b"0" * 64))
    hostile(_kept(model))
    read.clear()
    assert told(engine(model)) == first, "the forged entry was believed"
    assert "model-2.safetensors" in read


def test_an_entry_of_this_user_is_believed(engine: MakeEngine, model: Path) -> None:
    """The control to the test before: what is forged there would have an effect."""
    first = told(engine(model))
    digest = hashlib.sha256((model / "model-2.safetensors").read_bytes()).hexdigest()
    content = _kept(model).read_bytes().replace(digest.encode(), b"0" * 64)
    _kept(model).write_bytes(content)
    assert told(engine(model)) != first


def test_where_digests_cannot_be_kept_they_are_computed_each_time(
    engine: MakeEngine, model: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(KeptDigests, "keep", full)
    assert told(engine(model)) == told(engine(model))
    assert read.count("model-1.safetensors") == 2


def test_a_large_file_of_hugging_faces_cache_is_not_read(
    engine: MakeEngine, model: Path, tmp_path: Path, read: list[str]
) -> None:
    """Its name is the digest; a small one's is git's, and says nothing here."""
    hub = tmp_path / "hub" / "models--m"
    blobs, snapshot = hub / "blobs", hub / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        large = path.name == "model-1.safetensors"
        algorithm = hashlib.sha256 if large else hashlib.sha1
        blob = blobs / algorithm(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(blob)
    assert told(engine(snapshot)) == told(engine(model))
    assert read[0] != "model-1.safetensors"
    assert read.count("model-1.safetensors") == 1, "that of the folder"


def test_a_file_that_changes_while_it_is_read_makes_the_weights_unknown(
    engine: MakeEngine,
    model: Path,
    warnings: "queue.SimpleQueue[str]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = WeightFilesDigest._start

    def disturbed(self: WeightFilesDigest, paths: list[Path]) -> None:
        start(self, paths)
        (model / "model-2.safetensors").write_bytes(b"y" * 100)

    monkeypatch.setattr(WeightFilesDigest, "_start", disturbed)
    each = engine(model)
    assert each.ended
    assert each.told.empty()
    text = warnings.get(timeout=LONG)
    assert "changed while" in text
    assert "model_id" in text


def test_the_process_says_that_a_file_changed_under_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model / "model-1.safetensors"
    assert hash_files._hashed(str(path))["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    fstat = os.fstat

    def growing(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        with path.open("ab") as file:
            file.write(b"z")
        return found

    monkeypatch.setattr(os, "fstat", growing)
    assert hash_files._hashed(str(path)) == {"error": f"{path} changed while it was read"}


def test_what_was_written_after_the_start_may_not_be_what_was_loaded(
    engine: MakeEngine, model: Path, warnings: "queue.SimpleQueue[str]"
) -> None:
    each = engine(model, since=time.time() - 3600)
    assert each.ended
    assert each.told.empty()
    assert "written after this process began" in warnings.get(timeout=LONG)


def test_a_process_that_is_killed_makes_the_weights_unknown(
    engine: MakeEngine,
    model: Path,
    warnings: "queue.SimpleQueue[str]",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = WeightFilesDigest._start

    def killed(self: WeightFilesDigest, paths: list[Path]) -> None:
        start(self, paths)
        assert self._process is not None
        self._process.kill()

    monkeypatch.setattr(WeightFilesDigest, "_start", killed)
    each = engine(model)
    assert each.ended
    assert each.told.empty()
    assert "has ended" in warnings.get(timeout=LONG)
    monkeypatch.undo()


def test_an_engine_that_ends_leaves_no_process_and_no_lock(model: Path, tmp_path: Path) -> None:
    os.mkfifo(model / "model-9.safetensors")  # whoever reads it waits

    def find() -> ModelFiles:
        weights = tuple(sorted(model.glob("*.safetensors")))
        return ModelFiles(model, (), weights)

    each = Engine(find)
    wait_until(lambda: each.digest._process is not None)
    process = each.digest._process
    assert process is not None
    each.digest.close()
    each.digest.close()
    assert each.ended
    assert process.poll() is not None
    with KeptDigests(model) as kept:
        assert kept.acquire()


def unknown() -> ModelFiles:
    raise UnknownFilesError("s3://bucket is no path")


@pytest.mark.parametrize(
    ("find", "digest", "warning"),
    [
        (lambda: "that of dummy weights", "that of dummy weights", None),
        (lambda: None, None, None),  # the operator names the model
        (unknown, None, "s3://bucket is no path"),
        (lambda: files_of(Path("/no/model")), None, "No such file"),
    ],
    ids=["digest", "named", "unknown", "unreadable"],
)
def test_where_no_file_is_read_the_digest_or_the_reason_is_told_once(
    find: Callable[[], ModelFiles | str | None],
    digest: str | None,
    warning: str | None,
    warnings: "queue.SimpleQueue[str]",
) -> None:
    each = Engine(find)
    assert each.ended
    assert (each.told.get(timeout=LONG) if digest else None) == digest
    assert each.told.empty()
    assert warning is None or warning in warnings.get(timeout=LONG)
    assert warnings.empty()


def test_the_start_does_not_wait_for_slow_files() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def find() -> str:
        asked.set()
        assert go_on.wait(LONG)
        return "late"

    each = Engine(find)  # returns although nothing was found yet
    assert asked.wait(LONG)
    assert each.told.empty()
    go_on.set()
    assert told(each) == "late"


def test_a_lock_is_held_by_one(model: Path) -> None:
    with KeptDigests(model) as one, KeptDigests(model) as two:
        assert one.acquire()
        assert one.acquire()
        assert not two.acquire()
        one.close()
        assert two.acquire()


def test_entries_of_other_files_stay(model: Path) -> None:
    with KeptDigests(model) as kept:
        for name in ("model-1.safetensors", "model-2.safetensors"):
            kept.keep({name: (state_of(model / name), "a" * 64)})
        assert kept.digest(model / "model-1.safetensors") == "a" * 64
        assert kept.digest(model / "model-2.safetensors") == "a" * 64
        assert kept.digest(model / "config.json") is None
