"""Tangents and cotangents: what users give in the shape of packed trees, packed like them, and given back as modules.

Each leaf that is differentiated has one. What a user gives may have other ties. The cotangent of a tied leaf is the
sum over its paths, where one object at several paths counts once, if it is known to be the whole sum; its tangent must
be one.

    differentiated   (Pair(w, [w, 3]), x)          packed   (Packed([w]), x)
    cotangents       (Pair(a, [b, None]), c)       packed   (Packed([a + b]), c)
    tangents         (Pair(a, [a, None]), c)       packed   (Packed([a]), c)       unpacked   (Pair(a, [a, None]), c)
"""

import functools
import itertools
import operator
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from .._context import Policy
from .._distinct import distinct
from .._errors import SharingMismatchError
from .._graph import Tags, build, walk
from .._packed import Packed
from .._prefix import is_number
from .._sharing import Mismatch, Pair, Shape, name_of, pairs
from .._statics import Static
from .._structure import LEAF, Node, Op, Path, Record, edges, intern
from .._text import listed
from .._ties import is_inexact
from .._whole_gradients import at_several_paths, note_tied
from ._crossed import Graph, is_packed
from ._crossing import nothing_given
from ._differentiated import Differentiated
from ._joining import described
from ._likes import as_entered, is_node, without_statics
from ._packing import OUTSIDE, unpack_result


class Fit(NamedTuple):
    """How tangents and cotangents are fitted to a tree.

    Attributes:
        title: of the transform.
        policy: what counts as sharing.
        adds_up: whether a tied leaf may have several, which are summed, as cotangents are.
        may_lack: whether None stands for zero, and for a whole part of zeros.
        is_of_rule: whether a rule returned them, whose static data and whatever it has for what is not differentiated
            are of no concern. What it has for a leaf is converted to the type of the leaf where parts have several.
        whole: what is known to be the whole sum, if that has to be known of an object at several paths.
    """

    title: str
    policy: Policy
    adds_up: bool
    may_lack: bool
    is_of_rule: bool = False
    whole: Container[Any] | None = None


class Part(NamedTuple):
    """What was given for a leaf at a path."""

    value: Any
    path: Path


def unpack_tangents(tree: Any, static: Any = None, *, is_gradient: bool = False) -> Any:
    """Tangents, or whatever else there is for each leaf that is differentiated, as modules; the ties are kept.

    Args:
        tree: with a packed module, or what the transform sees of one, for each module; all of one numbering.
        static: what stands in the place of static leaves.
        is_gradient: whether each leaf is the sum over its paths, which a rule that returns it is believed.
    """
    nothing = Static(static)

    def module(item: Any) -> Any:
        if not is_node(item):
            return item
        known, leaves = item.structure, as_entered(item).leaves
        if is_packed(item):
            leaves = [None if _is_float0(leaf) else leaf for leaf in leaves]
        records = tuple(without_statics(known.records, nothing))
        return Packed(leaves, intern(records, known.root, known.base, known.maker, known.noted, known.tied_values))

    # Under `jax.jit` JAX hands one tracer for all cotangents that are equal. That is no tie of anyone's.
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero))
    tree = jtu.tree_map(module, treedef.unflatten(distinct(leaves)), is_leaf=is_node)
    if is_gradient:
        graph = Graph.of(tree)
        note_tied(graph.records, graph.roots, graph.leaves)
    return unpack_result(tree, nothing_given)


def pack_tangents(tree: Any, given: Any, name: str, fit: Fit) -> Any:
    """What a user gave in the shape of a packed tree, packed like that tree; the inverse of `unpack_tangents`.

    Args:
        tree: packed, or as the transform sees it; all of one numbering. Of its leaves only the types count.
        given: a tree with modules.
        name: what it is called in errors.
        fit: how it is fitted.

    Raises:
        SharingMismatchError: if it has another shape, a tied leaf has several tangents, or cotangents that are to be
            added differ in shape.
    """
    modules = Graph.of(as_entered(tree, _ZEROS))
    items, outer, root = walk(tree, Tags(), OUTSIDE)
    records, numbers, each = list(modules.records), list[int](), iter(items)
    for op, children in outer:
        item: Any = next(each) if op is LEAF else None
        if is_node(item):
            numbers.append(item.structure.root)
        else:
            numbers.append(len(records))
            records.append((op, tuple([numbers[child] for child in children])))
    tags = Tags()
    _, others, other_root = walk(given, tags, fit.policy.rules, name)
    found: dict[int, list[Part]] = {}
    met: list[Pair] = []
    for pair in pairs(Shape(records, numbers[root]), Shape(others, other_root), lambda i, j: True):
        assert not isinstance(pair, Mismatch)
        number, value = pair.left, tags.objects[pair.right]
        if value is None and fit.may_lack:
            for below, path in edges(records, [(pair.path, number)]):
                found.setdefault(below, []).append(Part(None, path))
            continue
        own = modules.leaves.get(number, _OUTSIDE if number >= len(modules.records) else None)
        fault = _fault(records[number], others[pair.right], value, own, fit)
        if fault:
            path = name + jtu.keystr(pair.path)
            raise SharingMismatchError(
                f"`{path}` does not fit what `{fit.title}` differentiates: there must be {fault}.\n"
                "Tangents and cotangents have the shape of the value that they belong to, with None where it is not "
                f"differentiated{' or where they are zero' if fit.may_lack else ''}:\n"
                "    tangent = sharedtree.tree.map(f, sharedtree.tree.filter(value, eqx.is_inexact_array_like))",
                (path,),
            )
        found.setdefault(number, []).append(Part(value, pair.path))
        met.append(pair)
    if fit.whole is not None:
        doubtful = [
            i
            for i, pair in enumerate(met)
            if is_inexact(modules.leaves.get(pair.left, 0)) and tags.objects[pair.right] not in fit.whole
        ]
        _require_one_path(doubtful, met, Shape(records, numbers[root]), others, name, fit)

    def like(item: Any, number: int) -> Any:
        if not is_node(item):
            return found[number][0].value
        each = zip(item.structure.leaf_numbers, as_entered(item, _ZEROS).leaves, strict=True)
        packed = Packed([_one(found[n], leaf, name, fit) for n, leaf in each], item.structure)
        return item.like(packed) if type(item) is Differentiated else packed

    table: list[Any] = []
    at = [number for number, (op, _) in zip(numbers, outer, strict=True) if op is LEAF]
    build(outer, [like(item, number) for item, number in zip(items, at, strict=True)], table)
    return table[root]


_OUTSIDE = object()

_ZEROS = itertools.repeat(itertools.repeat(0))
"""For what is not differentiated, of which this is the type: an integer."""


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
    is_array = is_number(value) or isinstance(value, SymbolicZero) or hasattr(value, "dtype")
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
        fits = value is None or is_of_no_concern or _is_float0(value) or (type(op) is Static and op == kind)
        expected = "None, for it is not differentiated"
    found = "None" if value is None else _in_words(kind, op, len(below))
    return None if fits else f"{expected}, but there is {found}"


def _in_words(op: Op, other: Op, num_children: int) -> str:
    is_same_class = type(op) is Node and type(other) is Node and op.type.cls is other.type.cls
    return described(op, other) if is_same_class and op != other else name_of(op, num_children)


def _one(parts: Sequence[Part], leaf: Any, name: str, fit: Fit) -> Any:
    """What a leaf gets of what there is for it: an object once, None and numbers at each path."""
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
    leaves: Sequence[int], met: Sequence[Pair], shape: Shape, others: Sequence[Record], name: str, fit: Fit
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
    kind = "array" if above == one else name_of(op, len(children))
    raise SharingMismatchError(
        f"`{fit.title}` differentiates one leaf at several paths, and a rule returned one {kind} at "
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
