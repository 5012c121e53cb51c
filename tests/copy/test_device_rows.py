# SPDX-License-Identifier: Apache-2.0
"""Rows of the host that a device's kernels read and write: the same kernels on the host."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_connector.copy.cuda import CudaStream
from omni_connector.copy.device_kernels import DeviceKernels
from omni_connector.copy.device_rows import WORD, DeviceRows, device_rows
from omni_connector.runtime.machine_code import code_is_denied

from .test_device_hash import KernelsOnHost

pytestmark = pytest.mark.skipif(code_is_denied(), reason="compiled code may not run here")


class OnHost(DeviceRows):
    """The moves as a host makes them."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._kernels: Any = KernelsOnHost("move_rows.ll")


@pytest.fixture(scope="module")
def on_host() -> OnHost:
    return OnHost()


def aligned(count: int, nbytes: int, seed: int) -> np.ndarray:
    """Random bytes `(count, nbytes)` from a multiple of `WORD` on."""
    raw = np.random.default_rng(seed).integers(-128, 128, count * nbytes + WORD, np.int8)
    first = -raw.ctypes.data % WORD
    return raw[first : first + count * nbytes].reshape(count, nbytes)


@given(
    words=st.integers(1, 9),
    gap=st.integers(0, 3),
    order=st.permutations(range(6)),
    count=st.integers(0, 6),
    to_host=st.booleans(),
)
def test_rows_arrive_where_they_belong_and_no_other_byte_is_touched(
    on_host: OnHost, words: int, gap: int, order: list[int], count: int, to_host: bool
) -> None:
    host = aligned(6, WORD * (words + gap), seed=1)
    packed = aligned(count, WORD * words, seed=2)
    there = order[:count]
    expected_host = host.copy()
    expected_packed = packed.copy()
    if to_host:
        expected_host[there, : WORD * words] = packed
    else:
        expected_packed[:] = host[there, : WORD * words]
    rows = torch.tensor([host[each].ctypes.data for each in there], dtype=torch.int64)
    on_host.move(torch.from_numpy(packed), rows, to_host=to_host)
    np.testing.assert_array_equal(host, expected_host)
    np.testing.assert_array_equal(packed, expected_packed)


def test_kernels_that_move_nothing_are_found_out(
    on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Idle())
    on_host._check()
    monkeypatch.setattr(on_host._kernels, "launch", lambda *_: None)
    with pytest.raises(RuntimeError, match="does not arrive"):
        on_host._check()


def test_kernels_are_not_given_addresses_that_they_do_not_know(on_host: OnHost) -> None:
    for known in (1, 0):
        asked: list[int] = []

        def attribute(number: int, known: int = known, asked: list[int] = asked) -> int:
            asked.append(number)
            return known

        on_host._kernels.attribute = attribute
        with nullcontext() if known else pytest.raises(RuntimeError, match="other addresses"):
            on_host._require_host_addresses()
        assert asked == [91]


def test_the_driver_is_asked_about_the_current_device() -> None:
    class Driver:
        def cuCtxGetDevice(self, device: Any) -> int:
            device._obj.value = 3
            return 0

        def cuDeviceGetAttribute(self, value: Any, number: int, device: Any) -> int:
            value._obj.value = 10 * number + device.value
            return 0 if number else 1

    kernels = DeviceKernels.__new__(DeviceKernels)
    kernels._driver = Driver()
    assert kernels.attribute(91) == 913
    with pytest.raises(RuntimeError, match="cuDeviceGetAttribute failed"):
        kernels.attribute(0)


def test_without_a_driver_the_host_copies_rows(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with caplog.at_level("WARNING", "vllm"):
        assert device_rows.__wrapped__(torch.device("cuda", 0)) is None
    assert "The host copies rows of KV blocks, as the device cannot be used for it" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_moves_rows() -> None:
    stream = CudaStream(torch.device("cuda", torch.cuda.current_device()))
    assert stream.can_move(1 << 16)
    assert not stream.can_move(24)
    stream.close()
