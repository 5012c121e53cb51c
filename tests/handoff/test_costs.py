# SPDX-License-Identifier: Apache-2.0
"""Which hand-offs a decode engine refuses, because it computes their prompts sooner."""

from hypothesis import given
from hypothesis import strategies as st

from omni_connector.handoff.costs import EXPLORED, MARGIN, SAMPLES, STAY, HandoffCosts

PEER = "prefill"
TOKENS = 40


class Engine:
    """An engine that knows how long its loads and steps take, and has a clock of its own.

    `rest_s` is what the step takes that computes what a load leaves: a token.
    """

    def __init__(self, load_s: float, compute_s: float, rest_s: float | None = None) -> None:
        self.costs = HandoffCosts()
        self.now = 0.0
        self.learn(load_s, compute_s)
        for _ in range(SAMPLES if rest_s is not None else 0):
            self.step(1, rest_s or 0.0)

    def learn(self, load_s: float, compute_s: float, samples: int = SAMPLES) -> None:
        for _ in range(samples):
            self.costs.loaded(PEER, TOKENS, load_s)
            self.step(TOKENS, compute_s)

    def step(self, tokens: int, seconds: float) -> None:
        self.costs.step_begins(self.now, tokens)
        self.now += seconds
        self.costs.step_ends(self.now)

    def refusals(self, number: int, others: int = 0, tokens: int = TOKENS) -> list[bool]:
        return [self.costs.refuses(PEER, tokens, others) for _ in range(number)]


durations = st.floats(1e-4, 10.0)


def test_a_load_that_is_slower_than_computing_is_refused_but_for_one_in_eight() -> None:
    assert Engine(0.0126, 0.010).refusals(16) == 2 * [*7 * [True], False]


def test_a_load_that_is_hardly_slower_is_made() -> None:
    assert not any(Engine(0.0124, 0.010).refusals(16))


def test_a_load_saves_the_time_beyond_the_step_that_follows_it() -> None:
    assert not any(Engine(0.0049, 0.014, 0.010).refusals(16))
    assert any(Engine(0.0051, 0.014, 0.010).refusals(16))
    # One that saves nothing is not made, however fast.
    assert any(Engine(1e-9, 0.010, 0.011).refusals(16))


def test_what_a_load_leaves_may_be_more_than_a_token() -> None:
    """With a drafter of several modules, or windows that are computed again."""
    engine = Engine(0.0051, 0.014)
    for tokens in (5, 9):
        for _ in range(SAMPLES):
            engine.step(tokens, 0.002 * tokens)
    for _ in range(SAMPLES - 1):
        engine.step(1, 0.001)
    assert any(engine.refusals(16))
    engine.step(1, 0.001)
    assert not any(engine.refusals(16))


@given(st.integers(0, SAMPLES - 1), st.booleans())
def test_without_enough_samples_of_both_every_hand_off_is_made(few: int, loads: bool) -> None:
    engine = Engine(0.0, 0.0)
    engine.costs = HandoffCosts()
    engine.learn(1.0, 0.001, few)
    for _ in range(SAMPLES - few):
        if loads:
            engine.costs.loaded(PEER, TOKENS, 1.0)
        else:
            engine.step(TOKENS, 0.001)
    assert not any(engine.refusals(64))
    engine.learn(1.0, 0.001, SAMPLES - few)
    assert any(engine.refusals(64))


def test_peers_and_lengths_are_judged_by_their_own_durations() -> None:
    engine = Engine(1.0, 0.001)
    assert not engine.costs.refuses("another", TOKENS, 0)
    assert not any(engine.refusals(16, tokens=32))
    assert engine.refusals(2, tokens=33) == [True, True]
    assert engine.refusals(2, tokens=64) == [True, True]
    assert not any(engine.refusals(16, tokens=65))


@given(durations, durations, durations, st.integers(0, 300), st.integers(1, 200))
def test_constant_durations_decide_the_same_for_ever(
    load_s: float, compute_s: float, rest_s: float, others: int, number: int
) -> None:
    engine = Engine(load_s, compute_s, rest_s)
    decided = []
    for _ in range(number):
        refused = engine.costs.refuses(PEER, TOKENS, others)
        decided.append(refused)
        if refused:
            engine.step(TOKENS, compute_s)
        else:
            engine.costs.loaded(PEER, TOKENS, load_s)
            engine.step(1, rest_s)
    if any(decided):
        # All but every eighth: refusals neither begin nor end later.
        assert decided == [place % EXPLORED > 0 for place in range(1, number + 1)]
    # Sums of many durations round.
    saved, rounding = (1 + others) * max(0.0, compute_s - rest_s), 1e-9 * (1 + others)
    assert any(decided) == (load_s > MARGIN * saved) or abs(load_s - MARGIN * saved) < rounding


@given(
    st.lists(st.floats(STAY * 1.01, MARGIN * 0.99), min_size=1, max_size=300),
    st.booleans(),
)
def test_durations_between_the_margins_change_no_decision(
    ratios: list[float], refuses: bool
) -> None:
    engine = Engine(3.0 if refuses else 0.5, 1.0)
    before = engine.refusals(1)
    assert before == [refuses]
    decided = []
    for ratio in ratios:
        engine.costs.loaded(PEER, TOKENS, ratio)
        decided.append(engine.costs.refuses(PEER, TOKENS, 0))
    places = range(2, 2 + len(ratios))
    assert decided == [refuses and place % EXPLORED > 0 for place in places]


def test_loads_that_have_become_fast_are_made_again() -> None:
    engine = Engine(1.0, 0.1)
    made = 0
    refused = 0
    while refused < 1000 and made < SAMPLES:
        if engine.costs.refuses(PEER, TOKENS, 0):
            refused += 1
            engine.step(TOKENS, 0.1)
        else:
            made += 1
            engine.costs.loaded(PEER, TOKENS, 0.01)
    assert refused <= SAMPLES * EXPLORED
    assert not any(engine.refusals(64))


def test_a_load_saves_its_time_to_the_requests_beside_it_too() -> None:
    engine = Engine(0.1, 0.014, 0.010)
    assert any(engine.refusals(1, others=0))
    assert any(engine.refusals(1, others=18))
    assert not any(engine.refusals(16, others=31))
    # Where it is not known what a step takes else, all of it counts.
    assert not any(Engine(0.1, 0.014).refusals(16, others=8))


def test_steps_are_timed_each_from_its_own_begin() -> None:
    """With async scheduling the next step begins before one has ended."""
    costs = HandoffCosts()
    for number in range(SAMPLES):
        costs.step_begins(10.0 * number, TOKENS)
        costs.step_begins(10.0 * number + 1.0, 1)
        costs.step_begins(10.0 * number + 1.5, 0)
        costs.step_ends(10.0 * number + 2.0)
        costs.step_ends(10.0 * number + 2.5)
        costs.step_ends(10.0 * number + 5.0)
        costs.loaded(PEER, TOKENS, 0.63)
    costs.step_ends(1e9)  # of a step that nobody has told of
    # 2 s beside 1.5: a load saves 0.5.
    assert costs.refuses(PEER, TOKENS, 0)
    assert not costs.refuses(PEER, TOKENS, 1)
