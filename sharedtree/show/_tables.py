"""Outline of a model as a table: lines of text of a chosen width, with or without styles, or HTML for notebooks.

A styled line is a tuple of texts, each with the name of its style, which rich or a terminal turns into a colour. In
HTML, each further place of a tied part is a link to its first place. All texts of the model are escaped. Text has the
colour of the page around it. The mark of a tie has a mix of that colour and orange. It has a frame too, for readers
who do not see colours.
"""

import html
import itertools
import textwrap
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from ._description import MANY, Size
from ._outline import Outline, Row, TieShown

Style = Literal["", "path", "dim", "tie", "head"]

RICH_STYLES = {"": "", "path": "cyan", "dim": "dim", "tie": "yellow", "head": "bold"}
"""Style → the style of rich for it."""

Line = tuple[tuple[str, Style], ...]
"""A line of text: pieces of text with their styles."""

HEADS = ("path", "class", "shape", "dtype", "parameters", "bytes", "tie")

# Indices of the columns of `HEADS` that hold numbers, which are aligned at the right.
_NUMBER_COLUMNS = (4, 5)

# Indices of the columns to leave out where the table is too wide, the least useful first.
_DISPENSABLE_COLUMNS = (5, 3, 1, 2)

# Most levels of indentation, and most characters of the first two columns.
_MOST_INDENT, _MOST_PATH, _MOST_CLASS = 40, 60, 40

# Most places of a tie and most ties that are listed below a table, and most characters of a place there.
MOST_PLACES, MOST_TIES, _MOST_PLACE = 8, 100, 120


class _Cells(NamedTuple):
    """Texts of a row, one for each column of `HEADS`."""

    path: str
    class_name: str
    shape: str
    dtype: str
    parameters: str
    nbytes: str
    tie: str


def cells_of(row: Row) -> _Cells:
    """Returns the texts of a row of an outline."""
    part = row.part
    class_name = f"= {row.view}" if row.view else part.name
    # A further place of a part refers to the first, where its shape and dtype stand.
    if row.is_again:
        class_name = f"= {row.tied_to or '(root)'}" if row.tied_to is not None else f"{class_name} again"
    shape = "" if part.shape is None or row.is_again else str(list(part.shape))
    dtype = "" if row.is_again else part.dtype
    return _Cells(
        path=_indented(row) + (" ..." if row.is_cut else ""),
        class_name=class_name,
        shape=shape,
        dtype=dtype,
        parameters=figure(row.size.parameters) if row.size.parameters else "",
        nbytes=figure(row.size.nbytes) if row.size.nbytes else "",
        tie=f"#{row.mark}" if row.mark is not None else "",
    )


def figure(number: int) -> str:
    """Formats a number for people. Counting stops at `MANY`, so larger numbers read "over 10^30"."""
    return f"{number:,}" if number < MANY else "over 10^30"


def _indented(row: Row) -> str:
    """Returns the step of a row behind its indentation. Below a certain depth, the depth is written as a number."""
    indent = "  " * row.depth if row.depth <= _MOST_INDENT else f"{'  ' * _MOST_INDENT}({row.depth}) "
    return f"{indent}{row.step or '(root)'}{times(row.repeats)}"


def times(count: int) -> str:
    """Returns ` ×12` for a count of 12, and nothing for a count of 1."""
    return f" ×{count:,}" if count > 1 else ""


def table_lines(
    outline: Outline, *, depth: int | None, most: int, width: int | None, how: str = "`depth=` and `lines=`"
) -> Iterator[Line]:
    """Yields the lines of a table, and of the totals and ties below it.

    Args:
        outline: the outline of a model.
        depth: number of levels shown below the root. None for all.
        most: most rows to show.
        width: most characters of a line. None for any number.
        how: names of the options that choose other rows, to be printed if there are more rows.

    Cost: memory for the rows that are shown.
    """
    rows = outline.iterate(depth)
    shown = list(itertools.islice(rows, most))
    cells = [cells_of(row) for row in shown]
    # Columns that are empty in all rows are left out. Without rows that would be all columns, so the heads go, too.
    if cells:
        format_line = _line_formatter([HEADS, *cells], width)
        yield tuple((text, "head") for text in format_line(HEADS))
        for row, texts in zip(shown, cells, strict=True):
            yield tuple(_styled(row, format_line(texts)))
    # `rows` goes on after the last row that is shown.
    num_hidden = sum(1 for _ in rows)
    if num_hidden:
        yield ((f"... and {figure(num_hidden)} more line{'s' * (num_hidden > 1)}; see {how}", "dim"),)
    yield from summary_lines(outline, width)


def _line_formatter(rows: Sequence[Sequence[str]], width: int | None) -> Callable[[Sequence[str]], list[str]]:
    """Chooses the columns and their widths.

    Args:
        rows: the heads and then the texts of all rows.
        width: most characters of a line. None for any number.

    Returns:
        A function that takes the texts of one row, and returns those of the chosen columns, padded.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0], widths[1] = min(widths[0], _MOST_PATH), min(widths[1], _MOST_CLASS)
    # Columns with a text below their head.
    columns = [i for i in range(len(widths)) if any(row[i] for row in rows[1:])]
    for column in _DISPENSABLE_COLUMNS:
        if width is not None and _total(widths, columns) > width and column in columns:
            columns.remove(column)
    # If that was not enough, paths are shortened.
    if width is not None and columns:
        widths[0] = max(8, widths[0] - max(0, _total(widths, columns) - width))

    def format_line(texts: Sequence[str]) -> list[str]:
        """Pads the texts of a row, without spaces at the end of the line."""
        line: list[str] = []
        for i in columns:
            text = shortened(texts[i], widths[i])
            line.append(text.rjust(widths[i]) if i in _NUMBER_COLUMNS else text.ljust(widths[i]))
        line = [f"{text}  " for text in line]
        while len(line) > 1 and not line[-1].strip():
            line.pop()
        return [*line[:-1], line[-1].rstrip()]

    return format_line


def _total(widths: Sequence[int], columns: Sequence[int]) -> int:
    """Returns the width of a line with these columns and two spaces between them."""
    return sum(widths[i] + 2 for i in columns) - 2


def shortened(text: str, width: int) -> str:
    """Returns a text of at most this many characters. A longer text has `..` in place of its middle."""
    if len(text) <= width:
        return text
    end = (width - 2) // 2
    return f"{text[: width - 2 - end]}..{text[len(text) - end :]}"


def _styled(row: Row, texts: list[str]) -> Iterator[tuple[str, Style]]:
    """Yields the texts of a row with their styles. The path and the mark of a tied part are coloured as a tie."""
    path_style: Style = "tie" if row.mark is not None else "path"
    for i, text in enumerate(texts):
        # The column of marks is the last. It is never left out of a table with ties.
        is_mark = row.mark is not None and i == len(texts) - 1
        yield text, path_style if i == 0 else "tie" if is_mark else ""


def summary_lines(outline: Outline, width: int | None = None) -> Iterator[Line]:
    """Yields the lines below a table: totals, ties, and the meaning of `×`.

    Args:
        outline: the outline of a model.
        width: most characters of a line. None for any number.
    """
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
    if _has_equal_neighbours(outline):
        yield from _folded("×N      ", "so many equal neighbours; sizes within the first are its own", width)


def _has_equal_neighbours(outline: Outline) -> bool:
    """Returns True if a row of the outline stands for several equal objects."""
    return any(run.how == "equal" for runs in outline.runs.values() for run in runs)


def _folded(head: str, text: str, width: int | None) -> Iterator[Line]:
    """Yields a text behind a head. What does not fit the width goes to further lines, indented as far as the text."""
    # At least 12 characters of the text are on each line, however narrow the table is.
    lines = [text] if width is None else textwrap.wrap(text, max(width - len(head), 12), break_on_hyphens=False)
    for i, line in enumerate(lines):
        yield ((head if i == 0 else " " * len(head), "head"), (line, ""))


def size_text(size: Size) -> str:
    """Formats a size for people."""
    return f"{figure(size.parameters)} parameters, {figure(size.nbytes)} bytes"


def _tie_lines(tie: TieShown, width: int | None) -> Iterator[Line]:
    """Yields a tie as one line, or with a line for each place if one line would be too long."""
    mark = f"  #{tie.mark}{times(tie.times)}  "
    places = [shortened(place.path or "(root)", _MOST_PLACE) for place in tie.places[:MOST_PLACES]]
    if len(tie.places) > MOST_PLACES:
        places.append(f"... {len(tie.places) - MOST_PLACES:,} more places")
    # The one path is that of a run, whose members hold one object.
    if len(tie.places) == 1:
        places.append("one object in all of them")
    line = " = ".join(places)
    if width is None or len(mark) + len(line) <= width:
        yield ((mark, "tie"), (line, "path"))
        return
    yield ((mark, "tie"), (places[0], "path"))
    for place in places[1:]:
        yield ((f"{' ' * (len(mark) - 2)}= ", "tie"), (place, "path"))


TIE_COLOUR = "color-mix(in srgb,currentColor 50%,#e07000)"
"""CSS of the colour of ties: half the colour of the page's text, so it can be read on light and on dark pages."""

_STYLE = """
.sharedtree-summary{color:inherit;font-size:13px;line-height:1.45;overflow-x:auto;--sharedtree-tie:TIE_COLOUR}
.sharedtree-summary table{border-collapse:collapse;border:0;color:inherit;font:inherit;margin:0}
.sharedtree-summary th,.sharedtree-summary td{border:0;border-bottom:1px solid #8884;padding:1px 10px 1px 0;
text-align:left;white-space:pre;background:none;color:inherit}
.sharedtree-summary th{border-bottom:2px solid #8888;font-weight:600}
.sharedtree-summary td:first-child,.sharedtree-summary code{font-family:ui-monospace,monospace;background:none;
color:inherit}
.sharedtree-summary td.sharedtree-number,.sharedtree-summary th.sharedtree-number{text-align:right;
font-variant-numeric:tabular-nums}
.sharedtree-summary a:is(:link,:visited,:hover){color:var(--sharedtree-tie);text-decoration:underline;font-weight:600}
.sharedtree-summary b{color:var(--sharedtree-tie);border:1.5px solid;border-radius:4px;padding:0 4px}
.sharedtree-summary a b{color:inherit}
.sharedtree-summary tr:target,.sharedtree-summary li:target{outline:2px solid var(--sharedtree-tie)}
.sharedtree-summary ul{list-style:none;padding:0;margin:4px 0 0}.sharedtree-summary p{margin:6px 0 0}
""".replace("TIE_COLOUR", TIE_COLOUR)

# Attribute of the cells of each column.
_CLASS_ATTRIBUTES = ("", "", "", "", ' class="sharedtree-number"', ' class="sharedtree-number"', "")


def html_table(outline: Outline, *, depth: int | None, most: int) -> str:
    """Returns a table as HTML with its style, and totals and ties below it.

    Args:
        outline: the outline of a model.
        depth: number of levels shown below the root. None for all.
        most: most rows to show.
    """
    return "".join(_html_pieces(outline, depth, most))


def _html_pieces(outline: Outline, depth: int | None, most: int) -> Iterator[str]:
    """Yields the pieces of the HTML, in order. For the parameters, see `html_table`."""
    rows = outline.iterate(depth)
    shown = list(itertools.islice(rows, most))
    # Links lead to names within the page. The checksum of depths, steps and paths keeps tables of different models
    # apart. Two models of one structure have one prefix: their links lead to the table that comes first in the page.
    name = f"sharedtree-{zlib.crc32(repr([row[:3] for row in shown]).encode('utf-8', 'backslashreplace')):08x}"
    # Marks of the ties whose first place has a row, so that a link can lead there.
    linked_marks = {row.mark for row in shown if not row.is_again}
    yield f'<div class="sharedtree-summary"><style>{_STYLE}</style><table><thead><tr>'
    for head, attribute in zip(HEADS, _CLASS_ATTRIBUTES, strict=True):
        yield f"<th{attribute}>{head}</th>"
    yield "</tr></thead><tbody>"
    for row in shown:
        yield from _html_row(row, name, linked_marks)
    yield "</tbody></table>"
    # `rows` goes on after the last row that is shown.
    num_hidden = sum(1 for _ in rows)
    if num_hidden:
        yield f"<p>... and {figure(num_hidden)} more lines; see <code>depth=</code> and <code>lines=</code></p>"
    yield from _html_summary(outline, name)
    yield "</div>"


def _html_row(row: Row, name: str, linked_marks: set[int | None]) -> Iterator[str]:
    """Yields a row of the table.

    Args:
        row: the row of the outline.
        name: prefix of all names of this table.
        linked_marks: marks of the ties whose first place has a row.
    """
    cells = _Cells(*[html.escape(text) for text in cells_of(row)])
    anchor = ""
    if row.mark is not None:
        if not row.is_again:
            anchor = f' id="{name}-{row.mark}"'
        elif row.mark in linked_marks:
            cells = cells._replace(class_name=f'<a href="#{name}-{row.mark}">{cells.class_name}</a>')
        cells = cells._replace(tie=f'<a href="#{name}-tie-{row.mark}" title="all places"><b>{cells.tie}</b></a>')
    yield f"<tr{anchor}>"
    for text, attribute in zip(cells, _CLASS_ATTRIBUTES, strict=True):
        yield f"<td{attribute}>{text}</td>"
    yield "</tr>"


def _html_summary(outline: Outline, name: str) -> Iterator[str]:
    """Yields the totals, the ties and the meaning of `×`, as `summary_lines` does for text."""
    description = outline.description
    yield f"<p><strong>total</strong> {size_text(description.size)}"
    if description.num_ties:
        yield f"<br><strong>untied</strong> {size_text(description.untied_size)} if each place had its own"
        yield f"<br><strong>ties</strong> {description.num_ties:,}, each counted once:</p><ul>"
        for tie in itertools.islice(outline.ties.values(), MOST_TIES):
            yield _html_tie(tie, name)
        if len(outline.ties) > MOST_TIES:
            yield f"<li>... and {len(outline.ties) - MOST_TIES:,} more: <code>sharedtree.ties</code> lists them</li>"
        yield "</ul>"
    else:
        yield "</p>"
    if _has_equal_neighbours(outline):
        yield "<p>×N: so many equal neighbours; sizes within the first are its own</p>"


def _html_tie(tie: TieShown, name: str) -> str:
    """Returns a tie as an entry of a list, with a link to the row of its first place."""
    places = [f"<code>{html.escape(place.path or '(root)')}</code>" for place in tie.places[:MOST_PLACES]]
    if len(tie.places) > MOST_PLACES:
        places.append(f"... {len(tie.places) - MOST_PLACES:,} more places")
    # The one path is that of a run, whose members hold one object.
    if len(tie.places) == 1:
        places.append("one object in all of them")
    link = f'<a href="#{name}-{tie.mark}"><b>#{tie.mark}</b></a>{times(tie.times)}'
    return f'<li id="{name}-tie-{tie.mark}">{link} {" = ".join(places)}</li>'
