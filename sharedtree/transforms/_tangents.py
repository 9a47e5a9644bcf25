"""Tangents and cotangents: what users give in the shape of a tree, fitted to its leaves, and given back as trees.

Each leaf that is differentiated has one. What a user gives may have other ties. The cotangent of a tied leaf is the
sum over its paths, where one object at several paths counts once, if it is known to be the whole sum; its tangent must
be one.

    differentiated   (Pair(w, [w, 3]), x)          leaves   w, x
    cotangents       (Pair(a, [b, None]), c)       fitted   a + b, c
    tangents         (Pair(a, [a, None]), c)       fitted   a, c            as a tree   (Pair(a, [a, None]), c)
"""

import functools
import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from ..core._errors import SharingMismatchError
from ..core._node_types import node_type_of
from ..core._pack_and_unpack import Rules, Tags, walk
from ..core._prefix_trees import is_number
from ..core._printing import listed
from ..core._sharing import Mismatch, RecordPair, name_of, pairs
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Record, at_several_paths, canonical, edges
from ..ties._list_ties import is_inexact
from ._joining_trees import describe_beside


class Fit(NamedTuple):
    """How tangents and cotangents are fitted to a tree.

    Attributes:
        title: of the transform.
        rules: how what is given is walked.
        adds_up: whether a tied leaf may have several, which are summed, as cotangents are.
        may_lack: whether None stands for zero, and for a whole part of zeros.
        is_of_rule: whether a rule returned them, whose static data and whatever it has for what is not differentiated
            are of no concern. What it has for a leaf is converted to the type of the leaf where parts have several.
        whole: what is known to be the whole sum, if that has to be known of an object at several paths.
    """

    title: str
    rules: Rules
    adds_up: bool
    may_lack: bool
    is_of_rule: bool = False
    whole: Container[Any] | None = None


class Part(NamedTuple):
    """What was given for a leaf at a path."""

    value: Any
    path: Path


def as_tuple(tree: FlatDag) -> FlatDag:
    """Positional arguments as a tuple, in the shape of which tangents are given."""
    whole = node_type_of(())
    assert whole is not None
    op, children = tree.records[tree.root]
    assert type(op) is Node
    positional, _, _ = op.aux.peek()
    children = children[: len(positional)]
    top = Node(whole, Static(None), whole.keys_of(children))
    return FlatDag([*tree.records[: tree.root], (top, children)], tree.root, tree.objects)


def fitted(tree: FlatDag, given: Any, name: str, fit: Fit) -> dict[int, Any]:
    """What was given for each leaf of a tree, by its number.

    Args:
        tree: of whose leaves only the types count.
        given: a tree of its shape.
        name: what it is called in errors.
        fit: how it is fitted.

    Raises:
        SharingMismatchError: if it has another shape, a tied leaf has several tangents, or cotangents that are to be
            added differ in shape.
    """
    # Under Equinox's filters what is no array is static outside modules, too, and has no tangent.
    records, outside = tree.records, set[int]() if fit.rules.filtered else tree.outside
    tags = Tags()
    _, others, other_root = walk(given, tags, fit.rules, name)
    found: dict[int, list[Part]] = {}
    met: list[RecordPair] = []
    for pair in pairs(tree, FlatDag(others, other_root), lambda i, j: True):
        assert not isinstance(pair, Mismatch)
        number = pair.left
        value: Any = tags.objects[pair.right]
        if value is None and fit.may_lack:
            for below, path in edges(records, [(pair.path, number)]):
                found.setdefault(below, []).append(Part(None, path))
            continue
        is_prefix = type(others[pair.right][0]) is not Node and type(records[number][0]) is Node and _is_array(value)
        if fit.is_of_rule and is_prefix:  # for all leaves of a part, as JAX has it
            for below, count in num_paths(records, number).items():
                of_all = value if value is None or count == 1 else count * value
                found.setdefault(below, []).append(Part(of_all, pair.path))
            continue
        own = _OUTSIDE if number in outside else tree.leaves.get(number)
        fault = _fault(records[number], others[pair.right], value, own, fit)
        if fault:
            path = name + jtu.keystr(pair.path)
            # A filter for what is like an array keeps a module's static numbers.
            kept = "is_inexact_array" if type(records[number][0]) is Static else "is_inexact_array_like"
            raise SharingMismatchError(
                f"`{path}` does not fit what `{fit.title}` differentiates: there must be {fault}.\n"
                "Tangents and cotangents have the shape of the value that they belong to, with None where it is not "
                f"differentiated{' or where they are zero' if fit.may_lack else ''}:\n"
                f"    tangent = sharedtree.tree.map(f, sharedtree.tree.filter(value, eqx.{kept}))",
                (path,),
            )
        found.setdefault(number, []).append(Part(value, pair.path))
        met.append(pair)
    if fit.whole is not None:
        doubtful = [
            i
            for i, pair in enumerate(met)
            if is_inexact(tree.leaves.get(pair.left, 0)) and tags.objects[pair.right] not in fit.whole
        ]
        _require_one_path(doubtful, met, tree, others, name, fit)
    return {n: _one(found[n], tree.leaves[n], name, fit, n in outside) for n in tree.leaf_numbers if n in found}


_OUTSIDE = object()


def _is_array(value: Any) -> bool:
    return is_number(value) or isinstance(value, SymbolicZero) or hasattr(value, "dtype")


def num_paths(records: Sequence[Record], root: int) -> dict[int, int]:
    """How many paths lead from a record to each leaf below it. Cost: linear in the records."""
    _, below = canonical(root, lambda number: records[number])
    counts = dict.fromkeys(below, 0)
    counts[root] = 1
    for number in reversed(below):  # parents come after their children
        for child in records[number][1]:
            counts[child] += counts[number]
    return {number: count for number, count in counts.items() if records[number][0] is LEAF}


def _fault(record: Record, other: Record, value: Any, leaf: Any, fit: Fit) -> str | None:
    """What there must be and what there is, if a tangent or cotangent cannot be where a record is.

    Args:
        record: of the tree.
        other: of what was given.
        value: likewise, the object.
        leaf: of the tree; `_OUTSIDE` modules, where that is the transform's to judge.
        fit: how tangents are fitted.
    """
    (op, children), (kind, below) = record, other
    is_array = _is_array(value)
    if type(op) is Node:
        is_alike = type(kind) is Node and op.type.cls is kind.type.cls and len(children) == len(below)
        fits = is_alike and (op == kind or (fit.is_of_rule and not op.type.is_plain))
        expected = _in_words(op, kind, len(children))
    elif leaf is _OUTSIDE:
        fits, expected = is_array or value is None or type(kind) is not Node, "an array or a number"
    elif op is LEAF and is_inexact(leaf):
        fits, expected = is_array, "a leaf that is differentiated"
    else:
        is_of_no_concern = fit.is_of_rule and (op is not LEAF or is_array)
        # A number that equals the static one may be meant as its tangent, which would be lost. A cotangent would not:
        # what is static in a result depends on nothing.
        rides_along = type(op) is Static and op == kind and (fit.adds_up or type(op.peek()) not in (float, complex))
        fits = value is None or is_of_no_concern or _is_float0(value) or rides_along
        expected = "None, for it is not differentiated"
    found = "None" if value is None else _in_words(kind, op, len(below))
    return None if fits else f"{expected}, but there is {found}"


def _in_words(op: Op, other: Op, num_children: int) -> str:
    is_same_class = type(op) is Node and type(other) is Node and op.type.cls is other.type.cls
    return describe_beside(op, other) if is_same_class and op != other else name_of(op, num_children)


def _one(parts: Sequence[Part], leaf: Any, name: str, fit: Fit, is_outside: bool) -> Any:
    """What a leaf gets of what there is for it: an object once, None and numbers at each path."""
    if is_outside and (len(parts) == 1 or not is_inexact(leaf)):
        return parts[0].value  # the transform judges it
    if not is_inexact(leaf):
        return None
    given = [part for part in parts if not _is_zero(part.value)]
    if fit.adds_up and given:
        return _sum(given, leaf, name, fit)
    if fit.is_of_rule and not given:
        return None
    # Other objects are alive in `parts`. Equal numbers of one type are one.
    found: dict[Any, Part] = {}
    for part in parts:
        found.setdefault(Static(part.value) if is_number(part.value) else id(part.value), part)
    if len(found) > 1 and not fit.adds_up:
        paths = _paths(found.values(), name)
        raise SharingMismatchError(
            f"`{fit.title}` differentiates one leaf at {listed(paths)}, but the tangents there are {len(paths)} "
            "objects. Which of them is meant cannot be known.\n"
            "A tied leaf moves as one. Make tangents with a function that keeps ties, or if they are copies of one "
            "value, tie them again:\n"
            "    tangent = sharedtree.tree.map(f, value)\n"
            "    tangent = sharedtree.retie(tangent, like=value)",
            paths,
        )
    return parts[0].value


def _require_one_path(
    leaves: Sequence[int], met: Sequence[RecordPair], shape: FlatDag, others: Sequence[Record], name: str, fit: Fit
) -> None:
    """Raises if one object that a rule returned is at several paths of a tie, and holds such a leaf.

    Args:
        leaves: of which nobody has said that they are whole, by their places in `met`.
        met: the pairs of a record and one of what was returned, the roots first.
        shape: of what is differentiated.
        others: the records of what was returned.
        name: what it is called in errors.
        fit: how it is taken.
    """
    place = {(pair.left, pair.right): i for i, pair in enumerate(met)}
    table: list[Record] = []
    for pair in met:
        op, children = shape.records[pair.left]
        below = zip(children, others[pair.right][1], strict=True) if children else ()
        table.append((op, tuple([place.get(each, len(met)) for each in below])))
    table.append((LEAF, ()))  # for what is None
    several = at_several_paths(table, [0])
    one = next((i for i in leaves if i in several), None)
    if one is None:
        return
    ways: dict[int, list[str]] = {}
    for number, path in edges(table, [((), 0)]):
        ways.setdefault(number, []).append(name + jtu.keystr(path))
    above = next(i for i, paths in ways.items() if len(paths) > 1 and one in {n for n, _ in edges(table, [((), i)])})
    op, children = table[above]
    kind = "an array" if above == one else name_of(op, len(children))
    raise SharingMismatchError(
        f"`{fit.title}` differentiates one leaf at several paths, and a rule returned one object, {kind}, at "
        f"{listed(ways[above])}. Whether that is each path's share or already their sum cannot be known.\n"
        "Say which. For shares, which are added up:\n"
        "    g = sharedtree.untie(g)\n"
        "For what is the whole gradient and counts once:\n"
        "    g = sharedtree.retie(g, like=m)",
        ways[above],
    )


def _sum(parts: Sequence[Part], leaf: Any, name: str, fit: Fit) -> Any:
    shapes = [jnp.shape(part.value) for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        paths = _paths(parts, name)
        raise SharingMismatchError(
            f"The cotangents at {listed(paths)} add up, for `{fit.title}` differentiates one leaf there, but their "
            f"shapes are {' and '.join(map(str, shapes))}. Give each the shape of the leaf:\n"
            "    cotangent = jnp.broadcast_to(cotangent, leaf.shape)",
            paths,
        )
    values = [part.value for part in parts]
    if fit.is_of_rule:
        own, types = jnp.result_type(leaf), list(map(jnp.result_type, values))
        are_of_one_type = len(set(types)) == 1
        # A conversion to the same type would lose that it is weak.
        values = [
            value
            if (are_of_one_type or dtype == own) and hasattr(value, "dtype") and is_inexact(value)
            else jnp.asarray(value, own)
            for value, dtype in zip(values, types, strict=True)
        ]
    return functools.reduce(operator.add, values)


def _is_zero(value: Any) -> bool:
    return value is None or isinstance(value, SymbolicZero) or _is_float0(value)


def _is_float0(value: Any) -> bool:
    return getattr(value, "dtype", None) == jax.dtypes.float0


def _paths(parts: Iterable[Part], name: str) -> list[str]:
    return [name + jtu.keystr(part.path) for part in parts]
