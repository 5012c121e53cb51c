# SPDX-License-Identifier: Apache-2.0
"""The cache families that vLLM's CPU build runs, and the prompts that each is tried with."""

from dataclasses import dataclass

from omni_connector.testing.reference import ROUNDING, Answer

from .prompts import random_prompt


@dataclass(frozen=True)
class Family:
    """One family of `omni_connector.testing.models`.

    Attributes:
        name: as users know it, and as `docs/models.md` has it.
        recipe: its name for `make_model`.
        caches: what it keeps, in words, for `docs/models.md`.
        dtype: of the weights and the cache. In bfloat16 the KV of a token depends on how many were
            computed with it, and where a CPU lacks AVX-512 by more than what tells a right answer
            from a wrong one.
        exactness: what a log-probability may differ by from the reference's.
        rounding: what it may differ by where a prompt is computed in other pieces than the
            reference's; None where nothing can be said, and only the KV tells what was moved.
        alike_in_batches: whether `rounding` holds for requests that share a batch. It does not
            where decode and prefill kernels disagree, as on this build, and a batch that has both
            kinds of steps takes the one for all; then, too, only the KV tells.
        caches_prefixes: whether vLLM caches prefixes of it here.
        backend: the `--attention-backend`, where vLLM's own choice depends on the CPU.
    """

    name: str
    recipe: str
    caches: str
    dtype: str = "float32"
    exactness: float = ROUNDING
    rounding: float | None = ROUNDING
    alike_in_batches: bool = True
    caches_prefixes: bool = True
    backend: str | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """For every engine of it: chunks are part of the numeric path."""
        return (
            *("--dtype", self.dtype),
            *("--max-model-len", "4096"),
            *("--max-num-batched-tokens", "512"),
            *(("--attention-backend", self.backend) if self.backend else ()),
        )

    def require_alike(self, answer: Answer, other: Answer) -> None:
        """Raise AssertionError unless answers agree that were computed in other pieces."""
        if self.rounding is not None:
            answer.require_same(other, tolerance=self.rounding)


def prompts(block: int) -> dict[str, list[int]]:
    """For blocks of so many tokens, by what they try. The sliding windows are of 128 tokens."""
    lengths = {
        "two-tokens": 2,
        "within-a-block": block // 2 + 1,
        "one-block": block,
        "one-block-and-a-token": block + 1,
        "two-blocks-and-a-part": 2 * block + block // 2 + 1,
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
    ),
    Family(
        "DeepSeek V2",
        "deepseek_v2",
        "latent attention (MLA)",
        # With AMX vLLM prefers kernels that know bfloat16 only.
        backend="CPU_MLA",
        alike_in_batches=False,
        caches_prefixes=False,
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        "gated delta net and full attention",
        # Its kernels on CPUs know no other dtype. The prefill engine leaves the last token to the
        # decode engine, so that both compute in the same passes as the reference.
        dtype="bfloat16",
        exactness=0.0,
        rounding=None,
        alike_in_batches=False,
    ),
    Family(
        "LFM2",
        "lfm2",
        "short convolutions and full attention",
        rounding=0.25,
        alike_in_batches=False,
    ),
)

BY_RECIPE = {family.recipe: family for family in FAMILIES}
# The same families with other heads, for engines of several ranks.
BY_RECIPE["llama-one-kv-head"] = BY_RECIPE["llama"]
BY_RECIPE["deepseek_v2-two-heads"] = BY_RECIPE["deepseek_v2"]
BY_RECIPE["llama-fp8-kv"] = BY_RECIPE["llama"]
# A Llama that sees pictures.
BY_RECIPE["idefics3"] = BY_RECIPE["llama"]
# Models that drafters are made for.
BY_RECIPE["llama-drafted"] = BY_RECIPE["mimo"] = BY_RECIPE["llama"]
