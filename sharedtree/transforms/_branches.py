"""`jax.lax.cond` and `jax.lax.switch`.

The results of all branches must have one structure, but no branch knows what the others return. JAX traces each branch
by itself. It caches the traces by function and operands, and does not call a branch again that it has traced.

So the branches share an object that JAX passes to each beside the operands, an `Agreement`. In the first call, each
branch records there the structure of its result. If the structures differ, they are joined (`_joining_trees`): the join
has the ties that all results have. Then all branches are traced once more with a new agreement, which holds the
structure that each must return. Later calls use this agreement. It lives as long as JAX's caches hold the traces.

                 true_fun                       false_fun
    1st trace    State(z, z): one leaf, z       State(a, b): two leaves, a and b
    2nd trace    packed as State(·, ·): z, z    packed as State(·, ·): a, b

In place, each branch returns the pair `(operands, result)`, even if it changes nothing: another branch may change the
operands, and all branches must return trees of one structure.
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
from ._caller_side import build_from_groups
from ._calls_with_operands import CallWithOperands, TakingOperands
from ._function_and_options import in_code
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace, single_group_of_tree
from ._joining_trees import Sides, holds_modules, join, join_of_branches, leaves_like
from ._leaf_groups import LeafGroup, single_group
from ._loops import ReturnedObjects, find_kept_objects, leaf_types, structure_for_caller


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
        # JAX still takes an old form with an operand for each branch: `cond(pred, true_operand, true_fun,
        # false_operand, false_fun)`. Then the parameters of this function hold other things than their names say.
        true_operand, true_branch, false_operand, false_branch = true_fun, false_fun, *operands
        return cond(
            call,
            pred,
            lambda x, _: true_branch(x),
            lambda _, x: false_branch(x),
            (true_operand, false_operand),
            **options,
        )
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
    """The structure that all branches return, or what is known about it so far.

    The adapter makes it and hands it to JAX with the operands. Each trace of a branch reads it and writes to it. Once
    complete, it serves later calls with operands of the same structure and types.

    Args:
        num_functions: number of different functions among the branches.
        expected: the structure that each branch must return. None while the branches have not agreed.
        is_repeated: True if the branches are traced again with the same operands. Then ties that they lose have been
            reported already.
        is_separate: True if each branch must return new objects in its result, and none of the operands. Only in place,
            if the branches disagree on the operands in their results.

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

    def pack_as_agreed(self, trace: FunctionTrace, result: FlatDag) -> LeafGroup:
        """Packs the result of a branch into a leaf group with the structure agreed on, and returns the group.

        If no structure is agreed on yet, packs the result as it is and records its structure.

        Args:
            trace: the trace of the branch.
            result: the flattened result of the branch. In place, the pair `(operands, result)`.

        Raises:
            NotAlikeError: if the result cannot be packed with the structure agreed on. If none is agreed on yet: if
                this is the last of the functions, and their results have different structures.
        """
        group = single_group_of_tree(result)
        structure = group.selection.structure
        if self.expected is None:
            # Only the structure is kept: JAX's caches hold this agreement, and must not hold tracers. The function is
            # known by the `id` of its terms. The adapter holds the inner functions and with them the terms, so that the
            # `id` is valid.
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
    """Tells the adapter that the results of branches have to be packed in another way.

    A trace raises this, and `_run_until_branches_agree` catches it.
    """


class OperandsWithAgreement:
    """The operands of branches as JAX gets them: a leaf group, with the agreement of the branches as aux data.

    JAX traces again if the aux data is not equal to that of an earlier trace. Agreements are compared by identity. So
    with a new agreement JAX traces all branches again, and with the same one it finds the traces in its cache.
    """

    __slots__ = ("agreement", "group")

    def __init__(self, group: LeafGroup, agreement: Agreement) -> None:
        self.group = group
        self.agreement = agreement


# The three functions: the child with its key and aux data, the inverse, and the child without a key.
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
        SharingMismatchError: if the results of the branches cannot be joined.
        ValueError: if an operand holds a `jax.Ref` and the policy is in place.
        TypeError: JAX's own, if the results differ in types.
    """
    functions = list(branches.values())
    named_operands = {f"operands[{i}]": operand for i, operand in enumerate(operands)} | options
    (group,) = call.enter(functions[0], named_operands)
    if call.policy.in_place:
        _forbid_references(call)
    # `adds=False`: a branch may not give an object more children than it had, or fewer, since the operands that the
    # branches return must have one structure.
    inner = [call.function(function, _run_branch, adds=False) for function in functions]
    # `switch` may get one function several times. JAX traces it once.
    num_functions = len(IdentitySet(inner))
    agreements = _known_agreements(call, inner)
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
    # The agreement is kept for later calls once it is complete. After this call it may still be incomplete: JAX skips
    # branches that it has traced in an earlier call, so not every branch has recorded its structure.
    if agreement.expected is not None or len(agreement.returned) == num_functions:
        agreement.expected = agreement.expected or next(iter(agreement.returned.values()))
        agreement.is_repeated = False
        agreements[types] = agreement
    if not call.policy.in_place:
        return call.leave(result)
    # `with_changes`: the only result, at position 0, brings the changes of the operands along.
    return call.leave(_refer_to_callers_objects(call, result, agreement.changed), with_changes=(0,))


def _next_agreement(
    call: CallWithOperands,
    agreement: Agreement,
    branches: Mapping[str, Any],
    inner: Sequence[Inner],
    run_vanilla: Callable[[], Any],
) -> Agreement:
    """Makes the agreement for the next attempt, after the branches returned results of different structures.

    Either the new agreement expects the join of the results. Or it expects nothing yet, so that the branches record
    their structures anew.

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
            f"A branch of `{call.title}` returned another structure when it was traced again. The static values and "
            "the sharing in its result may depend only on the operands."
        )
    if agreement.expected is not None:
        # The agreement is from an earlier call and does not fit this one, so the branches start anew.
        return Agreement(agreement.num_functions, is_separate=agreement.is_separate)
    named_inner = zip(branches, inner, strict=True)
    # The terms are alive in `inner`, so their `id`s are valid.
    returned = {name: agreement.returned[id(function.terms)] for name, function in named_inner}
    trees = {name: FlatDag.without_objects(structure) for name, structure in returned.items()}
    try:
        expected = join_of_branches(trees, call.title)
    except SharingMismatchError:
        if call.policy.in_place and not agreement.is_separate:
            # In place, the operands come out beside the result. If one branch returns an operand and another branch a
            # new object, the pairs `(operands, result)` differ in a tie. They do not if all results are new objects.
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
            f"{listed(paths)} {'is a `jax.Ref`' if len(paths) == 1 else 'are `jax.Ref`s'}, which `{call.title}` "
            "cannot take with `in_place=True`.\n"
            "In place, the branches return all operands, and JAX lets no branch return a reference. What they write "
            "to it is kept without `in_place`, too. Switch it off, and return what else they change:\n"
            f"    inner = {in_code(call.title, 'in_place=False')}"
        )


def _known_agreements(call: CallWithOperands, inner: Sequence[Inner]) -> "weakref.WeakValueDictionary[Any, Agreement]":
    """Returns the agreements that earlier calls of these branches have reached with operands of this structure.

    Args:
        call: the call of the transform.
        inner: the functions for JAX.

    Returns:
        Types of the leaves, as `leaf_types` gives them → agreement. The caller adds new agreements to this dictionary.
    """
    # A cache beside the inner function of the first branch, which later calls find again.
    learned = inner[0].terms.learned
    key = [*inner, call.packed.tree.structure]
    agreements = learned.get(key)
    if agreements is None:
        # JAX's caches hold an agreement as aux data. The dictionary is weak, so that an agreement is freed with them.
        agreements = weakref.WeakValueDictionary[Any, Agreement]()
        learned.add(key, agreements)
    return agreements


def _run_branch(trace: FunctionTrace, operands: OperandsWithAgreement) -> Any:
    """Runs one branch for JAX. JAX traces this in place of the user's function.

    In place, adds the operands that the branch changed to `changed` of the agreement.

    Returns:
        The leaf group of the result. If the policy is in place, the leaf group of the pair `(operands, result)`. It has
        the structure agreed on, if there is one already.

    Raises:
        NotAlikeError: if the branches have to pack their results in another way.
        SharingMismatchError: in place, if the branch moved or replaced an object of the operands.
    """
    agreement = operands.agreement
    # `again=True` leaves out the warnings that were given in the first trace.
    result = trace.call(operands.group, again=agreement.is_repeated)
    if not trace.terms.policy.in_place:
        return agreement.pack_as_agreed(trace, trace.flatten(result))
    received = trace.received
    if agreement.is_separate:
        # Packs the result by itself and builds it again from the group, so that it consists of new objects.
        result = build_from_groups((trace.pack(result),))
    # Flattens the pair of the operands and the result.
    tree = trace.flatten((received.arguments, result))
    # The operands as they were when the branch began, and as it left them.
    operands_in, operands_out = received.tree, tree.child(0)
    # Only the pairs of records are needed. Whether the branches fit each other is found out in `pack_as_agreed`.
    joined = join(operands_in, operands_out, Sides(trace.terms.title, "when a branch begins", "when it ends"))
    containers = trace.terms.policy.containers
    # Raises if an object was moved or replaced. The part to compare is all that was received, hence the second
    # `operands_in`, and the empty path to this part.
    _, changed = find_kept_objects(operands_in, operands_in, operands_out, joined, (), containers=containers)
    agreement.changed |= changed
    return agreement.pack_as_agreed(trace, tree)


def _refer_to_callers_objects(call: CallWithOperands, result: LeafGroup, changed: set[int]) -> LeafGroup:
    """Returns the leaves of a result with a structure that refers to the caller's objects where operands stand in it.

    So `call.leave` puts the caller's own objects there, and writes the changed contents into them.

    Args:
        call: the call of the transform.
        result: the leaf group of the pair `(operands, result)` that the branch returned.
        changed: records of the operands changed by some branch. Their contents will be written back.
    """
    structure, tree = result.selection.structure, call.packed.tree
    operands_out = FlatDag.without_objects(structure).child(0)
    joined = join(tree, operands_out, Sides(call.title, "when a branch begins", "when it ends"))
    # Record of the result → the caller's record at the same path. If there are several, the first pair counts: it comes
    # last in reverse.
    ops = [op for op, _ in tree.records]
    node_pairs = [pair for pair in reversed(joined.pairs) if type(ops[pair.record_in]) is Node]
    callers_number_of = {pair.record_out: pair.record_in for pair in node_pairs}
    containers = call.policy.containers
    kept = frozenset([number for number in callers_number_of.values() if tree.is_object(number, containers=containers)])
    # `noted` has the places of the leaves that were untied on purpose.
    untied = frozenset([structure.leaf_numbers[place] for place in structure.noted])
    # `structure_for_caller` gets the untied leaves as an argument of its own.
    objects = ReturnedObjects(kept, frozenset(changed), untied=frozenset())
    # -1 for the records of new objects.
    callers_numbers = [callers_number_of.get(record, -1) for record in range(len(structure.records))]
    return single_group(
        result.leaves,
        structure_for_caller(structure, callers_numbers, objects, tree.records, in_place=True, untied=untied),
    )


COND = TakingOperands(cond)
SWITCH = TakingOperands(switch)
