# SPDX-License-Identifier: Apache-2.0
"""The digest of the weights that a rank has in its memory: of all their bytes, in one pass.

A path or a sample says too little: one training step in bfloat16 leaves most elements of a weight
as they were, and an edit may touch a single layer. Weights are equal if each name has a tensor of
the same shape, dtype and values. In which order the tensors were made, where they lie, whether they
are contiguous and whether two names share one tensor makes no difference.

On a CPU the bytes are hashed by xxh3. On a device they are not copied to the host: words are mixed
and summed there, in pieces that need a few MiB. A plain sum of words, even of words times odd
numbers, hardly depends on their upper bits; so each word is mixed first, by a function that no two
words have the same value of.

>>> import torch
>>> one = digest_of({"a": torch.arange(6.0), "b": torch.ones(2)})
>>> one == digest_of({"b": torch.ones(2), "a": torch.arange(6.0)})
True
>>> one == digest_of({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)})
False
"""

import contextlib
import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import xxhash

from omni_connector.identity.epochs import WeightsDigest

PIECE_BYTES: Final = 8 << 20
"""Bytes that are hashed between two chances to stop. On a device three pieces of this size are
allocated, and a piece should stay in its cache."""

_COLUMNS: Final = 128
"""Sums of 64 bits that the words of a tensor on a device are added to, in turn."""

_WORD_BYTES: Final = 8
_ROW_BYTES: Final = _WORD_BYTES * _COLUMNS
assert PIECE_BYTES % _ROW_BYTES == 0

# Odd, so that a product with them differs wherever the words do; with about as many ones as zeros.
_FIRST_FACTOR: Final = 0x2545F4914F6CDD1D
_SECOND_FACTOR: Final = 0x369DEA0F31A53F85
_PIECE_STEP: Final = 0x1B873593CC9E2D51


_Result = TypeVar("_Result")

Active = Callable[[], AbstractContextManager[object]]
"""Makes the context in which a piece is hashed: that of a stream of the device, say."""


class UnreadableWeightsError(Exception):
    """The bytes of some weights cannot be read; the message says which and why."""


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """The digest of one tensor.

    Attributes:
        shape, dtype: of the tensor.
        made_by: digests that were made in the same way can be compared.
        content: of the values in row-major order.
    """

    shape: tuple[int, ...]
    dtype: str
    made_by: str
    content: bytes


def digest_of(weights: Mapping[str, torch.Tensor | TensorDigest]) -> WeightsDigest:
    """The digest of these weights, all at once; see `digest_in_pieces`."""
    return _at_once(digest_in_pieces(weights))


def digest_in_pieces(
    weights: Mapping[str, torch.Tensor | TensorDigest],
    processed: Sequence[str] = (),
    active: "Active" = contextlib.nullcontext,
) -> Generator[None, None, WeightsDigest]:
    """Make the digest of these weights, `PIECE_BYTES` between two yields; returns `WeightsDigest`.

    Args:
        weights: by name. A `TensorDigest` stands for a tensor that was hashed before.
        processed: how the weights came from those of the files to what they are in memory. It is a
            part of the form, and not of the content.
        active: makes the context in which each piece is hashed.

    Raises:
        UnreadableWeightsError: a tensor has no bytes that can be read.
    """
    content = hashlib.blake2b(digest_size=16)
    form = hashlib.blake2b(repr(tuple(processed)).encode(), digest_size=16)
    # Two names may share a tensor, or two tensors their memory.
    known: dict[tuple[object, ...], TensorDigest] = {}
    for name in sorted(weights):
        tensor = weights[name]
        if isinstance(tensor, TensorDigest):
            found = tensor
        else:
            place = _place(name, tensor)
            if place not in known:
                known[place] = yield from tensor_digest_in_pieces(name, tensor, active)
            found = known[place]
        head = repr((name, found.shape, found.dtype, found.made_by)).encode(
            "utf-8", "surrogatepass"
        )
        form.update(head)
        content.update(head)
        content.update(found.content)
    return WeightsDigest(content.hexdigest(), form.hexdigest())


def digest_of_tensor(name: str, tensor: torch.Tensor) -> TensorDigest:
    """The digest of one tensor.

    Raises:
        UnreadableWeightsError: it has no bytes that can be read.
    """
    return _at_once(tensor_digest_in_pieces(name, tensor))


def tensor_digest_in_pieces(
    name: str, tensor: torch.Tensor, active: "Active" = contextlib.nullcontext
) -> Generator[None, None, TensorDigest]:
    """Like `digest_of_tensor`, `PIECE_BYTES` between two yields; returns the digest."""
    _require_bytes(name, tensor)
    with active():
        hasher = _hash_on(tensor.device)
    pieces = _pieces(tensor.detach())
    while True:
        with active():  # not around the yield, which may go on beside other work of the thread
            piece = next(pieces, None)
            if piece is None:
                content = hasher.digest()
                break
            hasher.update(piece)
        yield
    return TensorDigest(tuple(tensor.shape), str(tensor.dtype), hasher.made_by, content)


def _at_once(pieces: Generator[None, None, _Result]) -> _Result:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: _Result = end.value
            return result


def _require_bytes(name: str, tensor: torch.Tensor) -> None:
    """Raise `UnreadableWeightsError` if a tensor has no bytes of its own."""
    if tensor.is_meta:
        raise UnreadableWeightsError(f"{name} is on no device")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnreadableWeightsError(f"{name} is no dense tensor")
    if hasattr(tensor, "__tensor_flatten__"):  # torch's own protocol of tensors made of tensors
        raise UnreadableWeightsError(f"{name} is a {type(tensor).__name__}, made of other tensors")


def _place(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    _require_bytes(name, tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in row-major order: 1-D uint8 tensors, of `PIECE_BYTES` but the
    last."""
    if tensor.is_contiguous():
        flat = _bytes_of(tensor)
        for start in range(0, flat.numel(), PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]
        return
    # Copied piece by piece, by indices of the tensor as if it were flat.
    size = PIECE_BYTES // tensor.element_size()
    for start in range(0, tensor.numel(), size):
        number = min(size, tensor.numel() - start)
        yield _bytes_of(_row_major(tensor, start, number))


def _bytes_of(contiguous: torch.Tensor) -> torch.Tensor:
    # Not by `reshape` or `view` alone: an axis of one element may have any stride.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _row_major(tensor: torch.Tensor, start: int, number: int) -> torch.Tensor:
    """So many elements of a tensor in row-major order, from one on; contiguous."""
    if tensor.dim() <= 1:
        return tensor.reshape(-1)[start : start + number].contiguous()
    row = tensor[0].numel()
    first = start // row
    last = -(-(start + number) // row)
    if row * tensor.element_size() <= PIECE_BYTES:
        rows = tensor[first:last].reshape(-1)
        return rows[start - first * row : start - first * row + number].contiguous()
    parts = []
    for i in range(first, last):
        begin = max(start, i * row)
        end = min(start + number, (i + 1) * row)
        parts.append(_row_major(tensor[i], begin - i * row, end - begin))
    return torch.cat(parts)


def _hash_on(device: torch.device) -> "_HostHash | _DeviceHash":
    return _HostHash() if device.type == "cpu" else _DeviceHash(device)


class _HostHash:
    made_by = "xxh3"

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()

    def update(self, piece: torch.Tensor) -> None:
        content: Any = piece.numpy()
        self._hasher.update(content)  # without the interpreter's lock

    def digest(self) -> bytes:
        return self._hasher.digest()


class _DeviceHash:
    """Adds the words of a tensor to sums, each mixed with its place.

    Nothing is waited for before `digest`, which copies the sums to the host.
    """

    made_by = "mixed sums"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums = torch.zeros(_COLUMNS, dtype=torch.int64, device=device)
        self._bytes = 0
        self._number = 0

    def update(self, piece: torch.Tensor) -> None:
        number = piece.numel()
        self._bytes += number
        rows = -(-number // _ROW_BYTES)
        if number % _ROW_BYTES or piece.storage_offset() % _WORD_BYTES or piece.data_ptr() % 8:
            padded = torch.zeros(rows * _ROW_BYTES, dtype=torch.uint8, device=self._device)
            padded[:number] = piece
            piece = padded
        words = piece.view(torch.int64)
        places = torch.arange(len(words), dtype=torch.int64, device=self._device)
        places.mul_(_FIRST_FACTOR).add_(_signed(self._number * _PIECE_STEP))
        mixed = places.bitwise_xor_(words)
        _mix(mixed)
        self._sums += mixed.view(rows, _COLUMNS).sum(0)
        self._number += 1

    def digest(self) -> bytes:
        sums = self._sums.cpu().numpy().tobytes()
        return hashlib.blake2b(sums + self._bytes.to_bytes(8, "little"), digest_size=16).digest()


def _mix(words: torch.Tensor) -> None:
    """Replace each word by one that depends on all its bits; different words stay different."""
    for factor, shift in ((_FIRST_FACTOR, 32), (_SECOND_FACTOR, 29)):
        words.mul_(factor)
        upper = words >> shift
        upper &= (1 << (64 - shift)) - 1  # the shift repeats the sign
        words ^= upper
    words.mul_(_FIRST_FACTOR)


def _signed(number: int) -> int:
    """The same 64 bits as a signed number."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
