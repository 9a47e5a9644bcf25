"""Tells whether a function returns what it changed in its arguments, though as other objects.

    def step(m, x):                             # `m.bn.mean` comes in as the tracer `a`
        y = m(x)                                # sets m.bn.mean = 0.9 * a + 0.1 * x.mean(), the tracer `b`
        return jax.tree.map(jnp.copy, m)        # a new `Model`, whose bn.mean is copy(b), the tracer `c`

The change is `b` at ("bn", "mean") of a `Model`. The result holds a `Model`, and has `c` at that place. In the program,
`c` is computed from `b`, so the change is returned. If the model had been copied before the call, `c` would be copy(a):
computed from what came in and not from the change, which would be lost. In the same way,

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
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ...core._by_identity import IdentityDict, IdentitySet
from ...core._call_arguments import Arguments
from ...core._flat_dags import FlatDag
from ...core._jax_internals import are_of_one_program, operands_of, operation_of, program_tracer
from ...core._node_types import node_type_of
from ...core._pack_and_unpack import Rules, walked
from ...core._plain_containers import name_in
from ...core._structure import LEAF, Path
from ...core._traced_leaves_and_identity import carries_identity
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


def not_returned(changes: Sequence[Change], received: FlatDag, result: Any, rules: Rules) -> list[Change]:
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


def _module(tree: FlatDag, number: int) -> _Module:
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


class _Made(NamedTuple):
    """What a result was made of.

    Attributes:
        sources: what its leaves were computed from, as bits of `_Flow`.
        is_known: whether the program tells this of each leaf that is no gradient.
        has_value: whether it has a leaf that is no gradient.
        has_gradient: whether it has one that is.
    """

    sources: int
    is_known: bool
    has_value: bool
    has_gradient: bool


class _Returned:
    """Changes beside what is returned.

    Args:
        changes: in what was received, whose holders and values are not returned themselves.
        received: what the function received, as it is now.
        out: what it returned.

    Cost: linear in both trees and the program, and one look for each pair of a module and a result that was computed
    from it, until the module's changes are found. What was not computed from it is not looked at: a model of a hundred
    layers, all of which are lost beside a gradient, is compared with no part of the gradient.
    """

    def __init__(self, changes: Sequence[Change], received: FlatDag, out: FlatDag) -> None:
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
            owners = self._owners(modules, left, taken)
            taken.update(*[self._out.below(copy).reached for copy in owners])
        return [change for i, change in enumerate(self._changes) if i in left]

    def _owners(self, modules: Sequence[int], left: set[int], taken: set[int]) -> dict[int, int]:
        """Copy → the module that it accounts for. What a module's copies have is taken away from `left`."""
        changes = {}
        for number in modules:
            below = self._modules[number].places
            own = {i for record in self._changes_of.keys() & below.keys() for i in self._changes_of[record]} & left
            if own:
                changes[number] = own
        if not changes:
            return {}
        candidates = _Candidates(self, changes, taken)
        covered: dict[tuple[int, int], set[int]] = {}

        def covers(number: int, copy: int) -> set[int]:
            if (number, copy) not in covered:
                before, after = self._modules[number], self._result(copy)
                covered[number, copy] = {i for i in changes[number] if self._has(i, before, after)}
            return covered[number, copy]

        owners = _matched(changes, candidates, covers)
        for copy, number in owners.items():
            left -= covers(number, copy)
        # One `State` may have the parameters and another one the rest.
        for number, own in changes.items():
            copies = candidates.free(number, owners) if own & left else ()
            for copy in copies:
                if covers(number, copy) & left:
                    owners[copy] = number
                    left -= covers(number, copy)
                if not own & left:
                    break
        return owners

    @functools.cached_property
    def _changes_of(self) -> dict[int, list[int]]:
        """The number of a received object → the changes in it."""
        grouped: dict[int, list[int]] = {}
        for i, change in enumerate(self._changes):
            grouped.setdefault(change.number, []).append(i)
        return grouped

    def _result(self, copy: int) -> _Module:
        if copy not in self._results:
            self._results[copy] = _module(self._out, copy)
        return self._results[copy]

    def is_removal(self, index: int) -> bool:
        """Whether a change is that something is gone."""
        return self._changes[index].kind == "removes"

    def class_of(self, number: int) -> type:
        """The class of a received module."""
        return type(self._received.objects[number])

    def copies_of(self, cls: type) -> Sequence[int]:
        """The results of a class, or all mappings, that were not received themselves."""
        return self._copies.get(cls, ())

    @functools.cached_property
    def made(self) -> dict[int, _Made]:
        """The number of a record of the result → what it was made of."""
        made: dict[int, _Made] = {}
        for number in sorted(self._out.reached):  # children come before their parents in the table
            op, children = self._out.records[number]
            leaf = self._out.objects[number]
            parts = [made[child] for child in children if self._out.holds_leaf[child]]
            if op is LEAF and is_gradient(leaf):
                made[number] = _Made(0, is_known=True, has_value=False, has_gradient=True)
            elif op is LEAF:
                sources = self.flow.sources_of(leaf)
                made[number] = _Made(sources or 0, sources is not None, has_value=True, has_gradient=False)
            else:
                sources = functools.reduce(operator.or_, [part.sources for part in parts], 0)
                has_value = any(part.has_value for part in parts)
                has_gradient = any(part.has_gradient for part in parts)
                made[number] = _Made(sources, all(part.is_known for part in parts), has_value, has_gradient)
        return made

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
        flow = self.flow
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
        flow = self.flow
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
    def flow(self) -> "_Flow":
        """What was computed from what in the program that is traced."""
        objects = self._received.objects
        return _Flow(
            [_values_of(change) for change in self._changes],
            [[] if change.leaf is None else [objects[change.leaf]] for change in self._changes],
            {n: [objects[leaf] for leaf in module.leaves.values()] for n, module in self._modules.items()},
        )


def _values_of(change: Change) -> list[Any]:
    """The leaves that a change put there."""
    return [] if change.kind == "removes" else list(walked(change.value).leaves.values())


class _Candidates:
    """The results that may have what was changed in some modules, the likely ones first.

    Args:
        returned: the modules and the results.
        changes: module → the numbers of its changes.
        taken: results that account for other modules already.
    """

    def __init__(self, returned: _Returned, changes: Mapping[int, set[int]], taken: set[int]) -> None:
        self._flow = returned.flow
        self._changes = changes
        self._classes = {number: returned.class_of(number) for number in changes}
        self._removes = {i for own in changes.values() for i in own if returned.is_removal(i)}
        self._is_known = {number: all(map(self._flow.is_in_program, own)) for number, own in changes.items()}
        self._changed = {number: self._flow.bits("changed", own) for number, own in changes.items()}
        modules = self._flow.bits("module", changes)
        changed = self._flow.bits("changed", set().union(*changes.values()))
        self._groups = {
            cls: _CandidatesOfClass(
                {copy: returned.made[copy] for copy in returned.copies_of(cls) if copy not in taken}, changed, modules
            )
            for cls in (*set(self._classes.values()), Mapping)
        }

    def of(self, number: int) -> Iterator[int]:
        """The results that may have a change of a module; some of them twice."""
        for group in (self._groups[self._classes[number]], self._groups[Mapping]):
            if not self._removes.isdisjoint(self._changes[number]):
                yield from group.models  # what is gone left no value that tells
            elif self._is_known[number]:
                yield from _at_bits(self._changed[number], group.by_change)
                yield from group.unknown
                yield from _at_bits(self._flow.bits("module", (number,)), group.by_module)
            else:
                yield from group.values

    def free(self, number: int, owners: Mapping[int, int]) -> Iterator[int]:
        """Those of them that no module has."""
        return (copy for copy in self.of(number) if copy not in owners)


class _CandidatesOfClass:
    """The results of one class by what they were computed from.

    Args:
        made: what each of them was made of.
        changed: the bits of the changes that are asked for.
        modules: the bits of the modules that are asked for.
    """

    def __init__(self, made: Mapping[int, _Made], changed: int, modules: int) -> None:
        self._made = made
        self._changed = changed
        self._modules = modules
        self.unknown = [copy for copy, how in made.items() if not how.is_known]
        self.values = [copy for copy, how in made.items() if how.has_value]
        self.models = [copy for copy, how in made.items() if how.has_value or not how.has_gradient]

    @functools.cached_property
    def by_change(self) -> dict[int, list[int]]:
        """The bit of a change → the results that were computed from it."""
        return self._by_bit(self._changed)

    @functools.cached_property
    def by_module(self) -> dict[int, list[int]]:
        """The bit of a module → the results that were computed from its leaves.

        Each layer of a model is computed from all that come before it, so this may be a quadratic number of results. It
        is made when the changes alone do not tell.
        """
        return self._by_bit(self._modules)

    def _by_bit(self, asked: int) -> dict[int, list[int]]:
        table: dict[int, list[int]] = {}
        for copy, how in self._made.items():
            for bit in _bit_numbers(how.sources & asked):
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


def _matched(modules: Iterable[int], candidates: _Candidates, covers: Callable[[int, int], set[int]]) -> dict[int, int]:
    """Copy → module, so that as many modules as possible have a copy of their own.

    Args:
        modules: those that need one.
        candidates: the results that may be a copy.
        covers: (module, result) → the changes of the module that the result has.
    """
    owners: dict[int, int] = {}

    def finds(module: int, asked: set[int]) -> bool:
        for copy in candidates.free(module, owners):
            if covers(module, copy):
                owners[copy] = module
                return True
        # Another module may do with another copy.
        for copy in candidates.of(module):
            if copy not in asked and covers(module, copy):
                asked.add(copy)
                if finds(owners[copy], asked):
                    owners[copy] = module
                    return True
        return False

    for module in modules:
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
        self._program = next((tracer for tracers in self._changed for tracer in tracers if tracer is not None), None)
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

    def bits(self, question: str, numbers: Iterable[int]) -> int:
        """The bits that stand for changes ("changed") or modules ("module") in what a leaf was computed from."""
        return functools.reduce(operator.or_, [self._bits[question, number] for number in numbers], 0)

    def is_in_program(self, change: int) -> bool:
        """Whether what a change put there are values of the program."""
        tracers = self._changed[change]
        return bool(tracers) and all(map(self._is_in_program, tracers))

    def _is_in_program(self, tracer: Any) -> bool:
        return tracer is not None and self._program is not None and are_of_one_program((tracer, self._program))

    def sources_of(self, leaf: Any) -> int | None:
        """What a leaf was computed from, as bits; None if it is no value of the program."""
        tracer = program_tracer(leaf)
        return self._sources_of(tracer) if self._is_in_program(tracer) else None

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
