"""Compares two trees side by side: which nodes correspond, where ties differ, and how a difference is printed.

    left    [w, w]      pairs     the lists at the root, (w, v) at [0], (w, u) at [1]
    right   [v, u]      ties      [0] and [1] hold one object on the left and two on the right

Both are DAGs, and are walked as such. Two nodes that stand at one path are merged into one set of nodes. So each pair
makes one set out of two, and there are no more pairs than nodes, however much is shared. This is Hopcroft and Karp's
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
    """Two nodes or leaves at the same path, one of each side.

    Attributes:
        left: the node or leaf on the left: an object, or its number.
        right: that on the right.
        at: the path, as a number that a `Paths` has for it.
        inherited: data that the comparison passes down from the pair above.
    """

    left: Any
    right: Any
    at: int = 0
    inherited: Any = None


def differences_from(root: Pair, compare: Callable[[Pair], Iterable[Pair | D]]) -> Iterator[D]:
    """Compares two trees depth first, without recursion, and yields their differences.

    Args:
        root: the two roots.
        compare: compares one pair. Yields the differences of the two, of any class but `Pair`, and the pairs below them
            to compare next.
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
    """A table of paths, each with a number. The empty path has the number 0.

    Each path is stored as its last step and the number of the path before that step. So paths with a common beginning
    share it, and the paths of a deep tree take no more memory than the tree.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, Any]] = [(-1, "")]

    def below(self, at: int, step: Any) -> int:
        """Extends a path by a step, and returns the number of the new path. `text` prints the step by `str`."""
        self._steps.append((at, step))
        return len(self._steps) - 1

    def text(self, at: int, most: float = MAX_PATH_CHARACTERS) -> str:
        """Prints a path as `jax.tree_util.keystr` does. Of a path with more than `most` characters, prints the end."""
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
    """Sets of corresponding nodes of two sides. Nodes are numbers, counted from 0 on either side.

    Args:
        num_left: the number of nodes on the left.
        num_right: the number of nodes on the right.
    """

    def __init__(self, num_left: int, num_right: int) -> None:
        self._offset = num_left
        # The numbers of the right nodes follow those of the left ones here.
        self._sets = UnionFind(num_left + num_right)
        # Nodes whose children were compared with those of some node of the other side.
        self._compared_left: set[int] = set()
        self._compared_right: set[int] = set()

    def unite(self, left: int, right: int) -> bool:
        """Merges the sets of two nodes. Returns False if the nodes correspond already, and need no comparison."""
        return self._sets.unite(left, self._offset + right)

    def record_comparison(self, left: int, right: int, num_left: int, num_right: int) -> bool:
        """Tells whether to compare only the common children of two nodes, and records the comparison.

        Args:
            left: the node on the left.
            right: the node on the right.
            num_left: how many children the left node has.
            num_right: how many children the right node has.
        """
        # If two nodes have different numbers of children, the larger one is compared in full only the first time. So a
        # long list that one side has at many paths is gone through once.
        was_left_compared, was_right_compared = left in self._compared_left, right in self._compared_right
        self._compared_left.add(left)
        self._compared_right.add(right)
        return (num_left > num_right and was_left_compared) or (num_right > num_left and was_right_compared)


def paired_children(
    left: Mapping[ChildKey, Any], right: Mapping[ChildKey, Any], *, common_only: bool
) -> list[tuple[ChildKey, Any, Any]]:
    """Pairs the children of two nodes by key.

    Args:
        left: key → child.
        right: key → child.
        common_only: whether to leave out the children of only one side. Then only the smaller side is gone through.

    Returns:
        (key, left child, right child) for each key. `MISSING` stands for a missing child. The order is that of the left
        side, and children of the right side alone come last; with `common_only`, it is that of the smaller side.
    """
    if common_only:
        smaller = min(left, right, key=len)
        return [(key, left[key], right[key]) for key in smaller if key in left and key in right]
    triples = [(key, child, right.get(key, MISSING)) for key, child in left.items()]
    return triples + [(key, MISSING, child) for key, child in right.items() if key not in left]


def is_one_missing(left: Any, right: Any) -> bool:
    """Tells whether only one side has a child: whether one of the two children is `MISSING`."""
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
    """Finds ties that only one of two sides has, from the objects that stand at the same path on both sides."""

    def __init__(self) -> None:
        # Object → the object of the other side at the first path to it, and that path.
        self._left: dict[Hashable, tuple[Hashable, int]] = {}
        self._right: dict[Hashable, tuple[Hashable, int]] = {}

    def add_pair(self, left: Hashable, right: Hashable, at: int, *, is_object: bool = True) -> SplitTie | None:
        """Records two objects at one path. Returns the tie that only one side has, if these two show one; else None.

        Args:
            left: a key for the object on the left. It must mean the same object as long as this instance is in use.
            right: a key for the object on the right.
            at: the path.
            is_object: whether the right one carries identity. If not, it has no ties.
        """
        first_right, left_path = self._left.setdefault(left, (right, at))
        first_left, right_path = self._right.setdefault(right, (left, at)) if is_object else (left, at)
        # The left object stood beside another right one before. So there is a tie on the left, of one object, where the
        # right side has two.
        if first_right != right:
            return SplitTie(left_path, is_on_left=True)
        return SplitTie(right_path, is_on_left=False) if first_left != left else None


# --- text -------------------------------------------------------------------------------------------------------------


def indented_lines(first: Iterable[Any], count: int, mark: str = "") -> list[str]:
    """Makes indented lines for an error: one for each of the first few items, and "and 3 more" for the others.

    Args:
        first: the items to print.
        count: how many items there are in all.
        mark: a text to put before "and 3 more".
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


def short_text(value: Any, otherwise: Callable[[Any], str] = shown) -> str:
    """Prints a value in a few words: dtype and shape of an array, and the result of `otherwise` for any other value."""
    return array_text(value) if carries_identity(value) else otherwise(value)
