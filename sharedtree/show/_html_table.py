"""An outline as a table in HTML, for notebooks: what is tied is linked with where it came first.

All texts of the model are escaped. Colours follow the page: text has the page's own, and the mark of a tie one for
light and one for dark pages. The mark is a framed number besides, for whoever does not see colours.
"""

import html
import itertools
import zlib
from collections.abc import Iterator

from ._outline import Outline, Row, TieShown
from ._text_table import HEADS, MOST_PLACES, MOST_TIES, cells_of, figure, size_text, times

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
