"""A tie that enters a transform and does not leave it is reported, when the function is traced.

`jax.tree.map`, `optax.apply_updates` and `equinox.tree_at` take a tied model and return an untied one without a word.
So, when a function has been traced, each module in its results is compared with those in its arguments that it could
be a new version of: same class, same tree, same leaf types.

What `untie` parted is excused: by the notes on the leaves, which `_untying` describes, and where a vanilla function has
made new leaves of those, by likeness. A result that has the shape of a module that `untie` returned, with these ties
undone, is taken to have been made of it, unless it holds a part of the tie that entered, or unless more modules of that
shape have lost ties than `untie` was said of: then one of them lost its ties unsaid, and nobody can tell which.

Ties between separate arguments do not count, nor between the entries of an optax state: optimizer states and moving
averages begin as aliases of the model by accident, and part on the first step.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..._attribution import report_untied
from ..._context import Policy
from ..._lost_ties import KEEPING, LostLeaf, kind_of, lost_leaf_ties, maximal, named, unsettled
from ..._node_types import NodeType
from ..._sharing import Shape
from ..._statics import Static
from ..._structure import LEAF, Given, Node, Path, Record, Update, edges, reached_outside
from ..._text import listed
from ..._untying import Said, is_noted, note
from .._crossed import Graph, Names


class _Side(NamedTuple):
    """One side of a trace: its records, the objects behind them, and its maximal modules with what they are called."""

    records: Sequence[Record]
    objects: Any
    roots: Sequence[tuple[str, int]]


class _Pair(NamedTuple):
    """A module that entered, one of its shape that left, and the leaves that are tied in the first only."""

    text: str
    before: int
    text_after: str
    after: int
    ties: Sequence[LostLeaf]


def report_lost_ties(arguments: Graph, results: Graph, said: Sequence[Said], policy: Policy, names: Names) -> None:
    """Compares what left a function with what entered it.

    Args:
        arguments: what entered it.
        results: what left it; `Given` in it names records of the arguments.
        said: what `untie` was said of in the function.
        policy: what to do.
        names: of the function and its arguments.

    Raises:
        UntiedError: under `Policy(on_untie="error")`.
    """
    if policy.on_untie == "ignore" or not results.modules:
        return
    if arguments.records == results.records and arguments.roots == results.roots:
        return
    entered, left = _side(arguments, names), _side(results, names)
    tied = _modules_with_ties(entered)
    if not tied:
        return
    both = _in_one_table(entered, left)
    numbers: dict[Any, int] = {}
    shape = _shapes(both.records, both.objects, numbers)
    received = {id(obj) for obj in entered.objects}  # alive in `entered`
    meant: dict[int, list[Shape]] = {}  # shape → the modules of that shape that `untie` returned
    for one in _each_once(said):
        hold_noted: list[bool] = []
        for module, number in enumerate(_shapes(one.records, one.objects, numbers)):
            op, children = one.records[module]
            own = is_noted(one.objects[module]) if op is LEAF else any(hold_noted[child] for child in children)
            hold_noted.append(own)
            if own:
                meant.setdefault(number, []).append(Shape(one.records, module))
    pairs = list(_pairs(tied, entered, both, shape))
    befores: dict[int, set[int]] = {}
    afters: dict[int, set[int]] = {}
    for pair in pairs:
        befores.setdefault(shape[pair.before], set()).add(pair.before)
        afters.setdefault(shape[pair.before], set()).add(pair.after)
    reported: set[int] = set()  # what was tied, and what it has become
    excused: set[int] = set()  # what it has become where it was meant
    for pair in pairs:
        kind = shape[pair.before]
        ties = unsettled(pair.ties, both.objects)
        alike = meant.get(kind, [])
        if max(len(befores[kind]), len(afters[kind])) <= len(alike):
            likely: list[LostLeaf] = []
            others: list[LostLeaf] = []
            for tie in ties:
                of_the_twin = any(id(both.objects[part]) in received for part in tie.parts)  # alive on both sides
                meant_here = not of_the_twin and any(_are_parted(module, tie.paths) for module in alike)
                (likely if meant_here else others).append(tie)
            ties = others
            excused |= {part for tie in likely for part in tie.parts}
        for lost in maximal(ties):
            parts = {part for tie in lost.ties for part in tie.parts}
            if lost.record not in reported and not parts <= reported:
                reported |= {lost.record, *parts}
                before, after = named(pair.text, lost.paths), named(pair.text_after, lost.paths)
                what = (
                    f"{listed(before)} were one object when it was entered, but the result has "
                    f"{'two' if len(after) == 2 else 'several'} of them, {listed(after)}."
                )
                report_untied(policy.on_untie, names.definition, what, KEEPING, before)
    # Who gets the result, an enclosing function or a later call, need not report it again.
    note(both.objects[number] for number in reported | excused)


def _side(graph: Graph, names: Names) -> _Side:
    roots = [(names.text(module.position, module.path), module.structure.root) for module in graph.modules]
    return _Side(graph.records, graph.objects, roots)


def _each_once(said: Sequence[Said]) -> Iterator[Said]:
    """What `untie` was said of; of a tree of which it was said several times, the first."""
    for i, one in enumerate(said):
        if not any(one.of is other.of for other in said[:i]):
            yield one


def _pairs(tied: Sequence[tuple[str, int]], entered: _Side, both: _Side, shape: Sequence[int]) -> Iterator[_Pair]:
    """Each tied module with what could be a new version of it and has lost ties."""

    def agree(i: int, j: int) -> bool:
        return shape[i] == shape[j]

    entrants = _by_shape(_modules(both, entered.roots), shape)
    results = _by_shape(_modules(both, both.roots), shape)
    for text, before in tied:
        came, went = entrants[shape[before]], results.get(shape[before], [])
        # As many went as came, once or several times over: they are taken to correspond. Otherwise each might be a new
        # version of each.
        matching = went[came.index((text, before)) :: len(came)] if len(went) % len(came) == 0 else went
        for text_after, after in matching:
            if after >= len(entered.records):  # otherwise it is what entered, passed through
                ties = lost_leaf_ties(Shape(both.records, before), Shape(both.records, after), agree)
                if ties:
                    yield _Pair(text, before, text_after, after, ties)


def _are_parted(module: Shape, paths: tuple[Path, Path]) -> bool:
    """Whether two paths lead to two objects in a module."""
    ends: list[int] = []
    for path in paths:
        number = module.root
        for key in path:
            op, children = module.records[number]
            assert type(op) is Node  # the module has the shape of one that has these paths
            number = children[op.keys.index(key)]
        ends.append(number)
    return ends[0] != ends[1]


def _by_shape(modules: Iterable[tuple[str, int]], shape: Sequence[int]) -> dict[int, list[tuple[str, int]]]:
    found: dict[int, list[tuple[str, int]]] = {}
    for text, number in modules:
        found.setdefault(shape[number], []).append((text, number))
    return found


def _in_one_table(entered: _Side, left: _Side) -> _Side:
    """Both sides in one table, the first one's numbers as they were; the roots are those of the second."""
    offset = len(entered.records)
    number = [op.number if type(op) is Given else offset + i for i, (op, _) in enumerate(left.records)]
    records = [
        (op.node if type(op) is Update else op, tuple([number[child] for child in children]))
        for op, children in left.records
    ]
    roots = [(text, number[root]) for text, root in left.roots]
    return _Side([*entered.records, *records], [*entered.objects, *left.objects], roots)


def _modules(side: _Side, roots: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Every module below the roots, with what it is called; one that several roots lead to comes once for each.

    A mutable container that was packed outside modules counts as one.
    """
    for text, root in roots:
        seen: set[int] = set()
        outside = reached_outside(side.records, root)
        for number, path in edges(side.records, [((), root)]):
            op = side.records[number][0]
            is_model = type(op) is Node and op.type.carries_identity and (number in outside or not op.type.is_plain)
            if number not in seen and is_model:
                yield text + jtu.keystr(path), number
            seen.add(number)


def _modules_with_ties(side: _Side) -> list[tuple[str, int]]:
    """For each tie that holds a traced leaf, the smallest module with all of it in, with what it is called.

    Outside modules it is the smallest mutable container. What is in another module comes after it.
    """
    holds_leaf: list[bool] = []
    for op, children in side.records:
        holds_leaf.append(op is LEAF or any(holds_leaf[child] for child in children))
    found: dict[int, str] = {}
    for text, root in side.roots:
        above: dict[int, tuple[tuple[int, ...], Path]] = {}  # record → those on its first path, and the path
        stack: list[tuple[int, tuple[int, ...], Path]] = [(root, (), ())]
        while stack:
            number, chain, path = stack.pop()
            op, children = side.records[number]
            if number not in above:
                above[number] = chain, path
                if type(op) is Node:
                    steps = tuple(zip(op.keys, children, strict=True))
                    stack.extend((child, (*chain, number), (*path, key)) for key, child in reversed(steps))
            elif holds_leaf[number]:
                common = [a for a, b in zip(above[number][0], chain, strict=False) if a == b]
                modules = [a for a in common if not _node_type(side, a).is_plain]
                modules = modules or [a for a in common if _node_type(side, a).is_mutable]
                if modules:
                    found.setdefault(modules[-1], text + jtu.keystr(above[modules[-1]][1]))
    # A module comes before what is in it, so that a tie is first met where all of its paths are.
    return [(text, number) for number, text in sorted(found.items(), reverse=True)]


def _node_type(side: _Side, number: int) -> NodeType:
    op = side.records[number][0]
    assert type(op) is Node
    return op.type


def _shapes(records: Sequence[Record], objects: Sequence[Any], numbers: dict[Any, int]) -> list[int]:
    """For each record a number, equal for equal trees with equal types of leaves, whatever is shared in them."""
    shapes: list[int] = []
    for (op, children), obj in zip(records, objects, strict=True):
        if op is LEAF:
            key: Any = kind_of(obj)
        else:
            kind = op.type.cls if type(op) is Node else Static
            names = op.aux if type(op) is Node and op.type.is_plain else None
            key = (kind, names, *(shapes[child] for child in children))
        shapes.append(numbers.setdefault(key, len(numbers)))
    return shapes
