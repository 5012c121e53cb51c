# SPDX-License-Identifier: Apache-2.0
"""The cache families that vLLM's CPU build runs, and the prompts that each is tried with."""

from dataclasses import dataclass

from .harness import random_prompt


@dataclass(frozen=True)
class Family:
    """One family of `omni_connector.testing.models`.

    Attributes:
        name: as users know it, and as `docs/models.md` has it.
        recipe: its name for `make_model`.
        caches: what it keeps, in words, for `docs/models.md`.
        dtype: of the weights and the cache.
        block: tokens a block, as vLLM chooses it.
        exactness: what a log-probability may differ by from the reference's; 0 is bit for bit.
        rounding: what a log-probability may differ by where requests share a batch, or a prompt
            is computed in other pieces.
        alike_in_batches: whether that holds for batches. It does not where decode and prefill
            kernels disagree, as on this build, and a batch that has both kinds of steps takes
            the one for all; then only the KV tells whether a hand-off was right.
        caches_prefixes: whether vLLM caches prefixes of it here.
    """

    name: str
    recipe: str
    caches: str
    dtype: str = "float32"
    block: int = 128
    exactness: float = 0.0
    rounding: float = 1e-3
    alike_in_batches: bool = True
    caches_prefixes: bool = True

    @property
    def arguments(self) -> tuple[str, ...]:
        """For every engine of it: chunks are part of the numeric path."""
        return (
            *("--dtype", self.dtype),
            *("--max-model-len", "4096"),
            *("--max-num-batched-tokens", "512"),
        )

    @property
    def prompts(self) -> dict[str, list[int]]:
        """By what they try. The sliding windows are of 128 tokens."""
        lengths = {
            "two-tokens": 2,
            "within-a-block": self.block // 2 + 1,
            "one-block": self.block,
            "one-block-and-a-token": self.block + 1,
            "two-blocks-and-a-part": 2 * self.block + self.block // 2 + 1,
            "longer-than-the-window": 297,
            "in-chunks": 1497,
        }
        return {name: random_prompt(seed, n) for seed, (name, n) in enumerate(lengths.items(), 40)}


FAMILIES = (
    Family("Llama", "llama", "full attention"),
    Family("Gemma 3", "gemma3", "sliding window and full attention, six groups"),
    Family(
        "gpt-oss",
        "gptoss",
        "sliding window and full attention with sinks",
        dtype="bfloat16",
        rounding=0.25,
    ),
    Family(
        "DeepSeek V2",
        "deepseek_v2",
        "latent attention (MLA)",
        block=16,
        # The prefill engine computes a token more than the reference does, and the rows of its
        # prefill round by how many they are.
        exactness=1e-3,
        alike_in_batches=False,
        caches_prefixes=False,
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        "gated delta net and full attention",
        dtype="bfloat16",
        block=640,
        rounding=0.25,
    ),
    Family(
        "LFM2",
        "lfm2",
        "short convolutions and full attention",
        rounding=0.25,
        alike_in_batches=False,
    ),
)
