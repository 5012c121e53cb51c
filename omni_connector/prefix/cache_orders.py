# SPDX-License-Identifier: Apache-2.0
"""What `omni-connector cache` asks an engine, at the socket of `omni-connector explain`.

A thread of its own answers, so that the engine may be idle, or in a long step.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from omni_connector.net.packets import PROTOCOL, require_protocol
from omni_connector.prefix.hints import MAX_PIN_S

MAX_LISTED: Final = 256
"""Prompts in one answer, which has some 32 KiB then."""

NAME_BYTES: Final = 8
"""Bytes of a prompt's name. It is the beginning of the key of its last full block."""

_Name = Annotated[str, Meta(pattern=f"^[0-9a-f]{{{2 * NAME_BYTES}}}$")]
_Number = Annotated[int, Meta(ge=0, le=1 << 48)]
_Keys = Annotated[
    tuple[Annotated[bytes, Meta(min_length=8, max_length=64)], ...], Meta(max_length=MAX_LISTED)
]
_Seconds = Annotated[float, Meta(ge=0)]


class ListPrompts(msgspec.Struct, frozen=True, tag="list-prompts"):
    """Asks which prompts the engine's arena has; answered with `Prompts`.

    Attributes:
        first: how many of the latest prompts are left out.
    """

    first: _Number = 0
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        require_protocol(self.protocol)


class PinPrompt(msgspec.Struct, frozen=True, tag="pin-prompt"):
    """Has a prompt's blocks stay in the arena for so many seconds; answered with `Done`."""

    name: _Name
    seconds: Annotated[float, Meta(ge=0, le=MAX_PIN_S)]


class DropPrompts(msgspec.Struct, frozen=True, tag="drop-prompts"):
    """Has the arena let go of a prompt's blocks, or of all; answered with `Done`.

    Attributes:
        name: of the prompt, of whose blocks those stay that other prompts begin with; None for all.
    """

    name: _Name | None


class AskKeys(msgspec.Struct, frozen=True, tag="ask-keys"):
    """Asks for the keys of a prompt's blocks; answered with `Keys`.

    Attributes:
        name: of the prompt.
        group: of the blocks, among the groups that the engine keeps.
        first: index of the first block.
    """

    name: _Name
    group: _Number
    first: _Number


class Keys(msgspec.Struct, frozen=True, tag="keys"):
    """The keys of consecutive blocks of a prompt, of which there are `blocks` in the group.

    Attributes:
        groups: number of groups.
    """

    keys: _Keys
    blocks: _Number
    groups: _Number


class BringBlocks(msgspec.Struct, frozen=True, tag="bring-blocks"):
    """Has an engine copy blocks of a prompt from the arenas of others to its own; answered with
    `Later` until that has ended, and then with `Done`.

    Attributes:
        ticket: names the prompt; drawn by the asker.
        group, keys: of the next blocks; none to ask whether the last ones are there.
        whole: whether the prompt ends with the blocks that were named before.
    """

    ticket: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    group: _Number = 0
    keys: _Keys = ()
    whole: bool = False


class KeptPrompt(msgspec.Struct, frozen=True):
    """A prompt, with its answer as far as that is kept, of which the arena has blocks.

    Attributes:
        name: says which it is; engines that share it give it the same name.
        tokens: in its full blocks.
        kept: how many of these, from the first on, the arena has.
        age: seconds since a request with it has ended.
        hits: later requests that began with it.
        pinned: seconds for which all that is kept of it stays; 0 where some of it may be evicted.
        request: the latest request's id.
    """

    name: _Name
    tokens: _Number
    kept: _Number
    age: _Seconds
    hits: _Number
    pinned: _Seconds
    request: Annotated[str, Meta(max_length=64)]


class Prompts(msgspec.Struct, frozen=True, tag="prompts"):
    """The prompts of which the arena has blocks, the latest first.

    Attributes:
        more: how many to leave out in the next question; None where there are no more.
    """

    prompts: Annotated[tuple[KeptPrompt, ...], Meta(max_length=MAX_LISTED)]
    more: _Number | None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What has become of an order.

    Attributes:
        blocks: that were pinned or dropped.
        others: that were not: pins are bounded, and blocks that are copied or leased stay.
    """

    blocks: _Number
    others: _Number
