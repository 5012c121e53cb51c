# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters are compared by what they contain, wherever they lie."""

import os

import pytest
from vllm.lora.request import LoRARequest

from omni_connector.handoff import adapters
from omni_connector.handoff.adapters import AdapterContents
from omni_connector.testing import FakeClock
from omni_connector.testing.toy import BLOCK
from omni_connector.vllm_v1.metrics import OmniStats

from .harness import HANDOFF, assert_clean, prompt, wait

pytestmark = pytest.mark.vllm

TEXT = prompt(4 * BLOCK + 3)


@pytest.fixture
def adapter(tmp_path):
    """Writes an adapter; what a request says of it."""

    def write(content: bytes, name: str = "style", folder: str = "here", int_id: int = 1, **more):
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_bytes(content)
        return LoRARequest(name, int_id, str(path), **more)

    return write


def handed_off(prefill, decode, offered, asked, tokens) -> bool:
    """Whether a prompt with one adapter is handed off to an engine that has another."""
    before = decode.count("handoffs_received")
    answer = prefill.generate(TEXT, params=HANDOFF, lora=offered).params
    assert decode.generate(TEXT, 6, params=answer, lora=asked).tokens == tokens(TEXT, 6)
    return decode.count("handoffs_received") > before


def test_an_adapter_of_the_same_content_is_the_same_wherever_it_lies(engine, adapter, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    offered, asked = adapter(b"w" * 99, folder="one"), adapter(b"w" * 99, folder="two")
    assert handed_off(prefill, decode, offered, asked, tokens)
    assert_clean(prefill, decode)


def test_an_adapter_of_the_same_name_and_other_content_is_another(engine, adapter, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    offered, asked = adapter(b"w" * 99, folder="one"), adapter(b"v" * 99, folder="two")
    assert not handed_off(prefill, decode, offered, asked, tokens)
    assert decode.failures() == {"other_prompt": 1}


def test_through_the_store_only_equal_contents_meet(sharer, shelf, adapter, tokens):
    first, second, third = sharer(), sharer(), sharer()
    lora = adapter(b"w" * 99)
    assert first.generate(TEXT, lora=lora).tokens == tokens(TEXT, 1)
    wait(lambda: len(shelf.entries) == 4)
    assert second.generate(TEXT, 6, lora=lora).tokens == tokens(TEXT, 6)
    assert second.count("tokens_shared") == 4 * BLOCK
    lora = adapter(b"other weights under that name and path")
    assert third.generate(TEXT, 6, lora=lora).tokens == tokens(TEXT, 6)
    assert third.count("tokens_shared") == 0
    assert_clean(first, second, third)


def test_of_an_adapter_that_cannot_be_read_nothing_is_shared(engine, tokens, tmp_path, log):
    prefill = engine("kv_producer")
    lora = LoRARequest("style", 1, str(tmp_path))
    answer = prefill.generate(TEXT, params=HANDOFF, lora=lora)
    assert answer.params["omni_no_handoff"] == "adapter_unknown"
    assert prefill.failures() == {"adapter_unknown": 1}
    assert any("no adapter_config.json and weights" in line for line in log)
    assert_clean(prefill)


def test_a_request_that_waits_for_its_adapter_can_be_aborted(engine, adapter, monkeypatch):
    monkeypatch.setattr(AdapterContents, "_fresh", lambda *_: False)
    prefill = engine("kv_producer")
    request_id = prefill.submit(TEXT, params=HANDOFF, lora=adapter(b"w"))
    prefill.step()
    assert not prefill.done(request_id)
    prefill.abort(request_id)
    prefill.settle()
    assert not prefill.half._adapters._waiting
    assert_clean(prefill)


def test_a_hand_off_is_let_go_of_where_its_adapter_is_unknown(engine, tmp_path, tokens):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(TEXT, params=HANDOFF).params
    lora = LoRARequest("style", 1, str(tmp_path))
    assert decode.generate(TEXT, 6, params=answer, lora=lora).tokens == tokens(TEXT, 6)
    wait(lambda: prefill.usage[0] == 0)
    assert_clean(prefill, decode)


def test_a_hand_off_is_let_go_of_where_its_request_ends_before_its_adapter_is_read(
    engine, adapter, monkeypatch
):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    answer = prefill.generate(TEXT, params=HANDOFF).params
    monkeypatch.setattr(AdapterContents, "_fresh", lambda *_: False)
    decode.abort(decode.submit(TEXT, params=answer, lora=adapter(b"w")))
    wait(lambda: prefill.usage[0] == 0)
    assert_clean(prefill, decode)


class Asked:
    """A request, as far as its adapter goes."""

    request_id = "r"

    def __init__(self, lora: LoRARequest) -> None:
        self.lora_request = lora


@pytest.fixture
def content():
    """Asks for an adapter's content, with a clock that goes on by itself."""
    clock = FakeClock()
    contents = AdapterContents(clock)

    def ask(lora: LoRARequest, epoch: int = 0) -> str | None:
        clock.advance(2 * adapters.FRESH_S)
        asked = Asked(lora)
        if contents.arrives(asked):
            wait(lambda: contents._fresh(lora))
            contents.goes_on("r")
        return contents.content(asked, epoch, OmniStats())

    ask.contents = contents
    yield ask
    contents.close()


def test_what_was_read_since_a_request_came_is_new_enough_however_long_a_step_takes(adapter):
    clock = FakeClock()
    contents = AdapterContents(clock)
    try:
        asked = Asked(adapter(b"one"))
        assert contents.arrives(asked)
        wait(lambda: not contents.waits(asked))
        clock.advance(1.1 * adapters.FRESH_S)
        assert not contents.waits(asked)
    finally:
        contents.close()


def test_a_content_is_read_once_for_each_version_of_the_files(content, adapter, monkeypatch):
    read = []
    digest = AdapterContents._digest
    monkeypatch.setattr(
        AdapterContents, "_digest", lambda self, files: read.append(1) or digest(self, files)
    )
    lora = adapter(b"one")
    first = content(lora)
    assert first == content(lora)
    assert len(read) == 1
    other = content(adapter(b"other", folder="there"))
    assert other not in (None, first)
    assert content(adapter(b"one", folder="elsewhere", name="else")) == first
    assert len(read) == 3


def test_files_that_change_under_an_adapter_are_not_what_was_loaded(content, adapter):
    first = content(adapter(b"one"))
    assert content(adapter(b"two!"), epoch=0) is None  # vLLM's own blocks are of the first
    assert content(adapter(b"two!", int_id=2), epoch=0) is None
    assert content(adapter(b"two!"), epoch=1) is None  # nor was it loaded again
    second = content(adapter(b"two!", int_id=2), epoch=1)
    assert second not in (None, first)
    third = content(adapter(b"three", int_id=2, load_inplace=True), epoch=2)
    assert third not in (None, first, second)
    assert content(adapter(b"one", name="another name")) == first


def test_what_is_no_weight_does_not_count(content, adapter, tmp_path):
    first = content(adapter(b"one"))
    (tmp_path / "here" / "README.md").write_text("hello")
    os.utime(tmp_path / "here" / "adapter_model.safetensors", ns=(1, 1))
    assert content(adapter(b"one", name="b")) == first
