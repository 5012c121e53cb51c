# SPDX-License-Identifier: Apache-2.0
"""Hand-offs of every cache family: answers of the same-path reference, and the very same KV.

The KV is compared byte for byte too, so that nothing hides behind rounding.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from omni_connector.testing import reference
from omni_connector.testing.engines import Engine, EngineError
from omni_connector.testing.models import make_model

from . import kv
from .families import FAMILIES, Family
from .harness import (
    HOLLOW_CONFIG,
    MAX_TOKENS,
    Pair,
    connector_config,
    new_engine,
    new_salt,
    random_prompt,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPTS = tuple(FAMILIES[0].prompts)

CACHED = [family.name for family in FAMILIES if family.caches_prefixes]
UNCACHED = [family.name for family in FAMILIES if not family.caches_prefixes]
NO_PREFIXES = "vLLM itself caches no prefixes of this family on a CPU"


@dataclass
class Setting:
    """A family's engines, and what every correct decode engine answers.

    Attributes:
        hollow: what an engine answered whose connector moves nothing; None where that was no
            number at all.
    """

    family: Family
    references: dict[str, reference.Answer]
    plain: reference.Answer
    hollow: dict[str, reference.Answer | None]
    pair: Pair
    prefill_probe: kv.Probe
    decode_probe: kv.Probe

    def hand_off(self, prompt: list[int]) -> reference.Answer:
        """Prefill, then decode into blocks that hold nobody's bytes; compare the KV."""
        params = self.pair.prefill(prompt, salt := new_salt())
        self.decode_probe.spoil()
        answer = self.pair.decode(prompt, salt, params)
        self.require_same_kv(prompt)
        return answer

    def require_same_kv(self, prompt: list[int], start: int = 0) -> None:
        """The latest request found, at its first step, what the prefill engine had computed."""
        sent, found = self.prefill_probe.read("prefilled"), self.decode_probe.read("first")
        assert found[0].prompt == prompt
        assert found[0].computed == len(prompt) - 1
        kv.require_same_kv(sent, found, len(prompt) - 1, start=start)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.recipe)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family in turn."""
    chosen: Family = request.param
    return chosen


@pytest.fixture(scope="module")
def setting(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """The engines of a family, two at a time: reference and negative control, then the pair."""
    model = make_model(family.recipe, tmp_path_factory.getbasetemp() / family.recipe)
    folder = tmp_path_factory.mktemp(family.recipe)
    runtime = tmp_path_factory.mktemp("run")
    started: list[Engine] = []

    def start(name: str, config: dict[str, object] | None, *arguments: str) -> Engine:
        engine = new_engine(
            model,
            folder / f"{name}.log",
            config,
            runtime,
            arguments=[*family.arguments, *kv.ARGUMENTS, *arguments],
            environment=kv.ENVIRONMENT,
            core=len(started) % 2,
        )
        started.append(engine)
        engine.start()
        return engine

    def probe(engine: Engine) -> kv.Probe:
        engine.wait_ready()
        own = folder / engine.log.stem
        own.mkdir()
        found = kv.Probe(engine, own)
        groups = found.watch()
        assert {group["block_size"] for group in groups} == {family.block}
        found.spoil()
        return found

    try:
        same_path = start("reference", None, "--logits-processors", reference.PROCESSOR)
        control = start("hollow", HOLLOW_CONFIG)
        probe(control)
        same_path.wait_ready()
        with same_path.client() as client:
            references = {
                name: reference.same_path(client, prompt, max_tokens=MAX_TOKENS)
                for name, prompt in family.prompts.items()
            }
            plain = reference.ask(
                client, family.prompts["in-chunks"], max_tokens=MAX_TOKENS, cache_salt=new_salt()
            )
        hollow = {name: ask_hollow(control, prompt) for name, prompt in family.prompts.items()}
        for engine in (same_path, control):
            engine.stop()
        extra = {"handoff_ttl_s": 8.0}
        prefill = start("prefill", connector_config("kv_producer", **extra))
        decode = start("decode", connector_config("kv_consumer", **extra))
        yield Setting(
            family,
            references,
            plain,
            hollow,
            Pair(prefill, decode, runtime),
            probe(prefill),
            probe(decode),
        )
    finally:
        for engine in started:
            engine.stop()


def ask_hollow(engine: Engine, prompt: list[int]) -> reference.Answer | None:
    """Let an engine answer as if it had been handed the prompt's KV."""
    params = {"do_remote_prefill": True}
    try:
        return reference.ask(
            engine,
            prompt,
            max_tokens=MAX_TOKENS,
            cache_salt=new_salt(),
            kv_transfer_params=params,
        )
    except EngineError as error:
        # A log-probability that is no number: the answer cannot be written as JSON.
        if "not JSON compliant" not in str(error):
            raise
        return None


@pytest.mark.supports("negative control fails")
@pytest.mark.parametrize("name", PROMPTS)
def test_a_connector_that_moves_nothing_is_noticed(setting: Setting, name: str) -> None:
    answer = setting.hollow[name]
    if answer is not None:
        with pytest.raises(AssertionError, match=r"token \d+"):
            answer.require_same(setting.references[name], tolerance=setting.family.rounding)


@pytest.mark.supports("hand-off")
@pytest.mark.parametrize("name", PROMPTS)
def test_answer_and_kv_are_the_right_ones(setting: Setting, name: str) -> None:
    received = setting.pair.count(setting.pair.decode_engine, "handoffs_received")
    answer = setting.hand_off(setting.family.prompts[name])
    answer.require_same(setting.references[name], tolerance=setting.family.exactness)
    assert setting.pair.count(setting.pair.decode_engine, "handoffs_received") == received + 1


@pytest.mark.supports("only the bytes that each group needs are moved")
@pytest.mark.parametrize("name", ["within-a-block", "in-chunks"])
def test_bytes_moved_are_those_that_each_group_needs(setting: Setting, name: str) -> None:
    prompt, decode = setting.family.prompts[name], setting.pair.decode_engine
    before = setting.pair.count(decode, "bytes_loaded")
    setting.hand_off(prompt)
    [found] = setting.decode_probe.read("first")
    moved = setting.pair.count(decode, "bytes_loaded") - before
    assert moved == found.loaded_bytes(len(prompt) - 1)


@pytest.mark.supports("many at once")
def test_many_hand_offs_at_once(setting: Setting) -> None:
    family, pair = setting.family, setting.pair
    prompts = [*family.prompts.values(), *(random_prompt(n, 7 * n) for n in range(50, 57))]
    salts = [new_salt() for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        params = list(pool.map(pair.prefill, prompts, salts))
        setting.decode_probe.spoil()
        answers = list(pool.map(pair.decode, prompts, salts, params))
    sent = setting.prefill_probe.read_all("prefilled")
    found = {tuple(held[0].prompt): held for held in setting.decode_probe.read_all("first")}
    for prompt in prompts:
        # Of some families the prefill engine leaves the last token to the decode engine.
        *_, theirs = (held for held in sent if held[0].prompt in (prompt, prompt[:-1]))
        kv.require_same_kv(theirs, found[tuple(prompt)], len(prompt) - 1)
    if family.alike_in_batches:
        for wanted, answer in zip(setting.references.values(), answers, strict=False):
            answer.require_same(wanted, tolerance=family.rounding)


@pytest.mark.supports("prefix held by the decode engine", *CACHED)
@pytest.mark.supports("prefix held by the decode engine", *UNCACHED, refused=NO_PREFIXES)
def test_a_prefix_that_decode_holds_is_not_moved(setting: Setting) -> None:
    if not setting.family.caches_prefixes:
        pytest.skip(NO_PREFIXES)
    salt, shared = new_salt(), prefix_length(setting.family)
    prompt = random_prompt(77, shared + 300)
    decode = setting.pair.decode_engine
    alone = setting.hand_off(prompt)
    # Of windows and states vLLM keeps only those at the end of a prompt.
    setting.pair.decode(prompt[: shared + 5], salt, max_tokens=1)
    before = setting.pair.count(decode, "tokens_loaded")
    params = setting.pair.prefill(prompt, salt)
    answer = setting.pair.decode(prompt, salt, params)
    assert setting.pair.count(decode, "tokens_loaded") - before == 299
    setting.require_same_kv(prompt, start=shared)
    answer.require_same(alone, tolerance=setting.family.rounding)


@pytest.mark.supports("prefix held by the prefill engine", *CACHED)
@pytest.mark.supports("prefix held by the prefill engine", *UNCACHED, refused=NO_PREFIXES)
def test_a_prefix_that_prefill_holds_is_handed_off_with_the_rest(setting: Setting) -> None:
    if not setting.family.caches_prefixes:
        pytest.skip(NO_PREFIXES)
    salt, shared = new_salt(), prefix_length(setting.family)
    prompt = random_prompt(78, shared + 300)
    alone = setting.hand_off(prompt)
    setting.pair.prefill(prompt[: shared + 5], salt)
    params = setting.pair.prefill(prompt, salt)
    assert setting.prefill_probe.read("first")[0].computed == shared
    setting.decode_probe.spoil()
    answer = setting.pair.decode(prompt, salt, params)
    setting.require_same_kv(prompt)
    answer.require_same(alone, tolerance=setting.family.rounding)


def prefix_length(family: Family) -> int:
    """Tokens of the shared prefix: full blocks, over 1,000."""
    return -(-1000 // family.block) * family.block


@pytest.mark.supports("unusable hand-off is recomputed")
def test_a_hand_off_that_cannot_be_used_is_recomputed(setting: Setting) -> None:
    prompt, decode = setting.family.prompts["in-chunks"], setting.pair.decode_engine
    name, salt = "longer-than-the-window", new_salt()
    other = setting.family.prompts[name]
    before = setting.pair.count(decode, "failures")
    params = setting.pair.prefill(other, salt)
    setting.pair.decode(prompt, salt, params).require_same(setting.plain)
    assert setting.pair.count(decode, "failures") == before + 1
    # It still serves the prompt that it is for.
    answer = setting.pair.decode(other, salt, params)
    answer.require_same(setting.references[name], tolerance=setting.family.exactness)


def test_nothing_is_held_in_the_end(setting: Setting) -> None:
    setting.pair.wait_until_idle()
