# SPDX-License-Identifier: Apache-2.0
"""Has engines that are forked wait as long as a busy machine takes; see `tests.patience`."""

import pytest

from omni_connector.prefix import store_jobs
from tests.patience import STORE_S, lengthen

DEADLINES = (
    "omni_connector.copy.held_blocks.SETTLE_S",
    "omni_connector.identity.epochs.WAIT_S",
    "omni_connector.prefix.neighbours._ADOPT_S",
    "omni_connector.vllm_v1.connector.SETTLE_S",
)

_patch = pytest.MonkeyPatch()
lengthen(_patch, DEADLINES)
for _name in ("_GET_S", "_PUT_S"):
    _patch.setattr(store_jobs, _name, STORE_S)
