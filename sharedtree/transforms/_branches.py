"""`jax.lax.cond` and `jax.lax.switch`.

JAX traces each branch by itself, and remembers the traces by function and operands: one that it has traced it does not
call again. So no branch knows what the others return, and yet the results of all must have one structure. What they
have in common is known to a *meeting*, which each branch finds in the aux data of its operands. In the first call each
branch leaves word there of the structure of its result. If that is not the same for all, their join is made
(`_joining_trees`), and all are traced once more, with a meeting that tells them what to return. Later calls bring the
same meeting, which lives as long as JAX's caches hold the traces.

               true_fun                       false_fun
    traced     State(z, z): one leaf, z       State(a, b): two leaves, a and b
    again      as State(·, ·): z and z        as State(·, ·): a and b

In place all operands come out of each branch, for another one may have changed them.
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
from ._crossing import Crossing, TakingOperands
from ._function_and_options import in_code
from ._function_given_to_jax import Inner
from ._function_side import Inside, packed
from ._joining_trees import Sides, holds_modules, join, join_of_branches, leaves_like
from ._leaf_groups import LeafGroup, whole
from ._loops import Told, as_kept, form_of, kept_objects


def cond(
    crossing: Crossing, pred: Any, true_fun: Any, false_fun: Any, operands: Sequence[Any] = (), **options: Any
) -> Any:
    """`jax.lax.cond`."""
    if not callable(true_fun) and callable(false_fun) and len(operands) == 2 and callable(operands[1]):
        # JAX still takes an operand for each branch: pred, true_operand, true_fun, false_operand, false_fun.
        one, f, other, g = true_fun, false_fun, *operands
        return cond(crossing, pred, lambda x, _: f(x), lambda _, x: g(x), (one, other), **options)
    branches = {"true_fun": true_fun, "false_fun": false_fun}
    if operands and options:
        return crossing.transform(pred, true_fun, false_fun, *operands, **options)  # says best what is wrong
    return _joined(
        crossing,
        branches,
        operands,
        options,
        lambda inner, given: crossing.apply(pred, *inner, given),
        lambda: crossing.transform(pred, true_fun, false_fun, *operands, **options),
    )


def switch(crossing: Crossing, index: Any, branches: Any, operands: Sequence[Any] = (), **options: Any) -> Any:
    """`jax.lax.switch`."""
    functions = tuple(branches) if isinstance(branches, Iterable) else ()
    if not functions or (operands and options):
        return crossing.transform(index, branches, *operands, **options)  # says best what is wrong
    return _joined(
        crossing,
        {f"branches[{i}]": function for i, function in enumerate(functions)},
        operands,
        options,
        lambda inner, given: crossing.apply(index, inner, given),
        lambda: crossing.transform(index, functions, *operands, **options),
    )


class Meeting:
    """What the branches of one call have returned, or are to return.

    Args:
        num_functions: how many different functions the branches are.
        expected: the structure of their results; None if that is not known.
        again: whether the branches were called with the same before, so that there is nothing new to warn of.
        apart: whether the result is not to share objects with the operands, for the branches disagree on that.

    Attributes:
        changed: the operands' objects that some branch changes in place.
        returned: the structure of the result of each function, by the identity of its terms, which the adapter holds.
    """

    def __init__(
        self, num_functions: int, expected: Structure | None = None, *, again: bool = False, apart: bool = False
    ) -> None:
        self.num_functions = num_functions
        self.expected = expected
        self.again = again
        self.apart = apart
        self.changed: set[int] = set()
        self.returned: dict[int, Structure] = {}

    def fit(self, inside: Inside, result: FlatDag) -> LeafGroup:
        """What a branch returns, in the group in which the others do.

        Raises:
            NotAlikeError: if they have to return it in another way.
        """
        group = packed(result)
        structure = group.selection.structure
        if self.expected is None:
            # Only the structure is kept: JAX's caches hold this meeting, and must not hold tracers.
            self.returned[id(inside.terms)] = structure  # alive: see above
            if len(self.returned) == self.num_functions and len(set(self.returned.values())) > 1:
                raise NotAlikeError
            return group
        if structure is self.expected:
            return group
        before = FlatDag.without_objects(self.expected)
        try:
            found = join(before, result, Sides(inside.terms.title, "before", "now"))
        except SharingMismatchError:
            raise NotAlikeError from None
        if not found.fits:
            raise NotAlikeError
        return whole(leaves_like(before, result, found), self.expected)


class NotAlikeError(Exception):
    """The results of branches have to be packed in another way. Raised by a trace for the adapter, which catches it."""


class Attending:
    """The operands, with a meeting in the aux data, which is compared by identity."""

    __slots__ = ("group", "meeting")

    def __init__(self, group: LeafGroup, meeting: Meeting) -> None:
        self.group = group
        self.meeting = meeting


jtu.register_pytree_with_keys(
    Attending,
    # No part of a path, so that JAX's messages name the leaf as if the operands stood there themselves.
    lambda item: ([(LeafPath(""), item.group)], item.meeting),
    lambda meeting, groups: Attending(next(iter(groups)), meeting),
    lambda item: ((item.group,), item.meeting),
)


def _joined(
    crossing: Crossing,
    branches: Mapping[str, Any],
    operands: Sequence[Any],
    options: dict[str, Any],
    run: Callable[[Sequence[Inner], Any], Any],
    vanilla: Callable[[], Any],
) -> Any:
    """What a transform makes of branches whose results are alike."""
    functions = list(branches.values())
    own = {f"operands[{i}]": operand for i, operand in enumerate(operands)} | options
    (group,) = crossing.enter(functions[0], own)
    if crossing.policy.in_place:
        _forbid_references(crossing)
    inner = [crossing.function(function, _branch, adds=False) for function in functions]
    num_functions = len(IdentitySet(inner))
    known = _meetings(crossing, inner)
    form = form_of(crossing.call)
    meeting = known.get(form) or Meeting(num_functions)
    while True:
        try:
            result = run(inner, Attending(group, meeting))
            break
        except TypeError as error:  # JAX says where in a result, but of all of it only that
            error.args = (str(error).replace(" at path  ", " "),)
            raise
        except NotAlikeError:
            meeting = _next(crossing, meeting, branches, inner, vanilla)
    if meeting.expected is not None or len(meeting.returned) == num_functions:
        meeting.expected = meeting.expected or next(iter(meeting.returned.values()))
        meeting.again = False
        known[form] = meeting
    if not crossing.policy.in_place:
        return crossing.leave(result)
    return crossing.leave(_written(crossing, result, meeting.changed), with_state=(0,))


def _next(
    crossing: Crossing,
    meeting: Meeting,
    branches: Mapping[str, Any],
    inner: Sequence[Inner],
    vanilla: Callable[[], Any],
) -> Meeting:
    """The meeting for the next try, after one in which the branches did not return the same."""
    if meeting.again:
        raise SharingMismatchError(
            f"A branch of `{crossing.title}` returned something else when it was traced again. What is shared in "
            "its result, and what is static, may depend on the operands only."
        )
    if meeting.expected is not None:  # it is that of a call with operands of other shapes
        return Meeting(meeting.num_functions, apart=meeting.apart)
    each = zip(branches, inner, strict=True)
    trees = {name: FlatDag.without_objects(meeting.returned[id(one.terms)]) for name, one in each}  # alive in `inner`
    try:
        expected = join_of_branches(trees, crossing.title)
    except SharingMismatchError:
        if crossing.policy.in_place and not meeting.apart:
            # The operands come out too; perhaps one branch returns them, and another something new.
            return Meeting(meeting.num_functions, apart=True)
        if not any(map(holds_modules, trees.values())):
            vanilla()  # says best what is wrong
        raise
    return Meeting(meeting.num_functions, expected, again=True, apart=meeting.apart)


def _forbid_references(crossing: Crossing) -> None:
    """Raises if an operand holds a `jax.Ref`: in place all operands come out of a branch, and no reference can."""
    at = crossing.call.tree.paths_to(lambda leaf: isinstance(leaf, jax.Ref))
    if at:
        raise ValueError(
            f"A `jax.Ref` is at {listed(at)}. In place, all operands come out of the branches of `{crossing.title}`, "
            "and no reference can. What is written to one is seen without that, and other changes can be returned:\n"
            f"    inner = {in_code(crossing.title, 'in_place=False')}"
        )


def _meetings(crossing: Crossing, inner: Sequence[Inner]) -> "weakref.WeakValueDictionary[Any, Meeting]":
    """The meetings of these branches over operands of this structure, by the types of the leaves."""
    learned = inner[0].terms.learned
    key = [*inner, crossing.call.tree.structure]
    found = learned.get(key)
    if found is None:
        found = weakref.WeakValueDictionary[Any, Meeting]()
        learned.add(key, found)
    return found


def _branch(inside: Inside, first: Attending) -> Any:
    meeting = first.meeting
    result = inside.call(first.group, again=meeting.again)
    if not inside.terms.policy.in_place:
        return meeting.fit(inside, inside.walked(result))
    received = inside.received
    if meeting.apart:
        result = leave((inside.pack(result),))
    tree = inside.walked((received.arguments, result))
    before, after = received.tree, tree.child(0)  # the operands stand before the result
    found = join(before, after, Sides(inside.terms.title, "when a branch begins", "when it ends"))
    containers = inside.terms.policy.containers
    meeting.changed |= kept_objects(before, before, after, found, (), containers=containers)[1]
    return meeting.fit(inside, tree)


def _written(crossing: Crossing, result: LeafGroup, changed: set[int]) -> LeafGroup:
    """What came out of a branch, with the operands' objects named; those that some branch changes are to be written."""
    structure, call = result.selection.structure, crossing.call.tree
    after = FlatDag.without_objects(structure).child(0)
    found = join(call, after, Sides(crossing.title, "when a branch begins", "when it ends"))
    numbers = {j: i for i, j in reversed(found.pairs) if type(call.records[i][0]) is Node}
    every = frozenset([n for n in numbers.values() if call.is_object(n, containers=crossing.policy.containers)])
    noted = frozenset([structure.leaf_numbers[place] for place in structure.noted])
    told = Told(every, frozenset(changed), frozenset())
    of_caller = [numbers.get(number, -1) for number in range(len(structure.records))]
    return whole(
        result.leaves, as_kept(structure, of_caller, told, crossing.call.tree.records, in_place=True, noted=noted)
    )


COND = TakingOperands(cond)
SWITCH = TakingOperands(switch)
