# SPDX-License-Identifier: Apache-2.0
"""Engines of these tests sleep for a moment where vLLM's processes yield while they wait.

On Linux 6.18, processes that yield in a loop on a core that several engines share can keep all
others off it for half a minute: `yield` moves them on in the scheduler's virtual time without
moving its zero, so it picks wrongly (fixed by torvalds/linux@1319ea57529e). Three engines with two
ranks among them on two cores met that at every third hand-off. The connector's own threads are as
starved as vLLM's; see docs/troubleshooting.md.
"""

import os
import time


def sched_yield() -> None:
    """Give the core to whoever waits for it."""
    time.sleep(2e-5)


os.sched_yield = sched_yield
