"""A description as people look at it: what is equal and repeated stands there once, and every tie has a number.

The outline is a DAG as the model is. From it come the rows of tables and the boxes of drawings.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from ._description import Description, Part, Size, joined
from ._equal_blocks import EqualBlocks, Run


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
        while stack:
            number, path, count, own_times, place = stack.pop()
            if description.is_tied(number):
                places.setdefault(number, []).append(Place(path, count))
            if number in self.runs:
                continue
            self._paths[number], self._first[number] = path, place
            times[number] = common.get(number, own_times)
            self.runs[number] = tuple(blocks.runs(number))
            for i, run in reversed(list(enumerate(self.runs[number]))):
                for each in run.common:
                    common.setdefault(each, times[number])
                places_below = times[number] * len(run.members)
                objects_below = places_below if run.how == "equal" else times[number]
                stack.append((run.child, joined(path, run.label), places_below, objects_below, (number, i)))
        order = [number for number in self._paths if number in places]
        self.ties = {
            number: TieShown(mark, number, tuple(places[number]), times[number]) for mark, number in enumerate(order, 1)
        }

    def path(self, number: int) -> str:
        """The first path to a part that is shown."""
        return self._paths[number]

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
            if not row.is_again and not row.is_cut:
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
            level == depth and not is_again and bool(self.runs[run.child]),
        )
