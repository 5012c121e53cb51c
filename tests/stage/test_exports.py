# SPDX-License-Identifier: Apache-2.0
"""What the package shows, what importing it costs, and that the documented API is all there."""

import inspect
import subprocess
import sys

import pytest

import omni_connector.stage as stage
from omni_connector.stage.manager import OmniKVTransferManager


@pytest.mark.parametrize("name", stage.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(stage, name) is not None
    assert name in dir(stage)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Omnibus"):
        stage.Omnibus  # noqa: B018


def test_the_room_does_not_load_vllm() -> None:
    code = (
        "import sys, omni_connector.stage as stage\n"
        "for name in stage.__all__: getattr(stage, name)\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'vllm'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


SIGNATURES = {
    "apply_kv_cache_to_request": ["req", "data"],
    "handle_finished_requests_kv_transfer": [
        "finished_reqs", "kv_caches", "block_size", "cache_dtype", "request_id_resolver",
    ],
    "receive_kv_cache": ["req", "target_device"],
    "receive_kv_cache_for_request": ["request_id", "target_device", "sender_info"],
    "receive_multi_kv_cache": ["req", "cfg_kv_collect_func", "target_device"],
    "receive_multi_kv_cache_distributed": ["req", "cfg_kv_collect_func", "target_device"],
    "update_sender_info": ["sender_info", "sender_stage_id"],
    "wait_prefetch": ["timeout"],
    "extract_kv_cache": [
        "req_id", "block_ids", "seq_len", "kv_caches", "block_size", "cache_dtype",
        "custom_metadata",
    ],
    "send_kv_cache": ["kv_data"],
    "from_model_config": ["config"],
    "from_od_config": ["config"],
    "from_vllm_config": ["vllm_config", "model_config"],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_documented_methods_have_their_parameters(name: str) -> None:
    found = inspect.signature(getattr(OmniKVTransferManager, name)).parameters
    assert [each for each in found if each != "self"] == SIGNATURES[name]
