# SPDX-License-Identifier: Apache-2.0
"""Hand-offs of every cache family: answers of the same-path reference, and the very same KV.

The KV is compared byte for byte too, so that nothing hides behind rounding.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from omni_connector.testing.reference import ROUNDING, Answer

from . import kv
from .families import FAMILIES, Family, prompts
from .harness import Pair, References
from .pool import Pool
from .prompts import new_salt, random_prompt

pytestmark = pytest.mark.e2e

PROMPTS = tuple(prompts(128))

CACHED = [family for family in FAMILIES if family.caches_prefixes]
UNCACHED = [family for family in FAMILIES if not family.caches_prefixes]
NO_PREFIXES = "vLLM itself caches no prefixes of this family on a CPU"


@dataclass
class Setting:
    """A family's engines, and what every correct decode engine answers."""

    family: Family
    references: References
    pair: Pair
    block: int

    @property
    def prompts(self) -> dict[str, list[int]]:
        """Prompts for blocks as vLLM has made them."""
        return prompts(self.block)

    def reference(self, prompt: list[int]) -> Answer:
        """What every correct decode engine answers."""
        return self.references.same_path(self.family.recipe, prompt)

    def hand_off(self, prompt: list[int]) -> Answer:
        """Prefill, then decode into blocks that hold nobody's bytes; compare the KV."""
        answer = self.pair.hand_off(prompt)
        self.pair.require_same_kv(prompt)
        return answer


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.recipe)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family in turn."""
    chosen: Family = request.param
    return chosen


def of(families: list[Family]) -> pytest.MarkDecorator:
    """For tests of some of the families."""
    recipes = [family.recipe for family in families]
    return pytest.mark.parametrize("family", families, ids=recipes, indirect=True)


@pytest.fixture
def setting(
    request: pytest.FixtureRequest, family: Family, pool: Pool, references: References
) -> Setting:
    """The engines of a family. Those of the next one start meanwhile."""
    prefill, decode, _ = pool.take(*engines_of(family))
    following = family_after(request.node, family)
    if following is not None:
        pool.begin(*engines_of(following))
    return Setting(family, references, Pair.of(prefill, decode), prefill.block)


def engines_of(family: Family) -> list[tuple[str, str, str]]:
    """A pair, and the one that answers what is right."""
    names = (("both", "a"), ("both", "b"), ("reference", ""))
    return [(configuration, family.recipe, name) for configuration, name in names]


def family_after(test: pytest.Item, family: Family) -> Family | None:
    """The family whose tests come next in this file; None after the last."""
    items = test.session.items
    later = (item for item in items[items.index(test) :] if item.path == test.path)
    others = (item.callspec.params["family"] for item in later)  # type: ignore[attr-defined]
    return next((other for other in others if other is not family), None)


@pytest.mark.supports("negative control fails")
@pytest.mark.parametrize("name", PROMPTS)
def test_a_connector_that_moves_nothing_is_noticed(setting: Setting, name: str) -> None:
    prompt = setting.prompts[name]
    answer = setting.references.no_op(setting.family.recipe, prompt)
    if answer is not None:
        with pytest.raises(AssertionError, match=r"token \d+"):
            answer.require_same(setting.reference(prompt), tolerance=ROUNDING)


@pytest.mark.supports("hand-off")
@pytest.mark.parametrize("name", PROMPTS)
def test_answer_and_kv_are_the_right_ones(setting: Setting, name: str) -> None:
    received, prompt = setting.pair.received(), setting.prompts[name]
    answer = setting.hand_off(prompt)
    answer.require_same(setting.reference(prompt), tolerance=setting.family.exactness)
    assert setting.pair.received() == received + 1


@pytest.mark.supports("only the bytes that each group needs are moved")
@pytest.mark.parametrize("name", ["within-a-block", "in-chunks"])
def test_bytes_moved_are_those_that_each_group_needs(setting: Setting, name: str) -> None:
    prompt, decode = setting.prompts[name], setting.pair.decode_engine
    before = setting.pair.count(decode, "bytes_loaded")
    setting.hand_off(prompt)
    [found] = setting.pair.decode_probe.read("first")
    moved = setting.pair.count(decode, "bytes_loaded") - before
    assert moved == found.loaded_bytes(len(prompt) - 1)


@pytest.mark.supports("many at once")
def test_many_hand_offs_at_once(setting: Setting) -> None:
    family, pair = setting.family, setting.pair
    todo = [*setting.prompts.values(), *(random_prompt(n, 7 * n) for n in range(50, 57))]
    salts = [new_salt() for _ in todo]
    with ThreadPoolExecutor(len(todo)) as threads:
        params = list(threads.map(pair.prefill, todo, salts))
        pair.decode_probe.spoil()
        answers = list(threads.map(pair.decode, todo, salts, params))
    sent = pair.prefill_probe.read_all("prefilled")
    found = {tuple(held[0].prompt): held for held in pair.decode_probe.read_all("first")}
    for prompt in todo:
        # Of some families the prefill engine leaves the last token to the decode engine.
        *_, theirs = (held for held in sent if held[0].prompt in (prompt, prompt[:-1]))
        kv.require_same_kv(theirs, found[tuple(prompt)], len(prompt) - 1)
    if family.alike_in_batches:
        for prompt, answer in zip(setting.prompts.values(), answers, strict=False):
            family.require_alike(answer, setting.reference(prompt))


@pytest.mark.supports("prefix held by the decode engine")
@of(CACHED)
def test_a_prefix_that_decode_holds_is_not_moved(setting: Setting) -> None:
    salt, shared = new_salt(), prefix_length(setting.block)
    prompt = random_prompt(77, shared + 300)
    decode = setting.pair.decode_engine
    alone = setting.hand_off(prompt)
    # Of windows and states vLLM keeps only those at the end of a prompt.
    setting.pair.decode(prompt[: shared + 5], salt, max_tokens=1)
    before = setting.pair.count(decode, "tokens_loaded")
    params = setting.pair.prefill(prompt, salt)
    answer = setting.pair.decode(prompt, salt, params)
    assert setting.pair.count(decode, "tokens_loaded") - before == 299
    setting.pair.require_same_kv(prompt, start=shared)
    setting.family.require_alike(answer, alone)


@pytest.mark.supports("prefix held by the prefill engine")
@of(CACHED)
def test_a_prefix_that_prefill_holds_is_handed_off_with_the_rest(setting: Setting) -> None:
    salt, shared = new_salt(), prefix_length(setting.block)
    prompt = random_prompt(78, shared + 300)
    alone = setting.hand_off(prompt)
    first = setting.pair.prefill(prompt[: shared + 5], salt)
    params = setting.pair.prefill(prompt, salt)
    assert setting.pair.prefill_probe.read("first")[0].computed == shared
    setting.pair.decode_probe.spoil()
    answer = setting.pair.decode(prompt, salt, params)
    setting.pair.require_same_kv(prompt)
    setting.family.require_alike(answer, alone)
    setting.pair.decode(prompt[: shared + 5], salt, first)


@pytest.mark.supports("prefix held by the decode engine", refused=NO_PREFIXES)
@pytest.mark.supports("prefix held by the prefill engine", refused=NO_PREFIXES)
@of(UNCACHED)
def test_where_vllm_caches_no_prefixes_all_is_computed_and_moved(setting: Setting) -> None:
    prompt, salt = random_prompt(79, prefix_length(setting.block) + 300), new_salt()
    decode = setting.pair.decode_engine
    for _ in range(2):
        before = setting.pair.count(decode, "tokens_loaded")
        params = setting.pair.prefill(prompt, salt)
        assert setting.pair.prefill_probe.read("first")[0].computed == 0
        setting.pair.decode(prompt, salt, params)
        assert setting.pair.count(decode, "tokens_loaded") - before == len(prompt) - 1


def prefix_length(block: int) -> int:
    """Tokens of the shared prefix: full blocks, over 1,000."""
    return -(-1000 // block) * block


@pytest.mark.supports("unusable hand-off is recomputed")
def test_a_hand_off_that_cannot_be_used_is_recomputed(setting: Setting) -> None:
    prompt, other = (setting.prompts[name] for name in ("in-chunks", "longer-than-the-window"))
    recipe, salt, before = setting.family.recipe, new_salt(), setting.pair.failures()
    params = setting.pair.prefill(other, salt)
    answer = setting.pair.decode(prompt, salt, params)
    plain = setting.references.plain(recipe, prompt)
    answer.require_same(plain, tolerance=setting.family.exactness)
    assert setting.pair.failures() == before + 1
    # It still serves the prompt that it is for.
    answer = setting.pair.decode(other, salt, params)
    answer.require_same(setting.reference(other), tolerance=setting.family.exactness)


def test_nothing_is_held_in_the_end(setting: Setting) -> None:
    setting.pair.wait_until_idle()
