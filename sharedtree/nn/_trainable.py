"""The trainable part of a module, and how it is put back.

Whether a leaf is trainable depends on the attributes on the way to it: one that `st.state_field` marks makes all below
it untrainable, and otherwise the innermost module decides. So a walk from the root carries along what holds for leaves:

    Net(head=Linear(weight=parameter(w), bias=b), target=state_field(<the same Linear>))

Here `.head.weight` is trainable, `.head.bias` is not, and neither is anything below `.target`. The two linears are one
object, so the weight is trainable: it is at one of its paths.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import tree_util as jtu

from ..core._errors import SharingMismatchError
from ..core._node_types import Trained, trained_below
from ..core._structure import LEAF, FlatDag, Node, Op, Path
from ..libraries._sharedtree_module_kinds import kinds_in
from ..ties._leaf_notes import hand_on
from ..ties._list_ties import are_one_value, how_to_tie
from ..ties._policy_and_context import walk_exactly
from ..tree._partition import rebuilt

T = TypeVar("T")


def trainable(module: T) -> T:
    """What `Module.parameters` returns."""
    walked = walk_exactly(module)
    kept = _trainable_leaves(walked)
    return rebuilt(walked.root, _ends(walked), lambda number: walked.objects[number] if number in kept else None)


def _ends(tree: FlatDag) -> Callable[[int], tuple[Op, Sequence[int]]]:
    """What the records are where each that is no node is a leaf, static values included."""

    def expand(number: int) -> tuple[Op, Sequence[int]]:
        op, children = tree.records[number]
        return (op, children) if type(op) is Node else (LEAF, ())

    return expand


def merged(module: T, parameters: Any) -> T:
    """What `Module.merge` returns."""
    walked, theirs = walk_exactly(module), walk_exactly(parameters)
    kept = _trainable_leaves(walked)
    found: dict[int, tuple[int, Path]] = {}
    for number, other, path in _side_by_side(walked, theirs):
        if number not in kept or theirs.objects[other] is None:
            continue
        known, first = found.setdefault(number, (other, path))
        if known != other and not are_one_value(theirs, known, other):
            one, two = jtu.keystr(first), jtu.keystr(path)
            raise SharingMismatchError(
                f"`{one}` and `{two}` are one leaf in the module, but two objects in the parameters.\nWhich of the two "
                f"is meant cannot be known.\n{how_to_tie('parameters', 'module.parameters()', in_containers=False)}",
                (one, two),
            )
    new = {number: theirs.objects[other] for number, (other, _) in found.items()}
    hand_on([walked.objects[number] for number in new], list(new.values()))
    return rebuilt(walked.root, _ends(walked), lambda number: new.get(number, walked.objects[number]))


def _trainable_leaves(tree: FlatDag) -> set[int]:
    found: set[int] = set()
    seen: set[tuple[int, Trained]] = set()
    stack: list[tuple[int, Trained]] = [(tree.root, "if marked")]
    while stack:
        number, rule = stack.pop()
        if (number, rule) in seen:
            continue
        seen.add((number, rule))
        op, children = tree.records[number]
        if type(op) is Node:
            stack.extend(zip(children, _rules_below(op, len(children), rule), strict=True))
        elif op is LEAF and _is_trainable(tree.objects[number], rule):
            found.add(number)
    return found


def _rules_below(node: Node, num_children: int, rule: Trained) -> Sequence[Trained]:
    """What holds for each child of a node for which a rule holds."""
    if rule == "never" or node.type.is_plain:
        return [rule for _ in range(num_children)]
    return trained_below(node.type.cls, node.aux.peek(), num_children)


def _is_trainable(leaf: Any, rule: Trained) -> bool:
    return rule == "always" or (rule == "if inexact" and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _side_by_side(module: FlatDag, parameters: FlatDag) -> Iterator[tuple[int, int, Path]]:
    """The leaves and static values of a module, with what stands in the same place of another one, and a path.

    Attributes of modules are found by name; those that only one of two modules has are passed over.

    Raises:
        SharingMismatchError: if the two have another class or another number of children anywhere.
    """
    seen: set[tuple[int, int]] = set()
    stack: list[tuple[int, int, Path]] = [(module.root, parameters.root, ())]
    while stack:
        number, other, path = stack.pop()
        if (number, other) in seen:
            continue
        seen.add((number, other))
        (op, children), (their_op, their_children) = module.records[number], parameters.records[other]
        if type(op) is not Node or (type(their_op) is Node and their_op.type.cls is type(None)):
            yield number, other, path
            continue
        if type(their_op) is not Node or their_op.type.cls is not op.type.cls:
            raise _of_another_shape(path, op, their_op)
        if kinds_in(op.aux.peek()) is not None:
            theirs = dict(zip(their_op.keys, their_children, strict=True))
            below = [(child, theirs[key], key) for key, child in zip(op.keys, children, strict=True) if key in theirs]
        elif op.keys != their_op.keys:
            raise _of_another_shape(path, op, their_op)
        else:
            below = list(zip(children, their_children, op.keys, strict=True))
        stack.extend((child, their_child, (*path, key)) for child, their_child, key in reversed(below))


def _of_another_shape(path: Path, op: Node, other: Op) -> SharingMismatchError:
    where, theirs = jtu.keystr(path), other.type.cls.__name__ if type(other) is Node else "leaf"
    return SharingMismatchError(
        f"The parameters differ in shape from the module at `{where}`: there is a `{op.type.cls.__name__}` here, and a "
        f"`{theirs}` there, or one with another number of children. Merge what `parameters` gave of the same module:\n"
        "    module = module.merge(sharedtree.tree.map(update, module.parameters()))",
        (where,),
    )
