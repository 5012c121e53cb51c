# SPDX-License-Identifier: Apache-2.0
"""Each block of README and docs/ has its place in `uses.py`, and what is not pasted can be read."""

import argparse
import contextlib
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_connector.config import OmniConfig
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE
from omni_connector.objects import OmniConnector
from omni_connector.stage import OmniKVTransferManager

from . import uses
from .pages import ROOT, Block, block, blocks
from .terminal import Terminal, after

PASTED = (*uses.ONE_HOST, *uses.TWO_HOSTS["prefill"], *uses.TWO_HOSTS["decode"], *uses.A_FOLDER)
KNOWN = [
    *((paste.page, paste.start) for paste in PASTED),
    *uses.PRINTED,
    *uses.SETTINGS,
    *uses.ARGUMENTS,
    *uses.CONNECTORS,
    *uses.REQUESTS,
    *uses.PYTHON,
    *uses.LISTED,
]
RECORDED = ("vllm", "vllm-router", "python", "mkdir")


def each(table: set[tuple[str, str]]) -> pytest.MarkDecorator:
    found = [block(*key) for key in sorted(table)]
    return pytest.mark.parametrize("found", found, ids=str)


def test_every_block_is_pasted_read_or_listed() -> None:
    uses_of: Counter[str] = Counter()
    for page, start in KNOWN:
        uses_of[str(block(page, start))] += 1
    nowhere = [
        f"{found}: {uses.first_words(found.text)}" for found in blocks() if not uses_of[str(found)]
    ]
    assert not nowhere, "these stand in no table of tests/docs/uses.py"
    assert max(uses_of.values()) == 1, uses_of.most_common(3)


def test_what_is_listed_names_tests_that_are_there() -> None:
    for why in uses.LISTED.values():
        for path in re.findall(r"tests/[\w/]+(?:\.py)?", why):
            assert (ROOT / path).exists(), why


def test_an_unknown_block_would_be_found() -> None:
    with pytest.raises(LookupError, match="nowhere"):
        block("README.md", "vllm serve MODEL --no-such-block")
    with pytest.raises(LookupError, match="should begin"):
        block("README.md", "")


@pytest.mark.parametrize("paste", PASTED, ids=lambda paste: f"{paste.page}: {paste.start}")
def test_names_of_the_reader_are_in_the_text(paste: uses.Paste) -> None:
    text = block(paste.page, paste.start).text
    assert paste.filled(text, {}) != text or not paste.named


@each(uses.SETTINGS)
def test_settings_are_right(found: Block) -> None:
    lines = [line for line in found.text.splitlines() if line.startswith("{")]
    assert lines
    for line in lines:
        settings, _ = json.JSONDecoder().raw_decode(line)
        OmniConfig.load(settings, environ={})


@each(uses.REQUESTS)
def test_requests_are_json(found: Block) -> None:
    text = found.text if found.text.startswith("{") else f"{{{found.text}}}"
    assert json.loads(text)


@pytest.mark.vllm
@each(uses.ARGUMENTS)
def test_the_arguments_of_servers_are_right(found: Block, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    with Terminal(tmp_path, {}, recorded=RECORDED) as terminal:
        status, printed = terminal.paste(found.text.replace("'…'", '"$KV"'))
        assert status == 0, printed
        commands = terminal.recorded()
    assert commands
    for command in commands:
        check(command)


def check(command: list[str]) -> None:
    """Have the program's own parser read the options."""
    program, *words = command
    if program == "mkdir" or words[0] == "examples/kv_events.py":
        return
    if program == "vllm-router":
        from vllm_router.router_args import RouterArgs

        routes = argparse.ArgumentParser(exit_on_error=False)
        RouterArgs.add_cli_args(routes, use_router_prefix=False, exclude_host_port=False)
        RouterArgs.from_cli_args(routes.parse_args(words), use_router_prefix=False)
        return
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # from vLLM 0.33 on
        from vllm.entrypoints.common.cli_args import make_arg_parser

    if program == "vllm":
        assert words[:2] == ["serve", "MODEL"]
        words = ["--model", *words[1:]]
    else:
        assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
        words = words[2:]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    transfer = parsed.kv_transfer_config
    if transfer is not None:  # a page's "…" has none
        assert transfer.kv_connector == "OmniKVConnector"
        OmniConfig.load(transfer.kv_connector_extra_config, environ={})


@pytest.mark.vllm
@each(uses.CONNECTORS)
def test_connectors_are_those_of_vllm(found: Block) -> None:
    pytest.importorskip("vllm")
    from vllm.config import KVTransferConfig

    outer = KVTransferConfig(**json.loads(found.text))
    for inner in outer.kv_connector_extra_config["connectors"]:
        parsed = KVTransferConfig(**inner)
        if parsed.kv_connector == "OmniKVConnector":
            OmniConfig.load(parsed.kv_connector_extra_config, environ={})


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime folder of the test's own, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="omni-docs-") as folder:
        monkeypatch.setenv(RUNTIME_DIR_VARIABLE, f"{folder}/run")
        yield


@pytest.mark.usefixtures("runtime")
@each(uses.PYTHON)
def test_python_runs(found: Block) -> None:
    torch = pytest.importorskip("torch")
    given = {
        "tensor": torch.arange(6.0),
        "kv_caches": [torch.randn(2, 10, 16, 2, 8)],
        "request": SimpleNamespace(request_id="req-7"),
    }
    with contextlib.ExitStack() as closing:
        try:
            exec(compile(found.text, str(found), "exec"), given)
        finally:
            for made in given.values():
                if isinstance(made, (OmniConnector, OmniKVTransferManager)):
                    closing.callback(made.close)
    if "ok" in given:
        assert given["ok"]
        assert torch.equal(given["found"][0]["hidden"], given["tensor"])
    else:
        blocks_of_it = given["kv_caches"][0][0, [4, 9, 2]].flatten(0, 1)[:41]
        assert torch.equal(given["request"].past_key_values.key_cache[0], blocks_of_it)


def test_a_terminal_shows_what_a_command_says(tmp_path: Path) -> None:
    with Terminal(tmp_path, {"NAME": "x"}) as terminal:
        assert terminal.paste("echo $NAME; false") == (1, "x\n\n")
        terminal.paste("vllm serve 'a b' --port 1 && vllm serve c")
        first, second = terminal.servers()
        assert (first, second) == (["serve", "a b", "--port", "1"], ["serve", "c"])
        assert after(first, "--port") == "1"
        assert re.search("no distribution", terminal.paste("pip install no-such-thing")[1])
        assert "extra" in terminal.paste("pip install 'omni-connector[nothing]'")[1]
        assert terminal.paste("pip install 'omni-connector[mooncake]'")[0] == 0
