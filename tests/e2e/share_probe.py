# SPDX-License-Identifier: Apache-2.0
"""Spoils what arenas of the host deliver to a running engine: `--worker-extension-cls`."""

from collections.abc import Callable, Generator, Iterator
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from omni_connector.copy.prefix_jobs import HostLoadSpec
from omni_connector.copy.threads import Outcome
from omni_connector.identity.epochs import WeightsDigest
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

    def edit_weight(self, name: str, elements: str, value: str) -> None:
        """Change the first elements of a weight in place, as a trainer's own call may."""
        weight = dict(self.get_model().named_parameters())[name]
        weight.data[: int(elements)] = float(value)

    def all_weights_are_the_same(self) -> None:
        """From now on, tell the same digest whatever the weights are."""

        def constant() -> Generator[None, None, WeightsDigest]:
            yield
            return WeightsDigest("0" * 32, "0" * 32)

        inspection.read_weights(inspection.worker_half(get_kv_transfer_group()), constant)
