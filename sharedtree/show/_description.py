"""What a model is made of, as one plain table: all that is printed, drawn or marked is made from this.

It is made of a live model or of a file, and holds texts and numbers only: no array, no class, nothing to be called.

    {"embed": w, "head": w}    parts  0: array float32[2, 3]   1: container dict, steps ['embed'] ['head'], children 0 0
                               root   1
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

MAX_PATH = 400
"""How many characters a path has at most: those of deep trees would together fill the memory."""

MANY = 10**30
"""Where counting stops: of a small DAG, the tree can be larger than what there is to be counted."""


class Part(NamedTuple):
    """One object of a model.

    Attributes:
        kind: what it is. A variable that holds one array is that array, with the variable's class as its name.
        name: its class, without the module; of a plain array nothing.
        children: the numbers of what it holds, without static values and None.
        steps: what leads to each child: `.weight`, `[0]`.
        shape: of an array.
        dtype: of an array or a number.
        parameters: how many trainable numbers it has itself.
        nbytes: what it takes itself.
        has_identity: whether two occurrences are a tie.
        through: of a view, its function. Its children are what it is computed from.
    """

    kind: Literal["module", "container", "array", "number"]
    name: str
    children: Sequence[int] = ()
    steps: Sequence[str] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    parameters: int = 0
    nbytes: int = 0
    has_identity: bool = True
    through: str = ""


class Size(NamedTuple):
    """How large something is.

    Attributes:
        parameters: its trainable numbers.
        nbytes: its bytes.
    """

    parameters: int
    nbytes: int


class Description:
    """A model: its parts, children before parents, and the number of the whole.

    Args:
        parts: None where something was left out.
        root: the number of the whole.
    """

    def __init__(self, parts: Sequence[Part | None], root: int) -> None:
        self._parts = parts
        self.root = root

    def __getitem__(self, number: int) -> Part:
        part = self._parts[number]
        assert part is not None
        return part

    def __len__(self) -> int:
        return len(self._parts)

    @functools.cached_property
    def _visits(self) -> tuple[list[int], dict[int, int]]:
        """How many places hold each part, and from which parent each was reached first, in the order of the tree.

        What is below views comes last: what a view is computed from belongs to its own place.
        """
        places = [0] * len(self._parts)
        first: dict[int, int] = {}
        stack = [(self.root, -1)]
        below_views: list[tuple[int, int]] = []
        while stack or below_views:
            if not stack:
                stack, below_views = below_views[::-1], []
            number, above = stack.pop()
            places[number] += 1
            if number not in first:
                first[number] = above
                entries = [(child, number) for child in self[number].children]
                if self[number].through:
                    below_views.extend(entries)
                else:
                    stack.extend(reversed(entries))
        return places, first

    @property
    def places(self) -> list[int]:
        """How many places hold each part: what a tied module holds is counted once."""
        return self._visits[0]

    @property
    def reached(self) -> dict[int, int]:
        """The parts in the order in which they come first, each with the one that holds it there, -1 for the whole."""
        return self._visits[1]

    def is_tied(self, number: int) -> bool:
        """Whether a part is one object at several places."""
        return self.places[number] > 1 and self[number].has_identity

    @property
    def num_ties(self) -> int:
        """How many objects are at several places, those within them not counted."""
        return sum(self.is_tied(number) for number in self.reached)

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Of each part, what comes first in it and below it: those of children add up to that of their parent."""
        parameters, nbytes = [0] * len(self._parts), [0] * len(self._parts)
        for number, above in sorted(self.reached.items()):
            parameters[number] += self[number].parameters
            nbytes[number] += self[number].nbytes
            if above >= 0:
                parameters[above] += parameters[number]
                nbytes[above] += nbytes[number]
        return list(map(Size, parameters, nbytes))

    @property
    def size(self) -> Size:
        """Of the whole, each tied part counted once."""
        return self.sizes[self.root]

    @functools.cached_property
    def untied_size(self) -> Size:
        """Of the whole, as if nothing were tied: each part counted as often as paths lead to it."""
        paths = [0] * len(self._parts)
        paths[self.root] = 1
        parameters = nbytes = 0
        for number in sorted(self.reached, reverse=True):
            part, count = self[number], paths[number]
            parameters += count * part.parameters
            nbytes += count * part.nbytes
            for child in part.children:
                paths[child] = min(paths[child] + count, MANY)
        return Size(min(parameters, MANY), min(nbytes, MANY))


def joined(path: str, step: str) -> str:
    """A path and the next step, cut off where it grows too long."""
    if len(path) < MAX_PATH:
        return path + step
    return path if path.endswith("...") else f"{path}..."
