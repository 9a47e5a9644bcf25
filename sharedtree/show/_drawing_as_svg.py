"""Boxes and wires as a picture: SVG that follows the reader's choice of light or dark.

What is tied is told in three ways, so that colour is not needed: a box with a double frame and the number of its tie in
a solid badge; wires that are thick and dashed and end in a dot; and how many places hold it. Equal neighbours are a
stack with `×12`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from ._drawing_layout import Box, Boxes, Extent, Placed, Point, Wire, place as placed_of

_CHARACTER, _TITLE_CHARACTER, _LABEL_CHARACTER = 7.3, 8.0, 6.7
_LINE, _TITLE, _PADDING, _MARGIN, _STACK, _BADGE = 16.0, 26.0, 11.0, 22.0, 5.0, 18.0

# Variable → what it is where the reader's system is light, and where it is dark.
_COLOURS = {
    "page": ("#fff", "#0d1117"),
    "box": ("#f6f8fa", "#1c2128"),
    "line": ("#59636e", "#9198a1"),
    "text": ("#1f2328", "#f0f6fc"),
    "quiet": ("#59636e", "#9198a1"),
    "tie": ("#b34700", "#ffa657"),
    "tie-box": ("#fff1e5", "#33230f"),
    "on-tie": ("#fff", "#0d1117"),
}

# Class → what paints what has it: variables, or none.
_PAINTED = {
    "sharedtree-page": {"fill": "page"},
    "sharedtree-box": {"fill": "box", "stroke": "line"},
    "sharedtree-tied": {"fill": "tie-box", "stroke": "tie"},
    "sharedtree-frame": {"fill": "none", "stroke": "tie"},
    "sharedtree-title": {"fill": "text"},
    "sharedtree-line": {"fill": "quiet"},
    "sharedtree-gap": {"fill": "page"},
    "sharedtree-label": {"fill": "text"},
    "sharedtree-label-tied": {"fill": "tie"},
    "sharedtree-wire": {"fill": "none", "stroke": "line"},
    "sharedtree-wire-tied": {"fill": "none", "stroke": "tie"},
    "sharedtree-head": {"fill": "line"},
    "sharedtree-dot": {"fill": "tie"},
    "sharedtree-badge": {"fill": "tie"},
    "sharedtree-badge-text": {"fill": "on-tie"},
    "sharedtree-count": {"fill": "page", "stroke": "line"},
    "sharedtree-count-text": {"fill": "text"},
}


def _variables(which: int) -> str:
    texts = [f"--{name}:{colours[which]};" for name, colours in _COLOURS.items()]
    return "".join(texts[:5]) + "\n" + "".join(texts[5:])


def _rule(css: str) -> str:
    paints = [f"{what}:{'none' if by == 'none' else f'var(--{by})'}" for what, by in _PAINTED[css].items()]
    return f".{css}{{{';'.join(paints)}}}"


_RULES = "\n".join(map(_rule, _PAINTED))

# The fonts are what readers have. All widths are counted in characters, so they are of one width. Programs without
# variables paint by the attributes of each shape, since the rules with variables have a condition. Without it, CairoSVG
# 2.9.1 would take a variable for black.
_CSS = f"""
.sharedtree-drawing{{{_variables(0)}
font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}}
@media(prefers-color-scheme:dark){{.sharedtree-drawing{{{_variables(1)}}}}}
.sharedtree-box,.sharedtree-frame,.sharedtree-wire,.sharedtree-count{{stroke-width:1.2}}
.sharedtree-container{{stroke-dasharray:3 3}}
.sharedtree-tied{{stroke-width:2}}
.sharedtree-title{{font-size:13px;font-weight:700}}
.sharedtree-line{{font-size:12px}}
.sharedtree-label{{font-size:11px}}
.sharedtree-label-tied{{font-weight:700}}
.sharedtree-wire-tied{{stroke-width:2.6;stroke-dasharray:7 4}}
.sharedtree-badge-text{{font-size:11px;font-weight:700}}
.sharedtree-count-text{{font-size:12px;font-weight:700}}
@supports(fill:var(--page)){{
{_RULES}
}}
"""


def _styled(css: str) -> dict[str, str]:
    """The classes of a shape, and its light colours for what knows no variables."""
    paints = {what: by for each in css.split() for what, by in _PAINTED.get(each, {}).items()}
    return {"class_": css, **{what: _COLOURS[by][0] if by in _COLOURS else by for what, by in paints.items()}}


def svg_of(boxes: Boxes, notes: list[str], *, drawsvg: Any, igraph: Any) -> str:
    """A picture.

    Args:
        boxes: what is drawn.
        notes: lines below the drawing.
        drawsvg: the library.
        igraph: the library.

    Returns:
        SVG, without anything that refers to elsewhere. The same boxes have the same SVG.
    """
    placed = placed_of(
        [_extent(box) for box in boxes.boxes],
        [(wire.start, wire.stop) for wire in boxes.wires],
        [Extent(len(wire.label) * _LABEL_CHARACTER + 8, 16) for wire in boxes.wires],
        igraph,
    )
    width = max(placed.size.width, *[len(note) * _CHARACTER for note in notes], 0) + 2 * _MARGIN
    height = placed.size.height + 2 * _MARGIN + (len(notes) * _LINE + 8 if notes else 0)
    # A narrow drawing over long notes is in the middle.
    shift = (width - placed.size.width) / 2
    drawing = drawsvg.Drawing(_rounded(width), _rounded(height), class_="sharedtree-drawing", role="img")
    drawing.append_title(_title(boxes))
    drawing.append_css(_CSS)
    drawing.append(drawsvg.Rectangle(0, 0, _rounded(width), _rounded(height), rx=8, **_styled("sharedtree-page")))
    pen = _Pen(drawing, drawsvg, shift)
    for wire, points in zip(boxes.wires, _routes(boxes, placed), strict=True):
        pen.wire(wire, points)
    for box, at in zip(boxes.boxes, placed.boxes, strict=True):
        pen.box(box, at)
    for wire, at in zip(boxes.wires, placed.labels, strict=True):
        css = "sharedtree-label sharedtree-label-tied" if wire.is_tied else "sharedtree-label"
        pen.gap(wire.label, at)
        pen.text(wire.label, at.x, at.y + 4, 11, css, anchor="middle")
    for i, note in enumerate(notes):
        pen.text(note, -shift + _MARGIN, placed.size.height + 22 + i * _LINE, 12, "sharedtree-line")
    return str(drawing.as_svg())


def _routes(boxes: Boxes, placed: Placed) -> list[list[Point]]:
    """The points of each wire: on the lower edge of one box, its bends, on the upper edge of another."""
    leaving: dict[int, list[int]] = {}
    coming: dict[int, list[int]] = {}
    for i, wire in enumerate(boxes.wires):
        leaving.setdefault(wire.start, []).append(i)
        coming.setdefault(wire.stop, []).append(i)
    routes = [list(bends) for bends in placed.bends]
    for number, (box, at) in enumerate(zip(boxes.boxes, placed.boxes, strict=True)):
        extent, stack = _extent(box), 2 * _STACK if box.repeats > 1 else 0.0
        left, width = at.x - extent.width / 2, extent.width - stack
        # What has a badge has it on the upper edge, to the right.
        badge = (len(_badge(box)) + 2) * _CHARACTER if box.mark is not None else 4 * _STACK if stack else 0.0
        for i, x in _ports(leaving.get(number, []), [bends[0].x for bends in placed.bends], left, width):
            routes[i][:0] = [Point(x, at.y + extent.height - stack), Point(x, placed.floors[number])]
        for i, x in _ports(coming.get(number, []), [bends[-1].x for bends in placed.bends], left, width - badge):
            routes[i].append(Point(x, at.y))
    return routes


def _ports(wires: Sequence[int], xs: Sequence[float], left: float, width: float) -> list[tuple[int, float]]:
    """Where wires meet an edge of a box: side by side, in the order of where they come from or go to."""
    ordered = sorted(wires, key=lambda i: (xs[i], i))
    return [(i, left + width * place / (len(ordered) + 1)) for place, i in enumerate(ordered, 1)]


def _title(boxes: Boxes) -> str:
    ties = sum(box.times for box in boxes.boxes if box.mark is not None)
    return f"{boxes.boxes[0].title}: {len(boxes.boxes)} boxes, {ties} tied"


def _extent(box: Box) -> Extent:
    badges = (len(_badge(box)) + 2) * _CHARACTER if box.mark is not None else 0.0
    width = max(len(box.title) * _TITLE_CHARACTER + badges, *[len(line) * _CHARACTER for line in box.lines], 40)
    width += 2 * _PADDING + (2 * _STACK if box.repeats > 1 else 0)
    height = _TITLE + len(box.lines) * _LINE + (6 if box.lines else 0)
    return Extent(width, height + (2 * _STACK if box.repeats > 1 else 0))


def _badge(box: Box) -> str:
    ties = f" ×{box.times:,}" if box.times > 1 else ""
    return f"#{box.mark}{ties}"


class _Pen:
    """Draws, shifted by the margins."""

    def __init__(self, drawing: Any, drawsvg: Any, shift: float) -> None:
        self._drawing, self._drawsvg, self._shift = drawing, drawsvg, shift

    def box(self, box: Box, at: Point) -> None:
        """A box with its text."""
        size = _extent(box)
        stack = 2 * _STACK if box.repeats > 1 else 0.0
        left, top, width, height = at.x - size.width / 2, at.y, size.width - stack, size.height - stack
        css = "sharedtree-box"
        if box.mark is not None:
            css = "sharedtree-tied"
        elif box.kind == "container":
            css = "sharedtree-box sharedtree-container"
        for offset in (2 * _STACK, _STACK) if box.repeats > 1 else ():
            self._frame(left + offset, top + offset, width, height, css, box.kind)
        where = f"{box.path or '(root)'}: {box.title}"
        where += f", one object at {box.num_places:,} places" if box.mark is not None else ""
        self._frame(left, top, width, height, css, box.kind, where)
        if box.mark is not None:
            self._frame(left + 3.5, top + 3.5, width - 7, height - 7, "sharedtree-frame", box.kind)
        self.text(box.title, left + _PADDING, top + 18, 13, "sharedtree-title")
        for i, line in enumerate(box.lines):
            self.text(line, left + _PADDING, top + _TITLE + 11 + i * _LINE, 12, "sharedtree-line")
        if box.mark is not None:
            text = _badge(box)
            wide = len(text) * _CHARACTER + 10
            self._rectangle(left + width - wide + 6, top - 7, wide, _BADGE, 4, "sharedtree-badge")
            self.text(text, left + width + 6 - wide / 2, top + 6, 11, "sharedtree-badge-text", anchor="middle")
        if box.repeats > 1:
            text = f"×{box.repeats:,}"
            wide = len(text) * _CHARACTER + 12
            self._rectangle(left + width - wide + 6, top - 8, wide, _BADGE, 9, "sharedtree-count")
            self.text(text, left + width + 6 - wide / 2, top + 5.5, 12, "sharedtree-count-text", anchor="middle")

    def wire(self, wire: Wire, points: Sequence[Point]) -> None:
        """A wire through points, between which it is a curve that begins and ends downwards."""
        path = self._drawsvg.Path(**_styled("sharedtree-wire-tied" if wire.is_tied else "sharedtree-wire"))
        path.M(*self._at(*points[0]))
        for one, other in itertools.pairwise(points):
            half = (one.y + other.y) / 2
            path.C(*self._at(one.x, half), *self._at(other.x, half), *self._at(*other))
        self._drawing.append(path)
        x, y = self._at(*points[-1])
        if wire.is_tied:
            self._drawing.append(self._drawsvg.Circle(x, y, 4.5, **_styled("sharedtree-dot")))
        else:
            self._drawing.append(
                self._drawsvg.Lines(x, y, x - 4, y - 7, x + 4, y - 7, close=True, **_styled("sharedtree-head"))
            )

    def gap(self, label: str, at: Point) -> None:
        """Where a wire makes room for its label."""
        width = len(label) * _LABEL_CHARACTER + 2
        self._rectangle(at.x - width / 2, at.y - 7, width, 14, 3, "sharedtree-gap")

    def text(self, text: str, x: float, y: float, size: float, css: str, anchor: str = "start") -> None:
        """A text that begins, or has its middle, at a point."""
        at = self._at(x, y)
        self._drawing.append(self._drawsvg.Text(text, size, *at, text_anchor=anchor, **_styled(css)))

    def _frame(self, x: float, y: float, width: float, height: float, css: str, kind: str, where: str = "") -> None:
        """Modules have round corners; arrays have corners cut off."""
        if kind in ("array", "number"):
            cut, (left, top) = 8.0, self._at(x, y)
            right, bottom = _rounded(left + width), _rounded(top + height)
            corners = [left + cut, top, right - cut, top, right, top + cut, right, bottom - cut]
            corners += [right - cut, bottom, left + cut, bottom, left, bottom - cut, left, top + cut]
            shape = self._drawsvg.Lines(*map(_rounded, corners), close=True, **_styled(css))
            if where:
                shape.append_title(where)
            self._drawing.append(shape)
        else:
            self._rectangle(x, y, width, height, 7, css, where)

    def _rectangle(
        self, x: float, y: float, width: float, height: float, radius: float, css: str, where: str = ""
    ) -> None:
        shape = self._drawsvg.Rectangle(*self._at(x, y), _rounded(width), _rounded(height), rx=radius, **_styled(css))
        if where:
            shape.append_title(where)
        self._drawing.append(shape)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return _rounded(x + self._shift), _rounded(y + _MARGIN)


def _rounded(number: float) -> float:
    """To a tenth of a pixel: what is finer differs between machines."""
    return round(float(number), 1)
