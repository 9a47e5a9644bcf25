"""A tie that was there in one call of a function and is not in the next was lost between them.

Vanilla functions lose ties outside transforms, too (`jax.device_put(model)`). That has the next call traced again, so
then the modules that enter are compared with those of earlier traces. An independent model without the tie may come at
any time; one that lost it, and nothing else, still has equal values at both paths.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...core._handle import Walked
from ...core._locks import Lock
from ...core._node_types import carries_identity
from ...core._sharing import Agree, Shape
from ...core._short_texts import listed
from ...core._static_values import Static
from ...core._structure import LEAF, Structure, canonical
from ...core._warning_source import Definition, report_untied
from ...ties._context import Policy
from ...ties._lost_ties import KEEPING, Kind, LostLeaf, kind_of, lost_leaf_ties, maximal, named, unsettled
from ...ties._meant_untied import note
from .._argument_names import Names

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
    shape: Shape
    kinds: Sequence[Kind | None]


class SeenArguments:
    """The arguments that one wrapped function was traced with, as long as JAX's caches keep their structures alive."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Structure, list[list[_Argument]]] = weakref.WeakKeyDictionary()
        self._lock = Lock()

    def compare(self, entered: Walked, caller: Sequence[Any], policy: Policy, names: Names) -> None:
        """Compares what enters a function now with what entered it in earlier traces, and remembers it.

        Args:
            entered: the arguments.
            caller: the caller's objects, by the same numbers.
            policy: what to do.
            names: of the function and its arguments.

        Raises:
            UntiedError: under `Policy(on_untie="error")`.
        """
        with self._lock:
            traces = [trace for known in self._seen.values() for trace in known]
        node = entered.node(entered.root)
        assert node is not None
        assert entered.structure is not None
        counts = policy.arrays, policy.containers
        arguments: list[_Argument] = []
        for key, root in zip(node.keys, entered.records[entered.root][1], strict=True):
            records, numbers = canonical(root, lambda number: entered.records[number])
            leaves = [entered.records[number][0] is LEAF for number in numbers]
            kinds = [kind_of(entered.objects[n]) if leaf else None for n, leaf in zip(numbers, leaves, strict=True)]
            now = _Argument(counts, str(key), Shape(records, len(records) - 1), kinds)
            if policy.on_untie != "ignore":
                earlier = [one for trace in traces for one in trace if one.counts == counts]
                objects = [caller[n] if leaf else None for n, leaf in zip(numbers, leaves, strict=True)]
                _compare_with_earlier(now, objects, earlier, policy, names.definition)
            arguments.append(now)
        with self._lock:
            known = self._seen.setdefault(entered.structure, [])
            # Of one structure, the records are the same.
            if all(
                [(one.counts, one.kinds) for one in trace] != [(one.counts, one.kinds) for one in arguments]
                for trace in known
            ):
                known[:] = [*known, arguments][-_MOST:]


def _compare_with_earlier(
    now: _Argument, objects: Sequence[Any], earlier: Sequence[_Argument], policy: Policy, definition: Definition
) -> None:
    missing: list[list[LostLeaf]] = []  # for each earlier module of which this could be a loosened version
    for before in earlier:
        if before.text != now.text:
            continue  # another argument
        lost = lost_leaf_ties(before.shape, now.shape, _agree(before, now))
        if lost == []:
            return  # the function knows such modules
        if lost and not lost_leaf_ties(now.shape, before.shape, _agree(now, before)):
            missing.append(lost)
    # What one of them has reported is settled for the next.
    for lost in (lost for ties in missing for lost in maximal(unsettled(ties, objects))):
        if are_copies([(objects[a], objects[b]) for a, b in (tie.parts for tie in lost.ties)]):
            names = named(now.text, lost.paths)
            what = (
                f"{listed(names)} were one object in an earlier call, but now are "
                f"{'two' if len(names) == 2 else 'several'}, still equal in value. That has also had the function "
                "traced and compiled again."
            )
            report_untied(policy.on_untie, definition, what, KEEPING, names)
            note(objects[part] for tie in lost.ties for part in tie.parts)


def _agree(left: _Argument, right: _Argument) -> Agree:
    def agree(i: int, j: int) -> bool:
        both_static = type(left.shape.records[i][0]) is Static and type(right.shape.records[j][0]) is Static
        return both_static or (left.kinds[i] is not None and left.kinds[i] == right.kinds[j])

    return agree


def are_copies(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether each two leaves look like copies of one: equal in value, as far as that is cheap to tell.

    Compared are the first megabyte of each leaf's first shard. Leaves of which all are constant (zeros, say) tell
    nothing. What is traced, deleted or on other machines is not equal to anything.
    """
    are_constant = True
    with jax.ensure_compile_time_eval():  # a function is being traced
        for one, two in pairs:
            here, there = _beginning(one), _beginning(two)
            if here is None or there is None or kind_of(one) != kind_of(two) or here.shape != there.shape:
                return False
            if here.tobytes() != there.tobytes():
                return False
            first = here.ravel()[:1].tobytes()
            are_constant = are_constant and here.tobytes() == first * here.size
    return not are_constant


def _beginning(leaf: Any) -> np.ndarray[Any, Any] | None:
    """The first elements of a leaf; None if they cannot be had."""
    if not carries_identity(leaf):
        return np.asarray(leaf)
    if isinstance(leaf, Tracer) or not isinstance(leaf, (jax.Array, np.ndarray)) or isinstance(leaf, jax.Ref):
        return None
    data: Any = leaf
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted() or not leaf.is_fully_addressable:
            return None
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
        data = data.addressable_shards[0].data
    while data.nbytes > _MOST_BYTES and data.ndim:
        row = data.nbytes // data.shape[0]
        if row <= _MOST_BYTES:
            data = data[: _MOST_BYTES // row]
            break
        data = data[0]
    return np.asarray(data)
