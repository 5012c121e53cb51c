# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half knows of a request's hand-off: `HandoffReceiver` writes a `Fetch`, and
`HandoffSender` a `Send`."""

from concurrent.futures import Future
from dataclasses import dataclass, field

from omni_connector.arena.slot_index import SlotKey
from omni_connector.copy.held_blocks import Block, EngineRequest
from omni_connector.handoff.client import Lease
from omni_connector.handoff.leases import Handoff
from omni_connector.handoff.params import RemotePrefill
from omni_connector.handoff.prompt import Prompt


@dataclass(slots=True, eq=False)
class Fetch:
    """A request's KV at the engine that has computed its prompt: the lease on it, and its load."""

    request: EngineRequest
    prompt: Prompt
    remote: RemotePrefill
    address: str
    asked_at: float
    answer_by: float = 0.0
    idle_before: float = 0.0  # what `_idle_time` was when the lease request was sent
    # What `_idle_time` was when its lease was found to be old for the first time. Until then it may
    # have waited for something else, such as room in the own arena.
    idle_at_first: float | None = None
    future: "Future[Lease] | None" = None
    lease: Lease | None = None
    slow_answers: int = 0  # in succession
    former: Lease | None = None  # an old lease, held until a new one has come
    job_id: int | None = None
    ended: bool = False
    void: bool = False  # its KV is of weights that the engine no longer has
    incomplete: set[int] = field(default_factory=set)  # see `HandoffReceiver.incomplete`

    @property
    def waits(self) -> bool:
        """Whether its load has neither begun nor been given up."""
        return not self.ended and self.job_id is None


@dataclass(slots=True, eq=False)
class Send:
    """A request's hand-off: its prompt, its slots once it has some, and the copies to them."""

    request: EngineRequest
    prompt: Prompt
    first_blocks: list[int]
    keys: list[list[SlotKey | None]]
    copied: list[int]  # for each group the first block that is yet to be copied
    block_ids: set[int] = field(default_factory=set)  # that the copied blocks were read from
    wait_until: float | None = None
    waits: bool = False  # for room
    handoff: Handoff | None = None
    refusal: str | None = None
    jobs: dict[int, list[Block]] = field(default_factory=dict)
