"""Donation: whose buffers a transform takes, and that none of them is one that its owner means to keep."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import jax
from jax import tree_util as jtu

from ..._distinct import another
from ..._jax_internals import current_traces
from ..._packed import Packed
from ..._stateful import makes_state
from ..._structure import Node, edges
from .._crossed import Names, Position, is_packed, with_packed
from .._function import FunctionTransform
from .._occurrences import Occurrences, Root, occurrences
from .._packing import Call, Entered
from .._passing_through import is_tracer
from .._treatments import Treatment, raise_inconsistent

DONATED, KEPT = "donated", "not donated"


class DonatingTransform(FunctionTransform):
    """A function under a transform that may take the buffers of its arguments."""

    def donated_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """The arguments whose buffers are taken."""
        return ()

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """Donated or not."""
        positions = self.donated_positions(num_args, keywords)
        return (Treatment(lambda position: DONATED if position in positions else KEPT),) if positions else ()

    def is_taken(self, entered: Entered) -> Callable[[int], bool]:
        """Donated buffers are."""
        positions = self.donated_positions(len(entered.args), entered.kwargs)
        taken: set[int] = set()
        for argument in entered.graph.modules if positions else ():
            if argument.position in positions:
                base = argument.structure.base
                taken.update(range(base, base + len(argument.structure.records)))
        return taken.__contains__

    def executable(self, call: Call) -> Call:
        """As it is, or with a copy of an array that several donated variables of NNX hold.

        Raises:
            InconsistentSharingError: if an array would be given away that is also in an argument which is not donated.
        """
        donated = self.donated_positions(len(call.args), call.kwargs)
        static = self.static_positions(call.args, call.kwargs)
        return given_away_once(call, donated, static, self.names, self.transform_name)


def given_away_once(
    call: Call, donated: Collection[Position], static: Collection[Position], names: Names, transform: str
) -> Call:
    """A call that takes each buffer once.

    An array in several variables of NNX is several values, so all but one of them are copies. Under an outer trace, or
    without compilation, no buffer is taken.

    Raises:
        InconsistentSharingError: if executing the call would take the buffer of an array that is also in an argument
            which is not donated.
    """
    disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if not donated or disabled or len(current_traces()) > 1:
        return call
    given = [leaf for i, value in call.items() if i in donated for leaf in jtu.tree_leaves(value) if has_buffer(leaf)]
    kept = [
        leaf for i, value in call.items() if i not in donated and i not in static for leaf in jtu.tree_leaves(value)
    ]
    taken = set(map(id, given))  # alive in `given`
    leaf = next((leaf for leaf in kept if id(leaf) in taken), None)  # as above
    if leaf is not None:
        _raise_given_away(leaf, call, _occurrences_of(leaf, call, donated, static, names), names, transform)
    return call if len(taken) == len(given) else _with_own_buffers(call, donated)


def _with_own_buffers(call: Call, donated: Collection[Position]) -> Call:
    """A call in which an array of a donated module that was met before is a copy. Bare ones are the caller's affair."""
    found = [leaf for i, value in call.items() if i in donated for leaf in jtu.tree_leaves(value, is_leaf=is_packed)]
    taken = {id(leaf) for leaf in found}  # alive in `call`

    def own(leaf: Any) -> Any:
        if id(leaf) in taken and has_buffer(leaf):  # as above
            return another(leaf)
        taken.add(id(leaf))  # as above
        return leaf

    def with_own(packed: Packed) -> Packed:
        return Packed([own(leaf) for leaf in packed.leaves], packed.structure)

    args = {i: with_packed(value, with_own) if i in donated else value for i, value in call.items()}
    return call._replace(
        args=tuple([args[i] for i in range(len(call.args))]), kwargs={name: args[name] for name in call.kwargs}
    )


def _raise_given_away(leaf: Any, call: Call, found: Occurrences, names: Names, transform: str) -> NoReturn:
    advice = "Its buffer would be given away, and whoever keeps the array would find it deleted.\n"
    records = call.graph.records
    states = [((), number) for number, (op, _) in enumerate(records) if makes_state(op)]
    if any(call.tags.objects[number] is leaf for number, _ in edges(records, states)):
        advice += (
            "`equinox.nn.State(model)` begins with the arrays that the model keeps as its initial state. Here the "
            "model keeps none:\n"
            "    model, state = sharedtree.make_with_state(make_model)()\n"
        )
    raise_inconsistent(found, transform, advice, names)


def _occurrences_of(
    leaf: Any, call: Call, donated: Collection[Position], static: Collection[Position], names: Names
) -> Occurrences:
    records = call.graph.records
    bare = len(records)  # stands for the array outside modules
    roots: list[Root[int]] = []
    for position, value in call.items():
        if position in static:
            continue
        for path, item in jtu.tree_flatten_with_path(value, is_leaf=is_packed)[0]:
            if is_packed(item):
                roots.append(Root(position, path, item.structure.root))
            elif item is leaf:
                roots.append(Root(position, path, bare))

    def below(number: int) -> list[tuple[object, int]]:
        op, children = records[number] if number < bare else (None, ())
        return list(zip(op.keys, children, strict=True)) if type(op) is Node else []

    def treatment_at(position: Position, number: int) -> str | None:
        if number < bare and call.tags.objects[number] is not leaf:
            return None
        return DONATED if position in donated else KEPT

    return occurrences(roots, below, treatment_at, names.text)


def has_buffer(leaf: Any) -> bool:
    """Whether a leaf is an array with a buffer that could be given away."""
    return isinstance(leaf, jax.Array) and not is_tracer(leaf)
