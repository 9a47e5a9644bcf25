"""Fits tangents and cotangents, which users write as trees, to the leaves of the tree to which they belong.

Each differentiated leaf gets one tangent or cotangent. A user's tree may have other ties than the tree to which it
belongs:

- The cotangent of a tied leaf is the sum over its paths. Different objects at its paths are *shares*, which are added
  up. One object at several paths is the *whole sum*, and counts once. But a derivative rule may also mean it as the
  share of each path. So from rules it is accepted only if it is known to be the whole sum.
- The tangent of a tied leaf must be one object at all paths.

The *value tree* is the user's tree. A *value* is a tangent or cotangent in it, for a leaf at one of its paths.

A leaf is *outside* if plain containers alone lead to it, with no module on the way. Outside modules, leaves are treated
as JAX treats them: the transform itself accepts or refuses their values.

    differentiated   (Pair(w, [w, 3]), x)          leaves   w, x
    cotangents       (Pair(a, [b, None]), c)       fitted   a + b, c
    tangents         (Pair(a, [a, None]), c)       fitted   a, c
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
from ..core._sharing import Mismatch, RecordPair, op_text, pairs
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Op, Path, Record, canonical_records, edges, records_at_several_paths
from ..ties._list_ties import is_inexact
from ._joining_trees import describe_beside


class Fit(NamedTuple):
    """Rules by which tangents or cotangents are fitted to a tree.

    Attributes:
        title: name of the transform, for errors.
        rules: how the user's tree is walked.
        are_cotangents: True for cotangents, of which a tied leaf may have several, to be added up. False for tangents.
        none_is_zero: True if None stands for zero, also in place of a whole subtree.
        is_of_rule: True if a derivative rule returned the value tree. Then its static values are not compared, and its
            values for leaves that are not differentiated are ignored. Values of several dtypes are converted to the
            leaf's dtype before they are added up.
        whole_sums: the objects known to be the whole sum over their paths. None if one object at several paths always
            counts as the whole sum.
    """

    title: str
    rules: Rules
    are_cotangents: bool
    none_is_zero: bool
    is_of_rule: bool = False
    whole_sums: Container[Any] | None = None


class ValueAtPath(NamedTuple):
    """The value for a leaf at one of the leaf's paths. None stands for zero."""

    value: Any
    path: Path


def as_tuple(tree: FlatDag) -> FlatDag:
    """Returns a tree of call arguments with another root: a tuple of the positional arguments.

    Tangents of the arguments are written in this shape. Keyword arguments are left out, for they have no tangents.

    Args:
        tree: the arguments of a call, with an `Arguments` at the root. The root is the last record.
    """
    tuple_type = node_type_of(())
    assert tuple_type is not None
    op, children = tree.records[tree.root]
    assert type(op) is Node
    # The aux data of an `Arguments` begin with the names of the positional arguments, which are its first children.
    positional_names, _, _ = op.aux.peek()
    children = children[: len(positional_names)]
    root = Node(tuple_type, Static(None), tuple_type.keys_of(children))
    return FlatDag([*tree.records[: tree.root], (root, children)], tree.root, tree.objects)


def fit_to_leaves(tree: FlatDag, value_tree: Any, name: str, fit: Fit) -> dict[int, Any]:
    """Finds the tangent or cotangent of each leaf of a tree in a user's tree.

    Args:
        tree: the tree that is differentiated. Of its leaves only the types count.
        value_tree: the tangents or cotangents, in the shape of `tree`.
        name: name of `value_tree` in errors.
        fit: how the values are fitted.

    Returns:
        Record of a leaf → the one value for all paths of the leaf, in the order of the leaves. The value is None for
        zero and, in modules, for a leaf that is not differentiated. Leaves at whose paths there is no value are
        missing.

    Raises:
        SharingMismatchError: if the value tree has another shape, if a tied leaf has several tangents, if cotangents
            that would be added up differ in shape, or if nobody knows whether one object at several paths is the whole
            sum or the share of each path.
    """
    # Under Equinox's filters, anything but an array is static outside modules too, and has no tangent.
    records, outside = tree.records, set[int]() if fit.rules.filtered else tree.outside
    tags = Tags()
    _, value_records, value_root = walk(value_tree, tags, fit.rules, name)
    values_of: dict[int, list[ValueAtPath]] = {}
    matched: list[RecordPair] = []
    # Walk both trees together, and collect the values of each record. `pairs` yields the two records at each path. If
    # they are nodes of one class with equally many children, it goes on to the children. Otherwise it asks the lambda
    # if the pair is right. The lambda always says yes, so there is no `Mismatch`. `_describe_misfit` judges pairs
    # below.
    for pair in pairs(tree, FlatDag(value_records, value_root), lambda _record, _value_record: True):
        assert not isinstance(pair, Mismatch)
        number = pair.left
        value: Any = tags.objects[pair.right]
        # None stands for zero, also for each record of a whole subtree.
        if value is None and fit.none_is_zero:
            for descendant, path in edges(records, [(pair.path, number)]):
                values_of.setdefault(descendant, []).append(ValueAtPath(None, path))
            continue
        # Among the cotangents of a rule, an array may stand for a whole subtree, as in JAX. It is the value at each
        # path in there. So a leaf at several of these paths gets the array times the number of paths. (A tangent must
        # have the whole tree, in JAX as well.)
        (op, _), (value_op, _) = records[number], value_records[pair.right]
        is_prefix = type(value_op) is not Node and type(op) is Node and _is_array_or_number(value)
        if fit.is_of_rule and fit.are_cotangents and is_prefix:
            for leaf_number, count in num_paths(records, number).items():
                sum_of_paths = _times(count, value)
                values_of.setdefault(leaf_number, []).append(ValueAtPath(sum_of_paths, pair.path))
            continue
        # The leaf of the tree. `_OUTSIDE` stands for a leaf outside modules, and None for a record that is no leaf.
        leaf = _OUTSIDE if number in outside else tree.leaves.get(number)
        misfit = _describe_misfit(records[number], value_records[pair.right], value, leaf, fit)
        if misfit:
            path = name + jtu.keystr(pair.path)
            # The error suggests to filter the value. A filter for arrays and numbers would keep a module's static
            # number, so there the filter is for arrays alone.
            filter_name = "is_inexact_array" if type(records[number][0]) is Static else "is_inexact_array_like"
            kind = "cotangent" if fit.are_cotangents else "tangent"
            # A user passes cotangents for a result and tangents for arguments. A rule returns cotangents for arguments
            # and tangents for a result.
            owner = "result" if fit.are_cotangents != fit.is_of_rule else "argument"
            raise SharingMismatchError(
                f"`{path}` must be {misfit}.\n"
                f"A {kind} for `{fit.title}` has the structure of the {owner} that it belongs to, with None where that "
                f"is not differentiated{' or the value is zero' if fit.none_is_zero else ''}. For example, all ones:\n"
                f"    {kind} = sharedtree.tree.map(jnp.ones_like, sharedtree.tree.filter({owner}, eqx.{filter_name}))",
                (path,),
            )
        values_of.setdefault(number, []).append(ValueAtPath(value, pair.path))
        matched.append(pair)
    if fit.whole_sums is not None:
        # Positions in `matched` of the values of differentiated leaves that are not known to be whole sums. At several
        # paths, such an object may be the whole sum or the share of each path.
        doubtful: list[int] = []
        for i, pair in enumerate(matched):
            is_differentiated = is_inexact(tree.leaves.get(pair.left, 0))
            if is_differentiated and tags.objects[pair.right] not in fit.whole_sums:
                doubtful.append(i)
        _refuse_doubtful_objects(doubtful, matched, tree, value_records, name, fit)
    value_of: dict[int, Any] = {}
    for number in tree.leaf_numbers:
        if number in values_of:
            is_outside = number in outside
            value_of[number] = _value_for_all_paths(values_of[number], tree.leaves[number], name, fit, is_outside)
    return value_of


_OUTSIDE = object()
"""Stands for any leaf outside modules. The transform itself accepts or refuses its value."""


def _is_array_or_number(value: Any) -> bool:
    """Returns True for an array, a number, and a symbolic zero of JAX."""
    return is_number(value) or isinstance(value, SymbolicZero) or hasattr(value, "dtype")


def num_paths(records: Sequence[Record], root: int) -> dict[int, int]:
    """Counts the paths from a record to each leaf below it.

        records of Pair(w, [w, b])     →     {w: 2, b: 1}

    Args:
        records: the records of a tree.
        root: the record at which the paths begin.

    Returns:
        Record of a leaf → number of paths from the root to the leaf.

    Cost: linear in the records.
    """
    _, numbers = canonical_records(root, lambda number: records[number])
    counts = dict.fromkeys(numbers, 0)
    counts[root] = 1
    # `numbers` has children before their parents. In reverse, the count of a record is complete when its turn comes.
    for number in reversed(numbers):
        for child in records[number][1]:
            counts[child] += counts[number]
    return {number: count for number, count in counts.items() if records[number][0] is LEAF}


def _describe_misfit(record: Record, value_record: Record, value: Any, leaf: Any, fit: Fit) -> str | None:
    """Says why a value does not fit the record to which it belongs. Returns None if it fits.

    Otherwise returns words for what would fit and what there is: `an array or a number, but is …`.

    Args:
        record: record of the tree that is differentiated.
        value_record: record of the value tree at the same path.
        value: object of `value_record`.
        leaf: the leaf of the tree. `_OUTSIDE` if it is outside modules. None if `record` is no leaf.
        fit: how the values are fitted.
    """
    (op, children), (value_op, value_children) = record, value_record
    is_array = _is_array_or_number(value)
    if type(op) is Node:
        fits = False
        if type(value_op) is Node and op.type.cls is value_op.type.cls and len(children) == len(value_children):
            # A rule may return a module with other static values, but not with children of other names.
            fits = op == value_op or (fit.is_of_rule and not op.type.is_plain and op.keys == value_op.keys)
        expected = _in_words(op, value_op, len(children))
    elif leaf is _OUTSIDE:
        # Only a container is refused here. The transform itself refuses other values that it cannot take.
        fits, expected = is_array or value is None or type(value_op) is not Node, "an array or a number"
    elif op is LEAF and is_inexact(leaf):
        fits, expected = is_array, "an array or a number, since it belongs to a leaf that is differentiated"
    else:
        # From a rule, any value for a static value is ignored, and any array or number for a leaf that is not inexact.
        is_ignored = fit.is_of_rule and (op is not LEAF or is_array)
        # A user may make a tangent with `tree.map`, which leaves static values in it. They are ignored. But a float
        # that equals the static one may be meant as its tangent. If it were ignored, the tangent would be lost without
        # an error. So it does not fit. In a cotangent it fits, because static values of a result depend on nothing.
        is_equal_static = (
            type(op) is Static and op == value_op and (fit.are_cotangents or type(op.peek()) not in (float, complex))
        )
        fits = value is None or is_ignored or _is_float0(value) or is_equal_static
        expected = "None, since it belongs to a value that is not differentiated"
    actual = "None" if value is None else _in_words(value_op, op, len(value_children))
    return None if fits else f"{expected}, but is {actual}"


def _in_words(op: Op, other_op: Op, num_children: int) -> str:
    """Describes the operation of a record for errors.

    Args:
        op: the operation.
        other_op: the operation with which it is compared. If both are nodes of one class, the description names the
            static data in which they differ.
        num_children: number of children of the record.
    """
    is_same_class = type(op) is Node and type(other_op) is Node and op.type.cls is other_op.type.cls
    return describe_beside(op, other_op) if is_same_class and op != other_op else op_text(op, num_children)


def _value_for_all_paths(values: Sequence[ValueAtPath], leaf: Any, name: str, fit: Fit, is_outside: bool) -> Any:
    """Returns the one value that a leaf gets for all of its paths. None stands for zero.

    Args:
        values: the values at the paths, at least one. An array at several paths is there once. None and numbers are
            there for each path.
        leaf: the leaf to which they belong.
        name: name of the value tree in errors.
        fit: how the values are fitted.
        is_outside: True if the leaf is outside modules.

    Raises:
        SharingMismatchError: if there are several tangents, or cotangents that cannot be added.
    """
    if is_outside and (len(values) == 1 or not is_inexact(leaf)):
        # The transform itself accepts or refuses this value. A leaf that is not inexact has no sum.
        return values[0].value
    if not is_inexact(leaf):
        return None
    # Several cotangents: add them up.
    nonzero = [item for item in values if not _is_zero(item.value)]
    if fit.are_cotangents and nonzero:
        return _add_cotangents(nonzero, leaf, name, fit)
    if fit.is_of_rule and not nonzero:
        return None
    # Tangents, or zeros alone. Several tangents must be one object. They are compared by `id`, which is valid since
    # `values` keeps them alive. Numbers have no identity: equal numbers of one type count as one.
    distinct: dict[Any, ValueAtPath] = {}
    for item in values:
        distinct.setdefault(Static(item.value) if is_number(item.value) else id(item.value), item)
    if len(distinct) > 1 and not fit.are_cotangents:
        paths = _printed_paths(distinct.values(), name)
        raise SharingMismatchError(
            f"`{fit.title}` differentiates one leaf at {listed(paths)}, but the tangents there are {len(paths)} "
            "objects. Nothing says which of them is right.\n"
            "A tied leaf has one tangent. Make tangents with a function that keeps ties, or if their values are "
            "equal, tie them again:\n"
            "    tangent = sharedtree.tree.map(f, value)\n"
            "    tangent = sharedtree.retie(tangent, like=value)",
            paths,
        )
    return values[0].value


def _refuse_doubtful_objects(
    doubtful: Sequence[int],
    matched: Sequence[RecordPair],
    tree: FlatDag,
    value_records: Sequence[Record],
    name: str,
    fit: Fit,
) -> None:
    """Raises if a rule returned one object at several paths of a tie, and nobody knows whether it is the whole sum.

        tree          Pair(w, w)
        value tree    Pair(g, g)      `g` may be the sum over both paths, or the share of each: raises
                      Pair(g, h)      two shares, which are added up

    Args:
        doubtful: positions in `matched` of the values that are not known to be whole sums.
        matched: pairs of a record of the tree and a record of the value tree, at the same path. The pair of the roots
            comes first.
        tree: the tree that is differentiated.
        value_records: records of the value tree.
        name: name of the value tree in errors.
        fit: how the values are fitted.

    Raises:
        SharingMismatchError: if a doubtful value is at several paths.
    """
    # 1. Make the DAG whose records are the pairs. Two paths lead to the same pair if they lead to the same record in
    # the tree, and also to the same record in the value tree.
    position_of = {(pair.left, pair.right): i for i, pair in enumerate(matched)}
    pair_records: list[Record] = []
    for pair in matched:
        op, children = tree.records[pair.left]
        child_pairs = zip(children, value_records[pair.right][1], strict=True) if children else ()
        # A pair of children may be missing in `matched`, if None or an array stands for a whole subtree. The last
        # record, which is added below, stands for all missing pairs.
        pair_records.append((op, tuple([position_of.get(child, len(matched)) for child in child_pairs])))
    pair_records.append((LEAF, ()))
    # 2. Look for a doubtful value at several paths. The roots are the pair at position 0.
    at_several = records_at_several_paths(pair_records, [0])
    leaf = next((i for i in doubtful if i in at_several), None)
    if leaf is None:
        return
    # 3. Name the outermost shared object, which may be a module that holds the leaf.
    paths_of: dict[int, list[str]] = {}
    for number, path in edges(pair_records, [((), 0)]):
        paths_of.setdefault(number, []).append(name + jtu.keystr(path))
    candidates = [i for i, paths in paths_of.items() if len(paths) > 1]
    shared = next(i for i in candidates if leaf in {number for number, _ in edges(pair_records, [((), i)])})
    op, children = pair_records[shared]
    kind = "an array" if shared == leaf else op_text(op, len(children))
    raise SharingMismatchError(
        f"A rule of `{fit.title}` returned one object, {kind}, as {listed(paths_of[shared])}, which are tied. It is "
        "not clear whether that is the gradient of each path or already their sum.\n"
        "If it is the gradient of each path, untie it. The gradients are then added up:\n"
        "    cotangent = sharedtree.untie(cotangent)\n"
        "If it is the sum already, tie it like the argument `model`:\n"
        "    cotangent = sharedtree.retie(cotangent, like=model)",
        paths_of[shared],
    )


def _add_cotangents(values: Sequence[ValueAtPath], leaf: Any, name: str, fit: Fit) -> Any:
    """Adds up the cotangents of a leaf.

    Args:
        values: the cotangents, at least one, without those that stand for zero (see `_is_zero`).
        leaf: the leaf.
        name: name of the value tree in errors.
        fit: how the values are fitted.

    Raises:
        SharingMismatchError: if the cotangents differ in shape.
    """
    shapes = [jnp.shape(item.value) for item in values]
    if any(shape != shapes[0] for shape in shapes):
        paths = _printed_paths(values, name)
        raise SharingMismatchError(
            f"The cotangents at {listed(paths)} are added up, because `{fit.title}` differentiates one leaf there, "
            f"but their shapes are {' and '.join(map(str, shapes))}. Give each the shape of the leaf:\n"
            "    cotangent = jnp.broadcast_to(cotangent, leaf.shape)",
            paths,
        )
    summands = [item.value for item in values]
    if fit.is_of_rule:
        leaf_type, types = jnp.result_type(leaf), list(map(jnp.result_type, summands))
        have_one_type = len(set(types)) == 1
        # Convert the summands to the dtype of the leaf. Inexact arrays stay as they are if no conversion is needed: if
        # all summands have one dtype, or if it is that of the leaf. `asarray` would change a weakly typed array, even
        # if the dtype is the same. Python numbers and integer arrays are always converted.
        for i, (summand, dtype) in enumerate(zip(summands, types, strict=True)):
            has_right_type = have_one_type or dtype == leaf_type
            if not (has_right_type and hasattr(summand, "dtype") and is_inexact(summand)):
                summands[i] = jnp.asarray(summand, leaf_type)
    return functools.reduce(operator.add, summands)


def _times(count: int, cotangent: Any) -> Any:
    """Returns the sum of so many equal cotangents. A symbolic zero and a float0 array cannot be multiplied."""
    return cotangent if count == 1 or _is_zero(cotangent) else count * cotangent


def _is_zero(value: Any) -> bool:
    """Returns True for None, a symbolic zero of JAX, and float0 arrays. An array full of zeros is none of these."""
    return value is None or isinstance(value, SymbolicZero) or _is_float0(value)


def _is_float0(value: Any) -> bool:
    """Returns True for an array of JAX's dtype for tangents of leaves that are not inexact."""
    return getattr(value, "dtype", None) == jax.dtypes.float0


def _printed_paths(values: Iterable[ValueAtPath], name: str) -> list[str]:
    """Returns the paths of values as errors print them, for example `cotangent[0].w`."""
    return [name + jtu.keystr(item.path) for item in values]
