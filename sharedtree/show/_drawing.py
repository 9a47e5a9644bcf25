"""`draw` shows a model as a picture. `_drawing_layout` chooses and places boxes and wires; the SVG is written here.

The SVG has the colours of the page that it stands in. A tie is visible in three ways besides its colour: its box has a
double frame, and the number of the tie in a solid badge; its wires are thick and dashed and end in a dot; and a line of
the box has the number of places. Equal neighbours are a stack of boxes with `×12`.
"""

import importlib
import itertools
import os
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._drawing_layout import (
    MOST_BOXES,
    MOST_CHARACTERS,
    Arrangement,
    Box,
    Boxes,
    Extent,
    Placed,
    Point,
    Wire,
    arrange,
    boxes_of,
    place,
)
from ._live_models import description_of
from ._outline import Outline
from ._tables import TIE_COLOUR, figure


class Drawing:
    """Picture of a model, in SVG. Notebooks show it, and `.save("m.svg")` writes it.

    Attributes:
        svg: the picture, as text.

    A drawing holds that text only, so it keeps nothing of the model alive.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file, as UTF-8. A file that exists is replaced.

        Args:
            path: path of the file. Should end in `.svg`, the only format.

        Raises:
            ValueError: if the path ends in the name of another format, such as `.png`.
        """
        ending = os.path.splitext(os.fspath(path))[1].lower()
        if ending in _OTHER_FORMATS:
            raise ValueError(
                f"A drawing is SVG, and `{ending}` is another format. Save it as `.svg`; a browser opens it, and other "
                "programs convert it, such as `rsvg-convert m.svg -o m.png`."
            )
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def _repr_html_(self) -> str:
        # A notebook shows SVG as an image, which does not get the colours of the page. HTML does.
        svg = self._repr_svg_().replace("<svg", '<svg style="max-width:100%;height:auto"', 1)
        return f"<div>{svg}</div>"

    def _repr_svg_(self) -> str:
        # The text begins with an XML declaration, which must not stand inside a page.
        return self.svg[self.svg.index("<svg") :]

    def __repr__(self) -> str:
        return f'<a drawing, {len(self.svg):,} bytes of SVG: save it with .save("m.svg")>'


# Endings that people try. Any other ending is accepted.
_OTHER_FORMATS = frozenset({".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp", ".eps", ".ps"})


def draw(tree: Any, *, depth: int | None = None, boxes: int | None = None) -> Drawing:
    """Draws a model as a picture of its DAG: modules are boxes, fields are wires, and every tie stands out.

    A tied object is one box with a double frame and the number of its tie. Thick dashed wires lead to that box from
    each of its places. Arrays are lines in the box of their module. Plain containers are part of the names of fields.
    Three or more equal neighbours are a stack with `×12`. Where the drawing would be wider than 730 pixels, two are a
    stack, too, and the boxes of a layer stand in several rows. Ties have the same numbers as in `summary`. In a
    notebook the picture has the colours of the page, and a file is light.

    Args:
        tree: a model of any library, any container of models and arrays, or a `Dag`. Its arrays may be abstract.
        depth: number of levels below the root with boxes. Default: all.
        boxes: most boxes. If there are more, the uppermost are drawn, and the others are lines. Default: 150, or fewer
            if the drawing would be too wide.

    Returns:
        A drawing, shown by notebooks. The same model has the same drawing.

    Raises:
        ImportError: if igraph or drawsvg is not installed. The message says how to install them.
        CycleError: if an object contains itself.
        UnregisteredTypeError: if `tree` is no pytree.
        ValueError: if `depth` is negative, or `boxes` is less than 1.

    Cost: one walk over the nodes, and up to a second for the layout of 150 boxes. If that is too wide, others follow.
        No array is read, copied or kept.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> w = jnp.ones((4, 3))
        >>> drawing = st.draw({"embed": w, "head": w})
        >>> "12 parameters, at 2 places" in drawing.svg  # `drawing.save("model.svg")` writes it
        True

    Limitations: the width of boxes is computed for a usual monospaced font. Drawings of many unequal layers are large:
    choose a `depth`.
    """
    for name, value, least in (("depth", depth, 0), ("boxes", boxes, 1)):
        if value is not None and value < least:
            raise ValueError(f"`{name}` is at least {least}, not {value}.")
    igraph, drawsvg = libraries()
    return drawing_of(Outline(description_of(tree)), depth, boxes, igraph, drawsvg)


def drawing_of(outline: Outline, depth: int | None, most: int | None, igraph: Any, drawsvg: Any) -> Drawing:
    """Draws an outline.

    Args:
        outline: the outline of a model.
        depth: number of levels below the root with boxes. None for all.
        most: most boxes. None for `MOST_BOXES`, or for fewer if a drawing with these is too wide.
        igraph: the module `igraph`.
        drawsvg: the module `drawsvg`.
    """
    sketch = _fitting_sketch(outline, depth, most)
    placed = place(sketch.arrangement, igraph, room=_room(sketch.arrangement.least_size.height) - 2 * _MARGIN)
    return Drawing(_svg_of(_Picture(sketch.boxes, placed, _notes(outline, sketch.boxes)), drawsvg=drawsvg))


class _Sketch(NamedTuple):
    """Boxes and wires in layers, before they are placed.

    Attributes:
        boxes: the boxes and wires.
        arrangement: their layers.
    """

    boxes: Boxes
    arrangement: Arrangement

    @property
    def excess(self) -> float:
        """Width beyond the room of the drawing, in pixels. 0 if all layers fit."""
        size = self.arrangement.least_size
        return max(size.width + 2 * _MARGIN - _room(size.height), 0.0)


class _Picture(NamedTuple):
    """Boxes and wires with their places.

    Attributes:
        boxes: the boxes and wires.
        placed: their places.
        notes: lines of text below the drawing.
    """

    boxes: Boxes
    placed: Placed
    notes: list[str]

    @property
    def size(self) -> Extent:
        """Size of the whole drawing. It is wider than high by no more than `_MOST_RATIO`."""
        placed = self.placed.size
        width = max(placed.width, *[len(note) * _CHARACTER for note in self.notes], 0) + 2 * _MARGIN
        height = placed.height + 2 * _MARGIN + (len(self.notes) * _LINE + 8 if self.notes else 0)
        return Extent(width, max(height, width / _MOST_RATIO))


def _room(height: float) -> float:
    """Returns the most width of a drawing whose boxes and wires have this height, in pixels."""
    # A drawing as narrow as a box is not made narrower.
    return max(min(_WIDEST, _MOST_RATIO * height), _NARROWEST)


def _fitting_sketch(outline: Outline, depth: int | None, most: int | None) -> _Sketch:
    """Returns the first sketch that fits its room, or else the one with the least excess.

    If a drawing is too wide, two equal neighbours become a stack, too. If that is not enough, the boxes of a layer
    stand in several rows, unless that makes it too high. At last there are fewer boxes. For the parameters, see
    `drawing_of`.
    """
    narrowest = _sketch(boxes_of(outline, depth=depth, most=most or MOST_BOXES))
    if narrowest.excess == 0:
        return narrowest
    if narrowest.arrangement.least_size.width + 2 * _MARGIN > _WIDEST:
        outline = outline.folded()
    for count in [most] if most is not None else [MOST_BOXES, 60, 30, 15, 8]:
        boxes = boxes_of(outline, depth=depth, most=count)
        for widest in (None, *_WIDTHS):
            sketch = _sketch(boxes, widest)
            # In many rows, wires are so long that nobody follows them. The user may still choose the number of boxes.
            has_few_rows = widest is None or most is not None or sketch.arrangement.least_size.height <= _HIGHEST
            if sketch.excess == 0 and has_few_rows:
                return sketch
            narrowest = min(narrowest, sketch, key=lambda sketch: sketch.excess)
    return narrowest


def _sketch(boxes: Boxes, widest: float | None = None) -> _Sketch:
    """Distributes boxes over layers. For `widest`, see `arrange`."""
    arrangement = arrange(
        [_extent(box) for box in boxes.boxes],
        [(wire.start, wire.stop) for wire in boxes.wires],
        [Extent(len(wire.label) * _CHARACTER + 8, 16) for wire in boxes.wires],
        widest=widest,
        first=_ties_and_above(boxes),
    )
    return _Sketch(boxes, arrangement)


def _ties_and_above(boxes: Boxes) -> set[int]:
    """Returns the boxes that are tied, and all that a wire or several lead from to a tied one."""
    chosen = {number for number, box in enumerate(boxes.boxes) if box.mark is not None}
    starts_of: dict[int, list[int]] = {}
    for wire in boxes.wires:
        starts_of.setdefault(wire.stop, []).append(wire.start)
    stack = list(chosen)
    while stack:
        for start in starts_of.get(stack.pop(), ()):
            if start not in chosen:
                chosen.add(start)
                stack.append(start)
    return chosen


def _notes(outline: Outline, boxes: Boxes) -> list[str]:
    """Returns the lines of text below a drawing: the totals, and the ties not drawn."""
    description = outline.description
    notes = [f"{figure(description.size.parameters)} parameters"]
    if description.num_ties:
        notes[0] += f"; untied {figure(description.untied_size.parameters)}"
    if boxes.hidden:
        marks = ", ".join(f"#{mark}" for mark in boxes.hidden[:_MOST_HIDDEN])
        marks += f" and {len(boxes.hidden) - _MOST_HIDDEN:,} more" if len(boxes.hidden) > _MOST_HIDDEN else ""
        notes += textwrap.wrap(f"ties within what is not drawn: {marks}", MOST_CHARACTERS)
    return notes


# Most marks of ties that are not drawn, in the text below a drawing.
_MOST_HIDDEN = 12


def libraries() -> tuple[Any, Any]:
    """Imports igraph and drawsvg and returns both modules, in this order.

    Raises:
        ImportError: if one of them is not installed.
    """
    try:
        return importlib.import_module("igraph"), importlib.import_module("drawsvg")
    except ImportError as error:
        raise ImportError(
            f"`sharedtree.draw` needs igraph and drawsvg, and `{error.name}` cannot be imported. Install both:\n"
            "    pip install igraph drawsvg\n"
            "They are also what the extra of sharedtree brings: `sharedtree[show]`.",
            name=error.name,
        ) from error


# --- SVG --------------------------------------------------------------------------------------------------------------

# All sizes are in pixels. Widths of one character in a title and in all other texts, for usual monospaced fonts.
_CHARACTER, _TITLE_CHARACTER = 7.3, 8.0
# A drawing should be no wider than this, which is a usual column of text: there its smallest texts, of 12 pixels, are
# as large as they are here. It should be no wider than this many times its height, either. Only a drawing that is
# narrow enough anyway may be flatter.
_WIDEST, _MOST_RATIO, _NARROWEST = 730.0, 3.0, 500.0
# A drawing whose layers stand in several rows should be no higher than this.
_HIGHEST = 3_000.0
# Widths of a layer that are tried one after another if a drawing is too wide.
_WIDTHS = (640.0, 540.0, 440.0, 340.0)
# Half of the height that is kept free of a wire for its label.
_HALF_LABEL = 8.0
# Heights of a line and of a title; space around texts and around the drawing; distance of the boxes of a stack; height
# of a badge.
_LINE, _TITLE, _PADDING, _MARGIN, _STACK, _BADGE = 16.0, 26.0, 11.0, 22.0, 5.0, 18.0

# Name of a paint → its colour for programs that do not know the CSS below: those of a light page.
_COLOURS = {
    "page": "#fff",
    "box": "#f6f8fa",
    "line": "#59636e",
    "text": "#1f2328",
    "quiet": "#59636e",
    "tie": "#b34700",
    "tie-box": "#fff1e5",
    "badge": "#b34f00",
    "count": "#59636e",
    "on-badge": "#fff",
}

# Name of a paint → its CSS in a page. Everything follows the colour of the page's text, so no reader's setting and no
# class of a page need be known. The colour of ties is half of it, and half orange: dark on light pages, light on dark
# ones. Badges have colours of their own, which can be told from both.
_IN_PAGE = {
    "page": "none",
    "box": "rgb(128 128 128/.08)",
    "line": "color-mix(in srgb,currentColor 65%,transparent)",
    "text": "currentColor",
    "quiet": "color-mix(in srgb,currentColor 80%,transparent)",
    "tie": TIE_COLOUR,
    "tie-box": "rgb(224 112 0/.09)",
    "badge": "#b34f00",
    "count": "#59636e",
    "on-badge": "#fff",
}

# CSS class → its paints: the name for each property, or none.
_PAINTED = {
    "sharedtree-page": {"fill": "page"},
    "sharedtree-box": {"fill": "box", "stroke": "line"},
    "sharedtree-tied": {"fill": "tie-box", "stroke": "tie"},
    "sharedtree-frame": {"fill": "none", "stroke": "tie"},
    "sharedtree-behind": {"fill": "none"},
    "sharedtree-title": {"fill": "text"},
    "sharedtree-line": {"fill": "quiet"},
    "sharedtree-label": {"fill": "text"},
    "sharedtree-label-tied": {"fill": "tie"},
    "sharedtree-wire": {"fill": "none", "stroke": "line"},
    "sharedtree-wire-tied": {"fill": "none", "stroke": "tie"},
    "sharedtree-head": {"fill": "line"},
    "sharedtree-dot": {"fill": "tie"},
    "sharedtree-badge": {"fill": "badge"},
    "sharedtree-badge-text": {"fill": "on-badge"},
    "sharedtree-count": {"fill": "count"},
    "sharedtree-count-text": {"fill": "on-badge"},
}


def _rule(css_class: str) -> str:
    """Returns the CSS rule that paints the shapes of a class."""
    paints = [f"{attribute}:{_IN_PAGE.get(paint, paint)}" for attribute, paint in _PAINTED[css_class].items()]
    return f".{css_class}{{{';'.join(paints)}}}"


_RULES = "\n".join(map(_rule, _PAINTED))

# The fonts are those that readers usually have. They are monospaced, since all widths are counted in characters.
#
# `:root` is the drawing itself where it is a file of its own, or an image of a page. There it does not get the page's
# colour, so it has a ground of its own. Programs that cannot mix colours skip the rules in `@supports`, and paint by
# the attributes of each shape, which have such a ground, too.
_CSS = f"""
.sharedtree-drawing{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}}
.sharedtree-box,.sharedtree-frame,.sharedtree-wire{{stroke-width:1.2}}
.sharedtree-container{{stroke-dasharray:3 3}}
.sharedtree-tied{{stroke-width:2}}
.sharedtree-title{{font-size:13px;font-weight:700}}
.sharedtree-line{{font-size:12px}}
.sharedtree-label{{font-size:12px}}
.sharedtree-label-tied{{font-weight:700}}
.sharedtree-wire-tied{{stroke-width:2.6;stroke-dasharray:7 4}}
.sharedtree-badge-text{{font-size:12px;font-weight:700}}
.sharedtree-count-text{{font-size:12px;font-weight:700}}
@supports(fill:color-mix(in srgb,red,blue)){{
svg.sharedtree-drawing:root{{color:{_COLOURS["text"]}}}
{_RULES}
svg:root>.sharedtree-page{{fill:{_COLOURS["page"]}}}
}}
"""


def _styled(css: str) -> dict[str, str]:
    """Returns the attributes of a shape: its CSS classes, and the colours for programs without mixed colours.

    Args:
        css: names of classes, with spaces between them.
    """
    paints: dict[str, str] = {}
    for css_class in css.split():
        paints.update(_PAINTED.get(css_class, {}))
    colours = {attribute: _COLOURS.get(paint, paint) for attribute, paint in paints.items()}
    return {"class_": css, **colours}


def _svg_of(picture: _Picture, *, drawsvg: Any) -> str:
    """Draws boxes and wires.

    Args:
        picture: the boxes and wires, and their places.
        drawsvg: the module `drawsvg`.

    Returns:
        SVG that refers to no other file. The same boxes have the same SVG.
    """
    boxes, placed, notes = picture
    width, height = picture.size
    # A drawing that is narrower than its notes stands in the middle.
    shift = (width - placed.size.width) / 2
    drawing = drawsvg.Drawing(_rounded(width), _rounded(height), class_="sharedtree-drawing", role="img")
    drawing.append_title(_title(boxes))
    drawing.append_css(_CSS)
    drawing.append(drawsvg.Rectangle(0, 0, _rounded(width), _rounded(height), rx=8, **_styled("sharedtree-page")))
    # Wires are drawn first, so that boxes cover their ends. Labels come last.
    pen = _Pen(drawing, drawsvg, shift)
    for wire, points, label in zip(boxes.wires, _routes(boxes, placed), placed.labels, strict=True):
        pen.wire(wire, points, label)
    for box, top in zip(boxes.boxes, placed.boxes, strict=True):
        pen.box(box, top)
    for wire, middle in zip(boxes.wires, placed.labels, strict=True):
        css = "sharedtree-label sharedtree-label-tied" if wire.is_tied else "sharedtree-label"
        pen.text(wire.label, middle.x, middle.y + 4, 12, css, anchor="middle")
    for i, note in enumerate(notes):
        pen.text(note, -shift + _MARGIN, placed.size.height + 22 + i * _LINE, 12, "sharedtree-line")
    return str(drawing.as_svg())


def _routes(boxes: Boxes, placed: Placed) -> list[list[Point]]:
    """Returns the points of each wire: on the lower edge of one box, its bends, on the upper edge of another box."""
    # Index of a box → indices of the wires that leave it, and of those that arrive.
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    for i, wire in enumerate(boxes.wires):
        leaving.setdefault(wire.start, []).append(i)
        arriving.setdefault(wire.stop, []).append(i)
    routes = [list(bends) for bends in placed.bends]
    for number, (box, top) in enumerate(zip(boxes.boxes, placed.boxes, strict=True)):
        extent, stack = _extent(box), _stack(box)
        left, width = top.x - extent.width / 2, extent.width - stack
        # A badge is on the upper edge, at the right end. No wire may arrive there.
        badge = _badge_width(box) if box.mark is not None else 4 * _STACK if stack else 0.0
        for port in _ports(leaving.get(number, []), [bends[0].x for bends in placed.bends], left, width):
            bottom = top.y + extent.height - stack
            routes[port.wire][:0] = [Point(port.x, bottom), Point(port.x, placed.floors[number])]
        for port in _ports(arriving.get(number, []), [bends[-1].x for bends in placed.bends], left, width - badge):
            routes[port.wire].append(Point(port.x, top.y))
    return routes


class _Port(NamedTuple):
    """Point of an edge of a box where a wire ends.

    Attributes:
        wire: index of the wire.
        x: position along the edge.
    """

    wire: int
    x: float


def _ports(wires: Sequence[int], xs: Sequence[float], left: float, width: float) -> list[_Port]:
    """Spreads the ends of wires evenly over an edge of a box, in the order in which their next bends stand.

    Args:
        wires: indices of the wires.
        xs: for every wire of the drawing, the x coordinate of its bend next to the box.
        left: left end of the edge.
        width: length of the edge.
    """
    ordered = sorted(wires, key=lambda i: (xs[i], i))
    return [_Port(i, left + width * rank / (len(ordered) + 1)) for rank, i in enumerate(ordered, 1)]


def _title(boxes: Boxes) -> str:
    """Returns the title of the drawing, for browsers to show and for screen readers to speak."""
    num_ties = sum(box.times for box in boxes.boxes if box.mark is not None)
    return f"{boxes.boxes[0].title}: {len(boxes.boxes)} boxes, {num_ties} tied"


def _extent(box: Box) -> Extent:
    """Returns the size of a box with its stack."""
    badge = _badge_width(box) if box.mark is not None else 0.0
    width = max(len(box.title) * _TITLE_CHARACTER + badge, *[len(line) * _CHARACTER for line in box.lines], 40)
    width += 2 * _PADDING + _stack(box)
    height = _TITLE + len(box.lines) * _LINE + (6 if box.lines else 0)
    return Extent(width, height + _stack(box))


def _stack(box: Box) -> float:
    """Returns how far the boxes behind a box stand out, to the right and below. 0 for a box without a stack."""
    return 2 * _STACK if box.repeats > 1 else 0.0


def _badge(box: Box) -> str:
    """Returns the text of the badge of a tied box: `#1`, or `#1 ×12` if it stands for 12 ties."""
    num_ties = f" ×{box.times:,}" if box.times > 1 else ""
    return f"#{box.mark}{num_ties}"


def _badge_width(box: Box) -> float:
    """Returns the width to keep free for the badge of a tied box."""
    return (len(_badge(box)) + 2) * _CHARACTER


class _Pen:
    """Draws shapes. All coordinates are those of `Placed`, to which margins are added.

    Args:
        drawing: the drawing. The shapes are appended to it.
        drawsvg: the module `drawsvg`.
        shift: margin at the left.
    """

    def __init__(self, drawing: Any, drawsvg: Any, shift: float) -> None:
        self._drawing, self._drawsvg, self._shift = drawing, drawsvg, shift

    def box(self, box: Box, top_middle: Point) -> None:
        """Draws a box with its stack, texts and badges.

        Args:
            box: the box.
            top_middle: middle of its upper edge.
        """
        size = _extent(box)
        stack = _stack(box)
        left, top = top_middle.x - size.width / 2, top_middle.y
        width, height = size.width - stack, size.height - stack
        css = "sharedtree-box"
        if box.mark is not None:
            css = "sharedtree-tied"
        elif box.kind == "container":
            css = "sharedtree-box sharedtree-container"
        # Boxes of the stack, the hindmost first.
        for offset in (2 * _STACK, _STACK) if box.repeats > 1 else ():
            self._behind(left + offset, top + offset, width, height, css)
        # The box, whose title browsers show where the mouse rests on it, and the second frame of a tie.
        title = f"{box.path or '(root)'}: {box.title}"
        title += f", one object at {box.num_places:,} places" if box.mark is not None else ""
        self._frame(left, top, width, height, css, box.kind, title)
        if box.mark is not None:
            self._frame(left + 3.5, top + 3.5, width - 7, height - 7, "sharedtree-frame", box.kind)
        # Texts.
        self.text(box.title, left + _PADDING, top + 18, 13, "sharedtree-title")
        for i, line in enumerate(box.lines):
            self.text(line, left + _PADDING, top + _TITLE + 11 + i * _LINE, 12, "sharedtree-line")
        # Badges, across the upper right corner: the number of the tie, and the number of equal neighbours.
        if box.mark is not None:
            text = _badge(box)
            badge_width = len(text) * _CHARACTER + 10
            self._rectangle(left + width - badge_width + 6, top - 7, badge_width, _BADGE, 4, "sharedtree-badge")
            self.text(text, left + width + 6 - badge_width / 2, top + 6, 12, "sharedtree-badge-text", anchor="middle")
        if box.repeats > 1:
            text = f"×{box.repeats:,}"
            badge_width = len(text) * _CHARACTER + 12
            self._rectangle(left + width - badge_width + 6, top - 8, badge_width, _BADGE, 9, "sharedtree-count")
            self.text(text, left + width + 6 - badge_width / 2, top + 5.5, 12, "sharedtree-count-text", anchor="middle")

    def wire(self, wire: Wire, points: Sequence[Point], label: Point) -> None:
        """Draws a wire through points. Between two of them it is a curve that leaves and arrives vertically.

        Args:
            wire: the wire.
            points: the points.
            label: the middle of its label, one of the points. The wire is interrupted there.
        """
        path = self._drawsvg.Path(**_styled("sharedtree-wire-tied" if wire.is_tied else "sharedtree-wire"))
        path.M(*self._at(*points[0]))
        for start, stop in itertools.pairwise(points):
            start = start._replace(y=start.y + _HALF_LABEL) if start == label else start
            arrival = stop._replace(y=stop.y - _HALF_LABEL) if stop == label else stop
            middle = (start.y + arrival.y) / 2
            path.C(*self._at(start.x, middle), *self._at(arrival.x, middle), *self._at(*arrival))
            if stop == label:
                path.M(*self._at(stop.x, stop.y + _HALF_LABEL))
        self._drawing.append(path)
        # The end: a dot for a tie, otherwise an arrowhead.
        x, y = self._at(*points[-1])
        if wire.is_tied:
            self._drawing.append(self._drawsvg.Circle(x, y, 4.5, **_styled("sharedtree-dot")))
        else:
            self._drawing.append(
                self._drawsvg.Lines(x, y, x - 4, y - 7, x + 4, y - 7, close=True, **_styled("sharedtree-head"))
            )

    def text(self, text: str, x: float, y: float, size: float, css: str, anchor: str = "start") -> None:
        """Draws a text that begins, or has its middle, at a point.

        Args:
            text: the text.
            x: position of its beginning or middle.
            y: position of its base line.
            size: size of the font.
            css: CSS classes.
            anchor: `"start"` or `"middle"`.
        """
        position = self._at(x, y)
        self._drawing.append(self._drawsvg.Text(text, size, *position, text_anchor=anchor, **_styled(css)))

    def _frame(self, x: float, y: float, width: float, height: float, css: str, kind: str, title: str = "") -> None:
        """Draws the frame of a box: a module has round corners, an array has its corners cut off.

        Args:
            x: left edge.
            y: upper edge.
            width: width of the frame.
            height: height of the frame.
            css: CSS classes.
            kind: kind of the part in the box.
            title: text that browsers show where the mouse rests on the box.
        """
        if kind in ("array", "number"):
            cut, (left, top) = 8.0, self._at(x, y)
            right, bottom = _rounded(left + width), _rounded(top + height)
            corners = [left + cut, top, right - cut, top, right, top + cut, right, bottom - cut]
            corners += [right - cut, bottom, left + cut, bottom, left, bottom - cut, left, top + cut]
            shape = self._drawsvg.Lines(*map(_rounded, corners), close=True, **_styled(css))
            if title:
                shape.append_title(title)
            self._drawing.append(shape)
        else:
            self._rectangle(x, y, width, height, 7, css, title)

    def _behind(self, x: float, y: float, width: float, height: float, css: str) -> None:
        """Draws the visible part of a box in a stack: its right and lower edges. For the parameters, see `_frame`.

        Boxes are transparent, so that they have the page's ground. They do not hide the boxes behind them.
        """
        line = self._drawsvg.Path(**_styled(f"{css} sharedtree-behind"))
        line.M(*self._at(x + width - _STACK, y)).L(*self._at(x + width, y)).L(*self._at(x + width, y + height))
        line.L(*self._at(x, y + height)).L(*self._at(x, y + height - _STACK))
        self._drawing.append(line)

    def _rectangle(
        self, x: float, y: float, width: float, height: float, radius: float, css: str, title: str = ""
    ) -> None:
        """Draws a rectangle with corners of this radius. For the other parameters, see `_frame`."""
        shape = self._drawsvg.Rectangle(*self._at(x, y), _rounded(width), _rounded(height), rx=radius, **_styled(css))
        if title:
            shape.append_title(title)
        self._drawing.append(shape)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        """Adds the margins to a position."""
        return _rounded(x + self._shift), _rounded(y + _MARGIN)


def _rounded(number: float) -> float:
    """Rounds to a tenth of a pixel. Smaller digits differ between machines, and the same model has one drawing."""
    return round(float(number), 1)
