"""Cutting ties between treatments: arrays and mutable containers are soft, modules and references are not.

Arrays alias by accident: a target network starts as the model's arrays, a filtered model is passed beside the whole
one. So the identity of an array is (object, treatment): a tie within one treatment holds, one between two is cut, and
each side is what vanilla JAX makes of it. In results everything is parted like that, for they are new objects.

Packing numbers objects without asking how they are treated. Where some object has two fates the records are numbered
anew, by record and fate, so that it becomes two; where none has, which is the rule, nothing is done.

    f(Pair(w, 1), [w, Pair(w, 2)])  in_axes (0, 1)      pair(w) → number 0, and 0 again
                                                        after the cut: number 0 and number 4, one leaf each
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._graph import Rules, Tags
from .._packed import Packed
from .._statics import Static
from .._structure import LEAF, Given, Node, Op, Update, canonical
from ._crossed import Argument, Graph, Names, Position, packed_in, with_each
from ._moving import moved_arrays
from ._packing import Call, modules_of, tags_of
from ._prefixes import parts
from ._treatments import NO_FATE, Fates, Treatment, Way, are_one, has_one_treatment

Name = tuple[int, int]
"""A record and a fate: what is one object after the cut."""


class Cuts(NamedTuple):
    """What was cut in the arguments of a call.

    Attributes:
        fates: of everything in the arguments, by the numbers before the cut.
        leaves: the numbers of the arrays that were cut.
        modules: the numbers of the modules that were.
        containers: the numbers of the containers that were.
        transform: what the transform is called.
    """

    fates: Fates
    leaves: Sequence[int]
    modules: Sequence[int]
    containers: Sequence[int]
    transform: str

    def require_one(self, obj: Any, *, is_written: bool) -> None:
        """Raises if what is about to be written to was cut: a container, or a module that is written to already."""
        for number in (*self.containers, *(self.modules if is_written else ())):
            if self.fates.graph.objects[number] is obj:
                self.fates.raise_inconsistent(
                    number,
                    self.transform,
                    f"Inside they were two, and a `{type(obj).__name__}` was changed that would have to be written "
                    "back into both as one.\n",
                )


def treated(
    call: Call, static: Collection[Position], treatments: Sequence[Treatment], names: Names, transform: str
) -> Call:
    """Packed arguments with the ties between different treatments cut.

    Args:
        call: arguments packed as one crossing.
        static: those of them that are not packed.
        treatments: what the transform does to them.
        names: for paths.
        transform: what it is called, for errors.

    Raises:
        InconsistentSharingError: if a module that holds a traced leaf, or a reference, would be treated in two ways;
            or, within one module, a container.
    """
    for treatment in treatments:
        items = [(position, value) for position, value in call.items() if position not in static]
        if call.is_separate and all(treatment.is_label(treatment.part_of(position)) for position, _ in items):
            continue
        found, prefixes = modules_with_prefixes(treatment, items)
        graph = Graph(found, call.tags.objects)
        if has_one_treatment(graph, prefixes, treatment):
            continue
        fates = Fates(graph, prefixes, treatment, names)
        several = fates.several()
        if not several:
            continue
        partible = _forbid(fates, several, transform)
        packed, objects = _numbered_anew(fates)
        by_position = dict(
            zip([position for position, _ in items], with_each([v for _, v in items], packed), strict=True)
        )
        records = graph.records
        cut = [number for number in several if not _is_value(records[number][0])]
        cuts = Cuts(
            fates,
            [number for number in cut if records[number][0] is LEAF],
            [number for number in cut if number in partible],
            [number for number in cut if records[number][0] is not LEAF and number not in partible],
            transform,
        )
        call = Call(
            tuple([by_position.get(i, value) for i, value in enumerate(call.args)]),
            {name: by_position.get(name, value) for name, value in call.kwargs.items()},
            tags_of(objects),
            (*call.cuts, cuts),
        )
    return call


def modules_with_prefixes(
    treatment: Treatment, items: Sequence[tuple[Position, Any]]
) -> tuple[list[Argument], list[Any]]:
    """The modules in packed arguments, and what the prefix of a treatment has for each."""
    found: list[Argument] = []
    prefixes: list[Any] = []
    for position, value in items:
        arguments = list(packed_in(value, position))
        if arguments:
            part = treatment.part_of(position)
            found += arguments
            prefixes += _prefixes(part, value, treatment, len(arguments))
    return found, prefixes


def _prefixes(part: Any, tree: Any, treatment: Treatment, num_modules: int) -> Sequence[Any]:
    """What a prefix of a packed tree has for each module in it."""
    if treatment.is_label(part) or not num_modules:
        return [part] * num_modules
    return parts(part, tree, treatment.is_label, treatment.name, only_modules=True)


def _is_value(op: Op) -> bool:
    return type(op) is Node and not op.type.carries_identity


def _is_module(op: Op) -> bool:
    return type(op) is Node and not op.type.is_plain


def _forbid(fates: Fates, several: Mapping[int, Sequence[Way]], transform: str) -> Collection[int]:
    """Raises if something has two fates that may have only one; returns the modules that may have two."""
    records, objects = fates.graph.records, fates.graph.objects
    modules = {number for number in several if _is_module(records[number][0])}
    partible = fates.treatment.partible(fates) if modules else ()
    containers: list[int] = []
    for number in sorted(several):
        op = records[number][0]
        if number in modules.difference(partible) or isinstance(objects[number], jax.Ref):
            fates.raise_inconsistent(number, transform)
        if type(op) is Node and op.type.carries_identity:
            containers.append(number)
    if not containers:
        return partible
    for root in _modules_below(fates):
        within: dict[int, int] = {}
        for way in fates.ways_from(root):
            if within.setdefault(way[0], fates[way]) != fates[way] and way[0] in containers:
                fates.raise_inconsistent(way[0], transform)
    return partible


def _modules_below(fates: Fates) -> list[Way]:
    """The ways into maximal modules: the roots, or what is in those that are containers."""
    found: list[Way] = []
    seen: set[Way] = set()
    stack = list(fates.ways)
    while stack:
        way = stack.pop()
        if way not in seen:
            seen.add(way)
            op = fates.graph.records[way[0]][0]
            if type(op) is Node and op.type.is_plain:
                stack.extend(fates.below(way))
            else:
                found.append(way)
    return found


def _numbered_anew(fates: Fates, op_of: Callable[[Name], Op | None] = lambda _: None) -> tuple[list[Packed], list[Any]]:
    """The modules with one record for each object and fate, and what each record stands for.

    Args:
        fates: of the modules.
        op_of: what stands for an object instead of what was packed, if anything does.
    """
    records, objects = fates.graph.records, fates.graph.objects
    way_of: dict[Name, Way] = {}

    def name_of(way: Way) -> Name:
        name = way[0], fates[way]
        way_of.setdefault(name, way)
        return name

    def expand(name: Name) -> tuple[Op, Sequence[Name]]:
        op, children = records[name[0]]
        instead = op_of(name)
        if type(instead) is Given:
            return instead, ()
        if not children:
            return instead or op, ()
        return instead or op, [name_of(way) for way in fates.below(way_of[name])]

    roots = [name_of(way) for way in fates.ways]

    def expand_all(name: Any) -> tuple[Op, Sequence[Any]]:
        return (_ALL, roots) if name == _EVERYTHING else expand(name)

    table, numbers = canonical(_EVERYTHING, expand_all)
    names = list(numbers)[:-1]
    of_records = [objects[name[0]] for name in names]
    return modules_of(table[:-1], [numbers[root] for root in roots], of_records), of_records


_EVERYTHING: Name = (-1, NO_FATE)
_ALL = Static(None)
"""Stands for a node above all modules, whose operation is not used."""


class Leaving(NamedTuple):
    """What a transform will do to what a function returns.

    Attributes:
        treatment: how labels are told and compared; its `part_of` is not asked.
        state: under `Policy(in_place=True)`, the label or prefix for each module that was received, in order; or the
            label None for all of them.
        result: the label or prefix for the result.
    """

    treatment: Treatment
    state: Sequence[Any] | None
    result: Any

    def state_of(self, received: Graph, names: Names) -> Fates:
        """How everything that was received goes out, if it does at all."""
        parts = [None] * len(received.modules) if self.state is None else self.state
        return Fates(received, parts, self.treatment, names)

    def is_one(self, parts: Sequence[Any]) -> bool:
        """Whether the result and what has these labels or prefixes are treated alike."""
        every = [self.result, *parts]
        return all(self.treatment.is_label(part) and are_one(part, every[0]) for part in every)


def parted(
    state: Sequence[Argument],
    result: Any,
    tags: Tags,
    leaving: Leaving,
    came: Fates,
    transform: str,
    rules: Rules,
) -> tuple[list[Packed], Any, Tags]:
    """Packed results in which what is treated differently is parted: they are new objects.

    Args:
        state: what may be written to: the modules that were received, packed again, and what was taken out of them.
        result: a packed tree.
        tags: with which they were packed, in this order, as if everything were new.
        leaving: how they are treated.
        came: how the modules came in.
        transform: what it is called, for errors.
        rules: what is unchanged is named, and what was changed is updated, where it leaves as it came in.

    Returns:
        The state, the result, and what their records stand for.

    Raises:
        InconsistentSharingError: if one object is to be written to in two ways, or in another way than it came in.
    """
    own = list(packed_in(result, "result"))
    treatment, given, updated = leaving.treatment, rules.given, rules.updated
    prefixes = [*(leaving.state or ()), *_prefixes(leaving.result, result, treatment, len(own))]
    graph = Graph([*state, *own], tags.objects)
    fates = Fates(graph, prefixes, treatment, came.names)
    in_state = {(way[0], fates[way]) for root in fates.ways[: len(state)] for way in fates.ways_from(root)}
    written = [number for number, _ in in_state if id(tags.objects[number]) in updated]  # alive in `tags`
    for number in written:
        if written.count(number) > 1:
            fates.raise_inconsistent(
                number,
                transform,
                "The function put it where it would be written back in two ways. It can put a copy of it, "
                "`sharedtree.copy(layer)`, into one of these places.\n",
            )
    moved = moved_arrays(fates, len(state), came, {**given, **updated}, transform)

    def op_of(name: Name) -> Op | None:
        if name not in in_state:
            return None
        obj = tags.objects[name[0]]
        op = graph.records[name[0]][0]
        if id(obj) in given and name not in moved:  # alive in `tags`
            return Given(given[id(obj)])  # as above
        if id(obj) in updated and type(op) is Node:  # as above
            return Update(updated[id(obj)], op)  # as above
        return None

    packed, objects = _numbered_anew(fates, op_of)
    return packed[: len(state)], with_each(result, packed[len(state) :]), tags_of(objects)
