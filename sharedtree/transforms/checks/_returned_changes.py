"""Whether a function returns what it changed in its arguments, though as other objects.

    m(x)                                        # changes `m.bn.mean`
    return jax.tree.map(f, m)                   a new `Model` with another `bn.mean`: returned
    return jax.tree.map(f, nnx.state(m))        a new `State` with another ['bn']['mean']: returned
    return gradient                             a new `Model`, not made of the changed one: lost

Programs in the style of values return a new model, which `jax.tree.map`, a loop, an inner transform or an update has
made of the changed one. So a change is returned if a result has a module of the class of one that was changed, or a
mapping with the variable, and at the place of the change another value than came in: one that was computed from the
change, or that replaces it in what was made of the model (a cache that the next call has overwritten). What was
computed from the value that came in is a copy of the old model. All this is asked of the program that is being traced.
Where there is none, because the values are concrete, any other value will do unless it is a gradient.

What is returned once accounts for one changed module: of two networks of one class, only one of which is returned, the
other one is lost.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._call_arguments import Arguments
from ...core._jax_internals import are_of_one_program, operands_of, operation_of, program_tracer
from ...core._node_types import node_type_of
from ...core._pack_and_unpack import Rules, walked
from ...core._plain_containers import name_in
from ...core._structure import LEAF, Path
from ...core._traced_leaves_and_identity import carries_identity
from ...core._trees_taken_apart import Walked
from ...ties._leaf_notes import is_gradient

Place = tuple[str, ...]
"""The names on the way to a leaf or a module. A variable and its value have one place."""


class Change(NamedTuple):
    """Something in a received object that is another object now, is new there, or is gone.

    Attributes:
        kind: which of these.
        path: to it; of a variable, to the variable.
        leaf: the number of the received leaf; of what is new, None.
        value: what is there now; of what is gone, what was there.
        number: of the object that was received and holds it.
        below: the path from that object.
        holder: that object.
    """

    kind: Literal["changes", "adds", "removes"]
    path: Path
    leaf: int | None
    value: Any
    number: int
    below: Path
    holder: Any

    def is_in(self, returned: IdentitySet) -> bool:
        """Whether the function returns the very object that holds it, or that it assigned."""
        if self.holder in returned:
            return True
        # Numbers and `None` are one object wherever they occur.
        is_object = carries_identity(self.value) or node_type_of(self.value) is not None
        return self.kind != "removes" and is_object and self.value in returned


def not_returned(changes: Sequence[Change], received: Walked, result: Any, rules: Rules) -> list[Change]:
    """The changes that are in nothing that the function returned.

    Args:
        changes: in what was received.
        received: what the function received, as it is now.
        result: what it returned.
        rules: of the transform.
    """
    if not changes:
        return []
    out = walked(result, rules, "result")
    returned = IdentitySet(out.objects)
    left = [change for change in changes if not change.is_in(returned)]
    return _Returned(left, received, out).without_those_in_copies() if left else left


class _Module(NamedTuple):
    """A module that was received, or a module or mapping that is returned, with its places.

    Attributes:
        number: of its record.
        places: of each record below it; several, if several paths lead there.
        leaves: place → number of the leaf.
        nodes: place → number of the node.
    """

    number: int
    places: dict[int, list[Place]]
    leaves: dict[Place, int]
    nodes: dict[Place, int]


def _module(tree: Walked, number: int) -> _Module:
    values = {
        child
        for n in tree.below(number).reached
        if (node := tree.node(n)) is not None and node.type.convention == "variable"
        for child in tree.records[n][1]
    }
    made = _Module(number, {}, {}, {})
    for n, path in tree.below(number).edges():
        place = _place(path[:-1] if n in values else path)
        made.places.setdefault(n, []).append(place)
        (made.leaves if tree.records[n][0] is LEAF else made.nodes).setdefault(place, n)
    return made


def _place(path: Path) -> Place:
    # A `State` has the numbers of a list for keys, where the list itself has indices.
    return tuple([str(name_in(key)) for key in path])


class _Returned:
    """Changes beside what is returned.

    Args:
        changes: in what was received, whose holders and values are not returned themselves.
        received: what the function received, as it is now.
        out: what it returned.
    """

    def __init__(self, changes: Sequence[Change], received: Walked, out: Walked) -> None:
        self._changes = changes
        self._received = received
        self._out = out
        self._modules: dict[int, _Module] = {}  # those that were received
        self._results: dict[int, _Module] = {}
        self._are_copies: dict[tuple[int, int], bool] = {}
        known = IdentitySet(received.objects)
        nodes = [number for number in sorted(out.reached, reverse=True) if out.node(number) is not None]
        self._copies: dict[Any, list[int]] = {}  # by class; mappings may have the variables of any module
        for number in nodes:
            obj = out.objects[number]
            if obj not in known:
                self._copies.setdefault(Mapping if isinstance(obj, Mapping) else type(obj), []).append(number)

    def without_those_in_copies(self) -> list[Change]:
        """The changes that are not in copies of the modules that hold them."""
        left = set(range(len(self._changes)))
        taken: set[int] = set()
        levels = self._holding_modules() if self._copies else []
        self._modules = {number: _module(self._received, number) for modules in levels for number in modules}
        # A copy of the model tells more than one of a layer, so we go from the outside in.
        for modules in levels:
            covered = {number: self._covered_by_copies(number, left, taken) for number in modules}
            owners = _matched({number: list(copies) for number, copies in covered.items()})
            for number, copies in covered.items():
                for copy, changes in copies.items():
                    # One `State` may have the parameters and another one the rest.
                    if owners.setdefault(copy, number) == number:
                        left -= changes
            taken.update(*[self._out.below(copy).reached for copy in owners])
        return [change for i, change in enumerate(self._changes) if i in left]

    def _holding_modules(self) -> list[list[int]]:
        """The received modules that hold a change, by how many others they are in."""
        received = self._received
        parents: dict[int, list[int]] = {}
        for number in received.reached:
            for child in received.records[number][1]:
                parents.setdefault(child, []).append(number)
        holding: set[int] = set()
        stack = [change.number for change in self._changes]
        while stack:
            number = stack.pop()
            if number not in holding:
                holding.add(number)
                stack += parents.get(number, ())
        depths: dict[int, int] = {}
        levels: dict[int, list[int]] = {}
        for number in sorted(holding, reverse=True):  # children come before their parents in the table
            depth = depths.get(number, 0)
            if self._is_module(number):
                levels.setdefault(depth, []).append(number)
                depth += 1
            for child in received.records[number][1]:
                depths[child] = max(depths.get(child, 0), depth)
        return [levels[depth] for depth in sorted(levels)]

    def _is_module(self, number: int) -> bool:
        node = self._received.node(number)
        return node is not None and not node.type.is_plain and node.type.cls is not Arguments

    def _covered_by_copies(self, number: int, left: set[int], taken: set[int]) -> dict[int, set[int]]:
        """What may be a copy of a received module → the changes that it has."""
        before = self._modules[number]
        covered: dict[int, set[int]] = {}
        own = {i for i in left if self._changes[i].number in before.places}
        cls = type(self._received.objects[number])
        for copy in (*self._copies.get(cls, ()), *self._copies.get(Mapping, ())):
            if copy not in taken:
                after = self._results.get(copy) or self._results.setdefault(copy, _module(self._out, copy))
                changes = {i for i in own if self._has(i, before, after)}
                if changes:
                    covered[copy] = changes
        return covered

    def _has(self, index: int, before: _Module, after: _Module) -> bool:
        """Whether a change of a received module is in what may be a copy."""
        change = self._changes[index]
        places = [(*place, *_place(change.below)) for place in before.places.get(change.number, ())]
        if isinstance(self._out.objects[after.number], Mapping):
            return any(place and self._mapping_has(index, place, before, after) for place in places)
        if change.kind == "removes":
            return any(place not in after.leaves and place not in after.nodes for place in places)
        leaves = [leaf for place in places for leaf in self._leaves_at(place, after)]
        return any(self._is_made(index, leaf, before, after) for leaf in leaves)

    def _mapping_has(self, index: int, place: Place, before: _Module, after: _Module) -> bool:
        """Whether a mapping, such as a `State`, has the variable that was changed, or a value computed from its."""
        change = self._changes[index]
        node = after.nodes.get(place)
        is_variable = node is not None and type(self._out.objects[node]) is type(change.holder)
        flow = self._flow
        return any(
            self._is_made(index, leaf, before, after) if is_variable else flow.is_from_change(index, leaf)
            for leaf in self._leaves_at(place, after)
        )

    def _leaves_at(self, place: Place, after: _Module) -> list[Any]:
        """The leaf at a place; of a module that is there, the first."""
        number = after.leaves.get(place)
        if number is None and place in after.nodes:
            below = self._out.below(after.nodes[place]).reached
            number = next((n for n in sorted(below) if self._out.records[n][0] is LEAF), None)
        return [] if number is None else [self._out.objects[number]]

    def _is_made(self, index: int, leaf: Any, before: _Module, after: _Module) -> bool:
        """Whether a leaf of a result was made of what a change put there, or replaces it in a copy of the module."""
        received = self._changes[index].leaf
        if received is not None and leaf is self._received.objects[received]:
            return False
        flow = self._flow
        if not flow.is_known(index, leaf):
            return not is_gradient(leaf)
        if flow.is_from_change(index, leaf):
            return True
        return not flow.is_from_received(index, leaf) and self._is_copy(flow, before, after)

    def _is_copy(self, flow: "_Flow", before: _Module, after: _Module) -> bool:
        """Whether a result was made of the leaves of a received module, or has one in its place."""
        key = before.number, after.number
        if key not in self._are_copies:
            out, received = self._out.objects, self._received.objects
            self._are_copies[key] = any(
                p in after.leaves and out[after.leaves[p]] is received[n] for p, n in before.leaves.items()
            ) or any(flow.is_from_module(before.number, out[n]) for n in after.leaves.values())
        return self._are_copies[key]

    @functools.cached_property
    def _flow(self) -> "_Flow":
        objects = self._received.objects
        return _Flow(
            [_values_of(change) for change in self._changes],
            [[] if change.leaf is None else [objects[change.leaf]] for change in self._changes],
            {n: [objects[leaf] for leaf in module.leaves.values()] for n, module in self._modules.items()},
        )


def _values_of(change: Change) -> list[Any]:
    """The leaves that a change put there."""
    return [] if change.kind == "removes" else list(walked(change.value).leaves.values())


def _matched(options: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Copy → module, so that as many modules as possible have a copy of their own.

    Args:
        options: module → its possible copies.
    """
    owners: dict[int, int] = {}

    def finds(module: int, asked: set[int]) -> bool:
        for copy in options[module]:
            if copy not in asked:
                asked.add(copy)
                if copy not in owners or finds(owners[copy], asked):
                    owners[copy] = module
                    return True
        return False

    for module in options:
        finds(module, set())
    return owners


class _Flow:
    """Which results were computed from which changes, in the program that is being traced.

    Gradients are computed from everything. What comes of one alone is no new model, so we do not look behind them.

    Args:
        changed: of each change, by its number, what is there now.
        received: what came in there.
        modules: the leaves that came in with each module.

    Cost: one look at each operation of the program, for all questions together.
    """

    def __init__(
        self,
        changed: Sequence[Sequence[Any]],
        received: Sequence[Sequence[Any]],
        modules: Mapping[int, Sequence[Any]],
    ) -> None:
        self._changed = [[program_tracer(value) for value in values] for values in changed]
        self._bits: dict[tuple[str, int], int] = {}
        self._sources: IdentityDict[int] = IdentityDict()  # tracer → the questions that ask for it, a bit each
        tables = {"changed": enumerate(changed), "received": enumerate(received), "module": modules.items()}
        for question, table in tables.items():
            for number, values in table:
                bit = self._bits[question, number] = 1 << len(self._bits)
                for tracer in map(program_tracer, values):
                    if tracer is not None:
                        self._sources[tracer] = self._sources.get(tracer, 0) | bit
        self._reached: IdentityDict[int] = IdentityDict()  # operation → what its operands were computed from

    def is_known(self, change: int, leaf: Any) -> bool:
        """Whether the program tells if a leaf was computed from what was changed."""
        tracers = [program_tracer(leaf), *self._changed[change]]
        is_known = len(tracers) > 1 and not any(tracer is None for tracer in tracers)
        return is_known and are_of_one_program(tracers)

    def is_from_change(self, change: int, leaf: Any) -> bool:
        """Whether a leaf was computed from what a change put there."""
        return self._is_from(leaf, ("changed", change))

    def is_from_received(self, change: int, leaf: Any) -> bool:
        """Whether a leaf was computed from what came in at the place of a change."""
        return self._is_from(leaf, ("received", change))

    def is_from_module(self, number: int, leaf: Any) -> bool:
        """Whether a leaf was computed from one that came in with a module."""
        return self._is_from(leaf, ("module", number))

    def _is_from(self, leaf: Any, question: tuple[str, int]) -> bool:
        tracer = program_tracer(leaf)
        return tracer is not None and bool(self._sources_of(tracer) & self._bits[question])

    def _sources_of(self, tracer: Any) -> int:
        last = operation_of(tracer)
        stack = [] if last is None else [last]
        while stack:
            operands = operands_of(stack[-1])
            before = [made_by for made_by in map(operation_of, operands) if not self._is_done(made_by)]
            if before and stack[-1] not in self._reached:
                stack += before
                continue
            sources = 0
            for operand in operands:
                sources |= self._behind(operand)
            self._reached[stack.pop()] = sources
        return self._behind(tracer)

    def _is_done(self, operation: Any) -> bool:
        return operation is None or operation in self._reached

    def _behind(self, tracer: Any) -> int:
        if is_gradient(tracer):
            return 0
        operation = operation_of(tracer)
        return self._sources.get(tracer, 0) | (0 if operation is None else self._reached[operation])
