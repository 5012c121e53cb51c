# SPDX-License-Identifier: Apache-2.0
"""The digest by which two engines know that they mean the same prompt.

A token may be mixed up on its way. Then the KV of another prompt must not be used: the decode
engine sends the digest of its prompt, and the directory of the prefill engine compares it.
"""

import hashlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_connector.handoff.messages import DigestKind


@dataclass(frozen=True, slots=True)
class PromptRules:
    """How an engine tells prompts from each other, and which part of one it hands off.

    Attributes:
        prompt_of: makes the prompt of a request's first tokens: of the request, their number, the
            digest of its adapter, and `tokens_ahead`. It returns None where tokens are not known
            that its KV depends on.
        tokens_ahead: tokens after a position that its KV depends on.
        stops_early: whether a prefill must end where the decode begins, as a cache group keeps its
            last tokens only.
        state_block: tokens of a block at whose end a state is kept; 0 where none is.
    """

    prompt_of: "Callable[[Any, int, str, int], Prompt | None]"
    tokens_ahead: int = 0
    stops_early: bool = False
    state_block: int = 0

    @property
    def tokens_left(self) -> int:
        """Last tokens of a prompt that are left to the decode engine. vLLM computes the very last
        one there in any case, for its logits."""
        return max(1, self.tokens_ahead)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What determines the KV of a prompt.

    Attributes:
        token_ids: the prompt, its first `num_tokens` tokens; more may follow.
        block_hashes: vLLM's hashes of the full blocks, in order; may be empty.
        hash_block_size: tokens that a hash covers, 0 where there are no hashes.
        extra: what else changes the KV: cache salt, content of the LoRA adapter, multimodal hashes
            and positions, and the tokens after the prompt that a drafter's KV depends on. Names of
            blocks must say it, too: by `block_hashes`, `tokens_ahead` or `adapter`.
        tokens_ahead: tokens after a block that its KV depends on; see `block_names`.
        named_tokens: tokens whose KV is what names of blocks say; None: all.
        adapter: digest of the LoRA adapter's content; "" without one. vLLM's block hashes name an
            adapter by its path: they may differ for the same KV, and be the same for other KV.
        embeddings: uint8 `(tokens, bytes)`, what the model reads in place of tokens; None where the
            prompt is tokens alone. The block hashes cover them.
    """

    token_ids: Sequence[int]
    num_tokens: int
    block_hashes: Sequence[bytes] = ()
    hash_block_size: int = 0
    extra: tuple[str, ...] = ()
    tokens_ahead: int = 0
    named_tokens: int | None = None
    adapter: str = ""
    embeddings: NDArray[np.uint8] | None = None

    def digest(self, kind: DigestKind) -> bytes:
        """32 bytes: of `extra`, and of all tokens and embeddings (`tokens`), or of the hashes of
        the full blocks and the tokens and embeddings after them (`blocks`)."""
        hasher = hashlib.blake2b(digest_size=32, person=b"omni-prompt-1")
        full = self._full_blocks if kind == "blocks" else 0
        covered = full * self.hash_block_size
        hasher.update(b"".join(self.block_hashes[:full]))
        rest = array("q", self.token_ids[covered : self.num_tokens])
        # Salts come from users, and JSON can contain half a surrogate pair.
        extra = [text.encode("utf-8", "surrogatepass") for text in self.extra]
        head = (kind, self.num_tokens, covered, extra)
        hasher.update(rest.tobytes())
        hasher.update(self._embedded_from(covered))
        hasher.update(msgspec.msgpack.encode(head))
        return hasher.digest()

    def identity(self) -> Hashable:
        """Equal for prompts of equal KV, within this process; fast where there are hashes."""
        full = self._full_blocks
        if not full:
            return self.digest("tokens")
        covered = full * self.hash_block_size
        tail = tuple(self.token_ids[covered : self.num_tokens])
        embedded = hashlib.blake2b(self._embedded_from(covered), digest_size=32).digest()
        return self.num_tokens, bytes(self.block_hashes[full - 1]), tail, embedded, self.extra

    def _embedded_from(self, first: int) -> bytes:
        """The embeddings of the tokens from `first` on; none where the prompt has none."""
        return (
            b"" if self.embeddings is None else self.embeddings[first : self.num_tokens].tobytes()
        )

    @property
    def _full_blocks(self) -> int:
        """Full blocks that have a hash."""
        size = self.hash_block_size
        return min(self.num_tokens // size, len(self.block_hashes)) if size else 0
