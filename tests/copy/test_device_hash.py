# SPDX-License-Identifier: Apache-2.0
"""Checksums that a device makes: the same kernels on the host, one thread for all."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.copy import device_hash
from omni_connector.copy.cuda import CudaStream
from omni_connector.copy.device_hash import DeviceHash, first_sums, hashable, room_words
from omni_connector.copy.stream import RowPart
from omni_connector.runtime.machine_code import code_is_denied, compiled, kernel

needs_code = pytest.mark.skipif(code_is_denied(), reason="compiled code may not run here")


class KernelsOnHost:
    """Kernels as a host runs them."""

    def __init__(self, name: str) -> None:
        pytest.importorskip("llvmlite")
        self._engine = compiled(kernel(device_hash.__name__, name))

    def launch(self, name: str, threads: int, *arguments: Any) -> None:
        kind = ctypes.CFUNCTYPE(None, *(type(each) for each in arguments))
        kind(self._engine.get_function_address(name))(*arguments)


class OnHost(DeviceHash):
    """The hash as a host makes it."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._kernels: Any = KernelsOnHost("hash_rows.ll")


@pytest.fixture(scope="module")
def on_host() -> OnHost:
    return OnHost()


@needs_code
@given(
    count=st.integers(1, 40),
    nbytes=st.one_of(
        st.integers(4, 200).map(lambda stripes: 64 * stripes),
        # About whole blocks.
        st.tuples(st.integers(1, 9), st.integers(-1, 1)).map(lambda at: 1024 * at[0] + 64 * at[1]),
    ),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_the_kernels_hash_as_xxhash_does(
    on_host: OnHost, count: int, nbytes: int, seed: int, data: st.DataObject
) -> None:
    content = np.random.default_rng(seed).integers(0, 256, (count, nbytes), np.uint8)
    room = torch.empty(room_words(content.nbytes), dtype=torch.int64)
    rows = torch.from_numpy(content.view(np.int8))
    expected = [xxhash.xxh3_64_intdigest(row.data) for row in content]
    assert on_host(rows, room).numpy().view(np.uint64).tolist() == expected
    sums = first_sums(count)
    first = 0
    while first < nbytes:  # parts of any length, as layers have
        end = first + 64 * data.draw(st.integers(1, (nbytes - first) // 64))
        part = rows[:, first:end].contiguous()
        found = on_host(part, room, RowPart(first, nbytes, sums))
        first = end
    assert found.numpy().view(np.uint64).tolist() == expected


@needs_code
def test_kernels_that_hash_otherwise_are_found_out(
    on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host._check()
    monkeypatch.setattr(on_host._kernels, "launch", lambda *_: None)
    with pytest.raises(RuntimeError, match="differ from those of xxhash"):
        on_host._check()


@pytest.mark.parametrize(
    ("nbytes", "can"), [(192, False), (256, True), (300, False), (1 << 20, True)]
)
def test_which_rows_they_hash(nbytes: int, can: bool) -> None:
    assert hashable(nbytes) == can


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_hashes_behind_what_its_stream_has_to_do_before() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream = CudaStream(device)
    assert stream.can_hash(4096)
    rows = torch.zeros((64, 1 << 20), dtype=torch.int8, device=device)
    stream.prepare_hash(rows.numel())
    sums = stream.host_buffer(8 * len(rows)).view(torch.int64)
    torch.cuda.synchronize()
    with stream.active():
        rows.fill_(7)
        stream.hash(rows, there=stream.mark(), sums=sums)
    stream.finish(stream.mark())
    expected = xxhash.xxh3_64_intdigest(bytes([7]) * (1 << 20))
    assert sums.numpy().view(np.uint64).tolist() == [expected] * 64
    stream.close()
