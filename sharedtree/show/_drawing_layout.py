"""An outline as boxes and wires: modules are boxes, the fields that lead to them wires; and where each of them goes.

Arrays are lines in the box that holds them, and plain containers are part of the names of fields. What is tied is a box
of its own, an array or a container, too, so that one sees what leads there.

    {"embed": w, "head": w}        box 0: dict                  wire 0 -> 1: "['embed'] = ['head']", tied
                                   box 1: float32[2, 3] #1

They go in layers from top to bottom, as Sugiyama, Tagawa and Toda do (1981). igraph finds the order within each layer
that has few crossings. It takes all boxes for points, so how far apart they are is found here: each wants to be below
what it hangs on, and as near to that as its neighbours let it. The labels of wires are placed as boxes are, in layers
of their own, so that none lies on another.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ._description import Part
from ._outline import Outline
from ._tables import figure, shortened, times

MOST_BOXES = 150

_MOST_BELOW, _MOST_LINES, _MOST_TEXT, _MOST_LABELS = 16, 12, 44, 4


class Box(NamedTuple):
    """One box.

    Attributes:
        kind: what it stands for.
        title: its class, or what array it is.
        lines: what is below the title: its size, and the arrays that it holds.
        path: where it is first.
        repeats: how many equal neighbours it stands for.
        mark: the number of its tie, if it has one.
        times: how many ties that stands for.
        num_places: at how many places the model holds it.
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
    """What leads from one box to another: one field, or all of one box that lead to the same.

    Attributes:
        start: the box that holds.
        stop: what it holds.
        label: the fields.
        is_tied: whether it leads to a tied object.
    """

    start: int
    stop: int
    label: str
    is_tied: bool


class Boxes(NamedTuple):
    """What is drawn.

    Attributes:
        boxes: the first is the whole.
        wires: between them, from earlier to later levels.
        hidden: the marks of ties within what is not drawn.
    """

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    hidden: tuple[int, ...]


class _Line(NamedTuple):
    text: str
    mark: int | None = None


class _Below(NamedTuple):
    """What a box leads to: the fields, and the number of the part."""

    label: str
    child: int
    repeats: int
    level: int


class _Drawn:
    """Collects boxes level by level, so that where there are too many the uppermost are drawn."""

    def __init__(self, outline: Outline, depth: int | None, most: int) -> None:
        self._outline, self._depth, self._most = outline, depth, most
        self.box_of: dict[int, int] = {}  # number of a part → of its box
        self.counts: list[int] = []
        self.lines: dict[int, list[_Line]] = {}
        self.labels: dict[tuple[int, int], list[str]] = {}

    def collect(self) -> None:
        self._add(self._outline.description.root, 1)
        queue = collections.deque([(self._outline.description.root, 0)])
        while queue:
            number, level = queue.popleft()
            box, lines = self.box_of[number], self.lines[self.box_of[number]]
            room = min(_MOST_BELOW, self._most)
            for below in self._below(number, level):
                part = self._outline.description[below.child]
                is_tied = below.child in self._outline.ties
                if self._outline.is_elsewhere(below.child) and not is_tied:
                    text = f"{below.label}{times(below.repeats)} = {self._outline.view(below.child)}"
                    lines.append(_Line(shortened(text, _MOST_TEXT)))
                    continue
                if part.kind in ("array", "number") and not is_tied:
                    lines.append(_Line(f"{below.label}{times(below.repeats)} {text_of(part)}"))
                    continue
                if below.child not in self.box_of:
                    is_deep = self._depth is not None and below.level > self._depth
                    if is_deep or room == 0 or len(self.box_of) >= self._most:
                        lines.append(self._instead(below, part))
                        continue
                    room -= 1
                    self._add(below.child, below.repeats)
                    queue.append((below.child, below.level))
                label = f"{below.label}{times(below.repeats)}"
                self.labels.setdefault((box, self.box_of[below.child]), []).append(label)

    def _add(self, number: int, count: int) -> None:
        self.lines[len(self.box_of)] = []
        self.box_of[number] = len(self.box_of)
        self.counts.append(count if number not in self._outline.ties else 1)

    def _below(self, number: int, level: int) -> Iterator[_Below]:
        """What a part leads to through plain containers, which are no boxes."""
        description, ties = self._outline.description, self._outline.ties
        stack = [_Below("", number, 1, level)]
        while stack:
            here = stack.pop()
            if here.child != number:
                part = description[here.child]
                is_box = part.kind == "module" or here.child in ties or not part.children
                is_cut = self._depth is not None and here.level >= self._depth
                if is_box or part.kind in ("array", "number") or is_cut:
                    yield here
                    continue
            stack.extend(
                [
                    _Below(here.label + run.label, run.child, here.repeats * len(run.members), here.level + 1)
                    for run in reversed(self._outline.runs[here.child])
                ]
            )

    def _instead(self, below: _Below, part: Part) -> _Line:
        """A line that stands for a box that is not drawn."""
        tie = self._outline.ties.get(below.child)
        mark = f" #{tie.mark}" if tie else ""
        more = " ..." if part.children else ""
        text = shortened(f"{below.label}{times(below.repeats)} {text_of(part)}", _MOST_TEXT - len(more + mark))
        return _Line(f"{text}{more}{mark}", tie.mark if tie else None)


def boxes_of(outline: Outline, *, depth: int | None = None, most: int = MOST_BOXES) -> Boxes:
    """The boxes and wires of an outline.

    Args:
        outline: of a model.
        depth: how many levels below the root have boxes; None for all.
        most: how many boxes there are at most.

    Cost: linear in the rows of the outline.
    """
    drawn = _Drawn(outline, depth, most)
    drawn.collect()
    sizes = outline.description.sizes
    boxes: list[Box] = []
    seen: set[int | None] = set()
    for number, box in drawn.box_of.items():
        part, tie, count = outline.description[number], outline.ties.get(number), drawn.counts[box]
        # Where there are too many, those that are tied come first.
        all_lines = drawn.lines[box]
        order = sorted(all_lines, key=lambda line: line.mark is None) if len(all_lines) > _MOST_LINES else all_lines
        seen.update([line.mark for line in order[:_MOST_LINES]])
        lines = [shortened(line.text, _MOST_TEXT) for line in order[:_MOST_LINES]]
        if len(all_lines) > _MOST_LINES:
            lines.append(f"... {len(all_lines) - _MOST_LINES:,} more")
        mark, ties, places = (tie.mark, tie.times, tie.num_places) if tie else (None, 1, 1)
        parameters = sizes[number].parameters
        facts = [f"{figure(parameters)} parameters{' each' if count > 1 or ties > 1 else ''}"] if parameters else []
        facts += [f"at {places:,} places"] if tie else []
        lines[:0] = [", ".join(facts)] if facts else []
        title = shortened(text_of(part), _MOST_TEXT)
        boxes.append(Box(part.kind, title, tuple(lines), outline.path(number), count, mark, ties, places))
    wires = [
        Wire(start, stop, _label(labels), boxes[stop].mark is not None)
        for (start, stop), labels in drawn.labels.items()
    ]
    seen.update([box.mark for box in boxes])
    hidden = tuple([tie.mark for tie in outline.ties.values() if tie.mark not in seen])
    return Boxes(tuple(boxes), tuple(wires), hidden)


def text_of(part: Part) -> str:
    """A part in a few characters: `Linear`, `float32[3]`, `Param float32[3]`."""
    shape = "" if part.shape is None or part.kind == "number" else str(list(part.shape))
    return " ".join(text for text in (part.name, part.dtype + shape) if text)


def _label(labels: list[str]) -> str:
    shown = labels[:_MOST_LABELS]
    if len(labels) > _MOST_LABELS:
        shown.append(f"... {len(labels) - _MOST_LABELS:,} more")
    return " = ".join(shortened(label, _MOST_TEXT) for label in shown)


_SWEEPS = 12

_GAP, _BETWEEN_LAYERS = 18.0, 22.0


class Point(NamedTuple):
    """A place in the drawing, in pixels."""

    x: float
    y: float


class Extent(NamedTuple):
    """How wide and high something is, in pixels."""

    width: float
    height: float


class Placed(NamedTuple):
    """What was found.

    Attributes:
        boxes: the middle of the upper edge of each box.
        floors: where the layer of each box ends; down to there a wire that leaves it is free only below the box itself.
        labels: the middle of each label, one a wire.
        bends: of each wire, the points between which it is drawn: through its label, and past the layers between.
        size: of all.
    """

    boxes: tuple[Point, ...]
    floors: tuple[float, ...]
    labels: tuple[Point, ...]
    bends: tuple[tuple[Point, ...], ...]
    size: Extent


def place(boxes: Sequence[Extent], wires: Sequence[tuple[int, int]], labels: Sequence[Extent], igraph: Any) -> Placed:
    """Places boxes and the labels of wires, so that nothing lies on anything else.

    Args:
        boxes: how large each is; the first is the root.
        wires: from box to box, without cycles.
        labels: how large that of each wire is.
        igraph: the library.

    The same input has the same outcome.
    """
    levels = _levels(len(boxes), wires)
    sizes, layer_of = list(boxes), [2 * level for level in levels]
    edges: list[tuple[int, int]] = []
    chains: list[list[int]] = []
    for (start, stop), label in zip(wires, labels, strict=True):
        chain: list[int] = []
        for layer in range(2 * levels[start] + 1, 2 * levels[stop]):
            chain.append(len(sizes))
            sizes.append(label if not chain[1:] else Extent(2.0, 0.0))
            layer_of.append(layer)
        edges += zip([start, *chain], [*chain, stop], strict=True)
        chains.append(chain)
    graph = igraph.Graph(n=len(sizes), edges=edges, directed=True)
    found = graph.layout_sugiyama(layers=layer_of)
    coordinates = found.coords
    layers: list[list[int]] = [[] for _ in range(max(layer_of) + 1)]
    for number, layer in enumerate(layer_of):
        layers[layer].append(number)
    for layer in layers:
        layer.sort(key=lambda number: (coordinates[number][0], number))
    if _is_mirrored(layers, edges):
        layers = [layer[::-1] for layer in layers]
    xs = _across(layers, [size.width for size in sizes], edges)
    tops, height = _down(layers, sizes)
    points = [Point(x, tops[layer]) for x, layer in zip(xs, layer_of, strict=True)]

    def bends(number: int) -> list[Point]:
        """A wire goes straight past the boxes of a layer, and through the middle of one of labels."""
        (x, y), high = points[number], _height(layers[layer_of[number]], sizes)
        return [Point(x, y + high / 2)] if layer_of[number] % 2 else [Point(x, y), Point(x, y + high)]

    width = max(x + size.width / 2 for x, size in zip(xs, sizes, strict=True))
    return Placed(
        tuple(points[: len(boxes)]),
        tuple([tops[layer] + _height(layers[layer], sizes) for layer in layer_of[: len(boxes)]]),
        tuple([bends(chain[0])[0] for chain in chains]),
        tuple([tuple([point for number in chain for point in bends(number)]) for chain in chains]),
        Extent(width, height),
    )


def _levels(count: int, wires: Sequence[tuple[int, int]]) -> list[int]:
    """How far down each box is: one more than the lowest that leads to it."""
    below: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for start, stop in wires:
        below[start].append(stop)
        waits[stop] += 1
    levels = [0] * count
    ready = [number for number in range(count) if waits[number] == 0]
    for number in ready:  # grows
        for other in below[number]:
            levels[other] = max(levels[other], levels[number] + 1)
            waits[other] -= 1
            if waits[other] == 0:
                ready.append(other)
    return levels


def _is_mirrored(layers: Sequence[Sequence[int]], edges: Sequence[tuple[int, int]]) -> bool:
    """Whether the fields of boxes are from right to left rather than in their order."""
    position = {number: i for layer in layers for i, number in enumerate(layer)}
    order: dict[int, list[int]] = {}
    for start, stop in edges:
        order.setdefault(start, []).append(position[stop])
    steps = [one < other for below in order.values() for one, other in itertools.pairwise(below)]
    return sum(steps) * 2 < len(steps)


def _across(layers: Sequence[Sequence[int]], widths: Sequence[float], edges: Sequence[tuple[int, int]]) -> list[float]:
    """Where the middle of each is, from left to right."""
    above: list[list[int]] = [[] for _ in widths]
    below: list[list[int]] = [[] for _ in widths]
    for start, stop in edges:
        above[stop].append(start)
        below[start].append(stop)
    xs = [0.0] * len(widths)
    for layer in layers:
        _settle(layer, [0.0] * len(layer), widths, xs)
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            near = above if sweep % 2 == 0 else below
            wanted = [
                sum(xs[other] for other in near[number]) / len(near[number]) if near[number] else xs[number]
                for number in layer
            ]
            _settle(layer, wanted, widths, xs)
    left = min(x - width / 2 for x, width in zip(xs, widths, strict=True))
    return [x - left for x in xs]


def _settle(layer: Sequence[int], wanted: Sequence[float], widths: Sequence[float], xs: list[float]) -> None:
    """Moves a layer as near as can be to where it is wanted, in its order and without overlaps.

    Where two would overlap they move as one, by least squares: the pool of adjacent violators (Ayer and others, 1955).
    """
    offsets, at = list[float](), 0.0
    for i, number in enumerate(layer):
        if i:
            at += (widths[layer[i - 1]] + widths[number]) / 2 + _GAP
        offsets.append(at)
    pools: list[tuple[float, int]] = []  # the mean of what its members want, without their offsets, and how many
    for target, offset in zip(wanted, offsets, strict=True):
        pools.append((target - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, n), (other, m) = pools[-2:]
            pools[-2:] = [((one * n + other * m) / (n + m), n + m)]
    means = [mean for mean, count in pools for _ in range(count)]
    for number, mean, offset in zip(layer, means, offsets, strict=True):
        xs[number] = mean + offset


def _height(layer: Sequence[int], sizes: Sequence[Extent]) -> float:
    return max((sizes[number].height for number in layer), default=0.0)


def _down(layers: Sequence[Sequence[int]], sizes: Sequence[Extent]) -> tuple[list[float], float]:
    """Where each layer begins, and where all ends."""
    tops, at = list[float](), 0.0
    for layer in layers:
        tops.append(at)
        at += _height(layer, sizes) + _BETWEEN_LAYERS
    return tops, at - _BETWEEN_LAYERS
