# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters are compared by what they contain, wherever they lie."""

import dataclasses
import os
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager

from omni_connector.identity import adapters
from omni_connector.identity.adapters import AdapterContents, AdapterLoad, Replaced, version_of
from omni_connector.runtime.context import EngineContext
from omni_connector.testing import FakeClock
from omni_connector.vllm_v1 import adapter_loads
from omni_connector.vllm_v1.scheduler import OmniScheduler
from tests import inspection
from tests.toy import BLOCK

from .harness import HANDOFF, assert_clean, prompt, wait
from .places import Place, publish
from .stores import MASTER

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


def test_an_adapter_that_was_loaded_anew_has_slots_of_its_own(engine, adapter, monkeypatch):
    """vLLM's hashes name both alike, and a reset leaves hand-offs open."""
    monkeypatch.setattr(adapters, "FRESH_S", 0.0)  # its files are read for each request
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    held = []
    for content in (b"w" * 99, b"v" * 98):
        lora = adapter(content)
        prefill.load_adapter(lora)
        prefill.generate(prompt(9, seed=1))  # workers tell it with a step
        assert prefill.scheduler.reset_prefix_cache()
        for _ in range(2):
            answer = prefill.generate(TEXT, params=HANDOFF, lora=lora).params
            held.append(prefill.usage[0])
    assert held == [5, 5, 10, 10]
    decode.generate(TEXT, 6, params=answer, lora=lora)
    assert decode.count("handoffs_received") == 1


@pytest.mark.parametrize("where", ["arena", "store"])
def test_only_equal_contents_meet(engine, shelf, adapter, tokens, where):
    counter = "tokens_from_host" if where == "arena" else "tokens_shared"
    place = Place(engine, {"share": True} if where == "arena" else MASTER, counter)
    first, second, third = place(), place(), place()
    lora = adapter(b"w" * 99)
    assert publish(place, first, TEXT, lora=lora) == tokens(TEXT, 1)
    assert second.generate(TEXT, 6, lora=lora).tokens == tokens(TEXT, 6)
    assert place.loaded(second) == 4 * BLOCK
    lora = adapter(b"other weights under that name and path")
    assert third.generate(TEXT, 6, lora=lora).tokens == tokens(TEXT, 6)
    assert place.loaded(third) == 0
    assert_clean(first, second, third)


def test_what_a_step_computes_with_another_version_is_not_stored(
    sharer, shelf, adapter, monkeypatch
):
    """Workers tell of a load with the step that computes the first blocks with it, and whatever a
    store has been given others find at once. So no worker may hear of such a copy: one that is
    cancelled may end first."""
    monkeypatch.setattr(adapters, "FRESH_S", 1e9)
    build, update = OmniScheduler.build_meta, OmniScheduler.update_output
    loads: list[bytes] = []
    told: list[int] = []

    def step(half: OmniScheduler, output: Any) -> Any:
        if output.total_num_scheduled_tokens and loads:
            first.load_adapter(adapter(loads.pop()))  # in the place of the one that is named
        meta = build(half, output)
        told.extend(meta.saves)
        return meta

    def slow_report(half: OmniScheduler, output: Any) -> None:
        for _ in range(20):  # for a copy that has begun with the step
            if not shelf.entries:
                time.sleep(0.01)
        update(half, output)

    monkeypatch.setattr(OmniScheduler, "build_meta", step)
    monkeypatch.setattr(OmniScheduler, "update_output", slow_report)
    first = sharer()
    lora = adapter(b"w" * 99)
    first.generate(TEXT[: BLOCK - 1], lora=lora)
    loads.append(b"v" * 98)
    first.generate(TEXT, lora=lora)
    assert not loads
    first.settle()
    assert not told
    assert not shelf.entries
    assert_clean(first)


def test_of_an_adapter_that_cannot_be_read_nothing_is_shared(engine, tmp_path, log):
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
    assert not inspection.waiting_for_adapters(prefill.half)
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


def loaded(lora: LoRARequest, rank: int = 0) -> AdapterLoad:
    """What a worker tells that loads an adapter now."""
    version = version_of(lora.lora_path)
    return AdapterLoad(rank, lora.lora_int_id, lora.lora_name, lora.lora_path, version)


class Asked:
    """A request, and what is known of it, as far as its adapter goes."""

    request_id = "r"
    adapter_asked = None

    def __init__(self, lora: LoRARequest) -> None:
        self.lora_request = lora
        self.request = self


class Unstarted:
    """A thread that makes no turn."""

    def wake(self) -> None:
        pass


@pytest.fixture
def content():
    """Asks for an adapter's content, with a clock that goes on by itself."""
    clock = FakeClock()
    contents = AdapterContents(EngineContext(clock))

    def ask(lora: LoRARequest, epoch: int = 0, *, load: bool = False) -> str | None:
        if load:
            contents.loaded(loaded(lora), epoch)
        clock.advance(2 * adapters.FRESH_S)
        asked = Asked(lora)
        if contents.arrives(asked):
            wait(lambda: contents._fresh(lora))
        return contents.content(asked, epoch)

    ask.contents = contents
    yield ask
    contents.close()


def test_what_was_read_since_a_request_came_is_new_enough_however_long_a_step_takes(adapter):
    clock = FakeClock()
    contents = AdapterContents(EngineContext(clock))
    try:
        asked = Asked(adapter(b"one"))
        contents.loaded(loaded(asked.lora_request), 0)
        assert contents.arrives(asked)
        wait(lambda: not contents.waits(asked))
        clock.advance(1.1 * adapters.FRESH_S)
        assert not contents.waits(asked)
    finally:
        contents.close()


def test_a_request_waits_ten_seconds_for_its_adapter(adapter, monkeypatch):
    monkeypatch.setattr(AdapterContents, "_fresh", lambda *_: False)
    clock = FakeClock()
    contents = AdapterContents(EngineContext(clock, lambda *_, **__: Unstarted()))
    asked = Asked(adapter(b"one"))
    assert contents.arrives(asked)
    clock.advance(9.99)
    assert contents.waits(asked)
    clock.advance(0.01)
    assert not contents.waits(asked)


def test_a_content_is_read_once_for_each_version_of_the_files(content, adapter, monkeypatch):
    read = []
    digest = AdapterContents._digest
    monkeypatch.setattr(
        AdapterContents, "_digest", lambda self, files: read.append(1) or digest(self, files)
    )
    lora = adapter(b"one")
    first = content(lora, load=True)
    assert first == content(lora)
    assert len(read) == 1
    other = content(adapter(b"other", folder="there", int_id=2), load=True)
    assert other not in (None, first)
    assert content(adapter(b"one", folder="elsewhere", name="else", int_id=3), load=True) == first
    assert len(read) == 3


def test_files_that_change_under_an_adapter_are_not_what_was_loaded(content, adapter):
    first = content(adapter(b"one"), load=True)
    assert first is not None
    changed = adapter(b"two!")
    assert content(changed) is None
    assert content(changed, epoch=1) is None  # nor was it loaded again
    # vLLM's own blocks have the name of the adapter, and not its number.
    assert content(adapter(b"two!", int_id=2), epoch=1, load=True) not in (None, first)
    assert content(adapter(b"one", name="another name", int_id=3), load=True) == first


def test_files_that_changed_between_their_load_and_their_first_use_are_unknown(content, adapter):
    lora = adapter(b"one")
    content.contents.loaded(loaded(lora), 0)
    assert content(adapter(b"two!")) is None
    # Loaded in place: vLLM may have blocks of the first one until it is reset.
    again = adapter(b"two!", load_inplace=True)
    assert content(again, load=True) is None
    assert content(again, epoch=1) is not None


def test_what_vllm_has_not_loaded_yet_is_unknown(content, adapter):
    lora = adapter(b"one")
    clock = content.contents._clock
    asked = Asked(lora)
    assert content.contents.arrives(asked)
    wait(lambda: content.contents._fresh(lora))
    for _ in range(adapters._REPORT_STEPS):
        assert content.contents.waits(asked)  # a worker may have loaded it, and tell it now
        content.contents.step_ended()
    assert not content.contents.waits(asked)
    assert content.contents.content(asked, 0) is None
    assert clock is content.contents._clock
    assert content(lora, load=True) is not None


def test_all_ranks_must_have_loaded_the_same(adapter):
    clock = FakeClock()
    contents = AdapterContents(EngineContext(clock), ranks=2)
    try:
        asked = Asked(adapter(b"one"))
        contents.loaded(loaded(asked.lora_request), 0)
        assert contents.arrives(asked)
        wait(lambda: contents._fresh(asked.lora_request))
        assert contents.content(asked, 0) is None
        other = msgspec.structs.replace(asked.lora_request)
        contents.loaded(dataclasses.replace(loaded(other, rank=1), version="other"), 0)
        assert contents.content(asked, 0) is None
        contents.loaded(loaded(other, rank=1), 0)
        assert contents.content(asked, 0) is None  # blocks of the other may be there
        assert contents.content(asked, 1) is not None
    finally:
        contents.close()


def test_a_load_of_other_weights_voids_what_was_computed_with_those_before(content, adapter):
    first, other = adapter(b"one"), adapter(b"two", folder="there")
    assert content(first, load=True)
    content.contents.begins(Asked(first))
    assert content.contents.loaded(loaded(first), 0) is None  # again, after it was evicted
    assert content.contents.loaded(loaded(other), 0) is None  # of another path
    changed = loaded(adapter(b"one!"))
    assert content.contents.loaded(changed, 0) is Replaced.IN_USE
    assert content(adapter(b"one!"), epoch=1) is None  # vLLM itself has reset nothing
    assert content(adapter(b"one!"), epoch=2) is None  # it was written again
    assert content(adapter(b"one!"), epoch=2, load=True) is None
    content.contents.ends(Asked(first))
    assert content(adapter(b"one!"), epoch=3, load=True) is None  # it may have ended in this step
    content.contents.step_ended()
    assert content(adapter(b"one!"), epoch=3, load=True) is None
    assert content(adapter(b"one!"), epoch=4, load=True) is not None
    unused = content.contents.loaded(loaded(adapter(b"one?")), 4)  # no request has it
    assert unused is Replaced.UNUSED
    assert content(adapter(b"one?"), epoch=4) is None


def test_a_load_of_other_weights_voids_what_a_request_of_a_used_id_computes(content, adapter):
    """Its client has left, and its id was used again before the step ended."""
    first = adapter(b"one")
    assert content(first, load=True)
    for _ in range(2):
        content.contents.begins(Asked(first))
        content.contents.ends(Asked(first))
    content.contents.begins(Asked(first))
    content.contents.step_ended()
    assert content.contents.loaded(loaded(adapter(b"one!")), 0) is Replaced.IN_USE


def test_what_is_no_weight_does_not_count(content, adapter, tmp_path):
    first = content(adapter(b"one"), load=True)
    (tmp_path / "here" / "README.md").write_text("hello")
    os.utime(tmp_path / "here" / "adapter_model.safetensors", ns=(1, 1))
    assert content(adapter(b"one", name="b", int_id=2), load=True) == first


def test_vllms_own_loads_are_noted(adapter, monkeypatch):
    read = []

    class Manager(WorkerLoRAManager):
        def __init__(self):
            pass

    def load(self, lora):
        read.append(lora)
        if lora.lora_name == "bad":
            raise ValueError("no adapter")
        if lora.lora_name == "torn":
            adapter(b"rewritten", folder="torn")

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    none = adapter_loads.watch_adapter_loads(SimpleNamespace(lora_config=None))
    loads = adapter_loads.watch_adapter_loads(SimpleNamespace(lora_config=LoRAConfig()))
    first, torn = adapter(b"one"), adapter(b"one", name="torn", folder="torn", int_id=2)
    Manager()._load_adapter(first)
    Manager()._load_adapter(torn)
    with pytest.raises(ValueError, match="no adapter"):
        Manager()._load_adapter(LoRARequest("bad", 3, "/no/such/adapter"))
    assert [each.lora_int_id for each in read] == [1, 2, 3]
    assert loads.take(5) == [
        dataclasses.replace(loaded(first), rank=5),
        AdapterLoad(5, 2, "torn", torn.lora_path, ""),
        AdapterLoad(5, 3, "bad", "/no/such/adapter", ""),
    ]
    assert loads.take(5) == none.take(5) == []


def test_an_adapter_that_was_replaced_after_its_load_is_not_handed_off(engine, adapter):
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    lora = adapter(b"w" * 99, folder="one")
    prefill.load_adapter(lora)
    asked = adapter(b"v" * 98, folder="one")  # and prefill still computes with the first
    assert prefill.generate(TEXT, params=HANDOFF, lora=asked).params["omni_no_handoff"]
    assert prefill.failures() == {"adapter_unknown": 1}
    assert_clean(prefill, decode)


def test_an_adapter_that_is_loaded_in_place_while_a_prompt_is_computed_voids_it(engine, adapter):
    prefill = engine("kv_producer", max_tokens_a_step=BLOCK)
    lora = adapter(b"w" * 99)
    request_id = prefill.submit(TEXT, params=HANDOFF, lora=lora)
    prefill.run(lambda: prefill.scheduler.requests[request_id].num_computed_tokens >= BLOCK)
    prefill.load_adapter(adapter(b"v" * 98))
    prefill.run(lambda: prefill.done(request_id))
    assert prefill.answers[request_id].params["omni_no_handoff"] == "weights_changed"
    assert_clean(prefill)
