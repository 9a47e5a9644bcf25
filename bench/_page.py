"""The documentation's page on benchmarks: what is between its two marks is written here, the rest by people."""

import pathlib
from collections.abc import Sequence

from ._plots import write_plots
from ._results import Results
from ._summary import summary
from ._tables import figures_table, group_tables, machine_in_words, warm_calls_table

DOCS = pathlib.Path(__file__).parent.parent / "docs"
BEGIN = "<!-- results: written by `python -m bench page` -->"
END = "<!-- end of results -->"

# What stands above the folded rest.
_FIRST = ("dispatch.svg", "training.svg")

_PLOTS = {
    "dispatch": ("dispatch.svg", "dispatch-nnx.svg", "dispatch-one-block.svg"),
    "training": ("training.svg",),
    "growth": ("growth.svg",),
    "serialising": ("save-large.svg", "load-large.svg", "save-small.svg", "load-small.svg"),
}


def write_page(runs: Sequence[Results], docs: pathlib.Path = DOCS) -> None:
    """Puts runs into the page. Figures are of all of them, tables and plots of the first.

    Raises:
        NoPlotsError: if matplotlib is not installed.
        ValueError: if the page has lost its marks.
    """
    page = docs / "benchmarks.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page.name} needs the lines `{BEGIN}` and `{END}`, for what goes between them.")
    folder = docs / "benchmarks"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    drawn = write_plots(runs[0], folder)
    content = f"{before}{BEGIN}\n\n{results_section(runs, drawn)}\n\n{END}{after}"
    page.write_text(content, encoding="utf-8")


def results_section(runs: Sequence[Results], drawn: Sequence[str]) -> str:
    """The Markdown between the marks: three lines, two plots and a table; the rest is folded, and has no headings."""
    parts = [summary(runs[0])]
    if any(run.quick for run in runs):
        parts.insert(0, "**From a quick run: these numbers say that everything runs, and little else.**")
    parts += [f"![{name.removesuffix('.svg')}](benchmarks/{name})" for name in _FIRST if name in drawn]
    parts += [warm_calls_table(runs[0]), *(machine_in_words(run.machine) for run in runs)]
    parts += _folded("All figures that are followed from one version to the next", [figures_table(runs)])
    for group, text in group_tables(runs[0]).items():
        plots = [
            f"![{group}](benchmarks/{name})" for name in _PLOTS.get(group, ()) if name in drawn and name not in _FIRST
        ]
        parts += _folded(group.capitalize(), [*plots, text])
    return "\n\n".join(filter(None, parts))


def _folded(title: str, parts: Sequence[str]) -> list[str]:
    """What is shown when a reader clicks on the title."""
    return ["<details>", f"<summary>{title}</summary>", *parts, "</details>"]
