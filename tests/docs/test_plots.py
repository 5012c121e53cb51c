# SPDX-License-Identifier: Apache-2.0
"""Plots of figures are seen where their figures are read."""

from .pages import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def test_each_plot_is_on_a_page() -> None:
    pages = [*RESULTS.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    text = "".join(page.read_text() for page in pages)
    plots = [plot.name for plot in RESULTS.glob("*.png")]
    assert plots
    assert [name for name in plots if f"{name})" not in text] == []
