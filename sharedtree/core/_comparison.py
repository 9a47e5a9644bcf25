"""Compares two trees side by side: which nodes correspond, where ties differ, and how a difference is printed.

    left    [w, w]      pairs     the lists at the root, (w, v) at [0], (w, u) at [1]
    right   [v, u]      ties      [0] and [1] hold one object on the left and two on the right

Both are DAGs, and are walked as such. Two nodes that stand at one path are merged into one class of nodes. So each pair
makes one class out of two, and there are no more pairs than nodes, however much is shared. This is Hopcroft and Karp's
test of whether two automata are equal ("A linear algorithm for testing equivalence of finite automata", 1971).

Two things differ from the paper. The comparison goes on after a difference, which is reported once, at the first path
that leads to it. And two nodes may have different numbers of children: if the larger one was compared before, only the
children that both have are compared, because otherwise a large list that one side has at many paths would be gone
through as often.

`load_state` alone visits each pair of two objects, because what it makes depends on both.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ._node_types import carries_identity
from ._printing import printable, shown
from ._sharing import UnionFind

MAX_PATH_CHARACTERS = 400
"""How much of a path is printed."""

MISSING: Any = object()
"""Stands for a child that one side lacks."""

D = TypeVar("D")
ChildKey = TypeVar("ChildKey", bound=Hashable)


class Pair(NamedTuple):
    """Two nodes or leaves, one of each side, at the same path.

    Attributes:
        left: the one on the left: an object, or its number.
        right: the one on the right.
        at: the path, as a number of a `Paths`.
        inherited: data that the comparison passes down from the pair above.
    """

    left: Any
    right: Any
    at: int = 0
    inherited: Any = None


def differences_from(root: Pair, compare: Callable[[Pair], Iterable[Pair | D]]) -> Iterator[D]:
    """Compares two trees depth first, without recursion.

    Args:
        root: the two roots.
        compare: compares one pair. Yields its differences, and the pairs below it to compare next.

    Yields:
        The differences.
    """
    stack = [root]
    while stack:
        # Pairs below are pushed in reverse, so that they come off the stack in the order of `compare`.
        pairs_below: list[Pair] = []
        for item in compare(stack.pop()):
            if isinstance(item, Pair):
                pairs_below.append(item)
            else:
                yield item
        stack.extend(reversed(pairs_below))


class Paths:
    """Paths as numbers, 0 the empty one.

    Each path is stored as its last step and the number of the path before it. So paths with a common beginning share
    it, and the paths of a deep tree take no more memory than the tree.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, Any]] = [(-1, "")]

    def below(self, at: int, step: Any) -> int:
        """Extends a path by a step, and returns the new path. `str` prints the step."""
        self._steps.append((at, step))
        return len(self._steps) - 1

    def text(self, at: int, most: float = MAX_PATH_CHARACTERS) -> str:
        """Prints a path as `jax.tree_util.keystr` does. Of a path of more than `most` characters, prints the end."""
        # The steps are collected from the last one back, so that a long path costs no more than what is printed of it.
        steps: list[str] = []
        length = 0
        while at > 0 and length <= most:
            at, step = self._steps[at]
            steps.append(str(step))
            length += len(steps[-1])
        text = "".join(reversed(steps))
        return text if length <= most else f"...{text[-int(most) :]}"


class Matching:
    """Classes of corresponding nodes of two sides. Nodes are numbers, counted from 0 on either side.

    Args:
        num_left: the number of nodes on the left.
        num_right: the number of nodes on the right.
    """

    def __init__(self, num_left: int, num_right: int) -> None:
        self._offset = num_left
        self._classes = UnionFind(num_left + num_right)  # right nodes follow the left ones
        # Nodes whose children were compared with those of some node of the other side.
        self._compared_left: set[int] = set()
        self._compared_right: set[int] = set()

    def unite(self, left: int, right: int) -> bool:
        """Merges the classes of two nodes. Returns False if they correspond already and need no comparison."""
        return self._classes.unite(left, self._offset + right)

    def is_short(self, left: int, right: int, num_left: int, num_right: int) -> bool:
        """Tells whether to compare only the common children of two nodes, and records the comparison.

        Args:
            left: the node on the left.
            right: the node on the right.
            num_left: how many children the left node has.
            num_right: how many children the right node has.
        """
        # A larger node is compared in full only once, so that a list at many paths is gone through only once.
        was_left_compared, was_right_compared = left in self._compared_left, right in self._compared_right
        self._compared_left.add(left)
        self._compared_right.add(right)
        return (num_left > num_right and was_left_compared) or (num_right > num_left and was_right_compared)


def matched(
    left: Mapping[ChildKey, Any], right: Mapping[ChildKey, Any], *, is_short: bool
) -> list[tuple[ChildKey, Any, Any]]:
    """Pairs the children of two nodes by key.

    Args:
        left: key → child.
        right: key → child.
        is_short: whether to leave out the children of only one side. Then only the smaller side is gone through.

    Returns:
        (key, left child, right child), in the order of the left side. `MISSING` stands for a missing child. Children
        of the right side alone come last.
    """
    if is_short:
        smaller = min(left, right, key=len)
        return [(key, left[key], right[key]) for key in smaller if key in left and key in right]
    triples = [(key, child, right.get(key, MISSING)) for key, child in left.items()]
    return triples + [(key, MISSING, child) for key, child in right.items() if key not in left]


def is_alone(left: Any, right: Any) -> bool:
    """Tells whether only one of the two sides has a child."""
    return left is MISSING or right is MISSING


class SplitTie(NamedTuple):
    """A tie of one side that the other lacks.

    Attributes:
        at: the path at which the tied object stood first, as a number of a `Paths`.
        is_on_left: whether the left side has the tie.
    """

    at: int
    is_on_left: bool


class Ties:
    """Correspondence of the objects of two sides, to find the ties of only one side."""

    def __init__(self) -> None:
        # Object → the object of the other side at the first path to it, and that path.
        self._left: dict[Hashable, tuple[Hashable, int]] = {}
        self._right: dict[Hashable, tuple[Hashable, int]] = {}

    def apart(self, left: Hashable, right: Hashable, at: int, *, is_object: bool = True) -> SplitTie | None:
        """Records two objects at one path. Returns a tie if this shows it to exist on one side only.

        Args:
            left: a key for the object on the left. It stands for the object as long as this instance exists.
            right: a key for the object on the right.
            at: the path.
            is_object: whether the right one is an object. A value has no ties.
        """
        first_right, left_path = self._left.setdefault(left, (right, at))
        first_left, right_path = self._right.setdefault(right, (left, at)) if is_object else (left, at)
        # The left object stood beside another right one before. So it is one on the left and two on the right.
        if first_right != right:
            return SplitTie(left_path, is_on_left=True)
        return SplitTie(right_path, is_on_left=False) if first_left != left else None


# --- text -------------------------------------------------------------------------------------------------------------


def lines_of(first: Iterable[Any], count: int, mark: str = "") -> list[str]:
    """Prints the first few of many items, one a line, and how many more there are.

    Args:
        first: the items to print.
        count: how many there are in all.
        mark: a text to put before the count of the others.
    """
    lines = [str(item) for item in first]
    lines += [f"{mark}and {count - len(lines)} more"] if count > len(lines) else []
    return [f"    {line}" for line in lines]


def array_text(array: Any) -> str:
    """Prints dtype and shape of an array, or of anything with both."""
    return f"{array.dtype}{list(array.shape)}"


def class_text(value: Any) -> str:
    """Prints the class of a value."""
    return f"a `{printable(type(value).__name__)}`"


def described(value: Any, otherwise: Callable[[Any], str] = shown) -> str:
    """Prints a value in a few words: dtype and shape for an array, the text of `otherwise` for anything else."""
    return array_text(value) if carries_identity(value) else otherwise(value)
