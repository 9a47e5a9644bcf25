"""Plans for calls: packing, as generated code, arguments whose structures a call site has seen before.

A plan packs the arguments of a call if they have the structures it was made for, and gives up otherwise; then the walk
of `_crossing` decides. Plans for several structures can be kept side by side.
"""

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from operator import countOf
from typing import Any

import jax
from jax.tree_util import tree_leaves, tree_structure

from .._compiled import MAX_DEPTH, ONCE, Readers, Reading, Source, all_different, indented, parts_of
from .._copies import Incomparable
from .._jax_internals import ConcreteArray
from .._node_types import Convention, carries_identity, is_traced, node_type_of
from .._packed import Packed
from .._structure import LEAF, Node, Record
from ._containers import COMMON_BARE, Containers, Trail, is_bare
from ._crossing import Call, Position, packed_in
from ._passing_through import is_committed, is_tracer
from ._result_plans import ResultPlan, can_be_built

MOST_PLANS = 8
"""Of each kind; they are tried in turn before the walk."""

_ENOUGH = 8 * MOST_PLANS
"""With so many structures in turn, plans would be made for ever, each driving out one that is needed next."""

_UNREADABLE = "LookupError, ValueError, RecursionError, Incomparable"

Packing = tuple[tuple[Any, ...], dict[str, Any], tuple[list[Any], ...], tuple[Any, ...]]
"""What a plan makes of arguments: args, kwargs, the leaves of each module, bare leaves.

A plain tuple, since one is made on every call.
"""


class Claims:
    """The structures that plans were made for, or are being made for.

    No code of a user's runs under the lock: structures are compared before, in a tuple that is never changed but
    replaced.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._keys: tuple[Any, ...] = ()
        self._count = 0

    def __contains__(self, key: Any) -> bool:
        return key in self._keys

    def claim(self, key: Any) -> bool:
        """Whether the caller is to make a plan: the first to ask is, if there are not too many."""
        keys = self._keys
        if key in keys:
            return False
        with self.lock:
            if self._keys is not keys or self._count >= _ENOUGH:
                return False
            self._count += 1
            self._keys = (key, *keys)[:MOST_PLANS]
        return True


class CallPlan:
    """Packs the arguments of calls of one structure.

    Attributes:
        pack: (args, kwargs) → `Packing`, or None if the arguments are of another structure.
        known: plans for what such calls have returned, and the numbers of the caller's objects that one of these takes.
            One tuple, to be read once a call: another thread may replace it.
    """

    def __init__(self, call: Call, static: Collection[Position]) -> None:
        source = Source()
        arguments = [a.packed for position, value in call.items() for a in packed_in(value, position)]
        records = [record for packed in arguments for record in packed.structure.records]
        self._records = records
        self._readers = readers = Readers(source, records, [packed.structure.root for packed in arguments])
        self._places: dict[int, tuple[int, int]] = {}  # of each leaf: which list, where in it
        self._trails: dict[int, tuple[Position, Trail]] = {}
        self._above = {records[parent][1][i]: (parent, i) for parent, i in readers.parts.is_first}
        self.known: tuple[tuple[ResultPlan, ...], tuple[int, ...]] = (), ()
        self._learnt = Claims()
        source.names |= {"Packed": Packed, "Incomparable": Incomparable, "Ref": jax.Ref}
        source.names |= {"COMMON": COMMON_BARE, "is_bare": is_bare, "has_structure": _has_structure}
        body: list[str] = []
        bare: list[str] = []
        readings: list[Reading] = []
        modules = iter(arguments)
        positions: dict[Position, str] = {position: source.variable() for position, _ in call.items()}
        expressions: dict[Position, str] = {}

        def read_bare(variable: str, _: Trail) -> str:
            body.append(f"if type({variable}) not in COMMON and not is_bare({variable}): return None")
            bare.append(variable)
            return variable

        for position, value in call.items():
            variable = positions[position]

            def read_module(variable: str, trail: Trail, position: Position = position) -> str:
                packed = next(modules)
                if records[packed.structure.root][0] is LEAF:  # only a reference is packed outside modules
                    body.append(f"if not isinstance({variable}, Ref): return None")
                reading = readers.read(packed.structure.root, variable)
                name = f"leaves{len(readings)}"
                body.extend([f"{name} = []", f"leaves = {name}.extend", *reading.lines])
                self._places.update({n: (len(readings), i) for i, n in enumerate(reading.leaves)})
                self._trails.setdefault(packed.structure.root, (position, trail))
                readings.append(reading)
                return f"Packed({name}, {source.constant(packed.structure, 'structure')})"

            if position in static:
                body.append(f"if has_structure({variable}): return None")  # it might share an object with another
                expressions[position] = variable
            else:
                outside = Containers(source, (body, body), value, (read_module, read_bare), "return None")
                expressions[position] = outside.visit(outside.root, variable)
        head = _taking(positions, len(call.args))
        if any(reading.alike for reading in readings):
            head += ["nodes = []", "alike = nodes.extend"]
        else:
            head.append("alike = None")
        lines = ["try:", *indented([*head, *body]), f"except ({_UNREADABLE}):", "    return None"]
        lines += self._checks(source, readings)
        args = "".join(f"{expressions[i]}, " for i in range(len(call.args)))
        kwargs = ", ".join(f"{name!r}: {expressions[name]}" for name in call.kwargs)
        lists = "".join(f"leaves{i}, " for i in range(len(readings)))
        lines.append(f"return (({args}), {{{kwargs}}}, ({lists}), ({''.join(f'{name}, ' for name in bare)}))")
        source.function("pack", "args, kwargs", lines)
        self.pack: Callable[[Any, Any], Packing | None] = source.run()["pack"]

    def _checks(self, source: Source, readings: Sequence[Reading]) -> list[str]:
        """Lines that check that the leaves are traced ones, and that no two objects are one."""
        kinds = _Kinds(_conventions(self._records))
        # An object that makes its leaves when it comes apart holds none of them.
        are_held = all(op.type.is_plain or op.type.fields for op, _ in self._records if type(op) is Node)
        source.names |= {"kinds": kinds, "ConcreteArray": ConcreteArray, "countOf": countOf}
        source.names |= {"getrefcount": sys.getrefcount, "ONCE": ONCE if are_held else -1}
        source.names |= {"all_different": all_different}
        is_shared = self._readers.parts.is_shared
        lines: list[str] = []
        counted: list[str] = []
        tied: list[str] = []
        for i, reading in enumerate(readings):
            count = len(reading.leaves)
            known = f"countOf(map(type, leaves{i}), ConcreteArray) == {count} or kinds.all_known(leaves{i})"
            lines.append(f"if len(leaves{i}) != {count} or not ({known}): return None")
            places = [place for place, number in enumerate(reading.leaves) if is_shared[number]]
            tied += [f"leaves{i}[{place}]" for place in places]
            counted.append(f"countOf(map(getrefcount, leaves{i}), ONCE)")
        held = [variable for reading in readings for variable in reading.leaf_variables]
        if held:  # each is a reference that would be counted
            lines.append(f"{' = '.join(held)} = None")
        # Those that are tied have higher counts, so they are compared with one another; the others with all.
        total = sum(len(reading.leaves) for reading in readings)
        lists = "".join(f"leaves{i}, " for i in range(len(readings)))
        if tied:
            lines.append(f"tied = ({', '.join(tied)},)")  # one reference more, so that none of these counts as once
            once = f"{' + '.join(counted)} == {total - len(tied)}"
            different = "all_different((tied,))" if len(tied) > 1 else "True"
            lines.append(f"if not ({once} and {different}) and not all_different(({lists})): return None")
        elif total > 1:
            lines.append(f"if {' + '.join(counted)} != {total} and not all_different(({lists})): return None")
        if any(reading.alike for reading in readings):
            lines.append("if not all_different((nodes,)): return None")
        return lines

    def learn(self, result: Any) -> None:
        """Makes a plan for results like this one."""
        if self._learnt.claim(tree_structure(result)) and can_be_built(result):
            plan = ResultPlan(result, self._records)
            with self._learnt.lock:
                results = (plan, *self.known[0])[:MOST_PLANS]
                self.known = results, tuple(sorted({number for plan in results for number in plan.given}))

    def object_of(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The caller's object of a number, if it carries identity. Cost: as many steps as it is nested."""
        position, trail = self._trail_of(number)
        obj = args[position] if isinstance(position, int) else kwargs[position]
        for take_apart, i in trail:
            obj = take_apart(obj)[0][i]
        return obj

    def _trail_of(self, number: int) -> tuple[Position, Trail]:
        known = self._trails.get(number)
        if known is None:
            steps: list[tuple[Callable[[Any], tuple[Sequence[Any], Any]], int]] = []
            at = number
            while at not in self._trails:
                at, i = self._above[at]
                op = self._records[at][0]
                assert type(op) is Node
                steps.append((op.type.take_apart, i))
            position, trail = self._trails[at]
            known = self._trails[number] = position, (*trail, *reversed(steps))
        return known

    def objects_of(self, numbers: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, Any]:
        """The caller's objects that a result may take, by number, as they are before the call."""
        return {number: self.object_of(number, args, kwargs) for number in numbers}

    def can_be_given(self, plan: "ResultPlan", packing: Packing) -> bool:
        """Whether what vanilla `jax.jit` would return is the caller's objects; if not, that takes a closer look."""
        if not plan.given_leaves:
            return True
        _, _, lists, bare = packing
        given = [lists[which][i] for which, i in (self._places[number] for number in plan.given_leaves)]
        if not all(isinstance(leaf, jax.Array) and not is_tracer(leaf) for leaf in given):
            return False
        first = is_committed(given[0])
        every = [leaf for leaves in lists for leaf in leaves]
        return not any(is_committed(leaf) is not first for leaf in given) and (
            first or not any(map(is_committed, (*every, *tree_leaves(bare))))
        )


def _taking(variables: dict[Position, str], num_args: int) -> list[str]:
    """Lines that take the arguments of a call into variables."""
    names = [position for position in variables if not isinstance(position, int)]
    many = f"len(args) != {num_args} or {f'len(kwargs) != {len(names)}' if names else 'kwargs'}"
    lines = [f"if {many}: return None"]
    if num_args:
        lines.append(f"{''.join(f'{variables[i]}, ' for i in range(num_args))}= args")
    return [*lines, *(f"{variables[name]} = kwargs[{name!r}]" for name in names)]


class _Kinds:
    """Which types of objects are traced leaves that carry identity, wherever the plan reads one."""

    def __init__(self, conventions: set[Convention]) -> None:
        self._conventions = conventions
        self.known = {ConcreteArray}

    def all_known(self, leaves: Sequence[Any]) -> bool:
        """Whether each of these is one. Types of which every instance is are remembered."""
        for leaf in leaves:
            if type(leaf) not in self.known:
                if (
                    node_type_of(leaf) is not None
                    or not carries_identity(leaf)
                    or not all(is_traced(leaf, each) for each in self._conventions)
                ):
                    return False
                if isinstance(leaf, jax.Array):
                    self.known.add(type(leaf))
        return True


def _conventions(records: Sequence[Record]) -> set[Convention]:
    """Those that a leaf may be read under; a class without one inherits, at the top from bare arguments."""
    of_modules = [op.type.convention for op, _ in records if type(op) is Node and not op.type.is_plain]
    found: set[Convention] = set()
    for convention in of_modules or [None]:
        found.add("equinox" if convention == "equinox" else "jax")
    return found


def _has_structure(obj: Any) -> bool:
    return node_type_of(obj) is not None


def can_be_planned(call: Call, static: Collection[Position]) -> bool:
    """Whether a call is worth a plan: plain names, nothing static that has structure, no values as leaves, not deep."""
    if any(_has_structure(value) for position, value in call.items() if position in static):
        return False
    # A name of a subclass of `str` may print as anything.
    if any(type(name) is not str for name in call.kwargs):
        return False
    arguments = [
        a.packed for position, value in call.items() if position not in static for a in packed_in(value, position)
    ]
    records = [record for packed in arguments for record in packed.structure.records]
    leaves = [leaf for packed in arguments for leaf in packed.leaves]
    shallow = parts_of(records, [packed.structure.root for packed in arguments]).depth <= MAX_DEPTH
    return shallow and all(map(carries_identity, leaves))
