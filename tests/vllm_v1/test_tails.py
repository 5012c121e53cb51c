# SPDX-License-Identifier: Apache-2.0
"""The next turn of a conversation goes on within the block in which the turn before ended."""

from collections import Counter

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from omni_connector.copy import held_blocks
from omni_connector.prefix import tails
from omni_connector.stores.shared_blocks import TRAILER_BYTES
from omni_connector.vllm_v1 import scheduler
from omni_connector.vllm_v1.connector import OmniKVConnector
from tests.toy import BLOCK

from .harness import assert_clean, prompt, wait
from .places import Place, ask, publish
from .stores import MASTER, QUESTION, ShelfStore, landed

pytestmark = pytest.mark.vllm

FAMILIES = ["state and full", "all three"]
NEW = [7, 8, 9]
TURN = 2 * BLOCK + 5  # tokens of an answer
UNIT = BLOCK // 4

each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(params=["arena", "store", "folder"])
def place(request, engine, tmp_path):
    if request.param == "arena":
        return Place(engine, {"share": True}, "tokens_from_host")
    if request.param == "store":
        request.getfixturevalue("shelf")
        return Place(engine, MASTER, "tokens_shared")
    store = {"path": str(tmp_path / "kv"), "gib": 1, "lookup_timeout_s": 30}
    return Place(engine, {"store": store}, "tokens_shared")


@pytest.mark.shows(
    "hits within a block: the next turn of a conversation",
    control="test_tails_of_other_tokens_are_noticed_by_these_tests",
)
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@each_family
@pytest.mark.values
def test_the_next_turn_goes_on_where_the_last_has_ended(place, engine, family, overlap):
    """Of an answer all tokens but the last are computed."""
    options = {"family": family, "async_scheduling": overlap}
    first, second, alone = place(**options), place(**options), engine(family=family)
    kept = from_tails = 0
    for length in (1, 2, 7, 9, BLOCK, TURN):
        question = prompt(4 * BLOCK + 9, seed=length)
        said = question + publish(place, first, question, max_tokens=length)
        assert ask(place, second, [*said, *NEW], alone, count=3 * BLOCK) == len(said) - 1
        within = (len(said) - 1) % BLOCK
        # The prompt ends within a block, too, and is another end where more than it was computed.
        kept += (within > 0) + (length > 1)
        from_tails += within
        assert first.count("tails_kept") == kept
        assert second.count("tokens_from_tails") == from_tails
        assert not second.failures()
        assert_clean(first, second)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@each_family
@pytest.mark.values
def test_the_next_turn_goes_on_behind_the_prompt_whatever_was_answered(
    place, engine, family, overlap, ranks
):
    """As where the template of a chat leaves out thoughts. The state has gone on since."""
    options = {"family": family, "async_scheduling": overlap, "ranks": ranks}
    first, second = place(**options), place(**options)
    alone, from_tails = engine(family=family, ranks=ranks), 0
    for length in (7, 9, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 9):
        question = prompt(length, seed=length)
        answer = publish(place, first, question, max_tokens=TURN)
        other = [answer[0] % 400 + 3, *prompt(9, seed=1)]
        assert ask(place, second, question + other, alone, count=3 * BLOCK) == length
        from_tails += length % BLOCK
        assert second.count("tokens_from_tails") == from_tails
        assert not second.failures()
        assert_clean(first, second)


def test_a_prompt_that_was_found_as_a_whole_leaves_its_end(place, engine):
    """Its first step begins within the block, in which vLLM has loaded what others read."""
    family = "state and full"
    engines, alone = [place(family=family) for _ in range(3)], engine(family=family)
    question = prompt(2 * BLOCK + 9)
    publish(place, engines[0], question[: 2 * BLOCK + 5])
    assert ask(place, engines[1], question, alone, TURN) == 2 * BLOCK + 5
    place.settle(engines[1])
    assert ask(place, engines[2], [*question, *NEW], alone) == len(question)


def test_the_end_of_a_prompt_is_another_state_a_token_later(place, engine, monkeypatch):
    """The control: what is kept is the block that the next step has written to."""
    monkeypatch.setattr(scheduler, "copy_blocks", lambda step, pairs: None)
    family = "state and full"
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    publish(place, first, QUESTION, max_tokens=TURN)
    question = [*QUESTION, *NEW]
    assert second.generate(question, 6).tokens != alone.generate(question, 6).tokens
    assert place.loaded(second) == len(QUESTION)


def test_the_end_of_a_prompt_is_not_kept_where_blocks_are_scarce(place, engine, monkeypatch):
    """A copy takes a block, of which requests may be in need."""
    monkeypatch.setattr(held_blocks, "_SPARE_PART", 1)
    family = "state and full"
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    question = prompt(6 * BLOCK + 9)
    publish(place, first, question, max_tokens=2)
    assert ask(place, second, [*question, *NEW], alone) == 6 * BLOCK
    assert_clean(first, second)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.values
def test_with_a_match_unit_prompts_that_differ_at_their_very_ends_go_on_there(
    place, engine, overlap
):
    """As where a template opens thoughts at the end of a prompt, and leaves them out later. vLLM
    keeps the state of the last whole unit before the last token."""
    options = {"family": "state and full", "async_scheduling": overlap, "match_unit": UNIT}
    alone = engine(family="state and full")
    # Up to 0.31 vLLM keeps the last token's state where that ends a unit.
    for length in (7, BLOCK + 1, 4 * BLOCK + 9, 4 * BLOCK + 2 * UNIT + 1):
        first, second = place(**options), place(**options)
        question = prompt(length, seed=length)
        publish(place, first, question, max_tokens=TURN)
        end = (length - 1) // UNIT * UNIT
        other = [*question[:end], question[end] % 400 + 3, *NEW]
        assert ask(place, second, other, alone, count=3 * BLOCK) == end
        assert not second.failures()
        assert_clean(first, second)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.values
def test_with_a_match_unit_vllm_goes_on_with_its_own_states_too(place, engine, overlap):
    """What it has found itself within a block is loaded by no other connector."""
    options = {"family": "state and full", "async_scheduling": overlap, "match_unit": UNIT}
    first, second, alone = place(**options), place(**options), engine(family="state and full")
    said = QUESTION + publish(place, first, QUESTION, max_tokens=BLOCK)
    for end in (len(QUESTION), len(QUESTION) - 3, 6 * BLOCK + 1, len(said)):
        for each in (second, first):
            question = [*said[:end], *prompt(9, seed=end)]
            right = alone.generate(question, 20).tokens
            assert each.generate(question, 20).tokens == right
            assert each.count("tokens_from_others") == 0
            place.settle(each)
            third = place(**options)
            assert ask(place, third, [*question, *right[:-1], *NEW], alone) >= len(question)
    assert not second.failures()
    assert_clean(first, second)


@each_family
@pytest.mark.values
def test_each_turn_of_a_conversation_goes_on_there(place, engine, family):
    """A loaded tail is the request's own block: it is filled, shared and read as any other."""
    engines, alone = [place(family=family), place(family=family)], engine(family=family)
    said = prompt(9)
    for turn in range(7):
        reader = engines[turn % 2]
        before = place.loaded(reader)
        answer = reader.generate(said, max_tokens=TURN).tokens
        assert answer == alone.generate(said, TURN).tokens
        assert not turn or place.loaded(reader) - before > 0
        place.settle(*engines)
        said = said + answer + prompt(5, seed=turn)
    third = place(family=family)
    assert ask(place, third, said, alone) == len(said) - 5 - 1
    assert_clean(*engines, third)


@each_family
@pytest.mark.values
def test_a_tail_is_taken_for_no_full_block_when_vllm_asks_with_more_in_its_cache(place, family):
    first, second = place(family=family), place(family=family)
    said = prompt(2 * BLOCK + 9)
    publish(place, first, said)
    request = second.request([*said, *prompt(2 * BLOCK, seed=1)])
    second.scheduler.add_request(request)
    connector = second.scheduler.connector

    def asked(computed):
        """As vLLM asks, again and again while the store has not answered."""
        wait(lambda: connector.get_num_new_matched_tokens(request, computed)[0] is not None)
        return connector.get_num_new_matched_tokens(request, computed)[0]

    assert asked(0) == len(said)
    assert asked(BLOCK) == len(said) - BLOCK
    second.abort(request.request_id)
    assert_clean(first, second)


def test_tails_of_other_tokens_are_noticed_by_these_tests(place, engine, monkeypatch):
    def by_length(real):
        return lambda parent, tokens, *rest: real(parent, [0] * len(tokens), *rest)

    family = "state and full"
    for name in ("tail_name", "tail_names", "cell_marks", "fingerprints"):
        monkeypatch.setattr(tails, name, by_length(getattr(tails, name)))
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    said = QUESTION + publish(place, first, QUESTION, max_tokens=TURN)
    said[-2] = said[-2] % 400 + 3
    question = [*said, *NEW]
    assert second.generate(question, 6).tokens != alone.generate(question, 6).tokens
    assert place.loaded(second) == len(said) - 1


@pytest.mark.parametrize("length", [9, 3 * BLOCK + 9], ids=["first block", "later"])
@pytest.mark.values
def test_a_tail_is_found_by_its_salt_alone(place, engine, length):
    family = "state and full"
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    question = prompt(length)
    said = question + publish(place, first, question, max_tokens=3, salt="mine")
    right = alone.generate([*said, *NEW], 6).tokens
    for salt in (None, "yours"):
        assert second.generate([*said, *NEW], 6, salt=salt).tokens == right
    assert place.loaded(second) == 0
    assert second.generate([*said, *NEW], 6, salt="mine").tokens == right
    assert place.loaded(second) == len(said) - 1


@pytest.mark.shows(
    "hybrids whose attention is found deeper than their states",
    control="test_tails_of_other_tokens_are_noticed_by_these_tests",
)
@each_family
@pytest.mark.values
def test_attention_that_reaches_deeper_than_states_goes_on_at_the_deepest_tail(
    place, engine, family
):
    """vLLM computes a prompt at once, so that there is no state in its middle. Another request has
    ended there."""
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    long = prompt(9 * BLOCK + 3)
    ends = 4 * BLOCK + 5
    publish(place, first, long)
    publish(place, first, long[:ends])
    question = [*long[: 6 * BLOCK + 7], *NEW]
    assert ask(place, second, question, alone) == ends
    assert not second.failures()
    assert_clean(first, second)


def test_an_engine_gets_back_the_tail_that_its_own_cache_has_not(engine):
    """vLLM itself keeps no state within a block."""
    alone = engine("kv_both", extra={"share": True}, family="state and full", usable_blocks=120)
    reference = engine(family="state and full")
    said = QUESTION + alone.generate(QUESTION, TURN).tokens
    assert_clean(alone)
    question = [*said, *NEW]
    assert alone.generate(question, 6).tokens == reference.generate(question, 6).tokens
    cached = (len(said) - 1) // BLOCK * BLOCK
    assert alone.count("tokens_cached") == cached
    assert alone.count("tokens_kept") == len(said) - 1 - cached
    assert_clean(alone)


def test_models_without_states_keep_full_blocks_alone(place, engine):
    first, second = place(family="window and full"), place(family="window and full")
    alone = engine(family="window and full")
    said = QUESTION + publish(place, first, QUESTION, max_tokens=TURN)
    assert ask(place, second, [*said, *NEW], alone) == (len(said) - 1) // BLOCK * BLOCK


def test_a_request_that_shall_leave_nothing_leaves_no_tail(place, engine):
    family = "state and full"
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    asked = {"params": {"omni": {"cache": "no"}}}
    said = QUESTION + publish(place, first, QUESTION, max_tokens=TURN, **asked)
    assert ask(place, second, [*said, *NEW], alone) == 0


def test_embeddings_leave_no_tail(place, engine):
    """vLLM's ids of their tokens do not say what they are."""
    family = "state and full"
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    length = 3 * BLOCK + 5
    rows = torch.arange(8 * (length + 3)).reshape(-1, 8).to(torch.bfloat16)
    first.generate([0] * length, 1, embeds=rows[:length])
    place.settle(first)
    other = rows.clone()
    other[length - 1] = 0
    for each in (rows, other):
        before = place.loaded(second)
        right = alone.generate([0] * len(each), 6, embeds=each).tokens
        assert second.generate([0] * len(each), 6, embeds=each).tokens == right
        # Then it has these blocks itself.
        assert place.loaded(second) - before == (0 if each is other else 3 * BLOCK)


# In stores


def stored_groups(shelf):
    """For each group how many blocks the store has, marks among them."""
    return Counter(key.rsplit("/", 2)[1].split(".")[0] for key in shelf.entries)


@pytest.fixture
def in_store(engine, shelf):
    return Place(engine, MASTER, "tokens_shared")


@pytest.mark.parametrize("lost", ["mark", "full", "state"])
def test_of_a_tail_in_a_store_all_must_be_there(in_store, engine, shelf, lost):
    family = "state and full"
    first, second, alone = in_store(family=family), in_store(family=family), engine(family=family)
    said = prompt(2 * BLOCK + 9)
    before = publish(in_store, first, said[: 2 * BLOCK]) and set(shelf.entries)
    publish(in_store, first, said)
    new = [key for key in shelf.entries if key not in before]
    marks = [key for key in new if len(shelf.entries[key]) == TRAILER_BYTES]
    assert (len(marks), len(new)) == (1, 1 + len(stored_groups(shelf)))
    of_state = marks[0].rsplit("/", 1)[0]
    gone = {
        "mark": marks,
        "full": [key for key in new if not key.startswith(of_state)],
        "state": [key for key in new if key.startswith(of_state) and key not in marks],
    }[lost]
    shelf.evict(lambda key: key in gone)
    loaded = ask(in_store, second, [*said, *NEW], alone)
    assert loaded < len(said)
    assert loaded % BLOCK == 0
    assert not second.failures()


def test_wrong_bytes_of_a_tail_are_computed_anew(in_store, engine, shelf):
    family = "state and full"
    first, second, alone = in_store(family=family), in_store(family=family), engine(family=family)
    said = prompt(9)
    publish(in_store, first, said)
    shelf.spoil(3)
    assert ask(in_store, second, [*said, *NEW], alone) == 0
    assert second.failures() == {"store_checksum_mismatch": 1}
    # What was found wrong is not believed for a while.
    assert ask(in_store, in_store(family=family), [*said, 5], alone) == 0
    assert_clean(first, second)


def test_a_store_that_is_late_with_tails_has_its_full_blocks_used(engine, shelf, monkeypatch):
    """It answers the first question in time, and no further one."""
    family = "state and full"
    first, second = (engine("kv_both", extra=MASTER, family=family) for _ in range(2))
    alone = engine(family=family)
    said = QUESTION + first.generate(QUESTION, BLOCK).tokens
    landed(first)
    real, asked = ShelfStore.exists, []

    def late(self, keys, *, timeout):
        asked.append(keys)
        if len(asked) == 1:
            return real(self, keys, timeout=timeout)
        second.pass_time(timeout)
        return [False] * len(keys)

    monkeypatch.setattr(ShelfStore, "exists", late)
    question = [*said, *NEW]
    assert second.generate(question, 6).tokens == alone.generate(question, 6).tokens
    assert second.count("tokens_shared") == (len(said) - 1) // BLOCK * BLOCK
    assert len(asked) == 2
    assert not second.failures()


@pytest.mark.parametrize("diverges", [False, True])
@pytest.mark.values
def test_a_connector_that_continues_diverged_hits_is_asked_once(
    place, engine, monkeypatch, diverges
):
    """Why `supports_divergent_local_hybrid_hits` stays off: vLLM asks at the end of its own
    attention blocks alone. Where all states that we have end before, it computes all."""
    if diverges:
        monkeypatch.setattr(
            OmniKVConnector, "supports_divergent_local_hybrid_hits", property(lambda _: True)
        )
    else:
        assert not KVConnectorBase_V1.supports_divergent_local_hybrid_hits.fget(None)
    family = "state and full"
    first, second, alone = place(family=family), place(family=family), engine(family=family)
    long = prompt(9 * BLOCK + 3)
    publish(place, second, long)  # it has all attention blocks, and no state in the middle
    publish(place, first, long[: 3 * BLOCK + 1])  # and this one has a state after three blocks
    question = [*long[: 6 * BLOCK + 7], *NEW]
    assert second.generate(question, 6).tokens == alone.generate(question, 6).tokens
    # Of the blocks some are in its own arena, too.
    counters = ("tokens_kept", "tokens_from_host", "tokens_shared")
    loaded = sum(map(second.count, counters))
    assert loaded == (0 if diverges else 3 * BLOCK + 1)
