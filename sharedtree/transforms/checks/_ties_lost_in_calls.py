"""A tie that enters a transform and does not leave it, or was there in one call and is not in the next, is reported.

`jax.tree.map`, `optax.apply_updates` and `equinox.tree_at` take a tied model and return an untied one without a word.
So, when a function has been traced, each module in its results is compared with those in its arguments that it could
be a new version of: same class, same tree, same leaf types. What `untie` parted is excused, by the notes on the leaves
(`ties/_leaf_notes`). Ties between separate arguments do not count, nor between the entries of an optax state: optimizer
states and moving averages begin as aliases of the model by accident, and part on the first step.

Vanilla functions lose ties outside transforms, too (`jax.device_put(model)`). That has the next call traced again, so
then the modules that enter are compared with those of earlier traces. An independent model without the tie may come at
any time; one that lost it, and nothing else, still has equal values at both paths.
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
from ...core._flat_dags import FlatDag
from ...core._locks import Lock
from ...core._printing import listed
from ...core._sharing import Agree, Rooted
from ...core._static_values import Static
from ...core._structure import LEAF, Node, Path, Structure, canonical
from ...core._traced_leaves_and_identity import carries_identity
from ...core._warning_source import report_untied
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

Module = tuple[str, int]
"""What a module is called, and its record."""


class _Pair(NamedTuple):
    """A module that entered, one of its shape that left, and the leaves that are tied in the first only."""

    text: str
    text_after: str
    ties: Sequence[LostLeaf]
    before: int
    after: int


class LostTie(NamedTuple):
    """A tie that is lost, as messages speak of it.

    Attributes:
        before: its paths where it was a tie.
        after: its paths where it is none; as many.
        advice: what to do.
    """

    before: list[str]
    after: list[str]
    advice: Advice


def ties_lost_between(entered: FlatDag, left: FlatDag, policy: Policy, *, is_with_state: bool = False) -> list[LostTie]:
    """Compares what left a function with what entered it. What is found counts as reported from then on.

    Args:
        entered: the arguments.
        left: the result, or the arguments and the result.
        policy: what to do.
        is_with_state: whether it is the latter.
    """
    if policy.on_untie == "ignore" or (entered.records, entered.root) == (left.records, left.root):
        return []
    containers = policy.containers
    tied = _modules_with_ties(entered, containers)
    if not tied:
        return []
    text = _in_state_or_result if is_with_state else _in_result
    objects = [*entered.objects, *left.objects]
    offset = len(entered.records)
    moved = [(op, tuple([offset + child for child in children])) for op, children in left.records]
    both = FlatDag([*entered.records, *moved], offset + left.root, objects)
    shape = _shapes(both)
    had = IdentitySet(entered.objects)
    lost_ties: list[LostTie] = []
    reported: set[int] = set()  # what was tied, and what it has become
    # One operation may have made the leaves of many modules.
    analyses: IdentityDict[Any] = IdentityDict()
    for pair in _pairs(tied, _modules(entered, containers, jtu.keystr), _modules(both, containers, text), both, shape):
        for lost in maximal(unsettled(pair.ties, objects)):
            parts = {part for tie in lost.ties for part in tie.parts}
            if lost.record in reported or parts <= reported:
                continue
            reported |= {lost.record, *parts}
            before, after = named(pair.text, lost.paths), named(pair.text_after, lost.paths)
            lost_ties.append(LostTie(before, after, _advice(lost, pair, both, shape, had, analyses)))
    # Who gets the result, an enclosing function or a later call, need not report it again.
    note(objects[number] for number in reported)
    return lost_ties


_MOST_TIES = 64  # of one module, whose origins are looked at


def _advice(
    lost: Lost,
    pair: _Pair,
    both: FlatDag,
    shape: Sequence[int],
    had: IdentitySet,
    analyses: IdentityDict[Any],
) -> Advice:
    """What to do about a tie that a function has lost.

    Args:
        lost: the tie.
        pair: the module with the tie, and the one without it.
        both: what entered and what left.
        shape: of each of its records.
        had: what the function received.
        analyses: what was found out about operations; it is filled.
    """
    keeping: list[tuple[str, str]] = []
    begun: tuple[str, str] | None = None
    first: Origin | None = None
    for tie in lost.ties[:_MOST_TIES]:
        one, two = [both.objects[part] for part in tie.parts]
        is_new = [both.objects[part] not in had for part in tie.parts]
        by_transform = untying_transform(one, two, analyses) if all(is_new) else []
        if by_transform:
            first = first or by_transform[0]
            keeping.extend(to_keep(origin.keeping) for origin in by_transform if origin.keeping is not None)
            continue
        origins = [origin_of(both.objects[part]) if new else None for part, new in zip(tie.parts, is_new, strict=True)]
        known_origin = next((each for each in origins if each is not None and each.keeping is not None), None)
        known = None if known_origin is None else known_origin.keeping
        versions = _two_versions(both, shape, (pair.before, pair.after), tie.at)
        # A model and its target change at different lines, or only one of them does. One path of a layer that is tied
        # may be replaced, too; but hardly all of its arrays, and not by an update.
        is_replaced = not all(is_new) and known in (None, REPLACES) and (versions is None or versions.num_leaves == 1)
        if versions is not None and origins[0] != origins[1] and not is_replaced:
            model, target = named(pair.text, versions.paths)
            begun, first = begun or to_begin_as_copy(target, model), first or known_origin
            continue
        first = first or known_origin or next((each for each in origins if each is not None), None)
        if known is not None:
            keeping.append(to_keep(known))
        elif is_replaced:
            keeping.append(to_keep(REPLACES))
        elif versions is not None and versions.num_leaves > 1 and not is_by_transform(one):
            keeping.append(to_keep(KEEPS_NODES))
        else:
            keeping.append(PUT_BACK)
    fixes = list(dict.fromkeys(keeping))
    if begun is not None:
        return Advice(first, [*fixes[:1], begun])
    return Advice(first, [*fixes, MEANT][:2])


class _Versions(NamedTuple):
    """Two nodes of which one began as the other, and which share nothing any more.

    Attributes:
        paths: of the two, in the module that held them.
        num_leaves: how many traced leaves are in each.
    """

    paths: tuple[Path, Path]
    num_leaves: int


def _two_versions(
    both: FlatDag, shape: Sequence[int], modules: tuple[int, int], ends: tuple[Path, Path]
) -> _Versions | None:
    """The nodes around a tie that had all leaves in common and have none now: a model and its target, for example.

    Args:
        both: what entered and what left.
        shape: of each record.
        modules: the record of the module that entered, and of the one that left.
        ends: the paths of the tie in it.
    """
    common = next((i for i, (a, b) in enumerate(zip(*ends, strict=False)) if a != b), None)
    if common is None:
        return None
    paths = ends[0][: common + 1], ends[1][: common + 1]
    one, other, new_one, new_other = [at(both, module, path) for module in modules for path in paths]
    if both.node(one) is None or shape[one] != shape[other]:
        return None
    leaves: set[int] = set()
    seen: set[tuple[int, int, int, int]] = set()
    stack = [(one, other, new_one, new_other)]
    while stack:
        four = stack.pop()
        if four in seen:
            continue
        seen.add(four)
        ops = [both.records[number] for number in four]
        if ops[0][0] is LEAF:
            if four[0] != four[1] or four[2] == four[3]:
                return None
            leaves.add(four[0])
        stack.extend(zip(*[children for _, children in ops], strict=False))
    return _Versions(paths, len(leaves))


def report_lost_ties(
    between_calls: Sequence[LostTie], in_trace: Sequence[LostTie], policy: Policy, names: Names
) -> None:
    """Says in one warning what one trace has lost.

    Args:
        between_calls: what was lost since an earlier call.
        in_trace: what the function has lost.
        policy: what to do.
        names: of the function and its arguments.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    lost = [*in_trace, *between_calls]
    if not lost:
        return
    first = lost[0]
    is_one, is_here = len(lost) == 1, bool(in_trace)
    which = "; ".join(listed(tie.before) for tie in lost[:_MOST_NAMED])
    more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    number = "two" if is_one and len(first.after) == 2 else "several"
    if is_here:
        where = f"but the result has {number} of them, {listed(first.after)}" if is_one else "but not in the result"
        when = "when it was entered"
    else:
        when = "in an earlier call"
        where = f"but now are {number}, still equal in value. That has also had the function traced and compiled again"
    what = f"{which}{more} were one object {'' if is_one else 'each '}{when}, {where}."
    fixes = list(dict.fromkeys(fix for tie in lost for fix in tie.advice.fixes if fix != MEANT))
    origin = next((tie.advice.origin for tie in lost if tie.advice.origin is not None), None)
    advice = Advice(origin, [*fixes, *[fix for fix in first.advice.fixes if fix == MEANT]][:2])
    paths = [path for tie in lost for path in tie.before]
    report_untied(policy.on_untie, names.definition, what, advice.text, paths, count=len(lost))


_MOST_NAMED = 3  # ties that a message names


def _in_result(path: Path) -> str:
    return "result" + jtu.keystr(path)


def _in_state_or_result(path: Path) -> str:
    (first, *rest) = path or (None,)
    return jtu.keystr(tuple(rest)) if getattr(first, "idx", None) == 0 else "result" + jtu.keystr(tuple(rest))


def _pairs(
    tied: Sequence[Module], came: Iterable[Module], went: Iterable[Module], both: FlatDag, shape: Sequence[int]
) -> Iterator[_Pair]:
    """Each tied module with what could be a new version of it and has lost ties."""

    def agree(i: int, j: int) -> bool:
        return shape[i] == shape[j]

    entrants, results = _by_shape(came, shape), _by_shape(went, shape)
    for name, before in tied:
        own, others = entrants[shape[before]], results.get(shape[before], [])
        for text_after, after in _corresponding((name, before), own, others):
            ties = lost_leaf_ties(both.below(before), both.below(after), agree)
            if ties:
                yield _Pair(name, text_after, ties, before, after)


def _corresponding(tied: Module, own: Sequence[Module], others: Sequence[Module]) -> Sequence[Module]:
    """Of what went, what could be a new version of one of those that came.

    As many went as came, once or several times over: they are taken to correspond. So are they to those that came if
    each of them counts once, as in `f(model, model)`. Otherwise each might be a new version of each.
    """
    if len(others) % len(own) == 0:
        return others[own.index(tied) :: len(own)]
    once = list(dict.fromkeys([number for _, number in own]))
    return others[once.index(tied[1]) :: len(once)] if len(others) % len(once) == 0 else others


def _by_shape(modules: Iterable[Module], shape: Sequence[int]) -> dict[int, list[Module]]:
    found: dict[int, list[Module]] = {}
    for text, number in modules:
        found.setdefault(shape[number], []).append((text, number))
    return found


def _modules(tree: FlatDag, containers: bool, text: Callable[[Path], str]) -> Iterator[Module]:
    """Every module, with what it is called; one that several outermost objects hold comes once for each.

    A mutable container outside modules counts as one, if it is an object.
    """
    for path, root in outermost_objects(tree, containers):
        part = tree.below(root)
        for number, own in part.first_paths.items():
            node = tree.node(number)
            if node is not None and node.type.carries_identity and (number in part.outside or not node.type.is_plain):
                yield text((*path, *own)), number


def outermost_objects(tree: FlatDag, containers: bool) -> Iterator[tuple[Path, int]]:
    """What carries identity and is in nothing else that does, once for each path to it.

    Args:
        tree: arguments or a result.
        containers: whether mutable containers outside modules are objects.
    """
    stack: list[tuple[Path, int]] = [((), tree.root)]
    while stack:
        path, number = stack.pop()
        node = tree.node(number)
        if node is None:
            continue
        if node.type.is_plain and not (containers and node.type.is_mutable):
            steps = list(zip(node.keys, tree.records[number][1], strict=True))
            stack.extend([((*path, key), child) for key, child in reversed(steps)])
        else:
            yield path, number


def _modules_with_ties(tree: FlatDag, containers: bool) -> list[Module]:
    """For each tie that holds a traced leaf, the smallest module with all of it in, with what it is called.

    Outside modules it is the smallest mutable container. What is in another module comes after it.
    """
    found: dict[int, str] = {}
    for start, root in outermost_objects(tree, containers):
        above: dict[int, tuple[tuple[int, ...], Path]] = {}  # record → those on its first path, and the path
        stack: list[tuple[int, tuple[int, ...], Path]] = [(root, (), start)]
        while stack:
            number, chain, path = stack.pop()
            if number not in above:
                above[number] = chain, path
                node = tree.node(number)
                if node is not None:
                    steps = tuple(zip(node.keys, tree.records[number][1], strict=True))
                    stack.extend((child, (*chain, number), (*path, key)) for key, child in reversed(steps))
            elif tree.holds_leaf[number]:
                common = [a for a, b in zip(above[number][0], chain, strict=False) if a == b]
                types = {a: node.type for a in common if (node := tree.node(a)) is not None}
                modules = [a for a in common if not types[a].is_plain] or [a for a in common if types[a].is_mutable]
                if modules:
                    found.setdefault(modules[-1], jtu.keystr(above[modules[-1]][1]))
    # A module comes before what is in it, so that a tie is first met where all of its paths are.
    return [(text, number) for number, text in sorted(found.items(), reverse=True)]


def _shapes(tree: FlatDag) -> list[int]:
    """For each record a number, equal for equal trees with equal types of leaves, whatever is shared in them."""
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


_MOST = 8  # traces that are remembered for one structure, which differ in the types of leaves
_MOST_BYTES = 2**20


class _Argument(NamedTuple):
    """An argument with which a function was traced.

    Attributes:
        counts: of the policy, whether arrays and containers carry identity.
        text: what it is called.
        shape: its records.
        kinds: for each record, that of the leaf.
    """

    counts: tuple[bool, bool]
    text: str
    shape: Rooted
    kinds: Sequence[Kind | None]


class SeenArguments:
    """The arguments that one wrapped function was traced with, as long as JAX's caches keep their structures alive."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Structure, list[list[_Argument]]] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def compare(self, entered: FlatDag, caller: Sequence[Any], policy: Policy) -> list[LostTie]:
        """Compares what enters a function now with what entered it in earlier traces, and remembers it.

        Args:
            entered: the arguments.
            caller: the caller's objects, by the same numbers.
            policy: what to do.

        Returns:
            What was lost, which counts as reported from then on.
        """
        with self._lock:
            traces = [trace for known in self._seen.values() for trace in known]
        node = entered.node(entered.root)
        assert node is not None
        counts = policy.arrays, policy.containers
        arguments: list[_Argument] = []
        lost: list[LostTie] = []
        for key, root in zip(node.keys, entered.records[entered.root][1], strict=True):
            records, numbers = canonical(root, lambda number: entered.records[number])
            leaves = [entered.records[number][0] is LEAF for number in numbers]
            kinds = [kind_of(entered.objects[n]) if leaf else None for n, leaf in zip(numbers, leaves, strict=True)]
            now = _Argument(counts, str(key), FlatDag(records, len(records) - 1), kinds)
            if policy.on_untie != "ignore":
                earlier = [one for trace in traces for one in trace if one.counts == counts]
                objects = [caller[n] if leaf else None for n, leaf in zip(numbers, leaves, strict=True)]
                lost += _lost_since(now, objects, earlier)
            arguments.append(now)
        with self._lock:
            known = self._seen.setdefault(entered.structure, [])
            # Of one structure, the records are the same.
            if all(
                [(one.counts, one.kinds) for one in trace] != [(one.counts, one.kinds) for one in arguments]
                for trace in known
            ):
                known[:] = [*known, arguments][-_MOST:]
        return lost


_SINCE = Advice(
    None,
    [
        (
            "`jax.device_put`, `jax.tree.map` and `optax.apply_updates` see trees, and do that. To put the tie back:",
            "    model = sharedtree.retie(model, like=before)",
        ),
        MEANT,
    ],
)


def _lost_since(now: _Argument, objects: Sequence[Any], earlier: Sequence[_Argument]) -> list[LostTie]:
    missing: list[list[LostLeaf]] = []  # for each earlier module of which this could be a loosened version
    for before in earlier:
        if before.text != now.text:
            continue  # another argument
        lost = lost_leaf_ties(before.shape, now.shape, _agree(before, now))
        if lost == []:
            return []  # the function knows such modules
        if lost and not lost_leaf_ties(now.shape, before.shape, _agree(now, before)):
            missing.append(lost)
    found: list[LostTie] = []
    for ties in missing:
        # What one of them has reported is settled for the next.
        for lost in maximal(unsettled(ties, objects)):
            if are_copies([(objects[a], objects[b]) for a, b in (tie.parts for tie in lost.ties)]):
                names = named(now.text, lost.paths)
                found.append(LostTie(names, names, _SINCE))
                note(objects[part] for tie in lost.ties for part in tie.parts)
    return found


def _agree(left: _Argument, right: _Argument) -> Agree:
    def agree(i: int, j: int) -> bool:
        both_static = type(left.shape.records[i][0]) is Static and type(right.shape.records[j][0]) is Static
        return both_static or (left.kinds[i] is not None and left.kinds[i] == right.kinds[j])

    return agree


def are_copies(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether each two leaves look like copies of one: equal in value, as far as that is cheap to tell.

    At most a megabyte of each leaf is compared: the beginning of its first shard or, of two that are sharded
    differently, the beginning of the whole array. Leaves of which all are constant (zeros, say) tell nothing. What is
    traced, deleted or on other machines is not equal to anything.
    """
    are_constant = True
    with jax.ensure_compile_time_eval():  # a function is being traced
        for one, two in pairs:
            if kind_of(one) != kind_of(two):
                return False
            here, there = _beginnings(one, two)
            if here is None or there is None or here.tobytes() != there.tobytes():
                return False
            first = here.ravel()[:1].tobytes()
            are_constant = are_constant and here.tobytes() == first * here.size
    return not are_constant


_HostArray = np.ndarray[Any, Any]


def _beginnings(one: Any, two: Any) -> tuple[_HostArray | None, _HostArray | None]:
    """The first elements of two leaves of one kind, from the same places; None for what cannot be had."""
    here, there = _data(one), _data(two)
    if here is None or there is None:
        return None, None
    if isinstance(here, jax.Array) and isinstance(there, jax.Array) and _are_sharded_alike(here, there):
        here, there = here.addressable_shards[0].data, there.addressable_shards[0].data
    slices = _beginning_of(here)
    return _on_host(here, slices), _on_host(there, slices)


def _data(leaf: Any) -> Any:
    """The array whose bytes are the value of a leaf; None if they cannot be had."""
    if not carries_identity(leaf):
        return np.asarray(leaf)
    if isinstance(leaf, Tracer) or not isinstance(leaf, (jax.Array, np.ndarray)) or isinstance(leaf, jax.Ref):
        return None
    if isinstance(leaf, np.ndarray):
        return leaf
    if leaf.is_deleted() or not leaf.is_fully_addressable:
        return None
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _are_sharded_alike(one: jax.Array, two: jax.Array) -> bool:
    """Whether the first shards of two arrays of one shape are of the same place."""
    (here, *_), (there, *_) = one.addressable_shards, two.addressable_shards
    return here.index == there.index


def _beginning_of(data: Any) -> tuple[slice, ...]:
    """At most a megabyte from the beginning of an array, as a slice along each axis."""
    slices: list[slice] = []
    num_bytes = data.nbytes
    for size in data.shape:
        if num_bytes <= _MOST_BYTES:
            break
        row = num_bytes // size
        count = max(_MOST_BYTES // row, 1)
        slices.append(slice(0, count))
        num_bytes = row * count
    return (*slices, *[slice(0, size) for size in data.shape[len(slices) :]])


def _on_host(data: Any, slices: tuple[slice, ...]) -> _HostArray:
    """A part of an array, put together from its shards, of which no more than that part is copied."""
    if not isinstance(data, jax.Array) or len(data.sharding.device_set) == 1 or data.is_fully_replicated:
        whole = data.addressable_shards[0].data if isinstance(data, jax.Array) else data
        return np.asarray(whole[slices] if slices and whole.nbytes > _MOST_BYTES else whole)
    part = np.empty([each.stop for each in slices], data.dtype)
    for shard in data.addressable_shards:
        if shard.replica_id == 0:
            starts = [index.start or 0 for index in shard.index]
            # Where the shard and the part overlap, as slices of the one and of the other.
            sizes = zip(starts, shard.data.shape, slices, strict=True)
            overlap = [slice(0, max(min(start + size, own.stop) - start, 0)) for start, size, own in sizes]
            if all(each.stop for each in overlap):
                there = [slice(s, s + each.stop) for s, each in zip(starts, overlap, strict=True)]
                is_whole = shard.data.shape == tuple([each.stop for each in overlap])
                part[tuple(there)] = np.asarray(shard.data if is_whole else shard.data[tuple(overlap)])
    return part
