# SPDX-License-Identifier: Apache-2.0
"""What vLLM can do besides, with hand-offs: each works, or is refused with its reason.

Every answer is compared with what the decode engine answers when it computes the prompt itself.
The caches are small, so that requests are preempted.
"""

import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from omni_connector.testing.engines import MODEL_NAME, PREFILL_PARAMS, Client, Engine, completion
from omni_connector.testing.reference import LOGPROBS, ROUNDING, Answer

from .families import BY_RECIPE, Family
from .harness import Pair
from .pool import Pool
from .prompts import new_salt, random_prompt

pytestmark = pytest.mark.e2e

ADAPTERS = ("first", "second")
# Long enough that the first request still runs when the last has come, on a slow machine too.
LONG_ANSWER = 200
AT_ONCE = 3
# 24 blocks of the one family and 40 of the other, groups and all; a prompt of 2,048 tokens fits.
CACHE_BYTES = {"llama": 24 * (512 << 10), "gptoss": 40 * (256 << 10)}
LLAMA, GPTOSS = BY_RECIPE["llama"], BY_RECIPE["gptoss"]


@dataclass
class Features:
    """A pair with small caches, and hand-offs with request fields of all kinds."""

    family: Family
    pair: Pair

    def own(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """What the decode engine answers when it computes the prompt itself."""
        settings = {"max_tokens": 24, **LOGPROBS, "cache_salt": new_salt(), **fields}
        return self.pair.decode_engine.complete(prompt, **settings)

    def handed_off(
        self, prompt: list[int], prefill: dict[str, Any] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """What it answers when it is handed the prompt's KV; `prefill` are fields for that."""
        same = {key: fields[key] for key in ("model",) if key in fields}
        params = self.pair.prefill(prompt, salt := new_salt(), **{**same, **(prefill or {})})
        return self.own(prompt, cache_salt=salt, kv_transfer_params=params, **fields)

    def require_same(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        """Answers agree to rounding."""
        self.family.require_alike(Answer.of(one), Answer.of(other))

    def received(self) -> float:
        return self.pair.received()

    def failures(self, engine: Engine, kind: str) -> float:
        return self.pair.count(engine, "failures", kind=kind)


@pytest.fixture(scope="module", params=[LLAMA, GPTOSS], ids=lambda family: family.recipe)
def family(request: pytest.FixtureRequest) -> Family:
    """A family of one cache group, and a hybrid one."""
    chosen: Family = request.param
    return chosen


of_llama = pytest.mark.parametrize("family", [LLAMA], ids=["llama"], indirect=True)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments for an engine of Llama with two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    arguments = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"]
    return [*arguments, *(f"{name}={make_adapter(folder, name)}" for name in ADAPTERS)]


@pytest.fixture
def features(family: Family, pool: Pool, adapters: list[str]) -> Features:
    """A pair; that of Llama has two adapters."""
    arguments = ["--max-model-len", "2048", "--enable-prompt-embeds"]
    arguments += adapters if family is LLAMA else []
    members = pool.take(
        *(("scarce", family.recipe, name) for name in "ab"),
        arguments=arguments,
        kv_cache_bytes=CACHE_BYTES[family.recipe],
    )
    return Features(family, Pair.of(*members))


def make_adapter(folder: Path, name: str) -> Path:
    """A LoRA adapter of the Llama model that changes its keys, values and answers."""
    path = folder / name
    path.mkdir()
    draw = torch.Generator().manual_seed(ADAPTERS.index(name))
    tensors = {}
    for layer in range(4):
        for module, rows in (("q_proj", 256), ("k_proj", 128), ("v_proj", 128)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (8, 256)), ("lora_B", (rows, 8))):
                tensors[f"{key}.{part}.weight"] = torch.randn(shape, generator=draw) * 0.2
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8}
    config |= {"target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.supports("preemption on the decode engine")
def test_preempted_decodes_answer_right(features: Features) -> None:
    # Each grows by a block when it has generated four tokens; there is no room for that.
    prompts = [random_prompt(seed, 381) for seed in range(7)]
    decode = features.pair.decode_engine
    # Of these, so few at a time that none is preempted.
    before = decode.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(AT_ONCE) as threads:
        own = list(threads.map(partial(features.own, max_tokens=LONG_ANSWER), prompts))
    assert decode.metric("vllm:num_preemptions_total") == before
    salts = [new_salt() for _ in prompts]
    params = [features.pair.prefill(*asked) for asked in zip(prompts, salts, strict=True)]
    before, received = decode.metric("vllm:num_preemptions_total"), features.received()

    def ask(number: int) -> dict[str, Any]:
        return features.own(
            prompts[number],
            max_tokens=LONG_ANSWER,
            cache_salt=salts[number],
            kv_transfer_params=params[number],
        )

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(ask, range(len(prompts))))
    assert decode.metric("vllm:num_preemptions_total") > before
    assert features.received() == received + len(prompts)
    for answer, wanted in zip(answers, own, strict=True):
        features.require_same(answer, wanted)
    features.pair.wait_until_idle()


@pytest.mark.supports("preemption on the prefill engine", "Llama")
@of_llama  # the prefill of a hybrid ends with its first token; see tests/vllm_v1
def test_preempted_prefills_are_handed_off_right(features: Features) -> None:
    prompts = [random_prompt(20 + seed, 381) for seed in range(7)]
    prefill = features.pair.prefill_engine
    salts = [new_salt() for _ in prompts]
    before, received = prefill.metric("vllm:num_preemptions_total"), features.received()

    def ask(prompt: list[int], salt: str) -> dict[str, Any]:
        return features.pair.prefill(prompt, salt, max_tokens=LONG_ANSWER)

    with ThreadPoolExecutor(len(prompts)) as threads:
        params = list(threads.map(ask, prompts, salts))
    assert prefill.metric("vllm:num_preemptions_total") > before
    for prompt, salt, given in zip(prompts, salts, params, strict=True):
        answer = features.own(prompt, cache_salt=salt, kv_transfer_params=given)
        features.require_same(answer, features.own(prompt))
    assert features.received() == received + len(prompts)


@pytest.mark.supports("LoRA", "Llama")
@of_llama  # whose pair alone has adapters
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_hand_off_under_an_adapter(features: Features, adapter: str) -> None:
    prompt = random_prompt(40, 300)
    received = features.received()
    answer = features.handed_off(prompt, model=adapter)
    assert features.received() == received + 1
    features.require_same(answer, features.own(prompt, model=adapter))
    with pytest.raises(AssertionError, match=r"token \d+"):
        features.require_same(answer, features.own(prompt))


@pytest.mark.supports("LoRA", "Llama")
@of_llama  # whose pair alone has adapters
@pytest.mark.parametrize(
    ("theirs", "ours"), [("first", "second"), ("first", None), (None, "first")]
)
def test_a_hand_off_of_another_adapter_is_refused(
    features: Features, theirs: str | None, ours: str | None
) -> None:
    prompt, decode = random_prompt(41, 300), features.pair.decode_engine
    refused, received = features.failures(decode, "other_prompt"), features.received()
    mine, salt = ({"model": ours} if ours else {}), new_salt()
    params = features.pair.prefill(prompt, salt, model=theirs or MODEL_NAME)
    given = {"cache_salt": salt, "kv_transfer_params": params}
    answer = features.own(prompt, **mine, **given)
    assert features.failures(decode, "other_prompt") == refused + 1
    assert features.received() == received
    features.require_same(answer, features.own(prompt, **mine))
    # It still serves the adapter that it is for.
    features.own(prompt, model=theirs or MODEL_NAME, **given)
    assert features.received() == received + 1


@pytest.mark.supports("prompt_logprobs on the decode engine: it computes the prompt")
def test_prompt_logprobs_on_the_decode_engine(features: Features) -> None:
    prompt, received = random_prompt(50, 300), features.received()
    decode = features.pair.decode_engine
    own = features.own(prompt, prompt_logprobs=0)
    refused = features.failures(decode, "prompt_logprobs")
    params = features.pair.prefill(prompt, salt := new_salt())
    given = {"cache_salt": salt, "kv_transfer_params": params}
    answer = features.own(prompt, prompt_logprobs=0, **given)
    assert features.received() == received
    assert features.failures(decode, "prompt_logprobs") == refused + 1
    features.require_same(answer, own)
    assert prompt_logprobs(answer) == pytest.approx(prompt_logprobs(own), abs=ROUNDING)
    # The prefill engine keeps nothing for it, as nobody asks for more.
    features.pair.wait_until_idle(features.pair.prefill_engine)


@pytest.mark.supports("prompt_logprobs on the prefill engine", "Llama")
@pytest.mark.supports(
    "prompt_logprobs on the prefill engine",
    "gpt-oss",
    refused="log-probabilities of the whole prompt need the last token, which the prefill engine "
    "of a hybrid leaves to the decode engine; that computes the prompt",
)
def test_prompt_logprobs_on_the_prefill_engine(features: Features) -> None:
    prompt, received = random_prompt(51, 300), features.received()
    prefill = features.pair.prefill_engine
    refused = features.failures(prefill, "prompt_logprobs")
    fields = {"kv_transfer_params": {"do_remote_decode": True}, "prompt_logprobs": 0}
    asked = prefill.complete(prompt, max_tokens=1, cache_salt=(salt := new_salt()), **fields)
    assert len(prompt_logprobs(asked)) == len(prompt) - 1
    answer = features.own(prompt, cache_salt=salt, kv_transfer_params=asked["kv_transfer_params"])
    features.require_same(answer, features.own(prompt))
    hybrid = features.family is GPTOSS
    assert features.received() == received + (not hybrid)
    assert features.failures(prefill, "prompt_logprobs") == refused + hybrid


@pytest.mark.supports("prompts given as embeddings")
@pytest.mark.parametrize("length", [2, 128, 300])
def test_a_prompt_given_as_embeddings(features: Features, length: int) -> None:
    embeds = embeddings(length)
    own, received = features.own([], **given_as(embeds)), features.received()
    features.pair.decode_probe.spoil()
    answer = features.handed_off([], prefill=given_as(embeds), **given_as(embeds))
    assert features.received() == received + 1
    features.require_same(answer, own)


@pytest.mark.supports("prompts given as embeddings")
@pytest.mark.parametrize("place", [0, 297])
def test_of_other_embeddings_nothing_is_loaded(features: Features, place: int) -> None:
    embeds = embeddings(300)
    other = embeds.clone()
    other[place, 7] += 0.25
    decode = features.pair.decode_engine
    own, received = features.own([], **given_as(other)), features.received()
    refused = features.failures(decode, "other_prompt")
    params = features.pair.prefill([], salt := new_salt(), **given_as(embeds))
    given = {"cache_salt": salt, "kv_transfer_params": params}
    answer = features.own([], **given, **given_as(other))
    assert features.failures(decode, "other_prompt") == refused + 1
    assert features.received() == received
    features.require_same(answer, own)
    # It still serves the prompt that it is of, whose answer is another one.
    right = features.own([], **given, **given_as(embeds))
    assert features.received() == received + 1
    with pytest.raises(AssertionError, match=r"token \d+"):
        features.require_same(right, own)


def embeddings(length: int) -> torch.Tensor:
    """As wide as those of the models."""
    draw = torch.Generator().manual_seed(length)
    return torch.randn((length, 256), generator=draw) * 0.2


def given_as(embeds: torch.Tensor) -> dict[str, Any]:
    """The fields of a request whose prompt is given as these embeddings."""
    torch.save(embeds, written := io.BytesIO())
    return {"prompt_embeds": base64.b64encode(written.getvalue()).decode()}


def prompt_logprobs(answer: dict[str, Any]) -> list[float]:
    """Log-probability of each prompt token but the first."""
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    # Each names the token itself, and one more where that was not the likeliest.
    return [next(iter(row.values()))["logprob"] for row in rows]


CHOICES = ["the cache", "a lease of blocks", "never a wrong byte"]
SCHEMA = {
    "type": "object",
    "properties": {"engine": {"enum": ["prefill", "decode"]}, "blocks": {"type": "integer"}},
    "required": ["engine", "blocks"],
    "additionalProperties": False,
}


@pytest.mark.supports("structured output")
@pytest.mark.parametrize("wanted", [{"choice": CHOICES}, {"json": SCHEMA}], ids=["choice", "json"])
def test_structured_output(features: Features, wanted: dict[str, Any]) -> None:
    prompt, received = random_prompt(60, 300), features.received()
    fields = {"structured_outputs": wanted, "ignore_eos": False, "max_tokens": 100}
    answer = features.handed_off(prompt, **fields)
    assert features.received() == received + 1
    text = answer["choices"][0]["text"]
    if "choice" in wanted:
        assert text in CHOICES
    else:
        # Nothing ends a number or blanks but a model that wants to: only what came is checked.
        assert text.lstrip().startswith("{")
        assert '"engine"' in text
    features.require_same(answer, features.own(prompt, **fields))


@pytest.mark.supports("n > 1")
def test_several_answers_to_one_prompt(features: Features) -> None:
    prompt, received = random_prompt(61, 300), features.received()
    fields = {"n": 3, "temperature": 1.0, "seed": 5}
    answer, own = features.handed_off(prompt, **fields), features.own(prompt, **fields)
    assert features.received() > received
    answers, others = (
        [Answer.of({"choices": [choice]}) for choice in given["choices"]] for given in (answer, own)
    )
    assert len({answer.tokens for answer in answers}) == 3
    for one, other in zip(answers, others, strict=True):
        # What is drawn hangs on the last digits too: from where it differs, nothing is compared.
        pairs = zip(one.tokens, other.tokens, strict=True)
        alike = next((place for place, (a, b) in enumerate(pairs) if a != b), len(one.tokens))
        assert alike > 0
        assert one.logprobs[:alike] == pytest.approx(other.logprobs[:alike], abs=ROUNDING)


@pytest.mark.supports("beam search: the decode engine computes the prompt")
def test_beam_search(features: Features) -> None:
    """VLLM's server asks its engine anew for each token, without the request's parameters."""
    prompt, received = random_prompt(64, 300), features.received()
    fields = {"use_beam_search": True, "n": 3, "temperature": 0.0}
    asked = features.pair.prefill_engine.complete(
        prompt, max_tokens=1, cache_salt=new_salt(), kv_transfer_params=PREFILL_PARAMS, **fields
    )
    assert asked["kv_transfer_params"] is None, "so that a router hands nothing off"
    features.pair.wait_until_idle(features.pair.prefill_engine)
    params = features.pair.prefill(prompt, salt := new_salt())
    given = {"cache_salt": salt, "kv_transfer_params": params}
    answer = features.own(prompt, max_tokens=6, **given, **fields)
    assert len(answer["choices"]) == 3
    features.require_same(answer, features.own(prompt, max_tokens=6, **fields))
    assert features.received() == received
    # What was prefilled is kept, as the decode engine's connector has not seen the request.
    features.own(prompt, **given)
    assert features.received() == received + 1


@pytest.mark.supports("log-probabilities")
def test_log_probabilities_of_the_likeliest_tokens(features: Features) -> None:
    prompt, received = random_prompt(62, 300), features.received()
    # By their ids: the texts of several tokens may be the same half of a character.
    fields = {"logprobs": 5, "return_tokens_as_token_ids": True}
    answer, own = features.handed_off(prompt, **fields), features.own(prompt, **fields)
    assert features.received() == received + 1
    for one, other in zip(*(top_logprobs(each) for each in (answer, own)), strict=True):
        assert len(one) >= 5
        assert one == pytest.approx(other, abs=ROUNDING)


def top_logprobs(answer: dict[str, Any]) -> list[list[float]]:
    """Log-probabilities of the likeliest tokens at each place, in order."""
    rows = answer["choices"][0]["logprobs"]["top_logprobs"]
    return [sorted(row.values(), reverse=True)[:5] for row in rows]


@pytest.mark.supports("streaming")
def test_streamed_answer(features: Features) -> None:
    prompt, received = random_prompt(63, 300), features.received()
    params = features.pair.prefill(prompt, salt := new_salt())
    fields = {"cache_salt": salt, "kv_transfer_params": params, "max_tokens": 24, **LOGPROBS}
    with features.pair.decode_engine.client() as client:
        parts = stream(client, completion(prompt, stream=True, **fields))
    assert features.received() == received + 1
    assert len(parts) > 1
    names = ("token_logprobs", "top_logprobs")
    joined = {
        "token_ids": [token for part in parts for token in part["token_ids"] or ()],
        "logprobs": {
            name: [row for part in parts for row in (part["logprobs"] or {}).get(name, ())]
            for name in names
        },
    }
    own = features.own(prompt)
    features.require_same({"choices": [joined]}, own)
    if joined["token_ids"] == own["choices"][0]["token_ids"]:
        assert "".join(part["text"] for part in parts) == own["choices"][0]["text"]


def stream(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of each event of a streamed completion."""
    client.send("/v1/completions", body)
    lines = client.connection.getresponse().read().decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [choice for event in events for choice in json.loads(event)["choices"]]
