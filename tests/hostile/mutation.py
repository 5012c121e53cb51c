# SPDX-License-Identifier: Apache-2.0
"""Inputs that nobody honest sends, made of ones that somebody does."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

DEPTH: Final = 5000
"""Levels of the nested values, which no parser may follow to the end by recursion."""

_MAX_GROWTH: Final = 4096

ODD_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 4096, 65535, 65536, 1 << 31, (1 << 32) - 1, 1 << 40,
    (1 << 53) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.0, -0.0, 0.5,
    1e308, float("nan"), float("inf"), float("-inf"), "", " ", "0", "-1", "a", "x" * 300,
    "x" * 2000, "\0", "a\0b", "a\nb", "\r\n", "/", "..", "../../x", "\ud800", "é", "\u202e", "%s%n",
    "127.0.0.1", "0.0.0.0", "::", "fe80::1%lo", "tcp://x", "H0.N0.C0",
    "H999999999999.N999999999999.C999999999999",
    b"", b"\0", b"a" * 16, b"a" * 32, b"\xff" * 17, b"x" * 5000, [], [[]], [0], [-1, -1], [1] * 300,
    [[0, 0]], {}, {"": None}, {"a": {"a": {}}}, {"type": "HandshakeReply"}, {"x" * 300: 0},
)  # fmt: skip
"""Of every type that a message can hold: limits of numbers, NUL, line breaks, odd addresses."""

_Value = TypeVar("_Value")


def nested(depth: int = DEPTH) -> list[Any]:
    """A list in a list, and so on."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


_NESTED: Final = nested()
_ODD_KEYS: Final = ({1: 2}, {None: 0}, {b"x": 0})
# Neither gone through nor changed: they may be put in a value by themselves, never in each other.
_ODD_CONTAINERS: Final = (
    _NESTED,
    *_ODD_KEYS,
    *(odd for odd in ODD_VALUES if isinstance(odd, dict | list)),
)

# What says that more follows than there is, or goes deeper than anybody wants to follow.
_RAW_MSGPACK: Final = tuple(
    msgspec.Raw(raw)
    for raw in (
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdc\xff\xff",
        b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xd4\x01\x00", b"\xd6\xff\0\0\0\0",
        b"\xdb\0\0\0\x02\xff\xfe", b"\xa1\xff", b"\xc1", b"\x91" * DEPTH, b"\x91" * DEPTH + b"\xc0",
        b"\x81\xa1a" * DEPTH + b"\xc0", b"\xdd\0\0\x0f\xff" + b"\xc0" * 0xFFF,
    )
)  # fmt: skip


def flip(raw: bytearray, rng: random.Random) -> bytearray:
    """Flip some bits."""
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return raw


def cut(raw: bytearray, rng: random.Random) -> bytearray:
    """Take bytes out, at an end or between."""
    start, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    return rng.choice((raw[:start], raw[end:], raw[:start] + raw[end:]))


def splice(raw: bytearray, rng: random.Random) -> bytearray:
    """Put some of the bytes in another place, in addition to what is there or instead of it."""
    start, end, place = (rng.randrange(len(raw) + 1) for _ in range(3))
    piece = raw[start : min(end, start + 40)]
    raw[place : place + rng.choice((0, len(piece)))] = piece
    return raw


def extend(raw: bytearray, rng: random.Random) -> bytearray:
    """Add bytes, at an end or between."""
    place = rng.choice((0, len(raw), rng.randrange(len(raw) + 1)))
    count = rng.choice((1, 4, 8, 64, _MAX_GROWTH))
    raw[place:place] = rng.choice((bytes(count), b"\xff" * count, rng.randbytes(count)))
    return raw


def noise(raw: bytearray, rng: random.Random) -> bytearray:
    """Random bytes: in places, or all."""
    place = rng.randrange(len(raw))
    random_bytes = rng.randbytes(rng.randrange(1, 12))
    if rng.random() < 0.2:
        return bytearray(random_bytes)
    raw[place : place + len(random_bytes)] = random_bytes
    return raw


def set_number(raw: bytearray, rng: random.Random) -> bytearray:
    """Write a number that matters over 1, 2, 4 or 8 bytes, in either byte order."""
    size = rng.choice((1, 2, 4, 8))
    number = rng.choice((0, 1, 2, 1 << (8 * size - 1), (1 << 8 * size) - 1, 4096 % (1 << 8 * size)))
    place = rng.randrange(0, max(1, len(raw) - size + 1), rng.choice((1, size)))
    raw[place : place + size] = number.to_bytes(size, rng.choice(("little", "big")))
    return raw


_BYTE_LEVEL: Final[Sequence[Callable[[bytearray, random.Random], bytearray]]] = (
    flip, flip, cut, splice, extend, noise, set_number, set_number,
)  # fmt: skip


def damage(raw: bytes, rng: random.Random) -> bytes:
    """Bytes changed in one or several of the ways above."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not changed:
            break
        changed = rng.choice(_BYTE_LEVEL)(changed, rng)
    return bytes(changed)


def distort(value: Any, rng: random.Random, odd: Sequence[Any] = ODD_VALUES) -> Any:
    """A value of dicts, lists and plain parts in which one to three parts are others.

    Every part, whatever its depth, is as likely to be changed.

    Args:
        value: left as it is.
        rng: decides.
        odd: what parts are replaced by.
    """
    root = [_copied(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _collect(root, places)
        container, key = rng.choice(places)
        action = rng.random()
        if action < 0.1 and container is not root:
            del container[key]
        elif action < 0.2:
            _add(container[key], rng, rng.choice(odd))
        else:
            container[key] = _other(container[key], rng, odd)
    return root[0]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list | tuple) else value


def _collect(container: Any, places: list[tuple[Any, Any]]) -> None:
    parts = container.items() if isinstance(container, dict) else enumerate(container)
    for key, part in parts:
        places.append((container, key))
        if isinstance(part, dict | list) and part and not _is_odd(part):
            _collect(part, places)


def _is_odd(part: Any) -> bool:
    return any(part is odd for odd in _ODD_CONTAINERS)


def _add(part: Any, rng: random.Random, odd: Any) -> None:
    if _is_odd(part):
        return
    if isinstance(part, dict):
        part[rng.choice(("x", "", "type", "a\0b", "x" * 300))] = odd
    elif isinstance(part, list):
        part.insert(rng.randrange(len(part) + 1), odd)


def _other(value: Any, rng: random.Random, odd: Sequence[Any]) -> Any:
    if rng.random() < 0.5:
        return rng.choice(odd)
    if isinstance(value, list):
        return value * rng.choice((0, 0, 2, 300)) if not _is_odd(value) else []
    if isinstance(value, dict):
        return {}
    if isinstance(value, int) and not isinstance(value, bool):
        return value + rng.choice((-1, 1, 16, 1 << 32, -(1 << 32)))
    if isinstance(value, str):
        place = rng.randrange(len(value) + 1)
        return value[:place] + rng.choice(("", "\0", "\n", "/", "9", ".")) + value[place + 1 :]
    if isinstance(value, bytes) and value:
        return bytes(flip(bytearray(value), rng))
    return rng.choice(odd)


def distort_value(value: _Value, rng: random.Random) -> _Value | Any:
    """`distort`, for what takes values as they are: nested ones and too large numbers as well."""
    return distort(value, rng, (*ODD_VALUES, _NESTED, 10**30, *_ODD_KEYS))


def distort_msgpack(raw: bytes, rng: random.Random) -> bytes:
    """A MessagePack message: damaged as bytes, or one that can be decoded and says other things."""
    if rng.random() < 0.4:
        return damage(raw, rng)
    message = distort(msgspec.msgpack.decode(raw), rng, (*ODD_VALUES, *_RAW_MSGPACK))
    try:
        return msgspec.msgpack.encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError):  # half a surrogate pair
        return damage(raw, rng)


def distort_json(raw: bytes, rng: random.Random) -> bytes:
    """The same of JSON."""
    if rng.random() < 0.3:
        return damage(raw, rng)
    if rng.random() < 0.01:
        return raw[:-1] + b',"a":' + b"[" * DEPTH
    message = distort(json.loads(raw), rng, [each for each in ODD_VALUES if _is_json(each)])
    return json.dumps(message, separators=(",", ":")).encode()


def _is_json(value: object) -> bool:
    return not isinstance(value, bytes)
