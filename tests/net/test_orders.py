# SPDX-License-Identifier: Apache-2.0
"""Signal files: what an engine is asked to do, and what it does not take for an order."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_connector.net import status
from omni_connector.net.orders import (
    DRAIN,
    MAX_BYTES,
    NO_ORDERS,
    ROLE,
    ROLES,
    Orders,
    give_order,
    read_orders,
    take_back,
)
from omni_connector.net.status import StatusFile


@pytest.fixture
def engine(place: Path) -> Path:
    """The path of an engine's status file."""
    return place / "0123456789abcdef.status"


@pytest.mark.parametrize("role", ROLES)
def test_orders_are_read_and_taken_back(engine: Path, role: str) -> None:
    assert read_orders(engine) == NO_ORDERS
    give_order(engine, DRAIN)
    give_order(engine, ROLE, role)
    assert read_orders(engine) == Orders(drain=True, role=role)
    take_back(engine, DRAIN)
    take_back(engine, DRAIN)
    assert read_orders(engine) == Orders(drain=False, role=role)
    take_back(engine, ROLE)
    assert read_orders(engine) == NO_ORDERS
    assert not list(engine.parent.iterdir())


def test_many_may_give_the_same_order_at_once(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the API servers of one engine do, which all get SIGTERM."""
    rename = os.rename
    late = iter(range(8))

    def overtaken(*paths: Path) -> None:
        if next(late, None) is not None:
            give_order(engine, DRAIN)  # of another process, which is faster
        rename(*paths)

    monkeypatch.setattr(os, "rename", overtaken)
    give_order(engine, DRAIN)
    assert read_orders(engine) == Orders(drain=True)
    assert list(engine.parent.iterdir()) == [engine.with_suffix(DRAIN)]


def test_an_order_that_fails_leaves_nothing(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="no space"):
        give_order(engine, DRAIN)
    assert not list(engine.parent.iterdir())


def test_an_operator_may_write_them_by_hand(engine: Path) -> None:
    engine.with_suffix(".drain").touch()
    engine.with_suffix(".role").write_text("decode\n")
    assert read_orders(engine) == Orders(drain=True, role="decode")


def _link(path: Path) -> None:
    other = path.with_name("elsewhere")
    other.write_text("both")
    path.symlink_to(other)


def _foreign(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    path.write_text("both")
    os.chown(path, 12345, 12345)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a link": _link,
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "huge": lambda path: path.write_bytes(b"x" * (MAX_BYTES + 1)),
    "a hole": lambda path: os.truncate(path, 1 << 40) if path.write_text("") == 0 else None,
    "another user's": _foreign,
}


@pytest.mark.parametrize("kind", [DRAIN, ROLE])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_changes_nothing_and_is_named(engine: Path, case: str, kind: str) -> None:
    HOSTILE[case](engine.with_suffix(kind))
    orders = read_orders(engine)
    assert len(orders.refused) == 1
    assert kind in orders.refused[0]
    assert (orders.drain if kind == DRAIN else orders.role) is None
    assert (orders.role if kind == DRAIN else orders.drain) == ("" if kind == DRAIN else False)


@pytest.mark.parametrize("text", ["", "prefill decode", "Both", "both\0", "\xff", "drain"])
def test_a_role_that_there_is_not_is_refused(engine: Path, text: str) -> None:
    engine.with_suffix(ROLE).write_text(text, encoding="latin-1")
    assert read_orders(engine).role is None


def test_orders_go_with_their_engine(place: Path) -> None:
    file = StatusFile(place)
    file.write(b"{}")
    (path,) = place.glob("*.status")
    give_order(path, DRAIN)
    give_order(path, ROLE, "decode")
    path.with_name(f".{path.stem}.0123456789abcdef.role").touch()  # of a command that was killed
    assert file.orders() == Orders(drain=True, role="decode")
    status.sweep(place)
    assert file.orders() == Orders(drain=True, role="decode")
    file.close()
    assert not list(place.iterdir())


def test_orders_to_engines_that_are_gone_are_swept(engine: Path) -> None:
    other = engine.with_name("fedcba9876543210.txt")
    other.touch()
    give_order(engine, DRAIN)
    engine.with_name(f".{engine.stem}.0123456789abcdef.drain").touch()
    status.sweep(engine.parent)
    assert list(engine.parent.iterdir()) == [other]
