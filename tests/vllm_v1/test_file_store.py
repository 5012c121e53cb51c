# SPDX-License-Identifier: Apache-2.0
"""Engines that share prefixes through the files of a folder: every answer is an engine's alone."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_connector.prefix import store_jobs
from tests.toy import BLOCK

from .harness import InProcessEngine, assert_clean
from .stores import PREFIX, QUESTION, landed

pytestmark = pytest.mark.vllm

FAMILIES = ["full", "window", "window and full", "latent"]
BLOCKS = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def sharer(engine, folder: Path) -> Callable[..., InProcessEngine]:
    """Makes engines whose store is that folder."""
    store = {"path": str(folder), "gib": 1, "lookup_timeout_s": 30}

    def make(role: str = "kv_both", **options: Any) -> InProcessEngine:
        return engine(role, extra={"store": store}, **options)

    return make


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def publish(engine: InProcessEngine, folder: Path) -> None:
    """Have an engine compute the prefix, until its blocks lie in the folder."""
    engine.generate(PREFIX)
    landed(engine)
    assert files(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.values
def test_a_prefix_is_found_by_another_engine_and_after_a_restart(
    sharer, folder, engine, family, ranks
):
    options = {"family": family, "ranks": ranks}
    first, second = sharer(**options), sharer(**options)
    publish(first, folder)
    expected = engine(family=family, ranks=ranks).generate(QUESTION, 20).tokens
    assert second.generate(QUESTION, 20).tokens == expected
    assert second.count("tokens_shared") == BLOCKS * BLOCK
    assert not second.failures()
    assert_clean(first, second)
    for each in (first, second):
        each.shutdown()
    third = sharer(**options)
    assert third.generate(QUESTION, 20).tokens == expected
    assert third.count("tokens_shared") == BLOCKS * BLOCK


def spoil(folder: Path) -> None:
    """Change a byte of every block."""
    for each in files(folder):
        content = bytearray(each.read_bytes())
        content[3] ^= 0x10
        each.write_bytes(content)


def test_wrong_bytes_that_nobody_checks_are_noticed_by_these_tests(
    sharer, folder, tokens, monkeypatch
):
    monkeypatch.setattr(store_jobs, "verify", lambda *args: None)
    first, second = sharer(), sharer()
    publish(first, folder)
    spoil(folder)
    answer = second.generate(QUESTION, 6)
    assert second.count("tokens_shared") == BLOCKS * BLOCK
    assert answer.tokens != tokens(QUESTION, 6)


def test_wrong_bytes_are_computed_anew_and_replaced(sharer, folder, tokens):
    first, second = sharer(), sharer()
    publish(first, folder)
    spoil(folder)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.failures() == {"store_checksum_mismatch": 1}
    assert second.count("tokens_shared") == 0
    landed(second)
    third = sharer()
    assert third.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert third.count("tokens_shared") == BLOCKS * BLOCK
    assert_clean(first, second, third)


def test_torn_files_are_computed_anew(sharer, folder, tokens):
    first, second = sharer(), sharer()
    publish(first, folder)
    for each in files(folder):
        os.truncate(each, 100)
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.failures() == {"store_blocks_gone": 1, "store:other length": BLOCKS}
    landed(second)
    third = sharer()
    assert third.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert third.count("tokens_shared") == BLOCKS * BLOCK


def test_a_full_disk_means_misses(sharer, folder, tokens, monkeypatch):
    def write(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    first, second = sharer(), sharer()
    with monkeypatch.context() as full:
        full.setattr("omni_connector.stores.file_folder.os.write", write)
        assert first.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
        landed(first)
    assert not files(folder)
    assert first.failures()["store:ENOSPC"] == BLOCKS
    assert second.generate(QUESTION, 6).tokens == tokens(QUESTION, 6)
    assert second.count("tokens_shared") == 0
    assert_clean(first, second)


def test_a_folder_that_others_can_write_to_stops_the_engine(sharer, folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Exception, match="others can write to"):
        sharer()
    folder.chmod(0o700)
