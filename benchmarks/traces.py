# SPDX-License-Identifier: Apache-2.0
"""Prompts as lists of blocks: of conversations, and of agents; and conversations as tokens.

A trace is a list of prompts in the order of their arrival. A prompt is a list of numbers, one for
each of its full blocks, and a number stands for all tokens up to the end of its block: two prompts
have the same number where they begin alike up to there.
"""

import hashlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Trace = list[list[int]]


def block_key(*numbers: int) -> bytes:
    """The key of a block: a hash, as vLLM's are, since the slot pool looks at its first bytes."""
    return hashlib.sha256(b"%r" % (numbers,)).digest()


def _in_time(sessions: Iterator[Iterator[tuple[float, list[int]]]]) -> Trace:
    """The prompts of all sessions in the order of their times."""
    return [prompt for _, prompt in heapq.merge(*sessions, key=lambda turn: turn[0])]


def _numbers() -> Callable[[int], list[int]]:
    """Returns a function that gives so many numbers that no block has yet."""
    given = 0

    def fresh(count: int) -> list[int]:
        nonlocal given
        given += count
        return list(range(given - count, given))

    return fresh


def conversations(seed: int = 0, seconds: float = 3537.0) -> Trace:
    """Conversations as in Mooncake's conversation trace, of which the figures below were taken.

    There: 12,031 prompts of 12,035 tokens on average in an hour, in blocks of 512, all with the
    same first block. A third of the prompts continues an earlier one, on average 105 s (median)
    after it; first turns are short questions or long documents.
    """
    random = np.random.default_rng(seed)
    fresh = _numbers()
    system = fresh(1)

    def conversation(start: float) -> Iterator[tuple[float, list[int]]]:
        at, blocks = start, system
        continues, pace = 0.2, random.lognormal(np.log(135.0), 0.75)
        while at < seconds:
            short = random.random() < (0.3 if blocks is system else 0.7)
            size = random.lognormal(0.4, 0.7) if short else random.lognormal(2.75, 0.95)
            blocks = blocks + fresh(min(240, int(size)))
            if at >= 0:
                yield at, blocks
            if random.random() >= continues:
                return
            continues = 0.58
            at += pace * random.lognormal(0.0, 0.4)

    # Conversations of before the trace go on in it.
    early = 900.0
    starts = np.sort(random.uniform(-early, seconds, int((early + seconds) * 2.3)))
    return _in_time(conversation(start) for start in starts.tolist())


def agents(seed: int = 0, seconds: float = 3600.0) -> Trace:
    """Agents that call tools: many turns, each of which goes on with a tool's result.

    A session has the prompt of one of eight kinds of agents, some of them far more frequent, and
    then its own task. A turn adds a few blocks or, where a tool has read a file, many. The next one
    comes after seconds, or after minutes where a person answers. Some sessions start another agent
    that begins with what they know, and among them are prompts that nobody continues.
    """
    random = np.random.default_rng(seed)
    fresh = _numbers()
    systems = [fresh(int(size)) for size in random.integers(10, 60, 8)]
    popular = 1 / np.arange(1, 9)
    popular /= popular.sum()

    def session(start: float) -> Iterator[tuple[float, list[int]]]:
        at = start
        blocks = systems[random.choice(8, p=popular)] + fresh(int(random.lognormal(1.5, 0.8)))
        if random.random() < 0.75:
            yield at, blocks + fresh(int(random.lognormal(3.0, 0.8)))
            return
        turns = random.geometric(1 / 10)
        for _ in range(turns):
            if at >= seconds:
                return
            yield at, blocks
            if random.random() < 0.05:
                yield at, blocks + fresh(int(random.lognormal(2.0, 0.8)))
            reads = random.random() < 0.15
            blocks = blocks + fresh(1 + int(random.lognormal(2.6 if reads else 0.7, 0.8)))
            person = random.random() < 0.15
            at += random.lognormal(np.log(1200.0 if person else 150.0), 0.9)

    starts = np.sort(random.uniform(0, seconds, int(seconds * 1.0)))
    return _in_time(session(start) for start in starts.tolist())


def documents(seed: int = 0, count: int = 2500) -> Trace:
    """One-shot documents: a short prompt that all share, one of 20 instructions, and then a long
    text that no other prompt has. One in 50 is asked about a second time, some prompts later."""
    random = np.random.default_rng(seed)
    fresh = _numbers()
    system = fresh(1)
    instructions = [fresh(1) for _ in range(20)]
    prompts: list[tuple[float, list[int]]] = []
    for at in range(count):
        text = fresh(1 + min(240, int(random.lognormal(3.0, 0.7))))
        prompt = system + instructions[random.integers(20)] + text
        prompts.append((at, prompt))
        if random.random() < 0.02:
            prompts.append((at + random.exponential(100.0), prompt + fresh(1)))
    return [prompt for _, prompt in sorted(prompts, key=lambda each: each[0])]


def mixed(seed: int = 0, seconds: float = 1800.0) -> Trace:
    """Conversations and one-shot documents on one engine, two documents for three prompts of
    conversations, in an order that is drawn."""
    random = np.random.default_rng(seed)
    talks = conversations(seed, seconds)
    texts = documents(seed, 2 * len(talks) // 3)
    offset = 1 + max(max(prompt) for prompt in talks)
    texts = [[block + offset for block in prompt] for prompt in texts]
    order = random.permutation([True] * len(talks) + [False] * len(texts)).tolist()
    left, right = iter(talks), iter(texts)
    return [next(left if talk else right) for talk in order]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        session: number of the conversation.
        question: token ids of what the user adds to all that was said before.
        answer: tokens of the answer.
    """

    session: int
    question: list[int]
    answer: int


QUESTION_TOKENS, ANSWER_TOKENS = 69.5, 214.5
"""Means of LMSYS-Chat-1M."""
_QUESTION_MEDIAN = 0.85  # of the mean
_MOST_TOKENS = 1024


def dialogues(sessions: int, turns: int, vocabulary: range, seed: int = 0) -> list[Turn]:
    """Turns of conversations in the order in which they arrive.

    All sessions have their first turn, then all have their second one, and so on, each time in
    another order.

    The means of questions and answers are those of a million conversations with chat models
    (LMSYS-Chat-1M, arXiv:2309.11998, table 1: 69.5 tokens a prompt, 214.5 tokens a response). The
    lengths of answers are distributed exponentially, as ServeGen found in production
    (arXiv:2505.09999). Those of questions are lognormal with a median of 0.85 of the mean, as in
    vLLM's own benchmark of conversations (`benchmarks/multi_turn`). Both end at 1,024 tokens.

    Args:
        vocabulary: token ids of the questions.
    """
    random = np.random.default_rng(seed)
    sigma = np.sqrt(-2 * np.log(_QUESTION_MEDIAN))

    def length(drawn: float) -> int:
        return int(np.clip(round(drawn), 1, _MOST_TOKENS))

    def turn(session: int) -> Turn:
        size = length(random.lognormal(np.log(_QUESTION_MEDIAN * QUESTION_TOKENS), sigma))
        question = random.integers(vocabulary.start, vocabulary.stop, size).tolist()
        return Turn(session, question, length(random.exponential(ANSWER_TOKENS)))

    return [
        turn(session) for _ in range(turns) for session in random.permutation(sessions).tolist()
    ]
