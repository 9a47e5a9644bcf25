"""A program that was compiled or exported is made for arguments of one structure, and cannot be traced again.

So a call with other arguments says how they differ from those that it was made for:

    `f` was compiled for other arguments, and a program cannot be traced again:
        `model.embed` and `model.head` were one object, and are two
        `model.width` was the static value 4, and is the static value 8
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import tree_util as jtu

from .._dag import Dag
from .._errors import SharingMismatchError
from .._sharing import Mismatch, Shape, lost_ties, pairs, same_kind, shape_of
from .._structure import Node, Path
from .._text import MOST_PATHS
from .._ties import can_be_tied
from ._crossed import Graph, Names, packed_in
from ._joining import described
from ._packing import Call, positions


def require_made_for(known: Any, call: Call, names: Names, made: str, again: str) -> None:
    """Raises unless the arguments of a call are those that a program was made for.

    Args:
        known: the structure of the packed arguments that it was made for, positional ones and keywords.
        call: packed arguments.
        names: of the arguments.
        made: what the program is: `f` was compiled.
        again: how to make one for `args`, as code.

    Raises:
        SharingMismatchError: if the ties, classes or static values of modules are others. What is other outside
            modules the program itself says best.
    """
    given = jtu.tree_structure((call.args, call.kwargs))
    if given == known:
        return
    found = list(_differences(_graph(known), _graph(given), names))
    if not found:
        return
    lines = [f"    {line}" for line, _ in found[:MOST_PATHS]]
    lines += [f"    … and {len(found) - MOST_PATHS} more"] * (len(found) > MOST_PATHS)
    raise SharingMismatchError(
        "\n".join([f"{made} for other arguments, and a program cannot be traced again:", *lines])
        + f"\nMake another one for these arguments:\n    program = {again}",
        [path for _, paths in found for path in paths],
    )


def stand_in() -> jax.ShapeDtypeStruct:
    """What stands for a traced leaf."""
    return jax.ShapeDtypeStruct((), np.bool_)


def _graph(structure: Any) -> Graph:
    args, kwargs = structure.unflatten([stand_in() for _ in range(structure.num_leaves)])
    return Graph(module for position, tree in positions(args, kwargs) for module in packed_in(tree, position))


def _differences(before: Graph, after: Graph, names: Names) -> Iterator[tuple[str, list[str]]]:
    """How the modules of two graphs differ: the difference, and its paths."""
    places, others = (
        dict.fromkeys([(module.position, module.path) for module in graph.modules]) for graph in (before, after)
    )
    for place in {**places, **others}:
        if place not in places or place not in others:
            path = names.text(*place)
            was, now = ("a module", "none") if place in places else ("no module", "one")
            yield f"`{path}` was {was}, and is {now}", [path]
    if places == others:
        left, right = (graph.shape_named(lambda module: names.text(*module[:2])) for graph in (before, after))
        yield from _compared(left, right)


def _compared(left: Shape, right: Shape, above: Path = ()) -> Iterator[tuple[str, list[str]]]:
    """How two DAGs differ that are at the same path."""
    is_of_one_shape = True
    is_of_one_kind = same_kind(left, right)

    def agree(i: int, j: int) -> bool:
        return is_of_one_kind(i, j) or None not in (_in_dag(left, i), _in_dag(right, j))

    for pair in pairs(left, right, agree):
        path = jtu.keystr((*above, *pair.path))
        if isinstance(pair, Mismatch):
            was, now = pair.left, pair.right
        else:
            op, other = left.records[pair.left][0], right.records[pair.right][0]
            if op == other:
                continue
            one, two = _in_dag(left, pair.left), _in_dag(right, pair.right)
            if one is not None and two is not None:
                is_of_one_shape = False
                yield from _compared(one, two, (*above, *pair.path, jtu.GetAttrKey("tree")))
                continue
            was, now = described(op, other), described(other, op)
        is_of_one_shape = False
        yield f"`{path}` was {was}, and is {now}", [path]
    if is_of_one_shape:
        yield from _lost(left, right, above, "one object, and are two")
        yield from _lost(right, left, above, "two objects, and are one")


def _in_dag(shape: Shape, number: int) -> Shape | None:
    """What is in a record that is a `Dag`."""
    op = shape.records[number][0]
    return shape_of(op.aux.peek()) if type(op) is Node and op.type.cls is Dag else None


def _lost(left: Shape, right: Shape, above: Path, words: str) -> Iterator[tuple[str, list[str]]]:
    """The maximal ties of the one that the other lacks."""
    lost = lost_ties(left, right, same_kind(left, right))
    assert not isinstance(lost, Mismatch)
    records = {tie.record for tie in lost}
    for tie in lost:
        if can_be_tied(left.records[tie.record][0]) and not records.intersection(*tie.above):
            one, two = (jtu.keystr((*above, *path)) for path in tie.paths)
            yield f"`{one}` and `{two}` were {words}", [one, two]
