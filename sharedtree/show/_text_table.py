"""An outline as lines of text, as wide as there is room for: what a terminal shows, with and without colours."""

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Literal

from ._description import MANY, Size
from ._outline import Outline, Row, TieShown

Style = Literal["", "path", "dim", "tie", "head"]

RICH_STYLES = {"": "", "path": "cyan", "dim": "dim", "tie": "yellow", "head": "bold"}
"""What rich makes of each style."""

Line = tuple[tuple[str, Style], ...]

HEADS = ("path", "class", "shape", "dtype", "parameters", "bytes", "tie")

_TO_THE_RIGHT = (4, 5)

_LEFT_OUT_FIRST = (5, 3, 1, 2)  # where there is no room

_MOST_INDENT, _MOST_PATH, _MOST_CLASS = 40, 60, 40

MOST_PLACES, MOST_TIES, _MOST_PLACE = 8, 100, 120


def cells_of(row: Row) -> tuple[str, ...]:
    """What stands in each column."""
    part = row.part
    what = part.name
    if row.is_again:
        what = f"= {row.tied_to or '(root)'}" if row.tied_to is not None else f"{what} again"
    shape = "" if part.shape is None or row.is_again else str(list(part.shape))
    dtype = "" if row.is_again else part.dtype
    return (
        _indented(row) + (" ..." if row.is_cut else ""),
        what,
        shape,
        dtype,
        figure(row.size.parameters) if row.size.parameters else "",
        figure(row.size.nbytes) if row.size.nbytes else "",
        f"#{row.mark}" if row.mark is not None else "",
    )


def figure(number: int) -> str:
    """A number for people."""
    return f"{number:,}" if number < MANY else "over 10^30"


def _indented(row: Row) -> str:
    indent = "  " * row.depth if row.depth <= _MOST_INDENT else f"{'  ' * _MOST_INDENT}({row.depth}) "
    return f"{indent}{row.step or '(root)'}{times(row.repeats)}"


def times(count: int) -> str:
    """How often something is there."""
    return f" ×{count:,}" if count > 1 else ""


def table_lines(
    outline: Outline, *, depth: int | None, most: int, width: int | None, how: str = "`depth=` and `lines=`"
) -> Iterator[Line]:
    """The lines of a table, with what is to be said below it.

    Args:
        outline: of a model.
        depth: how many levels below the root are shown; None for all.
        most: how many rows are shown.
        width: how many characters a line has, if that is bounded.
        how: what chooses other rows.

    Cost: memory for the rows that are shown.
    """
    rows = outline.iterate(depth)
    shown = list(itertools.islice(rows, most))
    cells = [cells_of(row) for row in shown]
    columns = _columns([HEADS, *cells], width)
    yield tuple((text, "head") for text in columns(HEADS))
    for row, texts in zip(shown, cells, strict=True):
        yield tuple(_styled(row, columns(texts)))
    more = sum(1 for _ in rows)
    if more:
        yield ((f"... and {figure(more)} more line{'s' * (more > 1)}; see {how}", "dim"),)
    yield from summary_lines(outline, width)


def _columns(rows: Sequence[Sequence[str]], width: int | None):
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0], widths[1] = min(widths[0], _MOST_PATH), min(widths[1], _MOST_CLASS)
    kept = [i for i in range(len(widths)) if any(row[i] for row in rows[1:])]
    for dropped in _LEFT_OUT_FIRST:
        if width is not None and _total(widths, kept) > width and dropped in kept:
            kept.remove(dropped)
    if width is not None and kept:
        widths[0] = max(8, widths[0] - max(0, _total(widths, kept) - width))

    def chosen(texts: Sequence[str]) -> list[str]:
        line: list[str] = []
        for i in kept:
            text = shortened(texts[i], widths[i])
            line.append(text.rjust(widths[i]) if i in _TO_THE_RIGHT else text.ljust(widths[i]))
        line = [f"{text}  " for text in line]
        while len(line) > 1 and not line[-1].strip():
            line.pop()
        return [*line[:-1], line[-1].rstrip()]

    return chosen


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] + 2 for i in kept) - 2


def shortened(text: str, width: int) -> str:
    """A text without its middle, if it is too long."""
    if len(text) <= width:
        return text
    end = (width - 2) // 2
    return f"{text[: width - 2 - end]}..{text[len(text) - end :]}"


def _styled(row: Row, texts: list[str]) -> Iterator[tuple[str, Style]]:
    first: Style = "tie" if row.mark is not None else "path"
    for i, text in enumerate(texts):
        is_mark = row.mark is not None and i == len(texts) - 1
        yield text, first if i == 0 else "tie" if is_mark else ""


def summary_lines(outline: Outline, width: int | None = None) -> Iterator[Line]:
    """What is said below a table: totals, ties, and what `×` means."""
    description = outline.description
    unique, untied = description.size, description.untied_size
    yield ()
    yield from _folded("total   ", size_text(unique), width)
    if description.num_ties:
        yield from _folded("untied  ", f"{size_text(untied)} if each place had its own", width)
        yield from _folded("ties    ", f"{description.num_ties:,}, each counted once:", width)
        for tie in itertools.islice(outline.ties.values(), MOST_TIES):
            yield from _tie_lines(tie, width)
        if len(outline.ties) > MOST_TIES:
            yield ((f"  ... and {len(outline.ties) - MOST_TIES:,} more: sharedtree.ties lists them", "dim"),)
    if any(run.how == "equal" for runs in outline.runs.values() for run in runs):
        yield from _folded("×N      ", "so many equal neighbours; sizes within the first are its own", width)


def _folded(head: str, text: str, width: int | None) -> Iterator[Line]:
    lines = [text] if width is None else textwrap.wrap(text, max(width - len(head), 12), break_on_hyphens=False)
    for i, line in enumerate(lines):
        yield ((head if i == 0 else " " * len(head), "head"), (line, ""))


def size_text(size: Size) -> str:
    """A size for people."""
    return f"{figure(size.parameters)} parameters, {figure(size.nbytes)} bytes"


def _tie_lines(tie: TieShown, width: int | None) -> Iterator[Line]:
    mark = f"  #{tie.mark}{times(tie.times)}  "
    places = [shortened(place.path or "(root)", _MOST_PLACE) for place in tie.places[:MOST_PLACES]]
    if len(tie.places) > MOST_PLACES:
        places.append(f"... {len(tie.places) - MOST_PLACES:,} more places")
    if len(tie.places) == 1:
        places.append("one object in all of them")
    line = " = ".join(places)
    if width is None or len(mark) + len(line) <= width:
        yield ((mark, "tie"), (line, "path"))
        return
    yield ((mark, "tie"), (places[0], "path"))
    for place in places[1:]:
        yield ((f"{' ' * (len(mark) - 2)}= ", "tie"), (place, "path"))
