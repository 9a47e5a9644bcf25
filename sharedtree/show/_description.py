"""Description of a model as a plain table. All that is printed, drawn or marked is made from it.

A description is made of a live model or of a file. It holds texts and numbers only: no array, no class, no function.

    {"embed": w, "head": w}    parts  0: array float32[2, 3]   1: container dict, steps ['embed'] ['head'], children 0 0
                               root   1

Three words of this file. A *part* is one object of the model. A *place* is an edge that leads to a part: a field or an
entry of its parent. The root has one place without a parent. A *step* is the text of such an edge, such as `.weight`.
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

MAX_PATH = 400
"""Most characters of a path. All paths of a deep tree, at full length, would fill the memory."""

MANY = 10**30
"""Counting stops here. The number of paths grows exponentially with the depth of a DAG."""

Use = Literal["parameter", "state", "optimizer state", "other"]
"""What the numbers of an array are for. `"parameter"`: an optimizer trains them. `"state"`, `"optimizer state"`: their
library says so. `"other"`: they are no floating-point numbers, such as a mask."""


class Part(NamedTuple):
    """One object of a model.

    Attributes:
        kind: the kind of the object. A variable that holds one array counts as that array, and has the variable's
            class as its name.
        name: name of its class, without the module. Empty for a plain array.
        children: numbers of the parts in it. Static values and None have no part.
        steps: text of the edge to each child: `.weight`, `[0]`.
        shape: shape of an array.
        dtype: dtype of an array or a number.
        numbers: number of numbers in the part itself, without its children: the elements of an array.
        use: what these numbers are for.
        nbytes: number of bytes of the part itself, without its children.
        has_identity: True if two places of the object are a tie.
        through: text of the function of a view. The children of a view are the parts that it is computed from. Empty
            for all other parts.
    """

    kind: Literal["module", "container", "array", "number"]
    name: str
    children: Sequence[int] = ()
    steps: Sequence[str] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    numbers: int = 0
    use: Use = "other"
    nbytes: int = 0
    has_identity: bool = True
    through: str = ""


class Edge(NamedTuple):
    """Edge from an object to a child with a part.

    Attributes:
        child: number of the child.
        step: text of the edge, as it is printed: `.weight`, `[0]`.
    """

    child: int
    step: str


class Size(NamedTuple):
    """Size of a part together with its children.

    Attributes:
        parameters: number of trainable numbers.
        nbytes: number of bytes, of whatever is in the part.
        state: number of numbers that are state, such as the statistics of a batch norm.
        optimizer_state: number of numbers that are state of an optimizer.
    """

    parameters: int
    nbytes: int
    state: int = 0
    optimizer_state: int = 0


class Total(NamedTuple):
    """All numbers of a model that are for one use.

    Attributes:
        numbers: number of numbers.
        nbytes: number of their bytes.
    """

    numbers: int
    nbytes: int


class _Visits(NamedTuple):
    """Result of one walk over all places of a model.

    Attributes:
        counts: number of places of each part.
        first_parents: part → the parent at its first place, -1 for the root. In the order of the first places.
    """

    counts: list[int]
    first_parents: dict[int, int]


class Description:
    """Parts of a model, children before parents.

    Args:
        parts: the parts. None for objects that have no line and no box, such as static values.
        root: number of the part that is the model.
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
    def _visits(self) -> _Visits:
        """Counts the places of each part and finds its first parent.

        The children of views come after everything else. So an array has its first place in its own module, and not in
        a view that is computed from it.
        """
        counts = [0] * len(self._parts)
        first_parents: dict[int, int] = {}
        # Each entry is a part and its parent.
        stack = [(self.root, -1)]
        below_views: list[tuple[int, int]] = []
        while stack or below_views:
            if not stack:
                stack, below_views = below_views[::-1], []
            number, parent = stack.pop()
            counts[number] += 1
            # A part that is reached again adds a place, but its children do not: they are in it only once.
            if number not in first_parents:
                first_parents[number] = parent
                entries = [(child, number) for child in self[number].children]
                if self[number].through:
                    below_views.extend(entries)
                else:
                    stack.extend(reversed(entries))
        return _Visits(counts, first_parents)

    @property
    def places(self) -> list[int]:
        """Number of places of each part. A child of a tied module has one place in it, not one for each path."""
        return self._visits.counts

    @property
    def reached(self) -> dict[int, int]:
        """Part → the parent at its first place, -1 for the root. In the order of the first places."""
        return self._visits.first_parents

    def is_tied(self, number: int) -> bool:
        """Returns True if a part is one object with several places."""
        return self.places[number] > 1 and self[number].has_identity

    @property
    def num_ties(self) -> int:
        """Number of tied parts. The children of a tied module count only if they have further places themselves."""
        return sum(self.is_tied(number) for number in self.reached)

    @functools.cached_property
    def sizes(self) -> list[Size]:
        """Size of each part. A tied part adds to the size of its first parent only, so no part is counted twice."""
        nothing = Size(0, 0)
        sizes = [nothing] * len(self._parts)
        # Children have smaller numbers than their parents, so a part is complete when it is added to its parent.
        for number, parent in sorted(self.reached.items()):
            part = self[number]
            # Nodes have neither numbers nor bytes of their own.
            if part.nbytes or part.numbers:
                sizes[number] = _sum(sizes[number], _own_size(part))
            if parent >= 0 and sizes[number] is not nothing:
                sizes[parent] = _sum(sizes[parent], sizes[number])
        return sizes

    @functools.cached_property
    def totals(self) -> dict[Use, Total]:
        """Use → all numbers of the model that are for it. Each tied part counts once."""
        uses: tuple[Use, ...] = ("parameter", "state", "optimizer state", "other")
        totals = dict.fromkeys(uses, Total(0, 0))
        for number in self.reached:
            part = self[number]
            so_far = totals[part.use]
            totals[part.use] = Total(so_far.numbers + part.numbers, so_far.nbytes + part.nbytes)
        return totals

    @property
    def size(self) -> Size:
        """Size of the whole model. Each tied part counts once."""
        return self.sizes[self.root]

    @functools.cached_property
    def untied_size(self) -> Size:
        """Size of the model without ties: each part counts once for each path to it. At most `MANY`.

        State is not counted by itself, only in the bytes.
        """
        path_counts = [0] * len(self._parts)
        path_counts[self.root] = 1
        parameters = nbytes = 0
        # Parents have larger numbers, so all paths to a part are counted before its turn comes.
        for number in sorted(self.reached, reverse=True):
            part, count = self[number], path_counts[number]
            parameters += count * part.numbers if part.use == "parameter" else 0
            nbytes += count * part.nbytes
            for child in part.children:
                path_counts[child] = min(path_counts[child] + count, MANY)
        return Size(min(parameters, MANY), min(nbytes, MANY))


def _own_size(part: Part) -> Size:
    """Returns the size of a part without its children."""
    return Size(
        parameters=part.numbers if part.use == "parameter" else 0,
        nbytes=part.nbytes,
        state=part.numbers if part.use == "state" else 0,
        optimizer_state=part.numbers if part.use == "optimizer state" else 0,
    )


def _sum(a: Size, b: Size) -> Size:
    """Adds two sizes up."""
    return Size(
        a.parameters + b.parameters, a.nbytes + b.nbytes, a.state + b.state, a.optimizer_state + b.optimizer_state
    )


def described(parts: list[Part | None], root: int, *, is_none: bool = False) -> Description:
    """Makes a description, with an empty part in place of a root that has none, such as a static value.

    Args:
        parts: the parts. The empty part is appended.
        root: number of the part that is the model. `len(parts)` if it has no number.
        is_none: True if the model is None, which the empty part then says.
    """
    if root == len(parts) or parts[root] is None:
        name = "None" if is_none else "a value without arrays"
        parts.append(Part("container", name, has_identity=False))
        root = len(parts) - 1
    return Description(parts, root)


def joined(path: str, step: str) -> str:
    """Appends a step to a path. A path of `MAX_PATH` characters gets `...` instead."""
    if len(path) < MAX_PATH:
        return path + step
    return path if path.endswith("...") else f"{path}..."
