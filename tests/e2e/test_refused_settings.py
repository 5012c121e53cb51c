# SPDX-License-Identifier: Apache-2.0
"""A server and an `LLM` whose settings are wrong end with the mend, before a model is loaded."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector.testing.engines import SERVER
from omni_connector.testing.ports import free_port

from .configurations import ours
from .pool import Pool, engine_environment

pytestmark = pytest.mark.e2e

LONGEST_S = 250.0  # both import vLLM, beside all that uses the cores then
IN_PROCESS = Path(__file__).parent / "in_process.py"


def start(log: Path, pool: Pool, *arguments: str) -> subprocess.Popen[bytes]:
    """A program of a user, whose output goes to `log`."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **engine_environment(pool.runtime), "HF_HUB_OFFLINE": "1"},
        )


def test_the_last_line_names_key_value_and_mend(pool: Pool, tmp_path: Path) -> None:
    model, weights = str(pool.model("llama")), tmp_path / "without-weights"
    weights.mkdir()
    for file in Path(model).iterdir():
        if file.suffix != ".safetensors":  # whoever gets as far as to load fails otherwise
            (weights / file.name).symlink_to(file)
    misspelt = {**ours("kv_both"), "kv_connector_extra_config": {"handoff_tll_s": 60}}
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = f"127.0.0.1:{held.getsockname()[1]}"
        port_taken = {**ours("kv_both"), "kv_connector_extra_config": {"listen": taken}}
        server = start(
            tmp_path / "server",
            pool,
            *("-m", SERVER, "--model", str(weights), "--enforce-eager"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--kv-transfer-config", json.dumps(misspelt)),
        )
        setting = {"settings": {"model": str(weights)}, "kv_transfer_config": port_taken}
        program = start(tmp_path / "program", pool, str(IN_PROCESS), json.dumps(setting))
        try:
            assert server.wait(timeout=LONGEST_S) == 1
            assert program.wait(timeout=LONGEST_S) == 1
        finally:
            for process in (server, program):
                process.kill()
                process.wait()
    of_server = (tmp_path / "server").read_text().strip().splitlines()[-1]
    assert "unknown key 'handoff_tll_s'; did you mean 'handoff_ttl_s'" in of_server
    of_program = (tmp_path / "program").read_text().strip().splitlines()[-1]
    assert f"listen: cannot listen at {taken}" in of_program
    assert "a port that nobody has" in of_program
