# SPDX-License-Identifier: Apache-2.0
"""What the products of an engine have in common: hand-off out, hand-off in, shared prefixes.

vLLM's calls reach a product through `OmniScheduler`, which loops over those that its engine has.
A product writes its own part of a `RequestState`, and reads no other product's.
"""

from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omni_connector.copy.held_blocks import CopyWork, EngineBlock, EngineStep, RequestBlocks
from omni_connector.requests.phases import Phase

if TYPE_CHECKING:
    from omni_connector.requests.state import Requests, RequestState

BlocksOf = Callable[[str], Sequence[Sequence[EngineBlock]]]
"""Returns the blocks of a request, by vLLM's groups."""


@dataclass(slots=True)
class Step:
    """A step that vLLM has scheduled.

    Attributes:
        work: takes the jobs that begin with it.
        output: vLLM's `SchedulerOutput`.
        busy: whether it, or an earlier step under way, computes anything.
        known: whether it is known which weights it computes with.
        requests: all that vLLM has.
        blocks_of: returns the blocks of a request.
    """

    work: CopyWork
    output: EngineStep
    busy: bool
    known: bool
    requests: "Requests"
    blocks_of: BlocksOf


class Product:
    """One of them. Each method is called on the engine's thread, and does nothing unless a product
    has something to do then. `explain` asks shared prefixes for an `offer` on a thread of its own,
    with a prompt that is no request's."""

    waits_in: ClassVar[Phase]
    """The phase of a request that it has vLLM ask for again."""

    brings_all: ClassVar[bool] = False
    """Whether its loads fill the groups, too, of which vLLM keeps nothing in its prefix cache."""

    def has_work(self) -> bool:
        """Whether vLLM has to go on stepping although it has nothing to compute."""
        return False

    def unsettled(self) -> bool:
        """Whether something waits until it is known which weights the engine has."""
        return False

    def declines(self, state: "RequestState", reason: str) -> None:
        """A request has arrived whose KV cannot be told from other KV.

        Args:
            reason: the kind of failure, which was counted.
        """

    def arrives(self, state: "RequestState", adapter: str) -> None:
        """It is known what a request that has arrived is computed with.

        Args:
            adapter: digest of its LoRA adapter's content; "" without one.
        """

    def offer(self, state: "RequestState", num_computed: int) -> int | None:
        """How many tokens after the first `num_computed` can be loaded; None: vLLM is to ask again.

        A product is asked if those before it offer nothing.
        """
        return 0

    def allocated(self, state: "RequestState", blocks: RequestBlocks, num_tokens: int) -> bool:
        """vLLM has allocated blocks for a request: `num_tokens` of them to be loaded, by whatever
        product `state.offer` names.

        Returns:
            Whether they are loaded without the KV of this engine's drafter.
        """
        return False

    def lacks_drafter(self, blocks: Sequence[Sequence[EngineBlock]], first: int) -> None:
        """Blocks of a request are loaded without the drafter's KV, from the token `first` on."""

    def gives_nothing(self, state: "RequestState", reason: str, text: str) -> None:
        """A request has blocks that lack KV which others would expect there.

        Args:
            reason: the kind of failure.
            text: what the log says.
        """

    def takes_nothing(self, state: "RequestState", reason: str, text: str) -> None:
        """Load nothing more for a request: a load was not good, or its weights are not known.

        Args:
            reason, text: as of `gives_nothing`.
        """

    def step(self, step: Step) -> None:
        """Add the jobs that begin with a step."""

    def step_ended(self) -> None:
        """vLLM has taken over what a step has computed."""

    def failed_loads(self, told: Container[str]) -> Iterable[tuple[Any, bool]]:
        """vLLM's requests whose loads have ended since the last call without good KV, each with
        whether vLLM learns of that by itself.

        Args:
            told: the requests whose loads vLLM knows to have failed as a whole.
        """
        return ()

    def blocks_void(self, block_ids: Set[int]) -> None:
        """These KV blocks hold what no model has computed, and vLLM computes them anew."""

    def distrust(self) -> None:
        """An adapter was replaced: steps under way may have computed with the former or the new
        one."""

    def suspend(self, states: Iterable["RequestState"]) -> None:
        """The weights may have changed: what is being loaded now is not used.

        Args:
            states: of all requests that have not ended.
        """

    def settle(self) -> None:
        """The weights are known, and the same as before."""

    def void(self, states: Iterable["RequestState"]) -> None:
        """The weights have changed: whatever was computed or loaded before is void.

        Args:
            states: of all requests that have not ended.
        """

    def follow(self, weights: str | None) -> None:
        """The engine has these weights from now on; None: those of nobody else."""

    def clear(self) -> None:
        """Somebody has asked to forget the blocks that are kept."""

    def ends(self, state: "RequestState", blocks_of: BlocksOf | None) -> dict[str, Any] | None:
        """A request is over; returns what its client is answered of it.

        Args:
            blocks_of: returns the blocks of a request, which vLLM frees after this call; None where
                the weights are not known.
        """
        return None

    def count_failures(self) -> None:
        """Count what has failed on other threads since the last call."""

    def close(self) -> None:
        """Let go of everything. Idempotent."""
