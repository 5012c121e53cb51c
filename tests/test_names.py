# SPDX-License-Identifier: Apache-2.0
"""Pages, docstrings and comments name what is there."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.names import ROOT, Use, missing, pages, sources, used_in_code, used_in_page

VLLM = {
    "--enable-dbo",
    "--enable-return-routed-experts",
    "--mm-processor-cache-gb",
    "--swa-bounded-replay",
    "--use-replayssm",
    "Dots3NoteProcessor",
    "DynamicResolutionImageTiler",
    "EngineCore",
    "FlashInferBackend.customize_spec",
    "GPUModelRunner",
    "KVCacheBlock",
    "Llama4ForCausalLM",
    "MegaMoE",
    "Phi3LongRoPEScaledRotaryEmbedding",
    "VLLM_SSM_CONV_STATE_LAYOUT",
    "Worker.sleep",
    "Worker.wake_up",
    "build_compressed_token_map",
    "external_unspecified",
    "get_num_skipped_tokens",
    "kv_b_proj",
    "reload_weights",
    "run_engine_core",
    "weight_version",
}
"""Names of vLLM's that no code of ours uses."""

OTHERS = {
    "--worker-startup-timeout-secs": "an option of vllm-router",
    "/unregister": "a path of Dynamo's indexer",
    "LLMConfig": "a class of Ray Serve's",
    "ai-dynamo-runtime": "a wheel of Dynamo's",
    "build_pd_openai_app": "a function of Ray Serve's",
    "disaggregated_prefill": "a routing logic of production-stack",
    "disaggregated_prefill_orchestrated": "a routing logic of production-stack",
    "engine_kwargs": "a setting of Ray Serve's",
    "kvaware": "a routing logic of production-stack",
    "nixlv2": "a connector of llm-d's sidecar",
    "prefixaware": "a routing logic of production-stack",
    "DeepSeek": "models",
    "FlashAttention": "kernels",
    "FlyDSL": "kernels",
    "UltraQuant": "a kind of quantized KV",
    "MessagePack": "the wire format",
    "ModelScope": "a hub of models",
    "KillMode": "a setting of systemd",
    "OpenMP": "threads of vLLM's CPU build",
    "preStop": "a hook of Kubernetes",
    "runAsUser": "a setting of Kubernetes",
    "ServeGen": "traces that benchmarks replay",
    "TiB": "a unit",
    "TimeoutStopSec": "a setting of systemd",
    "ValueErrors": "a plural",
    "config.json": "a file of a model",
    "on_rpc": "a hook of a vLLM to come",
    "mooncake.store": "a module of Mooncake's",
    "omni-connector-prefill": "an example of a Service in Kubernetes",
    "params.json": "a file of a model",
    "spec_decode_acceptance_test.sh": "a test in vLLM's repository",
    "su": "a command",
    "tcp_info": "a struct of Linux",
    "u32": "an unsigned integer of 32 bits",
    "user_1_0_0_2_3": "an example of a key of objects",
    "vllm_omni.general_plugins": "an entry-point group of vLLM-Omni",
    # Classes and settings that examples of writing a transport or a connector make up.
    "MyConnector": "example",
    "MyTransport": "example",
    "TestMine": "example",
    "TestMyConnector": "example",
    "TestMyTransport": "example",
    "my_package": "example",
    "ring_kib": "example",
}


def unknown(uses: list[Use]) -> list[str]:
    return [f"{where}: {name}" for where, name in missing(uses) if name not in {*VLLM, *OTHERS}]


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_a_page_names_what_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not unknown(list(used_in_page(text, page.name)))


def test_docstrings_and_comments_name_what_is_there() -> None:
    wrong = []
    for path in sources():
        source = path.read_text(encoding="utf-8")
        wrong += unknown(list(used_in_code(source, str(path.relative_to(ROOT)))))
    assert not wrong


@pytest.mark.parametrize(
    "name",
    [
        "`SlotButler`",
        "`SlotDirectory.butler`",
        "`directory.butler`",
        "`butler_s`",
        "`handoff/butler.py`",
        "`butlers/`",
        "`copies.held_blocks.CopyLedger`",
        "`--butler`",
        "`vllm:omni_connector_tokens_served_total`",
        "`omni-butler`",
        "OMNI_CONNECTOR_BUTLER",
        "omni_connector.handoff.butler",
        "SlotButler",
        "hand_butler",
    ],
)
def test_a_name_that_is_not_there_is_found(name: str) -> None:
    wrong = [Use("page:1", name.strip("`"))]
    assert missing(used_in_page(f"Slots are kept by {name}, as others.\n", "page")) == wrong
    if "--" not in name or "`" in name:
        source = f'"""Slots.\n\nSee {name}.\n"""\n\nSLOTS = 1  # of {name}\n'
        found = missing(used_in_code(source, "module"))
        assert {each.name for each in found} == {wrong[0].name}
        assert {each.where for each in found} == {"module:3", "module:6"}


@pytest.mark.parametrize(
    "name",
    [
        "`SlotDirectory.lease`",
        "`handoff.leases.SlotDirectory.lease`",
        "`directory.lease`",
        "`handoff/leases.py`",
        "`omni_connector/handoff/`",
        "`--trust-remote-code`",
        "`vllm:omni_connector_failures_total`",
        "`OMNI_CONNECTOR_ARENA_GIB`",
        "`handoff_ttl_s`",
        "`omni-control`",
        "`lease_expired`",
    ],
)
def test_a_name_that_is_there_is_known(name: str) -> None:
    assert not missing(used_in_page(f"Slots are kept by {name}.\n", "page"))


@pytest.mark.vllm
def test_the_names_that_are_said_to_be_vllms_are() -> None:
    pytest.importorskip("vllm", minversion="0.32")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    words = {word for name in VLLM for word in name.removeprefix("--").replace("-", "_").split(".")}
    for path in Path(spec.submodule_search_locations[0]).rglob("*.py"):
        if not words:
            break
        text = path.read_text(encoding="utf-8")
        words -= {word for word in words if re.search(rf"\b{word}\b", text)}
    assert not words


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: Path, text: str) -> list[str]:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" not in target:
            other = page.parent / path if path else page
            if not other.exists() or (anchor and anchor not in anchors(other)):
                wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page, page.read_text(encoding="utf-8"))


def test_a_link_that_leads_nowhere_is_found() -> None:
    page = ROOT / "README.md"
    assert broken(page, "[a](docs/nowhere.md), [b](docs/glossary.md#butlers), [c](#try-it)") == [
        "docs/nowhere.md",
        "docs/glossary.md#butlers",
    ]
