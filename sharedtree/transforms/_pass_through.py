"""Under `jax.jit`, a module that the function returns unchanged comes back as the caller's own object.

Unchanged means deeply: every leaf, every static, every child is the very object that was received. Such a module is
named in the result by its number and costs neither an output nor a copy.

It must also be what vanilla `jax.jit` would have returned, up to identity: a `jax.Array` for every leaf, and no
difference in committedness. Where a leaf was a NumPy array or a Python number, or where another argument is committed
to a device and the leaf is not, the leaf goes through a `jax.jit` of its own and the module is built anew.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._flat_dags import FlatDag
from ..core._jax_internals import ConcreteArray
from ..core._node_types import is_module, node_type_of
from ..core._static_values import Static
from ..core._structure import LEAF, Node, Structure, canonical
from ..core._traced_leaves_and_identity import carries_identity
from ._adapter_names import VANILLA_JIT
from ._caller_side import Call, keep


def unchanged(
    result: Any, received: FlatDag, is_taken: Callable[[int], bool], *, containers: bool
) -> IdentityDict[int]:
    """The objects in a result that are, deeply, those that were received, with their numbers.

    Args:
        result: what the function returned.
        received: what it received.
        is_taken: whether a record may not be passed through.
        containers: whether mutable containers outside modules are objects.
    """
    own = Unchanged(received, containers=containers)
    given: IdentityDict[int] = IdentityDict()
    seen = IdentitySet()
    stack: list[Any] = [result]
    while stack:
        obj = stack.pop()
        if not seen.add(obj):
            continue
        number = own.number_of(obj)
        node_type = node_type_of(obj)
        can_be_given = number is not None and (isinstance(obj, jax.Ref) or is_module(obj)) and not is_taken(number)
        if number is not None and can_be_given and own.is_unchanged(number):
            for each in own.numbers_below(number):
                given[received.objects[each]] = each
        elif node_type is not None:
            stack.extend(node_type.take_apart(obj)[0])
    return given


class Unchanged:
    """Which of the received objects are still what they were.

    Args:
        received: what a function received, as it is now.
        containers: whether mutable containers outside modules are objects.
    """

    def __init__(self, received: FlatDag, *, containers: bool = False) -> None:
        self.received = received
        values = () if containers else received.outside
        self.numbers: list[int] = []
        for number, ((op, _), obj) in enumerate(zip(received.records, received.objects, strict=True)):
            if (op is LEAF and (isinstance(obj, jax.Ref) or (number not in values and carries_identity(obj)))) or (
                type(op) is Node and op.type.carries_identity and not (op.type.is_plain and number in values)
            ):
                self.numbers.append(number)
        self._number_of = IdentityDict((received.objects[number], number) for number in self.numbers)
        self._known: list[bool] | None = None

    def number_of(self, obj: Any) -> int | None:
        """The number under which an object was received."""
        return self._number_of.get(obj)

    def numbers_below(self, number: int) -> set[int]:
        """Those of a received object and of all objects in it."""
        return self.received.below(number).reached.intersection(self.numbers)

    def is_unchanged(self, number: int) -> bool:
        """Whether a received object is deeply what it was. Cost: one visit for each received object, once."""
        if self._known is None:
            self._known = []
            for i, (_, children) in enumerate(self.received.records):  # children come before their parents
                self._known.append(all(self._known[child] for child in children) and self.is_itself(i))
        return self._known[number]

    def is_itself(self, number: int) -> bool:
        """Whether a node still has the children and the auxiliary data that it was received with."""
        op, children = self.received.records[number]
        if type(op) is not Node:
            return True
        node = self.received.objects[number]
        found, aux = op.type.take_apart(node)
        if len(found) != len(children) or Static(aux) != op.aux:
            return False
        if all(map(self._is_child, found, children)):
            return True
        # A class may put its fields into a new dictionary whenever it is taken apart, which then is no object of its.
        return all(map(self._is_made_anew_of, found, op.type.take_apart(node)[0], children))

    def _is_child(self, obj: Any, number: int) -> bool:
        op = self.received.records[number][0]
        if obj is self.received.objects[number]:
            return True
        if type(op) is Static:
            return Static(obj) == op
        if type(op) is not Node or op.type.carries_identity:
            return False
        return self._has_content(obj, obj, number)  # a value, such as a tuple, of which there may be a new copy

    def _is_made_anew_of(self, obj: Any, again: Any, number: int) -> bool:
        """Whether an object is a child, or, with `again` in its place the next time, a new container of children."""
        return self._is_child(obj, number) or (obj is not again and self._has_content(obj, again, number))

    def _has_content(self, obj: Any, again: Any, number: int) -> bool:
        """Whether an object is a plain container with what was received in another one."""
        op, children = self.received.records[number]
        if type(op) is not Node or not op.type.is_plain or type(obj) is not op.type.cls or type(again) is not type(obj):
            return False
        (parts, aux), (others, _) = op.type.take_apart(obj), op.type.take_apart(again)
        same = len(parts) == len(children) == len(others) and Static(aux) == op.aux
        return same and all(map(self._is_made_anew_of, parts, others, children))


@functools.partial(VANILLA_JIT, keep_unused=True)
def _as_outputs(leaves: Sequence[Any], anchor: Any) -> Sequence[Any]:
    """What vanilla `jax.jit` makes of leaves that it returns as they are, with `anchor` among its arguments."""
    del anchor
    return leaves


def passed_through(call: Call, structure: Structure, used: Callable[[], Sequence[Any]]) -> Callable[[int], Any]:
    """Number → the caller's own object, or what vanilla `jax.jit` would have made of it.

    Args:
        call: the arguments.
        structure: of the result. If one thing that it passes through has to be made anew, everything is, so that
            objects which are one stay one.
        used: the leaves of the arguments that the computation uses; asked only where placement could make a difference.
    """
    objects, records = call.tree.objects, call.tree.records
    below = {i for number in structure.given for i in canonical(number, lambda i: records[i])[1]}
    leaves = [number for number in sorted(below) if records[number][0] is LEAF]
    if call.plan.origins is None:
        _keep_places(call, structure.given, leaves)
    anchor = None
    all_placed = all(is_committed(objects[number]) or is_tracer(objects[number]) for number in leaves)
    if not all_placed and any(map(is_committed, call.leaves)):
        anchor = next(filter(is_committed, [*used(), *(objects[number] for number in leaves)]), None)
    if all(_is_what_jit_returns(objects[number], anchor) for number in leaves):
        return objects.__getitem__
    made: dict[int, Any] = dict(zip(leaves, _as_outputs([objects[number] for number in leaves], anchor), strict=True))
    for number in sorted(below):  # children come before their parents
        op, children = records[number]
        if type(op) is Node:
            made[number] = op.type.put_together(op.aux.thaw(), [made[child] for child in children])
        elif type(op) is Static:
            made[number] = op.thaw()
    return made.__getitem__


def _keep_places(call: Call, given: tuple[int, ...], leaves: Sequence[int]) -> None:
    """Where among the arguments the leaves are that calls like this one pass through, for the native call."""
    place = {number: i for i, number in enumerate(call.tree.leaf_numbers)}
    keep(call.plan.structure, given, tuple([place[number] for number in leaves]))


def _is_what_jit_returns(leaf: Any, anchor: Any) -> bool:
    if isinstance(leaf, jax.Ref) or is_tracer(leaf):
        return True
    return isinstance(leaf, jax.Array) and (anchor is None or leaf.committed)


def is_object_outside(obj: Any, *, containers: bool) -> bool:
    """Whether something that is in no module carries identity."""
    node_type = node_type_of(obj)
    if node_type is None:
        return isinstance(obj, jax.Ref)
    return not node_type.is_plain or (containers and node_type.is_mutable and node_type.is_known_to_jax)


def is_committed(leaf: Any) -> bool:
    """Whether a leaf is an array that is bound to its device."""
    if type(leaf) is ConcreteArray:
        return leaf.committed
    return isinstance(leaf, jax.Array) and not is_tracer(leaf) and leaf.committed


def is_tracer(leaf: Any) -> bool:
    """Whether a leaf belongs to a trace."""
    return isinstance(leaf, Tracer)
