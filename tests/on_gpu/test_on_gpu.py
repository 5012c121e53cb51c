# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.on_gpu` on a stand-in for a GPU."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.on_gpu.command import PARTS, Part, run


def ended(process: int) -> bool:
    """Whether a process has ended, or is about to be reaped."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


STAND_IN = "tests.on_gpu.stand_in:StandIn"


def steps_in(folder):
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return [row for row in rows if "step" in row]


@pytest.fixture
def beside(tmp_path_factory):
    """Parts that hang and fail run beside the test, as one of them takes until its limit."""
    folder = tmp_path_factory.mktemp("failing")
    parts = [
        Part("hangs", 20, "tests.on_gpu.hangs"),
        Part("raises", 300, "tests.on_gpu.raises"),
    ]
    with ThreadPoolExecutor(1) as threads:
        yield folder, threads.submit(run, parts, folder, STAND_IN, quick=True)


def test_each_part_runs_though_others_fail_and_hang(tmp_path, beside):
    pytest.importorskip("triton")
    assert run([Part("all", 600, "tests.on_gpu.in_one")], tmp_path, STAND_IN, quick=True)
    steps = steps_in(tmp_path)
    assert [row["name"] for row in steps if row["step"] == "done"] == [p.name for p in PARTS]
    assert not [row for row in steps if "failure" in row]
    assert all(row["same_bytes"] for row in steps if "same_bytes" in row)
    assert not [row for row in steps if row.get("errors")]
    pinned = [row["codes"] for row in steps if "codes" in row]
    assert len(pinned) == 6
    assert all(codes.keys() == {"0"} for codes in pinned)
    assert [row["codes"] for row in steps if row["step"] == "pinning"] == [{"0": 2}, {"0": 2}]
    saves = [row for row in steps if row["step"] == "pass" and "by layers" in row["beside"]]
    assert len(saves) == 4
    assert all(row["save_ends_after_it_ms"] > 0 for row in saves)
    assert "a stand-in for a GPU" in (tmp_path / "results.md").read_text()

    folder, failing = beside
    assert not failing.result()
    figure, hung, raised = steps_in(folder)
    assert hung["failure"] == "not done in 20 s"
    assert "the device has failed" in raised["said"]
    while not ended(figure["beside"]):
        time.sleep(0.01)
    page = (folder / "results.md").read_text()
    assert page.index("## hangs") < page.index("## raises")


def test_the_parts_take_five_minutes_at_most():
    assert sum(part.limit_s for part in PARTS) <= 300
