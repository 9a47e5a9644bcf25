"""A description as people look at it: what is equal and repeated stands there once, and every tie has a number.

The outline is a DAG as the model is. From it come the rows of tables and the boxes of drawings.

Of neighbours that are equal one stands for all: `.layers[0]` to `.layers[11]`. Two blocks are equal if their classes,
fields, shapes and dtypes are, and what is tied. A block that something else of the model is tied to, such as the layer
whose weight is the head's, stands for itself. What all blocks hold together, as one object, does not part them. Values
and what is static are not compared.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ..ties._list_ties import MOST_SOURCES
from ._description import Description, Part, Size, joined

_FEWEST = 3  # two layers are shown as they are

_NUMBER = re.compile(r"^(.*?)(\d+)(\D*)$", re.DOTALL)

_VISITS = 50  # how many pairs are compared for each part of the model, on average: a hostile file asks for more


class Run(NamedTuple):
    """Neighbours of which the first is shown.

    Attributes:
        label: what leads to all of them: `[0..11]`.
        child: the number of the first.
        members: the numbers of all.
        how: `"one"`: there is one; `"equal"`: they are equal; `"same"`: they are one object.
        common: the numbers of what they hold together.
    """

    label: str
    child: int
    members: tuple[int, ...]
    how: Literal["one", "equal", "same"] = "one"
    common: frozenset[int] = frozenset()


class EqualBlocks:
    """Finds runs of equal neighbours in a model.

    Cost: one look at each part to begin with; then, of the parts that are asked for, one at each part of neighbours.
    """

    def __init__(self, description: Description) -> None:
        self._description = description
        self._left = _VISITS * len(description) + 10_000
        known: dict[object, int] = {}
        self._forms = [-1] * len(description)
        for number in sorted(description.reached):
            part = description[number]
            below = tuple([self._forms[child] for child in part.children])
            # The sizes follow from the rest, but for classes whose numbers differ in kind.
            form = (part.kind, part.name, part.steps, part.shape, part.dtype, part.nbytes, part.through, below)
            self._forms[number] = known.setdefault(form, len(known))

    def runs(self, number: int) -> Iterator[Run]:
        """The children of a part, those that are equal as one."""
        part = self._description[number]
        children, steps = part.children, part.steps
        start = 0
        while start < len(children):
            stop, how, common = self._run_from(children, steps, start)
            if how == "same" and stop - start > 1 and self._is_new(children, start):
                stop, how = start + 1, "one"  # where it comes first it is shown, and the rest point there
            members = tuple(children[start:stop])
            label = steps[start] if stop - start == 1 else _label(steps[start:stop])
            yield Run(label, children[start], members, how if stop - start > 1 else "one", common)
            start = stop

    def _is_new(self, children: Sequence[int], start: int) -> bool:
        return start == 0 or children[start - 1] != children[start]

    def _run_from(
        self, children: Sequence[int], steps: Sequence[str], start: int
    ) -> tuple[int, Literal["one", "equal", "same"], frozenset[int]]:
        first = children[start]
        stop = start + 1
        while stop < len(children) and children[stop] == first and _are_numbered(steps[start], steps[stop]):
            stop += 1
        if stop - start > 1:
            return stop, "same", frozenset()
        common: set[int] = set()
        while stop < len(children) and _are_numbered(steps[start], steps[stop]):
            shared = self._shared_by(first, children[stop])
            if shared is None:
                break
            common |= shared
            stop += 1
        if stop - start < _FEWEST:
            return start + 1, "one", frozenset()
        return stop, "equal", frozenset(common)

    def _shared_by(self, a: int, b: int) -> set[int] | None:
        """What two blocks that are equal hold together; None if they are not equal."""
        places, forms = self._description.places, self._forms
        if a == b or forms[a] != forms[b] or places[a] > 1 or places[b] > 1:
            return None
        to_b, to_a, common = {a: b}, {b: a}, set[int]()
        met_a, met_b = {a: 1}, {b: 1}
        stack = [(a, b)]
        while stack:
            one, other = stack.pop()
            for x, y in zip(self._description[one].children, self._description[other].children, strict=True):
                self._left -= 1
                if self._left < 0:
                    return None
                if x == y:
                    common.add(x)
                    continue
                if to_b.setdefault(x, y) != y or to_a.setdefault(y, x) != x:
                    return None
                met_a[x], met_b[y] = met_a.get(x, 0) + 1, met_b.get(y, 0) + 1
                if met_a[x] == 1:
                    stack.append((x, y))
        # Nothing but the block itself holds what is in it.
        is_closed = all(places[x] == met_a[x] for x in met_a) and all(places[y] == met_b[y] for y in met_b)
        return common if is_closed else None


def _are_numbered(one: str, other: str) -> bool:
    """Whether two steps differ in nothing but their last number."""
    a, b = _NUMBER.match(one), _NUMBER.match(other)
    return a is not None and b is not None and (a[1], a[3]) == (b[1], b[3])


def _label(steps: Sequence[str]) -> str:
    """`[0..11]`; of keys in another order than their numbers', the lowest and the highest."""
    parts = [match.groups() for match in map(_NUMBER.match, steps) if match]
    numbers = sorted([number for _, number, _ in parts], key=lambda text: (len(text.lstrip("0")), text.lstrip("0")))
    return f"{parts[0][0]}{numbers[0]}..{numbers[-1]}{parts[0][2]}"


class Place(NamedTuple):
    """Where a tied part is.

    Attributes:
        path: to it; of equal blocks, with the numbers of all: `.layers[0..11].norm`.
        repeats: how many places of the model that stands for.
    """

    path: str
    repeats: int


class TieShown(NamedTuple):
    """A tie of an outline.

    Attributes:
        mark: its number, from 1 on.
        number: of the part.
        places: where it is, the first place first.
        times: how many ties of the model it stands for: one in each of so many equal blocks.
    """

    mark: int
    number: int
    places: tuple[Place, ...]
    times: int

    @property
    def num_places(self) -> int:
        """How many places of the model hold the object."""
        return sum(place.repeats for place in self.places) // self.times


class Row(NamedTuple):
    """A line of an outline.

    Attributes:
        depth: how deep it lies.
        step: what leads to it from the line above it that is less deep.
        path: from the root.
        part: what is there.
        repeats: how many neighbours it stands for.
        size: of all of them, what comes first there and below. Within equal blocks, that of one.
        mark: the number of its tie.
        tied_to: the path where the same object came first, if this is another place.
        is_again: whether it was shown before, tied or not.
        is_cut: whether there is more below that is not shown.
        view: of a view, its function and what it is computed from: `transpose(.embed.weight)`.
    """

    depth: int
    step: str
    path: str
    part: Part
    repeats: int
    size: Size
    mark: int | None
    tied_to: str | None
    is_again: bool
    is_cut: bool
    view: str = ""


_NOWHERE = (-1, -1)


class Outline:
    """A description with its runs of equal blocks, and its ties by number.

    Args:
        description: of a model.

    Attributes:
        description: the same.
        runs: number → its children, equal neighbours as one; of every part that is shown.
        ties: all of them, by the number of the part, in the order in which they come first.

    Cost: linear in the parts and the places.
    """

    def __init__(self, description: Description) -> None:
        self.description = description
        self.runs: dict[int, tuple[Run, ...]] = {}
        self._paths: dict[int, str] = {description.root: ""}
        blocks = EqualBlocks(description)
        times: dict[int, int] = {description.root: 1}  # how many objects of the model a part stands for
        common: dict[int, int] = {}
        places: dict[int, list[Place]] = {}
        self._first: dict[int, tuple[int, int]] = {}  # number → the parent and the run where it comes first
        stack: list[tuple[int, str, int, int, tuple[int, int]]] = [(description.root, "", 1, 1, _NOWHERE)]
        below_views: list[tuple[int, str, int, int, tuple[int, int]]] = []
        while stack or below_views:
            if not stack:
                stack, below_views = below_views[::-1], []
            number, path, count, own_times, place = stack.pop()
            if description.is_tied(number):
                places.setdefault(number, []).append(Place(path, count))
            if number in self.runs:
                continue
            self._paths[number], self._first[number] = path, place
            times[number] = common.get(number, own_times)
            self.runs[number] = tuple(blocks.runs(number))
            entries: list[tuple[int, str, int, int, tuple[int, int]]] = []
            for i, run in enumerate(self.runs[number]):
                for each in run.common:
                    common.setdefault(each, times[number])
                places_below = times[number] * len(run.members)
                objects_below = places_below if run.how == "equal" else times[number]
                entries.append((run.child, joined(path, run.label), places_below, objects_below, (number, i)))
            # What a view is computed from is shown at its own place, if it has one.
            if description[number].through:
                below_views.extend(entries)
            else:
                stack.extend(reversed(entries))
        order = [number for number in self._paths if number in places]
        self.ties = {
            number: TieShown(mark, number, tuple(places[number]), times[number]) for mark, number in enumerate(order, 1)
        }

    def path(self, number: int) -> str:
        """The first path to a part that is shown."""
        return self._paths[number]

    def view(self, number: int) -> str:
        """The function of a view and the paths of what it is computed from. Empty for other parts."""
        part = self.description[number]
        if not part.through:
            return ""
        paths = [self.path(child) for child in part.children[:MOST_SOURCES]]
        if len(part.children) > MOST_SOURCES:
            paths.append("...")
        return f"{part.through}({', '.join(paths)})"

    def is_elsewhere(self, number: int) -> bool:
        """Tells whether a part is a view, all of whose sources are shown at places of their own."""
        part = self.description[number]
        return bool(part.through) and all(self._first[child][0] != number for child in part.children)

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """All lines."""
        return tuple(self.iterate())

    def iterate(self, depth: int | None = None) -> Iterator[Row]:
        """The lines from the root down.

        Args:
            depth: how many levels below the root are shown. Default: all.
        """
        root = Run("", self.description.root, (self.description.root,))
        stack: list[tuple[Run, str, int, tuple[int, int]]] = [(root, "", 0, _NOWHERE)]
        while stack:
            run, above, level, place = stack.pop()
            # Also where the first place lies too deep to be shown: its size is part of what is shown there.
            row = self._row(run, above, level, is_again=self._first[run.child] != place, depth=depth)
            yield row
            if not row.is_again and not row.is_cut and not self.is_elsewhere(run.child):
                runs = self.runs[run.child]
                stack.extend([(runs[i], row.path, level + 1, (run.child, i)) for i in range(len(runs) - 1, -1, -1)])

    def _row(self, run: Run, above: str, level: int, *, is_again: bool, depth: int | None) -> Row:
        sizes, tie = self.description.sizes, self.ties.get(run.child)
        members = run.members if run.how == "equal" else run.members[:1]
        size = Size(sum(sizes[i].parameters for i in members), sum(sizes[i].nbytes for i in members))
        return Row(
            level,
            run.label,
            joined(above, run.label),
            self.description[run.child],
            len(run.members),
            Size(0, 0) if is_again else size,
            tie.mark if tie else None,
            self.path(run.child) if is_again and tie else None,
            is_again,
            level == depth and not is_again and bool(self.runs[run.child]) and not self.is_elsewhere(run.child),
            self.view(run.child),
        )
