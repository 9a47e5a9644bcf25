"""Tells whether a function returns what it changed in its arguments, though as other objects.

    def step(m, x):                             # `m.bn.mean` comes in as the tracer `a`
        y = m(x)                                # sets m.bn.mean = 0.9 * a + 0.1 * x.mean(), the tracer `b`
        return jax.tree.map(jnp.copy, m)        # a new `Model`, whose bn.mean is copy(b), the tracer `c`

The change is `b` at ("bn", "mean") of a `Model`. The result holds a `Model`, and has `c` at that place. In the program,
`c` is computed from `b`, so the change is returned. If the model had been copied before the call, `c` would be copy(a).
That is computed from the value that came in and not from the change, so the change would be lost. Two more cases:

    return jax.tree.map(f, nnx.state(m))        a new `State` with another ['bn']['mean']: returned
    return gradient                             a new `Model`, not made of the changed one: lost

Programs in the style of values return a new model. `jax.tree.map`, a loop, an inner transform or an update has made it
of the changed one. So a change counts as returned if

  1. the result holds a module of the same class as one that was changed, or a mapping with the variable;
  2. it has another value at the place of the change than came in; and
  3. that value was computed from the change, or it replaces the change in something that was made of the model (a
     cache that the next call has overwritten). A value that was computed from the old one belongs to an old copy.

The program that is being traced answers these questions. If there is none, because the values are concrete, any other
value will do unless it is a gradient.

One result accounts for one changed module. If only one of two networks of a class is returned, the other one is lost.
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
    """Something in a received object that is another object now, is new there, or is gone.

    Attributes:
        kind: which of these.
        path: path of the leaf, or of the variable around it.
        leaf: record of the received leaf. None if the value is new.
        value: the present value. If it is gone, the former one.
        holder_record: record of the received object that holds it.
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
        """Returns True if the function returns the very holder of the change, or the very value it assigned."""
        if self.holder in returned:
            return True
        # Numbers and `None` are one object wherever they occur.
        is_object = carries_identity(self.value) or node_type_of(self.value) is not None
        return self.kind != "removes" and is_object and self.value in returned


def lost_changes(changes: Sequence[Change], received: FlatDag, result: Any, rules: Rules) -> list[Change]:
    """Returns the changes in the arguments of a function that its result lacks.

    Args:
        changes: changes in the arguments.
        received: the arguments, with the objects as they are now.
        result: the function's result.
        rules: how the transform packs results.
    """
    if not changes:
        return []
    out = flat_dag_of(result, rules, "result")
    returned = IdentitySet(out.objects)
    lost = [change for change in changes if not change.is_in(returned)]
    return _Returned(lost, received, out).without_those_in_copies() if lost else lost


class _Places(NamedTuple):
    """The places in a received module, or in a module or mapping of the result.

    Attributes:
        root: record of the module.
        places_of: record below it → its places. There are several if several paths lead there.
        leaf_at: place → record of the leaf.
        node_at: place → record of the node.
    """

    root: int
    places_of: dict[int, list[Place]]
    leaf_at: dict[Place, int]
    node_at: dict[Place, int]


def _places_in(tree: FlatDag, root: int) -> _Places:
    """Finds the places of all records below a module, the module itself included."""
    # Records of what variables hold: they have the places of their variables.
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
    # A `State` has the numbers of a list for keys, where the list itself has indices.
    return tuple([str(name_in(key)) for key in path])


class _Sources(NamedTuple):
    """The values from which a part of the result was computed.

    Attributes:
        bits: the values, as bits of `_Dataflow`.
        is_complete: True if the program knows the sources of all leaves that are not gradients.
        has_value: True if the part has a leaf other than gradients.
        has_gradient: True if it has a gradient.
    """

    bits: int
    is_complete: bool
    has_value: bool
    has_gradient: bool


class _Returned:
    """Compares the changes in the arguments of a function with its result.

    Args:
        changes: the changes. Neither their holders nor their values are returned themselves.
        received: the arguments, with the objects as they are now.
        out: the result.

    Cost: linear in both trees and the program, and one look for each pair of a module and a result computed from it,
    until the module's changes are found. Other pairs cost nothing. If a model of a hundred layers is lost beside a
    gradient, none of its layers is compared with a part of the gradient.
    """

    def __init__(self, changes: Sequence[Change], received: FlatDag, out: FlatDag) -> None:
        self._changes = changes
        self._received = received
        self._out = out
        # Places in received modules and in results, by record.
        self._module_places: dict[int, _Places] = {}
        self._copy_places: dict[int, _Places] = {}
        # (record of a received module, record of a result) → the answer of `_is_copy`.
        self._are_copies: dict[tuple[int, int], bool] = {}
        # Class → records of the results that may be copies. Mappings may have the variables of any module.
        self._copies: dict[Any, list[int]] = {}
        received_objects = IdentitySet(received.objects)
        nodes = [record for record in sorted(out.reached, reverse=True) if out.node(record) is not None]
        for record in nodes:
            obj = out.objects[record]
            if obj not in received_objects:
                self._copies.setdefault(Mapping if isinstance(obj, Mapping) else type(obj), []).append(record)

    def without_those_in_copies(self) -> list[Change]:
        """Returns the changes without those in copies of their modules."""
        lost = set(range(len(self._changes)))
        used_records: set[int] = set()
        levels = self._changed_modules_by_depth() if self._copies else []
        for modules in levels:
            for module in modules:
                self._module_places[module] = _places_in(self._received, module)
        # A copy of the model says more than a copy of a layer, so we go from the outside in.
        for modules in levels:
            module_of_copy = self._match_copies(modules, lost, used_records)
            used_records.update(*[self._out.below(copy).reached for copy in module_of_copy])
        return [change for index, change in enumerate(self._changes) if index in lost]

    def _match_copies(self, modules: Sequence[int], lost: set[int], used_records: set[int]) -> dict[int, int]:
        """Matches modules with their copies in the result, and removes the changes in these copies from `lost`.

        Args:
            modules: records of received modules. None of them is in another one.
            lost: indices of the changes without a copy so far.
            used_records: records of the result in copies of other modules.

        Returns:
            Record of a copy → record of its module.
        """
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
        returned_changes: dict[tuple[int, int], set[int]] = {}

        def changes_in_copy(module: int, copy: int) -> set[int]:
            if (module, copy) not in returned_changes:
                module_places, copy_places = self._module_places[module], self._places_in_copy(copy)
                returned_changes[module, copy] = {
                    index for index in changes_of[module] if self._has(index, module_places, copy_places)
                }
            return returned_changes[module, copy]

        module_of_copy = _match(changes_of, candidates, changes_in_copy)
        for copy, module in module_of_copy.items():
            lost -= changes_in_copy(module, copy)
        # One `State` may have the parameters and another one the rest.
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
        if copy not in self._copy_places:
            self._copy_places[copy] = _places_in(self._out, copy)
        return self._copy_places[copy]

    def is_removal(self, index: int) -> bool:
        """Returns True if a change removed something."""
        return self._changes[index].kind == "removes"

    def class_of(self, module: int) -> type:
        """The class of a received module."""
        return type(self._received.objects[module])

    def copies_of(self, cls: type) -> Sequence[int]:
        """Results of a class, without received objects. For `Mapping`, all mappings."""
        return self._copies.get(cls, ())

    @functools.cached_property
    def sources(self) -> dict[int, _Sources]:
        """Record of the result → the values from which it was computed."""
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
        """Groups the received modules with changes in them by the number of modules around them, outermost first."""
        received = self._received
        parents: dict[int, list[int]] = {}
        for record in received.reached:
            for child in received.records[record][1]:
                parents.setdefault(child, []).append(record)
        # Everything that a change is in.
        holding: set[int] = set()
        stack = [change.holder_record for change in self._changes]
        while stack:
            record = stack.pop()
            if record not in holding:
                holding.add(record)
                stack += parents.get(record, ())
        depths: dict[int, int] = {}
        levels: dict[int, list[int]] = {}
        # Children come before their parents in the table, so this meets parents first.
        for record in sorted(holding, reverse=True):
            depth = depths.get(record, 0)
            if self._is_module(record):
                levels.setdefault(depth, []).append(record)
                depth += 1
            for child in received.records[record][1]:
                depths[child] = max(depths.get(child, 0), depth)
        return [levels[depth] for depth in sorted(levels)]

    def _is_module(self, record: int) -> bool:
        node = self._received.node(record)
        return node is not None and not node.type.is_plain and node.type.cls is not Arguments

    def _has(self, index: int, module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a result, as a possible copy of a received module, has a change of this module."""
        change = self._changes[index]
        holder_places = module_places.places_of.get(change.holder_record, ())
        places = [(*place, *_place(change.path_in_holder)) for place in holder_places]
        if isinstance(self._out.objects[copy_places.root], Mapping):
            return any(place and self._mapping_has(index, place, module_places, copy_places) for place in places)
        if change.kind == "removes":
            return any(place not in copy_places.leaf_at and place not in copy_places.node_at for place in places)
        leaves = [leaf for place in places for leaf in self._leaves_at(place, copy_places)]
        return any(self._is_returned_as(index, leaf, module_places, copy_places) for leaf in leaves)

    def _mapping_has(self, index: int, place: Place, module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a mapping (a `State`, say) has the changed variable, or a value computed from the change."""
        change = self._changes[index]
        node = copy_places.node_at.get(place)
        is_variable = node is not None and type(self._out.objects[node]) is type(change.holder)
        dataflow = self.dataflow
        for leaf in self._leaves_at(place, copy_places):
            # A mapping may hold anything under this name, so a bare value must be computed from the change.
            if is_variable:
                is_returned = self._is_returned_as(index, leaf, module_places, copy_places)
            else:
                is_returned = dataflow.is_from_change(index, leaf)
            if is_returned:
                return True
        return False

    def _leaves_at(self, place: Place, copy_places: _Places) -> list[Any]:
        """The leaf at a place of a result, in a list. If a node is there, its first leaf. Empty if nothing is there."""
        record = copy_places.leaf_at.get(place)
        if record is None and place in copy_places.node_at:
            records_below = self._out.below(copy_places.node_at[place]).reached
            record = next((n for n in sorted(records_below) if self._out.records[n][0] is LEAF), None)
        return [] if record is None else [self._out.objects[record]]

    def _is_returned_as(self, index: int, leaf: Any, module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a leaf of a result is computed from a change, or replaces it in a copy of the module."""
        received_leaf = self._changes[index].leaf
        if received_leaf is not None and leaf is self._received.objects[received_leaf]:
            return False
        dataflow = self.dataflow
        if not dataflow.can_tell(index, leaf):
            return not is_gradient(leaf)
        if dataflow.is_from_change(index, leaf):
            return True
        return not dataflow.is_from_received(index, leaf) and self._is_copy(dataflow, module_places, copy_places)

    def _is_copy(self, dataflow: "_Dataflow", module_places: _Places, copy_places: _Places) -> bool:
        """Returns True if a result holds a leaf of a received module at its place, or was computed from one."""
        key = module_places.root, copy_places.root
        if key not in self._are_copies:
            out, received = self._out.objects, self._received.objects
            self._are_copies[key] = any(
                place in copy_places.leaf_at and out[copy_places.leaf_at[place]] is received[leaf]
                for place, leaf in module_places.leaf_at.items()
            ) or any(dataflow.is_from_module(module_places.root, out[leaf]) for leaf in copy_places.leaf_at.values())
        return self._are_copies[key]

    @functools.cached_property
    def dataflow(self) -> "_Dataflow":
        """The program being traced, for questions about these changes."""
        objects = self._received.objects
        assigned = [_assigned_leaves(change) for change in self._changes]
        received = [[] if change.leaf is None else [objects[change.leaf]] for change in self._changes]
        leaves_of: dict[int, list[Any]] = {}
        for module, places in self._module_places.items():
            leaves_of[module] = [objects[leaf] for leaf in places.leaf_at.values()]
        return _Dataflow(assigned, received, leaves_of)


def _assigned_leaves(change: Change) -> list[Any]:
    """Leaves of the value assigned by a change."""
    return [] if change.kind == "removes" else list(flat_dag_of(change.value).leaves.values())


# ---- Which result is the copy of which module ----


def _match(
    modules: Iterable[int], candidates: "_Candidates", changes_in_copy: Callable[[int, int], set[int]]
) -> dict[int, int]:
    """Matches results with modules, one with one, so that as many modules as possible have a copy.

    Args:
        modules: records of the modules.
        candidates: possible copies of each module.
        changes_in_copy: (module, result) → the changes of the module in the result.

    Returns:
        Record of a copy → record of the module.
    """
    module_of_copy: dict[int, int] = {}

    # Bipartite matching by augmenting paths.
    def find_copy(module: int, tried: set[int]) -> bool:
        """Finds a copy for a module, and returns True if there is one. Other modules may change theirs for it."""
        for copy in candidates.unmatched(module, module_of_copy):
            if changes_in_copy(module, copy):
                module_of_copy[copy] = module
                return True
        # All are taken. Perhaps the module that has one of them can do with another copy.
        for copy in candidates.of(module):
            if copy not in tried and changes_in_copy(module, copy):
                tried.add(copy)
                if find_copy(module_of_copy[copy], tried):
                    module_of_copy[copy] = module
                    return True
        return False

    for module in modules:
        find_copy(module, set())
    return module_of_copy


class _Candidates:
    """The results that may be copies of some modules, the likely ones first.

    Args:
        returned: the modules and the results.
        changes_of: module → indices of its changes.
        used_records: records of the result in copies of other modules.
    """

    def __init__(self, returned: _Returned, changes_of: Mapping[int, set[int]], used_records: set[int]) -> None:
        dataflow = returned.dataflow
        self._dataflow = dataflow
        self._changes_of = changes_of
        self._class_of = {module: returned.class_of(module) for module in changes_of}
        self._removals = {index for changes in changes_of.values() for index in changes if returned.is_removal(index)}
        # For each module: True if the program contains all of its changes, and the bits of these.
        self._are_in_program = {
            module: all(map(dataflow.is_in_program, changes)) for module, changes in changes_of.items()
        }
        self._change_bits = {module: dataflow.bits("changed", changes) for module, changes in changes_of.items()}
        module_bits = dataflow.bits("module", changes_of)
        change_bits = dataflow.bits("changed", set().union(*changes_of.values()))
        self._results_of: dict[Any, _ResultsOfClass] = {}
        for cls in (*set(self._class_of.values()), Mapping):
            sources = {copy: returned.sources[copy] for copy in returned.copies_of(cls) if copy not in used_records}
            self._results_of[cls] = _ResultsOfClass(sources, change_bits, module_bits)

    def of(self, module: int) -> Iterator[int]:
        """Iterates over the possible copies of a module. Some of them may come twice."""
        for results in (self._results_of[self._class_of[module]], self._results_of[Mapping]):
            if not self._removals.isdisjoint(self._changes_of[module]):
                # A removal computes no value, so no result can be traced back to it. All models are possible copies.
                yield from results.models
            elif self._are_in_program[module]:
                yield from _at_bits(self._change_bits[module], results.by_change)
                yield from results.incomplete
                yield from _at_bits(self._dataflow.bits("module", (module,)), results.by_module)
            else:
                yield from results.with_values

    def unmatched(self, module: int, module_of_copy: Mapping[int, int]) -> Iterator[int]:
        """Iterates over the possible copies of a module without those matched with a module already."""
        return (copy for copy in self.of(module) if copy not in module_of_copy)


class _ResultsOfClass:
    """The results of one class, by their sources.

    Args:
        sources: result → its sources.
        change_bits: bits of the changes to look for.
        module_bits: bits of the modules to look for.

    Attributes:
        incomplete: results with leaves of unknown sources.
        with_values: results with leaves other than gradients.
        models: the results of `with_values`, and results without leaves.
    """

    def __init__(self, sources: Mapping[int, _Sources], change_bits: int, module_bits: int) -> None:
        self._sources = sources
        self._change_bits = change_bits
        self._module_bits = module_bits
        self.incomplete = [copy for copy, source in sources.items() if not source.is_complete]
        self.with_values = [copy for copy, source in sources.items() if source.has_value]
        self.models = [copy for copy, source in sources.items() if source.has_value or not source.has_gradient]

    @functools.cached_property
    def by_change(self) -> dict[int, list[int]]:
        """Number of the bit of a change → the results computed from it."""
        return self._by_bit(self._change_bits)

    @functools.cached_property
    def by_module(self) -> dict[int, list[int]]:
        """Number of the bit of a module → the results computed from its leaves.

        Each layer of a model is computed from all layers before it, so this may have quadratic size. It is computed
        only if the changes alone do not decide.
        """
        return self._by_bit(self._module_bits)

    def _by_bit(self, bits: int) -> dict[int, list[int]]:
        table: dict[int, list[int]] = {}
        for copy, source in self._sources.items():
            for bit in _bit_numbers(source.bits & bits):
                table.setdefault(bit, []).append(copy)
        return table


def _bit_numbers(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _at_bits(mask: int, table: Mapping[int, Sequence[int]]) -> Iterator[int]:
    for bit in _bit_numbers(mask):
        yield from table.get(bit, ())


# ---- What was computed from what ----


class _Dataflow:
    """Tells from which values a leaf was computed, in the program being traced.

    The values are those of three kinds of questions, each a pair of a kind and a number:

        ("changed", index of a change)      was it computed from the leaves assigned by the change?
        ("received", index of a change)     was it computed from the received leaf at the place of the change?
        ("module", record)                  was it computed from a received leaf of the module?

    Each question has one bit of an integer, so one pass over the program answers all of them.

    The search stops at gradients. They are computed from everything, and a gradient is no new model, nor is anything
    computed from gradients alone.

    Args:
        changed: for each change, the assigned leaves.
        received: for each change, the received leaf at its place. Empty if there was none.
        modules: record of a module → its received leaves.

    Cost: one look at each operation of the program, for all questions together.
    """

    def __init__(
        self,
        changed: Sequence[Sequence[Any]],
        received: Sequence[Sequence[Any]],
        modules: Mapping[int, Sequence[Any]],
    ) -> None:
        self._changed = [[program_tracer(value) for value in values] for values in changed]
        # One tracer of the program, which stands for it.
        self._program = next((tracer for tracers in self._changed for tracer in tracers if tracer is not None), None)
        self._bits: dict[tuple[str, int], int] = {}
        # Tracer → bits of the questions that ask for it.
        self._sources: IdentityDict[int] = IdentityDict()
        tables = {"changed": enumerate(changed), "received": enumerate(received), "module": modules.items()}
        for kind, table in tables.items():
            for number, values in table:
                bit = self._bits[kind, number] = 1 << len(self._bits)
                for tracer in map(program_tracer, values):
                    if tracer is not None:
                        self._sources[tracer] = self._sources.get(tracer, 0) | bit
        # Operation → bits of what its operands were computed from.
        self._reached: IdentityDict[int] = IdentityDict()

    def bits(self, kind: str, numbers: Iterable[int]) -> int:
        """The bits of several questions of one kind, "changed" or "module"."""
        return functools.reduce(operator.or_, [self._bits[kind, number] for number in numbers], 0)

    def is_in_program(self, change: int) -> bool:
        """Returns True if all leaves assigned by a change are values of the program."""
        tracers = self._changed[change]
        return bool(tracers) and all(map(self._is_in_program, tracers))

    def _is_in_program(self, tracer: Any) -> bool:
        return tracer is not None and self._program is not None and are_of_one_program((tracer, self._program))

    def sources_of(self, leaf: Any) -> int | None:
        """Bits of the sources of a leaf. None if it is no value of the program."""
        tracer = program_tracer(leaf)
        return self._compute_sources(tracer) if self._is_in_program(tracer) else None

    def can_tell(self, change: int, leaf: Any) -> bool:
        """Returns True if the program shows whether a leaf was computed from a change."""
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
        tracer = program_tracer(leaf)
        return tracer is not None and bool(self._compute_sources(tracer) & self._bits[question])

    def _compute_sources(self, tracer: Any) -> int:
        """Returns the bits of a tracer's sources. Iterative, for a program may be deeper than the stack."""
        last = operation_of(tracer)
        stack = [] if last is None else [last]
        while stack:
            operands = operands_of(stack[-1])
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
        return operation is None or operation in self._reached

    def _stored_sources(self, tracer: Any) -> int:
        """Bits of a tracer's sources, once its operation is done. 0 for a gradient."""
        if is_gradient(tracer):
            return 0
        operation = operation_of(tracer)
        return self._sources.get(tracer, 0) | (0 if operation is None else self._reached[operation])
