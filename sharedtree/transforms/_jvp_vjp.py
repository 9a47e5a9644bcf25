"""`jax.vjp`, `jax.jvp`, `jax.linearize`, `jax.linear_transpose`, and Equinox's `filter_vjp` and `filter_jvp`.

The transform sees of the primals, and of the result, a group with the leaves that are differentiated. The others go
around it: those of the primals straight to the function, those of its result out beside it. What holds no module is
left as it is; so without modules all is vanilla.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from ..core._call_arguments import Arguments, positions_of
from ..core._errors import SharingMismatchError
from ..core._pack_and_unpack import Tags, walk
from ..core._prefix_trees import Branch
from ..core._printing import listed
from ..core._sharing import Mismatch, pairs
from ..core._static_values import Static
from ..core._structure import FlatDag, depth_of
from ..ties._list_ties import is_inexact
from ._argument_names import Names
from ._caller_side import Grouping, leave
from ._crossing import Crossing, TakingOperands
from ._function_and_options import is_of_equinox
from ._function_side import Inside, packed
from ._grad import handed_beside
from ._joining_trees import Repacking, holds_modules
from ._leaf_groups import LeafGroup, LeafSelection, tree_like_arguments
from ._leaf_labels import Treatment
from ._tangents import Fit, as_tuple, fitted
from .checks._tied_values import report_tied_values

_MOST_LEVELS = 100


class LinearMap:
    """What `jax.vjp`, `jax.linearize` and `jax.linear_transpose` return: takes and gives modules, with their ties.

    As what vanilla JAX returns it is a pytree, so it may cross transforms.

    Args:
        function: the vanilla function, of groups.
        takes: the leaf group that it takes.
        is_pair: whether what it takes is the first of a pair.
        fit: how what it is given is fitted to that.
        is_bare: whether the primals, and so what is in their shape, are in no group.
    """

    __slots__ = ("__weakref__", "fit", "function", "is_bare", "is_pair", "takes")

    def __init__(self, function: Any, takes: LeafSelection, is_pair: bool, fit: Fit, is_bare: bool) -> None:
        self.function = function
        self.takes = takes
        self.is_pair = is_pair
        self.fit = fit
        self.is_bare = is_bare

    def __call__(self, /, *args: Any) -> Any:
        if self.fit.adds_up:
            if len(args) != 1:
                return self.function(*args)  # says best what is wrong
            group = seen_of(self.takes, args[0], "cotangent", self.fit, is_pair=self.is_pair)
            made = self.function(group)
            if self.is_bare:
                return made
            made, *logs = made if getattr(self.function, "want_logs", False) else (made,)
            cotangents = tuple(tree_like_arguments(made).args)
            return (cotangents, *logs) if logs else cotangents
        given = args if self.is_bare else (seen_of(self.takes, args, "tangents", self.fit, is_pair=False),)
        made = tree_like_arguments((self.function(*given),), is_gradient=False)
        return made[0] if self.is_pair else made

    @property
    def with_logs(self) -> "LinearMap":
        """With newer JAX, of `vjp`: the same function, which returns a pair with what the rules logged."""
        return LinearMap(self.function.with_logs, self.takes, self.is_pair, self.fit, self.is_bare)

    def __repr__(self) -> str:
        return f"<function returned by {self.fit.title}, identities preserved>"


jtu.register_pytree_node(
    LinearMap,
    lambda item: ((item.function,), (item.takes, item.is_pair, item.fit, item.is_bare)),
    lambda how, children: LinearMap(children[0], *how),
)


def seen_of(selection: LeafSelection, given: Any, name: str, fit: Fit, *, is_pair: bool) -> LeafGroup:
    """What a user gave, in the leaf group that the transform sees.

    Args:
        selection: of the group.
        given: in the shape of the arguments, or of the result.
        name: what it is called in errors.
        fit: how it is fitted.
        is_pair: whether it has the shape of the first of a pair.
    """
    structure = selection.structure
    numbers = set(range(structure.num_leaves) if selection.numbers is None else selection.numbers)
    # Of its leaves only the types count: those that are seen are differentiated, and the others are not.
    types = [0.0 if place in numbers else 0 for place in range(structure.num_leaves)]
    tree = FlatDag.of_leaves(structure, types)
    tree = as_tuple(tree) if not fit.adds_up else tree.child(0) if is_pair else tree
    found = fitted(tree, given, name, fit)
    leaves = [found[number] for place, number in enumerate(structure.leaf_numbers) if place in numbers]
    return LeafGroup(leaves, selection)


class Trace:
    """The one trace of a function in a call of these transforms, which do not cache.

    Args:
        crossing: the call.
        function: the user's.
        primals: what it is differentiated in.
        others: further arguments, by name, that it gets as they are.
        has_aux: whether it returns a pair, of which the second is not differentiated.
        adds_up: whether it is given cotangents. JAX would add those of a reference up in another one.
        takes_structs: whether a `jax.ShapeDtypeStruct` in an Equinox module stands for an array.

    Attributes:
        is_bare: whether the primals hold no module, so that the transform gets them as they are.
        primals: what the transform gets.
        unseen: what it does not see of them.
        of_result: what it saw of what the function returned, once it has; None if that is bare.
    """

    def __init__(
        self,
        crossing: Crossing,
        function: Callable[..., Any],
        primals: Sequence[Any],
        others: Mapping[str, Any] | None = None,
        *,
        has_aux: bool = False,
        adds_up: bool = False,
        takes_structs: bool = False,
    ) -> None:
        self.crossing = crossing
        self.has_aux = has_aux
        if not callable(function):
            crossing.transform(function, primals, primals)  # says best what is wrong
        arguments = Arguments(Names(function).of(len(primals)), primals, dict(others or {}))
        self.unseen, self.seen = crossing.enter_grouped(
            function, arguments, self._grouping(arguments, adds_up=adds_up, takes_structs=takes_structs)
        )
        of_nothing = not crossing.policy.containers and _is_for_jax(crossing.call.tree)
        self.is_bare = of_nothing and not crossing.rules.filtered
        self.primals = tuple(primals) if self.is_bare else (self.seen,)
        self.of_result: LeafSelection | None = None
        differentiates = crossing.transform is not jax.linear_transpose
        self._inner = crossing.function(
            function, _pair if has_aux else _value, caches_traces=False, differentiates=differentiates
        )
        functools.update_wrapper(self, self._inner, updated=())
        self.__signature__ = self._inner.__signature__

    def _grouping(self, arguments: Arguments, *, adds_up: bool, takes_structs: bool) -> Grouping:
        prefix = Branch(tuple([isinstance(position, int) for position in positions_of(arguments.parts()[1])]))
        rules = self.crossing.rules

        def treatments(tree: FlatDag) -> Sequence[Treatment]:
            outside = () if rules.filtered else tree.outside
            beside = handed_beside(tree, rules)
            structs = {n for n in beside if isinstance(tree.leaves[n], jax.ShapeDtypeStruct)}
            if not adds_up:  # a reference has a tangent
                beside = structs
            if takes_structs:
                beside = beside - structs
            return (
                Treatment(
                    "primals",
                    prefix,
                    lambda part: isinstance(part, bool),
                    lambda chosen, leaf, n: chosen and n not in beside and (n in outside or is_inexact(leaf)),
                    lambda chosen: "differentiated" if chosen else "not differentiated",
                    groups_by_outcome=True,
                ),
            )

        return Grouping(self.crossing.title, treatments, None, None, ((False,), (True,)))

    def __call__(self, *primals: Any) -> Any:
        """What the transform calls, with and without auxiliary data of the user's: (seen of the result, beside it)."""
        crossing = self.crossing
        if self.is_bare:
            report_tied_values(crossing.call.tree, crossing.names, crossing.title, crossing.policy)
        result = self._inner(*primals) if self.is_bare else self._inner(self.unseen, *primals)
        if type(result) is tuple and len(result) == 2 and type(result[0]) is LeafGroup:
            self.of_result = result[0].selection
        return result

    def trace_numbers(self, tangents: Sequence[Any]) -> None:
        """Lets the transform see the static Python numbers of the primals that have a tangent, as vanilla JAX does."""
        crossing = self.crossing
        tree = crossing.call.tree
        tags = Tags()
        _, others, root = walk(tuple(tangents), tags, crossing.rules)
        numbers = {
            pair.left
            for pair in pairs(as_tuple(tree), FlatDag(others, root), lambda i, j: True)
            if not isinstance(pair, Mismatch) and tags.objects[pair.right] is not None
        }
        promoted = frozenset([n for n in numbers if type(op := tree.records[n][0]) is Static and _is_float(op.peek())])
        if promoted:
            children = [below for _, below in tree.records]
            crossing.lower(Repacking(range(len(children)), children, promoted))
            self.unseen, self.seen = crossing.call.groups
            self.primals = (self.seen,)

    def leave(self, seen: Any, beside: Any) -> tuple[Any, ...]:
        """What the function returned, put together: its value, and the auxiliary data if there are any."""
        if type(seen) is not LeafGroup:
            return (seen, beside) if self.has_aux else (seen,)
        made = leave((seen, beside))
        return tuple(made) if self.has_aux else (made,)

    def tangents(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """The user's tangents of the primals as the transform sees them."""
        if self.is_bare:
            return tuple(given)
        return (seen_of(self.seen.selection, tuple(given), "tangents", self.fit(adds_up=False), is_pair=False),)

    def fit(self, *, adds_up: bool) -> Fit:
        """How tangents, or cotangents, are fitted."""
        crossing = self.crossing
        return Fit(crossing.title, crossing.rules, adds_up, may_lack=is_of_equinox(crossing.transform))

    def linear_map(self, function: Any, *, adds_up: bool) -> Any:
        """The vanilla function, made to take and to give modules."""
        if self.of_result is None:
            return function
        takes = self.of_result if adds_up else self.seen.selection
        return LinearMap(function, takes, self.has_aux, self.fit(adds_up=adds_up), self.is_bare)

    def out_tangents(self, made: Any) -> Any:
        """Tangents of the value, as a tree."""
        if type(made) is not LeafGroup:
            return made
        tangents = tree_like_arguments((made,), is_gradient=False)
        return tangents[0] if self.has_aux else tangents


def _value(inside: Inside, *operands: Any) -> Any:
    result, is_bare = _called(inside, operands)
    tree = inside.walked(result)
    return (result, None) if is_bare and _is_for_jax(tree) else _split(tree, tree)


def _pair(inside: Inside, *operands: Any) -> Any:
    result, is_bare = _called(inside, operands)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        return result  # which JAX refuses
    tree = inside.walked(tuple(result))
    return result if is_bare and _is_for_jax(tree) else _split(tree, tree.child(0))


def _is_for_jax(tree: FlatDag) -> bool:
    """Whether the transform can have a tree as it is: JAX 0.10 does not recover from what is too deep to flatten."""
    return not holds_modules(tree) and depth_of(tree.records) <= _MOST_LEVELS


def _called(inside: Inside, operands: Sequence[Any]) -> tuple[Any, bool]:
    if operands and type(operands[0]) is LeafGroup:
        return inside.call(*operands), False
    return inside.function(*operands), True


def _split(tree: FlatDag, value: FlatDag) -> tuple[LeafGroup, LeafGroup]:
    """The result in two groups: what is differentiated of its value, and all the rest."""
    group = packed(tree)
    outside = tree.below(value.root).outside
    chosen = {n for n in tree.leaf_numbers if n in value.reached and (n in outside or is_inexact(tree.objects[n]))}
    seen, rest = [tuple([i for i, n in enumerate(tree.leaf_numbers) if (n in chosen) is yes]) for yes in (True, False)]
    one, other = [
        LeafGroup([group.leaves[i] for i in own], LeafSelection(group.structure, own)) for own in (seen, rest)
    ]
    return one, other


def vjp(crossing: Crossing, fun: Any, primals: Sequence[Any] = (), *, has_aux: bool = False, **options: Any) -> Any:
    """`jax.vjp` and `equinox.filter_vjp`."""
    trace = Trace(crossing, fun, primals, has_aux=has_aux, adds_up=True)
    seen, pullback, beside = crossing.applied(jax.vjp, trace, *trace.primals, has_aux=True, **options)
    value, *aux = trace.leave(seen, beside)
    return value, trace.linear_map(pullback, adds_up=True), *aux


def linearize(
    crossing: Crossing, fun: Any, primals: Sequence[Any] = (), *, has_aux: bool = False, **options: Any
) -> Any:
    """`jax.linearize`."""
    trace = Trace(crossing, fun, primals, has_aux=has_aux)
    seen, pushforward, beside = crossing.apply(trace, *trace.primals, has_aux=True, **options)
    value, *aux = trace.leave(seen, beside)
    return value, trace.linear_map(pushforward, adds_up=False), *aux


def linear_transpose(crossing: Crossing, fun: Any, primals: Sequence[Any] = (), **options: Any) -> Any:
    """`jax.linear_transpose`; what is not differentiated of the result is left out."""
    trace = Trace(crossing, fun, primals, takes_structs=True)
    each = zip(trace.unseen.paths, trace.unseen.leaves, strict=True)
    at = [text for text, leaf in each if isinstance(leaf, jax.ShapeDtypeStruct)]
    if at:
        raise TypeError(
            f"`{crossing.title}` was given a `jax.ShapeDtypeStruct` at {listed(at)}, which is not differentiated. So "
            "the function needs its value, for only the rest is transposed:\n"
            "    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_inexact_array(x) else x\n"
            "    abstract = sharedtree.tree.map(struct, model)"
        )

    def seen_only(*primals: Any) -> Any:
        return trace(*primals)[0]

    functools.update_wrapper(seen_only, trace, updated=())
    return trace.linear_map(crossing.apply(seen_only, *trace.primals, **options), adds_up=True)


def jvp(crossing: Crossing, fun: Any, primals: Any, tangents: Any, has_aux: bool = False) -> Any:
    """`jax.jvp`."""
    if not isinstance(primals, (tuple, list)) or type(primals) is not type(tangents):
        return crossing.transform(fun, primals, tangents)  # says best what is wrong
    trace = Trace(crossing, fun, primals, has_aux=has_aux)
    try:
        if not trace.is_bare:
            trace.trace_numbers(tangents)
        given = trace.tangents(tangents)
    except SharingMismatchError:
        if not holds_modules(crossing.call.tree):
            crossing.transform(fun, primals, tangents, has_aux=has_aux)  # says best what is wrong
        raise
    seen, made, beside = crossing.apply(trace, trace.primals, given, has_aux=True)
    value, *aux = trace.leave(seen, beside)
    return value, trace.out_tangents(made), *aux


def filter_jvp(crossing: Crossing, fn: Any, primals: Any, tangents: Any, **others: Any) -> Any:
    """`equinox.filter_jvp`. It has no auxiliary data; whatever is not differentiated has the tangent None."""
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        raise TypeError(
            f"The primals and the tangents of `{crossing.title}` are tuples or lists, with one for each argument, and "
            f"not a `{type(primals).__name__}` and a `{type(tangents).__name__}`."
        )
    trace = Trace(crossing, fn, tuple(primals), others)
    trace.trace_numbers(tangents)
    (given,) = trace.tangents(tangents)
    given = (_filled(trace.seen, given),)
    seen, made, beside = crossing.applied(jax.jvp, trace, trace.primals, given, has_aux=True)
    return trace.leave(seen, beside)[0], trace.out_tangents(made)


def _is_float(value: Any) -> bool:
    return type(value) in (float, complex)


def _filled(primals: LeafGroup, tangents: LeafGroup) -> LeafGroup:
    """Tangents with zeros where there are none."""
    each = zip(primals.leaves, tangents.leaves, strict=True)
    return LeafGroup([jnp.zeros_like(primal) if leaf is None else leaf for primal, leaf in each], tangents.selection)


VJP = TakingOperands(vjp, writes=False, calls_each_time=True)
JVP = TakingOperands(jvp, writes=False, calls_each_time=True)
LINEARIZE = TakingOperands(linearize, writes=False, calls_each_time=True)
LINEAR_TRANSPOSE = TakingOperands(linear_transpose, writes=False)
FILTER_JVP = TakingOperands(filter_jvp, writes=False, calls_each_time=True)
