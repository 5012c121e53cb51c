# SPDX-License-Identifier: Apache-2.0
"""The digest by which two engines know that they speak of the same prompt.

A reference that outlived its hand-off, or was mixed up on its way, must not be answered with
the KV of another prompt: the decode side sends the digest of what it was asked, the prefill
side compares it with what it computed.
"""

import hashlib
from array import array
from collections.abc import Hashable, Sequence

import msgspec

from omni_connector.handoff.messages import DigestKind


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What determines the KV of a prompt.

    Attributes:
        token_ids: the prompt; more tokens may follow, `num_tokens` says where it ends.
        num_tokens: tokens whose KV is meant.
        block_hashes: vLLM's hashes of the full blocks, in order; may be empty.
        hash_block_size: tokens a hash covers, 0 where there are no hashes.
        extra: what else changes the KV: cache salt, content of the LoRA adapter, multimodal hashes
            with places.
        by_tokens: block hashes of other engines may differ for the same KV.
    """

    token_ids: Sequence[int]
    num_tokens: int
    block_hashes: Sequence[bytes] = ()
    hash_block_size: int = 0
    extra: tuple[str, ...] = ()
    by_tokens: bool = False

    def digest(self, kind: DigestKind) -> bytes:
        """32 bytes. `blocks` takes the hashes of full blocks and the tokens behind them,
        `tokens` all the tokens; both take `extra`."""
        hasher = hashlib.blake2b(digest_size=32, person=b"omni-prompt-1")
        covered = 0
        if kind == "blocks" and self.hash_block_size:
            full = min(self.num_tokens // self.hash_block_size, len(self.block_hashes))
            covered = full * self.hash_block_size
            hasher.update(b"".join(self.block_hashes[:full]))
        rest = array("q", self.token_ids[covered : self.num_tokens])
        # Salts come from users, and JSON can carry half of a surrogate pair.
        extra = [text.encode("utf-8", "surrogatepass") for text in self.extra]
        head = (kind, self.num_tokens, covered, extra)
        hasher.update(rest.tobytes())
        hasher.update(msgspec.msgpack.encode(head))
        return hasher.digest()

    def identity(self) -> Hashable:
        """Equal for prompts of equal KV, within this process; quick where there are hashes."""
        size = self.hash_block_size
        full = min(self.num_tokens // size, len(self.block_hashes)) if size else 0
        if not full:
            return self.digest("tokens")
        tail = tuple(self.token_ids[full * size : self.num_tokens])
        return self.num_tokens, bytes(self.block_hashes[full - 1]), tail, self.extra
