"""Whether two nodes of a tree could be one object, and what to tie instead if they could not.

Layers of two classes, or of one class with different static data, are never one object. Parts of them may be: the
weight of an embedding and that of a linear layer.

    Embedding(w1)    Linear(w2, b)      not interchangeable
    .weight   w1     .weight   w2       interchangeable if they have one shape and one dtype
"""

import itertools

from jax import tree_util as jtu

from ..core._comparison import described
from ..core._errors import SharingMismatchError
from ..core._node_types import carries_identity
from ..core._printing import shown
from ..core._sharing import Mismatch, pairs
from ..core._static_values import Static, shown_beside
from ..core._structure import LEAF, FlatDag, Node, Path
from ._ties_that_are_missing import kind_of

_MAX_SUGGESTIONS, _MAX_FIELDS, _MAX_COMPARISONS = 4, 3, 1000


def require_interchangeable(tree: FlatDag, left: int, right: int) -> None:
    """Raises an error if two records of a tree cannot be one object. It suggests parts of them that can.

    Args:
        tree: the tree, with its leaves.
        left: number of the record that would be kept.
        right: number of the record that would be replaced by it.

    Raises:
        SharingMismatchError: if the records differ in class, static data, shape or dtype, or anything below them does.
    """
    path = _first_difference(tree, left, right)
    if path is None:
        return
    paths = tree.paths_of_edges
    # The difference may lie far below the two records. The error names the place of the difference on either side.
    left_path, right_path = (paths[number][0] + jtu.keystr(path) for number in (left, right))
    left_end, right_end = (_record_at(tree, number, path) for number in (left, right))
    fact = (
        f"`{left_path}` and `{right_path}` cannot be one object: the first is {_described(tree, left_end, right_end)}, "
        f"the second {_described(tree, right_end, left_end)}.\nTied nodes have one class, one set of statics, one "
        "shape and one dtype. "
    )
    suggestions = [(paths[a][0], paths[b][0]) for a, b in _interchangeable_parts(tree, left, right)]
    if suggestions:
        calls = [
            f"    model = sharedtree.tie(model, lambda m: (m{a}, m{b}))" for a, b in suggestions[:_MAX_SUGGESTIONS]
        ]
        raise SharingMismatchError("\n".join([f"{fact}Tie what is alike in them:", *calls]), [left_path, right_path])
    fix = (
        "To use one array in two shapes, tie what has the same shape and reshape where it is used:\n"
        "    logits = x @ model.embed.weight.T"
    )
    if _are_transposed(tree, left_end, right_end):
        parameters = ", ".join([f"m{_path_of_parameter(tree, number, path)}" for number in (left, right)])
        fix = (
            "One may be the transpose of the other, which is then computed where it is used:\n"
            f"    model = sharedtree.tie(model, lambda m: ({parameters}), through=jnp.transpose)"
        )
    raise SharingMismatchError(f"{fact}{fix}", [left_path, right_path])


def _first_difference(tree: FlatDag, left: int, right: int) -> Path | None:
    """Returns the path below two records at which they first differ, None if they could be one object.

    The path is empty if the records themselves differ.
    """
    records = tree.records

    def agree(i: int, j: int) -> bool:
        (left_op, _), (right_op, _) = records[i], records[j]
        if left_op is LEAF and right_op is LEAF:
            return kind_of(tree.leaves[i]) == kind_of(tree.leaves[j])
        return type(left_op) is Static and left_op == right_op

    for pair in pairs(tree.below(left), tree.below(right), agree):
        if isinstance(pair, Mismatch):
            return pair.path
        # `pairs` compares classes and numbers of children only. Equal operations also have equal static data.
        if type(records[pair.left][0]) is Node and records[pair.left][0] != records[pair.right][0]:
            return pair.path
    return None


def _are_transposed(tree: FlatDag, left: int, right: int) -> bool:
    """Returns True if two records are matrices that differ only in the order of their axes."""
    if tree.records[left][0] is not LEAF or tree.records[right][0] is not LEAF:
        return False
    left_leaf, right_leaf = tree.leaves[left], tree.leaves[right]
    left_kind, right_kind = kind_of(left_leaf), kind_of(right_leaf)
    if len(left_kind.shape) != 2 or not (carries_identity(left_leaf) and carries_identity(right_leaf)):
        return False
    return left_kind.dtype == right_kind.dtype and left_kind.shape == right_kind.shape[::-1] != right_kind.shape


def _path_of_parameter(tree: FlatDag, number: int, path: Path) -> str:
    """Returns the whole path of an array below a record, or of the NNX variable that holds the array."""
    holder = tree.records[_record_at(tree, number, path[:-1])][0]
    is_in_variable = path and type(holder) is Node and holder.type.convention == "variable"
    return tree.paths_of_edges[number][0] + jtu.keystr(path[:-1] if is_in_variable else path)


def _record_at(tree: FlatDag, number: int, path: Path) -> int:
    """Follows a path down from a record. Returns the number of the record at its end."""
    for key in path:
        op, children = tree.records[number]
        assert type(op) is Node
        number = children[op.keys.index(key)]
    return number


def _described(tree: FlatDag, number: int, counterpart: int) -> str:
    """Describes a record in words, with the static data in which it differs from its counterpart."""
    op, counterpart_op = tree.records[number][0], tree.records[counterpart][0]
    if op is LEAF:
        return described(tree.leaves[number])
    if type(op) is Node:
        data = ""
        if type(counterpart_op) is Node and op.type.cls is counterpart_op.type.cls:
            data = f" with {_static_data(op, counterpart_op)}"
        return f"of the class `{op.type.cls.__name__}`{data}"
    return f"the static value {shown(op.peek())}"  # pyright: ignore[reportAttributeAccessIssue]


def _static_data(node: Node, counterpart: Node) -> str:
    """Describes the static data of a node that differ from those of another node of its class.

    They are printed field by field if the class has fields, else as a whole.
    """
    data, counterpart_data = node.aux.peek(), counterpart.aux.peek()
    if node.type.fields:
        values, counterpart_values = dict(data[1]), dict(counterpart_data[1])
        common_names = [name for name in values if name in counterpart_values]
        differing = [name for name in common_names if Static(values[name]) != Static(counterpart_values[name])]
        if differing:
            del differing[_MAX_FIELDS:]
            texts = [f"{name}={shown_beside(values[name], counterpart_values[name])}" for name in differing]
            return ", ".join(texts)
    return f"the static data {shown_beside(data, counterpart_data)}"


def _interchangeable_parts(tree: FlatDag, left: int, right: int) -> list[tuple[int, int]]:
    """Finds pairs of arrays, one below each of two nodes, that could be one object.

    Arrays at one path below both nodes are preferred. If no such pair fits, one pair of other arrays is returned, and
    only if it is the one pair that fits: with several there is nothing to choose by.
    """
    left_arrays, right_arrays = (_arrays_below(tree, number) for number in (left, right))

    # Pairs at common paths.
    common_paths = left_arrays.keys() & right_arrays.keys()
    candidates = [(left_arrays[path], right_arrays[path]) for path in left_arrays if path in common_paths]
    matches = [pair for pair in candidates if pair[0] != pair[1] and _first_difference(tree, *pair) is None]
    if matches or len(left_arrays) * len(right_arrays) > _MAX_COMPARISONS:
        return matches

    # All other pairs.
    all_pairs = itertools.product(left_arrays.values(), right_arrays.values())
    matches = [pair for pair in all_pairs if pair[0] != pair[1] and _first_difference(tree, *pair) is None]
    return matches if len(matches) == 1 else []


def _arrays_below(tree: FlatDag, root: int) -> dict[Path, int]:
    """Finds the arrays below a record, each once, by their paths below it.

    For an array in a variable of Flax NNX it lists the variable, since the array in it carries no identity.
    """
    records = tree.records
    arrays: dict[Path, int] = {}
    visited: set[int] = {root}
    stack: list[tuple[int, Path]] = [(root, ())]
    while stack:
        number, path = stack.pop()
        op, children = records[number]
        # The root itself is no suggestion: it is one of the two nodes that cannot be tied.
        if path and (op is LEAF or (type(op) is Node and op.type.convention == "variable")):
            if op is not LEAF or carries_identity(tree.leaves[number]):
                arrays[path] = number
        elif type(op) is Node:
            steps = reversed(list(zip(op.keys, children, strict=True)))
            stack += [(child, (*path, key)) for key, child in steps if child not in visited]
            visited.update(children)
    return arrays
