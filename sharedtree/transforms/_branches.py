"""`jax.lax.cond` and `jax.lax.switch`.

The results of all branches must have one structure, but no branch knows what the others return. JAX traces each branch
by itself. It caches the traces by function and operands, and does not call a branch again that it has traced.

So the branches agree through an object beside their operands, an `Agreement`. In the first call, each branch
records there the structure of its result. If the structures differ, they are joined (`_joining_trees`), and all
branches are traced once more with a new agreement. It says what to return. Later calls use the same agreement. It
lives as long as JAX's caches hold the traces.

                 true_fun                       false_fun
    1st trace    State(z, z): one leaf, z       State(a, b): two leaves, a and b
    2nd trace    as State(·, ·): z and z        as State(·, ·): a and b

In place, each branch returns all operands too, since another branch may have changed them.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import tree_util as jtu

from ..core._by_identity import IdentitySet
from ..core._call_arguments import LeafPath
from ..core._errors import SharingMismatchError
from ..core._printing import listed
from ..core._structure import FlatDag, Node, Structure
from ._caller_side import leave
from ._calls_with_operands import CallWithOperands, TakingOperands
from ._function_and_options import in_code
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace, packed
from ._joining_trees import Sides, holds_modules, join, join_of_branches, leaves_like
from ._leaf_groups import LeafGroup, whole
from ._loops import CarryObjects, find_kept_objects, leaf_types, refer_to_kept


def cond(
    call: CallWithOperands, pred: Any, true_fun: Any, false_fun: Any, operands: Sequence[Any] = (), **options: Any
) -> Any:
    """Adapter of `jax.lax.cond`."""
    if not callable(true_fun) and callable(false_fun) and len(operands) == 2 and callable(operands[1]):
        # JAX still takes an operand for each branch: pred, true_operand, true_fun, false_operand, false_fun.
        true_operand, f, false_operand, g = true_fun, false_fun, *operands
        return cond(call, pred, lambda x, _: f(x), lambda _, x: g(x), (true_operand, false_operand), **options)
    branches = {"true_fun": true_fun, "false_fun": false_fun}
    if operands and options:
        # Operands by position and `operand=` exclude each other. JAX itself says best what is wrong.
        return call.transform(pred, true_fun, false_fun, *operands, **options)
    return _run_until_branches_agree(
        call,
        branches,
        operands,
        options,
        lambda inner, packed_operands: call.apply(pred, *inner, packed_operands),
        lambda: call.transform(pred, true_fun, false_fun, *operands, **options),
    )


def switch(call: CallWithOperands, index: Any, branches: Any, operands: Sequence[Any] = (), **options: Any) -> Any:
    """Adapter of `jax.lax.switch`."""
    functions = tuple(branches) if isinstance(branches, Iterable) else ()
    if not functions or (operands and options):
        # As for `cond`.
        return call.transform(index, branches, *operands, **options)
    return _run_until_branches_agree(
        call,
        {f"branches[{i}]": function for i, function in enumerate(functions)},
        operands,
        options,
        lambda inner, packed_operands: call.apply(index, inner, packed_operands),
        lambda: call.transform(index, functions, *operands, **options),
    )


class Agreement:
    """Agreement of the branches of one call on the structure of their results.

    Args:
        num_functions: number of different functions among the branches.
        expected: the structure of their results. None as long as it is not known.
        is_repeated: True if the branches were traced before with these operands, so that there are no new warnings.
        is_separate: True if the result shares no object with the operands, since the branches disagree on that.

    Attributes:
        changed: records of the operands changed in place by some branch.
        returned: the structure of each function's result, by the `id` of the function's terms.
    """

    def __init__(
        self,
        num_functions: int,
        expected: Structure | None = None,
        *,
        is_repeated: bool = False,
        is_separate: bool = False,
    ) -> None:
        self.num_functions = num_functions
        self.expected = expected
        self.is_repeated = is_repeated
        self.is_separate = is_separate
        self.changed: set[int] = set()
        self.returned: dict[int, Structure] = {}

    def fit(self, trace: FunctionTrace, result: FlatDag) -> LeafGroup:
        """Packs the result of a branch into the leaf group of the other branches.

        Raises:
            NotAlikeError: if the branches have to pack their results in another way.
        """
        group = packed(result)
        structure = group.selection.structure
        if self.expected is None:
            # Only the structure is kept: JAX's caches hold this agreement, and must not hold tracers. The adapter holds
            # the inner functions and with them the terms, so that the `id` is valid.
            self.returned[id(trace.terms)] = structure
            if len(self.returned) == self.num_functions and len(set(self.returned.values())) > 1:
                raise NotAlikeError
            return group
        if structure is self.expected:
            return group
        expected_tree = FlatDag.without_objects(self.expected)
        try:
            joined = join(expected_tree, result, Sides(trace.terms.title, "before", "now"))
        except SharingMismatchError:
            raise NotAlikeError from None
        if not joined.fits:
            raise NotAlikeError
        return whole(leaves_like(expected_tree, result, joined), self.expected)


class NotAlikeError(Exception):
    """The results of branches have to be packed in another way. Raised by a trace for the adapter, which catches it."""


class OperandsWithAgreement:
    """The operands of branches as JAX gets them: a leaf group, with the agreement of the branches as aux data.

    JAX compares aux data by equality. That of agreements is identity, so a new agreement makes JAX trace again.
    """

    __slots__ = ("agreement", "group")

    def __init__(self, group: LeafGroup, agreement: Agreement) -> None:
        self.group = group
        self.agreement = agreement


jtu.register_pytree_with_keys(
    OperandsWithAgreement,
    # The empty key adds nothing to a path, so that JAX's errors name leaves as if the group itself stood there.
    lambda item: ([(LeafPath(""), item.group)], item.agreement),
    lambda agreement, groups: OperandsWithAgreement(next(iter(groups)), agreement),
    lambda item: ((item.group,), item.agreement),
)


def _run_until_branches_agree(
    call: CallWithOperands,
    branches: Mapping[str, Any],
    operands: Sequence[Any],
    options: dict[str, Any],
    run: Callable[[Sequence[Inner], Any], Any],
    run_vanilla: Callable[[], Any],
) -> Any:
    """Calls the transform, once more if the branches return results of different structures.

    Args:
        call: the call of the transform.
        branches: the user's functions by their names in errors.
        operands: the operands by position.
        options: the operands by keyword.
        run: (functions for JAX, packed operands) → what the transform returns.
        run_vanilla: calls the transform with the user's own functions and operands, for its errors.
    """
    functions = list(branches.values())
    named_operands = {f"operands[{i}]": operand for i, operand in enumerate(operands)} | options
    (group,) = call.enter(functions[0], named_operands)
    if call.policy.in_place:
        _forbid_references(call)
    inner = [call.function(function, _branch, adds=False) for function in functions]
    # `switch` may get one function several times. JAX traces it once.
    num_functions = len(IdentitySet(inner))
    agreements = _agreements_of(call, inner)
    types = leaf_types(call.packed)
    agreement = agreements.get(types) or Agreement(num_functions)
    while True:
        try:
            result = run(inner, OperandsWithAgreement(group, agreement))
            break
        except TypeError as error:
            # JAX says where in a result two branches differ. For the whole result that is the empty path.
            error.args = (str(error).replace(" at path  ", " "),)
            raise
        except NotAlikeError:
            agreement = _next_agreement(call, agreement, branches, inner, run_vanilla)
    # JAX skips branches that it has traced already, so not every call hears of all results.
    if agreement.expected is not None or len(agreement.returned) == num_functions:
        agreement.expected = agreement.expected or next(iter(agreement.returned.values()))
        agreement.is_repeated = False
        agreements[types] = agreement
    if not call.policy.in_place:
        return call.leave(result)
    return call.leave(_refer_to_callers_objects(call, result, agreement.changed), with_state=(0,))


def _next_agreement(
    call: CallWithOperands,
    agreement: Agreement,
    branches: Mapping[str, Any],
    inner: Sequence[Inner],
    run_vanilla: Callable[[], Any],
) -> Agreement:
    """Makes the agreement for the next attempt, after the branches returned results of different structures.

    Raises:
        SharingMismatchError: if their results cannot be joined, or a branch returns something else each time.
    """
    if agreement.is_repeated:
        raise SharingMismatchError(
            f"A branch of `{call.title}` returned something else when it was traced again. What is shared in "
            "its result, and what is static, may depend on the operands only."
        )
    if agreement.expected is not None:
        # The agreement was made for operands of other shapes, so the branches start anew.
        return Agreement(agreement.num_functions, is_separate=agreement.is_separate)
    named_inner = zip(branches, inner, strict=True)
    # The terms are alive in `inner`, so their `id`s are valid.
    returned = {name: agreement.returned[id(function.terms)] for name, function in named_inner}
    trees = {name: FlatDag.without_objects(structure) for name, structure in returned.items()}
    try:
        expected = join_of_branches(trees, call.title)
    except SharingMismatchError:
        if call.policy.in_place and not agreement.is_separate:
            # In place, the operands come out beside the result. One branch may return an operand where another returns
            # something new: a difference in sharing that is gone if the result shares nothing with the operands.
            return Agreement(agreement.num_functions, is_separate=True)
        if not any(map(holds_modules, trees.values())):
            # Without modules, JAX itself says best what is wrong.
            run_vanilla()
        raise
    return Agreement(agreement.num_functions, expected, is_repeated=True, is_separate=agreement.is_separate)


def _forbid_references(call: CallWithOperands) -> None:
    """Raises if an operand holds a `jax.Ref`: in place, all operands come out of a branch, and no reference can."""
    paths = call.packed.tree.paths_to(lambda leaf: isinstance(leaf, jax.Ref))
    if paths:
        raise ValueError(
            f"A `jax.Ref` is at {listed(paths)}. In place, all operands come out of the branches of "
            f"`{call.title}`, and no reference can. What is written to one is seen without that, and other changes "
            "can be returned:\n"
            f"    inner = {in_code(call.title, 'in_place=False')}"
        )


def _agreements_of(call: CallWithOperands, inner: Sequence[Inner]) -> "weakref.WeakValueDictionary[Any, Agreement]":
    """Returns the agreements of these branches over operands of this structure, by the types of the leaves."""
    learned = inner[0].terms.learned
    key = [*inner, call.packed.tree.structure]
    agreements = learned.get(key)
    if agreements is None:
        # Weak, so that an agreement goes when JAX's caches forget the traces.
        agreements = weakref.WeakValueDictionary[Any, Agreement]()
        learned.add(key, agreements)
    return agreements


def _branch(trace: FunctionTrace, operands: OperandsWithAgreement) -> Any:
    """Runs one branch for JAX. Returns its result as agreed, in place a pair of the operands and the result."""
    agreement = operands.agreement
    result = trace.call(operands.group, again=agreement.is_repeated)
    if not trace.terms.policy.in_place:
        return agreement.fit(trace, trace.walked(result))
    received = trace.received
    if agreement.is_separate:
        # Packed and built again, the result consists of new objects.
        result = leave((trace.pack(result),))
    tree = trace.walked((received.arguments, result))
    operands_in, operands_out = received.tree, tree.child(0)
    joined = join(operands_in, operands_out, Sides(trace.terms.title, "when a branch begins", "when it ends"))
    containers = trace.terms.policy.containers
    agreement.changed |= find_kept_objects(operands_in, operands_in, operands_out, joined, (), containers=containers)[1]
    return agreement.fit(trace, tree)


def _refer_to_callers_objects(call: CallWithOperands, result: LeafGroup, changed: set[int]) -> LeafGroup:
    """Lets objects of the operands in a result refer to the caller's objects.

    Args:
        call: the call of the transform.
        result: the pair of operands and result returned by the branch.
        changed: records of the operands changed by some branch. Their contents will be written back.
    """
    structure, tree = result.selection.structure, call.packed.tree
    operands_out = FlatDag.without_objects(structure).child(0)
    joined = join(tree, operands_out, Sides(call.title, "when a branch begins", "when it ends"))
    # Record of the result → record of the caller. If several fit, the first pair counts.
    numbers = {j: i for i, j in reversed(joined.pairs) if type(tree.records[i][0]) is Node}
    containers = call.policy.containers
    kept = frozenset([number for number in numbers.values() if tree.is_object(number, containers=containers)])
    untied = frozenset([structure.leaf_numbers[place] for place in structure.noted])
    objects = CarryObjects(kept, frozenset(changed), frozenset())
    callers_numbers = [numbers.get(record, -1) for record in range(len(structure.records))]
    return whole(
        result.leaves,
        refer_to_kept(structure, callers_numbers, objects, tree.records, in_place=True, untied=untied),
    )


COND = TakingOperands(cond)
SWITCH = TakingOperands(switch)
