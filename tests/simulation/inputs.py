# SPDX-License-Identifier: Apache-2.0
"""What requests of a simulation have beside their tokens: salts, images, embeddings, adapters.

The toy model computes other KV for each of them, so that whatever is used for a request of other
inputs shows in its next token.
"""

import os
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from tests.simulation.plan import Event, Plan


@dataclass(frozen=True)
class Inputs:
    """Of a request.

    Attributes:
        adapter: number of its LoRA adapter; 0 for none.
        image: what its first token stands for; "" for the token itself.
        embedded: number of the embeddings that it brings; 0 for none.
        salt: of its cache.
    """

    adapter: int = 0
    image: str = ""
    embedded: int = 0
    salt: str | None = None

    def options(self, prompt: list[int]) -> dict[str, Any]:
        """What vLLM's request is told."""
        found: dict[str, Any] = {}
        if self.adapter:
            found["lora_request"] = adapter(self.adapter)
        if self.image:
            place = PlaceholderRange(offset=0, length=1)
            found["mm_features"] = [MultiModalFeatureSpec(None, "image", self.image, place)]
        if self.embedded:
            found["prompt_embeds"] = torch.full((len(prompt), 1), float(self.embedded))
        return found

    def content(self, adapter: bytes) -> bytes:
        """What the model computes with beside its weights and the tokens.

        Args:
            adapter: what the request's adapter held when its engine loaded it.
        """
        if self == NOTHING:
            return b""
        return repr((adapter, self.image, self.embedded, self.salt)).encode()


NOTHING: Final = Inputs()


class EncodedRequest(Request):
    """One whose images were encoded before; the toy has no encoder."""

    def __hash__(self) -> int:
        """Not its address, because vLLM's scheduler goes through sets of requests."""
        return hash(self.request_id)

    @property
    def has_encoder_inputs(self) -> bool:
        return False


def adapter(number: int) -> LoRARequest:
    """An adapter, as requests name it."""
    return LoRARequest(f"style {number}", number, str(_folder(number)))


def adapter_content(number: int) -> bytes:
    """What is in the files of an adapter now."""
    return (_folder(number) / "adapter_model.safetensors").read_bytes()


def write_adapter(number: int, version: int) -> None:
    """Write the files of an adapter."""
    folder = _folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    weights = folder / "adapter_model.safetensors"
    if weights.exists():
        # A clock of coarse ticks may not tell two files apart: each has an inode of its own.
        weights.rename(folder / f"former {len(list(folder.iterdir()))}")
    weights.write_bytes(bytes([number]) * (1 + version))


def remove_adapters() -> None:
    """Remove the files of all adapters."""
    for folder in Path(os.environ[RUNTIME_DIR_VARIABLE]).glob("adapter-*"):
        shutil.rmtree(folder)


def _folder(number: int) -> Path:
    return Path(os.environ[RUNTIME_DIR_VARIABLE]) / f"adapter-{number}"


_OFTEN: Final = 0.2
_CHOICES: Final = (
    (Inputs(), Inputs(salt="a"), Inputs(salt="b")),
    (Inputs(), Inputs(image="one"), Inputs(image="two")),
    (Inputs(), Inputs(embedded=1), Inputs(embedded=2)),
    (Inputs(adapter=1), Inputs(adapter=1), Inputs(adapter=2)),
    (Inputs(), Inputs(adapter=1), Inputs(image="one"), Inputs(salt="a"), Inputs(embedded=1)),
)


def varied(plan: Plan, draw: random.Random) -> Plan:
    """The same with inputs beside the tokens, for some of the plans; the plan itself for the
    others. Of some hand-offs the two requests differ in them, and adapters are written anew.

    Args:
        draw: of this, and of nothing else.
    """
    # The model of hints knows blocks by vLLM's hashes, which name no content of an adapter.
    if any("wish" in event.how for event in plan.events) or draw.random() >= _OFTEN:
        return plan
    choice = draw.choice(_CHOICES)
    same = draw.random() < 0.5  # prompts that differ in nothing else
    prompt = draw.randrange(3), draw.choice((13, 33))
    events: list[Event] = []
    for event in plan.events:
        if event.what not in ("serve", "hand_off"):
            events.append(event)
            continue
        how = event.how | {"inputs": draw.choice(choice)}
        if same:
            how["prompt"] = prompt
        if event.what == "hand_off" and draw.random() < 0.3:
            how["decoded"] = draw.choice(choice)
        events.append(replace(event, how=how))
        if choice[0].adapter and draw.random() < 0.3:
            number = {"number": draw.choice((1, 1, 2))}
            events.append(Event("rewrite", number, draw.choice((10, 100)), 0))
    handed = next((each for each in events if each.what == "hand_off"), None)
    if handed is not None and draw.random() < 0.5:
        sharing = [engine.name for engine in plan.engines if engine.hosts]
        if choice[1].adapter and len(sharing) > 1 and draw.random() < 0.5:
            events = [*_other_version(choice[1], sharing, draw), *events]
        else:
            events = [*_mismatch(handed, choice[1], choice[2], draw), *events]
    return replace(
        plan, events=tuple(replace(each, number=number) for number, each in enumerate(events))
    )


def _other_version(inputs: Inputs, sharing: Sequence[str], draw: random.Random) -> list[Event]:
    """Of two engines that share arenas each has loaded another version of an adapter."""
    first, other = draw.sample(sharing, 2)
    served = {
        "prompt": (draw.randrange(3), draw.choice((20, 33))),
        "tokens": 1,
        "priority": 0,
        "inputs": inputs,
    }
    return [
        Event("serve", served | {"engine": first}, draw.choice((0, 100)), 0),
        Event("rewrite", {"number": inputs.adapter}, draw.choice((100, 300)), 0),
        Event("serve", served | {"engine": other}, draw.choice((0, 100)), 0),
    ]


def _mismatch(handed: Event, first: Inputs, other: Inputs, draw: random.Random) -> list[Event]:
    """A hand-off that only the inputs beside the tokens forbid, by block hashes or by tokens."""
    how = handed.how | {
        "prompt": (draw.randrange(3), draw.choice((13, 33))),
        "inputs": first,
        "times": 1,
        "prefills": 1,
        "leaves": False,
        "mixed_up": False,
        "rejected": False,
        "passed_on": False,
        "pause": 0.0,
    }
    if not first.adapter:
        return [Event("hand_off", how | {"decoded": other}, 0, 0)]
    # The prefill engine computes with what it has loaded, the decode engine with what came after.
    served = {"engine": how["prefill"], "prompt": (0, 5), "tokens": 1, "priority": 0}
    return [
        Event("serve", served | {"inputs": first}, 0, 0),
        Event("rewrite", {"number": first.adapter}, 100, 0),
        Event("hand_off", how, 0, 0),
    ]
