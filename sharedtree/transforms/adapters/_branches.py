"""`jax.lax.cond` and `jax.lax.switch`.

JAX traces each branch by itself, and remembers the traces by function and operands: one that it has traced it does not
call again. So no branch knows what the others return, and yet the results of all must have one structure. What they
have in common is known to a *meeting*, which each branch finds in the aux data of its operands. In the first call each
branch leaves word there of how its result is packed. If that is not the same for all, their meet is made (`_meet`),
and all are traced once more, with a meeting that tells them what to pack like. Later calls bring the same meeting,
which lives as long as JAX's caches hold the traces.

               true_fun                       false_fun
    traced     State(z, z): one leaf, z       State(a, b): two leaves, a and b
    again      as State(·, ·): z and z        as State(·, ·): a and b
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import tree_util as jtu

from ..._errors import SharingMismatchError
from ..._graph import Tags
from ..._packed import LeafPath, Packed
from ..._structure import Node, canonical
from .._crossed import Graph, with_packed
from .._crossing import Crossing, nothing_given
from .._inner import Inner
from .._inside import Inside
from .._joining import Joined, Words, joined
from .._kept import Kept, kept_objects, with_kept
from .._meet import meet_of, packed_like
from .._packing import unpack_result


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
    return _meet(crossing, branches, operands, options, lambda inner, given: crossing.apply(pred, *inner, *given))


def switch(crossing: Crossing, index: Any, branches: Any, operands: Sequence[Any] = (), **options: Any) -> Any:
    """`jax.lax.switch`."""
    functions = tuple(branches) if isinstance(branches, Iterable) else ()
    if not functions or (operands and options):
        return crossing.transform(index, branches, *operands, **options)  # says best what is wrong
    named = {f"branches[{i}]": function for i, function in enumerate(functions)}
    return _meet(crossing, named, operands, options, lambda inner, given: crossing.apply(index, inner, *given))


class Meeting:
    """What the branches of one call have returned, or are to return.

    Args:
        num_functions: how many different functions the branches are.
        expected: in a tuple, what their results are to be packed like; an empty one if that is not known.
        again: whether the branches were called with the same before, so that there is nothing new to warn of.

        apart: whether the result is not to share objects with the operands, for the branches disagree on that.

    Attributes:
        changed: the operands' objects that some branch changes, under `Policy(in_place=True)`.
        returned: how the result of each function was packed, by the identity of its terms, which the adapter holds.
    """

    def __init__(
        self, num_functions: int, expected: tuple[Any, ...] = (), *, again: bool = False, apart: bool = False
    ) -> None:
        self.num_functions = num_functions
        self.expected = expected
        self.again = again
        self.apart = apart
        self.changed: set[int] = set()
        self.returned: dict[int, Any] = {}

    def pack(self, inside: Inside, result: Any) -> Any:
        """What a branch returns, packed as those of the others are.

        Raises:
            NotAlikeError: if they have to be packed in another way.
        """
        packed = inside.pack(result)
        # Only the structure is kept: JAX's caches hold this meeting, and must not hold tracers.
        form = jtu.tree_map(lambda _: 0, packed)
        if not self.expected:
            self.returned[id(inside.terms)] = form  # alive: see above
            if len(self.returned) == self.num_functions and not _are_alike(*self.returned.values()):
                raise NotAlikeError
            return packed
        if _are_alike(form, *self.expected):
            return packed
        try:
            like = packed_like(self.expected[0], packed, "result", Words(inside.terms.title, "before", "now"))
        except SharingMismatchError:
            like = None
        if like is None:
            raise NotAlikeError
        return like


class NotAlikeError(Exception):
    """The results of branches have to be packed in another way. Raised by a trace for the adapter, which catches it."""


class Attending:
    """The first operand, if there is one, with a meeting in its aux data, which is compared by identity."""

    __slots__ = ("meeting", "operands")

    def __init__(self, operands: Sequence[Any], meeting: Meeting) -> None:
        self.operands = operands
        self.meeting = meeting


jtu.register_pytree_with_keys(
    Attending,
    # No part of a path, so that JAX's messages name the leaf as if the operand stood there itself.
    lambda item: ([(LeafPath(""), operand) for operand in item.operands], item.meeting),
    lambda meeting, operands: Attending(tuple(operands), meeting),
    lambda item: (item.operands, item.meeting),
)


def _meet(
    crossing: Crossing,
    branches: Mapping[str, Any],
    operands: Sequence[Any],
    options: dict[str, Any],
    run: Callable[[Sequence[Inner], Sequence[Any]], Any],
) -> Any:
    """What a transform makes of branches whose results are packed alike."""
    functions = list(branches.values())
    crossing.enter(functions[0], {f"operands[{i}]": operand for i, operand in enumerate(operands)} | options)
    if crossing.policy.in_place:
        _forbid_references(crossing)
    inner = [crossing.function(function, _branch) for function in functions]
    num_functions = len({id(each) for each in inner})  # alive in `inner`
    known = _meetings(crossing, inner)
    form = crossing.form
    meeting = known.get(form) or Meeting(num_functions)
    while True:
        args = crossing.call.args
        try:
            result = run(inner, [Attending(args[:1], meeting), *args[1:]])
        except NotAlikeError:
            pass
        else:
            break
        if meeting.again:
            raise SharingMismatchError(
                f"A branch of `{crossing.title}` returned something else when it was traced again. What is shared in "
                "its result, and what is static, may depend on the operands only."
            )
        if meeting.expected:  # it is that of a call with operands of other shapes
            meeting = Meeting(num_functions, apart=meeting.apart)
            continue
        forms = {name: meeting.returned[id(each.terms)] for name, each in zip(branches, inner, strict=True)}
        try:
            expected = meet_of(forms, crossing.title)
        except SharingMismatchError:
            if not crossing.policy.in_place or meeting.apart:
                raise
            # In place, the operands come out too; perhaps one branch returns them, and another something new.
            meeting = Meeting(num_functions, apart=True)
            continue
        num_expected, expected = (0, ()) if expected is None else (num_functions, (expected,))
        meeting = Meeting(num_expected, expected, again=True, apart=meeting.apart)
    if meeting.expected or len(meeting.returned) == num_functions:
        meeting.expected = meeting.expected or (next(iter(meeting.returned.values())),)
        meeting.again = False
        known[form] = meeting
    if not crossing.policy.in_place:
        return crossing.leave(result)
    return crossing.leave(_written(crossing, result, meeting.changed), with_state=(0,))


def _forbid_references(crossing: Crossing) -> None:
    """Raises if an operand holds a `jax.Ref`: in place all operands come out of a branch, and no reference can."""
    at = crossing.paths_to(lambda leaf: isinstance(leaf, jax.Ref))
    if at:
        raise ValueError(
            f"A `jax.Ref` is at {at}. In place, all operands come out of the branches of `{crossing.title}`, and no "
            "reference can. What is written to one is seen without that, and other changes can be returned:\n"
            f"    sharedtree.preserve_identities({crossing.title}, in_place=False)"
        )


def _meetings(crossing: Crossing, inner: Sequence[Inner]) -> "weakref.WeakValueDictionary[Any, Meeting]":
    """The meetings of these branches over operands of these structures, by the rest of what the operands are."""
    learned = inner[0].terms.lowerings
    key = [*inner, *[packed.structure for packed in crossing.packed]]
    found = learned.get(key)
    if found is None:
        found = weakref.WeakValueDictionary[Any, Meeting]()
        learned.add(key, found)
    return found


def _branch(inside: Inside, first: Attending, *others: Any) -> Any:
    meeting, operands = first.meeting, (*first.operands, *others)
    result = inside.call(*operands, again=meeting.again)
    if not inside.terms.policy.in_place:
        return meeting.pack(inside, result)
    # All state comes out of each branch, for another one may have changed it.
    received = inside.entered.graph
    state = tuple([received.objects[root] for root in received.roots])
    tags = Tags()
    packed = inside.pack(state, tags)
    before, after, found = _compared(operands, packed, inside.terms.title)
    meeting.changed |= kept_objects(received, before, tags.objects, after, found).updated
    if meeting.apart:
        result = unpack_result(inside.pack(result), nothing_given)
    return meeting.pack(inside, (state, result))


def _compared(operands: Any, state: Any, title: str) -> tuple[Graph, Graph, Joined]:
    """What entered a branch, what has become of it, and how the two compare."""
    before, after = Graph.of(operands, "operands"), Graph.of(list(state), "operands")
    return before, after, joined(before, after, Words(title, "when a branch begins", "when it ends"))


def _written(crossing: Crossing, result: Any, changed: Collection[int]) -> Any:
    """What came out of a branch, with the operands' objects named; those that some branch changes are to be written."""
    before, _, found = _compared(crossing.call.args, result[0], crossing.title)
    records, objects = before.shape.records, crossing.objects
    given: set[int] = set()
    for number in objects - frozenset(changed):
        if type(records[number][0]) is Node:
            given |= canonical(number, lambda i: records[i])[1].keys()
    kept = Kept(objects & given, frozenset(changed))
    ends = Counter(i for i, _ in found.met)
    # An array that has been parted is one of the caller's at one of its places only.
    numbers = {j: i for i, j in reversed(found.met) if type(records[i][0]) is Node or ends[i] == 1}

    def named(packed: Packed) -> Packed:
        own = packed.structure.leaf_numbers
        return with_kept(packed, kept, {own[place] for place in packed.structure.noted}, numbers)

    return with_packed(result, named)


def _are_alike(form: Any, *others: Any) -> bool:
    structure = jtu.tree_structure(form)
    return all(jtu.tree_structure(other) == structure for other in others)
