# SPDX-License-Identifier: Apache-2.0
"""What becomes of each block of README and docs/: it is pasted, read as settings, or listed here
with the reason why a test does neither.

A block is known by its page and by how it begins. A new one that stands in none of these tables
fails `test_blocks.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MESSAGES = '[{"role": "user", "content": "hello"}]'


@dataclass(frozen=True)
class Paste:
    """A block that is pasted into a shell.

    Attributes:
        page: of the block.
        start: its beginning.
        prints: regular expressions, each of which is found in what it prints within a minute.
        named: what a reader replaces by names of their own, by the page's name for it; `PREFILL_ID`
            and its like stand for what only the scene knows.
        status: of its last command.
    """

    page: str
    start: str
    prints: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    status: int = 0

    def filled(self, text: str, known: Mapping[str, str]) -> str:
        """The text with the reader's names in it.

        Raises:
            LookupError: the text has no such name.
        """
        for name, value in self.named.items():
            if name not in text:
                raise LookupError(f"{self.page}, {self.start!r}: nothing is called {name!r}")
            text = text.replace(name, known.get(value, value))
        return text


_ROUTERS = "docs/routers.md"
_QUICKSTART, _OPERATIONS, _SHARED = (
    "docs/quickstart.md",
    "docs/operations.md",
    "docs/shared-prefix.md",
)
_BETWEEN, _CONFIGURATION, _OBJECTS = (
    "docs/between-hosts.md",
    "docs/configuration.md",
    "docs/objects.md",
)
_STAGE = "docs/stage.md"
_INTERNALS, _SIMULATION = "docs/internals/index.md", "docs/internals/simulation.md"

PREFILL_ID, DECODE_ID, FOLDER = "the prefill engine's id", "the decode engine's id", "a folder"
"""What only the test knows: see `Paste.named`."""

ONE_HOST = (
    Paste(_QUICKSTART, "pip install git+", ("already satisfied", "vllm")),
    Paste(_QUICKSTART, "KV="),
    Paste(_QUICKSTART, "pip install vllm-router", ("already satisfied",)),
    Paste(_QUICKSTART, "curl http", ('"text":"', '"finish_reason":"length"')),
    Paste(
        _QUICKSTART,
        "curl -s",
        (r"handoffs_received_total{.*} 1\.0", r"bytes_loaded_total{.*} [1-9]"),
    ),
    Paste(
        _OPERATIONS,
        "omni-connector top",
        (r"default", r"team-a", r'"own":'),
    ),
    Paste(
        _OPERATIONS,
        "omni-connector explain",
        (r"a request would load", r"0-\d+ missing", r'"engines"'),
        {"3f2a": PREFILL_ID},
    ),
    Paste(_OPERATIONS, "curl -s", ("a request would load",), {"[...]": MESSAGES}),
    Paste(_SHARED, "omni-connector explain", (r"0-\d+ (own|KV cache|arena)",)),
    Paste(_SHARED, "curl http", ('"text":"',)),
    Paste(_OPERATIONS, "omni-connector role", ("prefill",), {"decode-3": DECODE_ID}),
    Paste(_OPERATIONS, "omni-connector drain", ("drained", "serv"), {"prefill-1": PREFILL_ID}),
    Paste(_OPERATIONS, "omni-connector dashboard"),
    Paste(_CONFIGURATION, "python -m omni_connector.runtime.trace", (), {"FOLDER": FOLDER}),
)
"""In this order, in one shell of one host."""

TWO_HOSTS = {
    "prefill": (
        Paste(_BETWEEN, "pip install", ("already satisfied",)),
        Paste(_BETWEEN, "omni-connector keygen"),
        Paste(_BETWEEN, "vllm serve MODEL --host 0.0.0.0 --port 8100", (), {"/root": FOLDER}),
    ),
    "decode": (
        Paste(_BETWEEN, "vllm serve MODEL --host 0.0.0.0 --port 8200", (), {"/root": FOLDER}),
        Paste(_BETWEEN, "vllm-router"),
    ),
}
"""In this order, in a shell of each host."""

A_FOLDER = (Paste(_SHARED, "mkdir /nvme/omni", (), {"/nvme": FOLDER, '"gib":500': '"gib":1'}),)
"""In a shell of a third host."""

PRINTED = {
    (_BETWEEN, "Reading the arena at"): "the log of the decode engine of the two hosts",
}
"""Output that a page shows; the test of the scene looks for it."""

SETTINGS = {
    ("README.md", "omni-connector keygen omni.key"),
    (_CONFIGURATION, '{"listen"'),
}
"""Lines with `kv_connector_extra_config` in them: our own code reads these."""

ARGUMENTS = {
    ("README.md", "pip install git+"),
    ("README.md", "vllm-router"),
    (_QUICKSTART, "VLLM_CPU_OMP_THREADS_BIND=0"),
    (_CONFIGURATION, "vllm serve MODEL"),
    (_SHARED, 'KV=\'{"kv_connector":"OmniKVConnector","kv_role":"kv_both","kv_load'),
    (_SHARED, 'KV=\'{"kv_connector":"OmniKVConnector","kv_role":"kv_both",\n'),
    (_ROUTERS, "python examples/kv_events.py"),
    (_OPERATIONS, "vllm serve MODEL"),
    (_ROUTERS, "vllm serve MODEL"),
    (_ROUTERS, "vllm-router --vllm-pd"),
    (_ROUTERS, "vllm-router --policy"),
}
"""Commands like pasted ones: vLLM's or the router's own parser reads their options."""

CONNECTORS = {(_CONFIGURATION, '{"kv_connector": "MultiConnector"')}
"""Values of `--kv-transfer-config`: vLLM reads them."""

REQUESTS = {
    (_QUICKSTART, '"kv_transfer_params"'),
    (_SHARED, '{"model": "MODEL"'),
}
"""Bodies of requests: JSON."""

PYTHON = {
    (_OBJECTS, "from omni_connector.objects"),
    (_STAGE, "from omni_connector.stage"),
}
"""Python that a test runs."""

LISTED = {
    (_INTERNALS, "omni_connector/"): "the folders; tests/test_names.py compares them",
    ("README.md", "make demo"): "the demo runs in tests/e2e/test_demo.py, the tests are these",
    (_QUICKSTART, "make demo"): "the demo runs in tests/e2e/test_demo.py",
    (_QUICKSTART, "pip install 'omni-connector[demo]"): "needs a network; tests/e2e/test_demo.py",
    (_SHARED, "pip install"): "needs a network",
    (
        _OPERATIONS,
        "omni-connector cache",
    ): "tests/vllm_v1/test_cache_verbs.py, tests/e2e/test_keep.py",
    (_SHARED, "omni-connector keep"): "tests/e2e/test_keep.py starts it so",
    (_SHARED, "mooncake_master"): "tests/e2e/test_store.py starts it so",
    (_SHARED, "curl -s"): "tests/e2e/test_store.py reads this counter",
    (_OBJECTS, "pip install"): "needs a network; tests/objects/test_mooncake_store.py starts it so",
    (_OBJECTS, "spec = ConnectorSpec"): "needs a master; tests/objects/test_mooncake_store.py",
    (_OBJECTS, "sender = {"): "needs two hosts; tests/objects/test_mooncake.py",
    (_OBJECTS, "import hashlib"): "tests/objects/test_own_connector.py",
    (_OBJECTS, "class TestMyConnector"): "tests/objects/test_own_connector.py",
    (_OBJECTS, "connectors:"): "tests/objects/test_transfer_config.py reads such files",
    (_STAGE, "connectors:"): "vLLM-Omni reads it; tests/stage",
    (_CONFIGURATION, "echo advise"): "changes the machine; needs root",
    (_OPERATIONS, "terminationGracePeriodSeconds"): "needs a cluster; tests/deploy/test_deploy.py",
    ("docs/deploy.md", "omni-connector doctor"): "as in the quickstart; tests/cli/test_doctor.py",
    (_SIMULATION, "make simulate"): "takes hours; tests/simulation runs some seeds",
    (_SIMULATION, "python -m tests.simulation"): "tests/simulation/test_simulation.py",
    ("docs/transports.md", "[project.entry-points"): "tests/transports/test_registry.py",
    ("docs/transports.md", "from omni_connector.testing"): "tests/transports/test_shm.py",
    ("docs/transports.md", "class MyTransport"): "an outline",
}
"""What no test here runs, and why."""


def first_words(text: str) -> str:
    """For messages: how a block begins."""
    return re.split(r"\s{2,}|\n", text)[0][:60]
