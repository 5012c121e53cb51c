# SPDX-License-Identifier: Apache-2.0
"""What a transport has to do with objects: pass them whole, keep them, free them."""

import asyncio
import math
import os
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_connector.errors import ArenaFullError
from omni_connector.objects.base import ObjectKey
from omni_connector.objects.codec import Pieces, encode
from omni_connector.testing.conformance.base import ObjectFixtures, Open
from omni_connector.testing.conformance.values import same

WAIT_S = 600.0
"""Longest that a wait for another thread may take; only one that hangs takes as long."""

ODD_KEYS = (
    "",
    "/",
    "../../etc/passwd",
    "with space\nand newline\0and nul",
    "ключ-鍵-🔑",
    "\udc80",
    "%s{}*?[a]",
    "k" * 100_000,
)


class ObjectVerbs(ObjectFixtures):
    """`put`, `get`, `cleanup`, `close` and `health`."""

    @pytest.mark.parametrize("with_metadata", [False, True])
    def test_object_travels(self, open_connector: Open, with_metadata: bool) -> None:
        sender, receiver = open_connector(), open_connector()
        value = {"ids": [1, 2, 3], "raw": b"\0\xff", "nested": {"x": [None, True, 1.5, "é"]}}
        ok, size, metadata = sender.put(
            from_stage="0", to_stage="1", put_key="omni_0_to_1_kv_cache_r", data=value
        )
        assert ok
        assert size > 0
        hint = msgspec.msgpack.decode(msgspec.msgpack.encode(metadata)) if with_metadata else None
        found = receiver.get(
            from_stage="0", to_stage="1", get_key="omni_0_to_1_kv_cache_r", metadata=hint
        )
        assert found == (value, size)

    def test_arrays_travel_beside_other_values(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        value = {
            "layers": [np.arange(12.0).reshape(3, 4), np.array(7, np.int8), np.empty((0, 3))],
            "longer than a slot": np.arange(self.object_slot_bytes, dtype=np.int16),
            "rest": {"seq_len": 12, "name": "é", "raw": b"\0\xff", "none": None},
        }
        ok, size, metadata = sender.put("0", "1", "key", value)
        assert ok
        for _ in range(2):
            found = receiver.get("0", "1", "key", metadata)
            assert found is not None
            assert same(value, found[0])
            assert found[1] == size

    def test_tensors_arrive_as_tensors_of_their_own_memory(self, open_connector: Open) -> None:
        torch = pytest.importorskip("torch")
        sender, receiver = open_connector(), open_connector()
        sent = [torch.randn(5, 7), torch.arange(24).view(2, 3, 4).transpose(0, 2)]
        sent += [
            torch.tensor(1.5, dtype=torch.bfloat16),
            torch.empty(0, 2, dtype=torch.float8_e5m2),
        ]
        assert sender.put("0", "1", "key", sent)[0]
        found = receiver.get("0", "1", "key")
        assert found is not None
        sender.put("0", "1", "key", "another")
        sender.close()
        for before, after in zip(sent, found[0], strict=True):
            assert (after.dtype, after.shape) == (before.dtype, before.shape)
            assert torch.equal(after.to(torch.float64), before.to(torch.float64))
        found[0][0].zero_()

    def test_tensors_arrive_aligned(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        kept = []
        for length in (1, 100, 1000, 30_000):
            sent = {"a": np.arange(length, dtype=np.uint8), "b": np.arange(3.0)}
            assert sender.put("0", "1", "key", sent)[0]
            found = receiver.get("0", "1", "key")
            assert found is not None
            kept.append(found[0])
            assert [each.ctypes.data % 64 for each in found[0].values()] == [0, 0]

    def test_pieces_arrive_joined(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        pieces = Pieces([b"head", b"", np.arange(9, dtype=np.int32), memoryview(b"tail")])
        assert sender.put("0", "1", "key", pieces)[:2] == (True, 44)
        found = receiver.get("0", "1", "key")
        assert found is not None
        assert isinstance(found[0], memoryview)
        assert found == (b"head" + np.arange(9, dtype=np.int32).tobytes() + b"tail", 44)

    def test_received_objects_are_independent(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        sender.put("0", "1", "key", [np.zeros(3 * self.object_slot_bytes, np.uint8)])
        first = receiver.get("0", "1", "key")
        second = receiver.get("0", "1", "key")
        assert first is not None
        assert second is not None
        first[0][0][:] = 1
        third = receiver.get("0", "1", "key")
        assert third is not None
        assert not second[0][0].any()
        assert not third[0][0].any()
        assert first[0][0].all()

    def test_bytes_like_arrive_as_bytes(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        content = bytes(range(256)) * 3
        strided = memoryview(content)[::2]
        for i, data in enumerate((content, bytearray(content), memoryview(content), strided, b"")):
            assert sender.put("0", "1", f"key{i}", data)[:2] == (True, len(data))
            assert receiver.get("0", "1", f"key{i}") == (bytes(data), len(data))
        found = receiver.get("0", "1", "key2")
        assert found is not None
        assert type(found[0]) is bytes

    def test_object_may_be_got_by_many_and_by_its_sender(self, open_connector: Open) -> None:
        sender = open_connector()
        sender.put("0", "1", "key", "value")
        for receiver in (sender, open_connector(), open_connector(), sender):
            found = receiver.get("0", "1", "key")
            assert found is not None
            assert found[0] == "value"

    def test_object_never_put_is_none(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        assert receiver.get("0", "1", "key") is None
        sender.put("0", "1", "key", 1)
        for edge in (("1", "0", "key"), ("0", "2", "key"), ("0", "1", "ke"), ("0", "1", "key2")):
            assert receiver.get(*edge) is None

    def test_newest_object_wins(self, open_connector: Open) -> None:
        first, second, receiver = open_connector(), open_connector(), open_connector()
        for i, sender in enumerate((first, first, second, first)):
            sender.put("0", "1", "key", i)
            found = receiver.get("0", "1", "key")
            assert found is not None
            assert found[0] == i

    def test_object_outlives_its_sender_in_a_store_only(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        _, _, metadata = sender.put("0", "1", "key", b"object")
        assert receiver.get("0", "1", "key") == (b"object", 6)
        sender.close()
        left = (b"object", 6) if sender.is_store else None
        assert receiver.get("0", "1", "key") == left
        assert receiver.get("0", "1", "key", metadata) == left

    def test_one_sender_that_is_gone_hides_no_other(self, open_connector: Open) -> None:
        gone, sender, receiver = open_connector(), open_connector(), open_connector()
        for each in (gone, sender):
            each.put("0", "1", f"key-{id(each)}", b"object")
        gone.close()
        assert receiver.get("0", "1", f"key-{id(sender)}") == (b"object", 6)

    @pytest.mark.parametrize("key", ODD_KEYS, ids=range(len(ODD_KEYS)))
    def test_odd_keys(self, open_connector: Open, key: str) -> None:
        sender, receiver = open_connector(), open_connector()
        assert sender.put("0", "1", key, b"object")[0]
        assert sender.put("0", "1", key + "x", b"another")[0]
        assert sender.put("0", "1", "unrelated", b"third")[0]
        assert receiver.get("0", "1", key) == (b"object", 6)
        assert receiver.get("0", "1", key + "x") == (b"another", 7)
        sender.cleanup(key)
        # No request has an empty id: cleaning it up must not free everything.
        assert (receiver.get("0", "1", key) is None) == (key != "")
        assert receiver.get("0", "1", "unrelated") == (b"third", 5)

    def test_parts_of_a_key_do_not_run_together(self, open_connector: Open) -> None:
        sender = open_connector()
        for edge in (("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd")):
            sender.put(*edge, "".join(edge))
            assert sender.get("a", "b", "c") is None
        assert sender.get("ab", "c", "d") == sender.get("ab", "c", "d", {})

    @pytest.mark.parametrize("slots", [1.0, 1.5, 2.0, 3.25])
    def test_objects_longer_than_a_slot(self, open_connector: Open, slots: float) -> None:
        sender, receiver = open_connector(), open_connector()
        for extra in (-1, 0, 1):
            content = os.urandom(int(self.object_slot_bytes * slots) + extra)
            assert sender.put("0", "1", "key", content)[:2] == (True, len(content))
            assert receiver.get("0", "1", "key") == (content, len(content))

    def test_object_that_never_fits_is_refused(self, open_connector: Open) -> None:
        if self.object_slots is None:
            return
        sender, receiver = open_connector(), open_connector()
        content = bytes(self.object_slots * self.object_slot_bytes + 1)
        assert sender.put("0", "1", "key", b"before")[0]
        assert sender.put("0", "1", "key", content) == (False, 0, None)
        with pytest.raises(ArenaFullError):
            sender.store_object(ObjectKey("0", "1", "key"), [memoryview(content)])
        assert receiver.get("0", "1", "key") == (b"before", 6)

    def test_full_arena_takes_objects_again_after_cleanup(self, open_connector: Open) -> None:
        if self.object_slots is None:
            return
        sender, receiver = open_connector(), open_connector()
        for i in range(self.object_slots):
            assert sender.put("0", "1", f"r{i}_0_0_0_0", i)[0]
        assert sender.put("0", "1", "one-more", b"x") == (False, 0, None)
        assert sender.put("0", "1", "r0_0_0_0_0", "replaced")[0]
        for i in range(1, self.object_slots, 2):
            sender.cleanup(f"r{i}")
        overhead = sum(part.nbytes for part in encode(b"")) + self.scattered_bytes
        content = os.urandom(self.object_slots // 2 * self.object_slot_bytes - overhead)
        assert sender.put("0", "1", "scattered", content)[0]
        assert receiver.get("0", "1", "scattered") == (content, len(content))
        found = receiver.get("0", "1", "r0_0_0_0_0")
        assert found is not None
        assert found[0] == "replaced"

    def test_objects_that_were_got_make_room(self, open_connector: Open) -> None:
        if self.object_slots is None:
            return
        sender, receiver = open_connector(), open_connector()
        content = bytes(self.object_slots * self.object_slot_bytes // 3)
        for i in range(20):
            sent = bytes([i]) + content[1:]
            assert sender.put("0", "1", f"r{i}", sent)[0]
            assert receiver.get("0", "1", f"r{i}") == (sent, len(sent))
        assert sender.put("0", "1", "unread", content)[0]
        assert sender.put("0", "1", "unread too", content)[0]
        assert sender.put("0", "1", "large", content * 2) == (False, 0, None)
        for key in ("unread", "unread too"):
            assert receiver.get("0", "1", key) == (content, len(content))
        assert sender.put("0", "1", "large", content * 2)[0]

    def test_cleanup_takes_all_of_a_request_and_nothing_else(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        own = ["omni_0_to_1_kv_cache_user_1", "user_1_0_0_3_2"]
        # Of the requests user_1_2, a_user_1, user_1_0_0, ...: an id may contain any characters.
        others = [
            *("user_1_2", "omni_0_to_1_kv_cache_user_1_2", "user_1_2_0_0_3_2"),
            *("a_user_1", "omni_0_to_1_kv_cache_a_user_1", "a_user_1_0_0_3_2"),
            *("user_1_0_0", "user_1_0_0_0_0_3_2", "omni_0_to_1_kv_cache_user_1_0_0_3_2"),
            *("user_10", "x/user_1", "user_1_1_0_3_2"),
        ]
        for key in own + others:
            assert sender.put("0", "1", key, key)[0]
        receiver.cleanup("user_1")
        assert all(receiver.get("0", "1", key) is not None for key in own + others)
        for nothing in ("", "0", "1", "omni", "kv_cache", "user", "us", "1_0_0", "3_2", "cache_a"):
            sender.cleanup(nothing)
        assert [key for key in own + others if receiver.get("0", "1", key) is None] == []
        sender.cleanup("user_1")
        assert [key for key in own if receiver.get("0", "1", key) is not None] == []
        assert [key for key in others if receiver.get("0", "1", key) is None] == []

    def test_cleanup_by_the_whole_key(self, open_connector: Open) -> None:
        sender = open_connector()
        for key in ("omni_0_to_1_kv_cache_r", "omni_0_to_1_kv_cache_r2"):
            sender.put("0", "1", key, key)
        sender.cleanup("omni_0_to_1_kv_cache_r")
        assert sender.get("0", "1", "omni_0_to_1_kv_cache_r") is None
        assert sender.get("0", "1", "omni_0_to_1_kv_cache_r2") is not None

    def test_a_key_that_was_put_is_no_request(self, open_connector: Open) -> None:
        sender = open_connector()
        for key in ("r", "omni_0_to_1_kv_cache_r", "r_0_0_1_1", "r_2"):
            sender.put("0", "1", key, key)
        sender.cleanup("r")
        left = [key for key in ("r", "omni_0_to_1_kv_cache_r", "r_0_0_1_1", "r_2")
                if sender.get("0", "1", key) is not None]  # fmt: skip
        assert left == ["omni_0_to_1_kv_cache_r", "r_0_0_1_1", "r_2"]

    def test_a_wait_for_an_object_ends_with_the_object_or_the_deadline(
        self, open_connector: Open
    ) -> None:
        sender, receiver = open_connector(), open_connector()
        late = threading.Timer(0.2, sender.put, ("0", "1", "late", "object"))
        late.start()
        deadline = time.monotonic() + WAIT_S
        found = receiver.get_with_deadline("0", "1", "late", deadline=deadline)
        assert found is not None
        assert found[0] == "object"
        late.join()
        for deadline in (time.monotonic() + 0.3, time.monotonic()):
            assert receiver.get_with_deadline("0", "1", "never", deadline=deadline) is None
            assert time.monotonic() >= deadline

    @pytest.mark.parametrize("never", [math.nan, math.inf, -math.inf])
    def test_a_wait_must_have_an_end(self, open_connector: Open, never: float) -> None:
        receiver = open_connector()
        receiver.put("0", "1", "key", "object")
        with pytest.raises(ValueError, match="deadline"):
            receiver.get_with_deadline("0", "1", "key", deadline=never)
        with pytest.raises(ValueError, match="deadline"):
            asyncio.run(receiver.get_async("0", "1", "key", deadline=never))
        with pytest.raises(ValueError, match="timeout"):
            receiver.get("0", "1", "key", timeout=math.nan)
        assert receiver.get("0", "1", "key", timeout=math.inf) is not None

    def test_a_wait_that_is_abandoned_ends(self, open_connector: Open) -> None:
        receiver = open_connector()
        receiver.abandon_get("key")  # there is no such wait
        found: list[Any] = []

        def wait() -> None:
            deadline = time.monotonic() + WAIT_S
            found.append(receiver.get_with_deadline("0", "1", "key", deadline=deadline))

        waits = [threading.Thread(target=wait) for _ in range(2)]
        for thread in waits:
            thread.start()
        while any(thread.is_alive() for thread in waits):
            receiver.abandon_get("another")
            assert found == []
            time.sleep(0.05)
            # A wait that has not begun yet is not abandoned.
            receiver.abandon_get("key")
            for thread in waits:
                thread.join(0.2)
            if found:
                break
        for thread in waits:
            receiver.abandon_get("key")
            thread.join(WAIT_S)
        assert found == [None, None]

    def test_what_was_got_is_reaped_and_nothing_else(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        for key in ("got", "waiting"):
            sender.put("0", "1", key, key)
        assert receiver.get("0", "1", "got") is not None
        deadline = time.monotonic() + WAIT_S
        while not sender.is_store and time.monotonic() < deadline:
            sender.reap_consumed()
            if sender.get("0", "1", "got") is None:
                break
        sender.reap_consumed()
        assert (receiver.get("0", "1", "got") is None) == (not sender.is_store)
        assert receiver.get("0", "1", "waiting") is not None

    def test_what_was_got_by_who_consumes_is_gone_for_everybody(self, open_connector: Open) -> None:
        sender, once, other = open_connector(), open_connector(), open_connector()
        once.consumes = True
        for turn in range(3):
            # A key is used again: the object before is never got again, whoever is slow.
            assert once.get("0", "1", "key") is None
            sender.put("0", "1", "key", turn)
            found = once.get("0", "1", "key")
            assert found is not None
            assert found[0] == turn
        deadline = time.monotonic() + WAIT_S
        while other.get("0", "1", "key") is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert other.get("0", "1", "key") is None
        assert once.put("0", "1", "own", "object")[0]
        assert once.get("0", "1", "own") is not None
        assert once.get("0", "1", "own") is None

    def test_objects_travel_while_an_event_loop_runs(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        value = {"raw": bytes(self.object_slot_bytes)}

        async def travel() -> None:
            deadline = time.monotonic() + WAIT_S
            waiting = [
                asyncio.create_task(receiver.get_async("0", "1", f"k{i}", deadline=deadline))
                for i in range(3)
            ]
            never = asyncio.create_task(receiver.get_async("0", "1", "never", deadline=deadline))
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in waiting)
            receiver.abandon_get("never")
            for i in range(3):
                ok, size, metadata = await sender.put_async("0", "1", f"k{i}", value)
                assert ok
                assert await receiver.get_async("0", "1", f"k{i}", metadata) == (value, size)
                assert await waiting[i] == (value, size)
            assert await never is None
            assert await receiver.get_async("0", "1", "nothing") is None
            assert await receiver.get_async("0", "1", "nothing", deadline=time.monotonic()) is None

        asyncio.run(travel())

    @pytest.mark.parametrize(
        ("data", "where"),
        [
            pytest.param(object(), "object", id="object"),
            pytest.param({1, 2}.__iter__(), "object", id="iterator"),
            pytest.param(2**64, "cannot be sent", id="number"),
            pytest.param([lambda: 0], r"\[0\]", id="function"),
            pytest.param({"a": [1, {"b": {2, 3}}]}, r"\['a'\]\[1\]\['b'\]", id="set"),
            pytest.param({"a": np.array(["text"])}, r"\['a'\]", id="text-array"),
            pytest.param({"a": np.array([object()])}, r"\['a'\]", id="object-array"),
            pytest.param([[{(1, 2): 3}]], r"\[0\]\[0\]", id="tuple-as-key"),
        ],
    )
    def test_what_cannot_be_sent_is_the_callers_error(
        self, open_connector: Open, data: object, where: str
    ) -> None:
        connector = open_connector()
        connector.put("0", "1", "key", "before")
        with pytest.raises(TypeError, match=where):
            connector.put("0", "1", "key", data)
        found = connector.get("0", "1", "key")
        assert found is not None
        assert found[0] == "before"

    @pytest.mark.parametrize(
        "metadata",
        [{"address": 5}, {"transport": [], "address": {}}, {5: 5}, {"unknown": "field"}],
    )
    def test_nonsense_metadata_does_no_harm(
        self, open_connector: Open, metadata: dict[Any, Any]
    ) -> None:
        connector = open_connector()
        assert connector.get("0", "1", "key", metadata) is None
        assert connector.health()["status"] == "healthy"

    def test_objects_put_and_got_by_many_threads(self, open_connector: Open) -> None:
        sender, receiver = open_connector(), open_connector()
        wrong: list[object] = []

        def work(name: int) -> None:
            for i in range(20):
                value = [name, i, b"x" * (100 * i)]
                if sender.put("0", "1", f"thread{name}", value)[0]:
                    found = receiver.get("0", "1", f"thread{name}")
                    if found is None or found[0] != value:
                        wrong.append((name, i, found))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_closed_connector_does_nothing(self, open_connector: Open) -> None:
        connector = open_connector()
        connector.put("0", "1", "key", b"object")
        for _ in range(2):
            connector.close()
        assert connector.health()["status"] == "closed"
        assert connector.put("0", "1", "key", b"object") == (False, 0, None)
        assert connector.get("0", "1", "key") is None
        # A wait that begins now ends at once.
        deadline = time.monotonic() + WAIT_S
        assert connector.get_with_deadline("0", "1", "key", deadline=deadline) is None
        assert time.monotonic() < deadline
        connector.cleanup("key")

    def test_closing_ends_a_wait(self, open_connector: Open) -> None:
        receiver = open_connector()
        deadline = time.monotonic() + WAIT_S
        found: list[Any] = []
        waiting = threading.Thread(
            target=lambda: found.append(
                receiver.get_with_deadline("0", "1", "k", deadline=deadline)
            )
        )
        waiting.start()
        time.sleep(0.1)
        receiver.close()
        waiting.join(2 * WAIT_S)
        assert found == [None]
        assert time.monotonic() < deadline

    def test_health(self, open_connector: Open) -> None:
        connector = open_connector()
        health = connector.health()
        assert health["status"] == "healthy"
        assert health["transport"] == connector.transport
