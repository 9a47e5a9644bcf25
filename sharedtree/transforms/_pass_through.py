"""Pass-through: under `jax.jit`, a module returned unchanged comes back as the caller's own object.

    model is sharedtree.jit(lambda model, x: model)(model, x)      True. The program has no output for `model`.

Unchanged means deeply: every leaf, every static value and every child is the very object received. The structure of the
result refers to the module by a number, so the module costs neither an output nor a copy.

The number is that of a *record*. The packed arguments have one record for each object: its operation (`LEAF`, a static
value, or a `Node` with its class) and the numbers of its children's records. A variable `record` holds the number.

The module must also equal what vanilla `jax.jit` would have returned: each leaf is a `jax.Array`, and is committed to
its device if an output of the program is. If a leaf is a NumPy array or a Python number, or if another argument is
committed and the leaf is not, the leaves are passed through a `jax.jit` that only returns them, and the modules are
built anew.

An object is *outside* modules if only plain containers (tuples, lists, dicts) lead to it. There, arrays are values, and
carry no identity: one array in two arguments comes back as two arrays.

*Flattening* an object takes it apart into its children and its *auxiliary data*, everything else in it.
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
from ..core._structure import LEAF, FlatDag, Node, Structure, canonical
from ._adapter_names import VANILLA_JIT
from ._caller_side import Call, keep

# ---- On the function's side: which objects of a result are unchanged ----


def find_unchanged(
    result: Any, received: FlatDag, is_taken: Callable[[int], bool], *, containers: bool
) -> IdentityDict[int]:
    """Finds the modules and references in a result that the function received, and left deeply unchanged.

    Args:
        result: the result of the function.
        received: its arguments, with the objects as they are now.
        is_taken: (record) → True if the object may not be passed through, since its buffers are donated.
        containers: True if mutable containers outside modules carry identity.

    Returns:
        Object → its record, for each of these modules and references, and for all objects with identity below them.
    """
    objects = ReceivedObjects(received, containers=containers)
    unchanged: IdentityDict[int] = IdentityDict()
    visited = IdentitySet()
    stack: list[Any] = [result]
    while stack:
        obj = stack.pop()
        # `add` returns False for an object that is in the set.
        if not visited.add(obj):
            continue
        record = objects.record_of(obj)
        # Only modules and references pass by themselves. Arrays and containers pass inside a module.
        can_pass = record is not None and (isinstance(obj, jax.Ref) or is_module(obj)) and not is_taken(record)
        if record is not None and can_pass and objects.is_deeply_unchanged(record):
            for record_below in objects.records_below(record):
                unchanged[received.objects[record_below]] = record_below
            continue
        # The object does not pass, but a module in it may.
        node_type = node_type_of(obj)
        if node_type is not None:
            stack.extend(node_type.take_apart(obj)[0])
    return unchanged


class ReceivedObjects:
    """The objects with identity in the arguments of a function. Tells if the function left them unchanged.

    An object is compared with its record, made before the function was called.

    Args:
        received: the arguments of the function, with the objects as they are now.
        containers: True if mutable containers outside modules carry identity.

    Attributes:
        records: records of the objects with identity, children before their parents.
    """

    def __init__(self, received: FlatDag, *, containers: bool = False) -> None:
        """Finds the objects with identity. The methods compare them."""
        self.received = received
        # Records outside modules. Arrays and containers there have no identity. With `containers`, they have.
        outside_modules = () if containers else received.outside
        self.records: list[int] = []
        for record, ((op, _), obj) in enumerate(zip(received.records, received.objects, strict=True)):
            if op is LEAF:
                has_identity = isinstance(obj, jax.Ref) or (record not in outside_modules and carries_identity(obj))
            elif type(op) is Node:
                has_identity = op.type.carries_identity and not (op.type.is_plain and record in outside_modules)
            # A static value.
            else:
                has_identity = False
            if has_identity:
                self.records.append(record)
        self._record_of = IdentityDict((received.objects[record], record) for record in self.records)
        self._is_deeply_unchanged: list[bool] | None = None

    def record_of(self, obj: Any) -> int | None:
        """Returns the record of an object, if the function received it and it has identity. Otherwise None."""
        return self._record_of.get(obj)

    def records_below(self, record: int) -> set[int]:
        """Returns the records of a received object and of all objects with identity below it."""
        return self.received.below(record).reached.intersection(self.records)

    def is_deeply_unchanged(self, record: int) -> bool:
        """Returns True if an object and everything below it is as it was received.

        Cost: the first call visits all objects in the arguments. Later calls look its answers up.
        """
        if self._is_deeply_unchanged is None:
            self._is_deeply_unchanged = []
            # Children come before their parents, so the answers for them are in the list.
            for number, (_, children) in enumerate(self.received.records):
                are_children_unchanged = all(self._is_deeply_unchanged[child] for child in children)
                self._is_deeply_unchanged.append(are_children_unchanged and self.is_unchanged(number))
        return self._is_deeply_unchanged[record]

    def is_unchanged(self, record: int) -> bool:
        """Returns True if a node has its children and auxiliary data from before the call. True for a leaf.

        Changes below a child do not count, unless the child is a tuple or another value without identity.
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
        # A second flatten tells which children are built anew.
        objects_again = op.type.take_apart(node)[0]
        return all(map(self._is_child_or_rebuilt, objects_now, objects_again, children))

    def _is_child(self, obj: Any, record: int) -> bool:
        """Returns True if an object is the received object of a record, or an equal value without identity.

        Static values are compared by content, and tuples part by part.

        Args:
            obj: a child of a node now.
            record: record of the child in the same place when the node was received.
        """
        op = self.received.records[record][0]
        if obj is self.received.objects[record]:
            return True
        if type(op) is Static:
            return Static(obj) == op
        # A new object in the place of a leaf or of an object with identity is a change.
        if type(op) is not Node or op.type.carries_identity:
            return False
        # A tuple. It is passed twice, so that nothing in it counts as built anew by a flatten.
        return self._has_content(obj, obj, record)

    def _is_child_or_rebuilt(self, obj: Any, obj_again: Any, record: int) -> bool:
        """Returns True if a node still has a child, where its flatten may build plain containers anew on each call.

        The child is the very object received, or a container built by the flatten around the same contents.

        Args:
            obj: the child in this place, from a flatten of the node.
            obj_again: the child from a second flatten. If it is another object, the flatten builds it anew.
            record: record of the child in this place when the node was received.
        """
        return self._is_child(obj, record) or (obj is not obj_again and self._has_content(obj, obj_again, record))

    def _has_content(self, obj: Any, obj_again: Any, record: int) -> bool:
        """Returns True if an object is a plain container with the class and contents of the received one.

        Args:
            obj: the child in this place, from a flatten of its parent.
            obj_again: the child from a second flatten. The same object if the container is not built anew.
            record: record of the child in this place when the parent was received.
        """
        op, children = self.received.records[record]
        if type(op) is not Node or not op.type.is_plain:
            return False
        if type(obj) is not op.type.cls or type(obj_again) is not type(obj):
            return False
        # The parts may be built anew, too, so both containers are taken apart.
        (parts, aux), (parts_again, _) = op.type.take_apart(obj), op.type.take_apart(obj_again)
        has_same_shape = len(parts) == len(children) == len(parts_again) and Static(aux) == op.aux
        return has_same_shape and all(map(self._is_child_or_rebuilt, parts, parts_again, children))


# ---- On the caller's side: which object is in the result ----


@functools.partial(VANILLA_JIT, keep_unused=True)
def _as_outputs(leaves: Sequence[Any], committed_argument: Any) -> Sequence[Any]:
    """Returns leaves as vanilla `jax.jit` returns leaves of its arguments: as arrays, perhaps committed to a device.

    Args:
        leaves: the leaves.
        committed_argument: an array committed to a device. Then the outputs are committed, too. None if there is none.
    """
    # `jax.jit` has read it. `keep_unused` keeps it among the arguments that decide about the device.
    del committed_argument
    return leaves


def objects_for_caller(
    call: Call, structure: Structure, find_used_leaves: Callable[[], Sequence[Any]]
) -> Callable[[int], Any]:
    """Returns a function: record of an unchanged object → the object in the result for the caller.

    If vanilla `jax.jit` would return each leaf of the unchanged objects as it is, the result has the caller's own
    object. If it would return another array for even one of them, all unchanged objects are built anew. They may share
    parts, and building only some of them anew would cut these ties.

    Args:
        call: the call.
        structure: structure of the result. Its `given` are the records of the unchanged objects.
        find_used_leaves: returns the leaves of the arguments used by the computation. It is called only if some leaf of
            the unchanged objects is not committed, and some argument is.
    """
    objects, records = call.tree.objects, call.tree.records
    # Find the records of all unchanged objects, and of everything inside them. `canonical` makes new records of one
    # object, which are not needed here, and a table. The keys of the table are the old records of all parts.
    passed_records: set[int] = set()
    for root in structure.given:
        _, new_numbers = canonical(root, lambda record: records[record])
        passed_records.update(new_numbers)
    leaves = [record for record in sorted(passed_records) if records[record][0] is LEAF]
    # No object was split by the labels of the transform, so C can do a later call, and check these leaves itself.
    if call.plan.origins is None:
        _keep_positions(call, structure.given, leaves)
    # Find a committed argument that the program uses: vanilla `jax.jit` then commits all outputs. Returned leaves count
    # as used. An uncommitted leaf would come back committed, so as another array.
    committed_argument = None
    are_all_placed = all(is_committed(objects[record]) or is_tracer(objects[record]) for record in leaves)
    if not are_all_placed and any(map(is_committed, call.leaves)):
        used_leaves = [*find_used_leaves(), *(objects[record] for record in leaves)]
        committed_argument = next(filter(is_committed, used_leaves), None)
    # The caller's own objects are what vanilla `jax.jit` would return.
    if all(_is_what_jit_returns(objects[record], committed_argument) for record in leaves):
        return objects.__getitem__
    # Vanilla `jax.jit` would return another array for some leaf, so all objects are built anew.
    new_leaves = _as_outputs([objects[record] for record in leaves], committed_argument)
    new_objects: dict[int, Any] = dict(zip(leaves, new_leaves, strict=True))
    # Children come before their parents.
    for record in sorted(passed_records):
        op, children = records[record]
        if type(op) is Node:
            new_children = [new_objects[child] for child in children]
            # `thaw` returns the static value, or a copy of it if it is mutable.
            new_objects[record] = op.type.put_together(op.aux.thaw(), new_children)
        elif type(op) is Static:
            new_objects[record] = op.thaw()
    return new_objects.__getitem__


def _keep_positions(call: Call, roots: tuple[int, ...], leaves: Sequence[int]) -> None:
    """Keeps, with the structure of the arguments, where the leaves of the unchanged objects are among all leaves.

    In a later call with this structure, C checks the leaves at these positions and returns the caller's own objects.

    Args:
        call: the call.
        roots: records of the unchanged objects in the result. The positions are kept under this key.
        leaves: records of their leaves.
    """
    position_of = {record: position for position, record in enumerate(call.tree.leaf_numbers)}
    keep(call.plan.structure, roots, tuple([position_of[record] for record in leaves]))


def _is_what_jit_returns(leaf: Any, committed_argument: Any) -> bool:
    """Returns True if vanilla `jax.jit` would return an array equal to a leaf of its arguments, equally committed.

    Args:
        leaf: the leaf.
        committed_argument: a committed argument used by the program. None if there is none.
    """
    # A reference is returned as it is. A tracer is placed by the outer transform.
    if isinstance(leaf, jax.Ref) or is_tracer(leaf):
        return True
    return isinstance(leaf, jax.Array) and (committed_argument is None or leaf.committed)


def has_identity_outside(obj: Any, *, containers: bool) -> bool:
    """Returns True if an object outside modules carries identity.

    Modules and references do. So do mutable containers if `containers` is true, except a `deque`: JAX does not take it
    apart, so outside modules it is a static value.

    Args:
        obj: the object. It is in no module.
        containers: True if mutable containers outside modules carry identity.
    """
    node_type = node_type_of(obj)
    # A leaf.
    if node_type is None:
        return isinstance(obj, jax.Ref)
    return not node_type.is_plain or (containers and node_type.is_mutable and node_type.is_known_to_jax)


def is_committed(leaf: Any) -> bool:
    """Returns True if a leaf is an array committed to its device. JAX moves uncommitted ones where needed."""
    # The fast test for nearly all leaves.
    if type(leaf) is ConcreteArray:
        return leaf.committed
    return isinstance(leaf, jax.Array) and not is_tracer(leaf) and leaf.committed


def is_tracer(leaf: Any) -> bool:
    """Returns True if a leaf is a tracer."""
    return isinstance(leaf, Tracer)
