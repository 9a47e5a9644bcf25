"""A gradient that lacks a part, because an array that is differentiated is also in an argument that is not.

Between the two the tie is cut, and what flows through the second is lost to the gradient, as in vanilla JAX. Often that
is meant: a target network starts as the model's arrays, a filtered model is passed beside the whole one. Then both are
of one class, and the array sits at the same path in both. Elsewhere it is said: an encoder and a decoder with one
embedding, a mask that puts a tied weight on both sides; and always of a module, which a model used twice may be. But
not of an `equinox.nn.State`: it begins as the initial state that the model keeps, of which no gradient is missed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ..._attribution import report_untied
from ..._context import Policy
from ..._sharing import Shape, matching
from ..._stateful import makes_state
from ..._statics import Static
from ..._structure import Path, Record, edges
from ..._text import MOST_PATHS
from ..._ties import is_inexact
from .._crossed import Argument, Names, Position
from .._cuts import Cuts
from .._packing import Call
from .._treatments import Fates, Way


class _Lost(NamedTuple):
    leaf: Any
    differentiated: str
    through: str
    positions: tuple[Position, Position]
    what: str = "array"


def report_partial_gradients(
    call: Call,
    chosen: Sequence[int],
    names: Names,
    function: Callable[..., Any],
    again: str,
    select: Callable[[Sequence[Any]], str],
    policy: Policy,
) -> None:
    """Warns if a gradient lacks what flows through an argument that is not differentiated.

    Args:
        call: the arguments, with the ties between what is differentiated and what is not cut.
        chosen: the arguments that are differentiated.
        names: for paths.
        function: what is differentiated.
        again: how to write the transform, with `{}` for its function and more options.
        select: leaves that a filter selects at some of their paths only → what an error says of the others.
        policy: what to do.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore":
        return
    found = [each for cuts in call.cuts for each in _lost_in(cuts, names)]
    # Of several modules in one argument only a filter selects some.
    lost = [each for each in found if each.positions[0] == each.positions[1]]
    lost += [each for cuts in call.cuts for each in _lost_within(cuts, names)]
    if lost:
        involved = list(dict.fromkeys(names.text(position) for each in lost for position in each.positions))
        together = ", ".join(involved)
        fix = (
            f"{select([each.leaf for each in lost])}"
            "Let `wrt` select the array at all of its paths or at none. If it is meant, give each an array of its own "
            "before the call:\n"
            f"    {together} = sharedtree.untie({together if len(involved) == 1 else f'({together})'})"
        )
        _emit(lost, fix, names, policy)
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() else "f"
    lost = [each for each in found if each.positions[0] != each.positions[1]]
    if lost:
        _emit(lost, _fix(call, chosen, names, name, again, lost[0].positions), names, policy)
    lost = [each for cuts in call.cuts for each in _modules_lost_in(cuts, names)]
    if lost:
        both = [names.text(position) for position in lost[0].positions]
        lines = [
            *_in_both("If it is one model that is used twice,", call, chosen, names, name, again, lost[0].positions[1]),
            "What is meant to be a constant gets objects of its own:",
            f"    {', '.join(both)} = sharedtree.untie(({', '.join(both)}), lambda t: t[1:])",
        ]
        _emit(lost, "\n".join(lines), names, policy)


def _modules_lost_in(cuts: Cuts, names: Names) -> list[_Lost]:
    """The largest modules that were cut: they are in one differentiated argument and in one that is not."""
    graph = cuts.fates.graph
    children = [((), child) for number in cuts.modules for child in graph.records[number][1]]
    largest = set(cuts.modules).difference(number for number, _ in edges(graph.records, children))
    places: dict[int, dict[bool, tuple[Argument, Path]]] = {number: {} for number in sorted(largest)}
    for root, prefix in zip(graph.modules, cuts.fates.prefixes, strict=True):
        for number, path in _first_paths(graph.records, root.structure.root).items():
            if number in largest:
                places[number][prefix is not False] = root, path
    found: list[_Lost] = []
    for number, each in places.items():
        (one, at), (other, there) = each[True], each[False]
        differentiated = names.text(one.position, (*one.path, *at))
        through = names.text(other.position, (*other.path, *there))
        found.append(_Lost(graph.objects[number], differentiated, through, (one.position, other.position), "module"))
    return found


def _lost_in(cuts: Cuts, names: Names) -> list[_Lost]:
    fates, graph = cuts.fates, cuts.fates.graph
    # The gradients of others, under `allow_int`, are empty, and so lack nothing.
    leaves = {number for number in cuts.leaves if is_inexact(graph.objects[number])}
    within = [
        {way[0] for way in fates.ways_from(root) if way[0] in leaves and fates.of_leaves[fates[way]]}
        for root in fates.ways
    ]
    lost: list[_Lost] = []
    without_state = _without_state(graph.records)
    of_some = [(root, found) for root, found in zip(graph.modules, within, strict=True) if found]
    differentiated: dict[int, tuple[Argument, Path]] = {}  # leaf → the first argument that holds it, and where
    for root, found in of_some:
        for number, path in _first_paths(graph.records, root.structure.root).items():
            if number in found:
                differentiated.setdefault(number, (root, path))
    for other, is_chosen in zip(graph.modules, fates.prefixes, strict=True):
        if is_chosen:
            continue
        paths = _first_paths(without_state, other.structure.root)
        parts = {number: path for number, path in paths.items() if number in leaves}
        for root, found in of_some:
            common = found & parts.keys()
            if not common:
                continue
            unmatched = _not_at_the_same_path(graph.records, other, root, common)
            # A second module that holds it at the same path is not asked about what the first one has.
            for number in common - unmatched.keys():
                del parts[number]
            parts |= {number: path for number, path in unmatched.items() if number in parts}
        for number, path in parts.items():
            root, at = differentiated[number]
            lost.append(
                _Lost(
                    graph.objects[number],
                    names.text(root.position, (*root.path, *at)),
                    names.text(other.position, (*other.path, *path)),
                    (root.position, other.position),
                )
            )
    return lost


def _lost_within(cuts: Cuts, names: Names) -> list[_Lost]:
    """What is lost among the differentiated arguments, where a filter selects an array at some of its paths only."""
    fates, graph = cuts.fates, cuts.fates.graph
    leaves = {number for number in cuts.leaves if is_inexact(graph.objects[number])}
    places: dict[int, dict[bool, tuple[Way, Argument]]] = {number: {} for number in sorted(leaves)}
    for root, argument, prefix in zip(fates.ways, graph.modules, fates.prefixes, strict=True):
        for way in sorted(_ways_beside_state(fates, root)) if prefix is not False else ():
            if way[0] in leaves:
                places[way[0]].setdefault(bool(fates.of_leaves[fates[way]]), (way, argument))
    found: list[_Lost] = []
    for number, each in places.items():
        if len(each) == 2:
            (one, there), (other, elsewhere) = each[True], each[False]
            positions = there.position, elsewhere.position
            found.append(_Lost(graph.objects[number], fates.path_to(one), fates.path_to(other), positions))
    return found


def _first_paths(records: Sequence[Record], root: int) -> dict[int, Path]:
    first: dict[int, Path] = {}
    for number, path in edges(records, [((), root)]):
        first.setdefault(number, path)
    return first


def _without_state(records: Sequence[Record]) -> list[Record]:
    """The records with nothing below the states of Equinox's."""
    return [(Static(None), ()) if makes_state(op) else (op, children) for op, children in records]


def _ways_beside_state(fates: Fates, root: Way) -> set[Way]:
    """The ways that lead on from a root, but for those into the states of Equinox's."""
    found: set[Way] = set()
    stack = [root]
    while stack:
        way = stack.pop()
        if way not in found and not makes_state(fates.graph.records[way[0]][0]):
            found.add(way)
            stack.extend(fates.below(way))
    return found


def _not_at_the_same_path(records: Any, other: Argument, root: Argument, leaves: Collection[int]) -> dict[int, Path]:
    """Which of these leaves are at a path of `other` at which `root` does not have them; all, if the classes differ."""
    here, there = Shape(records, other.structure.root), Shape(records, root.structure.root)
    ends: set[tuple[int, int]] = set()  # where the two part, or both end

    def agree(i: int, j: int) -> bool:
        ends.add((i, j))
        return True

    found: dict[int, Path] = {}
    for pair in matching(here, there, agree):
        if (pair.left, pair.right) in ends and pair.left != pair.right:
            for number, path in edges(records, [(pair.path, pair.left)]):
                if number in leaves:
                    found.setdefault(number, path)
    return found


def _fix(
    call: Call, chosen: Sequence[int], names: Names, function: str, again: str, positions: tuple[Position, Position]
) -> str:
    both = [names.text(position) for position in positions]
    instead = {position: f"both[{i}]" for i, position in enumerate(positions)}
    together = ", ".join(both)
    lines = [
        "For the whole gradient differentiate one argument that holds both:",
        f"    of_both = lambda both: {function}({_written(call, names, instead)})",
        f"    {again.format('of_both', '')}(({together}))",
        "or, if only some leaves are to be differentiated, split both at once, which keeps a tie on one side:",
        f"    some, rest = sharedtree.tree.partition(({together}), equinox.is_inexact_array)",
        f"    {again.format('lambda some: of_both(sharedtree.tree.combine(some, rest))', '')}(some)",
    ]
    lines += _in_both("or", call, chosen, names, function, again, positions[1])
    lines += [
        "If it is meant, give the second arrays of its own:",
        f"    {together} = sharedtree.untie(({together}), lambda t: t[1:])",
    ]
    return "\n".join(lines)


def _in_both(
    why: str, call: Call, chosen: Sequence[int], names: Names, function: str, again: str, position: Position
) -> list[str]:
    """The fix that differentiates the other argument as well, by position, where that can be."""
    given = len(call.args)
    known = list(names.positional)
    number = known.index(position) if position in known else position
    if (
        not isinstance(number, int)
        or "preserve_identities" in again
        or not call.kwargs.keys() >= {*known[given:number]}
    ):
        return []
    argnums = tuple(sorted({*chosen, number}))
    by_position = [names.text(i) for i in range(max(given, number + 1))]
    by_keyword = [f"{name}={name}" for name in call.kwargs if name not in by_position]
    return [
        f"{why} differentiate both, and each gets the sum:",
        f"    {again.format(function, f', argnums={argnums}')}({', '.join(by_position + by_keyword)})",
    ]


def _written(call: Call, names: Names, instead: Mapping[Position, str]) -> str:
    """The arguments of a call, some of them written otherwise."""
    texts = [
        ("" if isinstance(position, int) else f"{position}=") + instead.get(position, names.text(position))
        for position, _ in call.items()
    ]
    return ", ".join(texts)


def _emit(lost: Sequence[_Lost], fix: str, names: Names, policy: Policy) -> None:
    """Says it, once for all that one call loses."""
    lines = [
        f"    `{each.differentiated}` lacks what flows through `{each.through}`, which is the same {each.what}"
        for each in lost[:MOST_PATHS]
    ]
    if len(lost) > MOST_PATHS:
        lines.append(f"    … and {len(lost) - MOST_PATHS} more")
    what = "\n".join(["It was between what is differentiated and what is not, so the gradient is not whole:", *lines])
    paths = [path for each in lost for path in (each.differentiated, each.through)]
    report_untied(policy.on_untie, names.definition, what, fix, paths, verb="cut")
