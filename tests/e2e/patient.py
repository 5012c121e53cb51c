# SPDX-License-Identifier: Apache-2.0
"""Has engines that are forked wait as long as a busy machine takes; see `tests.patience`. They keep
orphans for longer than an engine takes to start on the slowest machine."""

import pytest

from omni_connector.prefix import neighbours, store_jobs
from tests.patience import STORE_S, lengthen

DEADLINES = (
    "omni_connector.copy.held_blocks.SETTLE_S",
    "omni_connector.identity.epochs.WAIT_S",
    "omni_connector.prefix.neighbours._ADOPT_S",
    "omni_connector.vllm_v1.connector.SETTLE_S",
)

_patch = pytest.MonkeyPatch()
lengthen(_patch, DEADLINES)
_patch.setattr(neighbours, "ORPHAN_S", 600.0)
for _name in ("_GET_S", "_PUT_S"):
    _patch.setattr(store_jobs, _name, STORE_S)
