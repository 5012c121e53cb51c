# SPDX-License-Identifier: Apache-2.0
"""`omni-connector keygen`: a key that can be used, and none that is lost."""

import os
import stat
from pathlib import Path

import pytest

from omni_connector.cli.main import main
from omni_connector.net.keys import load_key


def test_it_makes_a_key_that_can_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    assert main(["keygen", str(path)]) == 0
    key = load_key(path)
    out = capsys.readouterr().out
    assert str(path) in out
    assert key.public.decode() in out
    assert key.secret.decode() not in out


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_its_user_can_read_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert main(["keygen", str(tmp_path / "key")]) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_at_no_time_can_others_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has opened a file keeps it, whatever its mode becomes."""
    modes = []
    fchmod = os.fchmod

    def see(fd: int, mode: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        fchmod(fd, mode)

    monkeypatch.setattr(os, "fchmod", see)
    before = os.umask(0)
    try:
        assert main(["keygen", str(tmp_path / "key")]) == 0
    finally:
        os.umask(before)
    assert modes == [0o600]


def test_a_file_that_exists_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    path.write_text("mine")
    assert main(["keygen", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "not overwritten" in capsys.readouterr().err


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert main(["keygen", str(tmp_path / "link")]) == 2
    assert not (tmp_path / "target").exists()


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", str(tmp_path / "missing" / "key")]) == 2
    assert "missing" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["keygen", str(tmp_path / "key")]) == 2
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in capsys.readouterr().err
