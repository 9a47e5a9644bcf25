"""Two trees compared side by side: which pairs of their nodes are met, how ties differ, and what is said of either.

    left    [w, w]      pairs     at the root the lists, at [0] (w, v), at [1] (w, u)
    right   [v, u]      apart     [0] and [1]: one object on the left, two on the right

Both are DAGs, and are walked as such. Two nodes that were found to stand at one path are taken for the same from then
on, so each pair makes one class of nodes out of two, and there are no more of them than there are nodes, however much
is shared: Hopcroft and Karp's test of whether two automata are equal ("A linear algorithm for testing equivalence of
finite automata", 1971). Unlike theirs it goes on after a difference. What differs is told once, at the first path that
leads there. And unlike theirs, two nodes may have different numbers of children: of a large one that was compared
before and is compared with a small one now, only the children that both have are looked at, or a large list that one
side has many times would be gone through as often. `load_state` alone meets each pair of two objects, for what it makes
depends on both.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ._printing import printable, shown
from ._sharing import Classes
from ._traced_leaves_and_identity import carries_identity

MOST = 400
"""Characters of a path that are shown."""

MISSING: Any = object()
"""In the place of a child that one side lacks."""

D = TypeVar("D")
Key = TypeVar("Key", bound=Hashable)


class Pair(NamedTuple):
    """What stands at one path.

    Attributes:
        left: on one side.
        right: on the other.
        at: the path, a number of a `Paths`.
        told: what whoever compares hands down from above.
    """

    left: Any
    right: Any
    at: int = 0
    told: Any = None


def differences_from(root: Pair, meet: Callable[[Pair], Iterable[Pair | D]]) -> Iterator[D]:
    """The differences that `meet` yields of each pair, from the root down. It yields the pairs below as well."""
    stack = [root]
    while stack:
        below: list[Pair] = []
        for each in meet(stack.pop()):
            if isinstance(each, Pair):
                below.append(each)
            else:
                yield each
        stack.extend(reversed(below))


class Paths:
    """Paths as numbers, 0 the empty one. They share their beginnings, so those of a deep tree take no more than it."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, Any]] = [(-1, "")]

    def below(self, at: int, step: Any) -> int:
        """The path that goes on from another one by a step, which is printed as `str` does."""
        self._steps.append((at, step))
        return len(self._steps) - 1

    def text(self, at: int, most: float = MOST) -> str:
        """A path as `jax.tree_util.keystr` prints it; of a long one the end."""
        steps: list[str] = []
        length = 0
        while at > 0 and length <= most:
            at, step = self._steps[at]
            steps.append(str(step))
            length += len(steps[-1])
        text = "".join(reversed(steps))
        return text if length <= most else f"...{text[-int(most) :]}"


class Matching:
    """Which nodes of two sides were taken for the same; they are numbers. See the beginning of this file."""

    def __init__(self, num_left: int, num_right: int) -> None:
        self._offset = num_left
        self._classes = Classes(num_left + num_right)  # those of the right side last
        self._compared: tuple[set[int], set[int]] = (set(), set())  # nodes whose children were compared with others

    def unite(self, left: int, right: int) -> bool:
        """Takes two nodes for the same; whether they were not yet."""
        return self._classes.unite(left, self._offset + right)

    def is_short(self, left: int, right: int, num_left: int, num_right: int) -> bool:
        """Whether of two nodes with so many children only those that both have are to be compared."""
        is_known = left in self._compared[0], right in self._compared[1]
        self._compared[0].add(left)
        self._compared[1].add(right)
        return (num_left > num_right and is_known[0]) or (num_right > num_left and is_known[1])


def matched(left: Mapping[Key, Any], right: Mapping[Key, Any], *, is_short: bool) -> list[tuple[Key, Any, Any]]:
    """The children of two nodes by key, in the order of the left one; or in short, those that both have."""
    if is_short:
        few = min(left, right, key=len)
        return [(key, left[key], right[key]) for key in few if key in left and key in right]
    found = [(key, child, right.get(key, MISSING)) for key, child in left.items()]
    return found + [(key, MISSING, child) for key, child in right.items() if key not in left]


def is_alone(left: Any, right: Any) -> bool:
    """Whether only one side has a child."""
    return left is MISSING or right is MISSING


class Ties:
    """Where two sides differ in what is one object."""

    def __init__(self) -> None:
        self._left: dict[Hashable, tuple[Hashable, int]] = {}  # object → that of the other side met first, and where
        self._right: dict[Hashable, tuple[Hashable, int]] = {}

    def apart(self, left: Hashable, right: Hashable, at: int, *, is_object: bool = True) -> tuple[int, bool] | None:
        """Where what stands here stood first, if it did beside something else; and whether that is the left one.

        Objects are told by any names that they have while this exists. `is_object` is of the right one.
        """
        beside, place = self._left.setdefault(left, (right, at))
        other, its_place = self._right.setdefault(right, (left, at)) if is_object else (left, at)
        if beside != right:
            return place, True
        return (its_place, False) if other != left else None


def lines_of(first: Iterable[Any], count: int, mark: str = "") -> list[str]:
    """A line for each of the first few of so many."""
    lines = [str(each) for each in first]
    lines += [f"{mark}and {count - len(lines)} more"] if count > len(lines) else []
    return [f"    {line}" for line in lines]


def array_text(array: Any) -> str:
    """Dtype and shape of an array, or of what describes one."""
    return f"{array.dtype}{list(array.shape)}"


def class_text(value: Any) -> str:
    """A value by its class."""
    return f"a `{printable(type(value).__name__)}`"


def described(value: Any, otherwise: Callable[[Any], str] = shown) -> str:
    """A value in a few words: an array by dtype and shape, whatever else as another function has it."""
    return array_text(value) if carries_identity(value) else otherwise(value)
