"""Pass-through: under `jax.jit`, a module returned unchanged comes back as the caller's own object.

    model is sharedtree.jit(lambda model, x: model)(model, x)      True. The program has no output for `model`.

Unchanged means deeply unchanged: all leaves and nodes in the module are the objects that the function received, and all
static values are equal. The structure of the result refers to the module by a number, so the module costs neither an
output of the program nor a copy.

The number is that of a *record*. The packed arguments have one record for each object: its operation (`LEAF`, a static
value, or a `Node` with its class) and the numbers of its children's records. A variable `record` holds the number.

The caller gets its own object only if the leaves of it are what vanilla `jax.jit` would return. That returns a
`jax.Array` for a NumPy array or a Python number. If the program reads an argument that is *committed* to a device, all
arrays that it returns are committed. If some leaf would come back as another array, all leaves go through a `jax.jit`
that only returns them, and the modules are built anew from its outputs.

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
from ..core._structure import LEAF, FlatDag, Node, Structure, canonical_records
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
        is_taken: (record) → True if the object may not pass through, since its buffers are donated.
        containers: True if mutable containers outside modules carry identity.

    Returns:
        A dictionary: object → its record. It has each of these modules and references, and all objects with identity
        below them. It is empty if nothing passes through.
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
        # Only modules and references pass through by themselves. Arrays and containers do so inside a module.
        can_pass = record is not None and (isinstance(obj, jax.Ref) or is_module(obj)) and not is_taken(record)
        if record is not None and can_pass and objects.is_deeply_unchanged(record):
            for record_below in objects.records_below(record):
                unchanged[received.objects[record_below]] = record_below
            continue
        # The object does not pass through, but a module in it may.
        node_type = node_type_of(obj)
        if node_type is not None:
            stack.extend(node_type.take_apart(obj)[0])
    return unchanged


class ReceivedObjects:
    """The objects with identity in the arguments of a function, to find out which of them the function has changed.

    The record of an object was made before the function was called. An object is unchanged if it still agrees with it.

    Args:
        received: the arguments of the function, with the objects as they are now.
        containers: True if mutable containers outside modules carry identity.

    Attributes:
        records: records of the objects with identity, children before their parents.
    """

    def __init__(self, received: FlatDag, *, containers: bool = False) -> None:
        """Finds the objects with identity. Compares nothing yet."""
        self.received = received
        # Records at which arrays and containers have no identity: those outside modules, or none with `containers`.
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
        """Returns the record of an object. None if the function did not receive the object, or it has no identity."""
        return self._record_of.get(obj)

    def records_below(self, record: int) -> set[int]:
        """Returns the records of the objects with identity at and below a record."""
        return self.received.below(record).reached.intersection(self.records)

    def is_deeply_unchanged(self, record: int) -> bool:
        """Returns True if an object and everything below it is as the function received it.

        Cost: the first call compares all objects in the arguments. Later calls only look up its answer.
        """
        if self._is_deeply_unchanged is None:
            self._is_deeply_unchanged = []
            # Children come before their parents, so the list has the answers for the children already.
            for number, (_, children) in enumerate(self.received.records):
                are_children_unchanged = all(self._is_deeply_unchanged[child] for child in children)
                self._is_deeply_unchanged.append(are_children_unchanged and self.is_unchanged(number))
        return self._is_deeply_unchanged[record]

    def is_unchanged(self, record: int) -> bool:
        """Returns True if a node still has the children and the auxiliary data with which it was received.

        Changes below a child do not count, unless the child is a tuple or another node without identity. Returns True
        for a leaf or a static value.
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
        # A second flatten shows which children are built anew: they are other objects than in the first flatten.
        objects_again = op.type.take_apart(node)[0]
        return all(map(self._is_child_or_rebuilt, objects_now, objects_again, children))

    def _is_child(self, obj: Any, record: int) -> bool:
        """Returns True if an object is the received object of a record, or stands for it as an equal value.

        Static values are compared by content, and tuples part by part. Other objects must be the received ones.

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
        # A tuple or another node without identity. Here its node was not flattened a second time. So it is passed in
        # the place of `obj_again`, too, and then no container in it counts as built anew.
        return self._has_content(obj, obj, record)

    def _is_child_or_rebuilt(self, obj: Any, obj_again: Any, record: int) -> bool:
        """Returns True if a child is the received one, or a plain container that the flatten builds anew.

        `_is_child` decides about the first. A container built anew must have the received contents.

        Args:
            obj: a child of a node, from a flatten of the node.
            obj_again: the child in the same place from a second flatten. If it is another object, it is built anew.
            record: record of the child in this place when the node was received.
        """
        return self._is_child(obj, record) or (obj is not obj_again and self._has_content(obj, obj_again, record))

    def _has_content(self, obj: Any, obj_again: Any, record: int) -> bool:
        """Returns True if an object is a plain container with the class and the contents of the received object.

        Args:
            obj: a child of a node, from a flatten of the node.
            obj_again: the child in the same place from a second flatten. The same object if it is not built anew.
            record: record of the child in this place when the node was received.
        """
        op, children = self.received.records[record]
        if type(op) is not Node or not op.type.is_plain:
            return False
        if type(obj) is not op.type.cls or type(obj_again) is not type(obj):
            return False
        # The parts of a container may be built anew, too. So both are taken apart, to compare their parts.
        (parts, aux), (parts_again, _) = op.type.take_apart(obj), op.type.take_apart(obj_again)
        has_same_shape = len(parts) == len(children) == len(parts_again) and Static(aux) == op.aux
        return has_same_shape and all(map(self._is_child_or_rebuilt, parts, parts_again, children))


# ---- On the caller's side: which object is in the result ----


@functools.partial(VANILLA_JIT, keep_unused=True)
def _as_outputs(leaves: Sequence[Any], committed_argument: Any) -> Sequence[Any]:
    """Returns the leaves that vanilla `jax.jit` returns for leaves of its arguments: arrays, perhaps committed.

    Args:
        leaves: the leaves.
        committed_argument: an array committed to a device. Then the outputs are committed, too. None if there is none.
    """
    # An argument that decides about the device, and nothing else. Without `keep_unused`, JAX would leave it out.
    del committed_argument
    return leaves


def objects_for_caller(
    call: Call, structure: Structure, find_used_leaves: Callable[[], Sequence[Any]]
) -> Callable[[int], Any]:
    """Decides what the caller gets for each unchanged object in a result: its own object, or a new one.

    If vanilla `jax.jit` would return each leaf of the unchanged objects as it is, the caller gets its own objects. If
    it would return another array for even one leaf, all unchanged objects are built anew. They may share parts, and to
    build only some of them anew would cut these ties.

    Args:
        call: the call.
        structure: structure of the result. Its field `given` has the records of the unchanged objects.
        find_used_leaves: returns the leaves of the arguments that the computation reads. It is called only if some leaf
            of the unchanged objects is not committed, and some leaf of the arguments is.

    Returns:
        A function: record of an unchanged object → the object for the caller.
    """
    objects, records = call.tree.objects, call.tree.records
    # 1. Find the records of all unchanged objects, and of everything inside them. `canonical_records` returns a table
    # of new records, which is not needed here, and a dictionary. Its keys are the old records at and below the root.
    passed_records: set[int] = set()
    for root in structure.given:
        _, new_numbers = canonical_records(root, lambda record: records[record])
        passed_records.update(new_numbers)
    leaves = [record for record in sorted(passed_records) if records[record][0] is LEAF]
    # C can do later calls, if the labels of the transform have split no object. For these calls, it needs to know where
    # the leaves are.
    if call.plan.origins is None:
        _keep_positions(call, structure.given, leaves)
    # 2. Find a committed argument that the program reads, if there is one. Vanilla `jax.jit` then commits all outputs,
    # so it would return another array for an uncommitted leaf. Leaves that are returned count as read.
    committed_argument = None
    are_all_placed = all(is_committed(objects[record]) or is_tracer(objects[record]) for record in leaves)
    if not are_all_placed and any(map(is_committed, call.leaves)):
        used_leaves = [*find_used_leaves(), *(objects[record] for record in leaves)]
        committed_argument = next(filter(is_committed, used_leaves), None)
    # 3. The leaves are what vanilla `jax.jit` would return: the caller gets its own objects.
    if all(_is_what_jit_returns(objects[record], committed_argument) for record in leaves):
        return objects.__getitem__
    # 4. Vanilla `jax.jit` would return another array for some leaf: build all objects anew, children first.
    new_leaves = _as_outputs([objects[record] for record in leaves], committed_argument)
    new_objects: dict[int, Any] = dict(zip(leaves, new_leaves, strict=True))
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
    """Keeps, for C, where the leaves of the unchanged objects are among all leaves of the arguments.

    The positions are kept with the structure of the arguments. In a later call with this structure, C checks the leaves
    at these positions. If all are what `jax.jit` would return, it returns the caller's own objects.

    Args:
        call: the call.
        roots: records of the unchanged objects in the result. They are the key under which the positions are kept.
        leaves: records of the leaves of these objects.
    """
    position_of = {record: position for position, record in enumerate(call.tree.leaf_numbers)}
    keep(call.plan.structure, roots, tuple([position_of[record] for record in leaves]))


def _is_what_jit_returns(leaf: Any, committed_argument: Any) -> bool:
    """Returns True if a leaf can stand for the array that vanilla `jax.jit` would return for it.

    It can if it is a `jax.Array`, and is committed if the array would be.

    Args:
        leaf: the leaf.
        committed_argument: a committed argument that the program reads. None if there is none.
    """
    # A reference is returned as it is. Where a tracer is placed, the outer transform decides.
    if isinstance(leaf, jax.Ref) or is_tracer(leaf):
        return True
    return isinstance(leaf, jax.Array) and (committed_argument is None or leaf.committed)


def has_identity_outside(obj: Any, *, containers: bool) -> bool:
    """Returns True if an object carries identity in a place outside modules.

    Modules and references do. If `containers` is true, mutable containers do, too. A `deque` does not: JAX does not
    take it apart, so outside modules it is a static value.

    Args:
        obj: the object. It may itself be a module, but it is in no module.
        containers: True if mutable containers outside modules carry identity.
    """
    node_type = node_type_of(obj)
    # A leaf or a static value.
    if node_type is None:
        return isinstance(obj, jax.Ref)
    return not node_type.is_plain or (containers and node_type.is_mutable and node_type.is_known_to_jax)


def is_committed(leaf: Any) -> bool:
    """Returns True if a leaf is an array committed to its device. JAX moves only uncommitted arrays as it needs."""
    # Nearly all leaves are of this class. The other tests are slower.
    if type(leaf) is ConcreteArray:
        return leaf.committed
    return isinstance(leaf, jax.Array) and not is_tracer(leaf) and leaf.committed


def is_tracer(leaf: Any) -> bool:
    """Returns True if a leaf is a tracer."""
    return isinstance(leaf, Tracer)
