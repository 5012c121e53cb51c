# SPDX-License-Identifier: Apache-2.0
"""`omni-connector top`: the engines of a namespace, as they are now."""

import json
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from omni_connector.cli.engines import terminable
from omni_connector.cli.readings import History, Rates, Reading, hit_rates
from omni_connector.config import OmniConfig
from omni_connector.errors import ConfigError
from omni_connector.net.status import EngineStatus, label

FORMAT: Final = 1
"""Version of the JSON document. It grows when a field is removed or changes its meaning."""


def document(reading: Reading, history: History) -> dict[str, Any]:
    """Return the document that `--json` prints; docs/api.md describes the fields."""

    def told(engine: EngineStatus, rates: Rates | None) -> dict[str, Any]:
        whole = msgspec.to_builtins(engine)
        del whole["format"]
        whole["usage"]["slots_free"] = engine.usage.slots_free
        return {
            **whole,
            "name": label(engine.engine_id),
            "hit_rates": hit_rates([engine]),
            "rates": rates,
        }

    total = told(reading.total(), history.total(reading))
    return {
        "format": FORMAT,
        "time": reading.time,
        "namespace": reading.namespace,
        "folder": str(reading.folder),
        "engines": [
            {**told(engine, history.rates(engine, reading.time)), "state": reading.state(engine)}
            for engine in reading.engines
        ],
        "total": {
            **{
                name: total[name]
                for name in (
                    *("arena_bytes", "usage", "prompt_tokens", "cached_tokens"),
                    *("counts", "failures", "rates"),
                )
            },
            "hit_rates": hit_rates(reading.engines),
        },
        "remarks": reading.remarks,
    }


def top(namespace: str | None, *, once: bool, as_json: bool, interval: float) -> int:
    """Show the engines of a namespace until Ctrl-C; return the exit status.

    Args:
        namespace: namespace of the engines; None for the environment's.
        once: print once and return. Tables are also printed only once without a terminal.
        as_json: print a JSON document a line, instead of tables.
        interval: seconds between two readings.

    Raises:
        ConfigError: the runtime folder is unsafe, or rich is missing.
    """
    name = OmniConfig.load(None).namespace if namespace is None else namespace
    history = History()

    def look() -> Reading:
        reading = Reading.take(name)
        history.add(reading)
        return reading

    try:
        with terminable():
            if as_json:
                _print_json(look, history, once, interval)
            else:
                if find_spec("rich") is None:
                    raise ConfigError("top needs rich: pip install 'omni-connector[cli]'")
                from omni_connector.cli.top_view import show

                show(look, history, once, interval)
    except KeyboardInterrupt:  # Ctrl-C is how a user ends it
        return 0
    return 0


def _print_json(look: Callable[[], Reading], history: History, once: bool, interval: float) -> None:
    while True:
        print(json.dumps(document(look(), history)), flush=True)  # `json` escapes non-ASCII
        if once:
            return
        time.sleep(interval)
