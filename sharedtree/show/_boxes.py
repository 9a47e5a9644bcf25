"""An outline as boxes and wires: modules are boxes, and the fields that lead to them wires.

Arrays are lines in the box that holds them, and plain containers are part of the names of fields. What is tied is a box
of its own, an array or a container, too, so that one sees what leads there.

    {"embed": w, "head": w}        box 0: dict                  wire 0 -> 1: "['embed'] = ['head']", tied
                                   box 1: float32[2, 3] #1
"""

import collections
from collections.abc import Iterator
from typing import Literal, NamedTuple

from ._description import Part
from ._outline import Outline
from ._text_table import figure, shortened, times

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
        has_equal: whether some box stands for equal neighbours.
    """

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    hidden: tuple[int, ...]
    has_equal: bool


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
    return Boxes(tuple(boxes), tuple(wires), hidden, any(box.repeats > 1 for box in boxes))


def text_of(part: Part) -> str:
    """A part in a few characters: `Linear`, `float32[3]`, `Param float32[3]`."""
    shape = "" if part.shape is None or part.kind == "number" else str(list(part.shape))
    return " ".join(text for text in (part.name, part.dtype + shape) if text)


def _label(labels: list[str]) -> str:
    shown = labels[:_MOST_LABELS]
    if len(labels) > _MOST_LABELS:
        shown.append(f"... {len(labels) - _MOST_LABELS:,} more")
    return " = ".join(shortened(label, _MOST_TEXT) for label in shown)
