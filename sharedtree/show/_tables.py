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

from ._description import MANY, Size, Use
from ._outline import Outline, Row, TieShown

Style = Literal["", "path", "dim", "tie", "head"]

RICH_STYLES = {"": "", "path": "cyan", "dim": "dim", "tie": "yellow", "head": "bold"}
"""Style → the style of rich for it."""

Line = tuple[tuple[str, Style], ...]
"""A line of text: pieces of text with their styles."""

HEADS = ("path", "class", "shape", "dtype", "parameters", "state", "optimizer", "bytes", "tie")

# Indices of the columns of `HEADS` that hold numbers, which are aligned at the right.
_NUMBER_COLUMNS = (4, 5, 6, 7)

# Indices of the columns to leave out where the table is too wide, the least useful first. Between the two groups the
# class is shortened, since a long path in it would cost other columns. The totals of state and of the optimizer stand
# below the table, too.
_LEFT_OUT_FIRST, _LEFT_OUT_LAST = (7, 3), (6, 5, 1, 2)

# Most levels of indentation, and most characters of the first two columns.
_MOST_INDENT, _MOST_PATH, _MOST_CLASS = 40, 60, 40

# Least widths of the first two columns where the table is too wide.
_LEAST_PATH, _LEAST_CLASS = 8, 20

# Most places of a tie and most ties that are listed below a table, and most characters of a place there.
MOST_PLACES, MOST_TIES, _MOST_PLACE = 8, 100, 120


class _Cells(NamedTuple):
    """Texts of a row, one for each column of `HEADS`."""

    path: str
    class_name: str
    shape: str
    dtype: str
    parameters: str
    state: str
    optimizer_state: str
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
        parameters=_figure_or_nothing(row.size.parameters),
        state=_figure_or_nothing(row.size.state),
        optimizer_state=_figure_or_nothing(row.size.optimizer_state),
        nbytes=_figure_or_nothing(row.size.nbytes),
        tie=f"#{row.mark}" if row.mark is not None else "",
    )


def figure(number: int) -> str:
    """Formats a number for people. Counting stops at `MANY`, so larger numbers read "over 10^30"."""
    return f"{number:,}" if number < MANY else "over 10^30"


def _figure_or_nothing(number: int) -> str:
    """Formats a number for people, and zero as an empty text."""
    return figure(number) if number else ""


def _indented(row: Row) -> str:
    """Returns the step of a row behind its indentation. Below a certain depth, the depth is written as a number."""
    indent = "  " * row.depth if row.depth <= _MOST_INDENT else f"{'  ' * _MOST_INDENT}({row.depth}) "
    return f"{indent}{row.step or '(root)'}{times(row.repeats)}{' each' if row.is_for_each else ''}"


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
    yield from _summary_lines(outline, width, has_each=any(row.is_for_each for row in shown))


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
    if width is not None and columns:
        _leave_out(columns, _LEFT_OUT_FIRST, widths, width)
        _narrow(1, _LEAST_CLASS, widths, columns, width)
        _leave_out(columns, _LEFT_OUT_LAST, widths, width)
        _narrow(0, _LEAST_PATH, widths, columns, width)

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


def _leave_out(columns: list[int], dispensable: Sequence[int], widths: Sequence[int], width: int) -> None:
    """Removes columns, in the order of `dispensable`, until those that remain fit a width."""
    for column in dispensable:
        if _total(widths, columns) > width and column in columns:
            columns.remove(column)


def _narrow(column: int, least: int, widths: list[int], columns: Sequence[int], width: int) -> None:
    """Narrows one column, so that all fit a width if possible, but not below a least width."""
    excess = max(0, _total(widths, columns) - width)
    widths[column] = min(widths[column], max(least, widths[column] - excess))


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


def _summary_lines(outline: Outline, width: int | None, *, has_each: bool) -> Iterator[Line]:
    """Yields the lines below a table: totals, ties, and the meaning of `each`.

    Args:
        outline: the outline of a model.
        width: most characters of a line. None for any number.
        has_each: True if a row of the table has the numbers of each of several neighbours.
    """
    totals = _totals_of(outline)
    # Texts stand below one another, behind the longest head.
    heads = [total.head for total in totals] + [_EACH_HEAD] * has_each
    pad = max(map(len, heads)) + _GAP_BEHIND_HEAD
    yield ()
    for total in totals:
        yield from _folded(total.head.ljust(pad), total.text, width)
    if outline.ties:
        for tie in itertools.islice(outline.ties.values(), MOST_TIES):
            yield from _tie_lines(tie, width)
        if len(outline.ties) > MOST_TIES:
            yield ((f"  ... and {len(outline.ties) - MOST_TIES:,} more: sharedtree.ties lists them", "dim"),)
    if has_each:
        yield from _folded(_EACH_HEAD.ljust(pad), _EACH, width)


# Meaning of `each` in a table.
_EACH_HEAD = "×N each"
_EACH = "N equal neighbours; the numbers there and in the rows below are for one of them"

# Least number of spaces between a head and its text.
_GAP_BEHIND_HEAD = 2


_HEADS_OF_USES: dict[Use, str] = {
    "parameter": "parameters",
    "state": "state",
    "optimizer state": "optimizer",
    "other": "other",
}


class _Total(NamedTuple):
    """A line below a table.

    Attributes:
        head: what is counted, in one word.
        text: how much there is.
    """

    head: str
    text: str


def _totals_of(outline: Outline) -> list[_Total]:
    """Returns the totals of a model. If it has state, parameters and state have lines of their own.

    The line about ties comes last, and the ties themselves are to follow.
    """
    description = outline.description
    totals = description.totals
    lines: list[_Total] = []
    if totals["state"].nbytes or totals["optimizer state"].nbytes:
        for use, total in totals.items():
            if total.nbytes:
                lines.append(_Total(_HEADS_OF_USES[use], f"{figure(total.numbers)}, {figure(total.nbytes)} bytes"))
        lines.append(_Total("total", f"{figure(description.size.nbytes)} bytes"))
    else:
        lines.append(_Total("total", size_text(description.size)))
    if description.num_ties:
        lines.append(_Total("untied", f"{size_text(description.untied_size)} if each place had its own"))
        lines.append(_Total("ties", f"{description.num_ties:,}, each counted once:"))
    return lines


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
    room = max(width - len(mark), _LEAST_PATH)
    for i, place in enumerate(places):
        head = mark if i == 0 else f"{' ' * (len(mark) - 2)}= "
        yield ((head, "tie"), (shortened(place, room), "path"))


TIE_COLOUR = "color-mix(in srgb,currentColor 50%,#e07000)"
"""CSS of the colour of ties: half the colour of the page's text, so it can be read on light and on dark pages."""

# `TABLE` is the table with the lines below it. It stands for a selector as strong as one with an id, although no
# element has that id. For a notebook has rules for all its tables, which would align paths at the right and take away
# their indentation: in JupyterLab `.jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) td`.
_STYLE = """
TABLE{color:inherit;font-size:13px;line-height:1.45;overflow-x:auto;--sharedtree-tie:TIE_COLOUR}
TABLE table{border-collapse:collapse;border:0;color:inherit;font:inherit;margin:0;table-layout:auto}
TABLE tr{background:none}TABLE thead{border:0}
TABLE th,TABLE td{border:0;border-bottom:1px solid #8884;padding:1px 10px 1px 0;
text-align:left;white-space:pre;background:none;color:inherit;line-height:inherit;max-width:none}
TABLE th{border-bottom:2px solid #8888;font-weight:600}
TABLE td:first-child,TABLE code{font-family:ui-monospace,monospace;background:none;
color:inherit}TABLE code{padding:0}
TABLE td.sharedtree-number,TABLE th.sharedtree-number{text-align:right;
font-variant-numeric:tabular-nums}
TABLE a:is(:link,:visited,:hover){color:var(--sharedtree-tie);text-decoration:underline;font-weight:600}
TABLE b{color:var(--sharedtree-tie);border:1.5px solid;border-radius:4px;padding:0 4px}
TABLE a b{color:inherit}
TABLE tr:target,TABLE li:target{outline:2px solid var(--sharedtree-tie)}
TABLE ul{list-style:none;padding:0;margin:4px 0 0}TABLE p{margin:6px 0 0}
""".replace("TABLE", ":is(.sharedtree-summary,#sharedtree-none)").replace("TIE_COLOUR", TIE_COLOUR)

# Attribute of the cells of each column.
_CLASS_ATTRIBUTES = tuple([' class="sharedtree-number"' if i in _NUMBER_COLUMNS else "" for i in range(len(HEADS))])

# Indices of the columns from left to right. Of a table that is wider than its page only the left part is in view, so
# the marks of ties stand beside the paths.
_HTML_ORDER = (0, 8, 1, 2, 3, 4, 5, 6, 7)

# Number of the next table of this process.
_table_numbers = itertools.count(1)


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
    # Links lead to names within the page. The count keeps all tables of one process apart. The checksum of depths,
    # steps and paths does so for different models in a notebook with outputs of several processes.
    checksum = zlib.crc32(repr([row[:3] for row in shown]).encode("utf-8", "backslashreplace"))
    name = f"sharedtree-{checksum:08x}-{next(_table_numbers)}"
    # Marks of the ties whose first place has a row, so that a link can lead there.
    linked_marks = {row.mark for row in shown if not row.is_again}
    size = outline.description.size
    is_shown = {"state": size.state > 0, "optimizer": size.optimizer_state > 0, "tie": bool(outline.ties)}
    columns = [i for i in _HTML_ORDER if is_shown.get(HEADS[i], True)]
    yield f'<div class="sharedtree-summary"><style>{_STYLE}</style><table><thead><tr>'
    for i in columns:
        yield f"<th{_CLASS_ATTRIBUTES[i]}>{HEADS[i]}</th>"
    yield "</tr></thead><tbody>"
    for row in shown:
        yield from _html_row(row, columns, name, linked_marks)
    yield "</tbody></table>"
    # `rows` goes on after the last row that is shown.
    num_hidden = sum(1 for _ in rows)
    if num_hidden:
        yield f"<p>... and {figure(num_hidden)} more lines; see <code>depth=</code> and <code>lines=</code></p>"
    yield from _html_summary(outline, name, has_each=any(row.is_for_each for row in shown))
    yield "</div>"


def _html_row(row: Row, columns: Sequence[int], name: str, linked_marks: set[int | None]) -> Iterator[str]:
    """Yields a row of the table.

    Args:
        row: the row of the outline.
        columns: indices of the columns of the table.
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
    for i in columns:
        yield f"<td{_CLASS_ATTRIBUTES[i]}>{cells[i]}</td>"
    yield "</tr>"


def _html_summary(outline: Outline, name: str, *, has_each: bool) -> Iterator[str]:
    """Yields the totals, the ties and the meaning of `each`, as `_summary_lines` does for text."""
    yield f"<p>{'<br>'.join(f'<strong>{total.head}</strong> {total.text}' for total in _totals_of(outline))}</p>"
    if outline.ties:
        yield "<ul>"
        for tie in itertools.islice(outline.ties.values(), MOST_TIES):
            yield _html_tie(tie, name)
        if len(outline.ties) > MOST_TIES:
            yield f"<li>... and {len(outline.ties) - MOST_TIES:,} more: <code>sharedtree.ties</code> lists them</li>"
        yield "</ul>"
    if has_each:
        yield f"<p><strong>{_EACH_HEAD}</strong> {_EACH}</p>"


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
