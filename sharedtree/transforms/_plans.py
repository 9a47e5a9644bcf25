"""Plans: for a call site that was called before with the same structures, packing and unpacking as generated code.

A plan packs the arguments of a call if they have the structures it was made for, and gives up otherwise; then the walk
of `_crossing` decides. Plans for several structures can be kept side by side.
"""

import collections
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_leaves, tree_structure

from .._compiled import MAX_DEPTH, Builders, Readers, Reading, Source, parts_of, put_together
from .._context import Policy
from .._graph import Tags, walk
from .._jax_internals import ConcreteArray, current_traces
from .._node_types import Convention, carries_identity, is_traced, node_type_of
from .._packed import Packed
from .._statics import Incomparable
from .._structure import LEAF, Given, Node, Record, Update, canonical
from ._crossing import OUTSIDE, Call, Position, packed_in

_COMMON_BARE = frozenset({ConcreteArray, np.ndarray, bool, int, float, complex})

NOT_BUILT: Any = object()
"""What a plan returns for a result that is not of the structure it was made for."""


Packing = tuple[tuple[Any, ...], dict[str, Any], tuple[list[Any], ...], list[Any], tuple[Any, ...]]
"""What a plan makes of arguments: args, kwargs, the leaves of each module, the nodes that carry identity, bare leaves.

A plain tuple, since one is made on every call.
"""


class CallPlan:
    """Packs the arguments of calls of one structure.

    Attributes:
        pack: (args, kwargs) → `Packing`, or None if the arguments are of another structure.
    """

    def __init__(self, call: Call, static: Collection[Position]) -> None:
        source = Source()
        arguments = [a.packed for position, value in call.items() for a in packed_in(value, position)]
        records = [record for packed in arguments for record in packed.structure.records]
        self._readers = readers = Readers(source, records, [packed.structure.root for packed in arguments])
        source.names |= {"Packed": Packed, "Incomparable": Incomparable}
        source.names |= {"COMMON": _COMMON_BARE, "is_bare": _is_bare, "has_structure": _has_structure}
        body: list[str] = []
        bare: list[str] = []
        self._place: dict[
            int, tuple[int, int]
        ] = {}  # record → (which list of leaves, or -1 for the nodes, place in it)
        nodes: list[int] = []
        lists: list[str] = []
        modules = iter(arguments)

        def read_module(variable: str) -> str:
            packed = next(modules)
            name = f"leaves{len(lists)}"
            reading = readers.read(packed.structure.root, variable)
            body.extend([f"{name} = []", f"leaves = {name}.extend", *reading.lines])
            self._place.update({n: (len(lists), i) for i, n in enumerate(reading.leaves)})
            self._place.update({n: (-1, len(nodes) + i) for i, n in enumerate(reading.nodes)})
            nodes.extend(reading.nodes)
            lists.append(name)
            return f"Packed({name}, {source.constant(packed.structure, 'structure')})"

        def read_bare(variable: str) -> str:
            body.append(f"if type({variable}) not in COMMON and not is_bare({variable}): return None")
            bare.append(variable)
            return variable

        expressions: dict[Position, str] = {}
        variables: dict[Position, str] = {}
        for position, value in call.items():
            variable = variables[position] = source.variable()
            if position in static:
                body.append(f"if has_structure({variable}): return None")  # it might share an object with another
                expressions[position] = variable
            else:
                outside = _Outside(source, (body, body), value, (read_module, read_bare), "return None")
                expressions[position] = outside.visit(outside.root, variable)
        num_args = len(call.args)
        head = [f"if len(args) != {num_args} or len(kwargs) != {len(call.kwargs)}: return None"]
        head += [f"{''.join(f'{variables[i]}, ' for i in range(num_args))}= args"] if num_args else []
        head += [f"{variables[name]} = kwargs[{name!r}]" for name in call.kwargs]
        args = "".join(f"{expressions[i]}, " for i in range(num_args))
        kwargs = ", ".join(f"{name!r}: {expressions[name]}" for name in call.kwargs)
        everything = ", ".join(f"*map(id, {name})" for name in (*lists, "found"))  # all alive in the lists
        kinds = _Kinds(_conventions(records))
        source.names |= {"kinds": kinds}
        checks = [
            f"if not KNOWN.issuperset(map(type, {name})) and not kinds.all_known({name}): return None" for name in lists
        ]
        source.names["KNOWN"] = kinds.known
        total = sum(op is LEAF for op, _ in records) + len(nodes)
        checks.append(f"if len({{{everything}}}) != {total}: return None")
        all_lists = "".join(f"{name}, " for name in lists)
        all_bare = "".join(f"{name}, " for name in bare)
        result = f"return (({args}), {{{kwargs}}}, ({all_lists}), found, ({all_bare}))"
        lines = ["try:", *(f"    {line}" for line in [*head, "found = []", "nodes = found.extend", *body])]
        lines += ["except (KeyError, ValueError, Incomparable):", "    return None", *checks, result]
        source.function("pack", "args, kwargs", lines)
        self.pack: Callable[[Any, Any], Packing | None] = source.run()["pack"]
        self.results: tuple[ResultPlan, ...] = ()
        self._records = records

    def unpack(self, result: Any, packing: Packing) -> Any:
        """A packed result unpacked by one of the plans for results, or `NOT_BUILT`."""
        for plan in self.results:
            given = self._given(plan, packing) if plan.given else None
            built = NOT_BUILT if plan.given and given is None else plan.build(result, given)
            if built is not NOT_BUILT:
                return built
        return NOT_BUILT

    def learn(self, result: Any) -> None:
        """Makes a plan for results like this one."""
        if len(self.results) < _MOST_PLANS and can_be_built(result):
            self.results = (ResultPlan(result, self._records), *self.results)

    def object_of(self, number: int, packing: Packing) -> Any:
        """The caller's object of a number, if it carries identity."""
        _, _, leaves, nodes, _ = packing
        which, i = self._place[number]
        return nodes[i] if which < 0 else leaves[which][i]

    def _given(self, plan: "ResultPlan", packing: Packing) -> Callable[[int], Any] | None:
        """The caller's objects, if what vanilla `jax.jit` would return is them; None if that takes a closer look."""
        if plan.given_leaves:
            given = [self.object_of(number, packing) for number in plan.given_leaves]
            if not all(type(leaf) is ConcreteArray for leaf in given):
                return None
            first = given[0].committed
            _, _, lists, _, bare = packing
            every = [leaf for leaves in lists for leaf in leaves]
            if any(leaf.committed is not first for leaf in given) or (
                not first and any(getattr(leaf, "committed", False) for leaf in (*every, *tree_leaves(bare)))
            ):
                return None
        return lambda number: self.object_of(number, packing)


class PlannedCall:
    """The caller's side of a call that a plan packed. Nothing is worked out unless the function is traced."""

    __slots__ = ("_packing", "_plan")

    def __init__(self, plan: CallPlan, packing: Packing) -> None:
        self._plan = plan
        self._packing = packing

    @property
    def outer(self) -> Sequence[Any]:
        traces = current_traces()
        return traces if jax.config.jax_disable_jit else traces[1:]  # pyright: ignore[reportAttributeAccessIssue]

    def object_of(self, number: int) -> Any:
        return self._plan.object_of(number, self._packing)


class ResultPlan:
    """Unpacks results of one structure.

    Attributes:
        build: (packed result, number → the caller's object) → result, or `NOT_BUILT`.
        given: the numbers that it takes from the caller.
        given_leaves: the numbers of the leaves in these.
    """

    def __init__(self, result: Any, arguments: Sequence[Record]) -> None:
        source = Source()
        found = [argument.packed for argument in packed_in(result, 0)]
        records = [record for packed in found for record in packed.structure.records]
        builders = Builders(source, records, [packed.structure.root for packed in found])
        source.names |= {"Packed": Packed, "COMMON": _COMMON_BARE, "is_bare": _is_bare, "NOT_BUILT": NOT_BUILT}
        checks: list[str] = []
        body: list[str] = []
        lists: list[str] = []
        modules = iter(found)

        def build_module(variable: str) -> str:
            packed = next(modules)
            structure = source.constant(packed.structure, "structure")
            checks.append(
                f"if type({variable}) is not Packed or {variable}.structure is not {structure}: return NOT_BUILT"
            )
            name = f"leaves{len(lists)}"
            checks.append(f"{name} = {variable}.leaves")
            lists.append(name)
            body.extend(builders.build(packed.structure.root, name))
            return builders.variable_of[packed.structure.root]

        def pass_bare(variable: str) -> str:
            checks.append(f"if type({variable}) not in COMMON and not is_bare({variable}): return NOT_BUILT")
            return variable

        outside = _Outside(source, (checks, body), result, (build_module, pass_bare), "return NOT_BUILT")
        expression = outside.visit(outside.root, "result")
        if lists:
            everything = ", ".join(f"*map(id, {name})" for name in lists)  # all alive in the lists
            total = sum(op is LEAF for op, _ in records)
            checks.append(f"if len({{{everything}}}) != {total}: return NOT_BUILT")
        lines = ["try:", *(f"    {line}" for line in checks), "except (KeyError, ValueError):", "    return NOT_BUILT"]
        source.function("build", "result, given", [*lines, *body, f"return {expression}"])
        self.build: Callable[[Any, Any], Any] = source.run()["build"]
        self.given = sorted({op.number for op, _ in records if type(op) is Given})
        below = {n for number in self.given for n in canonical(number, lambda n: arguments[n])[1]}
        self.given_leaves = sorted(n for n in below if arguments[n][0] is LEAF)


class _Outside:
    """Lines that check the plain containers around modules, and expressions that put them together again."""

    def __init__(
        self,
        source: Source,
        lines: tuple[list[str], list[str]],
        tree: Any,
        replace: tuple[Callable[[str], str], Callable[[str], str]],
        give_up: str,
    ) -> None:
        items, self.records, self.root = walk(tree, Tags(), OUTSIDE)
        self._items: Iterator[Any] = iter(items)
        self._source = source
        self._readers = Readers(source, self.records, [self.root])
        self._checks, self._makes = lines
        self._module, self._bare = replace
        self._give_up = give_up

    def visit(self, number: int, variable: str) -> str:
        """Checks what a variable holds; returns an expression for it with its modules replaced."""
        op, children = self.records[number]
        if op is LEAF:
            item = next(self._items)
            return self._module(variable) if type(item) is Packed else self._bare(variable)
        assert type(op) is Node
        if op.type.cls is type(None):
            self._checks.append(f"if {variable} is not None: {self._give_up}")
            return variable
        reading = Reading(self._readers, self._give_up)
        variables = reading.take_apart(op, children, variable)
        self._checks.extend(reading.lines)
        below = [self.visit(child, own) for child, own in zip(children, variables, strict=True)]
        if below == variables:  # there is no module in it
            return variable
        return put_together(self._source, self._makes, op, below)


class _Kinds:
    """Which types of objects are traced leaves that carry identity, wherever the plan reads one."""

    def __init__(self, conventions: set[Convention]) -> None:
        self._conventions = conventions
        self.known = {ConcreteArray}

    def all_known(self, leaves: Sequence[Any]) -> bool:
        """Whether each of these is one. Types of which every instance is are remembered."""
        for leaf in leaves:
            if type(leaf) not in self.known:
                if not carries_identity(leaf) or not all(is_traced(leaf, each) for each in self._conventions):
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


def _is_bare(obj: Any) -> bool:
    return node_type_of(obj) is None and not isinstance(obj, jax.Ref)


def can_be_planned(call: Call, static: Collection[Position]) -> bool:
    """Whether a call is worth a plan: nothing static that has structure, no leaves without identity, not too deep."""
    if any(_has_structure(value) for position, value in call.items() if position in static):
        return False
    arguments = [
        a.packed for position, value in call.items() if position not in static for a in packed_in(value, position)
    ]
    records = [record for packed in arguments for record in packed.structure.records]
    leaves = [leaf for packed in arguments for leaf in packed.leaves]
    shallow = parts_of(records, [packed.structure.root for packed in arguments]).depth <= MAX_DEPTH
    return shallow and all(map(carries_identity, leaves))


def can_be_built(result: Any) -> bool:
    """Whether a packed result is worth a plan: no updates in place, not too deep."""
    found = [argument.packed for argument in packed_in(result, 0)]
    records = [record for packed in found for record in packed.structure.records]
    if any(type(op) is Update for op, _ in records):
        return False
    return parts_of(records, [packed.structure.root for packed in found]).depth <= MAX_DEPTH


class Site:
    """The plans of one wrapped function under one policy.

    A structure gets a plan when it is seen for the second time, so that what is called once is not compiled twice. Only
    so many are kept: plans keep their structures alive, also those that JAX's caches have let go of.
    """

    def __init__(self, policy: Policy, jitted: Any) -> None:
        self.policy = policy
        self.jitted = jitted  # what a plan's arguments are for
        self.plans: tuple[CallPlan, ...] = ()
        self._seen: collections.deque[Any] = collections.deque(maxlen=_MOST_PLANS)
        self._planned: collections.deque[Any] = collections.deque(maxlen=_MOST_PLANS)
        self._lock = threading.Lock()

    def saw(self, call: Call, static: Collection[Position]) -> None:
        """A call was packed by walking."""
        key = _key(call, static)
        with self._lock:
            if key in self._planned:
                return  # its plan gave up, and would again
            if key not in self._seen:
                self._seen.append(key)
            elif can_be_planned(call, static):
                self._planned.append(key)
                self.plans = (CallPlan(call, static), *self.plans)[:_MOST_PLANS]


_MOST_PLANS = 8  # each is tried in turn before the walk


def _key(call: Call, static: Collection[Position]) -> Any:
    dynamic = [value for position, value in call.items() if position not in static]
    return len(call.args), tuple(sorted(call.kwargs)), tree_structure(dynamic)
