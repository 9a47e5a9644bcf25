"""`jax.lax.cond` and `jax.lax.switch`.

The results of all branches must have one structure, but no branch knows what the others return. JAX traces each branch
by itself. It caches the traces by function and operands, and does not call a branch again that it has traced.

So the branches agree through an object beside their operands, an `Agreement`. In the first call, each branch records
there the structure of its result. If the structures differ, they are joined (`_joining_trees`): the join has the ties
that all results have. Then all branches are traced once more with a new agreement, which holds the structure that each
must return. Later calls use this agreement. It lives as long as JAX's caches hold the traces.

                 true_fun                       false_fun
    1st trace    State(z, z): one leaf, z       State(a, b): two leaves, a and b
    2nd trace    as State(·, ·): z and z        as State(·, ·): a and b

In place, each branch returns a pair of the operands and its result: another branch may have changed the operands, and
all branches must return trees of one structure.
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
from ._function_side import FunctionTrace, single_group_of_tree
from ._joining_trees import Sides, holds_modules, join, join_of_branches, leaves_like
from ._leaf_groups import LeafGroup, single_group
from ._loops import CarryObjects, find_kept_objects, leaf_types, structure_for_caller


def cond(
    call: CallWithOperands, pred: Any, true_fun: Any, false_fun: Any, operands: Sequence[Any] = (), **options: Any
) -> Any:
    """Adapter of `jax.lax.cond`.

    Args:
        call: the call of the transform.
        pred: the condition.
        true_fun: the branch if it is true.
        false_fun: the branch if it is false.
        operands: the operands by position.
        options: the operand by keyword, `operand=`, if there is one. The transform has no other options.

    Returns:
        The result of the branch that was taken.
    """
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
    """Adapter of `jax.lax.switch`. Returns the result of the branch that was taken.

    Args:
        call: the call of the transform.
        index: the number of the branch.
        branches: the functions.
        operands: the operands by position.
        options: the operand by keyword, `operand=`, if there is one.
    """
    functions = tuple(branches) if isinstance(branches, Iterable) else ()
    if not functions or (operands and options):
        # There is no branch, or there are operands both by position and by keyword. JAX itself says best what is wrong.
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

    The adapter makes it and hands it to JAX with the operands. Each trace of a branch reads it and writes to it.

    Args:
        num_functions: number of different functions among the branches.
        expected: the structure that each branch must return. None as long as it is not known.
        is_repeated: True if the branches are traced again with the same operands. Then ties that they lose have been
            reported already.
        is_separate: True if, in place, the result must share no object with the operands, since the branches disagree
            on what it shares.

    Attributes:
        changed: records of the operands changed in place by some branch.
        returned: the structure of each function's result, by the `id` of the function's terms. Filled by the traces
            while `expected` is None.
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
        """Packs the result of a branch with the structure agreed on. Returns the leaf group.

        If no structure is agreed on yet, packs the result as it is and records its structure.

        Args:
            trace: the trace of the branch.
            result: the flattened result of the branch.

        Raises:
            NotAlikeError: if the branches have to pack their results in another way. While nothing is agreed on, the
                trace of the last function finds this out.
        """
        group = single_group_of_tree(result)
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
        # The structures differ, but the result may fit: it may have more ties, or static numbers where leaves are
        # expected.
        expected_tree = FlatDag.without_objects(self.expected)
        try:
            joined = join(expected_tree, result, Sides(trace.terms.title, "before", "now"))
        except SharingMismatchError:
            raise NotAlikeError from None
        if not joined.fits:
            raise NotAlikeError
        return single_group(leaves_like(expected_tree, result, joined), self.expected)


class NotAlikeError(Exception):
    """The results of branches have to be packed in another way.

    A trace raises this, and `_run_until_branches_agree` catches it.
    """


class OperandsWithAgreement:
    """The operands of branches as JAX gets them: a leaf group, with the agreement of the branches as aux data.

    JAX traces again if the aux data is not equal to that of an earlier trace. Two agreements are never equal, so with a
    new agreement JAX traces all branches again.
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
    """Calls the transform. If the branches return results of different structures, calls it again until they agree.

    Args:
        call: the call of the transform.
        branches: the user's functions by their names in errors.
        operands: the operands by position.
        options: the operand by keyword, if there is one.
        run: (functions for JAX, packed operands) → what the transform returns.
        run_vanilla: calls the transform with the user's own functions and operands, for its errors.

    Returns:
        The result of the branch that was taken.

    Raises:
        SharingMismatchError: if the branches cannot agree.
        ValueError: if an operand holds a `jax.Ref` and the policy is in place.
    """
    functions = list(branches.values())
    named_operands = {f"operands[{i}]": operand for i, operand in enumerate(operands)} | options
    (group,) = call.enter(functions[0], named_operands)
    if call.policy.in_place:
        _forbid_references(call)
    # `adds=False`: a branch may not give an object more children than it had, or fewer. The operands that the branches
    # return must have one structure.
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
            # JAX says at which path of a result two branches differ. The path of a leaf group is empty and left out.
            error.args = (str(error).replace(" at path  ", " "),)
            raise
        except NotAlikeError:
            agreement = _next_agreement(call, agreement, branches, inner, run_vanilla)
    # The agreement is kept for later calls once it is complete. JAX skips branches that it has traced already, so after
    # some calls it is not.
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

    The next attempt begins without a structure, or it has the join of the results as the structure to return.

    Args:
        call: the call of the transform.
        agreement: the agreement of the last attempt.
        branches: the user's functions by their names in errors.
        inner: the functions for JAX, in the same order.
        run_vanilla: calls the transform with the user's own functions and operands, for its errors.

    Raises:
        SharingMismatchError: if the results cannot be joined, or if a branch returns something else each time.
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
            # In place, the operands come out beside the result. If one branch returns an operand and another one
            # something new, the pairs of operands and result differ in ties. They do not if no result shares anything
            # with the operands.
            return Agreement(agreement.num_functions, is_separate=True)
        if not any(map(holds_modules, trees.values())):
            # Without modules, JAX itself says best what is wrong.
            run_vanilla()
        raise
    return Agreement(agreement.num_functions, expected, is_repeated=True, is_separate=agreement.is_separate)


def _forbid_references(call: CallWithOperands) -> None:
    """Raises `ValueError` if an operand holds a `jax.Ref`.

    In place, each branch returns all operands, and no branch can return a reference.
    """
    paths = call.packed.tree.paths_to(lambda leaf: isinstance(leaf, jax.Ref))
    if paths:
        raise ValueError(
            f"A `jax.Ref` is at {listed(paths)}. In place, all operands come out of the branches of "
            f"`{call.title}`, and no reference can. What is written to one is seen without that, and other changes "
            "can be returned:\n"
            f"    inner = {in_code(call.title, 'in_place=False')}"
        )


def _agreements_of(call: CallWithOperands, inner: Sequence[Inner]) -> "weakref.WeakValueDictionary[Any, Agreement]":
    """Returns the agreements that earlier calls of these branches have reached with operands of this structure.

    Args:
        call: the call of the transform.
        inner: the functions for JAX.

    Returns:
        Types of the leaves, as `leaf_types` gives them → agreement. New agreements are to be added to it.
    """
    learned = inner[0].terms.learned
    key = [*inner, call.packed.tree.structure]
    agreements = learned.get(key)
    if agreements is None:
        # Weak, so that an agreement goes when JAX's caches forget the traces.
        agreements = weakref.WeakValueDictionary[Any, Agreement]()
        learned.add(key, agreements)
    return agreements


def _branch(trace: FunctionTrace, operands: OperandsWithAgreement) -> Any:
    """Runs one branch for JAX.

    In place, adds the operands that the branch changed to `changed` of the agreement.

    Returns:
        The leaf group of the result, with the structure agreed on. If the policy is in place, the leaf group of the
        pair `(operands, result)`.

    Raises:
        NotAlikeError: if the branches have to pack their results in another way.
        SharingMismatchError: in place, if the branch moved or replaced an object of the operands.
    """
    agreement = operands.agreement
    # `again` leaves out the warnings that were given in the first trace.
    result = trace.call(operands.group, again=agreement.is_repeated)
    if not trace.terms.policy.in_place:
        return agreement.fit(trace, trace.flatten(result))
    received = trace.received
    if agreement.is_separate:
        # Packs the result by itself and builds it again, so that it consists of new objects.
        result = leave((trace.pack(result),))
    tree = trace.flatten((received.arguments, result))
    # The operands as they were when the branch began, and as it left them.
    operands_in, operands_out = received.tree, tree.child(0)
    joined = join(operands_in, operands_out, Sides(trace.terms.title, "when a branch begins", "when it ends"))
    containers = trace.terms.policy.containers
    # The part to compare is all that was received. Raises if an object was moved or replaced. The second result has the
    # changed objects.
    agreement.changed |= find_kept_objects(operands_in, operands_in, operands_out, joined, (), containers=containers)[1]
    return agreement.fit(trace, tree)


def _refer_to_callers_objects(call: CallWithOperands, result: LeafGroup, changed: set[int]) -> LeafGroup:
    """Returns the leaves of a result with a structure that refers to the caller's objects where operands stand in it.

    Args:
        call: the call of the transform.
        result: the leaf group of the pair `(operands, result)` that the branch returned.
        changed: records of the operands changed by some branch. Their contents will be written back.
    """
    structure, tree = result.selection.structure, call.packed.tree
    operands_out = FlatDag.without_objects(structure).child(0)
    joined = join(tree, operands_out, Sides(call.title, "when a branch begins", "when it ends"))
    # Record of the result → record of the caller. If several fit, the first pair counts.
    numbers = {j: i for i, j in reversed(joined.pairs) if type(tree.records[i][0]) is Node}
    containers = call.policy.containers
    kept = frozenset([number for number in numbers.values() if tree.is_object(number, containers=containers)])
    # `noted` has the places of the leaves that were untied on purpose.
    untied = frozenset([structure.leaf_numbers[place] for place in structure.noted])
    objects = CarryObjects(kept, frozenset(changed), frozenset())
    # -1 for the records of new objects.
    callers_numbers = [numbers.get(record, -1) for record in range(len(structure.records))]
    return single_group(
        result.leaves,
        structure_for_caller(structure, callers_numbers, objects, tree.records, in_place=True, untied=untied),
    )


COND = TakingOperands(cond)
SWITCH = TakingOperands(switch)
