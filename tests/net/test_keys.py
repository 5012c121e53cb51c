# SPDX-License-Identifier: Apache-2.0
"""The key file: which one is taken, and what is said of the others."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
import zmq.auth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_connector.errors import ConfigError
from omni_connector.net import keys as keys_module
from omni_connector.net.keys import ClusterKey, load_key, own_key, write_new_key
from omni_connector.net.runtime import loopback_key, runtime_dir


def write(path: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


def certificate(public: bytes, secret: bytes) -> str:
    return f'curve\n    public-key = "{public.decode()}"\n    secret-key = "{secret.decode()}"\n'


def test_what_was_written_is_read(tmp_path: Path) -> None:
    key = write_new_key(tmp_path / "key")
    assert load_key(tmp_path / "key") == load_key(str(tmp_path / "key")) == key
    (tmp_path / "link").symlink_to("key")
    assert load_key(tmp_path / "link") == key
    for mode in (0o400, 0o700):
        (tmp_path / "key").chmod(mode)
        assert load_key(tmp_path / "key") == key
    assert zmq.curve_public(key.secret) == key.public
    assert write_new_key(tmp_path / "another") != key


def test_a_certificate_that_pyzmq_has_made_will_do(tmp_path: Path) -> None:
    public, secret = zmq.auth.create_certificates(tmp_path, "cluster")
    os.chmod(secret, 0o600)
    assert load_key(secret) == ClusterKey(*zmq.auth.load_certificate(secret))  # type: ignore
    os.chmod(public, 0o600)
    with pytest.raises(ConfigError, match="no secret key"):
        load_key(public)


def test_the_secret_is_not_printed(tmp_path: Path) -> None:
    key = write_new_key(tmp_path / "key")
    assert key.secret.decode() not in f"{key!r} {key}"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o777])
def test_a_file_that_others_can_get_at_is_refused(tmp_path: Path, mode: int) -> None:
    write_new_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    for load in (load_key, own_key):
        with pytest.raises(ConfigError, match=rf"mode {mode:o}.*chmod it to 600"):
            load(tmp_path / "key")


def test_a_file_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_new_key(tmp_path / "key")
    monkeypatch.setattr(keys_module.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.getuid()}"):
        load_key(tmp_path / "key")


@pytest.mark.timeout(30)
def test_what_is_no_regular_file_is_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name in ("fifo", "folder"):
        with pytest.raises(ConfigError, match="no regular file"):
            load_key(tmp_path / name)


@pytest.mark.parametrize("name", ["/missing", "/a/b", "/\0", "/" + "x" * 300, ""])
def test_a_file_that_cannot_be_opened_says_how_to_make_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="omni-connector keygen"):
        load_key(name and f"{tmp_path}{name}")


def test_halves_of_two_keys_are_none(tmp_path: Path) -> None:
    (public, _), (_, secret) = zmq.curve_keypair(), zmq.curve_keypair()
    with pytest.raises(ConfigError, match="no valid pair"):
        load_key(write(tmp_path / "key", certificate(public, secret)))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which no key has"):
        load_key(write(tmp_path / "key", bytes(1 << 17)))


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200
)
@given(
    st.binary(max_size=200)
    | st.text(max_size=200)
    | st.sampled_from([b"public-key\n", b"secret-key\npublic-key\n", b'public-key = "a"\n'])
    | st.builds(certificate, *[st.text("09azAZ#%. ", max_size=42).map(str.encode)] * 2)
    | st.builds(certificate, *[st.text("0#", min_size=40, max_size=40).map(str.encode)] * 2)
)
def test_what_holds_no_key_is_refused_with_the_remedy(tmp_path: Path, content: str | bytes) -> None:
    with pytest.raises(ConfigError, match="omni-connector keygen"):
        load_key(write(tmp_path / "key", content))


def test_the_key_of_a_user_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / ".key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: own_key(path), range(40)))
    assert keys == {load_key(path)}
    assert [entry.name for entry in tmp_path.iterdir()] == [".key"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_namespaces_of_a_runtime_folder_share_the_key_of_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(tmp_path / "run"))
    key = loopback_key()
    assert loopback_key() == key
    assert not list(runtime_dir().iterdir())
    monkeypatch.setenv("OMNI_CONNECTOR_RUNTIME_DIR", str(tmp_path / "other"))
    assert loopback_key() != key


def test_a_relative_path_is_told_with_the_folder_from_which_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"omni.key.*looked for in {tmp_path}"):
        load_key("omni.key")
