"""Boxes and wires of a drawing, and their places. Modules are boxes, and the fields that lead to them are wires.

Arrays are lines in the box of their module, and plain containers are part of the names of fields. A tied part always
has a box, even if it is an array or a container, so that one sees all wires that lead to it.

    {"embed": w, "head": w}        box 0: dict                  wire 0 -> 1: "['embed'] = ['head']", tied
                                   box 1: float32[2, 3] #1

Boxes are placed in layers from top to bottom, as Sugiyama, Tagawa and Toda do (1981). igraph finds an order within each
layer that has few crossings, but takes every box for a point. The distances are found in this file: each box is placed
as near below its parents as its neighbours permit. The labels of wires are placed like boxes, in layers of their own
between those of boxes. So no label lies on anything else.
"""

import collections
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ._description import Part
from ._outline import Outline
from ._tables import figure, shortened, times

MOST_BOXES = 150
"""Default of the most boxes in a drawing."""

MOST_CHARACTERS = 92
"""Most characters of a line of text that goes over the whole width of a drawing."""

# Most wires that leave a box, most lines of a box, and most characters of a line.
_MOST_BELOW, _MOST_LINES, _MOST_TEXT = 16, 12, 44

# Most fields and most characters in the label of a wire. Another label still has room beside it.
_MOST_LABELS, _MOST_LABEL = 4, 70


class Box(NamedTuple):
    """A box of a drawing, for one part of a model.

    Attributes:
        kind: the kind of the part.
        title: its class, or dtype and shape of an array.
        lines: the lines below the title: its size, and the arrays in it.
        path: path of its first place.
        repeats: number of equal neighbours in it.
        mark: number of its tie. None if the part is not tied.
        times: number of ties that it stands for.
        num_places: number of places of the part in the model.
    """

    kind: Literal["module", "container", "array", "number"]
    title: str
    lines: tuple[str, ...]
    path: str
    repeats: int
    mark: int | None
    times: int
    num_places: int


class Wire(NamedTuple):
    """A wire from one box to another. It stands for all fields that lead from the one to the other.

    Attributes:
        start: index of the box of the module.
        stop: index of the box to which its fields lead.
        label: names of the fields.
        is_tied: True if it leads to a tied part.
    """

    start: int
    stop: int
    label: str
    is_tied: bool


class Boxes(NamedTuple):
    """Content of a drawing, without positions.

    Attributes:
        boxes: the boxes. The first is the root.
        wires: the wires between them.
        hidden: marks of the ties in no box and no line.
    """

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    hidden: tuple[int, ...]


class _Line(NamedTuple):
    """A line in a box.

    Attributes:
        text: the text.
        mark: number of the tie in the text. None if it names none.
    """

    text: str
    mark: int | None = None


class _Field(NamedTuple):
    """A field of a box, whose name may include plain containers: `.layers[0]`.

    Attributes:
        label: name of the field.
        child: number of the part that it leads to.
        repeats: number of equal neighbours in it.
        level: level of the child, counted from the root.
    """

    label: str
    child: int
    repeats: int
    level: int


class _BoxCollector:
    """Chooses the parts that get a box, level by level. If there are too many, the uppermost are chosen.

    Args:
        outline: the outline of a model.
        depth: number of levels below the root with boxes. None for all.
        most: most boxes.

    Attributes:
        box_of: number of a part → index of its box.
        counts: number of equal neighbours in each box.
        lines: index of a box → its lines.
        labels: (start, stop) of a wire → names of its fields.
    """

    def __init__(self, outline: Outline, depth: int | None, most: int) -> None:
        self._outline, self._depth, self._most = outline, depth, most
        self.box_of: dict[int, int] = {}
        self.counts: list[int] = []
        self.lines: dict[int, list[_Line]] = {}
        self.labels: dict[tuple[int, int], list[str]] = {}

    def collect(self) -> None:
        """Makes a box or a line for each part, and the labels of the wires between boxes."""
        self._add(self._outline.description.root, 1)
        queue = collections.deque([(self._outline.description.root, 0)])
        while queue:
            number, level = queue.popleft()
            box, lines = self.box_of[number], self.lines[self.box_of[number]]
            # Number of new boxes that may still hang on this one. A third of what is left is kept for the levels below,
            # where the tied parts of a long list are.
            room = min(_MOST_BELOW, max(1, (self._most - len(self.box_of)) * 2 // 3))
            for field in self._fields(number, level):
                part = self._outline.description[field.child]
                is_tied = field.child in self._outline.ties
                # A view whose sources are drawn elsewhere is a line with their paths.
                if self._outline.is_elsewhere(field.child) and not is_tied:
                    text = f"{field.label}{times(field.repeats)} = {self._outline.view(field.child)}"
                    lines.append(_Line(shortened(text, _MOST_TEXT)))
                    continue
                if part.kind in ("array", "number") and not is_tied:
                    lines.append(_Line(f"{field.label}{times(field.repeats)} {text_of(part)}"))
                    continue
                if field.child not in self.box_of:
                    is_deep = self._depth is not None and field.level > self._depth
                    if is_deep or room == 0 or len(self.box_of) >= self._most:
                        lines.append(self._line_in_place_of_box(field, part))
                        continue
                    room -= 1
                    self._add(field.child, field.repeats)
                    queue.append((field.child, field.level))
                label = f"{field.label}{times(field.repeats)}"
                self.labels.setdefault((box, self.box_of[field.child]), []).append(label)

    def _add(self, number: int, count: int) -> None:
        """Adds a box for a part that stands for `count` equal neighbours. A tied part is one object: it counts once."""
        self.lines[len(self.box_of)] = []
        self.box_of[number] = len(self.box_of)
        self.counts.append(count if number not in self._outline.ties else 1)

    def _fields(self, number: int, level: int) -> Iterator[_Field]:
        """Yields the fields of a part. Fields lead through plain containers, which have no boxes.

        Args:
            number: the part.
            level: its level.
        """
        description, ties = self._outline.description, self._outline.ties
        stack = [_Field("", number, 1, level)]
        while stack:
            field = stack.pop()
            if field.child != number:
                part = description[field.child]
                # An empty container has no fields that its name could be part of.
                is_box = part.kind == "module" or field.child in ties or not part.children
                is_cut = self._depth is not None and field.level >= self._depth
                if is_box or part.kind in ("array", "number") or is_cut:
                    yield field
                    continue
            for run in reversed(self._outline.runs[field.child]):
                repeats = field.repeats * len(run.members)
                stack.append(_Field(field.label + run.label, run.child, repeats, field.level + 1))

    def _line_in_place_of_box(self, field: _Field, part: Part) -> _Line:
        """Returns the line for a part without a box. It has the mark of a tie, and `...` if the part has children.

        Args:
            field: the field that leads to the part.
            part: the part.
        """
        tie = self._outline.ties.get(field.child)
        mark = f" #{tie.mark}" if tie else ""
        dots = " ..." if part.children else ""
        text = shortened(f"{field.label}{times(field.repeats)} {text_of(part)}", _MOST_TEXT - len(dots + mark))
        return _Line(f"{text}{dots}{mark}", tie.mark if tie else None)


def boxes_of(outline: Outline, *, depth: int | None = None, most: int = MOST_BOXES) -> Boxes:
    """Returns the boxes and wires of an outline.

    Args:
        outline: the outline of a model.
        depth: number of levels below the root with boxes. None for all.
        most: most boxes.

    Cost: linear in the rows of the outline.
    """
    collector = _BoxCollector(outline, depth, most)
    collector.collect()
    sizes = outline.description.sizes
    boxes: list[Box] = []
    drawn_marks: set[int | None] = set()
    for number, box in collector.box_of.items():
        part, tie, count = outline.description[number], outline.ties.get(number), collector.counts[box]
        all_lines = collector.lines[box]
        # If there are too many lines, those with a tie come first.
        is_long = len(all_lines) > _MOST_LINES
        ordered = sorted(all_lines, key=lambda line: line.mark is None) if is_long else all_lines
        drawn_marks.update([line.mark for line in ordered[:_MOST_LINES]])
        lines = [shortened(line.text, _MOST_TEXT) for line in ordered[:_MOST_LINES]]
        if len(all_lines) > _MOST_LINES:
            lines.append(f"... {len(all_lines) - _MOST_LINES:,} more")
        mark, num_ties, num_places = (tie.mark, tie.times, tie.num_places) if tie else (None, 1, 1)
        # The first line: "12 parameters each, at 2 places".
        parameters = sizes[number].parameters
        is_several = count > 1 or num_ties > 1
        facts = [f"{figure(parameters)} parameters{' each' if is_several else ''}"] if parameters else []
        facts += [f"at {num_places:,} places"] if tie else []
        lines[:0] = [", ".join(facts)] if facts else []
        title = shortened(text_of(part), _MOST_TEXT)
        boxes.append(
            Box(
                kind=part.kind,
                title=title,
                lines=tuple(lines),
                path=outline.path(number),
                repeats=count,
                mark=mark,
                times=num_ties,
                num_places=num_places,
            )
        )
    wires: list[Wire] = []
    for (start, stop), labels in collector.labels.items():
        wires.append(Wire(start, stop, _label(labels), is_tied=boxes[stop].mark is not None))
    drawn_marks.update([box.mark for box in boxes])
    hidden = tuple([tie.mark for tie in outline.ties.values() if tie.mark not in drawn_marks])
    return Boxes(tuple(boxes), tuple(wires), hidden)


def text_of(part: Part) -> str:
    """Describes a part in a few characters: `Linear`, `float32[3]`, `Param float32[3]`."""
    shape = "" if part.shape is None or part.kind == "number" else str(list(part.shape))
    return " ".join(text for text in (part.name, part.dtype + shape) if text)


def _label(labels: list[str]) -> str:
    """Returns the label of a wire for the names of its fields: `.embed = .head`."""
    texts = labels[:_MOST_LABELS]
    if len(labels) > _MOST_LABELS:
        texts.append(f"... {len(labels) - _MOST_LABELS:,} more")
    most = min(_MOST_TEXT, (_MOST_LABEL + len(_EQUALS)) // len(texts) - len(_EQUALS))
    return _EQUALS.join(shortened(text, most) for text in texts)


# Stands between the names of fields that lead to one object.
_EQUALS = " = "


# --- placing boxes ----------------------------------------------------------------------------------------------------
#
# From here on a *vertex* is a box, or a point on a wire in a layer that the wire goes through. One such point is
# the label of the wire. Layers 0, 2, 4, ... are those of boxes, layers 1, 3, 5, ... those of labels.

# Number of times that all layers are moved, downwards and upwards in turn.
_SWEEPS = 12

# Least distance of neighbours in a layer, and of two layers, in pixels.
_GAP, _BETWEEN_LAYERS = 18.0, 22.0


class Point(NamedTuple):
    """Position in the drawing, in pixels from its upper left corner."""

    x: float
    y: float


class Extent(NamedTuple):
    """Width and height, in pixels."""

    width: float
    height: float


class Placed(NamedTuple):
    """Positions of everything drawn.

    Attributes:
        boxes: middle of the upper edge of each box.
        floors: lower end of the layer of each box. Down to there, a wire that leaves a box must stay below that box,
            since a neighbour may be higher than the box.
        labels: middle of the label of each wire.
        bends: for each wire, the points that it goes through between its two boxes: its label, and past each layer.
        size: size of the whole drawing.
    """

    boxes: tuple[Point, ...]
    floors: tuple[float, ...]
    labels: tuple[Point, ...]
    bends: tuple[tuple[Point, ...], ...]
    size: Extent


class Arrangement(NamedTuple):
    """Boxes and wires in layers, without an order within the layers and without positions.

    Attributes:
        sizes: size of each vertex. The first are the boxes.
        layer_of: layer of each vertex.
        edges: (start, stop) of each edge between vertices of neighbouring layers, in the order of the fields.
        chains: for each wire, its vertices between its two boxes.
        labels: for each wire, the vertex that is its label.
        num_boxes: number of boxes.
    """

    sizes: list[Extent]
    layer_of: list[int]
    edges: list[tuple[int, int]]
    chains: list[list[int]]
    labels: list[int]
    num_boxes: int

    @property
    def least_size(self) -> Extent:
        """Size that the drawing has at least. Its height is exact, and it is as wide as its widest layer, or wider."""
        num_layers = max(self.layer_of) + 1
        widths, heights = [-_GAP] * num_layers, [0.0] * num_layers
        for size, layer in zip(self.sizes, self.layer_of, strict=True):
            widths[layer] += size.width + _GAP
            heights[layer] = max(heights[layer], size.height)
        return Extent(max(widths), sum(heights) + (num_layers - 1) * _BETWEEN_LAYERS)


def arrange(
    boxes: Sequence[Extent],
    wires: Sequence[tuple[int, int]],
    labels: Sequence[Extent],
    *,
    widest: float | None = None,
    first: Collection[int] = (),
) -> Arrangement:
    """Distributes boxes and the labels of wires over layers.

    Args:
        boxes: size of each box. The first is the root.
        wires: (start, stop) of each wire, as indices of boxes. They form no cycle.
        labels: size of the label of each wire.
        widest: width of a layer of boxes, in pixels. What does not fit moves to the layer below. None for any width.
            Wires that go past a layer may make it wider.
        first: boxes that keep their layer if others can move.
    """
    natural_levels = _levels(len(boxes), wires)
    levels = natural_levels
    if widest is not None:
        levels = _narrowed(natural_levels, wires, [box.width for box in boxes], widest, first)
    # Vertices: the boxes, and for each wire a chain of points, one in each layer between its boxes.
    sizes, layer_of = list(boxes), [2 * level for level in levels]
    edges: list[tuple[int, int]] = []
    chains: list[list[int]] = []
    label_vertices: list[int] = []
    for (start, stop), label in zip(wires, labels, strict=True):
        chain: list[int] = []
        layers_between = range(2 * levels[start] + 1, 2 * levels[stop])
        # The first point is the label, and the last one if the box has moved: the labels of many fields of one module
        # would make their layer wide again.
        has_moved = levels[stop] != natural_levels[stop]
        label_layer = layers_between[-1] if has_moved else layers_between[0]
        for layer in layers_between:
            if layer == label_layer:
                label_vertices.append(len(sizes))
            chain.append(len(sizes))
            # At the other points, the wire itself needs a little room.
            sizes.append(label if layer == label_layer else Extent(2.0, 0.0))
            layer_of.append(layer)
        edges += zip([start, *chain], [*chain, stop], strict=True)
        chains.append(chain)
    return Arrangement(sizes, layer_of, edges, chains, label_vertices, len(boxes))


def place(arrangement: Arrangement, igraph: Any, *, room: float) -> Placed:
    """Places boxes and the labels of wires, so that none of them overlap.

    Args:
        arrangement: the layers.
        igraph: the module `igraph`.
        room: width of the drawing, in pixels. It is not exceeded, unless a single layer is wider.

    The same input always has the same outcome.
    """
    sizes, layer_of, edges, chains, label_vertices, num_boxes = arrangement
    # igraph chooses the order within each layer. Of its coordinates only that order is used.
    graph = igraph.Graph(n=len(sizes), edges=edges, directed=True)
    layout = graph.layout_sugiyama(layers=layer_of)
    coordinates = layout.coords
    layers: list[list[int]] = [[] for _ in range(max(layer_of) + 1)]
    for vertex, layer in enumerate(layer_of):
        layers[layer].append(vertex)
    for layer in layers:
        layer.sort(key=lambda vertex: (coordinates[vertex][0], vertex))
    # The mirror image has as few crossings. Whichever has more fields in their order is chosen.
    if _is_mirrored(layers, edges):
        layers = [layer[::-1] for layer in layers]
    # Positions.
    xs = _horizontal_positions(layers, [size.width for size in sizes], edges, room)
    heights = [max([sizes[vertex].height for vertex in layer], default=0.0) for layer in layers]
    tops = list(itertools.accumulate(heights[:-1], lambda top, height: top + height + _BETWEEN_LAYERS, initial=0.0))
    points = [Point(x, tops[layer]) for x, layer in zip(xs, layer_of, strict=True)]

    def bends(vertex: int) -> list[Point]:
        """Returns the points of a wire in one layer.

        A wire goes straight past a layer of boxes, from its top to its bottom. It goes through the middle of a layer
        of labels.
        """
        (x, y), height = points[vertex], heights[layer_of[vertex]]
        is_label_layer = layer_of[vertex] % 2
        return [Point(x, y + height / 2)] if is_label_layer else [Point(x, y), Point(x, y + height)]

    width = max(x + size.width / 2 for x, size in zip(xs, sizes, strict=True))
    return Placed(
        boxes=tuple(points[:num_boxes]),
        floors=tuple([tops[layer] + heights[layer] for layer in layer_of[:num_boxes]]),
        labels=tuple([bends(vertex)[0] for vertex in label_vertices]),
        bends=tuple([tuple([point for vertex in chain for point in bends(vertex)]) for chain in chains]),
        size=Extent(width, tops[-1] + heights[-1]),
    )


def _levels(count: int, wires: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the level of each box: one more than that of the lowest box with a wire to it, and 0 for the root.

    Args:
        count: number of boxes.
        wires: (start, stop) of each wire.
    """
    children: list[list[int]] = [[] for _ in range(count)]
    # Box → number of wires to it whose start has no level yet.
    waiting_for = [0] * count
    for start, stop in wires:
        children[start].append(stop)
        waiting_for[stop] += 1
    levels = [0] * count
    ready = [box for box in range(count) if waiting_for[box] == 0]
    # The list grows while it is read.
    for box in ready:
        for child in children[box]:
            levels[child] = max(levels[child], levels[box] + 1)
            waiting_for[child] -= 1
            if waiting_for[child] == 0:
                ready.append(child)
    return levels


def _narrowed(
    levels: Sequence[int],
    wires: Sequence[tuple[int, int]],
    widths: Sequence[float],
    widest: float,
    first: Collection[int],
) -> list[int]:
    """Moves boxes to lower levels, so that the boxes of each level fit a width. One box of each level stays, at least.

    Args:
        levels: the highest level that each box can have.
        wires: (start, stop) of each wire.
        widths: width of each box.
        widest: width of a level.
        first: boxes that stay if others can move.
    """
    narrowed = list(levels)
    starts = {start for start, _ in wires}
    # All wires to the start of a wire come before that wire.
    ordered_wires = sorted(wires, key=lambda wire: levels[wire[0]])
    level = 0
    while level <= max(narrowed):
        row = [box for box, its_level in enumerate(narrowed) if its_level == level]
        # Boxes without children move first, since others take all below them along.
        row.sort(key=lambda box: (box not in first, box not in starts, box))
        right = 0.0
        for rank, box in enumerate(row):
            right += widths[box]
            if rank and right > widest:
                narrowed[box] += 1
            right += _GAP
        for start, stop in ordered_wires:
            narrowed[stop] = max(narrowed[stop], narrowed[start] + 1)
        level += 1
    return narrowed


def _is_mirrored(layers: Sequence[Sequence[int]], edges: Sequence[tuple[int, int]]) -> bool:
    """Returns True if most neighbouring fields of boxes stand from right to left.

    Args:
        layers: the vertices of each layer, from left to right.
        edges: (start, stop) of each edge, in the order of the fields.
    """
    position = {vertex: i for layer in layers for i, vertex in enumerate(layer)}
    child_positions: dict[int, list[int]] = {}
    for start, stop in edges:
        child_positions.setdefault(start, []).append(position[stop])
    is_in_order = [a < b for positions in child_positions.values() for a, b in itertools.pairwise(positions)]
    return sum(is_in_order) * 2 < len(is_in_order)


def _horizontal_positions(
    layers: Sequence[Sequence[int]], widths: Sequence[float], edges: Sequence[tuple[int, int]], room: float
) -> list[float]:
    """Returns the x coordinate of the middle of each vertex. The leftmost edge of a vertex is at 0.

    Args:
        layers: the vertices of each layer, from left to right.
        widths: width of each vertex.
        edges: (start, stop) of each edge.
        room: width of the drawing. Layers that are narrower keep within it.
    """
    parents: list[list[int]] = [[] for _ in widths]
    children: list[list[int]] = [[] for _ in widths]
    for start, stop in edges:
        parents[stop].append(start)
        children[start].append(stop)
    xs = [0.0] * len(widths)
    # At first, each layer is packed around 0.
    for layer in layers:
        _settle(layer, [0.0] * len(layer), widths, xs, room)
    # Then each layer moves towards its parents, from top to bottom, and towards its children, from bottom to top.
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            neighbours = parents if sweep % 2 == 0 else children
            # The mean position of its neighbours. A vertex without neighbours stays where it is.
            targets: list[float] = []
            for vertex in layer:
                positions = [xs[neighbour] for neighbour in neighbours[vertex]]
                targets.append(sum(positions) / len(positions) if positions else xs[vertex])
            _settle(layer, targets, widths, xs, room)
    leftmost = min(x - width / 2 for x, width in zip(xs, widths, strict=True))
    return [x - leftmost for x in xs]


def _settle(
    layer: Sequence[int], targets: Sequence[float], widths: Sequence[float], xs: list[float], room: float
) -> None:
    """Moves the vertices of a layer as near as possible to their targets, in their order and without overlaps.

    A layer keeps between `-room / 2` and `room / 2`. One that is wider than `room` has its middle at 0.

    The squares of the distances to the targets are minimal in sum. The algorithm is the pool of adjacent violators
    (Ayer and others, 1955): neighbours are pooled if they would overlap at their targets, and a pool moves as one.

    Args:
        layer: the vertices, from left to right.
        targets: the wanted x coordinate of each vertex of the layer.
        widths: width of each vertex of the whole drawing, by number.
        xs: x coordinate of each vertex of the whole drawing, by number. Those of the layer are overwritten.
        room: width of the drawing.
    """
    if not layer:
        return
    # Distance of each vertex from the first one, if they stand as near together as possible.
    offsets, offset_so_far = list[float](), 0.0
    for i, vertex in enumerate(layer):
        if i:
            offset_so_far += (widths[layer[i - 1]] + widths[vertex]) / 2 + _GAP
        offsets.append(offset_so_far)
    # Pools from left to right: the mean of the members' targets, each less its offset, and the number of members.
    pools: list[tuple[float, int]] = []
    for target, offset in zip(targets, offsets, strict=True):
        pools.append((target - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (left_mean, n), (right_mean, m) = pools[-2:]
            pools[-2:] = [((left_mean * n + right_mean * m) / (n + m), n + m)]
    # The best positions between two bounds are the best ones without bounds, each moved to the nearest bound (bounded
    # isotonic regression). A pool without its offsets is one number, so this is one comparison for each pool.
    leftmost = (widths[layer[0]] - room) / 2
    rightmost = (room - widths[layer[-1]]) / 2 - offset_so_far
    if leftmost > rightmost:
        leftmost = rightmost = (leftmost + rightmost) / 2
    i = 0
    for mean, count in pools:
        position = min(max(mean, leftmost), rightmost)
        for vertex, offset in zip(layer[i : i + count], offsets[i : i + count], strict=True):
            xs[vertex] = position + offset
        i += count
