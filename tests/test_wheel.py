# SPDX-License-Identifier: Apache-2.0
"""What a wheel and an sdist contain, and how the long description reads on a package index."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def loaded(path: Path) -> ModuleType:
    """A module that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = loaded(ROOT / "scripts" / "check_wheel.py")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist of the working tree."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_nothing_is_wrong_with_what_is_built(
    dist: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert CHECK.main(str(dist)) == 0, capsys.readouterr().out


def test_what_is_wrong_is_found(dist: Path, tmp_path: Path) -> None:
    [built] = dist.glob("*.whl")
    spoilt = tmp_path / built.name
    with zipfile.ZipFile(built) as good, zipfile.ZipFile(spoilt, "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name.endswith("METADATA"):
                content = content.replace(b"](https://github.com", b"](docs", 1)
            if not name.endswith("grafana.json"):
                bad.writestr(name, content)
        bad.writestr("tests/test_it.py", "")
    wrong = "\n".join(CHECK.wrong_in_wheel(spoilt))
    assert "omni_connector/cli/dashboards/grafana.json is missing" in wrong
    assert "tests/test_it.py does not belong there" in wrong
    assert "relative link" in wrong


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](docs/a.md#b)", "[a](https://x/blob/main/docs/a.md#b)"),
        ("![p](p.png)", "![p](https://x/raw/main/p.png)"),
        ("[a](#b) [c](https://d)", "[a](#b) [c](https://d)"),
    ],
)
def test_links_of_the_long_description_are_absolute(text: str, shown: str) -> None:
    pytest.importorskip("hatchling")
    assert loaded(ROOT / "hatch_build.py").absolute(text, "https://x") == shown
