# SPDX-License-Identifier: Apache-2.0
"""Mutants of what requests have beside their tokens."""

from typing import Final

from tests.simulation.mutants.faults import mutant

INPUTS: Final = (
    mutant(
        "digests know tokens alone",
        "where block hashes are not compared, a hand-off of another salt or image is loaded",
        ("handoff.prompt", '[text.encode("utf-8", "surrogatepass") for text in self.extra]', "[]"),
    ),
    mutant(
        "salts are not compared",
        "engines of other block sizes load a hand-off of another salt",
        (
            "vllm_v1.requests",
            '[f"salt={request.cache_salt}"] if request.cache_salt is not None else []',
            "[]",
        ),
    ),
    mutant(
        "images are not compared",
        "engines of other block sizes load a hand-off of another image",
        (
            "vllm_v1.requests",
            'extra.append(f"mm={feature.identifier}@{place.offset}+{place.length}")',
            "del place",
        ),
    ),
    mutant(
        "embeddings are not compared",
        "where block hashes are not compared, a hand-off of other embeddings is loaded",
        ("handoff.prompt", "hasher.update(self._embedded_from(covered))", ""),
    ),
    mutant(
        "adapters are not compared",
        "what one adapter has computed is handed off to another one",
        ("vllm_v1.requests", "if adapter:", "if False:"),
    ),
    mutant(
        "an arena's keys know an adapter's name alone",
        "its blocks are found by engines that have loaded other files of that name",
        ("prefix.prompts", "names_with_adapter(names, self.adapter)", "names"),
    ),
    mutant(
        "a store's keys know an adapter's name alone",
        "its blocks are found by engines that have loaded other files of that name",
        (
            "prefix.prompts",
            'return f"{engines}/{self.adapter}" if self.adapter else engines',
            "return engines",
        ),
    ),
    mutant(
        "an adapter is what lies there now",
        "its files were written anew since vLLM has loaded it",
        ("identity.adapters", "if versions != {seen.version}:", "if False:"),
    ),
)
