"""Which neighbours are equal, so that one of them can stand for all: `.layers[0]` to `.layers[11]`.

Two blocks are equal if their classes, fields, shapes and dtypes are, and what is tied. A block that something else of
the model is tied to, such as the layer whose weight is the head's, stands for itself. What all blocks hold together, as
one object, does not part them. Values and what is static are not compared.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from ._description import Description

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
            form = (part.kind, part.name, part.steps, part.shape, part.dtype, part.nbytes, below)
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
