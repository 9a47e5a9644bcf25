"""Whether two nodes of a tree could be one object, and what to do where they could not.

Layers of two classes, or of one class with other static data, are never one, but what they hold may be: the weight of
an embedding and that of a linear layer.
"""

import itertools

from jax import tree_util as jtu

from ..core._comparison import described
from ..core._errors import SharingMismatchError
from ..core._flat_dags import FlatDag
from ..core._printing import shown
from ..core._sharing import Mismatch, pairs
from ..core._static_values import Static, shown_beside
from ..core._structure import LEAF, Node, Path
from ..core._traced_leaves_and_identity import carries_identity
from ._ties_that_are_missing import kind_of

_MAX_ALIKE, _MAX_FIELDS, _MAX_COMPARED = 4, 3, 1000


def require_interchangeable(read: FlatDag, keep: int, other: int) -> None:
    """Raises unless two records of a tree could be one object."""
    path = _first_misfit(read, keep, other)
    if path is None:
        return
    paths = read.all_paths
    ends = [paths[number][0] + jtu.keystr(path) for number in (keep, other)]
    one, two = (_end_of(read, number, path) for number in (keep, other))
    fact = (
        f"`{ends[0]}` and `{ends[1]}` cannot be one object: the first is {_described(read, one, two)}, the second "
        f"{_described(read, two, one)}.\nTied nodes have one class, one set of statics, one shape and one dtype. "
    )
    alike = [(paths[a][0], paths[b][0]) for a, b in _alike_inside(read, keep, other)]
    if alike:
        calls = [f"    model = sharedtree.tie(model, lambda m: (m{a}, m{b}))" for a, b in alike[:_MAX_ALIKE]]
        raise SharingMismatchError("\n".join([f"{fact}Tie what is alike in them:", *calls]), ends)
    fix = (
        "To use one array in two shapes, tie what has the same shape and reshape where it is used:\n"
        "    logits = x @ model.embed.weight.T"
    )
    if _are_transposed(read, one, two):
        places = ", ".join([f"m{_place_of_parameter(read, number, path)}" for number in (keep, other)])
        fix = (
            "One may be the transpose of the other, which is then computed where it is used:\n"
            f"    model = sharedtree.tie(model, lambda m: ({places}), through=jnp.transpose)"
        )
    raise SharingMismatchError(f"{fact}{fix}", ends)


def _first_misfit(read: FlatDag, keep: int, other: int) -> Path | None:
    """Where two records of a tree differ that could be one object otherwise, below both of them."""
    records = read.records

    def agree(i: int, j: int) -> bool:
        (op, _), (op2, _) = records[i], records[j]
        if op is LEAF and op2 is LEAF:
            return kind_of(read.leaves[i]) == kind_of(read.leaves[j])
        return type(op) is Static and op == op2

    for pair in pairs(read.below(keep), read.below(other), agree):
        if isinstance(pair, Mismatch):
            return pair.path
        if type(records[pair.left][0]) is Node and records[pair.left][0] != records[pair.right][0]:
            return pair.path
    return None


def _are_transposed(read: FlatDag, one: int, two: int) -> bool:
    """Tells whether two records are arrays that differ in nothing but the order of two axes."""
    if read.records[one][0] is not LEAF or read.records[two][0] is not LEAF:
        return False
    first, second = kind_of(read.leaves[one]), kind_of(read.leaves[two])
    is_matrix = len(first.shape) == 2 and carries_identity(read.leaves[one]) and carries_identity(read.leaves[two])
    return is_matrix and first.dtype == second.dtype and first.shape == second.shape[::-1] != second.shape


def _place_of_parameter(read: FlatDag, top: int, path: Path) -> str:
    """The path to an array, or to the variable of NNX that holds it."""
    holder = read.records[_end_of(read, top, path[:-1])][0]
    is_in_variable = path and type(holder) is Node and holder.type.convention == "variable"
    return read.all_paths[top][0] + jtu.keystr(path[:-1] if is_in_variable else path)


def _end_of(read: FlatDag, number: int, path: Path) -> int:
    for key in path:
        op, children = read.records[number]
        assert type(op) is Node
        number = children[op.keys.index(key)]
    return number


def _described(read: FlatDag, number: int, beside: int) -> str:
    """What a record is, as it differs from another one."""
    op, other = read.records[number][0], read.records[beside][0]
    if op is LEAF:
        return described(read.leaves[number])
    if type(op) is Node:
        data = f" with {_static_data(op, other)}" if type(other) is Node and op.type.cls is other.type.cls else ""
        return f"of the class `{op.type.cls.__name__}`{data}"
    return f"the static value {shown(op.peek())}"  # pyright: ignore[reportAttributeAccessIssue]


def _static_data(op: Node, other: Node) -> str:
    """What is static in a node, as far as it differs from another one of its class: fields, where it has them."""
    one, two = op.aux.peek(), other.aux.peek()
    if op.type.fields:
        own, others = dict(one[1]), dict(two[1])
        differing = [name for name in own if name in others and Static(own[name]) != Static(others[name])]
        if differing:
            return ", ".join([f"{name}={shown_beside(own[name], others[name])}" for name in differing[:_MAX_FIELDS]])
    return f"the static data {shown_beside(one, two)}"


def _alike_inside(read: FlatDag, keep: int, other: int) -> list[tuple[int, int]]:
    """What two nodes hold that could be one object: at the same path below both, or else the only two of one kind."""
    inside = [_arrays_inside(read, number) for number in (keep, other)]
    below = inside[0].keys() & inside[1].keys()
    candidates = [(inside[0][path], inside[1][path]) for path in inside[0] if path in below]
    alike = [pair for pair in candidates if pair[0] != pair[1] and _first_misfit(read, *pair) is None]
    if alike or len(inside[0]) * len(inside[1]) > _MAX_COMPARED:
        return alike
    others = itertools.product(inside[0].values(), inside[1].values())
    alike = [pair for pair in others if pair[0] != pair[1] and _first_misfit(read, *pair) is None]
    return alike if len(alike) == 1 else []


def _arrays_inside(read: FlatDag, number: int) -> dict[Path, int]:
    """The arrays in a node, or the variables of NNX that hold them, each once, by their paths below it."""
    records = read.records
    found: dict[Path, int] = {}
    seen: set[int] = {number}
    stack: list[tuple[int, Path]] = [(number, ())]
    while stack:
        here, path = stack.pop()
        op, children = records[here]
        if path and (op is LEAF or (type(op) is Node and op.type.convention == "variable")):
            if op is not LEAF or carries_identity(read.leaves[here]):
                found[path] = here
        elif type(op) is Node:
            steps = reversed(list(zip(op.keys, children, strict=True)))
            stack += [(child, (*path, key)) for key, child in steps if child not in seen]
            seen.update(children)
    return found
