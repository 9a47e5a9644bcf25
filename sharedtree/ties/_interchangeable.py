"""Whether two nodes of a tree could be one object, and what to do where they could not.

Layers of two classes, or of one class with other static data, are never one, but what they hold may be: the weight of
an embedding and that of a linear layer.
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
    raise SharingMismatchError(
        f"{fact}To use one array in two shapes, tie what has the same shape and reshape where it is used:\n"
        "    logits = x @ model.embed.weight.T",
        ends,
    )


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
