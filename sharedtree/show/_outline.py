"""Outline of a description, as people look at a model: equal neighbours stand there once, and every tie has a number.

The outline is a DAG like the model. The rows of tables and the boxes of drawings are made from it.

Neighbouring children that are equal form a *run*, and the first of them is shown for all: `.layers[0]` to `.layers[11]`
become `.layers[0..11] ×12`. Two blocks (a block is a part with all that is below it) are equal if their classes,
fields, shapes, dtypes and ties are equal. Values and static fields are not compared.

A block that is tied to another part of the model is not equal to its neighbours. An example is the first layer, if its
weight is also the weight of the head. Parts that all blocks of a run hold in common, as one object, are allowed.

Two words of `_description`: a *place* is an edge that leads to a part, and a *step* is the text of that edge.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ..ties._list_ties import MOST_SOURCES
from ._description import Description, Part, Size, joined

SHORTEST_RUN = 3
"""Fewest equal neighbours that are shown as one. Two equal layers are shown as two layers."""

# A step is split at its last number: `[12]` into `[`, `12`, `]`.
_LAST_NUMBER = re.compile(r"^(.*?)(\d+)(\D*)$", re.DOTALL)

# Most comparisons of two parts, for each part of the model on average. A file made by an attacker could need far more.
_COMPARISONS = 50


class Run(NamedTuple):
    """Neighbouring children shown as one. Most runs are a single child.

    Attributes:
        label: text of the edges to all members: `[0..11]`.
        child: number of the first member, which is shown.
        members: numbers of all members.
        how: `"one"` if the run has one member, `"equal"` if the members are equal, `"same"` if they are one object.
        common: numbers of the parts held in common by all members, as one object.
    """

    label: str
    child: int
    members: tuple[int, ...]
    how: Literal["one", "equal", "same"] = "one"
    common: frozenset[int] = frozenset()


class EqualBlocks:
    """Finds runs of equal neighbours in a model.

    Args:
        description: the description of the model.
        shortest: fewest equal neighbours that are a run.

    Cost: one step for each part when it is made. Then, for each part whose runs are asked for, one step for each part
    below its children.
    """

    def __init__(self, description: Description, shortest: int = SHORTEST_RUN) -> None:
        """Numbers the parts by shape. Parts with different numbers are never equal, parts with one number may be."""
        self._description, self._shortest = description, shortest
        # Number of comparisons that are still allowed.
        self._budget = _COMPARISONS * len(description) + 10_000
        class_numbers: dict[object, int] = {}
        # Part → number of its shape class: its own class, shape and so on, and the shape classes of its children.
        self._shape_classes = [-1] * len(description)
        # Children have smaller numbers than their parents.
        for number in sorted(description.reached):
            part = description[number]
            children = tuple([self._shape_classes[child] for child in part.children])
            # `nbytes` follows from shape and dtype, unless two dtypes of different sizes have one name.
            key = (
                *(part.kind, part.name, part.steps, part.shape, part.dtype, part.use, part.nbytes, part.through),
                children,
            )
            self._shape_classes[number] = class_numbers.setdefault(key, len(class_numbers))

    def runs(self, number: int) -> Iterator[Run]:
        """Yields the children of a part as runs, in order."""
        part = self._description[number]
        children, steps = part.children, part.steps
        start = 0
        while start < len(children):
            stop, how, common = self._run_from(children, steps, start)
            if how == "same" and stop - start > 1 and self._is_new(children, start):
                # The first place of an object has a line of its own, to which the line of the others refers.
                stop, how = start + 1, "one"
            members = tuple(children[start:stop])
            label = steps[start] if stop - start == 1 else _label(steps[start:stop])
            yield Run(label, children[start], members, how if stop - start > 1 else "one", common)
            start = stop

    def _is_new(self, children: Sequence[int], start: int) -> bool:
        """Returns True unless the child before it is the same object."""
        return start == 0 or children[start - 1] != children[start]

    def _run_from(
        self, children: Sequence[int], steps: Sequence[str], start: int
    ) -> tuple[int, Literal["one", "equal", "same"], frozenset[int]]:
        """Finds the run beginning with one child.

        Args:
            children: all children of a part.
            steps: text of the edge to each child.
            start: index of the first member.

        Returns:
            The index after the last member, and `how` and `common` of the run.
        """
        first = children[start]
        stop = start + 1
        # One object several times.
        while stop < len(children) and children[stop] == first and _are_numbered(steps[start], steps[stop]):
            stop += 1
        if stop - start > 1:
            return stop, "same", frozenset()
        # Objects that are equal to the first.
        common: set[int] = set()
        while stop < len(children) and _are_numbered(steps[start], steps[stop]):
            shared = self._shared_by(first, children[stop])
            if shared is None:
                break
            common |= shared
            stop += 1
        if stop - start < self._shortest:
            return start + 1, "one", frozenset()
        return stop, "equal", frozenset(common)

    def _shared_by(self, a: int, b: int) -> set[int] | None:
        """Compares two blocks.

        Returns:
            The parts that the two hold in common, as one object. None if the blocks are not equal, if one of them is
            tied to another part of the model, or if the allowed comparisons are used up.
        """
        place_counts, shape_classes = self._description.places, self._shape_classes
        if a == b or shape_classes[a] != shape_classes[b] or place_counts[a] > 1 or place_counts[b] > 1:
            return None
        # The parts of the two blocks must correspond one to one. Otherwise the ties within the blocks differ.
        to_b, to_a, common = {a: b}, {b: a}, set[int]()
        # Part → number of its places within the block.
        places_in_a, places_in_b = {a: 1}, {b: 1}
        stack = [(a, b)]
        while stack:
            part_a, part_b = stack.pop()
            children = zip(self._description[part_a].children, self._description[part_b].children, strict=True)
            for x, y in children:
                self._budget -= 1
                if self._budget < 0:
                    return None
                if x == y:
                    common.add(x)
                    continue
                if to_b.setdefault(x, y) != y or to_a.setdefault(y, x) != x:
                    return None
                places_in_a[x], places_in_b[y] = places_in_a.get(x, 0) + 1, places_in_b.get(y, 0) + 1
                if places_in_a[x] == 1:
                    stack.append((x, y))
        # A part with further places in the model ties its block to something else.
        is_a_closed = all(place_counts[x] == places_in_a[x] for x in places_in_a)
        is_closed = is_a_closed and all(place_counts[y] == places_in_b[y] for y in places_in_b)
        return common if is_closed else None


def _are_numbered(a: str, b: str) -> bool:
    """Returns True if two steps differ in their last number only: `[0]` and `[1]`, `.layer1` and `.layer2`."""
    match_a, match_b = _LAST_NUMBER.match(a), _LAST_NUMBER.match(b)
    return match_a is not None and match_b is not None and (match_a[1], match_a[3]) == (match_b[1], match_b[3])


def _label(steps: Sequence[str]) -> str:
    """Returns one text for the steps of a run: `[0..11]`, with the lowest and the highest number.

    The keys of a dict may stand in another order than their numbers. Numbers are compared as texts without leading
    zeros, by length first, since a file may have numbers of any length.
    """
    parts = [match.groups() for match in map(_LAST_NUMBER.match, steps) if match]
    numbers = sorted([number for _, number, _ in parts], key=lambda text: (len(text.lstrip("0")), text.lstrip("0")))
    return f"{parts[0][0]}{numbers[0]}..{numbers[-1]}{parts[0][2]}"


class Place(NamedTuple):
    """A path of an outline at which a tied part is.

    Attributes:
        path: the path, in which a run has the numbers of all members: `.layers[0..11].norm`.
        repeats: number of places of the model that the path stands for.
    """

    path: str
    repeats: int


class TieShown(NamedTuple):
    """A tie of an outline.

    Attributes:
        mark: the printed number, from 1 on.
        number: number of the tied part.
        places: the places of the part, the first one first.
        times: number of ties of the model that it stands for. A tie within a run has one in each member.
    """

    mark: int
    number: int
    places: tuple[Place, ...]
    times: int

    @property
    def num_places(self) -> int:
        """Number of places of one such object in the model."""
        return sum(place.repeats for place in self.places) // self.times


class Row(NamedTuple):
    """A line of an outline.

    Attributes:
        depth: number of levels below the root.
        step: text of the edge from the row of its parent.
        path: path from the root.
        part: the part in the row.
        repeats: number of neighbours in the row.
        size: size of the part, with the parts below it that have their first place there. Of several neighbours, it is
            the size of the first one.
        mark: number of its tie. None if the part is not tied.
        tied_to: path of the first place of a tied part, if this row is another place. Otherwise None.
        is_again: True if the part has its first place in another row, tied or not.
        is_cut: True if the part has children that are not shown, because they are too deep.
        view: the function of a view and the paths that it is computed from: `transpose(.embed.weight)`. Otherwise
            empty.
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

    @property
    def is_for_each(self) -> bool:
        """True if the row stands for several equal neighbours, and its size is that of each one."""
        return self.repeats > 1 and not self.is_again and self.size.nbytes > 0


class _PlaceOfRun(NamedTuple):
    """Position of a run in the outline.

    Attributes:
        parent: number of the part with the run.
        run_index: index of the run among those of the parent.
    """

    parent: int
    run_index: int


# The root is in no run.
_PLACE_OF_ROOT = _PlaceOfRun(-1, -1)


class _Visit(NamedTuple):
    """A run still to be looked at by `Outline`.

    Attributes:
        number: number of the part shown for the run.
        path: path to it.
        num_places: number of places of the model in the run.
        num_objects: number of objects of the model in the run.
        place: position of the run.
    """

    number: int
    path: str
    num_places: int
    num_objects: int
    place: _PlaceOfRun


class Outline:
    """A description with its runs of equal blocks and its ties by number.

    Args:
        description: the description of a model.
        shortest: fewest equal neighbours that are a run.

    Attributes:
        description: the same.
        runs: number of a shown part → its children, as runs.
        ties: number of a tied part → its tie, in the order of the first places.

    Cost: linear in the parts and the places.
    """

    def __init__(self, description: Description, shortest: int = SHORTEST_RUN) -> None:
        """Walks over all runs, from the root down, and collects runs, first paths and ties."""
        self.description = description
        self.runs: dict[int, tuple[Run, ...]] = {}
        self._paths: dict[int, str] = {description.root: ""}
        blocks = EqualBlocks(description, shortest)
        # Part → number of objects of the model that it stands for.
        object_counts: dict[int, int] = {description.root: 1}
        # The same for a part that is common to all members of a run: it is one object, however many members there are.
        common_counts: dict[int, int] = {}
        places: dict[int, list[Place]] = {}
        # Part → its first place.
        self._first_places: dict[int, _PlaceOfRun] = {}
        stack = [_Visit(description.root, "", 1, 1, _PLACE_OF_ROOT)]
        below_views: list[_Visit] = []
        while stack or below_views:
            if not stack:
                stack, below_views = below_views[::-1], []
            number, path, num_places, num_objects, place = stack.pop()
            if description.is_tied(number):
                places.setdefault(number, []).append(Place(path, num_places))
            if number in self.runs:
                continue
            # The first place of the part.
            self._paths[number], self._first_places[number] = path, place
            object_counts[number] = common_counts.get(number, num_objects)
            self.runs[number] = tuple(blocks.runs(number))
            visits: list[_Visit] = []
            for i, run in enumerate(self.runs[number]):
                for shared in run.common:
                    common_counts.setdefault(shared, object_counts[number])
                places_of_run = object_counts[number] * len(run.members)
                objects_of_run = places_of_run if run.how == "equal" else object_counts[number]
                run_path, run_place = joined(path, run.label), _PlaceOfRun(number, i)
                visits.append(_Visit(run.child, run_path, places_of_run, objects_of_run, run_place))
            # The sources of a view come last, so that each is shown at a place outside views, if it has one.
            if description[number].through:
                below_views.extend(visits)
            else:
                stack.extend(reversed(visits))
        tied = [number for number in self._paths if number in places]
        self.ties = {
            number: TieShown(mark, number, tuple(places[number]), object_counts[number])
            for mark, number in enumerate(tied, 1)
        }

    def folded(self) -> "Outline":
        """Returns an outline of the same model in which two equal neighbours are a run, too. Ties keep their marks."""
        outline = Outline(self.description, shortest=2)
        outline.ties = {
            number: tie._replace(mark=self.ties[number].mark if number in self.ties else tie.mark)
            for number, tie in outline.ties.items()
        }
        return outline

    def path(self, number: int) -> str:
        """Returns the path to the first place of a part that is shown."""
        return self._paths[number]

    def view(self, number: int) -> str:
        """Returns the function of a view and the paths that it is computed from. Empty for other parts."""
        part = self.description[number]
        if not part.through:
            return ""
        paths = [self.path(child) for child in part.children[:MOST_SOURCES]]
        if len(part.children) > MOST_SOURCES:
            paths.append("...")
        return f"{part.through}({', '.join(paths)})"

    def is_elsewhere(self, number: int) -> bool:
        """Returns True if a part is a view, and all parts that it is computed from have first places outside it.

        Then nothing needs to be shown below the view.
        """
        part = self.description[number]
        return bool(part.through) and all(self._first_places[child].parent != number for child in part.children)

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows, from the root down."""
        return tuple(self.iterate())

    def iterate(self, depth: int | None = None) -> Iterator[Row]:
        """Yields the rows from the root down.

        Args:
            depth: number of levels shown below the root. Default: all.
        """
        root = Run("", self.description.root, (self.description.root,))
        # Each entry is a run, the path of its parent, its depth and its place.
        stack: list[tuple[Run, str, int, _PlaceOfRun]] = [(root, "", 0, _PLACE_OF_ROOT)]
        while stack:
            run, parent_path, level, place = stack.pop()
            # A second place stays one even if the first lies too deep to be shown. The size of the part is in the row
            # under which its first place is hidden, and would be counted twice here.
            row = self._row(run, parent_path, level, is_again=self._first_places[run.child] != place, depth=depth)
            yield row
            if not row.is_again and not row.is_cut and not self.is_elsewhere(run.child):
                runs = self.runs[run.child]
                last = len(runs) - 1
                stack.extend([(runs[i], row.path, level + 1, _PlaceOfRun(run.child, i)) for i in range(last, -1, -1)])

    def _row(self, run: Run, parent_path: str, level: int, *, is_again: bool, depth: int | None) -> Row:
        """Makes the row of a run.

        Args:
            run: the run.
            parent_path: path of the part around it.
            level: depth of the row.
            is_again: True if the part has its first place in another row.
            depth: the deepest level that is shown. None for all.
        """
        tie = self.ties.get(run.child)
        is_deepest = level == depth and not is_again
        return Row(
            depth=level,
            step=run.label,
            path=joined(parent_path, run.label),
            part=self.description[run.child],
            repeats=len(run.members),
            size=Size(0, 0) if is_again else self.description.sizes[run.child],
            mark=tie.mark if tie else None,
            tied_to=self.path(run.child) if is_again and tie else None,
            is_again=is_again,
            is_cut=is_deepest and bool(self.runs[run.child]) and not self.is_elsewhere(run.child),
            view=self.view(run.child),
        )
