"""The plot: validation loss against time and tokens, and the padding of every step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from odb.demo.records import Way
from odb.demo.results import WayResult
from odb.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {Way.FIXED: "#c44e52", Way.SORTED: "#dd8452", Way.ODB: "#2a6fbb"}


def import_figure() -> type[Figure]:
    """matplotlib's Figure, which needs no display. Raises MissingDependencyError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            'the demo plots with `matplotlib`: pip install "verified-odb[demo]"'
        ) from error
    return Figure


def save_plot(results: Mapping[Way, WayResult], path: Path) -> None:
    """Draw the ways' results into a PNG file."""
    figure = import_figure()(figsize=(14, 4.4), layout="constrained")
    by_time, by_tokens, padding = figure.subplots(1, 3)
    tops: list[float] = []
    for way, result in results.items():
        style = {"color": COLOURS[way], "label": way.title}
        losses = [point.loss for point in result.curve]
        tops.append(max(losses[1:]))
        by_time.plot([p.seconds for p in result.curve], losses, "o-", **style)
        by_tokens.plot([p.tokens / 1e3 for p in result.curve], losses, "o-", **style)
        shares = [100 * share for share in result.padding_per_step()]
        positions = [(i + 0.5) / len(shares) * 100 for i in range(len(shares))]
        padding.plot(positions, shares, ".", markersize=4, alpha=0.6, color=COLOURS[way])
        padding.axhline(100 * result.padding, **style)
    # The loss before training would squeeze everything else into the lower half.
    for axes in (by_time, by_tokens):
        axes.set_ylim(top=max(tops) + 0.15)
    end = results[Way.ODB].seconds
    by_time.axvline(end, color=COLOURS[Way.ODB], linestyle=":", label=f"ODB is done: {end:.0f} s")
    _name(by_time, "Validation loss against time", "seconds", "loss")
    _name(by_tokens, "Validation loss against tokens", "thousands of real tokens", "loss")
    _name(padding, "Padding of each step (line: of all)", "% of the steps", "% padding")
    padding.set_ylim(-3, 103)
    figure.savefig(path, dpi=110)


def _name(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.3)
    axes.legend()
