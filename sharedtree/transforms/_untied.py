"""A tie that enters a transform and does not leave it is reported, when the function is traced.

`jax.tree.map`, `optax.apply_updates` and `equinox.tree_at` take a tied model and return an untied one without a word.
So, when a function has been traced, each module in its results is compared with those in its arguments that it could
be a new version of: same class, same tree, same leaf types. And when a function is traced again, each module in its
arguments is compared with those of earlier traces, since the tie may have been lost between two calls.

Ties between separate arguments do not count, nor between the entries of an optax state: optimizer states and moving
averages begin as aliases of the model by accident, and part on the first step.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from .._context import Policy
from .._errors import UntiedError, UntiedWarning
from .._node_types import NodeType, carries_identity, is_namedtuple
from .._sharing import LostTie, Mismatch, Shape, lost_ties
from .._statics import Static
from .._structure import LEAF, Given, Node, Path, Record, Structure, Update, canonical, edges
from .._untying import Noted, is_untied_copy, was_meant


class Side(NamedTuple):
    """One side of a trace: its records, the objects behind them, and its maximal modules with what they are called."""

    records: Sequence[Record]
    objects: Sequence[Any]
    roots: Sequence[tuple[str, int]]


def report_lost_ties(entered: Side, left: Side, noted: Noted, policy: Policy) -> None:
    """Compares what left a function with what entered it.

    Args:
        entered: the arguments.
        left: the results; `Given` in them names records of the arguments.
        noted: the ties that were undone on purpose.
        policy: what to do.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore" or not left.roots:
        return
    tied = _modules_with_ties(entered)
    if not tied:
        return
    both = _in_one_table(entered, left)
    shape = _shapes(both)
    entrants = _by_shape(_modules(both, entered.roots), shape)
    results = _by_shape(_modules(both, both.roots), shape)
    reported: set[tuple[str, str]] = set()
    for text, before in tied:
        came, went = entrants[shape[before]], results.get(shape[before], [])
        # As many went as came: they are taken to correspond. Otherwise each might be a new version of each.
        matching = [went[came.index((text, before))]] if len(came) == len(went) else went
        for text_after, after in matching:
            if after < len(entered.records):
                continue  # it is what entered, passed through
            for tie in _lost_leaf_ties(both, before, after) or ():
                paths = (jtu.keystr(tie.paths[0]), jtu.keystr(tie.paths[1]))
                if paths not in reported and not was_meant(paths, noted):
                    reported.add(paths)
                    _report(policy, text, text_after, paths)


def _by_shape(modules: Iterable[tuple[str, int]], shape: Sequence[int]) -> dict[int, list[tuple[str, int]]]:
    found: dict[int, list[tuple[str, int]]] = {}
    for text, number in modules:
        found.setdefault(shape[number], []).append((text, number))
    return found


class SeenModules:
    """The modules that one wrapped function was traced with, as long as JAX's caches keep their structures alive."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Structure, list[tuple[Policy, Side]]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def compare(
        self, entered: Side, structures: Iterable[Structure], caller: Callable[[int], Any], policy: Policy
    ) -> None:
        """Compares what enters a function now with what entered it in earlier traces, and remembers it.

        Args:
            entered: the arguments.
            structures: of its maximal modules, in order.
            caller: number → the caller's object.
            policy: what to do.

        Raises:
            UntiedError: under `Policy(on_untie="error")`.
        """
        with self._lock:
            earlier = [side for known in self._seen.values() for under, side in known if under.arrays == policy.arrays]
        for structure, (text, root) in zip(structures, entered.roots, strict=True):
            now, numbers = _alone(entered, text, root)
            if policy.on_untie != "ignore":
                leaves = [name for name in numbers if entered.records[name][0] is LEAF]
                parted = {numbers[name] for name in leaves if is_untied_copy(caller(name))}
                _compare_with_earlier(now, parted, earlier, policy)
            with self._lock:
                self._seen.setdefault(structure, []).append((policy, now))


def _compare_with_earlier(now: Side, parted: set[int], earlier: Sequence[Side], policy: Policy) -> None:
    lost: list[LostTie] = []
    for before in earlier:
        if before.roots[0][0] != now.roots[0][0]:
            continue  # another argument
        both = _in_one_table(before, now)
        old, new = before.roots[0][1], both.roots[0][1]
        missing = _lost_leaf_ties(both, old, new)
        if missing == []:
            return
        if missing and not _lost_leaf_ties(both, new, old):
            offset = len(before.records)
            lost = [tie for tie in missing if not any(number - offset in parted for number in tie.parts)]
    for tie in lost:
        _report(policy, now.roots[0][0], None, (jtu.keystr(tie.paths[0]), jtu.keystr(tie.paths[1])))


def _alone(side: Side, text: str, root: int) -> tuple[Side, dict[int, int]]:
    """One module of a side, in a table of its own, with the types of its leaves in place of the leaves."""
    records, numbers = canonical(root, lambda number: side.records[number])
    kinds = [_kind_of(side.objects[number]) if side.records[number][0] is LEAF else None for number in numbers]
    return Side(records, kinds, [(text, len(records) - 1)]), numbers


def _kind_of(leaf: Any) -> Any:
    """The type of a traced leaf, as far as it tells one model from another."""
    if isinstance(leaf, _Kind):
        return leaf
    return _Kind(tuple(leaf.shape), leaf.dtype) if carries_identity(leaf) else _Kind((), type(leaf))


class _Kind(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


def _in_one_table(entered: Side, left: Side) -> Side:
    """Both sides in one table, the first one's numbers as they were; the roots are those of the second."""
    offset = len(entered.records)
    number = [op.number if type(op) is Given else offset + i for i, (op, _) in enumerate(left.records)]
    records = [
        (op.node if type(op) is Update else op, tuple([number[child] for child in children]))
        for op, children in left.records
    ]
    roots = [(text, number[root]) for text, root in left.roots]
    return Side([*entered.records, *records], [*entered.objects, *left.objects], roots)


def _modules(side: Side, roots: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Every module below the roots, with what it is called; one that several roots lead to comes once for each."""
    for text, root in roots:
        seen: set[int] = set()
        for number, path in edges(side.records, [((), root)]):
            op = side.records[number][0]
            if number not in seen and type(op) is Node and not op.type.is_plain:
                yield text + jtu.keystr(path), number
            seen.add(number)


def _modules_with_ties(side: Side) -> list[tuple[str, int]]:
    """For each tie that holds a traced leaf, the smallest module with all of it in, with what it is called."""
    found: dict[int, str] = {}
    for text, root in side.roots:
        above: dict[int, tuple[tuple[int, ...], Path]] = {}  # record → those on its first path, and the path
        stack: list[tuple[int, tuple[int, ...], Path]] = [(root, (), ())]
        while stack:
            number, chain, path = stack.pop()
            op, children = side.records[number]
            if number not in above:
                above[number] = chain, path
                if type(op) is Node:
                    steps = tuple(zip(op.keys, children, strict=True))
                    stack.extend((child, (*chain, number), (*path, key)) for key, child in reversed(steps))
                continue
            if not any(side.records[below][0] is LEAF for below, _ in edges(side.records, [((), number)])):
                continue
            common = [a for a, b in zip(above[number][0], chain, strict=False) if a == b]
            modules = [a for a in common if not _node_type(side, a).is_plain]
            if modules:
                found.setdefault(modules[-1], text + jtu.keystr(above[modules[-1]][1]))
    return [(text, number) for number, text in found.items()]


def _node_type(side: Side, number: int) -> NodeType:
    op = side.records[number][0]
    assert type(op) is Node
    return op.type


def _shapes(side: Side) -> list[int]:
    """For each record a number, equal for equal trees with equal types of leaves, whatever is shared in them."""
    numbers: dict[Any, int] = {}
    shapes: list[int] = []
    for (op, children), obj in zip(side.records, side.objects, strict=True):
        if op is LEAF:
            key: Any = _kind_of(obj)
        else:
            key = (op.type.cls if type(op) is Node else Static, *(shapes[child] for child in children))
        shapes.append(numbers.setdefault(key, len(numbers)))
    return shapes


def _lost_leaf_ties(both: Side, before: int, after: int) -> list[LostTie] | None:
    """The ties between traced leaves that `before` has and `after` has not; None if they are different trees."""

    def agree(i: int, j: int) -> bool:
        op, other = both.records[i][0], both.records[j][0]
        if op is LEAF and other is LEAF:
            return _kind_of(both.objects[i]) == _kind_of(both.objects[j])
        return type(op) is Static and type(other) is Static

    lost = lost_ties(Shape(both.records, before), Shape(both.records, after), agree)
    if isinstance(lost, Mismatch):
        return None
    return [tie for tie in lost if both.records[tie.record][0] is LEAF and _counts(both.records, tie)]


def _counts(records: Sequence[Record], tie: LostTie) -> bool:
    """Whether a tie is part of a model, not an alias between entries of an optimizer state."""
    one, two = tie.paths
    common = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    below = {*tie.above[0][common:], *tie.above[1][common:]}
    ops = [records[number][0] for number in below]
    return not any(type(op) is Node and is_namedtuple(op.type.cls) and _is_optax(op.type.cls) for op in ops)


def _is_optax(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "optax"


def _report(policy: Policy, text: str, text_after: str | None, paths: tuple[str, str]) -> None:
    one, two = paths
    what = (
        f"`{text}{one}` and `{text}{two}` were one object when the function was entered, but the result has two of "
        f"them, `{text_after}{one}` and `{text_after}{two}`."
        if text_after is not None
        else f"`{text}{one}` and `{text}{two}` were one object in an earlier call, but are two now, which also had the "
        "function traced and compiled again."
    )
    message = (
        f"A tie was lost. {what}\n"
        "Functions that see trees, not DAGs, do that: `jax.tree.map`, `jax.device_put`, `optax.apply_updates`, "
        "`equinox.tree_at`. Those that keep ties:\n"
        "    sharedtree.tree.map(f, model)              sharedtree.tree.at(where, model, new)\n"
        "    sharedtree.apply_updates(model, updates)   sharedtree.device_put(model, device)\n"
        "    sharedtree.retie(model, like=before)       # to put them back\n"
        "    sharedtree.untie(model)                    # to say that it is meant"
    )
    if policy.on_untie == "error":
        raise UntiedError(message, (text + one, text + two))
    warnings.warn(message, UntiedWarning, stacklevel=2)
