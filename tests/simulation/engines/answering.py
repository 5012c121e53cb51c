# SPDX-License-Identifier: Apache-2.0
"""How a request wants to be answered, beside the number of tokens."""

from dataclasses import dataclass
from typing import Any, Final

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


@dataclass(frozen=True)
class Answering:
    """What ends an answer, and what must come before it.

    Attributes:
        stops: each so many-th token ends the answer; 0: none does.
        min_tokens: no stop token ends it before.
        compile_s: seconds until the grammar of its structured output is there; None where it has
            none.
        compiles: whether the grammar is one; else the request ends with an error.
    """

    stops: int = 0
    min_tokens: int = 0
    compile_s: float | None = None
    compiles: bool = True

    @property
    def grammar(self) -> StructuredOutputsParams | None:
        """What stands in the sampling parameters."""
        return None if self.compile_s is None else StructuredOutputsParams(regex=".*")


PLAIN: Final = Answering()


class AnyToken(StructuredOutputGrammar):
    """A grammar that any answer follows, as the toy model's tokens cannot be chosen."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """Nothing is remembered."""

    def fill_bitmask(self, bitmask: Any, idx: int) -> None:
        """All tokens are allowed."""

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        """Nothing is remembered."""
