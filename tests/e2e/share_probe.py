# SPDX-License-Identifier: Apache-2.0
"""Spoils what arenas of the host deliver to a running engine: `--worker-extension-cls`."""

from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from omni_connector.copy.prefix_jobs import HostLoadSpec
from omni_connector.copy.threads import Outcome
from tests import inspection

from .probe import KVProbe

EXTENSION = "tests.e2e.share_probe.ShareProbe"


class ShareProbe(KVProbe):
    """Methods that vLLM adds to its worker class; called by `/collective_rpc`."""

    def host_delivers(self, what: str, to: str = "") -> None:
        """From now on: `all`, or `nothing` though it says so, which is the negative control.

        Args:
            to: the rank that this is said to; "" for all.
        """
        if to and int(to) != self.rank:
            return
        bodies = inspection.job_bodies(inspection.worker_half(get_kv_transfer_group()))
        if not hasattr(self, "_host_load"):
            self._host_load = bodies[HostLoadSpec]
        thread, body = self._host_load

        def nothing(job_id: int, spec: Any, fence: object) -> Any:
            def work(cancelled: Callable[[], bool]) -> Iterator[bool]:
                yield True
                return Outcome(job_id)

            return work

        bodies[HostLoadSpec] = thread, {"all": body, "nothing": nothing}[what]
