"""Reports lost ties: those that a function's arguments have and its result lacks, and those lost between two calls.

`jax.tree.map`, `optax.apply_updates` and `equinox.tree_at` take a tied model and silently return an untied one. So when
a function has been traced, we compare each module in its result with the modules in its arguments of which it may be a
new version: those of the same *shape*, which is the tree of classes with the types of the leaves.

    def step(model, gradient):
        return optax.apply_updates(model, gradient)     # `.a` and `.b` were one array, and are two in the result

Three kinds of ties do not count: ties that `untie` has cut (its results are marked, see `note`), ties between separate
arguments, and ties between the entries of an optax state. The last two are accidents: optimizer states and moving
averages begin as aliases of the model, and get arrays of their own on the first step.

Vanilla functions lose ties outside transforms, too (`jax.device_put(model)`). The next call has other sharing, so its
function is traced again. Then we compare its arguments with those of earlier traces. If an argument lacks a tie and
still has equal values at both paths, the tie was lost. If the values differ, it is another model that never had the
tie.

A *record* is the number of an object in a flat DAG, of the flattened arguments or of the flattened result.
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
from ...ties._ties_that_are_missing import (
    LeafKind,
    Lost,
    LostLeaf,
    at,
    kind_of,
    lost_leaf_ties,
    maximal,
    named,
    unsettled,
)
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
    """A lost tie, as messages describe it.

    Attributes:
        tied_paths: the paths of the tied object in the arguments. After a loss between calls, in an earlier call.
        untied_paths: the same paths in the result. After a loss between calls, in the arguments of the present call.
        advice: the line that lost the tie, and the fixes.
    """

    tied_paths: list[str]
    untied_paths: list[str]
    advice: Advice


# ---- Ties lost by a function ----


class _NamedModule(NamedTuple):
    """A module, or a mutable container outside modules.

    Attributes:
        text: the path by which messages name it.
        record: its record.
    """

    text: str
    record: int


class _ModulePair(NamedTuple):
    """A module in the arguments, and a module in the result that may be its new version but has fewer ties.

    Attributes:
        received: the module in the arguments.
        returned: the module in the result.
        ties: the leaves that are tied in `received` and not in `returned`.
    """

    received: _NamedModule
    returned: _NamedModule
    ties: Sequence[LostLeaf]


def ties_lost_between(
    received: FlatDag, returned: FlatDag, policy: Policy, *, is_with_arguments: bool = False
) -> list[LostTie]:
    """Finds the ties that a function's arguments have and its result lacks, and marks them as reported.

    Args:
        received: the arguments.
        returned: the result, or a pair of the arguments and the result.
        policy: its `containers` says if mutable containers outside modules count as modules. Under `on_untie="ignore"`,
            nothing is compared.
        is_with_arguments: True if `returned` is the pair, because the transform also returns the changed arguments.

    Returns:
        The lost ties. Empty if none was lost.
    """
    if policy.on_untie == "ignore" or (received.records, received.root) == (returned.records, returned.root):
        return []
    containers = policy.containers
    tied_modules = _modules_with_ties(received, containers)
    if not tied_modules:
        return []
    text_of = _text_in_arguments_or_result if is_with_arguments else _text_in_result
    # One table with both: first the records of the arguments, then those of the result.
    objects = [*received.objects, *returned.objects]
    offset = len(received.records)
    shifted_records = [(op, tuple([offset + child for child in children])) for op, children in returned.records]
    combined = FlatDag([*received.records, *shifted_records], offset + returned.root, objects)
    shape_of = _shapes(combined)
    received_objects = IdentitySet(received.objects)
    lost_ties: list[LostTie] = []
    # Records of the tied objects in the arguments, and of the untied leaves in the result.
    reported: set[int] = set()
    # Operation of the program → its analysis. One operation may have made the leaves of many modules.
    analyses: IdentityDict[Any] = IdentityDict()
    # The outermost modules come first. If a tie of a module is reported, the modules inside do not report it again. The
    # root of `combined` is that of the result, so its modules are those of the result.
    pairs = _pair_modules(
        tied_modules,
        _modules(received, containers, jtu.keystr),
        _modules(combined, containers, text_of),
        combined,
        shape_of,
    )
    for pair in pairs:
        # `unsettled` drops the ties that were undone on purpose or reported before. `maximal` groups the ties of leaves
        # by the tied object: a layer that was one and is two is one lost tie, not one for each of its weights.
        for lost in maximal(unsettled(pair.ties, objects)):
            parts = {part for tie in lost.ties for part in tie.parts}
            if lost.record in reported or parts <= reported:
                continue
            reported |= {lost.record, *parts}
            tied_paths, untied_paths = named(pair.received.text, lost.paths), named(pair.returned.text, lost.paths)
            advice = _advice(lost, pair, combined, shape_of, received_objects, analyses)
            lost_ties.append(LostTie(tied_paths, untied_paths, advice))
    # Mark the leaves, so that neither an enclosing function nor a later call reports the tie again.
    note(objects[record] for record in reported)
    return lost_ties


def _text_in_result(path: Path) -> str:
    """Returns the name of a path in a result: "result.a"."""
    return "result" + jtu.keystr(path)


def _text_in_arguments_or_result(path: Path) -> str:
    """Returns the name of a path in a pair of the arguments and the result: "model.a" or "result.a"."""
    # The first key is the index in the pair, and is not printed. The path of the pair itself is empty.
    (first_key, *other_keys) = path or (None,)
    is_argument = getattr(first_key, "idx", None) == 0
    return jtu.keystr(tuple(other_keys)) if is_argument else "result" + jtu.keystr(tuple(other_keys))


_MAX_TIES = 64
"""How many ties of leaves in one tied object are looked at, to find the line that lost them."""


def _advice(
    lost: Lost,
    pair: _ModulePair,
    combined: FlatDag,
    shape_of: Sequence[int],
    received_objects: IdentitySet,
    analyses: IdentityDict[Any],
) -> Advice:
    """Returns the advice about a lost tie: the line that lost it, and at most two fixes.

    Args:
        lost: the tie.
        pair: the module with the tie, and the module without it.
        combined: the arguments and the result in one table.
        shape_of: record → number of its shape.
        received_objects: the objects in the arguments.
        analyses: operation → its analysis. Extended.
    """
    # A fix is a pair of a sentence and code.
    fixes_that_keep: list[tuple[str, str]] = []
    copy_fix: tuple[str, str] | None = None
    first_origin: Origin | None = None
    for tie in lost.ties[:_MAX_TIES]:
        # The parts are the two leaves in the result that were one leaf in the arguments. A part is new if it is not the
        # received leaf itself.
        leaf, other_leaf = [combined.objects[part] for part in tie.parts]
        are_new = [combined.objects[part] not in received_objects for part in tie.parts]
        # First case: a vanilla transform, such as `jax.vmap`, took one leaf and returned two. `untying_transform`
        # returns the line of its call and, if a function inside loses ties, that line, too. Empty in all other cases.
        transforms = untying_transform(leaf, other_leaf, analyses) if all(are_new) else []
        if transforms:
            first_origin = first_origin or transforms[0]
            fixes_that_keep.extend(to_keep(origin.keeping) for origin in transforms if origin.keeping is not None)
            continue
        # The lines of the user's code that made the parts. The origin of a known function has code that keeps ties.
        new_parts = zip((leaf, other_leaf), are_new, strict=True)
        origins = [origin_of(part) if is_new else None for part, is_new in new_parts]
        known_origin = next((origin for origin in origins if origin is not None and origin.keeping is not None), None)
        known_code = None if known_origin is None else known_origin.keeping
        # Second case: a target network or an average began as the model itself, and is now another model.
        twins = _find_parted_twins(combined, shape_of, (pair.received.record, pair.returned.record), tie.at)
        # Then the two parts were made at different lines, or only one of them is new. The same holds if the user
        # replaced one of two tied objects (`eqx.tree_at`). But such an object is mostly one array, and not the result
        # of a known update.
        is_one_array = twins is None or twins.num_leaves == 1
        is_replaced = not all(are_new) and known_code in (None, REPLACES) and is_one_array
        if twins is not None and origins[0] != origins[1] and not is_replaced:
            model, target = named(pair.received.text, twins.paths)
            copy_fix, first_origin = copy_fix or to_begin_as_copy(target, model), first_origin or known_origin
            continue
        # Third case: a function made both parts, or replaced one of them. The code depends on which function it was.
        first_origin = first_origin or known_origin or next((origin for origin in origins if origin is not None), None)
        if known_code is not None:
            fixes_that_keep.append(to_keep(known_code))
        elif is_replaced:
            fixes_that_keep.append(to_keep(REPLACES))
        elif twins is not None and twins.num_leaves > 1 and not is_by_transform(leaf):
            fixes_that_keep.append(to_keep(KEEPS_NODES))
        else:
            fixes_that_keep.append(PUT_BACK)
    fixes = list(dict.fromkeys(fixes_that_keep))
    if copy_fix is not None:
        return Advice(first_origin, [*fixes[:1], copy_fix])
    return Advice(first_origin, [*fixes, MEANT][:2])


class _Twins(NamedTuple):
    """Two nodes, such as a model and its target, that had all leaves in common in the arguments and none in the result.

    They stand side by side in one module.

    Attributes:
        paths: their paths in the module around them.
        num_leaves: number of traced leaves in each of them.
    """

    paths: tuple[Path, Path]
    num_leaves: int


def _find_parted_twins(
    combined: FlatDag, shape_of: Sequence[int], modules: tuple[int, int], tied_paths: tuple[Path, Path]
) -> _Twins | None:
    """Looks for two nodes around a tie that had all leaves in common in the arguments and have none in the result.

    Args:
        combined: the arguments and the result in one table.
        shape_of: record → number of its shape.
        modules: records of the module around the tie, in the arguments and in the result.
        tied_paths: the two paths of the tied object in the module.

    Returns:
        The two nodes. None if there are leaves in their place, if they differ in shape, if some of their leaves were
        two already in the arguments, or if some are still one in the result.
    """
    # The paths begin with the same keys. The nodes are at the first key that differs: `.model` and `.ema`, for example.
    common = next((i for i, (a, b) in enumerate(zip(*tied_paths, strict=False)) if a != b), None)
    if common is None:
        return None
    paths = tied_paths[0][: common + 1], tied_paths[1][: common + 1]
    first, second, new_first, new_second = [at(combined, module, path) for module in modules for path in paths]
    if combined.node(first) is None or shape_of[first] != shape_of[second]:
        return None
    # Walk four trees at once: both nodes in the arguments, and both nodes in the result. The caller has paired modules
    # of the same shape, so the four have the same children.
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
            # No twins that parted: the leaves were two already, or are still one.
            if first != second or new_first == new_second:
                return None
            leaves.add(first)
        stack.extend(zip(*[children for _, children in ops], strict=False))
    return _Twins(paths, len(leaves))


def _pair_modules(
    tied_modules: Sequence[_NamedModule],
    received: Iterable[_NamedModule],
    returned: Iterable[_NamedModule],
    combined: FlatDag,
    shape_of: Sequence[int],
) -> Iterator[_ModulePair]:
    """Yields each tied module with each of its possible new versions that has fewer ties.

    Args:
        tied_modules: the modules with ties in the arguments.
        received: all modules in the arguments.
        returned: all modules in the result.
        combined: the arguments and the result in one table.
        shape_of: record → number of its shape.
    """

    def agree(i: int, j: int) -> bool:
        """Returns True if two records match: leaves of one type, or static values."""
        return shape_of[i] == shape_of[j]

    received_by_shape, returned_by_shape = _group_by_shape(received, shape_of), _group_by_shape(returned, shape_of)
    for module in tied_modules:
        shape = shape_of[module.record]
        received_modules, returned_modules = received_by_shape[shape], returned_by_shape.get(shape, [])
        for version in _possible_versions(module, received_modules, returned_modules):
            ties = lost_leaf_ties(combined.below(module.record), combined.below(version.record), agree)
            if ties:
                yield _ModulePair(module, version, ties)


def _possible_versions(
    module: _NamedModule, received: Sequence[_NamedModule], returned: Sequence[_NamedModule]
) -> Sequence[_NamedModule]:
    """Returns the modules in the result that may be new versions of a module in the arguments.

    Args:
        module: the module in the arguments.
        received: all modules of its shape in the arguments, itself included.
        returned: all modules of its shape in the result.
    """
    # The result has as many modules as the arguments, or twice as many, and so on: they correspond in order.
    if len(returned) % len(received) == 0:
        return returned[received.index(module) :: len(received)]
    # The same, if a module that was passed twice counts once, as in `f(model, model)`. Otherwise any of them
    # may be a new version of any.
    distinct = list(dict.fromkeys([module.record for module in received]))
    return returned[distinct.index(module.record) :: len(distinct)] if len(returned) % len(distinct) == 0 else returned


def _group_by_shape(modules: Iterable[_NamedModule], shape_of: Sequence[int]) -> dict[int, list[_NamedModule]]:
    """Returns a dict: number of a shape → the modules of this shape, in order."""
    groups: dict[int, list[_NamedModule]] = {}
    for module in modules:
        groups.setdefault(shape_of[module.record], []).append(module)
    return groups


# ---- Modules and their shapes ----


def _modules(tree: FlatDag, containers: bool, text_of: Callable[[Path], str]) -> Iterator[_NamedModule]:
    """Yields all modules of a tree. A module in several outermost objects comes once for each of them.

    Args:
        tree: the arguments, or the result.
        containers: True if mutable containers outside modules count as modules.
        text_of: path → the name of this path in messages.
    """
    for path, root in outermost_objects(tree, containers):
        part = tree.below(root)
        for record, path_below in part.first_paths.items():
            node = tree.node(record)
            # Containers inside modules are no modules. `outside` has the records with a path outside modules.
            if node is not None and node.type.carries_identity and (record in part.outside or not node.type.is_plain):
                yield _NamedModule(text_of((*path, *path_below)), record)


def outermost_objects(tree: FlatDag, containers: bool) -> Iterator[tuple[Path, int]]:
    """Yields the nodes with identity that are in no other node with identity: their paths, and their records.

    A node at several paths comes once for each path.

    Args:
        tree: the arguments, or the result.
        containers: True if mutable containers outside modules carry identity, as modules do.
    """
    stack: list[tuple[Path, int]] = [((), tree.root)]
    while stack:
        path, record = stack.pop()
        node = tree.node(record)
        if node is None:
            continue
        # Go on below a node without identity. Children are pushed in reverse, to come off the stack in flatten order.
        if node.type.is_plain and not (containers and node.type.is_mutable):
            steps = list(zip(node.keys, tree.records[record][1], strict=True))
            stack.extend([((*path, key), child) for key, child in reversed(steps)])
        else:
            yield path, record


class _FirstVisit(NamedTuple):
    """The first path to a record.

    Attributes:
        ancestors: the records on the path, from the outermost one to the parent.
        path: the path.
    """

    ancestors: tuple[int, ...]
    path: Path


def _modules_with_ties(tree: FlatDag, containers: bool) -> list[_NamedModule]:
    """Finds the modules with ties of traced leaves: for each tie, the smallest module with all paths of the tie.

    Args:
        tree: the arguments.
        containers: True if mutable containers outside modules carry identity. For a tie outside modules, the smallest
            such container counts.

    Returns:
        The modules. A module comes before the modules in it.
    """
    # Record → path of the module, as text.
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
                # This is another path to a record, so the record is tied. The common ancestors have both paths.
                common = [a for a, b in zip(first_visits[record].ancestors, ancestors, strict=False) if a == b]
                types = {ancestor: node.type for ancestor in common if (node := tree.node(ancestor)) is not None}
                modules = [ancestor for ancestor in common if not types[ancestor].is_plain]
                modules = modules or [ancestor for ancestor in common if types[ancestor].is_mutable]
                if modules:
                    text_of.setdefault(modules[-1], jtu.keystr(first_visits[modules[-1]].path))
    # In a table children come before their parents. In reverse, the outermost modules come first.
    return [_NamedModule(text, record) for record, text in sorted(text_of.items(), reverse=True)]


def _shapes(tree: FlatDag) -> list[int]:
    """Returns a number for each record. Two objects with equal numbers have one *shape*, apart from values and sharing.

    That is: the same tree of classes and of names in plain containers, with arrays of the same dimensions and dtype.
    Static values and the auxiliary data of modules do not count.
    """
    # Description of a shape → its number.
    numbers: dict[Any, int] = {}
    shapes: list[int] = []
    for (op, children), obj in zip(tree.records, tree.objects, strict=True):
        # Children come before their parents, so the numbers of their shapes are known.
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
"""How many traces of one structure are remembered. They differ in the shapes and dtypes of leaves."""


class _Argument(NamedTuple):
    """An argument with which a function was traced, without its values.

    Attributes:
        policy_flags: (True if arrays carry identity, True if containers do).
        text: name of the argument.
        dag: its records, numbered from 0.
        kinds: for each record of a leaf, the shape and dtype of the leaf. None for other records.
    """

    policy_flags: tuple[bool, bool]
    text: str
    dag: Rooted
    kinds: Sequence[LeafKind | None]


def _policies_and_kinds(arguments: Sequence[_Argument]) -> list[tuple[tuple[bool, bool], Sequence[LeafKind | None]]]:
    """Returns the policy flags and the kinds of each argument, which tell apart two traces of one structure."""
    return [(argument.policy_flags, argument.kinds) for argument in arguments]


class SeenArguments:
    """The arguments with which one wrapped function was traced, to find ties that were lost between its calls.

    The arguments of a trace are kept as long as JAX's caches keep the structure of the trace alive.
    """

    def __init__(self) -> None:
        # Structure of the arguments → for each of its last traces, the arguments.
        self._traces_of: weakref.WeakKeyDictionary[Structure, list[list[_Argument]]] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def compare(self, received: FlatDag, caller_objects: Sequence[Any], policy: Policy) -> list[LostTie]:
        """Finds ties that were lost since an earlier call, and remembers the arguments of this call.

        Args:
            received: the arguments with which the function is being traced.
            caller_objects: for each record, the caller's object. The leaves in `received` may be tracers.
            policy: its `arrays` and `containers` say which objects carry identity. Under `on_untie="ignore"`, nothing
                is compared.

        Returns:
            The lost ties. They are marked as reported.
        """
        with self._lock:
            earlier_traces = [trace for traces in self._traces_of.values() for trace in traces]
        node = received.node(received.root)
        assert node is not None
        policy_flags = policy.arrays, policy.containers
        arguments: list[_Argument] = []
        lost: list[LostTie] = []
        for key, root in zip(node.keys, received.records[received.root][1], strict=True):
            # `canonical_records` makes a table of the argument alone. The keys of `numbers` are the records in
            # `received`, in the order of the new table.
            records, numbers = canonical_records(root, lambda record: received.records[record])
            # None stands for a record that is no leaf.
            leaf_numbers = [number if received.records[number][0] is LEAF else None for number in numbers]
            kinds = [None if number is None else kind_of(received.objects[number]) for number in leaf_numbers]
            argument = _Argument(policy_flags, str(key), FlatDag(records, len(records) - 1), kinds)
            if policy.on_untie != "ignore":
                earlier = [seen for trace in earlier_traces for seen in trace if seen.policy_flags == policy_flags]
                objects = [None if number is None else caller_objects[number] for number in leaf_numbers]
                lost += _ties_lost_since(argument, objects, earlier)
            arguments.append(argument)
        with self._lock:
            traces = self._traces_of.setdefault(received.structure, [])
            # Remember the arguments, unless an equal trace is remembered. Traces of one structure have equal records,
            # so only the policy and the leaves can differ.
            if all(_policies_and_kinds(trace) != _policies_and_kinds(arguments) for trace in traces):
                traces[:] = [*traces, arguments][-_MAX_TRACES:]
        return lost


_ADVICE_BETWEEN_CALLS = Advice(
    None,
    [
        (
            "Functions on trees, such as `jax.device_put`, `jax.tree.map` and `optax.apply_updates`, lose ties. Put "
            "the tie back:",
            "    model = sharedtree.retie(model, like=before)",
        ),
        MEANT,
    ],
)
"""The line that lost a tie between calls is unknown."""


def _ties_lost_since(
    argument: _Argument, objects: Sequence[Any], earlier_arguments: Sequence[_Argument]
) -> list[LostTie]:
    """Finds the ties of earlier arguments that a new argument lacks, although it has equal values at the tied paths.

    Args:
        argument: the new argument.
        objects: for each of its records, the caller's leaf. None for other records.
        earlier_arguments: the arguments of all earlier traces.

    Returns:
        The lost ties. They are marked as reported.
    """
    # The lost ties for each earlier argument that has all ties of the new argument and more.
    missing: list[list[LostLeaf]] = []
    for earlier in earlier_arguments:
        if earlier.text != argument.text:
            # An argument with another name.
            continue
        # None if the two arguments differ in shape. Empty if the earlier argument has no further tie.
        lost_leaves = lost_leaf_ties(earlier.dag, argument.dag, _agree(earlier, argument))
        if lost_leaves == []:
            # The function has been traced without these ties before, so nothing was lost since then.
            return []
        if lost_leaves and not lost_leaf_ties(argument.dag, earlier.dag, _agree(argument, earlier)):
            missing.append(lost_leaves)
    lost_ties: list[LostTie] = []
    for ties in missing:
        # `unsettled` drops the ties that were undone on purpose or reported. `note` below marks a tie as reported, so
        # two earlier arguments do not report it twice. `maximal` groups the ties of leaves by the tied object.
        for lost in maximal(unsettled(ties, objects)):
            if are_copies([(objects[a], objects[b]) for a, b in (tie.parts for tie in lost.ties)]):
                paths = named(argument.text, lost.paths)
                lost_ties.append(LostTie(paths, paths, _ADVICE_BETWEEN_CALLS))
                note(objects[part] for tie in lost.ties for part in tie.parts)
    return lost_ties


def _agree(left: _Argument, right: _Argument) -> Agree:
    """Returns a function that decides if two leaves, one of each argument, match."""

    def agree(i: int, j: int) -> bool:
        """Returns True for two static values, and for two traced leaves of one shape and dtype."""
        are_static = type(left.dag.records[i][0]) is Static and type(right.dag.records[j][0]) is Static
        return are_static or (left.kinds[i] is not None and left.kinds[i] == right.kinds[j])

    return agree


# ---- The warning ----

_MAX_NAMED_TIES = 3
"""How many ties a warning lists."""


def report_lost_ties(
    between_calls: Sequence[LostTie], in_trace: Sequence[LostTie], policy: Policy, names: Names
) -> None:
    """Gives one warning for all ties lost in a trace or since an earlier call. Does nothing if there are none.

    Args:
        between_calls: ties lost since an earlier call.
        in_trace: ties lost by the function.
        policy: its `on_untie` makes the warning an error, or suppresses it.
        names: names of the function and its arguments.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    lost = [*in_trace, *between_calls]
    if not lost:
        return
    # The sentence about the ties. Those lost in the trace come first, and decide about the wording.
    first = lost[0]
    is_single, is_in_trace = len(lost) == 1, bool(in_trace)
    ties = "; ".join(listed(tie.tied_paths) for tie in lost[:_MAX_NAMED_TIES])
    more = f"; and {len(lost) - _MAX_NAMED_TIES} more" if len(lost) > _MAX_NAMED_TIES else ""
    count = "two" if is_single and len(first.untied_paths) == 2 else "several"
    if is_in_trace:
        result = (
            f"and are {count} in the result, {listed(first.untied_paths)}"
            if is_single
            else "and are several in the result"
        )
        time = "on entry"
    else:
        time = "in an earlier call"
        result = (
            f"and now are {count} with equal values. For this reason the function was also traced and compiled again"
        )
    message = f"{ties}{more} were one object {'' if is_single else 'each '}{time}, {result}."
    # One advice for all ties: the first known line, and two fixes. `MEANT`, how to say that the loss is meant, comes
    # last.
    fixes = list(dict.fromkeys(fix for tie in lost for fix in tie.advice.fixes if fix != MEANT))
    origin = next((tie.advice.origin for tie in lost if tie.advice.origin is not None), None)
    advice = Advice(origin, [*fixes, *[fix for fix in first.advice.fixes if fix == MEANT]][:2])
    paths = [path for tie in lost for path in tie.tied_paths]
    report_untied(policy.on_untie, names.definition, message, advice.text, paths, count=len(lost))


# ---- The values of leaves ----

_MAX_BYTES = 2**20
"""About how many bytes of a leaf are compared."""

_HostArray = np.ndarray[Any, Any]


def are_copies(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Returns True if the two leaves of each pair have equal values, so that they look like copies of one leaf.

    About a megabyte of each leaf is compared: the beginning of its first shard or, if the two leaves are sharded
    differently, the beginning of the whole array.

    Returns False if each leaf has one value throughout, such as zeros, since new models have equal leaves of this kind.
    Returns False, too, if the value of a leaf is not accessible: a traced or deleted leaf, or one on other machines.
    """
    are_constant = True
    # A function is being traced. Without this, JAX would trace the operations here as a part of it.
    with jax.ensure_compile_time_eval():
        for left, right in pairs:
            if kind_of(left) != kind_of(right):
                return False
            left_data, right_data = _beginnings(left, right)
            if left_data is None or right_data is None or left_data.tobytes() != right_data.tobytes():
                return False
            # Constant: the bytes are those of the first element, repeated.
            first_element = left_data.ravel()[:1].tobytes()
            are_constant = are_constant and left_data.tobytes() == first_element * left_data.size
    return not are_constant


def _beginnings(left: Any, right: Any) -> tuple[_HostArray | None, _HostArray | None]:
    """Returns the first elements of two leaves of one shape and dtype, from the same places.

    Returns (None, None) if the value of a leaf is not accessible.
    """
    left_data, right_data = _data(left), _data(right)
    if left_data is None or right_data is None:
        return None, None
    # Arrays that are sharded alike are compared by their first shards, without any transfer between devices.
    if (
        isinstance(left_data, jax.Array)
        and isinstance(right_data, jax.Array)
        and _are_sharded_alike(left_data, right_data)
    ):
        left_data, right_data = left_data.addressable_shards[0].data, right_data.addressable_shards[0].data
    slices = _slices_of_beginning(left_data)
    return _on_host(left_data, slices), _on_host(right_data, slices)


def _data(leaf: Any) -> Any:
    """Returns an array with the value of a leaf. None if the value is not accessible."""
    # A Python number or a NumPy scalar.
    if not carries_identity(leaf):
        return np.asarray(leaf)
    if isinstance(leaf, Tracer) or not isinstance(leaf, (jax.Array, np.ndarray)) or isinstance(leaf, jax.Ref):
        return None
    if isinstance(leaf, np.ndarray):
        return leaf
    if leaf.is_deleted() or not leaf.is_fully_addressable:
        return None
    # The value of a PRNG key is an array of integers.
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _are_sharded_alike(left: jax.Array, right: jax.Array) -> bool:
    """Returns True if the first shards of two arrays of one shape cover the same indices."""
    (left_shard, *_), (right_shard, *_) = left.addressable_shards, right.addressable_shards
    return left_shard.index == right_shard.index


def _slices_of_beginning(data: Any) -> tuple[slice, ...]:
    """Returns slices, one for each axis, that take at most about a megabyte from the beginning of an array."""
    slices: list[slice] = []
    num_bytes = data.nbytes
    for size in data.shape:
        # Shorten the first axis as far as needed, to one row at least. If a row is still too large, go on with the
        # next.
        if num_bytes <= _MAX_BYTES:
            break
        bytes_per_row = num_bytes // size
        count = max(_MAX_BYTES // bytes_per_row, 1)
        slices.append(slice(0, count))
        num_bytes = bytes_per_row * count
    return (*slices, *[slice(0, size) for size in data.shape[len(slices) :]])


def _on_host(data: Any, slices: tuple[slice, ...]) -> _HostArray:
    """Returns a part of an array as a NumPy array. Only this part is copied to the host.

    Args:
        data: the array.
        slices: the part. Each slice starts at 0.
    """
    # One device has the whole array: a NumPy array, an array on one device, or one that is replicated.
    if not isinstance(data, jax.Array) or len(data.sharding.device_set) == 1 or data.is_fully_replicated:
        on_device = data.addressable_shards[0].data if isinstance(data, jax.Array) else data
        return np.asarray(on_device[slices] if slices and on_device.nbytes > _MAX_BYTES else on_device)
    # Otherwise put the part together from the shards. Indexing the array would gather it on each device.
    part = np.empty([axis_slice.stop for axis_slice in slices], data.dtype)
    for shard in data.addressable_shards:
        # Several devices may have the same shard. One of them is enough.
        if shard.replica_id == 0:
            starts = [index.start or 0 for index in shard.index]
            # The overlap of the shard and the part, as slices of the shard (`overlap`) and of the part (`target`).
            axes = zip(starts, shard.data.shape, slices, strict=True)
            overlap = [slice(0, max(min(start + size, axis_slice.stop) - start, 0)) for start, size, axis_slice in axes]
            if all(axis_slice.stop for axis_slice in overlap):
                target = [
                    slice(start, start + axis_slice.stop) for start, axis_slice in zip(starts, overlap, strict=True)
                ]
                is_whole = shard.data.shape == tuple([axis_slice.stop for axis_slice in overlap])
                part[tuple(target)] = np.asarray(shard.data if is_whole else shard.data[tuple(overlap)])
    return part
