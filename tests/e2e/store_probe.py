# SPDX-License-Identifier: Apache-2.0
"""Spoils what the shared store delivers to a running engine: `--worker-extension-cls`."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from omni_connector.prefix import store_jobs
from tests import inspection

from .probe import KVProbe

EXTENSION = "tests.e2e.store_probe.StoreProbe"


class StoreProbe(KVProbe):
    """Methods that vLLM adds to its worker class; called by `/collective_rpc`."""

    def store_delivers(self, what: str) -> None:
        """From now on: `all`, bytes that are `wrong` by one, or `nothing` though it says so.

        What is `nothing` is not verified either: it is the negative control.
        """
        store: Any = inspection.store(inspection.worker_half(get_kv_transfer_group()))
        if not hasattr(self, "_store_get"):
            self._store_get, self._store_verify = store.get, store_jobs.verify
        get = self._store_get

        def wrong(keys: Any, rows: Any, lengths: Any, *, timeout: float) -> list[bool]:
            found: list[bool] = get(keys, rows, lengths, timeout=timeout)
            rows[-1, 5] ^= 1
            return found

        def nothing(keys: Any, rows: Any, lengths: Any, *, timeout: float) -> list[bool]:
            return [True] * len(keys)

        store.get = {"all": get, "wrong": wrong, "nothing": nothing}[what]
        unchecked = what == "nothing"
        store_jobs.verify = (lambda *args: None) if unchecked else self._store_verify
