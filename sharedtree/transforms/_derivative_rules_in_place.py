"""Functions with rules, in place: what the function changed in its arguments leaves beside its result.

The rules are the same as without: `bwd` is given what `fwd` kept, and the cotangent of the result.

    f(counter, x) → y              JAX sees    f(Hand([n, x])) → Hand([n + 1]), y
    fwd(counter, x) → y, kept                  fwd(Hand([n, x])) → (Hand([n + 1]), y), kept
    bwd(kept, dy) → None, dx                   bwd(kept, (Hand([dn]), dy)) → (Hand([None, dx]),)

So the rules do not say how what was changed depends on the arguments, and `dn` above is lost. For that not to be
silent, what was changed goes through a *guard*, which raises if a gradient flows back through it.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax import tree_util as jtu
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from ..core._by_identity import IdentityDict
from ..core._call_arguments import LeafPath
from ..core._errors import InconsistentSharingError, SharingMismatchError, StateGradientError
from ..core._jax_internals import as_number
from ..core._printing import listed
from ..core._structure import LEAF, Given, Structure, Update, edges, intern
from ..core._traced_leaves_and_identity import TRACED_NUMBERS
from ..core._trees_taken_apart import Walked
from ..ties._list_ties import is_inexact
from ._caller_side import Call, leave
from ._function_side import Inside, packed
from ._hands import Hand, whole
from ._in_place import Changes, with_changes


class Changed:
    """What a function changes in the arguments of a call. Holds none of its arrays.

    Args:
        operands: the arguments, of whose leaves the types are known.
    """

    def __init__(self, operands: Walked) -> None:
        self._operands = operands
        self._known: Structure | None = None

    def note(self, state: Hand) -> None:
        """What the function itself changed."""
        self._known = state.structure

    def of_objects(self, structure: Structure) -> list[str]:
        """The paths of the changed objects themselves, without those in them."""
        return [self._operands.text(op.number) for _, op in _changed(structure)]

    def of_leaves(self, structure: Structure) -> list[str]:
        """Those of the leaves that came out with changed objects."""
        roots = [((LeafPath(self._operands.text(op.number)),), number) for number, op in _changed(structure)]
        found: dict[int, str] = {}
        for number, path in edges(structure.records, roots):
            found.setdefault(number, jtu.keystr(path))
        return [found[number] for number in structure.leaf_numbers]

    def require_same(self, state: Hand, function: str, rule: str) -> None:
        """Raises `SharingMismatchError` if a rule changes other things than the function: JAX asks for the same."""
        if self._known is None or self._known is state.structure:
            return
        one, two = self.of_objects(self._known), self.of_objects(state.structure)
        differing = sorted({*one} ^ {*two}) or sorted({*one, *two})
        raise SharingMismatchError(
            f"`{function}` and `{rule}` do not change the same in their arguments: they differ at {listed(differing)}."
            "\nOnly one of them runs, so both leave the arguments alike. The rule can call the function:\n"
            f"    result = {function}(*args)",
            differing,
        )


def _changed(structure: Structure) -> list[tuple[int, Update]]:
    """The records of the changed objects."""
    groups = structure.records[structure.root][1]
    numbers = [number for group in groups for number in structure.records[group][1]]
    return [(n, op) for n in numbers if type(op := structure.records[n][0]) is Update]


# Inside -----------------------------------------------------------------------------------------------------------


def changed_apart(result: Any, inside: Inside) -> tuple[Hand, Hand]:
    """Packs what was changed and the result, each in a numbering of its own, so that each has all its leaves.

    Args:
        result: what the function returned.
        inside: its trace.

    Raises:
        InconsistentSharingError: if a module or a mutable container is in both.
    """
    received = inside.received.tree
    tree = inside.walked(result)
    _require_apart(tree, inside)
    state = packed(with_changes(None, received, inside.forbidding(inside.terms.rules), lambda _: False))
    state = _with_numbers_named(state, received)
    return state, packed(tree)


def _require_apart(result: Walked, inside: Inside) -> None:
    terms, received = inside.terms, inside.received
    containers = terms.policy.containers
    objects = [n for n in range(len(result.records)) if result.is_object(n, containers=containers)]
    if not objects:
        return
    state = inside.walked(received.arguments)
    objects_of_state = [n for n in range(len(state.records)) if state.is_object(n, containers=containers)]
    places = IdentityDict((state.objects[n], n) for n in objects_of_state)
    for number in reversed(objects):  # the outermost first
        obj = result.objects[number]
        known = places.get(obj)
        if known is not None:
            path, other = state.text(known), "result" + result.text(number)
            raise InconsistentSharingError(
                f"The `{type(obj).__name__}` at `{path}` is also in the result of `{terms.names.definition.name}`, at "
                f"`{other}`.\n"
                f"With `in_place=True` it is written back, and the rules of `{terms.title}` say how results are "
                "differentiated, not what is written back. The caller has it; or return a copy:\n"
                f"    return sharedtree.copy({path})",
                (path, other),
                ("written back", "differentiated by the rules"),
            )


def _with_numbers_named(state: Hand, received: Walked) -> Hand:
    """What was changed. Python numbers in it that were received are named as the caller's, and so stay numbers."""
    numbers = IdentityDict((leaf, n) for n, leaf in received.leaves.items() if type(leaf) in TRACED_NUMBERS)
    structure, each = state.structure, iter(state.leaves)
    leaves: list[Any] = []
    records: list[Any] = []
    for op, children in structure.records:
        leaf = next(each) if op is LEAF else None
        if op is LEAF and leaf in numbers:
            records.append((Given(numbers[leaf]), ()))
            continue
        if op is LEAF:
            leaves.append(leaf)
        records.append((op, children))
    return whole(leaves, intern(tuple(records), structure.root))


# Outside ----------------------------------------------------------------------------------------------------------


def write_back(result: tuple[Hand, Hand], call: Call, changed: Changed, function: str, transform: str) -> Any:
    """Puts a result together, and writes what was changed into the caller's objects, all or nothing.

    Args:
        result: what was changed, and the result.
        call: the caller's side.
        changed: where what was changed is.
        function: what the function is called.
        transform: likewise.
    """
    state, hand = result
    state = _guarded(state, changed, function, transform)
    state = Hand([as_number(leaf) for leaf in state.leaves], state.deal)
    changes = Changes(call, transform)
    leave((state,), call.objects.__getitem__, changes.update)
    made = leave((hand,))
    changes.commit()
    return made


def _guarded(state: Hand, changed: Changed, function: str, transform: str) -> Hand:
    """What was changed, such that a gradient which flows back through it is an error."""
    leaves, structure = list(state.leaves), state.structure
    chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer) and is_inexact(leaf)]
    if not chosen:
        return state
    guard = jax.custom_vjp(lambda values: values)

    def backward(_: None, cotangents: Sequence[Any]) -> tuple[list[None]]:
        places = [i for i, each in zip(chosen, cotangents, strict=True) if not isinstance(each, SymbolicZero)]
        if places:
            # What this refers to outlives the call, and so is without arrays.
            paths = changed.of_leaves(structure)
            _raise_differentiated([paths[i] for i in places], function, transform)
        return ([None] * len(chosen),)

    guard.defvjp(lambda values: ([each.value for each in values], None), backward, symbolic_zeros=True)
    for i, leaf in zip(chosen, guard([leaves[i] for i in chosen]), strict=True):
        leaves[i] = leaf
    return Hand(leaves, state.deal)


def _raise_differentiated(paths: Sequence[str], function: str, transform: str) -> NoReturn:
    raise StateGradientError(
        f"A gradient flows through {listed(paths)}, which `{function}` changed in place.\n"
        f"The rules of `{transform}` say how its result is differentiated, and nothing of what else it changes. Let it "
        "return what is to be differentiated. What is not, but is used by what is differentiated, or carried on by a "
        "loop that is, takes this after the call:\n"
        f"    {paths[0]} = jax.lax.stop_gradient({paths[0]})",
        paths,
    )
