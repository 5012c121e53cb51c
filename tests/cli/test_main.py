# SPDX-License-Identifier: Apache-2.0
"""The command line and its exit statuses."""

import os
import pwd
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from omni_connector import __version__, plugin
from omni_connector.cli.main import main, parser
from omni_connector.net.runtime import RUNTIME_DIR_VARIABLE


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"omni-connector {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["dance"],
        ["demo", "--tokens", "1"],
        ["demo", "--tokens", "9000"],
        ["demo", "--rounds", "0"],
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "omni-connector" in capsys.readouterr().err


def test_the_model_is_kept_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parser().parse_args(["demo"]).cache == tmp_path / "omni-connector"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parser().parse_args(["demo"]).cache == tmp_path / ".cache" / "omni-connector"


def test_without_a_home_only_the_demo_lacks_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert main(["keygen", str(tmp_path / "key")]) == 0
    assert main(["demo"]) == 2
    assert "--cache" in capsys.readouterr().err
    assert parser().parse_args(["demo", "--cache", str(tmp_path)]).cache == tmp_path


def run(command: str, place: Path, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """Have a shell run a command line of ours, as `omni`."""
    ours = f"{shlex.quote(sys.executable)} -m omni_connector.cli.main"
    return subprocess.run(
        ["sh", "-c", command.replace("omni ", f"{ours} ")],
        capture_output=True,
        env={**os.environ, RUNTIME_DIR_VARIABLE: str(place), **environment},
        timeout=120,
        check=False,
    )


def test_an_encoding_without_the_tables_characters_is_enough(place: Path) -> None:
    namespace = shlex.quote("süß…" * 40)
    for command in (f"top --once --namespace {namespace}", "explain x --namespace süß"):
        done = run(f"omni {command}", place, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert done.returncode == (0 if command.startswith("top") else 1), done.stderr
        assert b"Traceback" not in done.stderr
        assert b"No engine" in b" ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("top --once >&-", 0),
        ("top --once --json >&- 2>&-", 0),
        ("keygen /no/such/folder/key >&- 2>&-", 2),
        ("explain - <&-", 2),
        ("explain --tokens - <&-", 2),
        ("top --once <&- >&- 2>&-", 0),
    ],
)
def test_streams_that_are_closed_change_no_exit_status(
    command: str, status: int, place: Path
) -> None:
    done = run(f"omni {command}", place)
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr
    if command.startswith("explain"):
        assert b"standard input is closed" in done.stderr


def test_no_file_gets_the_number_of_a_stream_that_was_closed(place: Path) -> None:
    look = "import os; print(os.readlink('/proc/self/fd/1'), file=open(os.environ['OUT'], 'w'))"
    script = (
        "import sys; sys.argv = ['omni-connector', 'top', '--once']; "
        "import omni_connector.cli.top as top; "
        f"top.top = lambda *_, **__: exec({look!r}) or 0; "
        "from omni_connector.cli.main import main; sys.exit(main())"
    )
    done = run(
        f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} >&-", place, OUT=str(place / "out")
    )
    assert done.returncode == 0, done.stderr
    assert (place / "out").read_text() == "/dev/null\n"


def test_the_demo_is_told_where_its_trace_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {}
    monkeypatch.setattr("omni_connector.cli.demo.demo", lambda **given: told.update(given) or 0)
    assert main(["demo", "--trace", "trace.json"]) == 0
    assert told["trace"] == Path("trace.json")
    assert main(["demo"]) == 0
    assert told["trace"] is None


def test_a_demo_without_the_right_vllm_says_which_ones_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.1.0")
    assert main(["demo"]) == 2
    assert plugin.supported_range() in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "vllm", "transformers", "llvmlite")))  # none can be had
from omni_connector.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["top", "--once"], 0),
        (["explain", "--tokens", "1,2,3", "--json"], 1),
        (["doctor", "--config", "{}"], 1),
    ],
)
def test_who_only_watches_needs_no_torch(arguments: list[str], status: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        env={**os.environ, RUNTIME_DIR_VARIABLE: str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_is_a_command_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omni_connector", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == f"omni-connector {__version__}\n"
