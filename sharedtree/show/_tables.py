"""An outline as a table: lines of text as wide as there is room for, with and without colours, or HTML for notebooks.

In HTML what is tied is linked with where it came first. All texts of the model are escaped. Colours follow the page:
text has the page's own, and the mark of a tie one for light and one for dark pages. The mark is a framed number
besides, for whoever does not see colours.
"""

import html
import itertools
import textwrap
import zlib
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
    what = f"= {row.view}" if row.view else part.name
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
    if cells:  # columns that are empty in all rows are left out, which without rows would be all
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


_STYLE = """
.sharedtree-summary{color:inherit;font-size:13px;line-height:1.45;overflow-x:auto;--sharedtree-tie:#a34700}
@media(prefers-color-scheme:dark){.sharedtree-summary{--sharedtree-tie:#ffb066}}
html[data-theme=light] .sharedtree-summary,[data-jp-theme-light=true] .sharedtree-summary{--sharedtree-tie:#a34700}
html[data-theme=dark] .sharedtree-summary,[data-jp-theme-light=false] .sharedtree-summary{--sharedtree-tie:#ffb066}
.sharedtree-summary table{border-collapse:collapse;border:0;color:inherit;font:inherit;margin:0}
.sharedtree-summary th,.sharedtree-summary td{border:0;border-bottom:1px solid #8884;padding:1px 10px 1px 0;
text-align:left;white-space:pre;background:none;color:inherit}
.sharedtree-summary th{border-bottom:2px solid #8888;font-weight:600}
.sharedtree-summary td:first-child,.sharedtree-summary code{font-family:ui-monospace,monospace;background:none;
color:inherit}
.sharedtree-summary td.sharedtree-number,.sharedtree-summary th.sharedtree-number{text-align:right;
font-variant-numeric:tabular-nums}
.sharedtree-summary a{color:var(--sharedtree-tie);text-decoration:underline;font-weight:600}
.sharedtree-summary b{color:var(--sharedtree-tie);border:1.5px solid;border-radius:4px;padding:0 4px}
.sharedtree-summary tr:target,.sharedtree-summary li:target{outline:2px solid var(--sharedtree-tie)}
.sharedtree-summary ul{list-style:none;padding:0;margin:4px 0 0}.sharedtree-summary p{margin:6px 0 0}
"""

_CLASSES = ("", "", "", "", ' class="sharedtree-number"', ' class="sharedtree-number"', "")


def html_table(outline: Outline, *, depth: int | None, most: int) -> str:
    """A table with its style, and what is said below it.

    Args:
        outline: of a model.
        depth: how many levels below the root are shown; None for all.
        most: how many rows are shown.
    """
    return "".join(_pieces(outline, depth, most))


def _pieces(outline: Outline, depth: int | None, most: int) -> Iterator[str]:
    rows = outline.iterate(depth)
    shown = list(itertools.islice(rows, most))
    # Links lead within the table, so tables of several models on one page must not share names.
    name = f"sharedtree-{zlib.crc32(repr([row[:3] for row in shown]).encode('utf-8', 'backslashreplace')):08x}"
    present = {row.mark for row in shown if not row.is_again}
    yield f'<div class="sharedtree-summary"><style>{_STYLE}</style><table><thead><tr>'
    for head, css in zip(HEADS, _CLASSES, strict=True):
        yield f"<th{css}>{head}</th>"
    yield "</tr></thead><tbody>"
    for row in shown:
        yield from _row(row, name, present)
    yield "</tbody></table>"
    more = sum(1 for _ in rows)
    if more:
        yield f"<p>... and {figure(more)} more lines; see <code>depth=</code> and <code>lines=</code></p>"
    yield from _below(outline, name)
    yield "</div>"


def _row(row: Row, name: str, present: set[int | None]) -> Iterator[str]:
    cells = [html.escape(text) for text in cells_of(row)]
    anchor = ""
    if row.mark is not None:
        if not row.is_again:
            anchor = f' id="{name}-{row.mark}"'
        elif row.mark in present:
            cells[1] = f'<a href="#{name}-{row.mark}">{cells[1]}</a>'
        cells[6] = f'<a href="#{name}-tie-{row.mark}" title="all places"><b>{cells[6]}</b></a>'
    yield f"<tr{anchor}>"
    for text, css in zip(cells, _CLASSES, strict=True):
        yield f"<td{css}>{text}</td>"
    yield "</tr>"


def _below(outline: Outline, name: str) -> Iterator[str]:
    description = outline.description
    yield f"<p><strong>total</strong> {size_text(description.size)}"
    if description.num_ties:
        yield f"<br><strong>untied</strong> {size_text(description.untied_size)} if each place had its own"
        yield f"<br><strong>ties</strong> {description.num_ties:,}, each counted once:</p><ul>"
        for tie in itertools.islice(outline.ties.values(), MOST_TIES):
            yield _tie(tie, name)
        if len(outline.ties) > MOST_TIES:
            yield f"<li>... and {len(outline.ties) - MOST_TIES:,} more: <code>sharedtree.ties</code> lists them</li>"
        yield "</ul>"
    else:
        yield "</p>"
    if any(run.how == "equal" for runs in outline.runs.values() for run in runs):
        yield "<p>×N: so many equal neighbours; sizes within the first are its own</p>"


def _tie(tie: TieShown, name: str) -> str:
    places = [f"<code>{html.escape(place.path or '(root)')}</code>" for place in tie.places[:MOST_PLACES]]
    if len(tie.places) > MOST_PLACES:
        places.append(f"... {len(tie.places) - MOST_PLACES:,} more places")
    if len(tie.places) == 1:
        places.append("one object in all of them")
    first = f'<a href="#{name}-{tie.mark}"><b>#{tie.mark}</b></a>{times(tie.times)}'
    return f'<li id="{name}-tie-{tie.mark}">{first} {" = ".join(places)}</li>'
