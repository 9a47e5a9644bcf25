"""The trainable part of a module: taken out by `trainable`, put back by `merged`.

Whether a leaf is trainable depends on the attributes on its path. An attribute with the mark of `st.state_field` makes
all leaves below it untrainable. Otherwise the innermost module decides. So a walk from the root carries along the rule
for leaves:

    Net(head=Linear(weight=parameter(w), bias=b), target=state_field(<the same Linear>))

Here `.head.weight` is trainable. `.head.bias` is not, nor is any leaf below `.target`. The two linears are one object:
its weight is trainable, because it is trainable at one of its paths.
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
    """Returns the trainable part of a module, for `Module.parameters`."""
    dag = walk_exactly(module)
    trainable_leaves = _trainable_leaves(dag)
    return rebuilt(
        dag.root, _expansion(dag), lambda record: dag.objects[record] if record in trainable_leaves else None
    )


def merged(module: T, parameters: Any) -> T:
    """Returns a module with new values for its trainable leaves, for `Module.merge`.

    Args:
        module: the module. It is not changed.
        parameters: a module of the same shape that has the new values. Where it has None, the old value stays.

    Raises:
        SharingMismatchError: if the shapes differ, or `parameters` has two objects for one leaf of the module.
    """
    dag, parameter_dag = walk_exactly(module), walk_exactly(parameters)
    trainable_leaves = _trainable_leaves(dag)
    # Leaf of the module → record of its new value, and the first path at which it was found.
    sources: dict[int, tuple[int, Path]] = {}
    for record, source, path in _side_by_side(dag, parameter_dag):
        if record not in trainable_leaves or parameter_dag.objects[source] is None:
            continue
        first_source, first_path = sources.setdefault(record, (source, path))
        if first_source != source and not are_one_value(parameter_dag, first_source, source):
            first_text, text = jtu.keystr(first_path), jtu.keystr(path)
            raise SharingMismatchError(
                f"`{first_text}` and `{text}` are one leaf in the module, but two objects in the parameters.\nWhich of "
                "the two is meant cannot be known.\n"
                f"{how_to_tie('parameters', 'module.parameters()', in_containers=False)}",
                (first_text, text),
            )
    new_leaves = {record: parameter_dag.objects[source] for record, (source, _) in sources.items()}
    hand_on([dag.objects[record] for record in new_leaves], list(new_leaves.values()))
    return rebuilt(dag.root, _expansion(dag), lambda record: new_leaves.get(record, dag.objects[record]))


def _expansion(tree: FlatDag) -> Callable[[int], tuple[Op, Sequence[int]]]:
    """Returns a function from a record to its operation and children, in which static values are leaves, too."""

    def expand(record: int) -> tuple[Op, Sequence[int]]:
        op, children = tree.records[record]
        return (op, children) if type(op) is Node else (LEAF, ())

    return expand


def _trainable_leaves(tree: FlatDag) -> set[int]:
    """Records of the leaves that are trainable at one of their paths at least."""
    leaves: set[int] = set()
    # A record is visited once for each rule that holds at one of its paths.
    visited: set[tuple[int, Trained]] = set()
    stack: list[tuple[int, Trained]] = [(tree.root, "if marked")]
    while stack:
        record, rule = stack.pop()
        if (record, rule) in visited:
            continue
        visited.add((record, rule))
        op, children = tree.records[record]
        if type(op) is Node:
            stack.extend(zip(children, _rules_below(op, len(children), rule), strict=True))
        elif op is LEAF and _is_trainable(tree.objects[record], rule):
            leaves.add(record)
    return leaves


def _rules_below(node: Node, num_children: int, rule: Trained) -> Sequence[Trained]:
    """Returns the rule for each child of a node, from the rule for the node."""
    # A plain container has no attributes, so it passes the rule on.
    if rule == "never" or node.type.is_plain:
        return [rule for _ in range(num_children)]
    return trained_below(node.type.cls, node.aux.peek(), num_children)


def _is_trainable(leaf: Any, rule: Trained) -> bool:
    return rule == "always" or (rule == "if inexact" and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def _side_by_side(module: FlatDag, parameters: FlatDag) -> Iterator[tuple[int, int, Path]]:
    """Walks a module and its parameters together.

    Attributes of modules are found by name. Attributes that only one of the two modules has are skipped.

    Yields:
        record of a leaf or static value of the module, record at the same place of the parameters, and a path. Each
        pair of records comes once.

    Raises:
        SharingMismatchError: if the two differ in a class or in a number of children.
    """
    visited: set[tuple[int, int]] = set()
    stack: list[tuple[int, int, Path]] = [(module.root, parameters.root, ())]
    while stack:
        record, source, path = stack.pop()
        if (record, source) in visited:
            continue
        visited.add((record, source))
        (op, children), (source_op, source_children) = module.records[record], parameters.records[source]
        # A module without trainable leaves may be None in the parameters.
        if type(op) is not Node or (type(source_op) is Node and source_op.type.cls is type(None)):
            yield record, source, path
            continue
        if type(source_op) is not Node or source_op.type.cls is not op.type.cls:
            raise _of_another_shape(path, op, source_op)
        if kinds_in(op.aux.peek()) is not None:
            child_of = dict(zip(source_op.keys, source_children, strict=True))
            steps = [
                (child, child_of[key], key) for key, child in zip(op.keys, children, strict=True) if key in child_of
            ]
        elif op.keys != source_op.keys:
            raise _of_another_shape(path, op, source_op)
        else:
            steps = list(zip(children, source_children, op.keys, strict=True))
        stack.extend((child, source_child, (*path, key)) for child, source_child, key in reversed(steps))


def _of_another_shape(path: Path, op: Node, source_op: Op) -> SharingMismatchError:
    """Returns the error for parameters with another class, or another number of children, at a path."""
    text, source_name = jtu.keystr(path), source_op.type.cls.__name__ if type(source_op) is Node else "leaf"
    return SharingMismatchError(
        f"The parameters differ in shape from the module at `{text}`: there is a `{op.type.cls.__name__}` here, and a "
        f"`{source_name}` there, or one with another number of children. Merge what `parameters` gave of the same "
        "module:\n"
        "    module = module.merge(sharedtree.tree.map(update, module.parameters()))",
        (text,),
    )
