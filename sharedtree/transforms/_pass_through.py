"""Under `jax.jit`, a module that the function returns unchanged comes back as the caller's own object.

Unchanged means deeply: every leaf, every static value and every child is the very object that was received. The
structure of the result refers to such a module by the number of its record, so it costs neither an output nor a copy.

The module must also equal what vanilla `jax.jit` would have returned: each leaf is a `jax.Array`, and is committed to
its device if an output of the program is. Therefore, if a leaf is a NumPy array or a Python number, or if another
argument is committed and the leaf is not, the leaves go through a `jax.jit` of their own, and the modules are built
anew.

*Inside* and *outside* are said of modules: what only plain containers lead to is outside. There, arrays are values, and
carry no identity.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._jax_internals import ConcreteArray
from ..core._node_types import carries_identity, is_module, node_type_of
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Structure, canonical_records
from ._adapter_names import VANILLA_JIT
from ._caller_side import Call, keep

# ---- On the function's side: which objects of a result are unchanged ----


def find_unchanged(
    result: Any, received: FlatDag, is_taken: Callable[[int], bool], *, containers: bool
) -> IdentityDict[int]:
    """Finds the modules and references in a result that were received, and are deeply unchanged.

    Args:
        result: what the function returned.
        received: what it received, with the objects as they are now.
        is_taken: (record) → True if the object may not be passed through, since its buffers are donated.
        containers: True if mutable containers outside modules carry identity.

    Returns:
        Object → its record, for each of these objects and for every object with identity below one.
    """
    objects = ReceivedObjects(received, containers=containers)
    unchanged: IdentityDict[int] = IdentityDict()
    visited = IdentitySet()
    stack: list[Any] = [result]
    while stack:
        obj = stack.pop()
        if not visited.add(obj):
            continue
        record = objects.record_of(obj)
        # Only modules and references pass by themselves. Other objects pass inside a module.
        can_pass = record is not None and (isinstance(obj, jax.Ref) or is_module(obj)) and not is_taken(record)
        if record is not None and can_pass and objects.is_deeply_unchanged(record):
            for record_below in objects.records_below(record):
                unchanged[received.objects[record_below]] = record_below
            continue
        node_type = node_type_of(obj)
        if node_type is not None:
            stack.extend(node_type.take_apart(obj)[0])
    return unchanged


class ReceivedObjects:
    """The objects with identity that a function received, compared with what they were then.

    Args:
        received: what the function received, with the objects as they are now.
        containers: True if mutable containers outside modules carry identity.

    Attributes:
        records: records of the objects with identity, children before their parents.
    """

    def __init__(self, received: FlatDag, *, containers: bool = False) -> None:
        """Finds the objects with identity. They are compared when someone asks."""
        self.received = received
        # Records that are no objects: without `containers`, what plain containers alone lead to, but for modules.
        values = () if containers else received.outside
        self.records: list[int] = []
        for record, ((op, _), obj) in enumerate(zip(received.records, received.objects, strict=True)):
            if op is LEAF:
                has_identity = isinstance(obj, jax.Ref) or (record not in values and carries_identity(obj))
            elif type(op) is Node:
                has_identity = op.type.carries_identity and not (op.type.is_plain and record in values)
            else:
                has_identity = False
            if has_identity:
                self.records.append(record)
        self._record_of = IdentityDict((received.objects[record], record) for record in self.records)
        self._is_deeply_unchanged: list[bool] | None = None

    def record_of(self, obj: Any) -> int | None:
        """Returns the record of a received object with identity. None for any other object."""
        return self._record_of.get(obj)

    def records_below(self, record: int) -> set[int]:
        """Returns the records of a received object and of all objects with identity below it."""
        return self.received.below(record).reached.intersection(self.records)

    def is_deeply_unchanged(self, record: int) -> bool:
        """Returns True if an object and everything below it is as it was received. The first call visits everything."""
        if self._is_deeply_unchanged is None:
            self._is_deeply_unchanged = []
            # Children come before their parents.
            for number, (_, children) in enumerate(self.received.records):
                are_children_unchanged = all(self._is_deeply_unchanged[child] for child in children)
                self._is_deeply_unchanged.append(are_children_unchanged and self.is_unchanged(number))
        return self._is_deeply_unchanged[record]

    def is_unchanged(self, record: int) -> bool:
        """Returns True if a node has the children and the auxiliary data with which it was received.

        What is below its children is not looked at, unless they are tuples or other values without identity.
        """
        op, children = self.received.records[record]
        if type(op) is not Node:
            return True
        node = self.received.objects[record]
        objects_now, aux = op.type.take_apart(node)
        if len(objects_now) != len(children) or Static(aux) != op.aux:
            return False
        if all(map(self._is_child, objects_now, children)):
            return True
        # Some flatten functions build a new dict on each call. Such a dict is not state, so its contents are compared.
        objects_again = op.type.take_apart(node)[0]
        return all(map(self._is_child_or_rebuilt, objects_now, objects_again, children))

    def _is_child(self, obj: Any, record: int) -> bool:
        """Returns True if an object is the one that was received for a record, or an equal value without identity.

        Static values are compared, and so are tuples, part by part.
        """
        op = self.received.records[record][0]
        if obj is self.received.objects[record]:
            return True
        if type(op) is Static:
            return Static(obj) == op
        if type(op) is not Node or op.type.carries_identity:
            return False
        # Twice the same object, so nothing below it may have been made anew by a flatten, either.
        return self._has_content(obj, obj, record)

    def _is_child_or_rebuilt(self, obj: Any, obj_again: Any, record: int) -> bool:
        """Returns True if an object is a child, or a plain container that each flatten makes anew around children.

        Args:
            obj: what a flatten of the parent has in this place.
            obj_again: what a second flatten of the same parent has there. Another object shows that it is made anew.
            record: the record of the child.
        """
        return self._is_child(obj, record) or (obj is not obj_again and self._has_content(obj, obj_again, record))

    def _has_content(self, obj: Any, obj_again: Any, record: int) -> bool:
        """Returns True if an object is a plain container with the contents of the one received for a record.

        Args:
            obj: the object.
            obj_again: what a second flatten has in its place, or the object itself. See `_is_child_or_rebuilt`.
            record: the record.
        """
        op, children = self.received.records[record]
        if type(op) is not Node or not op.type.is_plain:
            return False
        if type(obj) is not op.type.cls or type(obj_again) is not type(obj):
            return False
        (parts, aux), (parts_again, _) = op.type.take_apart(obj), op.type.take_apart(obj_again)
        has_same_shape = len(parts) == len(children) == len(parts_again) and Static(aux) == op.aux
        return has_same_shape and all(map(self._is_child_or_rebuilt, parts, parts_again, children))


# ---- On the caller's side: which object stands in the result ----


@functools.partial(VANILLA_JIT, keep_unused=True)
def _as_outputs(leaves: Sequence[Any], committed_argument: Any) -> Sequence[Any]:
    """Returns leaves as vanilla `jax.jit` returns leaves of its arguments.

    Args:
        leaves: the leaves.
        committed_argument: another argument, which commits the outputs if it is committed. None for no argument.
    """
    del committed_argument
    return leaves


def passed_through(
    call: Call, structure: Structure, find_used_leaves: Callable[[], Sequence[Any]]
) -> Callable[[int], Any]:
    """Returns a function: record of an unchanged object → the object that stands in the result.

    That is the caller's own object, if vanilla `jax.jit` would return each leaf that is passed through as it is. If it
    would return another array for even one of them, all passed objects are built anew. They may share parts, and
    building only some of them anew would cut these ties.

    Args:
        call: the call.
        structure: structure of the result.
        find_used_leaves: returns the leaves of the arguments that the computation uses. It is called only if some leaf
            that is passed through is not committed and some argument is.
    """
    objects, records = call.tree.objects, call.tree.records
    # The records of all objects that pass through, and of all that is inside them. `canonical_records` numbers what is
    # below a record. Only its keys are of interest here, which are these records.
    passed_records = {i for record in structure.given for i in canonical_records(record, lambda i: records[i])[1]}
    leaves = [record for record in sorted(passed_records) if records[record][0] is LEAF]
    if call.plan.origins is None:
        _keep_positions(call, structure.given, leaves)
    # If the program uses a committed argument, vanilla `jax.jit` commits its outputs. Returned leaves count as used.
    committed_argument = None
    are_all_placed = all(is_committed(objects[record]) or is_tracer(objects[record]) for record in leaves)
    if not are_all_placed and any(map(is_committed, call.leaves)):
        used_leaves = [*find_used_leaves(), *(objects[record] for record in leaves)]
        committed_argument = next(filter(is_committed, used_leaves), None)
    if all(_is_what_jit_returns(objects[record], committed_argument) for record in leaves):
        return objects.__getitem__
    # Some leaf would come out of vanilla `jax.jit` as another array, so all objects are built anew.
    new_leaves = _as_outputs([objects[record] for record in leaves], committed_argument)
    new_objects: dict[int, Any] = dict(zip(leaves, new_leaves, strict=True))
    # Children come before their parents.
    for record in sorted(passed_records):
        op, children = records[record]
        if type(op) is Node:
            new_children = [new_objects[child] for child in children]
            new_objects[record] = op.type.put_together(op.aux.thaw(), new_children)
        elif type(op) is Static:
            new_objects[record] = op.thaw()
    return new_objects.__getitem__


def _keep_positions(call: Call, roots: tuple[int, ...], leaves: Sequence[int]) -> None:
    """Keeps the positions of the leaves that pass through. In a later call, C checks the leaves at these positions.

    Args:
        call: the call.
        roots: records of the unchanged objects in the result. They are the key.
        leaves: records of their leaves.
    """
    position_of = {record: position for position, record in enumerate(call.tree.leaf_numbers)}
    keep(call.plan.structure, roots, tuple([position_of[record] for record in leaves]))


def _is_what_jit_returns(leaf: Any, committed_argument: Any) -> bool:
    """Returns True if vanilla `jax.jit` would return a leaf of its arguments with no change but that of identity.

    Args:
        leaf: the leaf.
        committed_argument: a committed argument that the program uses. None if there is none.
    """
    if isinstance(leaf, jax.Ref) or is_tracer(leaf):
        return True
    return isinstance(leaf, jax.Array) and (committed_argument is None or leaf.committed)


def has_identity_outside(obj: Any, *, containers: bool) -> bool:
    """Returns True if an object carries identity, given that it is outside modules.

    References and modules do. Mutable containers do if `containers` is set and JAX takes them apart. JAX does not know
    a `deque`, so outside modules a `deque` is a static value.

    Args:
        obj: the object, which is in no module.
        containers: True if mutable containers outside modules carry identity.
    """
    node_type = node_type_of(obj)
    if node_type is None:
        return isinstance(obj, jax.Ref)
    return not node_type.is_plain or (containers and node_type.is_mutable and node_type.is_known_to_jax)


def is_committed(leaf: Any) -> bool:
    """Returns True if a leaf is an array that is committed to its device."""
    if type(leaf) is ConcreteArray:
        return leaf.committed
    return isinstance(leaf, jax.Array) and not is_tracer(leaf) and leaf.committed


def is_tracer(leaf: Any) -> bool:
    """Returns True if a leaf is a tracer."""
    return isinstance(leaf, Tracer)
