# SPDX-License-Identifier: Apache-2.0
"""Compares the KV that a request found on the decode engine with what the prefill engine holds."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omni_connector.testing.engines import Engine

from .probe import EXTENSION, KEPT

ARGUMENTS = ("--worker-extension-cls", EXTENSION)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}


@dataclass
class Probe:
    """The probe in an engine's workers; `folder` takes what they read."""

    engine: Engine
    folder: Path

    def call(self, method: str, *args: str) -> list[Any]:
        """Call a method of `KVProbe` in every worker."""
        with self.engine.client() as client:
            answer = client.post("/collective_rpc", {"method": method, "args": list(args)})
        results: list[Any] = answer["results"]
        return results

    def watch(self) -> list[dict[str, Any]]:
        """Start following requests; describe the cache groups of the first worker."""
        groups: list[dict[str, Any]] = self.call("probe_watch")[0]
        return groups

    def spoil(self) -> None:
        """Fill the cache with numbers that belong to nobody."""
        self.call("probe_spoil")

    def read(self, moment: str) -> list["Held"]:
        """What the latest request's blocks held, by rank; see `KVProbe.probe_watch`."""
        [latest] = self.read_all(moment, most=1)
        return latest

    def read_all(self, moment: str, most: int = KEPT) -> list[list["Held"]]:
        """The same of the latest requests, by request and rank."""
        ranks = len(self.call("probe_save", str(self.folder), str(most)))
        of_ranks = self.call("probe_watch")  # pipeline stages have other layers
        by_rank = [torch.load(self.folder / f"{rank}.pt") for rank in range(ranks)]
        return [
            [
                Held(groups, one["prompt"], one["computed"], one[moment])
                for groups, one in zip(of_ranks, request, strict=True)
            ]
            for request in zip(*by_rank, strict=True)
        ]


@dataclass
class Tokens:
    """What is held of some tokens of a prompt.

    Attributes:
        places: of each in the prompt, ascending.
        rows: tokens x heads x content.
    """

    places: torch.Tensor
    rows: torch.Tensor

    def between(self, start: int, end: int) -> "Tokens":
        """Those of these places."""
        chosen = (self.places >= start) & (self.places < end)
        return Tokens(self.places[chosen], self.rows[chosen])

    def held_by(self, other: "Tokens") -> torch.Tensor:
        """For each, whether the other has it, bit for bit."""
        same = torch.isin(self.places, other.places)
        theirs = other.rows[torch.searchsorted(other.places, self.places[same])]
        same[same.clone()] = (_bytes(self.rows[same]) == _bytes(theirs)).all(dim=1)
        return same


@dataclass
class Held:
    """What the blocks of one request hold on one rank.

    Attributes:
        groups: the cache groups of the engine, with the layers of the rank.
        prompt: of the request.
        computed: tokens that were there when it was first scheduled.
        content: by group, `places` in the prompt and the `layers`' tensors.
    """

    groups: list[dict[str, Any]]
    prompt: list[int]
    computed: int
    content: list[dict[str, Any]]

    def is_state(self, group: int) -> bool:
        """Whether it is a group of recurrent states."""
        return self.groups[group]["kind"] == "MambaSpec"

    def has(self, layer: str) -> bool:
        """Whether the layer is one of this rank's."""
        return any(layer in group["layers"] for group in self.groups)

    def layers(self, group: int) -> list[str]:
        return list(self.groups[group]["layers"])

    def state(self, group: int, layer: str, num_tokens: int) -> list[torch.Tensor]:
        """The state of a layer after `num_tokens` tokens."""
        content = self.content[group]
        last = (num_tokens - 1) // self.groups[group]["block_size"]
        at = max(i for i, place in enumerate(content["places"]) if place <= last)
        return [tensor[at] for tensor in content["layers"][layer]]

    def tokens(self, group: int, layer: str) -> "Tokens":
        """What is held of each token whose block is held."""
        size = self.groups[group]["block_size"]
        [tensor] = self.content[group]["layers"][layer]
        if tensor.ndim == 4:  # no heads
            tensor = tensor.unsqueeze(2)
        rows = tensor.permute(0, 1, 3, 2, 4).flatten(0, 2)
        blocks = torch.tensor(self.content[group]["places"], dtype=torch.long)
        return Tokens((blocks[:, None] * size + torch.arange(size)).flatten(), rows)

    def loaded_bytes(self, num_tokens: int) -> int:
        """Bytes of the blocks that a hand-off of `num_tokens` tokens fills on this rank."""
        total = 0
        for group, content in zip(self.groups, self.content, strict=True):
            filled = [p for p in content["places"] if p * group["block_size"] < num_tokens]
            count = 1 if group["kind"] == "MambaSpec" else len(filled)
            for tensors in content["layers"].values():
                total += sum(tensor[0].nbytes for tensor in tensors) * count
        return total


def require_same_kv(
    sent: list[Held],
    found: list[Held],
    num_tokens: int,
    *,
    start: int = 0,
    kv_heads: int | None = None,
    other_stages: bool = False,
    zeroed: Collection[str] = (),
    answered: bool = False,
) -> None:
    """Raise AssertionError unless every rank that received found exactly the sender's bytes.

    Of blocks that are filled in part, the rest must hold the sender's bytes or zeros: never what
    another request left there.

    Args:
        sent, found: by rank.
        num_tokens: tokens up to which the prompt was handed off.
        start: tokens that were not, as the decode engine had them.
        kv_heads: of the model, where the two sides have different numbers of ranks.
        other_stages: whether the two sides have different pipeline stages.
        zeroed: layers that the sender lacks, of which zeros are to be found.
        answered: whether the sender had gone on with its answer, which follows these tokens then.
    """
    for rank, held in enumerate(found):
        sender = sent[0 if kv_heads is not None or other_stages else rank]
        for group in range(len(held.groups)):
            for layer in held.layers(group):
                if layer in zeroed:
                    lacking = held.tokens(group, layer).between(start, num_tokens)
                    if not lacking.places.numel() or _bytes(lacking.rows).any():
                        raise AssertionError(f"{layer}: rank {rank} found bytes of nobody")
                    continue
                # The tensor-parallel ranks of the stage that has the layer, on both sides.
                senders, finders = ([o for o in side if o.has(layer)] for side in (sent, found))
                if other_stages:
                    sender = senders[0]
                # Layers have the same names on both sides, whatever groups they are in.
                theirs = next(g for g in range(len(sender.groups)) if layer in sender.layers(g))
                if held.is_state(group):
                    states = sent[rank % len(sent)].state(theirs, layer, num_tokens)
                    if kv_heads is not None:
                        by_rank_states = [o.state(theirs, layer, num_tokens) for o in senders]
                        place = [finder is held for finder in finders].index(True)
                        states = _channels(by_rank_states, place, len(finders))
                    if not all(map(_same, states, held.state(group, layer, num_tokens))):
                        raise AssertionError(f"{layer}: rank {rank} found another state")
                    continue
                ours = held.tokens(group, layer)
                by_rank = [one.tokens(theirs, layer) for one in senders]
                if kv_heads is None:
                    copies = [sender.tokens(theirs, layer), *_alike(by_rank, num_tokens)]
                else:
                    place = [finder is held for finder in finders].index(True)
                    first = place * kv_heads // len(finders)
                    copies = _shards(by_rank, kv_heads, first, ours.rows.shape[1])
                size = held.groups[group]["block_size"]
                end = num_tokens if answered else -(-num_tokens // size) * size
                try:
                    _require_same_tokens(copies, ours.between(start, end), num_tokens)
                except AssertionError as error:
                    raise AssertionError(f"{layer}: rank {rank} found {error}") from None


def _channels(by_rank: list[list[torch.Tensor]], place: int, ranks: int) -> list[torch.Tensor]:
    """What one of `ranks` ranks should have of the state of a short convolution, whose channels
    are the last dimension, from all the sender's ranks."""
    whole = (torch.cat(tensors, dim=-1) for tensors in zip(*by_rank, strict=True))
    return [tensor.chunk(ranks, dim=-1)[place] for tensor in whole]


def _alike(by_rank: list[Tokens], num_tokens: int) -> list[Tokens]:
    """What all ranks hold, if they hold the same of these tokens; nothing else."""
    first = by_rank[0].between(0, num_tokens)
    same = all(bool(first.held_by(each).all()) for each in by_rank[1:])
    return by_rank if same and len(by_rank) > 1 else []


def _shards(by_rank: list[Tokens], heads: int, first: int, count: int) -> list[Tokens]:
    """What the rank with these heads of the model should have, from all the sender's ranks; one
    entry for each copy that they hold."""
    places = by_rank[0].places
    assert all(torch.equal(tokens.places, places) for tokens in by_rank)
    joined = torch.cat([tokens.rows for tokens in by_rank], dim=1)
    copies = joined.shape[1] // heads
    each = (joined[:, number::copies] for number in range(copies))
    return [Tokens(places, rows[:, first : first + count]) for rows in each]


def _require_same_tokens(copies: list[Tokens], loaded: Tokens, num_tokens: int) -> None:
    """Compare tokens; behind `num_tokens`, in the last block, the bytes of any copy or zeros do as
    well."""
    wanted = copies[0]
    handed_off = loaded.places < num_tokens
    if not handed_off.any():
        raise AssertionError("no token at all")
    other = ~loaded.held_by(wanted)
    if (wrong := loaded.places[other & handed_off]).numel():
        place = int(wrong[0])
        text = "another" if place in wanted.places else "what the sender does not hold as"
        raise AssertionError(f"{text} token {place} of {num_tokens}")
    for copy in copies[1:]:
        other &= ~(loaded.held_by(copy) & ~handed_off)
    if loaded.rows[other & ~handed_off].any():
        raise AssertionError(f"bytes of another request behind token {num_tokens}")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, so that a number that is not one equals itself."""
    return torch.equal(_bytes(one[None]), _bytes(other[None]))


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of each row."""
    return rows.contiguous().flatten(1).view(torch.uint8)
