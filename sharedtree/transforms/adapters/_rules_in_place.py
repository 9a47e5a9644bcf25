"""Functions with rules, in place: what the function changed in its arguments leaves beside its result.

The rules are the same as without: `bwd` is given what `fwd` kept, and the cotangent of the result.

    f(counter, x) → y              JAX sees    f(Packed([n]), x) → [Packed([n + 1])], y
    fwd(counter, x) → y, kept                  fwd(Packed([n]), x) → ([Packed([n + 1])], y), kept
    bwd(kept, dy) → None, dx                   bwd(kept, ([Packed([dn])], dy)) → Packed([None]), dx

So the rules do not say how what was changed depends on the arguments, and `dn` above is lost. For that not to be
silent, what was changed goes through a *guard*, which raises if a gradient flows back through it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from ..._errors import InconsistentSharingError, SharingMismatchError, StateGradientError
from ..._graph import Tags
from ..._jax_internals import as_number, as_numpy
from ..._node_types import TRACED_NUMBERS
from ..._packed import LeafPath, Packed
from ..._structure import LEAF, Given, Node, Record, Update, edges, intern
from ..._text import listed
from ..._ties import is_inexact
from .._crossed import Argument, Graph, Names, packed_in
from .._crossing import nothing_given
from .._in_place import InPlace
from .._inside import Inside, with_notes
from .._packing import Call, pack_tree, unpack_result

State = Sequence[Packed]
"""What was changed, as `packed_changes` packs it: each is a tuple of objects of the caller's with their new content."""


class Paths:
    """Where the objects in the arguments of a call are. Holds none of its arrays."""

    def __init__(self, call: Call, names: Names) -> None:
        self._modules = [module._replace(packed=Packed((), module.structure)) for module in call.modules]
        self._names = names

    def of_objects(self, state: State) -> list[str]:
        """Those of the changed objects themselves, without those in them."""
        of_caller, records = _first_paths(self._modules, self._names), Graph.of(state).records
        ops = [records[number][0] for number in _changed(state)]
        return [of_caller[op.number] for op in ops if type(op) is Update]

    def of_leaves(self, state: State) -> list[str]:
        """Those of the leaves that came out with changed objects."""
        roots = [((LeafPath(text),), n) for text, n in zip(self.of_objects(state), _changed(state), strict=True)]
        records, found = Graph.of(state).records, dict[int, str]()
        for number, path in edges(records, roots):
            found.setdefault(number, jtu.keystr(path))
        return [found[number] for number, (op, _) in enumerate(records) if op is LEAF]


def _changed(state: State) -> list[int]:
    """The records of the changed objects."""
    graph = Graph.of(state)
    return [number for root in graph.roots for number in graph.records[root][1]]


def _first_paths(modules: Sequence[Argument], names: Names) -> dict[int, str]:
    """The first path to each record of some modules."""
    shape = Graph(modules).shape_named(lambda module: names.text(module.position, module.path))
    found: dict[int, str] = {}
    for number, path in edges(shape.records, [((), shape.root)]):
        found.setdefault(number, jtu.keystr(path))
    return found


# Inside -----------------------------------------------------------------------------------------------------------


def parted(state: State, result: Any, inside: Inside) -> tuple[State, Any]:
    """What was changed and the result, as they leave: each in a numbering of its own, so that each has all its leaves.

    Args:
        state: packed.
        result: what the function returned.
        inside: its trace.

    Raises:
        InconsistentSharingError: if a module or a mutable container is in both.
    """
    tags = Tags()
    packed = inside.pack(result, tags)
    _require_apart(Graph(packed_in(packed, "result"), tags.objects), inside)
    return [_with_numbers_named(each, inside.entered.graph) for each in state], packed


def _require_apart(result: Graph, inside: Inside) -> None:
    objects = [n for n, (op, _) in enumerate(result.records) if type(op) is Node and op.type.carries_identity]
    if not objects:
        return
    terms, received, tags = inside.terms, inside.entered.graph, Tags()
    rules, names = terms.policy.rules, terms.names
    roots = [
        module._replace(packed=pack_tree(received.objects[module.structure.root], tags, rules, ""))
        for module in received.modules
    ]
    for number in reversed(objects):  # the outermost first
        obj = result.objects[number]
        known = tags.number_of(obj)
        if known is not None:
            path, other = _first_paths(roots, names)[known], _first_paths(result.modules, names)[number]
            raise InconsistentSharingError(
                f"The `{type(obj).__name__}` at `{path}` is also in the result of `{names.definition.name}`, at "
                f"`{other}`.\n"
                f"With `in_place=True` it is written back, and the rules of `{terms.title}` say how results are "
                "differentiated, not what is written back. The caller has it; or return a copy:\n"
                f"    return sharedtree.copy({path})",
                (path, other),
                ("written back", "differentiated by the rules"),
            )


def _with_numbers_named(packed: Packed, received: Graph) -> Packed:
    """What was changed. Python numbers in it that were received are named as the caller's, and so stay numbers."""
    numbers = {
        id(obj): number  # alive in the graph
        for number, ((op, _), obj) in enumerate(zip(received.records, received.objects, strict=True))
        if op is LEAF and type(obj) in TRACED_NUMBERS
    }
    if not any(id(leaf) in numbers for leaf in packed.leaves):  # as above
        return packed
    structure, each = packed.structure, iter(packed.leaves)
    leaves: list[Any] = []
    records: list[Record] = []
    for op, children in structure.records:
        leaf = next(each) if op is LEAF else None
        if op is LEAF and id(leaf) in numbers:  # as above
            records.append((Given(numbers[id(leaf)]), ()))  # as above
            continue
        if op is LEAF:
            leaves.append(leaf)
        records.append((op, children))
    return with_notes(Packed(leaves, intern(tuple(records), structure.root, structure.base)))


def require_same_changes(known: State, state: State, paths: Paths, function: str, rule: str) -> None:
    """Raises `SharingMismatchError` if a rule changes other things than the function, where JAX asks for the same."""
    if jtu.tree_structure(known) == jtu.tree_structure(state):
        return
    one, two = paths.of_objects(known), paths.of_objects(state)
    differing = sorted({*one} ^ {*two}) or sorted({*one, *two})
    raise SharingMismatchError(
        f"`{function}` and `{rule}` do not change the same in their arguments: they differ at {listed(differing)}.\n"
        "Only one of them runs, so both leave the arguments alike. The rule can call the function:\n"
        f"    result = {function}(*args)",
        differing,
    )


# Outside ----------------------------------------------------------------------------------------------------------


def write_back(packed: tuple[State, Any], call: Call, refuse: Callable[[State, Sequence[int]], NoReturn]) -> Any:
    """Unpacks a result, and writes what was changed into the caller's objects, all or nothing.

    Args:
        packed: what was changed, and the result.
        call: the caller's side.
        refuse: (what was changed, places among its leaves) → raises, for a gradient flows through these.
    """
    state, result = packed
    state = [
        Packed([as_number(as_numpy(leaf)) for leaf in each.leaves], each.structure) for each in _guarded(state, refuse)
    ]
    changes, objects = InPlace(call), call.tags.objects
    unpack_result(state, lambda _: objects.__getitem__, changes.update, changes.pending)
    result = unpack_result(result, nothing_given)
    changes.commit()
    return result


def _guarded(state: State, refuse: Callable[[State, Sequence[int]], NoReturn]) -> State:
    """What was changed, such that a gradient which flows back through it is an error."""
    leaves, treedef = jtu.tree_flatten(state)
    chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer) and is_inexact(leaf)]
    if not chosen:
        return state
    # What it refers to outlives the call, and so is without arrays.
    known = [Packed((), each.structure) for each in state]
    guard = jax.custom_vjp(lambda values: values)

    def backward(_: None, cotangents: Sequence[Any]) -> tuple[list[None]]:
        places = [i for i, each in zip(chosen, cotangents, strict=True) if not isinstance(each, SymbolicZero)]
        if places:
            refuse(known, places)
        return ([None] * len(chosen),)

    guard.defvjp(lambda values: ([each.value for each in values], None), backward, symbolic_zeros=True)
    for i, leaf in zip(chosen, guard([leaves[i] for i in chosen]), strict=True):
        leaves[i] = leaf
    return treedef.unflatten(leaves)


def raise_differentiated(paths: Sequence[str], function: str, transform: str) -> NoReturn:
    """Raises `StateGradientError` for what a function changed."""
    raise StateGradientError(
        f"A gradient flows through {listed(paths)}, which `{function}` changed in place.\n"
        f"The rules of `{transform}` say how its result is differentiated, and nothing of what else it changes. Let it "
        "return what is to be differentiated. What is not, but is used by what is differentiated, or carried on by a "
        "loop that is, takes this after the call:\n"
        f"    {paths[0]} = jax.lax.stop_gradient({paths[0]})",
        paths,
    )
