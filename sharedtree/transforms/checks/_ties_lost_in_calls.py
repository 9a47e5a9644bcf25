"""Reports a tie that enters a transform and does not leave it, or that an earlier call had and the next one lacks.

`jax.tree.map`, `optax.apply_updates` and `equinox.tree_at` take a tied model and return an untied one without a word.
So when a function has been traced, we compare each module in its results with those modules in its arguments of which
it may be a new version: same class, same tree, same leaf types.

    def step(model, gradient):
        return optax.apply_updates(model, gradient)     # `.a` and `.b` were one array, and are two in the result

Three kinds of ties do not count. What `untie` parted is excused, by the notes on the leaves (`ties/_leaf_notes`). Ties
between separate arguments, and between the entries of an optax state, are accidents: optimizer states and moving
averages begin as aliases of the model, and part on the first step.

Vanilla functions lose ties outside transforms, too (`jax.device_put(model)`). Then the next call is traced again. So
the modules that enter are also compared with those of earlier traces. An independent model without the tie may come at
any time. A model that lost it, and nothing else, still has equal values at both paths.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu
from jax.core import Tracer

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._errors import report_untied
from ...core._locks import Lock
from ...core._node_types import carries_identity
from ...core._printing import listed
from ...core._sharing import Agree, Rooted
from ...core._static_values import Static
from ...core._structure import LEAF, FlatDag, Node, Path, Structure, canonical_records
from ...ties._leaf_notes import note
from ...ties._policy_and_context import Policy
from ...ties._ties_that_are_missing import Kind, Lost, LostLeaf, at, kind_of, lost_leaf_ties, maximal, named, unsettled
from ...ties._what_loses_ties import (
    KEEPS_NODES,
    MEANT,
    PUT_BACK,
    REPLACES,
    Advice,
    Origin,
    is_by_transform,
    origin_of,
    to_begin_as_copy,
    to_keep,
    untying_transform,
)
from .._argument_names import Names


class LostTie(NamedTuple):
    """A lost tie in the words of messages.

    Attributes:
        paths_before: the paths of the tie.
        paths_after: as many paths, of the objects into which it fell apart.
        advice: what to do.
    """

    paths_before: list[str]
    paths_after: list[str]
    advice: Advice


# ---- Ties lost by a function ----


class _NamedModule(NamedTuple):
    """A module, or a mutable container outside modules, and what messages call it."""

    text: str
    record: int


class _ModulePair(NamedTuple):
    """A module that entered a function, and one that left it and may be its new version, with fewer ties.

    Attributes:
        entered: the module in the arguments.
        left: the module in the result.
        ties: leaves tied in the arguments only.
    """

    entered: _NamedModule
    left: _NamedModule
    ties: Sequence[LostLeaf]


def ties_lost_between(entered: FlatDag, left: FlatDag, policy: Policy, *, is_with_state: bool = False) -> list[LostTie]:
    """Compares the result of a function with its arguments. The lost ties count as reported from then on.

    Args:
        entered: the arguments.
        left: the result, or a pair of the arguments and the result.
        policy: what carries identity, and what a lost tie does.
        is_with_state: True if it is the pair.
    """
    if policy.on_untie == "ignore" or (entered.records, entered.root) == (left.records, left.root):
        return []
    containers = policy.containers
    tied_modules = _modules_with_ties(entered, containers)
    if not tied_modules:
        return []
    text_of = _text_in_state_or_result if is_with_state else _text_in_result
    # One table for both: first the records of the arguments, then those of the result.
    objects = [*entered.objects, *left.objects]
    offset = len(entered.records)
    shifted_records = [(op, tuple([offset + child for child in children])) for op, children in left.records]
    combined = FlatDag([*entered.records, *shifted_records], offset + left.root, objects)
    shape_of = _shapes(combined)
    received = IdentitySet(entered.objects)
    lost_ties: list[LostTie] = []
    # Records of what was tied, and of what it has become.
    reported: set[int] = set()
    # One operation may have made the leaves of many modules. It is analysed once.
    analyses: IdentityDict[Any] = IdentityDict()
    pairs = _pair_modules(
        tied_modules,
        _modules(entered, containers, jtu.keystr),
        _modules(combined, containers, text_of),
        combined,
        shape_of,
    )
    for pair in pairs:
        for lost in maximal(unsettled(pair.ties, objects)):
            parts = {part for tie in lost.ties for part in tie.parts}
            if lost.record in reported or parts <= reported:
                continue
            reported |= {lost.record, *parts}
            paths_before, paths_after = named(pair.entered.text, lost.paths), named(pair.left.text, lost.paths)
            advice = _advice(lost, pair, combined, shape_of, received, analyses)
            lost_ties.append(LostTie(paths_before, paths_after, advice))
    # Whoever gets the result, an enclosing function or a later call, need not report the tie again.
    note(objects[record] for record in reported)
    return lost_ties


def _text_in_result(path: Path) -> str:
    return "result" + jtu.keystr(path)


def _text_in_state_or_result(path: Path) -> str:
    """The name of a path in the pair of the arguments and the result."""
    (first_key, *other_keys) = path or (None,)
    is_argument = getattr(first_key, "idx", None) == 0
    return jtu.keystr(tuple(other_keys)) if is_argument else "result" + jtu.keystr(tuple(other_keys))


_MAX_TIES = 64
"""The number of ties of one module whose origins are looked for."""


def _advice(
    lost: Lost,
    pair: _ModulePair,
    combined: FlatDag,
    shape_of: Sequence[int],
    received: IdentitySet,
    analyses: IdentityDict[Any],
) -> Advice:
    """Returns the advice about a lost tie: where it was lost, and at most two fixes.

    Args:
        lost: the tie.
        pair: the module with the tie, and the one without it.
        combined: the arguments and the result.
        shape_of: the shape of each record.
        received: the objects in the arguments.
        analyses: the analyses of operations so far. New ones are added.
    """
    fixes_that_keep: list[tuple[str, str]] = []
    copy_fix: tuple[str, str] | None = None
    first_origin: Origin | None = None
    for tie in lost.ties[:_MAX_TIES]:
        leaf, other_leaf = [combined.objects[part] for part in tie.parts]
        are_new = [combined.objects[part] not in received for part in tie.parts]
        # A vanilla transform has untied them: it received one leaf and returned two.
        transforms = untying_transform(leaf, other_leaf, analyses) if all(are_new) else []
        if transforms:
            first_origin = first_origin or transforms[0]
            fixes_that_keep.extend(to_keep(origin.keeping) for origin in transforms if origin.keeping is not None)
            continue
        origins = [
            origin_of(combined.objects[part]) if is_new else None
            for part, is_new in zip(tie.parts, are_new, strict=True)
        ]
        known_origin = next((origin for origin in origins if origin is not None and origin.keeping is not None), None)
        known_code = None if known_origin is None else known_origin.keeping
        # A second model, such as a target network, began as the first one, and now they part.
        versions = _find_versions(combined, shape_of, (pair.entered.record, pair.left.record), tie.at)
        # A model and its target change at different lines, or only one of them does. One path of a tied layer may be
        # replaced, too, but hardly all of its arrays, and not by an update.
        is_one_array = versions is None or versions.num_leaves == 1
        is_replaced = not all(are_new) and known_code in (None, REPLACES) and is_one_array
        if versions is not None and origins[0] != origins[1] and not is_replaced:
            model, target = named(pair.entered.text, versions.paths)
            copy_fix, first_origin = copy_fix or to_begin_as_copy(target, model), first_origin or known_origin
            continue
        # Some other function has made new leaves. We may know it.
        first_origin = first_origin or known_origin or next((origin for origin in origins if origin is not None), None)
        if known_code is not None:
            fixes_that_keep.append(to_keep(known_code))
        elif is_replaced:
            fixes_that_keep.append(to_keep(REPLACES))
        elif versions is not None and versions.num_leaves > 1 and not is_by_transform(leaf):
            fixes_that_keep.append(to_keep(KEEPS_NODES))
        else:
            fixes_that_keep.append(PUT_BACK)
    fixes = list(dict.fromkeys(fixes_that_keep))
    if copy_fix is not None:
        return Advice(first_origin, [*fixes[:1], copy_fix])
    return Advice(first_origin, [*fixes, MEANT][:2])


class _Versions(NamedTuple):
    """Two nodes with no leaf in common, although one of them began as the other.

    Attributes:
        paths: their paths in the module around them.
        num_leaves: number of traced leaves in each.
    """

    paths: tuple[Path, Path]
    num_leaves: int


def _find_versions(
    combined: FlatDag, shape_of: Sequence[int], modules: tuple[int, int], tied_paths: tuple[Path, Path]
) -> _Versions | None:
    """Finds two nodes around a tie that had all leaves in common and have none now: a model and its target, say.

    Args:
        combined: the arguments and the result.
        shape_of: the shape of each record.
        modules: record of the module in the arguments, and in the result.
        tied_paths: the paths of the tie in it.
    """
    # The two nodes are where the paths part.
    common = next((i for i, (a, b) in enumerate(zip(*tied_paths, strict=False)) if a != b), None)
    if common is None:
        return None
    paths = tied_paths[0][: common + 1], tied_paths[1][: common + 1]
    first, second, new_first, new_second = [at(combined, module, path) for module in modules for path in paths]
    if combined.node(first) is None or shape_of[first] != shape_of[second]:
        return None
    # Walk all four trees at once: both nodes when they entered, and both when they left.
    leaves: set[int] = set()
    visited: set[tuple[int, int, int, int]] = set()
    stack = [(first, second, new_first, new_second)]
    while stack:
        records = stack.pop()
        if records in visited:
            continue
        visited.add(records)
        ops = [combined.records[record] for record in records]
        if ops[0][0] is LEAF:
            first, second, new_first, new_second = records
            if first != second or new_first == new_second:
                return None
            leaves.add(first)
        stack.extend(zip(*[children for _, children in ops], strict=False))
    return _Versions(paths, len(leaves))


def _pair_modules(
    tied_modules: Sequence[_NamedModule],
    entered: Iterable[_NamedModule],
    left: Iterable[_NamedModule],
    combined: FlatDag,
    shape_of: Sequence[int],
) -> Iterator[_ModulePair]:
    """Pairs each tied module with its possible new versions, if they have lost ties.

    Args:
        tied_modules: the modules with ties in the arguments.
        entered: all modules in the arguments.
        left: all modules in the result.
        combined: the arguments and the result.
        shape_of: the shape of each record.
    """

    def agree(i: int, j: int) -> bool:
        return shape_of[i] == shape_of[j]

    entered_by_shape, left_by_shape = _group_by_shape(entered, shape_of), _group_by_shape(left, shape_of)
    for module in tied_modules:
        shape = shape_of[module.record]
        entered_modules, left_modules = entered_by_shape[shape], left_by_shape.get(shape, [])
        for version in _possible_versions(module, entered_modules, left_modules):
            ties = lost_leaf_ties(combined.below(module.record), combined.below(version.record), agree)
            if ties:
                yield _ModulePair(module, version, ties)


def _possible_versions(
    module: _NamedModule, entered: Sequence[_NamedModule], left: Sequence[_NamedModule]
) -> Sequence[_NamedModule]:
    """Returns the possible new versions of a module.

    If as many modules left as entered, once or several times over, they correspond in order. The number may also fit if
    each object counts once, as in `f(model, model)`. Otherwise each may be a new version of each.

    Args:
        module: a module in the arguments.
        entered: all modules of its shape in the arguments, itself included.
        left: all modules of its shape in the result.
    """
    if len(left) % len(entered) == 0:
        return left[entered.index(module) :: len(entered)]
    distinct = list(dict.fromkeys([module.record for module in entered]))
    return left[distinct.index(module.record) :: len(distinct)] if len(left) % len(distinct) == 0 else left


def _group_by_shape(modules: Iterable[_NamedModule], shape_of: Sequence[int]) -> dict[int, list[_NamedModule]]:
    groups: dict[int, list[_NamedModule]] = {}
    for module in modules:
        groups.setdefault(shape_of[module.record], []).append(module)
    return groups


# ---- Modules and their shapes ----


def _modules(tree: FlatDag, containers: bool, text_of: Callable[[Path], str]) -> Iterator[_NamedModule]:
    """Iterates over all modules. A module in several outermost objects comes once for each.

    Args:
        tree: arguments or a result.
        containers: True if mutable containers outside modules count as modules.
        text_of: path → what messages call the module there.
    """
    for path, root in outermost_objects(tree, containers):
        part = tree.below(root)
        for record, path_below in part.first_paths.items():
            node = tree.node(record)
            if node is not None and node.type.carries_identity and (record in part.outside or not node.type.is_plain):
                yield _NamedModule(text_of((*path, *path_below)), record)


def outermost_objects(tree: FlatDag, containers: bool) -> Iterator[tuple[Path, int]]:
    """Iterates over the objects with identity outside all other ones, once for each path.

    Args:
        tree: arguments or a result.
        containers: True if mutable containers outside modules carry identity.
    """
    stack: list[tuple[Path, int]] = [((), tree.root)]
    while stack:
        path, record = stack.pop()
        node = tree.node(record)
        if node is None:
            continue
        if node.type.is_plain and not (containers and node.type.is_mutable):
            steps = list(zip(node.keys, tree.records[record][1], strict=True))
            stack.extend([((*path, key), child) for key, child in reversed(steps)])
        else:
            yield path, record


class _FirstVisit(NamedTuple):
    """The first path to a record, and the records on it."""

    ancestors: tuple[int, ...]
    path: Path


def _modules_with_ties(tree: FlatDag, containers: bool) -> list[_NamedModule]:
    """Finds the smallest module around each tie of traced leaves. A module precedes the modules in it.

    Outside modules, the smallest mutable container counts.
    """
    text_of: dict[int, str] = {}
    for start, root in outermost_objects(tree, containers):
        first_visits: dict[int, _FirstVisit] = {}
        stack: list[tuple[int, tuple[int, ...], Path]] = [(root, (), start)]
        while stack:
            record, ancestors, path = stack.pop()
            if record not in first_visits:
                first_visits[record] = _FirstVisit(ancestors, path)
                node = tree.node(record)
                if node is not None:
                    steps = tuple(zip(node.keys, tree.records[record][1], strict=True))
                    stack.extend((child, (*ancestors, record), (*path, key)) for key, child in reversed(steps))
            elif tree.holds_leaf[record]:
                # A second path to a record: a tie. All of it is in the common ancestors of both paths.
                common = [a for a, b in zip(first_visits[record].ancestors, ancestors, strict=False) if a == b]
                types = {ancestor: node.type for ancestor in common if (node := tree.node(ancestor)) is not None}
                modules = [ancestor for ancestor in common if not types[ancestor].is_plain]
                modules = modules or [ancestor for ancestor in common if types[ancestor].is_mutable]
                if modules:
                    text_of.setdefault(modules[-1], jtu.keystr(first_visits[modules[-1]].path))
    # A module comes before the modules in it, so that a tie is first met where all of its paths are.
    return [_NamedModule(text, record) for record, text in sorted(text_of.items(), reverse=True)]


def _shapes(tree: FlatDag) -> list[int]:
    """Numbers the shapes of all records. Equal trees with equal leaf types have one shape, whatever they share."""
    numbers: dict[Any, int] = {}
    shapes: list[int] = []
    for (op, children), obj in zip(tree.records, tree.objects, strict=True):
        if op is LEAF:
            key: Any = kind_of(obj)
        else:
            kind = op.type.cls if type(op) is Node else Static
            names = op.aux if type(op) is Node and op.type.is_plain else None
            key = (kind, names, *(shapes[child] for child in children))
        shapes.append(numbers.setdefault(key, len(numbers)))
    return shapes


# ---- Ties lost between two calls ----

_MAX_TRACES = 8
"""The number of remembered traces of one structure. They differ in the types of leaves."""


class _Argument(NamedTuple):
    """An argument with which a function was traced.

    Attributes:
        policy_flags: (True if arrays carry identity, True if containers do).
        text: name of the argument.
        dag: its records.
        kinds: for each record, the kind of the leaf. None for other records.
    """

    policy_flags: tuple[bool, bool]
    text: str
    dag: Rooted
    kinds: Sequence[Kind | None]


class SeenArguments:
    """The arguments with which one wrapped function was traced, as long as JAX's caches keep their structures alive."""

    def __init__(self) -> None:
        self._traces_of: weakref.WeakKeyDictionary[Structure, list[list[_Argument]]] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def compare(self, entered: FlatDag, caller: Sequence[Any], policy: Policy) -> list[LostTie]:
        """Compares the arguments of a trace with those of earlier traces, and remembers them.

        Args:
            entered: the arguments.
            caller: the caller's object for each record.
            policy: what carries identity, and what a lost tie does.

        Returns:
            The lost ties. They count as reported from then on.
        """
        with self._lock:
            earlier_traces = [trace for traces in self._traces_of.values() for trace in traces]
        node = entered.node(entered.root)
        assert node is not None
        policy_flags = policy.arrays, policy.containers
        arguments: list[_Argument] = []
        lost: list[LostTie] = []
        for key, root in zip(node.keys, entered.records[entered.root][1], strict=True):
            records, numbers = canonical_records(root, lambda record: entered.records[record])
            are_leaves = [entered.records[number][0] is LEAF for number in numbers]
            kinds = [
                kind_of(entered.objects[number]) if is_leaf else None
                for number, is_leaf in zip(numbers, are_leaves, strict=True)
            ]
            argument = _Argument(policy_flags, str(key), FlatDag(records, len(records) - 1), kinds)
            if policy.on_untie != "ignore":
                earlier = [seen for trace in earlier_traces for seen in trace if seen.policy_flags == policy_flags]
                objects = [
                    caller[number] if is_leaf else None for number, is_leaf in zip(numbers, are_leaves, strict=True)
                ]
                lost += _ties_lost_since(argument, objects, earlier)
            arguments.append(argument)
        with self._lock:
            traces = self._traces_of.setdefault(entered.structure, [])
            # Traces of one structure have equal records, so they differ in the leaves only.
            if all(
                [(seen.policy_flags, seen.kinds) for seen in trace]
                != [(argument.policy_flags, argument.kinds) for argument in arguments]
                for trace in traces
            ):
                traces[:] = [*traces, arguments][-_MAX_TRACES:]
        return lost


_ADVICE_BETWEEN_CALLS = Advice(
    None,
    [
        (
            "`jax.device_put`, `jax.tree.map` and `optax.apply_updates` see trees, and do that. To put the tie back:",
            "    model = sharedtree.retie(model, like=before)",
        ),
        MEANT,
    ],
)


def _ties_lost_since(
    argument: _Argument, objects: Sequence[Any], earlier_arguments: Sequence[_Argument]
) -> list[LostTie]:
    """Finds ties in earlier arguments where a new one has equal values but no tie.

    Args:
        argument: the new argument.
        objects: the caller's leaf for each of its records. None for other records.
        earlier_arguments: the arguments of all earlier traces.
    """
    # For each earlier argument of which this one may be a version with fewer ties: the ties.
    missing: list[list[LostLeaf]] = []
    for earlier in earlier_arguments:
        if earlier.text != argument.text:
            # This is another argument.
            continue
        lost_leaves = lost_leaf_ties(earlier.dag, argument.dag, _agree(earlier, argument))
        if lost_leaves == []:
            # The function has been traced with such an argument before. Nothing is new.
            return []
        if lost_leaves and not lost_leaf_ties(argument.dag, earlier.dag, _agree(argument, earlier)):
            missing.append(lost_leaves)
    lost_ties: list[LostTie] = []
    for ties in missing:
        # `note` settles a tie, so that two earlier arguments do not report it twice.
        for lost in maximal(unsettled(ties, objects)):
            if are_copies([(objects[a], objects[b]) for a, b in (tie.parts for tie in lost.ties)]):
                paths = named(argument.text, lost.paths)
                lost_ties.append(LostTie(paths, paths, _ADVICE_BETWEEN_CALLS))
                note(objects[part] for tie in lost.ties for part in tie.parts)
    return lost_ties


def _agree(left: _Argument, right: _Argument) -> Agree:
    def agree(i: int, j: int) -> bool:
        are_static = type(left.dag.records[i][0]) is Static and type(right.dag.records[j][0]) is Static
        return are_static or (left.kinds[i] is not None and left.kinds[i] == right.kinds[j])

    return agree


# ---- The warning ----

_MAX_NAMED_TIES = 3


def report_lost_ties(
    between_calls: Sequence[LostTie], in_trace: Sequence[LostTie], policy: Policy, names: Names
) -> None:
    """Reports the lost ties of one trace in one warning.

    Args:
        between_calls: ties lost since an earlier call.
        in_trace: ties lost by the function.
        policy: what a lost tie does.
        names: names of the function and its arguments.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    lost = [*in_trace, *between_calls]
    if not lost:
        return
    first = lost[0]
    is_single, is_in_trace = len(lost) == 1, bool(in_trace)
    ties = "; ".join(listed(tie.paths_before) for tie in lost[:_MAX_NAMED_TIES])
    more = f"; and {len(lost) - _MAX_NAMED_TIES} more" if len(lost) > _MAX_NAMED_TIES else ""
    count = "two" if is_single and len(first.paths_after) == 2 else "several"
    if is_in_trace:
        result = (
            f"but the result has {count} of them, {listed(first.paths_after)}" if is_single else "but not in the result"
        )
        time = "when it was entered"
    else:
        time = "in an earlier call"
        result = f"but now are {count}, still equal in value. That has also had the function traced and compiled again"
    message = f"{ties}{more} were one object {'' if is_single else 'each '}{time}, {result}."
    # One advice for all: the first origin, the fixes of all, and last how to say that it is meant.
    fixes = list(dict.fromkeys(fix for tie in lost for fix in tie.advice.fixes if fix != MEANT))
    origin = next((tie.advice.origin for tie in lost if tie.advice.origin is not None), None)
    advice = Advice(origin, [*fixes, *[fix for fix in first.advice.fixes if fix == MEANT]][:2])
    paths = [path for tie in lost for path in tie.paths_before]
    report_untied(policy.on_untie, names.definition, message, advice.text, paths, count=len(lost))


# ---- Which leaves are equal in value ----

_MAX_BYTES = 2**20
"""The size of the part of a leaf that is compared."""

_HostArray = np.ndarray[Any, Any]


def are_copies(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Returns True if the leaves of each pair look like copies of one: equal in value, as far as is cheap to see.

    At most a megabyte of each leaf is compared: the beginning of its first shard or, if the two are sharded
    differently, the beginning of the whole array. If all leaves are constant (zeros, say), equality proves nothing, and
    the answer is False. A traced or deleted leaf, or one on other machines, is equal to nothing.
    """
    are_constant = True
    # A function is being traced.
    with jax.ensure_compile_time_eval():
        for left, right in pairs:
            if kind_of(left) != kind_of(right):
                return False
            left_data, right_data = _beginnings(left, right)
            if left_data is None or right_data is None or left_data.tobytes() != right_data.tobytes():
                return False
            first_element = left_data.ravel()[:1].tobytes()
            are_constant = are_constant and left_data.tobytes() == first_element * left_data.size
    return not are_constant


def _beginnings(left: Any, right: Any) -> tuple[_HostArray | None, _HostArray | None]:
    """The first elements of two leaves of one kind, from the same places. None if there is no access to them."""
    left_data, right_data = _data(left), _data(right)
    if left_data is None or right_data is None:
        return None, None
    if (
        isinstance(left_data, jax.Array)
        and isinstance(right_data, jax.Array)
        and _are_sharded_alike(left_data, right_data)
    ):
        left_data, right_data = left_data.addressable_shards[0].data, right_data.addressable_shards[0].data
    slices = _slices_of_beginning(left_data)
    return _on_host(left_data, slices), _on_host(right_data, slices)


def _data(leaf: Any) -> Any:
    """The array whose bytes are the value of a leaf. None if there is no access to them."""
    # A number or a NumPy scalar.
    if not carries_identity(leaf):
        return np.asarray(leaf)
    if isinstance(leaf, Tracer) or not isinstance(leaf, (jax.Array, np.ndarray)) or isinstance(leaf, jax.Ref):
        return None
    if isinstance(leaf, np.ndarray):
        return leaf
    if leaf.is_deleted() or not leaf.is_fully_addressable:
        return None
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _are_sharded_alike(left: jax.Array, right: jax.Array) -> bool:
    """Returns True if the first shards of two arrays of one shape cover the same indices."""
    (left_shard, *_), (right_shard, *_) = left.addressable_shards, right.addressable_shards
    return left_shard.index == right_shard.index


def _slices_of_beginning(data: Any) -> tuple[slice, ...]:
    """Slices, one for each axis, that take at most about a megabyte from the beginning of an array."""
    slices: list[slice] = []
    num_bytes = data.nbytes
    for size in data.shape:
        if num_bytes <= _MAX_BYTES:
            break
        bytes_per_row = num_bytes // size
        count = max(_MAX_BYTES // bytes_per_row, 1)
        slices.append(slice(0, count))
        num_bytes = bytes_per_row * count
    return (*slices, *[slice(0, size) for size in data.shape[len(slices) :]])


def _on_host(data: Any, slices: tuple[slice, ...]) -> _HostArray:
    """Copies a part of an array to the host, put together from its shards. Copies nothing else.

    Args:
        data: the array.
        slices: the part. Each slice starts at 0.
    """
    if not isinstance(data, jax.Array) or len(data.sharding.device_set) == 1 or data.is_fully_replicated:
        on_device = data.addressable_shards[0].data if isinstance(data, jax.Array) else data
        return np.asarray(on_device[slices] if slices and on_device.nbytes > _MAX_BYTES else on_device)
    part = np.empty([axis_slice.stop for axis_slice in slices], data.dtype)
    for shard in data.addressable_shards:
        if shard.replica_id == 0:
            starts = [index.start or 0 for index in shard.index]
            # The overlap of the shard and the part, as slices of the shard and of the part.
            axes = zip(starts, shard.data.shape, slices, strict=True)
            overlap = [slice(0, max(min(start + size, axis_slice.stop) - start, 0)) for start, size, axis_slice in axes]
            if all(axis_slice.stop for axis_slice in overlap):
                target = [
                    slice(start, start + axis_slice.stop) for start, axis_slice in zip(starts, overlap, strict=True)
                ]
                is_whole = shard.data.shape == tuple([axis_slice.stop for axis_slice in overlap])
                part[tuple(target)] = np.asarray(shard.data if is_whole else shard.data[tuple(overlap)])
    return part
