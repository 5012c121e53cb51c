# SPDX-License-Identifier: Apache-2.0
"""`omni-connector`: the command line, and the exit status.

0: success. 1: the command found something wrong. 2: the command line or a setting is wrong.
130: interrupted. 143: terminated.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from omni_connector import __version__
from omni_connector.errors import ConfigError, UnsupportedVersionError
from omni_connector.net.orders import ROLES
from omni_connector.plugin import require_supported_vllm

_DEMO = """Start a prefill engine, a decode engine and vllm-router on this machine, send prompts
through the router, and show what moved and how long it took. The demo generates a small model with
random weights; it downloads nothing, and opens ports on loopback only."""

_DOCTOR = """Check that this environment can run the connector: versions, the registration with
vLLM, the settings, the runtime folder, the kernel's features, and memory. The exit status
is 1 where an engine would not start, or not work as configured."""

_KEYGEN = """Make the key that the engines of a cluster share, for talking to each other between
hosts. Copy the file to every host, owned by the engine's user, with mode 600, and name it there as
key_file in kv_connector_extra_config. A file that exists is not overwritten."""

_DASHBOARD = """Print a file that lies in this package: a dashboard for Grafana, rules for alerts,
or a scrape configuration for Prometheus. Direct it into a file."""

_TOP = """Show the engines of a namespace: their slots by state, where the KV of their prompts comes
from, transfers, hand-offs and failures. It reads what engines of this user write into the runtime
folder, and asks them nothing. Ctrl-C ends it."""

_EXPLAIN = """Say where the KV of a prompt is for each engine that shares prefixes: in its own KV
cache, its arena, the arena of another engine, or the store; why the first missing block is missing;
and what a request with this prompt would load and compute. Prompts with LoRA adapters or images
cannot be asked for."""


_DRAIN = """Have an engine answer what it holds and offer no new hand-offs, so that it can be
stopped without loss. Its answers to prefill requests say so at once, and its server takes itself
out of routers that look at /health, where it runs with the middleware of this package."""

_ROLE = """Have an engine only prefill for others (prefill), only decode what others have prefilled
(decode), or both, without a restart. What it holds is not affected."""

_KEEP = """Hold the KV of engines that end, so that engines that start find it: over a crash, a
restart or an upgrade, of the only engine of a host, too. It runs beside the engines, as their user,
until SIGTERM or Ctrl-C. Memory of living engines is theirs; that of ended ones comes on top."""

_CACHE = """List the prompts whose KV the arenas of running engines hold, pin one for a while, drop
one or all, or move one to another engine. The engines need not be idle, nor busy."""


def _cache_dir() -> Path | None:
    """Return the folder for the demo's model; None if the user has no home, as in containers."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "omni-connector"


_LONGEST = 4080
"""Longest prompt of the demo, in tokens: its engines are started for 4096, answer included."""


def _between(
    kind: Callable[[str], float], least: float, most: float, unit: str
) -> Callable[[str], float]:
    """Reads a number of an option, in this range."""

    def number(text: str) -> float:
        found = kind(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most} {unit}, not {text}")
        return found

    return number


_SECONDS = _between(float, 0.1, 3600, "seconds")
_UP_TO_A_DAY = _between(float, 1, 86400, "seconds")


def _add_namespace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--namespace",
        metavar="NAME",
        help="of the engines (default: that of the environment, else default)",
    )


def parser() -> argparse.ArgumentParser:
    """The command line of `omni-connector`."""
    top = argparse.ArgumentParser(
        prog="omni-connector", description="KV cache that moves between vLLM engines."
    )
    top.add_argument("--version", action="version", version=f"omni-connector {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="run two engines and a hand-off", description=_DEMO)
    demo.add_argument(
        "--tokens",
        type=_between(int, 2, _LONGEST, "tokens"),
        nargs="+",
        metavar="N",
        help="lengths of the prompts, in tokens (default: 513 1000 2049)",
    )
    demo.add_argument(
        "--rounds",
        type=_between(int, 1, 1000, "rounds"),
        default=3,
        metavar="N",
        help="prompts of each length; the table shows medians (default: %(default)s)",
    )
    demo.add_argument(
        "--cache",
        type=Path,
        default=_cache_dir(),
        metavar="DIR",
        help="where the generated model is kept (default: %(default)s; without a home this must be "
        "given)",
    )
    demo.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="where the logs of the engines and the router go (default: a temporary folder, "
        "which is kept if the demo fails)",
    )

    demo.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write a Chrome trace of where the time went, for chrome://tracing or Perfetto",
    )

    check = commands.add_parser("doctor", help="check this environment", description=_DOCTOR)
    check.add_argument(
        "--config",
        metavar="JSON",
        help="what vLLM gets as --kv-transfer-config, or its kv_connector_extra_config "
        "(default: only the environment's OMNI_CONNECTOR_... are read)",
    )
    check.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="what vLLM gets by this name: who would hear its events",
    )
    check.add_argument(
        "--full",
        action="store_true",
        help="also import vLLM, and compare each of its names that is used, as an engine does; it "
        "takes ten seconds or more",
    )
    keygen = commands.add_parser(
        "keygen", help="make a key for engines on several hosts", description=_KEYGEN
    )
    keygen.add_argument("path", type=Path, metavar="PATH", help="the file to make")
    print_file = commands.add_parser(
        "dashboard", help="print files for Grafana and Prometheus", description=_DASHBOARD
    )
    print_file.add_argument(
        "what",
        nargs="?",
        choices=("grafana", "alerts", "prometheus"),
        default="grafana",
        help="the dashboard, rules for alerts, or what to scrape (default: %(default)s)",
    )
    view = commands.add_parser("top", help="watch the running engines", description=_TOP)
    _add_namespace(view)
    view.add_argument("--once", action="store_true", help="print once, and end")
    view.add_argument(
        "--json", action="store_true", help="print a JSON document a line, instead of tables"
    )
    view.add_argument(
        "--interval",
        type=_SECONDS,
        default=1.0,
        metavar="S",
        help="seconds between two looks (default: %(default)s)",
    )
    why = commands.add_parser(
        "explain", help="say where the KV of a prompt is", description=_EXPLAIN
    )
    why.add_argument("prompt", nargs="?", metavar="PROMPT", help="its text; - reads standard input")
    why.add_argument("--file", type=Path, metavar="F", help="a file with its text")
    why.add_argument(
        "--tokens", metavar="IDS", help="its token ids: 1,2,3 or JSON; - reads standard input"
    )
    why.add_argument("--salt", metavar="S", help="the cache_salt of the request")
    why.add_argument(
        "--engine", default="", metavar="ID", help="beginning of an engine id (default: all)"
    )
    _add_namespace(why)
    why.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let the tokenizer that an engine names run code of its own",
    )
    why.add_argument("--json", action="store_true", help="print a JSON document")
    _add_orders(commands)
    _add_keep(commands)
    _add_cache(commands)
    return top


def _add_keep(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    keep = commands.add_parser("keep", help="hold the KV of engines that end", description=_KEEP)
    keep.add_argument(
        "--gib",
        type=_between(float, 1e-3, 1 << 20, "GiB"),
        required=True,
        metavar="N",
        help="most memory of ended engines, in GiB; the least recently used goes first",
    )
    keep.add_argument(
        "--seconds",
        type=_UP_TO_A_DAY,
        default=1800.0,
        metavar="S",
        help="for how long an ended engine is kept (default: %(default)g)",
    )
    _add_namespace(keep)


def _add_cache(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    cache = commands.add_parser(
        "cache", help="list, pin, drop and move cached prompts", description=_CACHE
    )
    verbs = cache.add_subparsers(dest="verb", required=True, metavar="VERB")
    names = "beginning of the prompt's name"
    listing = verbs.add_parser("ls", help="list the prompts, the latest first")
    pin = verbs.add_parser("pin", help="keep a prompt from being evicted")
    pin.add_argument("prompt", metavar="NAME", help=names)
    pin.add_argument(
        "seconds", type=_UP_TO_A_DAY, metavar="SECONDS", help="for how long; a day at most"
    )
    drop = verbs.add_parser("drop", help="let go of a prompt, but of blocks that others begin with")
    which = drop.add_mutually_exclusive_group(required=True)
    which.add_argument("prompt", nargs="?", metavar="NAME", help=names)
    which.add_argument("--all", action="store_true", help="let go of all")
    move = verbs.add_parser("move", help="copy a prompt to another engine, and drop it here")
    move.add_argument("prompt", metavar="NAME", help=names)
    move.add_argument("to", metavar="ENGINE", help="beginning of the id of the engine that gets it")
    for verb in (listing, pin, drop, move):
        verb.add_argument(
            "--engine", default="", metavar="ID", help="beginning of an engine id (default: all)"
        )
        _add_namespace(verb)
        verb.add_argument("--json", action="store_true", help="print a JSON document")


def _add_orders(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    drain = commands.add_parser("drain", help="prepare to stop an engine", description=_DRAIN)
    drain.add_argument(
        "engine",
        nargs="?",
        default="",
        metavar="ENGINE",
        help="beginning of its id (default: the only engine there is, else that of this container)",
    )
    drain.add_argument(
        "--wait",
        type=_SECONDS,
        metavar="S",
        help="wait up to S seconds until it is drained (default: do not wait)",
    )
    drain.add_argument(
        "--quiet",
        type=_SECONDS,
        default=5.0,
        metavar="S",
        help="with --wait: S seconds without a new request count as drained (default: %(default)s)",
    )
    drain.add_argument("--undo", action="store_true", help="have it serve again")
    role = commands.add_parser(
        "role", help="have an engine offer hand-offs, fetch them, or both", description=_ROLE
    )
    role.add_argument("engine", metavar="ENGINE", help="beginning of its id")
    role.add_argument(
        "role",
        nargs="?",
        choices=ROLES,
        help="the role that it shall have (default: say which it has)",
    )
    for command in (drain, role):
        _add_namespace(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line given, `sys.argv` by default; return the exit status."""
    _prepare_streams()
    options = parser().parse_args(arguments)
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except (ConfigError, UnsupportedVersionError) as error:
        return _end(str(error), 2)
    except BrokenPipeError:  # the reader, such as `head`, has ended
        _drop_output()
        return 0
    except OSError as error:  # the output cannot be written, or a file cannot be read
        _drop_output()
        return _end(str(error), 2)
    except KeyboardInterrupt:
        return _end("interrupted", 130)


def _prepare_streams() -> None:
    """Make the standard streams usable, even if this process was started without them."""
    for number in range(3):
        try:
            os.fstat(number)
        except (
            OSError
        ):  # it is closed; a file or socket that is opened later must not get its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # its encoding may lack the characters of tables
            stream.reconfigure(errors="replace")


def _end(why: str, status: int) -> int:
    print(f"omni-connector: {why}", file=sys.stderr)
    return status


def _drop_output() -> None:
    """Send buffered output to /dev/null, so that Python does not try to write it again at exit."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run(options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from omni_connector.cli.doctor import doctor

        return doctor(options.config, options.kv_events_config, full=options.full)
    if options.command == "dashboard":
        from omni_connector.cli.dashboard import dashboard

        return dashboard(options.what)
    if options.command == "keygen":
        from omni_connector.cli.keygen import keygen

        return keygen(options.path)
    if options.command == "top":
        from omni_connector.cli.top import top

        return top(
            options.namespace,
            once=options.once,
            as_json=options.json,
            interval=options.interval,
        )
    if options.command == "explain":
        from omni_connector.cli.explain import Asking, explain

        asking = Asking.of(
            options.prompt,
            options.file,
            options.tokens,
            options.salt,
            trusts_code=options.trust_remote_code,
        )
        return explain(asking, options.namespace, options.engine, as_json=options.json)
    if options.command == "drain":
        from omni_connector.cli.orders import drain

        return drain(
            options.engine,
            options.namespace,
            wait=options.wait,
            quiet=options.quiet,
            undo=options.undo,
        )
    if options.command == "role":
        from omni_connector.cli.orders import role

        return role(options.engine, options.role, options.namespace)
    if options.command == "keep":
        from omni_connector.cli.keep import keep

        return keep(options.gib, options.seconds, options.namespace)
    if options.command == "cache":
        from omni_connector.cli import cache

        where = options.namespace, options.engine
        if options.verb == "ls":
            return cache.listed(*where, as_json=options.json)
        if options.verb == "pin":
            return cache.pin(options.prompt, options.seconds, *where, as_json=options.json)
        if options.verb == "move":
            return cache.move(options.prompt, options.to, *where, as_json=options.json)
        return cache.drop(options.prompt, *where, as_json=options.json)
    if options.cache is None:
        raise ConfigError("demo: this user has no home folder: give --cache DIR")
    require_supported_vllm()  # vLLM also installs `rich`, which the demo needs
    from omni_connector.cli.demo import LENGTHS, demo

    return demo(
        lengths=options.tokens or LENGTHS,
        rounds=options.rounds,
        cache=options.cache,
        logs=options.logs,
        trace=options.trace,
    )


if __name__ == "__main__":
    sys.exit(main())
