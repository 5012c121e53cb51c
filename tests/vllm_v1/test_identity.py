# SPDX-License-Identifier: Apache-2.0
"""Engines with other weights share no KV, wherever their models lie and whatever their names."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig

from omni_connector.config import OmniConfig
from omni_connector.identity import weight_files
from omni_connector.identity.weight_files import (
    UnknownFilesError,
    digest_of_files,
    files_of,
    places,
    process_began,
)
from omni_connector.stores.shared_blocks import key_prefix, readers_id
from omni_connector.vllm_v1 import assembly
from omni_connector.vllm_v1.identity import compatibility, weights_id
from omni_connector.vllm_v1.metadata import OmniHandshakeMetadata
from omni_connector.vllm_v1.specs import group_shapes
from tests import inspection
from tests.toy import BLOCK, LAYERS, kv_cache_config, write_model

from .harness import HANDOFF, InProcessEngine, prompt, wait

pytestmark = pytest.mark.vllm

TEXT = prompt(4 * BLOCK + 3)


def safetensors(path: Path, **tensors: bytes) -> None:
    """Write a file of these tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, content in tensors.items():
        offsets = [end, end + len(content)]
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": offsets}
        end += len(content)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


def digest(folder: Path, since: float = math.inf) -> str:
    return digest_of_files(files_of(folder), since)


def folder(tmp_path: Path, name: str) -> Path:
    """A model of two files of weights."""
    made = tmp_path / name
    made.mkdir(parents=True)
    (made / "config.json").write_text('{"hidden_size": 8, "model_type": "llama"}')
    safetensors(made / "model-1.safetensors", a=bytes(100_000), b=b"\1" * 70)
    safetensors(made / "model-2.safetensors", c=b"\2" * 5_000)
    return made


# The digest of files


def test_the_same_content_has_the_same_digest_at_every_path_and_in_every_process(tmp_path):
    one = folder(tmp_path, "one")
    two = tmp_path / "elsewhere" / "two"
    shutil.copytree(one, two, copy_function=shutil.copyfile)  # with another modification time
    (two / "README.md").write_text("hello")
    said = {"transformers_version": "9", "_name_or_path": "/x"}
    said |= json.loads((one / "config.json").read_text())
    (two / "config.json").write_text(json.dumps(said, indent=4))
    linked = tmp_path / "linked"
    linked.symlink_to(two)
    assert digest(one) == digest(two) == digest(linked)
    code = (
        "import math, pathlib, sys; from omni_connector.identity.weight_files import *; "
        "print(digest_of_files(files_of(pathlib.Path(sys.argv[1])), math.inf))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(two)], check=True, capture_output=True, text=True
    )
    assert other.stdout.strip() == digest(one)


def rewritten(path: Path, offset: int) -> None:
    """Change one byte and nothing else that a listing shows."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: rewritten(model / "model-1.safetensors", -1),  # the last byte of b
        lambda model: rewritten(model / "model-1.safetensors", -71),  # the last byte of a
        lambda model: rewritten(model / "model-1.safetensors", -100_070),  # the first byte of a
        lambda model: rewritten(model / "model-1.safetensors", 12),  # in the header
        lambda model: safetensors(model / "model-3.safetensors", d=b"x"),
        lambda model: (model / "model-2.safetensors").rename(model / "model-4.safetensors"),
        lambda model: (model / "config.json").write_text('{"hidden_size": 9}'),
        lambda model: (model / "preprocessor_config.json").write_text('{"size": 9}'),
        lambda model: (model / "hf_quant_config.json").write_text('{"bits": 4}'),
    ],
    ids=range(9),
)
def test_other_content_has_another_digest(tmp_path, change):
    model = folder(tmp_path, "model")
    before = digest(model)
    change(model)
    assert digest(model) != before


def test_every_tensor_is_sampled_from_end_to_end():
    for size in (0, 1, 64, 128, 129, 1000, 10**9):
        for number in (2, 3, 64):
            found = places(size, number)
            assert sum(length for _, length in found) <= max(64 * number, 0)
            assert all(0 <= offset <= offset + length <= size for offset, length in found)
            if size:
                assert found[0][0] == 0
                assert sum(found[-1]) == size
            gaps = [b[0] - a[0] for a, b in itertools.pairwise(found)]
            assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_is_read_is_bounded(tmp_path, monkeypatch):
    model = tmp_path / "large"
    model.mkdir()
    tensors = {f"t{number}": bytes(30_000) for number in range(300)}
    safetensors(model / "model.safetensors", **tensors)
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *a: read.append(len(pread(*a))) or pread(*a))
    digest(model)
    assert max(read) == 64
    assert len(read) == 300 * 64
    read.clear()
    monkeypatch.setattr(weight_files, "_PLACES", 900)
    digest(model)
    assert len(read) == 900
    read.clear()
    monkeypatch.setattr(weight_files, "_PLACES", 10)
    digest(model)
    assert len(read) == 600  # two of each tensor


def test_of_other_formats_size_time_and_ends_count(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "pytorch_model.bin"
    weights.write_bytes(bytes(300_000))
    os.utime(weights, ns=(5, 5))
    seen = {digest(model)}
    rewritten(weights, 0)
    seen.add(digest(model))
    rewritten(weights, -1)
    seen.add(digest(model))
    os.utime(weights, ns=(5, 6))
    seen.add(digest(model))
    assert len(seen) == 4
    safetensors(model / "model.safetensors", a=b"x")
    alone = digest(model)
    rewritten(weights, 0)
    assert digest(model) == alone  # it is not loaded any more
    both = files_of(model, all_formats=True)
    assert len(both.weights) == 2


def test_what_is_no_safetensors_is_told_as_any_other_file(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "model.safetensors"
    for content in (b"", b"short", b"\xff" * 99, b"\x05" + bytes(7) + b"[1,2]", b"x" * 70_000):
        weights.write_bytes(content)
        digest(model)


def snapshot(tmp_path: Path, where: str, name: str, commit: str = "c" * 40) -> Path:
    """A snapshot as in Hugging Face's cache, whose blob has a name."""
    blobs = tmp_path / where / "blobs"
    made = tmp_path / where / "snapshots" / commit
    blobs.mkdir(parents=True)
    made.mkdir(parents=True)
    safetensors(blobs / name, a=bytes(1_000_000))
    (made / "model.safetensors").symlink_to(blobs / name)
    return made


def test_a_blob_of_hugging_face_is_told_by_its_name_too(tmp_path):
    one = snapshot(tmp_path, "one", "a" * 64)
    same = snapshot(tmp_path, "same", "a" * 64, commit="d" * 40)
    other = snapshot(tmp_path, "other", "b" * 64)
    assert digest(one) == digest(same) != digest(other)
    began = time.time() - 1000
    assert digest(one, began) == digest(one)  # vLLM has downloaded it itself


def test_what_was_written_after_the_process_began_is_unknown(tmp_path):
    model = folder(tmp_path, "model")
    with pytest.raises(UnknownFilesError, match="written after"):
        digest(model, process_began())
    time.sleep(0.05)
    now = time.time()
    assert digest(model, now)
    time.sleep(0.05)
    link = tmp_path / "current"
    link.symlink_to(model)
    with pytest.raises(UnknownFilesError, match="written after"):
        digest(link, now)


def test_a_process_knows_when_it_began():
    before = time.time()
    code = "from omni_connector.identity.weight_files import process_began; print(process_began())"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert before - 1 < float(told.stdout) < time.time()


def test_files_that_change_while_they_are_read_are_unknown(tmp_path, monkeypatch):
    model = folder(tmp_path, "model")
    weights = weight_files._weights

    def interrupted(path, *rest):
        found = weights(path, *rest)
        path.write_bytes(path.read_bytes() + b"more")
        return found

    monkeypatch.setattr(weight_files, "_weights", interrupted)
    with pytest.raises(UnknownFilesError, match="being written"):
        digest(model)


def test_a_file_system_that_hangs_ends_the_wait(tmp_path, monkeypatch):
    model = folder(tmp_path, "model")
    monkeypatch.setattr(weight_files, "_DEADLINE_S", 0.1)
    monkeypatch.setattr(weight_files, "_header", lambda _: time.sleep(0.5))
    with pytest.raises(UnknownFilesError, match="not read"):
        digest(model)


# What an engine says of itself, by vLLM's own configuration


def key(path: str, extra: dict[str, object] | None = None, load=None, ranks=1, **options):
    """The compatibility key of an engine of a model at a path, and its weights."""
    vllm_config = VllmConfig(
        model_config=ModelConfig(model=path, skip_tokenizer_init=True, dtype="float16", **options),
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(**(load or {})),
    )
    vllm_config.parallel_config.tensor_parallel_size = ranks
    config = OmniConfig.load(extra or {}, {})
    weights = weights_id(config, vllm_config, math.inf)
    pages = (tuple("N16.C64" for _ in range(LAYERS)),)
    groups = group_shapes(kv_cache_config(9, BLOCK), pages, ("FLASH_ATTN",))
    workers = [OmniHandshakeMetadata((), groups)]
    return compatibility(config, vllm_config, workers, weights), weights


def alike(one, two) -> bool:
    """Whether two engines hand off to each other, and share, which must be the same here."""
    same = one.difference(two) is None
    assert same == (two.difference(one) is None)
    assert same == (readers_id(one, "h") == readers_id(two, "h"))
    assert same == (key_prefix("n", one, "h", "1") == key_prefix("n", two, "h", "1"))
    return same


@pytest.fixture
def models(tmp_path):
    """Makes folders of models of the toy's shape."""

    def make(name: str, weights: bytes = b"toy", **changes: object) -> str:
        made = tmp_path / name
        made.mkdir(parents=True, exist_ok=True)
        write_model(made, weights)
        if changes:
            said = json.loads((made / "config.json").read_text()) | changes
            (made / "config.json").write_text(json.dumps(said))
        return str(made)

    return make


def test_equal_models_at_two_paths_find_each_other(models):
    one, two = key(models("a/model"))[0], key(models("b/other"))[0]
    assert one.model != two.model
    assert alike(one, two)


def test_one_relative_path_in_two_folders_names_two_models(models, tmp_path, monkeypatch):
    found = []
    for name, weights in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        models(f"{name}/model", weights)
        monkeypatch.chdir(tmp_path / name)
        found.append(key("model")[0])
    assert found[0].difference(found[1])[0] == "weights"
    assert not alike(found[0], found[1])
    assert alike(found[0], found[2])


def test_models_that_are_replaced_at_their_path_are_others(models):
    # As in two containers that mount their own model at the same path.
    first, again = key(models("model"))[0], key(models("model"))[0]
    assert alike(first, again)
    other = key(models("model", b"yot"))[0]
    assert first.model == other.model
    assert not alike(first, other)
    assert not alike(first, key(models("model", rope_theta=5))[0])


def test_a_tensorized_model_is_told_by_its_own_files(models, tmp_path):
    model = models("model")
    found = []
    for name in ("one", "two"):
        file = tmp_path / f"{name}.tensors"
        file.write_bytes(name.encode() * 100_000)
        os.utime(file, ns=(5, 5))
        load = {
            "load_format": "tensorizer",
            "model_loader_extra_config": {"tensorizer_uri": str(file)},
        }
        found.append(key(model, load=load))
    assert not alike(found[0][0], found[1][0])
    assert not alike(found[0][0], key(model)[0])


@pytest.mark.parametrize(
    "load",
    [
        {
            "load_format": "tensorizer",
            "model_loader_extra_config": {"tensorizer_uri": "s3://a/b.tensors"},
        },
        {
            "load_format": "tensorizer",
            "model_loader_extra_config": {"tensorizer_uri": "/missing/b.tensors"},
        },
        {"load_format": "ipc_cache"},
        {"load_format": "made by a plugin"},
    ],
    ids=str,
)
def test_weights_from_elsewhere_are_unknown(models, load, log):
    found, weights = key(models("model"), load=load)
    assert weights is None
    assert len(log) == 1
    assert "model_id" in log[0]
    assert found.difference(key(models("model"))[0]) is None  # the operator routes by name
    named, weights = key(models("model"), {"model_id": "m"}, load=load)
    assert weights is None
    assert len(log) == 1
    assert alike(named, key(models("other", b"x"), {"model_id": "m"})[0])
    assert named.difference(found)[0] == "model"


def test_weights_of_a_uri_or_a_missing_folder_or_another_hub_are_unknown(models, log, monkeypatch):
    model = models("model")

    def weights(**changes: object) -> str | None:
        config = SimpleNamespace(
            model=model,
            model_weights="",
            revision=None,
            trust_remote_code=False,
            hf_config=SimpleNamespace(to_dict=dict),
        )
        vars(config).update(changes)
        load = SimpleNamespace(
            load_format="auto", model_loader_extra_config={}, download_dir=str(Path(model).parent)
        )
        vllm_config = SimpleNamespace(model_config=config, load_config=load)
        return weights_id(OmniConfig.load({}, {}), vllm_config, math.inf)

    assert weights() is not None
    assert not log
    assert weights(model_weights="s3://bucket/model") is None
    assert weights(model="/no/such/folder") is None
    assert weights(model="nobody/nothing") is None
    said = {"text_model_id": "meta/llama"}
    assert weights(hf_config=SimpleNamespace(to_dict=lambda: said)) is None
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert weights(model="nobody/nothing") is None
    assert len(log) == 5


def test_a_snapshot_is_found_by_the_name_of_its_repository(models, tmp_path, log):
    cache = tmp_path / "cache"
    commit = "a" * 40
    made = cache / "models--someone--toy" / "snapshots" / commit
    made.mkdir(parents=True)
    write_model(made)
    (made.parents[1] / "refs").mkdir()
    (made.parents[1] / "refs" / "main").write_text(commit)

    def weights(loaded: str) -> str | None:
        config = SimpleNamespace(
            model="someone/toy",
            model_weights="",
            revision=None,
            trust_remote_code=False,
            hf_config=SimpleNamespace(to_dict=dict, _commit_hash=loaded),
        )
        load = SimpleNamespace(
            load_format="auto", model_loader_extra_config={}, download_dir=str(cache)
        )
        vllm_config = SimpleNamespace(model_config=config, load_config=load)
        return weights_id(OmniConfig.load({}, {}), vllm_config, math.inf)

    assert weights(commit) == key(models("copy"))[1]
    assert weights("b" * 40) is None  # `main` has moved on since vLLM loaded it
    assert len(log) == 1


def test_dummy_weights_are_those_of_their_configuration_and_ranks(models, log):
    dummy = {"load_format": "dummy"}
    first = key(models("a", b"1"), load=dummy)[0]
    assert alike(first, key(models("b", b"2"), load=dummy)[0])  # nobody reads the file
    assert not alike(first, key(models("c", rope_theta=5), load=dummy)[0])
    assert not alike(first, key(models("a", b"1"))[0])
    # Each rank draws its own shards, which are none of the whole tensors'.
    assert key(models("a"), load=dummy, ranks=2)[1] != first.weights
    assert not log


# Engines

SHARING = {"share": True}


@pytest.fixture
def at(sharer, tmp_path):
    """Makes engines of models with these weights, at these paths."""

    def make(name: str, weights: bytes = b"", *, known: bool = True, extra=None, **options):
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        write_model(path, weights)
        if not known:
            (path / "model.safetensors").unlink()
        return sharer(at=path, weights=weights, extra={**SHARING, **(extra or {})}, **options)

    return make


def loaded(engine: InProcessEngine) -> int:
    """Tokens that an engine has from others."""
    return engine.count("tokens_from_host") + engine.count("tokens_shared")


def test_a_model_that_is_replaced_in_place_gets_no_hits(at, shelf, engine, tmp_path):
    first, again = at("model", b"first"), at("copy", b"first")
    expected = first.generate(TEXT, 6).tokens
    wait(lambda: len(shelf.entries) >= 4)
    assert again.generate(TEXT, 6).tokens == expected
    assert loaded(again) == 4 * BLOCK
    second = at("model", b"other")
    answer = first.generate(TEXT, 1, params=HANDOFF).params
    tokens = second.generate(TEXT, 6, params=answer).tokens
    reference = engine(at=tmp_path / "model", weights=b"other").generate(TEXT, 6).tokens
    assert tokens == reference != expected
    assert loaded(second) == 0
    assert second.failures() == {"incompatible_peer": 1}
    first.directory.close(bytes.fromhex(answer["omni_token"]))


@pytest.fixture
def _files_are_old(monkeypatch):
    """In this process models are written at any time."""
    monkeypatch.setattr(assembly, "process_began", lambda: math.inf)


@pytest.mark.usefixtures("_files_are_old")
@pytest.mark.parametrize("hashes", [True, False], ids=["known files", "names alone"])
def test_engines_of_other_layouts_compare_the_files(at, tokens, hashes):
    """They lie at two paths, so that names alone do not suffice."""
    prefill = at("model", ranks=2, hashes_files=hashes)
    decode = at("copy", hashes_files=hashes)
    if hashes:
        wait(lambda: inspection.weight_files(prefill.half) and inspection.weight_files(decode.half))
    answer = prefill.generate(TEXT, params=HANDOFF).params
    assert decode.generate(TEXT, 6, params=answer).tokens == tokens(TEXT, 6)
    assert decode.count("handoffs_received") == hashes
    assert decode.failures() == ({} if hashes else {"incompatible_peer": 1})
    if not hashes:
        prefill.directory.close(bytes.fromhex(answer["omni_token"]))


@pytest.mark.usefixtures("_files_are_old")
def test_engines_of_other_layouts_and_other_weights_refuse_each_other(at, engine, tmp_path, log):
    """The model at one path was replaced between their starts, so that names do not tell."""
    prefill = at("model", b"first", ranks=2, hashes_files=True)
    wait(lambda: inspection.weight_files(prefill.half))
    decode = at("model", b"other", hashes_files=True)
    wait(lambda: inspection.weight_files(decode.half))
    answer = prefill.generate(TEXT, params=HANDOFF).params
    tokens = decode.generate(TEXT, 6, params=answer).tokens
    assert tokens == engine(at=tmp_path / "model", weights=b"other").generate(TEXT, 6).tokens
    assert decode.failures() == {"incompatible_peer": 1}
    assert any("weight_files" in line for line in log)
    prefill.directory.close(bytes.fromhex(answer["omni_token"]))


def test_engines_whose_files_cannot_be_read_share_by_what_is_in_memory(at, shelf, log, tokens):
    engines = [at("model"), at("model", known=False)]
    assert len(log) == 1  # of the files
    for engine in engines:
        assert engine.generate(TEXT, 6).tokens == tokens(TEXT, 6)
        wait(lambda: len(shelf.entries) >= 4)
    assert loaded(engines[1]) == 4 * BLOCK


def test_engines_of_unknown_files_hand_off_by_name_and_share_with_a_model_id(at, tokens):
    one, two = at("model", known=False), at("model", known=False)
    answer = one.generate(TEXT, params=HANDOFF).params
    assert two.generate(TEXT, 6, params=answer).tokens == tokens(TEXT, 6)
    assert two.count("handoffs_received") == 1
    three, four = (at("model", known=False, extra={"model_id": "m"}) for _ in range(2))
    text = prompt(4 * BLOCK + 3, seed=9)
    assert three.generate(text, 6).tokens == tokens(text, 6)
    assert four.generate(text, 6).tokens == tokens(text, 6)
    assert loaded(four) == 4 * BLOCK
