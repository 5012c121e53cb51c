# SPDX-License-Identifier: Apache-2.0
"""`OmniConfig`: the keys of `kv_connector_extra_config`, typed and checked.

Every key is optional. Each can also be given as the environment variable
`OMNI_CONNECTOR_<KEY>`; the configuration wins over the environment. An unknown key is an
error that names the nearest known one.
"""

import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from omni_connector.errors import ConfigError

ENV_PREFIX = "OMNI_CONNECTOR_"

# Environment variables of the same prefix that are not configuration keys: where the runtime
# folder lies must be known before any configuration is read (see transports/runtime.py).
_NOT_KEYS = frozenset({ENV_PREFIX + "RUNTIME_DIR"})

# Keys that vLLM itself or MultiConnector puts into kv_connector_extra_config.
_FOREIGN_KEYS = frozenset({"engine_id"})

_GIB = 1 << 30


class OmniConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one engine's connector.

    Attributes:
        transport: how bytes reach a peer: `auto` or `shm` (shared memory on one host).
        arena_gib: size of this engine's arena in GiB, over all its ranks on this host; None
            takes a tenth of the machine's memory, 8 GiB at most.
        namespace: engines that share a namespace (and a user) can find each other.
        model_id: what peers compare to know that both run the same weights; None takes the
            model's name and revision.
        handoff_ttl_s: seconds a finished prefill waits for its decode engine before its slots
            are reused.
        arena_wait_s: seconds a prefill request waits for room in a full arena before it is
            computed without hand-off.
        load_timeout_s: seconds a decode engine waits for a peer's answer and for the bytes.
        integrity: `full` checks generation and checksum of each slot, `generation` only the
            generation.
    """

    transport: Literal["auto", "shm"] = "auto"
    arena_gib: float | None = None
    namespace: str = "default"
    model_id: str | None = None
    handoff_ttl_s: float = 120.0
    arena_wait_s: float = 10.0
    load_timeout_s: float = 30.0
    integrity: Literal["full", "generation"] = "full"

    @classmethod
    def load(
        cls, extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None
    ) -> "OmniConfig":
        """Read the configuration given to vLLM, then the environment, then defaults.

        Args:
            extra_config: `kv_connector_extra_config` as vLLM passes it.
            environ: environment to read, `os.environ` by default.

        Raises:
            ConfigError: a key is unknown, or its value is ill-typed or out of range.
        """
        environ = os.environ if environ is None else environ
        known = get_type_hints(cls)
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX) or variable in _NOT_KEYS:
                continue
            key = variable[len(ENV_PREFIX) :].lower()
            if key not in known:
                raise ConfigError(f"environment variable {variable}: {_unknown(key, known)}")
            values[key] = _check(f"environment variable {variable}", known[key], text, strict=False)
        for key, value in (extra_config or {}).items():
            if key in _FOREIGN_KEYS:
                continue
            if key not in known:
                raise ConfigError(f"kv_connector_extra_config: {_unknown(key, known)}")
            values[key] = _check(f"kv_connector_extra_config: {key}", known[key], value)
        config = cls(**values)
        config._check_ranges()
        return config

    def _check_ranges(self) -> None:
        for key in ("arena_gib", "handoff_ttl_s", "arena_wait_s", "load_timeout_s"):
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{key} must be a positive number, not {value!r}")
        if not self.namespace or not all(c.isalnum() or c in "-_." for c in self.namespace):
            raise ConfigError(
                f"namespace must be letters, digits, '-', '_' or '.', not {self.namespace!r}"
            )
        if self.namespace.startswith("."):
            raise ConfigError(f"namespace must not start with a dot: {self.namespace!r}")

    def arena_bytes(self) -> int:
        """Bytes of arena for all ranks of this engine on this host."""
        if self.arena_gib is not None:
            return int(self.arena_gib * _GIB)
        return min(memory_limit_bytes() // 10, 8 * _GIB)


def memory_limit_bytes() -> int:
    """Bytes of memory this process may use: the machine's, or its cgroup's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:  # this cgroup version is not mounted here
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f"unknown key {key!r}; did you mean {near[0]!r}? Known keys: {', '.join(sorted(known))}"


def _check(where: str, kind: Any, value: Any, *, strict: bool = True) -> Any:
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError:
        raise ConfigError(f"{where} must be {_describe(kind)}, not {value!r}") from None


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_args(kind):
        return " or ".join(_describe(part) for part in get_args(kind))
    return {float: "a number", str: "a string", type(None): "null"}.get(kind, str(kind))
