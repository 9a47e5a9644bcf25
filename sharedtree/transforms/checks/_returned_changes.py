"""Finds the changes in a function's arguments that its result does not have, not even in new objects.

    def step(m, x):                             # `m.bn.mean` comes in as the tracer `a`
        y = m(x)                                # sets m.bn.mean = 0.9 * a + 0.1 * x.mean(), the tracer `b`
        return jax.tree.map(jnp.copy, m)        # a new `Model`, whose bn.mean is copy(b), the tracer `c`

The change is the value `b` at the place ("bn", "mean") of a `Model`. The result holds a new `Model` with `c` at the
same place. In the program that is being traced, `c` is computed from `b`, so the change is returned. If the model had
been copied before `y = m(x)`, `c` would be copy(a). Such a value is computed from the received value and not from the
change, so the change would be lost. Two more cases:

    return jax.tree.map(f, nnx.state(m))        a new `State` with another ['bn']['mean']: returned
    return gradient                             a new `Model`, not made of the changed one: lost

Functional programs return a new model, which `jax.tree.map`, a loop, an inner transform or an update has made of the
changed one. We call the new model, or a mapping with its variables, a *copy*. A change counts as returned if

  1. the result holds a copy: a module of the same class as a changed module, or a mapping with the changed variable;
  2. the value at the place of the change in the copy is not the received value; and
  3. that value was computed from the change; or it replaces the change (as a cache that a second call overwrites), in a
     copy that was made of the model. A value that was computed from the received one belongs to an old copy.

The program that is being traced answers these questions. If the values are concrete there is no program. Then any other
value counts, unless it is a gradient.

One copy accounts for one changed module. If a function changes two networks of a class and returns one, the change in
the other one is lost.

More words of this file: a *record* is the number of an object in a flat DAG, of the flattened arguments or of the
flattened result. A *returned node* is a module or a container in the result. The *index* of a change is that in the
list of all changes. Sets of values are integers with one *bit* for each question about the program (see `_Dataflow`).
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._call_arguments import Arguments
from ...core._jax_internals import are_of_one_program, operands_of, operation_of, program_tracer
from ...core._node_types import carries_identity, name_in, node_type_of
from ...core._pack_and_unpack import Rules, flat_dag_of
from ...core._structure import LEAF, FlatDag, Path
from ...ties._leaf_notes import is_gradient

Place = tuple[str, ...]
"""The names on the path to a leaf or a module. A variable and its value have one place."""


class Change(NamedTuple):
    """A change in a received object: a leaf was replaced, or a module or variable was added or removed.

    Attributes:
        kind: "changes" for a replaced leaf, "adds" or "removes" for a module or variable.
        path: path of the leaf, the module or the variable. For a leaf in a variable, the path of the variable.
        leaf: record of the received leaf. None if a module or variable was added or removed.
        value: the value now. For "removes", the removed value.
        holder_record: record of the received object in which the change is.
        path_in_holder: path from this object.
        holder: the object.
    """

    kind: Literal["changes", "adds", "removes"]
    path: Path
    leaf: int | None
    value: Any
    holder_record: int
    path_in_holder: Path
    holder: Any

    def is_in(self, returned: IdentitySet) -> bool:
        """Returns True if the result holds the holder of the change itself, or the assigned value itself.

        Args:
            returned: all objects in the result.
        """
        if self.holder in returned:
            return True
        # A number or `None` in the result need not come from the change, since equal ones may be one object.
        is_object = carries_identity(self.value) or node_type_of(self.value) is not None
        return self.kind != "removes" and is_object and self.value in returned


def lost_changes(changes: Sequence[Change], received: FlatDag, result: Any, rules: Rules) -> list[Change]:
    """Returns the changes in a function's arguments that its result does not have.

    Args:
        changes: changes in the arguments.
        received: the arguments, with the objects as they are now.
        result: the function's result.
        rules: how the transform packs results.
    """
    if not changes:
        return []
    # First the cheap question, whether the objects themselves are returned. Then the question about copies.
    out = flat_dag_of(result, rules, "result")
    returned = IdentitySet(out.objects)
    lost = [change for change in changes if not change.is_in(returned)]
    return _Returned(lost, received, out).without_those_in_copies() if lost else lost


class _Places(NamedTuple):
    """The places of all objects in one node: a received module or a returned node.

    Attributes:
        root: record of the node.
        places_of: record below the node, or of the node → its places: one for each edge that leads to it.
        leaf_at: place → record of the leaf.
        node_at: place → record of the node.
    """

    root: int
    places_of: dict[int, list[Place]]
    leaf_at: dict[Place, int]
    node_at: dict[Place, int]


def _places_in(tree: FlatDag, root: int) -> _Places:
    """Finds the places of all records in a node, the node itself included.

    Args:
        tree: the flat DAG with the node.
        root: record of the node.
    """
    # Records of the values in variables. A value has the place of its variable: it lacks the last key of the path.
    values: set[int] = set()
    for record in tree.below(root).reached:
        node = tree.node(record)
        if node is not None and node.type.convention == "variable":
            values.update(tree.records[record][1])
    places = _Places(root, {}, {}, {})
    for record, path in tree.below(root).edges():
        place = _place(path[:-1] if record in values else path)
        places.places_of.setdefault(record, []).append(place)
        is_leaf = tree.records[record][0] is LEAF
        (places.leaf_at if is_leaf else places.node_at).setdefault(place, record)
    return places


def _place(path: Path) -> Place:
    """Returns the names on a path."""
    # As text: an NNX `State` has the keys 0, 1, … for a list in the model, where the list itself has indices.
    return tuple([str(name_in(key)) for key in path])


class _Sources(NamedTuple):
    """The values from which the leaves of a returned node were computed.

    Attributes:
        bits: the values, as bits of `_Dataflow`.
        is_complete: True if the program shows the sources of all leaves that are not gradients.
        has_value: True if one of the leaves is no gradient.
        has_gradient: True if one of the leaves is a gradient.
    """

    bits: int
    is_complete: bool
    has_value: bool
    has_gradient: bool


class _Returned:
    """The changes in a function's arguments beside its result, to find the changes that are in copies.

    Args:
        changes: the changes. Neither their holders nor their values are in the result themselves.
        received: the arguments, with the objects as they are now.
        out: the flattened result.

    Cost: linear in both trees and the program, and one comparison for each pair of a module and a returned node that
    was computed from the module, until the module's changes are found. Other pairs cost nothing: if a model of a
    hundred layers is lost and a gradient is returned, no layer is compared with a part of the gradient.
    """

    def __init__(self, changes: Sequence[Change], received: FlatDag, out: FlatDag) -> None:
        """Groups the returned nodes by class."""
        self._changes = changes
        self._received = received
        self._out = out
        # Record of a received module → its places. Record of a returned node → its places.
        self._module_places: dict[int, _Places] = {}
        self._copy_places: dict[int, _Places] = {}
        # (record of a received module, record of a returned node) → the answer of `_is_copy`.
        self._are_copies: dict[tuple[int, int], bool] = {}
        # Class → records of the returned nodes that may be copies of its modules. A mapping may have the variables of
        # any module, so all mappings are under `Mapping`.
        self._copies: dict[Any, list[int]] = {}
        received_objects = IdentitySet(received.objects)
        # Parents come before their children.
        nodes = [record for record in sorted(out.reached, reverse=True) if out.node(record) is not None]
        for record in nodes:
            obj = out.objects[record]
            if obj not in received_objects:
                self._copies.setdefault(Mapping if isinstance(obj, Mapping) else type(obj), []).append(record)

    def without_those_in_copies(self) -> list[Change]:
        """Returns the changes that are in no copy of their modules."""
        # Indices of the changes without a copy so far.
        lost = set(range(len(self._changes)))
        # Records of the result in copies that were found.
        used_records: set[int] = set()
        levels = self._changed_modules_by_depth() if self._copies else []
        for modules in levels:
            for module in modules:
                self._module_places[module] = _places_in(self._received, module)
        # The outermost modules first. A copy of the model decides about its layers, and a layer in it is no longer a
        # possible copy of another layer.
        for modules in levels:
            module_of_copy = self._match_copies(modules, lost, used_records)
            used_records.update(*[self._out.below(copy).reached for copy in module_of_copy])
        return [change for index, change in enumerate(self._changes) if index in lost]

    def _match_copies(self, modules: Sequence[int], lost: set[int], used_records: set[int]) -> dict[int, int]:
        """Matches modules with their copies in the result, and removes the changes in these copies from `lost`.

        Args:
            modules: records of received modules. None of them is in another one.
            lost: indices of the changes without a copy so far. Changed.
            used_records: records of the result in copies that were found before.

        Returns:
            Record of a copy → record of its module.
        """
        # Module → its changes without a copy so far, also those in modules inside it.
        changes_of: dict[int, set[int]] = {}
        for module in modules:
            places_of = self._module_places[module].places_of
            holders = self._changes_by_holder.keys() & places_of.keys()
            lost_below = {index for record in holders for index in self._changes_by_holder[record]} & lost
            if lost_below:
                changes_of[module] = lost_below
        if not changes_of:
            return {}
        candidates = _Candidates(self, changes_of, used_records)
        # Results of `changes_in_copy`.
        returned_changes: dict[tuple[int, int], set[int]] = {}

        def changes_in_copy(module: int, copy: int) -> set[int]:
            """Returns the changes of a module that a returned node has."""
            if (module, copy) not in returned_changes:
                module_places, copy_places = self._module_places[module], self._places_in_copy(copy)
                returned_changes[module, copy] = {
                    index for index in changes_of[module] if self._has(index, module_places, copy_places)
                }
            return returned_changes[module, copy]

        module_of_copy = _match(changes_of, candidates, changes_in_copy)
        for copy, module in module_of_copy.items():
            lost -= changes_in_copy(module, copy)
        # A module may have more than one copy: one NNX `State` has the parameters, and another `State` the rest.
        for module, changes in changes_of.items():
            copies = candidates.unmatched(module, module_of_copy) if changes & lost else ()
            for copy in copies:
                if changes_in_copy(module, copy) & lost:
                    module_of_copy[copy] = module
                    lost -= changes_in_copy(module, copy)
                if not changes & lost:
                    break
        return module_of_copy

    @functools.cached_property
    def _changes_by_holder(self) -> dict[int, list[int]]:
        """Record of a received object → indices of the changes in it."""
        grouped: dict[int, list[int]] = {}
        for index, change in enumerate(self._changes):
            grouped.setdefault(change.holder_record, []).append(index)
        return grouped

    def _places_in_copy(self, copy: int) -> _Places:
        """Returns the places in a returned node, computed once."""
        if copy not in self._copy_places:
            self._copy_places[copy] = _places_in(self._out, copy)
        return self._copy_places[copy]

    def is_removal(self, index: int) -> bool:
        """Returns True if a change removed something."""
        return self._changes[index].kind == "removes"

    def class_of(self, module: int) -> type:
        """Returns the class of a received module."""
        return type(self._received.objects[module])

    def copies_of(self, cls: type) -> Sequence[int]:
        """Returns the returned nodes of a class, by record, without received objects. For `Mapping`, all mappings."""
        return self._copies.get(cls, ())

    @functools.cached_property
    def sources(self) -> dict[int, _Sources]:
        """Record of the result → the values from which it, or the leaves below it, were computed."""
        sources: dict[int, _Sources] = {}
        # Children come before their parents in the table.
        for record in sorted(self._out.reached):
            op, children = self._out.records[record]
            leaf = self._out.objects[record]
            parts = [sources[child] for child in children if self._out.holds_leaf[child]]
            if op is LEAF and is_gradient(leaf):
                sources[record] = _Sources(0, is_complete=True, has_value=False, has_gradient=True)
            elif op is LEAF:
                bits = self.dataflow.sources_of(leaf)
                sources[record] = _Sources(bits or 0, bits is not None, has_value=True, has_gradient=False)
            else:
                bits = functools.reduce(operator.or_, [part.bits for part in parts], 0)
                has_value = any(part.has_value for part in parts)
                has_gradient = any(part.has_gradient for part in parts)
                sources[record] = _Sources(bits, all(part.is_complete for part in parts), has_value, has_gradient)
        return sources

    def _changed_modules_by_depth(self) -> list[list[int]]:
        """Groups the records of the received modules with changes in them by depth.

        The depth of a module is the greatest number of such modules on a path to it.

        Returns:
            The groups, the outermost modules first.
        """
        received = self._received
        parents: dict[int, list[int]] = {}
        for record in received.reached:
            for child in received.records[record][1]:
                parents.setdefault(child, []).append(record)
        # Records of all objects that have a change in them: go up from each changed object.
        holding: set[int] = set()
        stack = [change.holder_record for change in self._changes]
        while stack:
            record = stack.pop()
            if record not in holding:
                holding.add(record)
                stack += parents.get(record, ())
        depths: dict[int, int] = {}
        levels: dict[int, list[int]] = {}
        # Parents first: they come after their children in the table.
        for record in sorted(holding, reverse=True):
            # All parents of the record have been seen, so its depth is known.
            depth = depths.get(record, 0)
            if self._is_module(record):
                levels.setdefault(depth, []).append(record)
                depth += 1
            for child in received.records[record][1]:
                depths[child] = max(depths.get(child, 0), depth)
        return [levels[depth] for depth in sorted(levels)]

    def _is_module(self, record: int) -> bool:
        """Returns True for the record of a received module."""
        node = self._received.node(record)
        return node is not None and not node.type.is_plain and node.type.cls is not Arguments

    def _has(self, index: int, module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a returned node, as a possible copy of a module, has a change in this module.

        Args:
            index: index of the change.
            module_places: places in the module.
            copy_places: places in the returned node.
        """
        change = self._changes[index]
        holder_places = module_places.places_of.get(change.holder_record, ())
        # The places of the change in the module: there are several if several paths lead to its holder.
        places = [(*place, *_place(change.path_in_holder)) for place in holder_places]
        if isinstance(self._out.objects[copy_places.root], Mapping):
            return any(place and self._mapping_has(index, place, module_places, copy_places) for place in places)
        # A removal is in the copy if nothing is at the place.
        if change.kind == "removes":
            return any(place not in copy_places.leaf_at and place not in copy_places.node_at for place in places)
        leaves = [leaf for place in places for leaf in self._leaves_at(place, copy_places)]
        return any(self._is_returned_as(index, leaf, module_places, copy_places) for leaf in leaves)

    def _mapping_has(self, index: int, place: Place, module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a mapping (an NNX `State`) has the changed variable or a value computed from the change.

        Args:
            index: index of the change.
            place: place of the change in the module.
            module_places: places in the module.
            copy_places: places in the mapping.
        """
        change = self._changes[index]
        node = copy_places.node_at.get(place)
        is_variable = node is not None and type(self._out.objects[node]) is type(change.holder)
        dataflow = self.dataflow
        for leaf in self._leaves_at(place, copy_places):
            # A mapping may hold any value under this name, such as a metric. A variable of the same class is enough,
            # but a bare value must be computed from the change.
            if is_variable:
                is_returned = self._is_returned_as(index, leaf, module_places, copy_places)
            else:
                is_returned = dataflow.is_from_change(index, leaf)
            if is_returned:
                return True
        return False

    def _leaves_at(self, place: Place, copy_places: _Places) -> list[Any]:
        """Returns the leaf at a place in a returned node, in a list. If a node is there, returns its first leaf.

        Empty if nothing is at the place.
        """
        record = copy_places.leaf_at.get(place)
        if record is None and place in copy_places.node_at:
            records_below = self._out.below(copy_places.node_at[place]).reached
            record = next((n for n in sorted(records_below) if self._out.records[n][0] is LEAF), None)
        return [] if record is None else [self._out.objects[record]]

    def _is_returned_as(self, index: int, leaf: Any, module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a leaf of a returned node is computed from a change, or replaces it in a copy of the module.

        Args:
            index: index of the change.
            leaf: the leaf, at the place of the change.
            module_places: places in the module.
            copy_places: places in the returned node.
        """
        # The received leaf itself: this is an old copy.
        received_leaf = self._changes[index].leaf
        if received_leaf is not None and leaf is self._received.objects[received_leaf]:
            return False
        # Concrete values, which no program shows: any other value counts, unless it is a gradient.
        dataflow = self.dataflow
        if not dataflow.can_tell(index, leaf):
            return not is_gradient(leaf)
        if dataflow.is_from_change(index, leaf):
            return True
        # The leaf may replace the change, as a cache that a second call overwrites.
        return not dataflow.is_from_received(index, leaf) and self._is_copy(dataflow, module_places, copy_places)

    def _is_copy(self, dataflow: "_Dataflow", module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a returned node was made of a received module.

        So it is if it has a leaf of the module at the same place, or a leaf that was computed from a leaf of the
        module.

        Args:
            dataflow: the program.
            module_places: places in the module.
            copy_places: places in the returned node.
        """
        key = module_places.root, copy_places.root
        if key not in self._are_copies:
            out, received = self._out.objects, self._received.objects
            common_places = module_places.leaf_at.keys() & copy_places.leaf_at.keys()
            has_leaf_of_module = any(
                out[copy_places.leaf_at[place]] is received[module_places.leaf_at[place]] for place in common_places
            )
            self._are_copies[key] = has_leaf_of_module or any(
                dataflow.is_from_module(module_places.root, out[leaf]) for leaf in copy_places.leaf_at.values()
            )
        return self._are_copies[key]

    @functools.cached_property
    def dataflow(self) -> "_Dataflow":
        """The program being traced, with the questions about the changes and about the modules with places."""
        objects = self._received.objects
        assigned = [_assigned_leaves(change) for change in self._changes]
        received = [[] if change.leaf is None else [objects[change.leaf]] for change in self._changes]
        leaves_of: dict[int, list[Any]] = {}
        for module, places in self._module_places.items():
            leaves_of[module] = [objects[leaf] for leaf in places.leaf_at.values()]
        return _Dataflow(assigned, received, leaves_of)


def _assigned_leaves(change: Change) -> list[Any]:
    """Returns the leaves of the value that a change assigned. Empty for a removal."""
    return [] if change.kind == "removes" else list(flat_dag_of(change.value).leaves.values())


# ---- Which returned node is the copy of which module ----


def _match(
    modules: Iterable[int], candidates: "_Candidates", changes_in_copy: Callable[[int, int], set[int]]
) -> dict[int, int]:
    """Matches returned nodes with modules, one with one, so that as many modules as possible have a copy.

    Bipartite matching by augmenting paths: a module whose copies are all taken takes one of them, if the module that
    had it can have another copy.

    Args:
        modules: records of the modules.
        candidates: possible copies of each module.
        changes_in_copy: (module, returned node) → the changes of the module that the node has. A node is a copy if it
            has any.

    Returns:
        Record of a copy → record of the module.
    """
    module_of_copy: dict[int, int] = {}

    def find_copy(module: int, tried: set[int]) -> bool:
        """Matches a module with a copy, and returns True if there is one. May match other modules anew.

        Args:
            module: the module.
            tried: copies that other modules were asked to give up. Extended.
        """
        for copy in candidates.unmatched(module, module_of_copy):
            if changes_in_copy(module, copy):
                module_of_copy[copy] = module
                return True
        for copy in candidates.of(module):
            if copy not in tried and changes_in_copy(module, copy):
                tried.add(copy)
                # The module that has this copy looks for another one.
                if find_copy(module_of_copy[copy], tried):
                    module_of_copy[copy] = module
                    return True
        return False

    for module in modules:
        find_copy(module, set())
    return module_of_copy


class _Candidates:
    """The returned nodes that may be copies of some modules, the likely ones first.

    Args:
        returned: the changes and the result.
        changes_of: record of a module → indices of its changes.
        used_records: records of the result in copies that were found before. They are left out.
    """

    def __init__(self, returned: _Returned, changes_of: Mapping[int, set[int]], used_records: set[int]) -> None:
        """Groups the returned nodes by class, and collects the bits that stand for the changes and for the modules.

        `_Dataflow` gives each change and each module a bit. The bits of a node tell what it is computed from. A *copy*
        here is a node that may be one.
        """
        dataflow = returned.dataflow
        self._dataflow = dataflow
        self._changes_of = changes_of
        self._class_of = {module: returned.class_of(module) for module in changes_of}
        self._removals = {index for changes in changes_of.values() for index in changes if returned.is_removal(index)}
        # Module → True if all of its changes are traced values, so that the traced program computes them. Then: module
        # → the bits of its changes.
        self._are_in_program = {
            module: all(map(dataflow.is_in_program, changes)) for module, changes in changes_of.items()
        }
        self._change_bits = {module: dataflow.bits("changed", changes) for module, changes in changes_of.items()}
        module_bits = dataflow.bits("module", changes_of)
        change_bits = dataflow.bits("changed", set().union(*changes_of.values()))
        self._nodes_of: dict[Any, _NodesOfClass] = {}
        for cls in (*set(self._class_of.values()), Mapping):
            sources = {copy: returned.sources[copy] for copy in returned.copies_of(cls) if copy not in used_records}
            self._nodes_of[cls] = _NodesOfClass(sources, change_bits, module_bits)

    def of(self, module: int) -> Iterator[int]:
        """Yields the possible copies of a module, likely ones first. Some of them may come twice."""
        for nodes in (self._nodes_of[self._class_of[module]], self._nodes_of[Mapping]):
            if not self._removals.isdisjoint(self._changes_of[module]):
                # A removal computes no value, so the program shows no returned node as made from it.
                yield from nodes.models
            elif self._are_in_program[module]:
                # Nodes computed from a change, then nodes of which the program does not show the sources, then nodes
                # computed from any leaf of the module.
                yield from _at_bits(self._change_bits[module], nodes.by_change)
                yield from nodes.incomplete
                yield from _at_bits(self._dataflow.bits("module", (module,)), nodes.by_module)
            else:
                # A change to a concrete value, about which the program says nothing.
                yield from nodes.with_values

    def unmatched(self, module: int, module_of_copy: Mapping[int, int]) -> Iterator[int]:
        """Yields the possible copies of a module, without those that are matched with a module already.

        Args:
            module: the module.
            module_of_copy: the matches so far. The iteration looks at this dict as it goes on.
        """
        return (copy for copy in self.of(module) if copy not in module_of_copy)


class _NodesOfClass:
    """The returned nodes of one class, grouped by the values from which they were computed.

    Args:
        sources: record of a returned node → its sources.
        change_bits: bits of all changes that may be in copies.
        module_bits: bits of all modules that may have copies.

    Attributes:
        incomplete: nodes with a leaf of unknown sources.
        with_values: nodes with a leaf that is no gradient.
        models: the nodes of `with_values`, and nodes without leaves. Only gradients are left out.
    """

    def __init__(self, sources: Mapping[int, _Sources], change_bits: int, module_bits: int) -> None:
        """Makes the three lists. The groups by bit are computed when they are needed."""
        self._sources = sources
        self._change_bits = change_bits
        self._module_bits = module_bits
        self.incomplete = [copy for copy, source in sources.items() if not source.is_complete]
        self.with_values = [copy for copy, source in sources.items() if source.has_value]
        self.models = [copy for copy, source in sources.items() if source.has_value or not source.has_gradient]

    @functools.cached_property
    def by_change(self) -> dict[int, list[int]]:
        """Number of the bit of a change → the nodes computed from this change."""
        return self._by_bit(self._change_bits)

    @functools.cached_property
    def by_module(self) -> dict[int, list[int]]:
        """Number of the bit of a module → the nodes computed from the leaves of this module.

        The size may be quadratic, since each layer of a model is computed from all layers before it. So this is
        computed only if `by_change` has no copy for some module.
        """
        return self._by_bit(self._module_bits)

    def _by_bit(self, bits: int) -> dict[int, list[int]]:
        """Groups the nodes by the numbers of their bits, as far as these are among some bits."""
        table: dict[int, list[int]] = {}
        for copy, source in self._sources.items():
            for bit in _bit_numbers(source.bits & bits):
                table.setdefault(bit, []).append(copy)
        return table


def _bit_numbers(mask: int) -> Iterator[int]:
    """Yields the numbers of the bits that are set, in rising order. The lowest bit has the number 0."""
    while mask:
        # In two's complement, this is the lowest bit that is set.
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _at_bits(mask: int, table: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """Yields the entries of a table for all bits that are set."""
    for bit in _bit_numbers(mask):
        yield from table.get(bit, ())


# ---- The sources of leaves in the program ----


class _Dataflow:
    """The program being traced, with answers to questions about the values from which a leaf was computed.

    There are three kinds of questions, each a pair of a kind and a number:

        ("changed", index of a change)      was the leaf computed from the leaves assigned by the change?
        ("received", index of a change)     was the leaf computed from the received leaf at the place of the change?
        ("module", record)                  was the leaf computed from a received leaf of the module?

    Each question has one bit of an integer, so one pass over the program answers all of them. The *sources* of a tracer
    are the bits of all questions with the answer "yes".

    A gradient counts as computed from nothing. In fact it is computed from all leaves of a model, but it is no new
    model, and neither is a value that was computed from gradients alone.

    Args:
        changed: for each change, the assigned leaves.
        received: for each change, the received leaf at its place, in a list. Empty if there was none.
        modules: record of a module → its received leaves.

    Cost: one look at each operation of the program, for all questions together.
    """

    def __init__(
        self,
        changed: Sequence[Sequence[Any]],
        received: Sequence[Sequence[Any]],
        modules: Mapping[int, Sequence[Any]],
    ) -> None:
        """Numbers the questions, and marks the tracers that they ask for."""
        # For each change, the tracers of the assigned leaves in the program. None for a concrete value.
        self._changed = [[program_tracer(value) for value in values] for values in changed]
        # Any tracer of the program, to compare other tracers with. None if all changes are concrete.
        self._program = next((tracer for tracers in self._changed for tracer in tracers if tracer is not None), None)
        # Question → its bit.
        self._bits: dict[tuple[str, int], int] = {}
        # Tracer → bits of the questions that name it: was the leaf computed from this tracer?
        self._sources: IdentityDict[int] = IdentityDict()
        tables = {"changed": enumerate(changed), "received": enumerate(received), "module": modules.items()}
        for kind, table in tables.items():
            for number, values in table:
                bit = self._bits[kind, number] = 1 << len(self._bits)
                for tracer in map(program_tracer, values):
                    if tracer is not None:
                        self._sources[tracer] = self._sources.get(tracer, 0) | bit
        # Operation → the sources of its operands. Filled by `_compute_sources`.
        self._reached: IdentityDict[int] = IdentityDict()

    def bits(self, kind: str, numbers: Iterable[int]) -> int:
        """Returns the bits of several questions of one kind: "changed", "received" or "module"."""
        return functools.reduce(operator.or_, [self._bits[kind, number] for number in numbers], 0)

    def is_in_program(self, change: int) -> bool:
        """Returns True if all leaves assigned by a change are values of the program."""
        tracers = self._changed[change]
        return bool(tracers) and all(map(self._is_in_program, tracers))

    def _is_in_program(self, tracer: Any) -> bool:
        """Returns True for a tracer of the same program as the changes. False for None, a concrete value."""
        return tracer is not None and self._program is not None and are_of_one_program((tracer, self._program))

    def sources_of(self, leaf: Any) -> int | None:
        """Returns the sources of a leaf, as bits. None if the leaf is no value of the program."""
        tracer = program_tracer(leaf)
        return self._compute_sources(tracer) if self._is_in_program(tracer) else None

    def can_tell(self, change: int, leaf: Any) -> bool:
        """Returns True if a leaf and all leaves assigned by a change are values of one program."""
        tracers = [program_tracer(leaf), *self._changed[change]]
        are_all_tracers = len(tracers) > 1 and not any(tracer is None for tracer in tracers)
        return are_all_tracers and are_of_one_program(tracers)

    def is_from_change(self, change: int, leaf: Any) -> bool:
        """Returns True if a leaf was computed from a value assigned by a change."""
        return self._is_from(leaf, ("changed", change))

    def is_from_received(self, change: int, leaf: Any) -> bool:
        """Returns True if a leaf was computed from the received leaf at the place of a change."""
        return self._is_from(leaf, ("received", change))

    def is_from_module(self, module: int, leaf: Any) -> bool:
        """Returns True if a leaf was computed from a received leaf of a module."""
        return self._is_from(leaf, ("module", module))

    def _is_from(self, leaf: Any, question: tuple[str, int]) -> bool:
        """Returns True if the answer to a question is "yes" for a leaf. False for a concrete leaf."""
        tracer = program_tracer(leaf)
        return tracer is not None and bool(self._compute_sources(tracer) & self._bits[question])

    def _compute_sources(self, tracer: Any) -> int:
        """Computes the sources of a tracer, and of all operations before it. Returns them as bits."""
        # The operation that made the tracer. None for an input or a constant of the program.
        last = operation_of(tracer)
        # A depth-first search with a stack of its own, since a program may be deeper than Python's stack.
        stack = [] if last is None else [last]
        while stack:
            operands = operands_of(stack[-1])
            # Operations whose sources must be known first.
            pending = [operation for operation in map(operation_of, operands) if not self._is_done(operation)]
            if pending and stack[-1] not in self._reached:
                stack += pending
                continue
            bits = 0
            for operand in operands:
                bits |= self._stored_sources(operand)
            self._reached[stack.pop()] = bits
        return self._stored_sources(tracer)

    def _is_done(self, operation: Any) -> bool:
        """Returns True if the sources of an operation are known. None, for an input of the program, needs none."""
        return operation is None or operation in self._reached

    def _stored_sources(self, tracer: Any) -> int:
        """Returns the sources of a tracer whose operation is done, as bits. 0 for a gradient."""
        if is_gradient(tracer):
            return 0
        operation = operation_of(tracer)
        return self._sources.get(tracer, 0) | (0 if operation is None else self._reached[operation])
