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
        rounding: what a log-probability may differ by where requests share a batch, or a prompt
            is computed in other pieces; exactness is asked for elsewhere.
        caches_prefixes: whether vLLM caches prefixes of it here.
        chunk: tokens a step; longer prompts are computed in chunks.
        decodes_otherwise: whether its decode kernel disagrees with its prefill kernel on this
            build, far beyond rounding and without any connector. To vLLM the one token that
            follows a hand-off is the end of a prefill; so what it must answer is what a plain
            run does whose last chunk is that one token.
    """

    name: str
    recipe: str
    caches: str
    dtype: str = "float32"
    block: int = 128
    rounding: float = 1e-3
    caches_prefixes: bool = True
    chunk: int = 512
    decodes_otherwise: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """For every engine of it: chunks are part of the numeric path."""
        return (
            *("--dtype", self.dtype),
            *("--max-model-len", "4096"),
            *("--max-num-batched-tokens", str(self.chunk)),
            *("--max-num-seqs", str(min(self.chunk, 64))),
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

    def ends_in_a_chunk_of_one(self, prompt: list[int]) -> bool:
        """Whether a plain run of the prompt computes its last token as a step of its own."""
        return len(prompt) % self.chunk == 1


FAMILIES = (
    Family("Llama", "llama", "full attention"),
    Family("Gemma 3", "gemma3", "sliding window and full attention, six groups"),
    Family("gpt-oss", "gptoss", "sliding window and full attention with sinks", dtype="bfloat16"),
    Family(
        "DeepSeek V2",
        "deepseek_v2",
        "latent attention (MLA)",
        block=16,
        caches_prefixes=False,
        chunk=8,
        decodes_otherwise=True,
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        "gated delta net and full attention",
        dtype="bfloat16",
        block=640,
        rounding=0.25,
    ),
    Family("LFM2", "lfm2", "short convolutions and full attention"),
)
