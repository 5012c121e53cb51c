# SPDX-License-Identifier: Apache-2.0
"""The command line and its exit statuses."""

from pathlib import Path

import pytest

from omni_connector import __version__, plugin
from omni_connector.cli.main import main, parser


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
