# SPDX-License-Identifier: Apache-2.0
"""What vLLM refuses of `--kv-transfer-config` and `--kv-events-config`, and what is worth a remark.

vLLM is not imported, which takes ten seconds. A test compares the fields and the verdicts with
those of the installed vLLM.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

from omni_connector.config import check_value
from omni_connector.errors import ConfigError, unknown
from omni_connector.plugin import CONNECTOR_NAME

_ROLES: Final = ("kv_producer", "kv_consumer", "kv_both")

TRANSFER_FIELDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "kv_connector": str | None,
        "engine_id": str | None,
        "kv_buffer_device": str,
        "kv_role": Literal["kv_producer", "kv_consumer", "kv_both"] | None,
        "kv_port": int,
        "kv_connector_extra_config": dict[str, Any],
        "kv_connector_module_path": str | None,
        "enable_permute_local_kv": bool,
        "kv_load_failure_policy": Literal["recompute", "fail"],
    }
)
"""Types by name of the fields of vLLM's `KVTransferConfig`."""

EVENTS_FIELDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "enable_kv_cache_events": bool,
        "publisher": Literal["null", "zmq"],
        "endpoint": str,
        "replay_endpoint": str | None,
        "buffer_steps": int,
        "hwm": int,
        "max_queue_size": int,
        "topic": str,
    }
)
"""Types by name of the fields of vLLM's `KVEventsConfig`."""


def transfer_faults(given: Mapping[str, Any]) -> list[str]:
    """What vLLM refuses of a `--kv-transfer-config`, entries of a `MultiConnector` included."""
    found: list[str] = []
    for entry in _entries(given):
        found += _faults(entry, TRANSFER_FIELDS)
        if entry.get("kv_connector") is not None and entry.get("kv_role") is None:
            found.append(f"kv_role is missing: one of {', '.join(_ROLES)}")
    return found


def transfer_remarks(given: Mapping[str, Any], min_handoff_tokens: int) -> list[str]:
    """What works, and may not be meant."""
    ours = next(each for each in _entries(given) if each.get("kv_connector") == CONNECTOR_NAME)
    if ours.get("kv_role") == "kv_producer":
        return []
    remarks: list[str] = []
    if given.get("kv_load_failure_policy", "fail") == "fail":
        remarks.append(
            "kv_load_failure_policy is fail: a request whose load fails half way ends with an "
            "error. Set recompute, with which its prompt is computed here"
        )
    if not min_handoff_tokens:
        remarks.append(
            "min_handoff_tokens is 0: prompts are fetched however short they are. Set it where "
            "computing a short prompt takes less than a hand-off, a few milliseconds"
        )
    return remarks


def events_faults(given: Mapping[str, Any]) -> list[str]:
    """What vLLM refuses of a `--kv-events-config`."""
    return _faults(given, EVENTS_FIELDS)


def events_said(given: Mapping[str, Any]) -> str:
    """Where a right `--kv-events-config` has events sent, and who can hear them there."""
    if not given.get("enable_kv_cache_events", False):
        return "enable_kv_cache_events is not set: nobody is told of blocks"
    if given.get("publisher") == "null":
        return "publisher is null: nobody is told of blocks"
    endpoint = given.get("endpoint", "tcp://*:5557")
    if not binds(endpoint):
        return (
            f"vLLM connects to {endpoint}, as it has no `*` or `::`: only a subscriber that "
            "listens there hears it. Routers connect themselves, and hear nothing: name "
            "tcp://*:PORT for them, or ipc://FILE on one host"
        )
    everywhere = "*" in endpoint and not endpoint.startswith("ipc://")
    open_to = ", on every address of this host, and nobody is authenticated" * everywhere
    return f"vLLM listens at {endpoint}{open_to}; subscribers connect to it"


def binds(endpoint: str) -> bool:
    """Whether vLLM's publisher listens at an endpoint; else it connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _entries(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield given
    extra = given.get("kv_connector_extra_config")
    if given.get("kv_connector") == "MultiConnector" and isinstance(extra, Mapping):
        yield from extra.get("connectors", [])


def _faults(given: Mapping[str, Any], fields: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key, value in given.items():
        try:
            if key not in fields:
                raise ConfigError(unknown("key", key, fields))
            check_value(key, fields[key], value, strict=False)
        except ConfigError as error:
            found.append(str(error))
    return found
