# SPDX-License-Identifier: Apache-2.0
"""Which weights an engine computes KV with, and until when.

vLLM tells a connector of new weights at most by `reset_cache`, and not even that when the prefix
cache alone is reset. But whatever may change what KV means has to reset vLLM's own prefix cache,
before the engine computes anything more. Whether the weights have changed shows when the ranks hash
them (`loaded_weights`). They do so when the engine first schedules a request after the reset:
weights may come after the reset, too, while the engine is paused, so an earlier digest would say
nothing.

    known --reset, or an attempt--> unknown --a request is scheduled--> asked --all ranks--> known
                                                                          same digest: goes on
                                                                          another one: a new epoch

KV from before stays what it was meanwhile. Nothing is computed under its name, and nothing of it
is used here, before the answer.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Final, Protocol

from msgspec import Meta, Struct

WAIT_S: Final = 1.0
"""Longest wait of requests for the digest of the weights, in seconds, from the first request on. It
takes less on a device, and for some 10 GB on a CPU. Later ones are computed, and share nothing."""

_Digest = Annotated[str, Meta(max_length=64)]


class BlockHashes(Protocol):
    """vLLM's `BlockPool`, as far as its table of hashes tells of resets."""

    @property
    def cached_block_hash_to_block(self) -> object: ...


class WeightsName(Struct, frozen=True):
    """The weights of an engine, as it tells engines that hand off to it or load from it.

    Attributes:
        digest: of the weights in the memory of all ranks; "" where it is not known.
        form: of what the digest was made of, and how; see `WeightsDigest.form`.
        trainer: digest of the name that a trainer has given them; "" where none has.
        changed: whether they are others than those that the engine was started with, or may be. If
            not, the files of the model, or its name, tell what they are.
    """

    digest: _Digest = ""
    form: _Digest = ""
    trainer: _Digest = ""
    changed: bool = False

    def difference(self, other: "WeightsName") -> str | None:
        """Why KV of the one weights is none of the other ones; None if it is, as far as can be
        known.

        Digests tell where they can be compared, names of trainers elsewhere, however alike.
        """
        if self.form and self.form == other.form:
            return None if self.digest == other.digest else "their weights in memory differ"
        if self.trainer and other.trainer:
            return None if self.trainer == other.trainer else "their trainers' names differ"
        if self.changed or other.changed:
            return (
                "weights have changed, their digests cannot be compared, and no trainer named them"
            )
        return None


@dataclass(frozen=True, slots=True)
class WeightsDigest:
    """The digest of the weights of a rank.

    Attributes:
        content: hexadecimal; equal for equal weights that were hashed in the same way.
        form: hexadecimal; of all that the weights of one model have in common on ranks of the same
            kind: names, shapes, dtypes, and how they were hashed. Where two forms are equal, the
            weights are the same if and only if the contents are.
    """

    content: str
    form: str


@dataclass(frozen=True, slots=True)
class RankWeights:
    """What a rank answers to the question which weights it has.

    Attributes:
        rank: which.
        question: number of the question.
        digest: None where the weights cannot be read.
        problem: why not.
    """

    rank: int
    question: int
    digest: WeightsDigest | None
    problem: str = ""


@dataclass(slots=True)
class WeightsSaid:
    """What is said of an engine's weights. Whoever hears something notes it here, so that a step
    in which nothing was said only compares a number.

    Attributes:
        times: how often anything was said.
        named: how often a trainer has named the weights.
        name: the last name.
    """

    times: int = 0
    named: int = 0
    name: str = ""

    def workers_called(self) -> None:
        """All workers are called, which may change their weights."""
        self.times += 1

    def weights_named(self, name: str) -> None:
        """A trainer has named the weights that the engine has now."""
        self.times += 1
        self.named += 1
        self.name = name


class WeightsEpoch:
    """The epoch of the weights: as long as it lasts, KV that was computed means what it meant.

    The engine's thread calls this; any thread may read `name`, `problem`, `sharing_id` and
    `unsettled`, and call `holds`.

    Args:
        pool: vLLM's blocks. Each reset of its prefix cache that succeeds gives it another table of
            hashes.
        ranks: of the engine.
        clock: seconds, monotonic.
        fixed: whether the weights never change, by the operator's word.
        named: whether the operator names those that the engine was started with.
        said: what is said of them.

    Attributes:
        resets: how many resets that succeeded the engine's thread has noticed.
        number: how many resets and epochs.
        name: of the weights that the engine's KV was computed with.
        known: whether the engine's weights are those of `name`, for all that is known.
        readable: whether the last question was answered by a digest.
        stained: whether vLLM's own cache may have blocks of other weights or adapters, so that
            nobody else may have what is computed, until its next reset.
        problem: why the weights cannot be read; "" where they can.
    """

    def __init__(
        self,
        pool: BlockHashes,
        ranks: int = 1,
        clock: Callable[[], float] = lambda: 0.0,
        *,
        fixed: bool = False,
        named: bool = False,
        said: WeightsSaid | None = None,
    ) -> None:
        self._pool = pool
        self._ranks = ranks
        self._clock = clock
        self._fixed = fixed
        self._said = WeightsSaid() if said is None else said
        self._noticed = self._said.times
        self._table: object = pool.cached_block_hash_to_block
        self.resets = 0
        self.number = 0
        self.name = WeightsName()
        self._named = named
        self.known = fixed and named
        self.readable = False
        self.stained = False
        self.problem = ""
        # Digest and form of the first weights, once these are known.
        self._first: tuple[str, str] | None = None
        self._digest = ""
        self._form = ""
        self._next_name = self.name
        self._ending = False
        self._attempted = False
        # Whether all in vLLM's own cache was computed with the weights that are asked for.
        self._was_reset = True
        self._computed = False  # since they were last noticed, or known
        # Whether they may have become others before they were known for the first time.
        self._suspected = False
        self._noticed_times = 0
        self._question = 0
        self._deadline: float | None = None
        self._answers: dict[int, RankWeights] = {}
        # Names are of these weights from this count on; the weights were last known at that one.
        self._named_from = 1
        self._named_when_known = 0

    def holds(self) -> bool:
        """Whether KV that is there is of the weights of `name`. Any thread may ask."""
        return not self._ending

    def attempted(self) -> None:
        """Somebody tries to reset vLLM's prefix cache. Whether it succeeds or not, the weights may
        be others."""
        self._attempted = True

    def noticed(self) -> bool:
        """Whether anything has happened since the last call with which the weights may be others.
        Then they are not `known`, unless the operator says that they never change."""
        if not self._may_differ:
            return False
        table = self._pool.cached_block_hash_to_block
        times = self._said.times
        if table is not self._table:
            self._table = table
            self.resets += 1
            self.number += 1
            self._was_reset = True
            self.stained = False
        elif self._computed:  # with weights that nobody has asked for
            self._was_reset = False
        self._attempted = self._computed = False
        self._noticed = times
        self._noticed_times += 1
        if self._fixed:
            return True
        self._suspected = True
        self.known = False
        self._question += 1
        self._deadline = None
        self._answers.clear()
        return True

    @property
    def _may_differ(self) -> bool:
        """Whether anything has happened since `noticed` with which the weights may be others."""
        return (
            self._pool.cached_block_hash_to_block is not self._table
            or self._said.times != self._noticed
            or self._attempted
        )

    @property
    def unsettled(self) -> bool:
        """Whether the next request shows which weights the engine has now. Any thread may ask."""
        return not self.known or (not self._fixed and self._may_differ)

    def ask(self, *, computes: bool = False) -> None:
        """The engine schedules requests: the weights are now those that they will be computed
        with.

        Args:
            computes: whether it computes with them before they are known.
        """
        if self.known:
            return
        self._computed |= computes
        if self._deadline is None:
            self._question += 1
            self._deadline = self._clock() + WAIT_S

    @property
    def asked(self) -> int:
        """The number of the question to the ranks; 0 where there is none."""
        return 0 if self.known or self._deadline is None else self._question

    @property
    def begun(self) -> bool:
        """Whether the ranks have answered before, with digests or not."""
        return self._first is not None

    @property
    def waits(self) -> bool:
        """Whether an answer is to be waited for."""
        return self._deadline is not None and not self.known and self._clock() < self._deadline

    def answer(self, answer: RankWeights) -> bool:
        """A rank has answered; returns whether all have. Then call `settle`."""
        if answer.question == self.asked:
            self._answers[answer.rank] = answer
        return bool(self.asked) and len(self._answers) == self._ranks

    def settle(self) -> bool:
        """Take the answers of all ranks; returns whether the weights are others than those of
        `name`. Then what was computed is void: call `begin` when that is done."""
        answers = [self._answers[rank] for rank in sorted(self._answers)]
        self._answers = {}
        self.problem = next((each.problem for each in answers if each.digest is None), "")
        digests = [each.digest for each in answers if each.digest is not None]
        self.readable = len(digests) == self._ranks
        digest, form = "", ""
        if self.readable:
            digest = _joined(each.content for each in digests)
            form = _joined(each.form for each in digests)
        first = self._first is None
        if self._first is None:
            self._first = digest, form
        same = self.readable and (digest, form) == (self._digest, self._form)
        changed = not (first or same)
        # vLLM's cache has blocks of other weights, too.
        mixed = (changed or first) and not self._was_reset
        said = self._said
        if changed:
            self._named_from = self._named_when_known + 1
        if not mixed:
            self._named_when_known = said.named
        self._digest, self._form = digest, form
        if mixed:
            self._digest = self._form = ""
            self._next_name = WeightsName(changed=True)
            self.stained = True
        else:
            others = (
                self._suspected if first else not self.readable or (digest, form) != self._first
            )
            self._next_name = WeightsName(
                digest,
                form,
                _joined([said.name]) if said.named >= self._named_from else "",
                others,
            )
        if first and self._suspected:
            self._first = "", ""  # not what the files hold
        self._computed = False
        self._was_reset = False
        self._ending = changed
        if not changed:
            self.begin()
        return changed

    def begin(self) -> None:
        """Go on with the weights of the answers, as what was computed with others is void now."""
        self.name = self._next_name
        self.number += self._ending
        self.known = True
        self._ending = False

    def void(self) -> None:
        """What was computed is void for another reason than weights, and nobody else may have what
        vLLM's own cache has now, until it is reset."""
        self.number += 1
        self.stained = True

    @property
    def sharing_id(self) -> str | None:
        """What engines that share have in common; None where this one shares with nobody.

        "" where the operator's name for the weights is all of it.
        """
        if self._fixed and self._named:
            return ""
        return self._digest if self.readable and not self.stained else None


def _joined(parts: Iterable[str]) -> str:
    joined = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")  # a trainer may name weights as it likes
        joined.update(len(encoded).to_bytes(8, "little"))
        joined.update(encoded)
    return joined.hexdigest()
