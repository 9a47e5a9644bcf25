"""Compares two trees side by side: which nodes correspond, where ties differ, and how a difference is printed.

    left    [w, w]      pairs     the lists at the root, (w, v) at [0], (w, u) at [1]
    right   [v, u]      ties      [0] and [1] hold one object on the left and two on the right

Both trees are DAGs. Nodes that stand at the same path correspond, and are merged into one set of nodes. A pair of nodes
that are in one set already is not compared again. So each comparison makes one set out of two, and there are no more
comparisons than nodes, however much is shared. This is Hopcroft and Karp's test of whether two automata are equal ("A
linear algorithm for testing equivalence of finite automata", 1971).

Two things differ from the paper. First, the comparison goes on after a difference, which is reported once, at the first
path that leads to it. Second, two nodes may have different numbers of children. If the larger node was compared before,
only the *common* children are compared, which both nodes have. Otherwise a large list that one side has at many paths
would be gone through as often.

`load` with a template uses all of this. `load_state` uses no `Matching`: it visits each pair of two objects, because
what it makes depends on both.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from ._node_types import carries_identity
from ._printing import printable, shown
from ._sharing import UnionFind

MAX_PATH_CHARACTERS = 400
"""The number of characters of a path in a message. A longer path is cut."""

MISSING: Any = object()
"""Stands for a child that one side lacks."""

Difference = TypeVar("Difference")
ChildKey = TypeVar("ChildKey", bound=Hashable)


class Pair(NamedTuple):
    """Two nodes or leaves at the same path, one of each side.

    Attributes:
        left: the node or leaf on the left: an object, or its number.
        right: the node or leaf on the right.
        at: the number of their path in the caller's table of paths (`Paths`).
        inherited: data passed down from the pair of the parents.
    """

    left: Any
    right: Any
    at: int = 0
    inherited: Any = None


def differences_from(root: Pair, compare: Callable[[Pair], Iterable[Pair | Difference]]) -> Iterator[Difference]:
    """Compares two trees depth first, without recursion, and yields their differences.

    Args:
        root: the two roots.
        compare: compares one pair. Returns the differences of the two, which may be of any class but `Pair`, and the
            pairs of children to compare next, mixed in any order.
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
        # Number of a path → (number of the path before its last step, last step). The first entry is the empty path.
        self._steps: list[tuple[int, Any]] = [(-1, "")]

    def below(self, at: int, step: Any) -> int:
        """Enters a path longer by one step than another one. Returns the number of the new path.

        Args:
            at: the number of the shorter path.
            step: the last step. Its `str` is its text in the path, such as "[0]" or ".layers".
        """
        self._steps.append((at, step))
        return len(self._steps) - 1

    def text(self, at: int, most: float = MAX_PATH_CHARACTERS) -> str:
        """Returns the text of a path, as `jax.tree_util.keystr` does: ".layers[0].weight".

        Args:
            at: the number of the path. (`at` means this in the whole file.)
            most: the number of characters to which a longer path is cut. The text is then "..." and its last `most`
                characters. `math.inf` cuts nothing.
        """
        # The steps are collected from the last one back, so that a long path costs no more than its text. `at` becomes
        # the number of a shorter path each time.
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
        # In `_sets`, the nodes on the left have their own numbers. Those on the right have theirs plus `_offset`.
        self._offset = num_left
        self._sets = UnionFind(num_left + num_right)
        # Nodes whose children were compared already, with those of some node on the other side.
        self._compared_left: set[int] = set()
        self._compared_right: set[int] = set()

    def unite(self, left: int, right: int) -> bool:
        """Merges the sets of two nodes. Returns False if they are in one set already, and so need no comparison."""
        return self._sets.unite(left, self._offset + right)

    def record_comparison(self, left: int, right: int, num_left: int, num_right: int) -> bool:
        """Records that the children of two nodes are compared now. Tells whether to compare only the common ones.

        Args:
            left: the node on the left.
            right: the node on the right.
            num_left: how many children the left node has.
            num_right: how many children the right node has.

        Returns:
            True if one node has more children than the other, and its children were compared before. So a long list
            that one side has at many paths is gone through in full only once.
        """
        was_left_compared, was_right_compared = left in self._compared_left, right in self._compared_right
        self._compared_left.add(left)
        self._compared_right.add(right)
        return (num_left > num_right and was_left_compared) or (num_right > num_left and was_right_compared)


def paired_children(
    left: Mapping[ChildKey, Any], right: Mapping[ChildKey, Any], *, common_only: bool
) -> list[tuple[ChildKey, Any, Any]]:
    """Pairs the children of two nodes by key.

    Args:
        left: key → child of the left node.
        right: key → child of the right node.
        common_only: whether to leave out the children of only one node. Then the time depends on the smaller node
            alone.

    Returns:
        (key, left child, right child) for each key, with `MISSING` for a missing child. The order is that of the left
        node. Children of the right node alone come last. With `common_only`, the order is that of the smaller node.
    """
    if common_only:
        smaller = min(left, right, key=len)
        return [(key, left[key], right[key]) for key in smaller if key in left and key in right]
    triples = [(key, child, right.get(key, MISSING)) for key, child in left.items()]
    return triples + [(key, MISSING, child) for key, child in right.items() if key not in left]


def is_one_missing(left: Any, right: Any) -> bool:
    """Returns True if one of two paired children is `MISSING`: whether only one side has a child."""
    return left is MISSING or right is MISSING


class SplitTie(NamedTuple):
    """A tie that only one of two sides has: one object of this side stands where the other side has two.

    Attributes:
        at: the number of the first path to the tied object.
        is_on_left: whether the left side has the tie.
    """

    at: int
    is_on_left: bool


class Ties:
    """Finds the ties that only one of two sides has. For each path, the caller adds the two objects there."""

    def __init__(self) -> None:
        # Object of one side → the object of the other side at the first path to it, and the number of that path.
        self._left: dict[Hashable, tuple[Hashable, int]] = {}
        self._right: dict[Hashable, tuple[Hashable, int]] = {}

    def add_pair(self, left: Hashable, right: Hashable, at: int, *, is_object: bool = True) -> SplitTie | None:
        """Records the two objects at one path.

        Args:
            left: a key for the object on the left, such as its number. As long as this `Ties` is in
                use, the key must mean the same object.
            right: a key for the object on the right.
            at: the number of the path.
            is_object: whether the right object carries identity. If not, it is not recorded, and has no ties. The left
                object is recorded in any case.

        Returns:
            The tie, if this pair shows that one of its objects is tied on its own side only; otherwise None. If each
            object is, the tie of the left one.
        """
        # What stood beside each object at its first path, and the number of this path.
        first_right, left_path = self._left.setdefault(left, (right, at))
        first_left, right_path = self._right.setdefault(right, (left, at)) if is_object else (left, at)
        # At its first path, the left object stood beside another right object. So it is one object on the left, where
        # the right side has two.
        if first_right != right:
            return SplitTie(left_path, is_on_left=True)
        # The same with the sides exchanged.
        return SplitTie(right_path, is_on_left=False) if first_left != left else None


# --- text -------------------------------------------------------------------------------------------------------------


def indented_lines(first_items: Iterable[Any], count: int, mark: str = "") -> list[str]:
    """Makes the indented lines of a list in an error: one for each item to show, and "and 3 more" for the others.

    Args:
        first_items: the items to show. The caller has cut the list.
        count: how many items there are in all.
        mark: a text before "and 3 more", such as "… ". The other lines do not get it.
    """
    lines = [str(item) for item in first_items]
    lines += [f"{mark}and {count - len(lines)} more"] if count > len(lines) else []
    return [f"    {line}" for line in lines]


def array_text(array: Any) -> str:
    """Returns dtype and shape of an array, or of anything with both, as a text: "float32[2, 3]"."""
    return f"{array.dtype}{list(array.shape)}"


def class_text(value: Any) -> str:
    """Returns the name of a value's class with its article: "a `Linear`"."""
    return f"a `{printable(type(value).__name__)}`"


def short_text(value: Any, otherwise: Callable[[Any], str] = shown) -> str:
    """Returns a short text for a value: dtype and shape of an array, and the result of `otherwise` for other values."""
    return array_text(value) if carries_identity(value) else otherwise(value)
