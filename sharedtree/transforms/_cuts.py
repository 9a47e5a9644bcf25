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

from .._graph import Tags
from .._packed import Packed
from .._statics import Static
from .._structure import LEAF, Given, Node, Op, Update, canonical, intern
from ._crossing import Argument, Call, Names, Position, packed_in, with_packed
from ._prefixes import parts
from ._treatments import NO_FATE, Fates, Modules, Treatment, Way, are_one, has_one_treatment

Name = tuple[int, int]
"""A record and a fate: what is one object after the cut."""


class Cuts(NamedTuple):
    """What was cut in the arguments of a call.

    Attributes:
        fates: of everything in the arguments, by the numbers before the cut.
        leaves: the numbers of the arrays that were cut.
        containers: the numbers of the containers that were.
        transform: what the transform is called.
    """

    fates: Fates
    leaves: Sequence[int]
    containers: Sequence[int]
    transform: str

    def require_one_container(self, obj: Any) -> None:
        """Raises if a container that is about to be written to was cut."""
        for number in self.containers:
            if self.fates.modules.objects[number] is obj:
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
        modules = Modules.of(modules_with_parts(treatment, items), call.tags.objects)
        if has_one_treatment(modules, treatment):
            continue
        fates = Fates(modules, treatment, names)
        several = fates.several()
        if not several:
            continue
        _forbid(fates, several, transform)
        packed, objects = _numbered_anew(fates)
        by_position = dict(
            zip([position for position, _ in items], _replaced([v for _, v in items], packed), strict=True)
        )
        tags = Tags()
        for obj in objects:
            tags.add(obj, tag=False)
        records = modules.records
        cut = [number for number in several if not _is_value(records[number][0])]
        cuts = Cuts(
            fates,
            [number for number in cut if records[number][0] is LEAF],
            [number for number in cut if records[number][0] is not LEAF],
            transform,
        )
        call = Call(
            tuple([by_position.get(i, value) for i, value in enumerate(call.args)]),
            {name: by_position.get(name, value) for name, value in call.kwargs.items()},
            tags,
            (*call.cuts, cuts),
        )
    return call


def modules_with_parts(treatment: Treatment, items: Sequence[tuple[Position, Any]]) -> list[tuple[Argument, Any]]:
    """Each module in packed arguments, with what the prefix of a treatment has for it."""
    found: list[tuple[Argument, Any]] = []
    for position, value in items:
        arguments = list(packed_in(value, position))
        if arguments:
            part = treatment.part_of(position)
            own: Sequence[Any] = [part] * len(arguments)
            if not treatment.is_label(part):
                own = parts(part, value, treatment.is_label, treatment.name, only_modules=True)
            found += zip(arguments, own, strict=True)
    return found


def _replaced(tree: Any, packed: Sequence[Packed]) -> Any:
    """A packed tree with others in place of its modules, in order."""
    each = iter(packed)
    return with_packed(tree, lambda _: next(each))


def _is_value(op: Op) -> bool:
    return type(op) is Node and not op.type.carries_identity


def _forbid(fates: Fates, several: Mapping[int, Sequence[Way]], transform: str) -> None:
    """Raises if something has two fates that may have only one."""
    records, objects = fates.modules.records, fates.modules.objects
    containers: list[int] = []
    for number in sorted(several):
        op = records[number][0]
        if (type(op) is Node and not op.type.is_plain) or isinstance(objects[number], jax.Ref):
            fates.raise_inconsistent(number, transform)
        if type(op) is Node and op.type.carries_identity:
            containers.append(number)
    if not containers:
        return
    for root in _modules_below(fates):
        within: dict[int, int] = {}
        for way in fates.ways_from(root):
            if within.setdefault(way[0], fates[way]) != fates[way] and way[0] in containers:
                fates.raise_inconsistent(way[0], transform)


def _modules_below(fates: Fates) -> list[Way]:
    """The ways into maximal modules: the roots, or what is in those that are containers."""
    found: list[Way] = []
    seen: set[Way] = set()
    stack = list(fates.ways)
    while stack:
        way = stack.pop()
        if way not in seen:
            seen.add(way)
            op = fates.modules.records[way[0]][0]
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
    records, objects = fates.modules.records, fates.modules.objects
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
    packed: list[Packed] = []
    base = 0
    for root in roots:
        stop = max(base, numbers[root] + 1)
        own = table[base:stop]
        leaves = [objects[name[0]] for name, (op, _) in zip(names[base:stop], own, strict=True) if op is LEAF]
        packed.append(Packed(leaves, intern(own, numbers[root], base)))
        base = stop
    return packed, [objects[name[0]] for name in names]


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

    def parts_of_state(self, received: Sequence[Any]) -> Sequence[Any]:
        """The label or prefix for each module that was received, if they go out at all."""
        return [None] * len(received) if self.state is None else self.state

    def is_one(self, received: Sequence[Any]) -> bool:
        """Whether everything is treated alike."""
        every = [self.result, *self.parts_of_state(received)]
        return all(self.treatment.is_label(part) and are_one(part, every[0]) for part in every)


def parted(
    state: Sequence[Argument],
    result: Any,
    tags: Tags,
    leaving: Leaving,
    names: Names,
    transform: str,
    given: Mapping[int, int],
    updated: Mapping[int, int],
) -> tuple[list[Packed], Any, Tags]:
    """Packed results in which what is treated differently is parted: they are new objects.

    Args:
        state: the modules that were received, packed again.
        result: a packed tree.
        tags: with which they were packed, in this order, as if everything were new.
        leaving: how they are treated.
        names: for paths.
        transform: what it is called, for errors.
        given: objects that are unchanged: id → number. They are named where they leave as they came in.
        updated: objects that are to be written to: id → number, likewise.

    Returns:
        The state, the result, and what their records stand for.

    Raises:
        InconsistentSharingError: if one object is to be written to in two ways.
    """
    own = list(packed_in(result, "result"))
    treatment = leaving.treatment
    each: Sequence[Any] = [leaving.result] * len(own)
    if own and not treatment.is_label(leaving.result):
        each = parts(leaving.result, result, treatment.is_label, treatment.name, only_modules=True)
    of_state = zip(state, leaving.parts_of_state(state), strict=True)
    modules = Modules.of([*of_state, *zip(own, each, strict=True)], tags.objects)
    fates = Fates(modules, treatment, names)
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

    def op_of(name: Name) -> Op | None:
        if name not in in_state:
            return None
        obj = tags.objects[name[0]]
        op = modules.records[name[0]][0]
        if id(obj) in given:  # alive in `tags`
            return Given(given[id(obj)])  # as above
        if id(obj) in updated and type(op) is Node:  # as above
            return Update(updated[id(obj)], op)  # as above
        return None

    packed, objects = _numbered_anew(fates, op_of)
    new = Tags()
    for obj in objects:
        new.add(obj, tag=False)
    return packed[: len(state)], _replaced(result, packed[len(state) :]), new
