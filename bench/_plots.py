"""Runs as drawings in SVG. Lines and letters have colours that can be read on white and on black alike."""

import pathlib
from typing import Any

from ._kinds import LAYERS, NNX
from ._libraries import EQUINOX, SHAREDTREE as OURS
from ._measuring import TIME, Measured
from ._models import ONE_BLOCK
from ._names import SHAREDTREE
from ._results import Results
from .serialising import LARGE, SMALL

_INK = "#808080"
_COLOURS = ("#3b82f6", "#e11d48", "#f59e0b", "#10b981", "#a855f7", "#06b6d4", "#84a010", "#c06030")


class NoPlotsError(ImportError):
    """matplotlib is not installed."""


def write_plots(run: Results, folder: pathlib.Path) -> list[str]:
    """Writes what can be drawn of a run.

    Args:
        run: the run.
        folder: where to; it exists.

    Returns:
        The names of the files.

    Raises:
        NoPlotsError: if matplotlib is not installed.
    """
    pyplot = _pyplot()
    cases = list(run.cases.values())
    drawings = {
        "dispatch": (_lines, _of(cases, "dispatch", kind=LAYERS), f"µs per call and leaf, {LAYERS}"),
        "dispatch-nnx": (_lines, _of(cases, "dispatch", kind=NNX), f"µs per call and leaf, {NNX}"),
        "dispatch-one-block": (
            _lines,
            _of(cases, "dispatch", sharing=ONE_BLOCK),
            "µs per call and path, one block everywhere",
        ),
        "growth": (_lines, _of(cases, "growth"), "µs per call and leaf, all in and one block out"),
        "training": (_bars, _of(cases, "training"), "time of a step, relative to the tie by hand"),
    }
    for work in ("save", "load"):
        for name, model, reference in (("large", LARGE, OURS), ("small", SMALL, EQUINOX)):
            chosen = _of(cases, "serialising", work=work, model=model, reference=reference)
            drawings[f"{work}-{name}"] = (_times, chosen, f"ms to {work} {model}")
    written: list[str] = []
    for name, (draw, chosen, title) in drawings.items():
        if chosen:
            figure, axes = pyplot.subplots(figsize=(7.2, 3.6), layout="constrained")
            draw(axes, chosen)
            axes.set_title(title, loc="left", fontsize=10, color=_INK)
            _plain(axes)
            # Without a date and with fixed names inside, equal runs make equal files.
            figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
            written.append(f"{name}.svg")
    return written


def _pyplot() -> Any:
    try:
        import matplotlib as mpl

        mpl.use("svg")
        from matplotlib import pyplot
    except ImportError as error:
        raise NoPlotsError(
            f"Plots need matplotlib, which cannot be imported ({error}): pip install matplotlib"
        ) from None
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "sharedtree"
    return pyplot


def _of(cases: list[Measured], group: str, **parameters: str) -> list[Measured]:
    return [case for case in cases if case.group == group and parameters.items() <= case.parameters.items()]


def _lines(axes: Any, cases: list[Measured]) -> None:
    from matplotlib.ticker import NullLocator

    cases = sorted(cases, key=lambda case: case.parameters["leaves"])
    names = list(dict.fromkeys(name for case in cases for name in case.rounds))
    for name, colour in zip(names, _COLOURS, strict=False):
        points = [
            (case.parameters["leaves"], 1e6 * case.median(name) / case.parameters["leaves"])
            for case in cases
            if name in case.rounds
        ]
        ours = name == SHAREDTREE  # on top of what it lies close to
        width, order = (2.5, 3) if ours else (1.5, 2)
        axes.plot(
            *zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name, lw=width, zorder=order
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([case.parameters["leaves"] for case in cases])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "25" else "")
    axes.set_xlabel("leaves", color=_INK)


def _bars(axes: Any, cases: list[Measured]) -> None:
    names = list(cases[0].rounds)
    height = 0.8 / len(names)
    for i, (name, colour) in enumerate(zip(names, _COLOURS, strict=False)):
        ratios = [case.ratio(name, case.reference, TIME) if name in case.rounds else 0.0 for case in cases]
        axes.barh([j + i * height for j in range(len(cases))], ratios, height, color=colour, label=name)
    axes.set_yticks([j + 0.4 - height / 2 for j in range(len(cases))], [case.name for case in cases])
    axes.invert_yaxis()


def _times(axes: Any, cases: list[Measured]) -> None:
    (case,) = cases
    names = sorted(case.rounds, key=case.median)
    colours = [_COLOURS[0] if name.startswith(OURS) else _INK for name in names]
    bars = axes.barh(names, [1000 * case.median(name) for name in names], 0.7, color=colours)
    axes.bar_label(bars, [f" {1000 * case.median(name):,.3g}" for name in names], color=_INK, fontsize=8)
    axes.invert_yaxis()


def _plain(axes: Any) -> None:
    axes.tick_params(colors=_INK, which="both")
    axes.grid(visible=True, color=_INK, alpha=0.25, linewidth=0.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)
    if not axes.get_legend_handles_labels()[0]:
        return
    legend = axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for text in legend.get_texts():
        text.set_color(_INK)
