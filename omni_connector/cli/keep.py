# SPDX-License-Identifier: Apache-2.0
"""`omni-connector keep`: a process beside the engines that holds what they kept over their end."""

import contextlib
import logging
import signal
import sys
import threading
from typing import Final

from omni_connector.config import OmniConfig
from omni_connector.errors import TransportError
from omni_connector.prefix.keep import Keep
from omni_connector.prefix.neighbours import LOOK_S

_GIB: Final = 1 << 30


def keep(gib: float, seconds: float, namespace: str | None) -> int:
    """Keep what engines leave until SIGTERM or SIGINT; return the exit status.

    Args:
        gib: GiB of memory of engines that have ended, at most.
        seconds: for which each is kept.
        namespace: of the engines; None for the environment's.

    Raises:
        ConfigError: the runtime folder cannot be had, or is not private.
    """
    logging.basicConfig(
        stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    logger = logging.getLogger("vllm.omni_connector.sharing")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    name = OmniConfig.load(None).namespace if namespace is None else namespace
    try:
        keeping = Keep(name, int(gib * _GIB), seconds)
    except TransportError as error:
        print(f"omni-connector: {error}", file=sys.stderr)
        return 1
    with contextlib.closing(keeping):
        logger.info(
            "What engines of namespace %s leave is kept for %g s, up to %g GiB", name, seconds, gib
        )
        while not ended.wait(LOOK_S):
            try:
                keeping.look()
            except OSError as error:  # no descriptors; the next look may do better
                logger.warning("The engines cannot be looked for: %s", error)
    return 0
