"""`jax.vjp`, `jax.jvp`, `jax.linearize`, `jax.linear_transpose`, and Equinox's `filter_vjp` and `filter_jvp`.

The transform gets two leaf groups with the leaves that are differentiated: one of the primals, one of the result. The
other leaves *bypass* the transform: those of the primals go straight to the function, those of the result come out as
auxiliary data.

    primals   (Net(w, steps), x)     differentiated_group   w, x
                                     bypassing_group        steps, an array of integers

Arguments and results are *bare* if they hold no module and the transform gets them as they are, without leaf groups. So
JAX sees exactly what it would see without this package.

A leaf is *outside* if plain containers alone lead to it, with no module on the way. JAX itself accepts or refuses it.

The transforms that map tangents forward take *tangents* of the primals. The others take a *cotangent* of the value, and
return cotangents of the primals.
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
from ._caller_side import Grouping, build_from_groups
from ._calls_with_operands import CallWithOperands, TakingOperands
from ._function_and_options import is_of_equinox
from ._function_side import FunctionTrace, single_group_of_tree
from ._grad import undifferentiated_records
from ._joining_trees import Repacking, holds_modules
from ._leaf_groups import LeafGroup, LeafSelection, tree_like_arguments
from ._leaf_labels import Treatment
from ._tangents import Fit, as_tuple, fit_to_leaves
from .checks._tied_values import report_tied_values

# Deeper trees are packed, though they hold no module.
_MAX_DEPTH_FOR_JAX = 100

# The adapters ---------------------------------------------------------------------------------------------------------


def vjp(call: CallWithOperands, fun: Any, primals: Sequence[Any] = (), *, has_aux: bool = False, **options: Any) -> Any:
    """Adapter of `jax.vjp` and `equinox.filter_vjp`.

    Returns:
        The value; the function from a cotangent of the value to cotangents of the primals; and, with `has_aux`, the
        auxiliary data.
    """
    inner = DifferentiatedCall(call, fun, primals, has_aux=has_aux, takes_cotangents=True)
    differentiated_group, pullback, bypassing_group = call.apply_other(
        jax.vjp, inner, *inner.primals, has_aux=True, **options
    )
    value, *aux = inner.build_result(differentiated_group, bypassing_group)
    return value, inner.linear_map(pullback, takes_cotangents=True), *aux


def linearize(
    call: CallWithOperands, fun: Any, primals: Sequence[Any] = (), *, has_aux: bool = False, **options: Any
) -> Any:
    """Adapter of `jax.linearize`.

    Returns:
        The value; the function from tangents of the primals to the tangent of the value; and, with `has_aux`, the
        auxiliary data.
    """
    inner = DifferentiatedCall(call, fun, primals, has_aux=has_aux)
    differentiated_group, pushforward, bypassing_group = call.apply(inner, *inner.primals, has_aux=True, **options)
    value, *aux = inner.build_result(differentiated_group, bypassing_group)
    return value, inner.linear_map(pushforward, takes_cotangents=False), *aux


def linear_transpose(call: CallWithOperands, fun: Any, primals: Sequence[Any] = (), **options: Any) -> Any:
    """Adapter of `jax.linear_transpose`. Leaves of the result that are not differentiated are left out.

    Returns:
        The function from a cotangent of the result to cotangents of the primals.

    Raises:
        TypeError: if a `jax.ShapeDtypeStruct` is not differentiated, for example because its dtype is an integer. Such
            leaves bypass the transform, and the function needs their values.
    """
    inner = DifferentiatedCall(call, fun, primals, takes_structs=True)
    bypassing_leaves = zip(inner.bypassing_group.paths, inner.bypassing_group.leaves, strict=True)
    struct_paths = [path for path, leaf in bypassing_leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if struct_paths:
        raise TypeError(
            f"`{call.title}` got a `jax.ShapeDtypeStruct` at {listed(struct_paths)}, but needs a value there: the "
            "leaf is not differentiated, so the function computes with it. Pass structs for floating-point arrays "
            "only:\n"
            "    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_inexact_array(x) else x\n"
            "    abstract = sharedtree.tree.map(struct, model)"
        )

    def differentiated_result(*primals: Any) -> Any:
        """Calls the function, and returns the leaf group of the differentiated leaves of its result."""
        differentiated_group, _ = inner(*primals)
        return differentiated_group

    # `differentiated_result` gets the name and the signature of the user's function, for JAX's errors.
    functools.update_wrapper(differentiated_result, inner, updated=())
    return inner.linear_map(call.apply(differentiated_result, *inner.primals, **options), takes_cotangents=True)


def jvp(call: CallWithOperands, fun: Any, primals: Any, tangents: Any, has_aux: bool = False) -> Any:
    """Adapter of `jax.jvp`. Returns the value, its tangent, and, with `has_aux`, the auxiliary data.

    Raises:
        SharingMismatchError: if the tangents do not fit the primals. Without modules, JAX's own error comes first.
    """
    if not isinstance(primals, (tuple, list)) or type(primals) is not type(tangents):
        # JAX refuses these containers, with its own error.
        return call.transform(fun, primals, tangents)
    inner = DifferentiatedCall(call, fun, primals, has_aux=has_aux)
    try:
        # Bare numbers are left out: JAX traces them anyway.
        if not inner.is_bare:
            inner.trace_static_floats(tangents)
        tangents_in = inner.pack_tangents(tangents)
    except SharingMismatchError:
        if not holds_modules(call.packed.tree):
            # The tangents do not fit the primals. Without modules, JAX itself says best what is wrong. If it finds
            # nothing wrong, our error follows.
            call.transform(fun, primals, tangents, has_aux=has_aux)
        raise
    differentiated_group, tangent_out, bypassing_group = call.apply(inner, inner.primals, tangents_in, has_aux=True)
    value, *aux = inner.build_result(differentiated_group, bypassing_group)
    return value, inner.build_tangent(tangent_out), *aux


def filter_jvp(call: CallWithOperands, fn: Any, primals: Any, tangents: Any, **constants: Any) -> Any:
    """Adapter of `equinox.filter_jvp`. Returns the value and its tangent.

    There are no auxiliary data. In the tangents, None stands for zero and for leaves that are not differentiated.

    Args:
        call: the call of the transform.
        fn: the user's function.
        primals: tuple or list of its arguments.
        tangents: tuple or list of their tangents.
        constants: keyword arguments of the function, which are not differentiated. In Equinox, this parameter is
            `kwargs`. Here it must have another name: to a parameter `kwargs`, `TakingOperands` would pass all keyword
            arguments as one dictionary.

    Raises:
        TypeError: if the primals or the tangents are no tuple or list.
        SharingMismatchError: if the tangents do not fit the primals.
    """
    if not isinstance(primals, (tuple, list)) or not isinstance(tangents, (tuple, list)):
        raise TypeError(
            f"`{call.title}` takes the primals and the tangents as tuples or lists, with one entry for each argument, "
            f"not as a `{type(primals).__name__}` and a `{type(tangents).__name__}`."
        )
    inner = DifferentiatedCall(call, fn, tuple(primals), constants)
    inner.trace_static_floats(tangents)
    # Equinox's primals are never bare, since its filters apply outside modules too. So the tuple has one leaf group.
    (tangent_group,) = inner.pack_tangents(tangents)
    tangents_in = (_with_zeros(inner.differentiated_group, tangent_group),)
    # The leaf groups hold only what Equinox's filters would let through, so `jax.jvp` can stand for Equinox's own.
    differentiated_group, tangent_out, bypassing_group = call.apply_other(
        jax.jvp, inner, inner.primals, tangents_in, has_aux=True
    )
    return inner.build_result(differentiated_group, bypassing_group)[0], inner.build_tangent(tangent_out)


def _with_zeros(primals: LeafGroup, tangents: LeafGroup) -> LeafGroup:
    """Puts arrays of zeros in the place of None. `jax.jvp` needs a tangent for each primal."""
    leaf_pairs = zip(primals.leaves, tangents.leaves, strict=True)
    leaves = [jnp.zeros_like(primal) if tangent is None else tangent for primal, tangent in leaf_pairs]
    return LeafGroup(leaves, tangents.selection)


# One call -------------------------------------------------------------------------------------------------------------


class DifferentiatedCall:
    """One call of a function by one of these transforms. They cache no traces, so each call traces once.

    A `DifferentiatedCall` is itself the function that JAX differentiates or transposes. It maps the group of the
    differentiated leaves, or the bare primals, to a pair of the differentiated result and the rest.

    Args:
        call: the call of the transform.
        function: the user's function.
        primals: arguments of the function that are differentiated.
        kwargs: further arguments of the function, by name.
        has_aux: True if the function returns a pair of a value and auxiliary data, which are not differentiated.
        takes_cotangents: True if the transform takes cotangents. Then references are not differentiated, since JAX
            would add up their cotangents in another reference.
        takes_structs: True if a `jax.ShapeDtypeStruct` in an Equinox module stands for an array.

    Attributes:
        is_bare: True if the primals hold no module, and the transform gets them as they are.
        primals: arguments for the transform: one leaf group, or the bare primals.
        differentiated_group: leaf group of the leaves of the primals that the transform differentiates.
        bypassing_group: leaf group of all other leaves of the arguments, which bypasses the transform.
        result_selection: selection of the differentiated leaves of the result. None before the function has returned,
            and if its result is bare.
    """

    def __init__(
        self,
        call: CallWithOperands,
        function: Callable[..., Any],
        primals: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        has_aux: bool = False,
        takes_cotangents: bool = False,
        takes_structs: bool = False,
    ) -> None:
        self.call = call
        self.has_aux = has_aux
        if not callable(function):
            # Called for its error alone: each of the transforms refuses the function before it looks at the other
            # arguments, so these need not suit it.
            call.transform(function, primals, primals)
        arguments = Arguments(Names(function).of(len(primals)), primals, dict(kwargs or {}))
        self.bypassing_group, self.differentiated_group = call.enter_grouped(
            function,
            arguments,
            self._grouping(arguments, takes_cotangents=takes_cotangents, takes_structs=takes_structs),
        )
        # Under `containers=True`, mutable containers outside modules carry identity, which JAX would not keep.
        suits_jax = not call.policy.containers and _suits_jax(call.packed.tree)
        # Under Equinox's filters, anything but an array is static, also outside modules, and JAX would not take it.
        self.is_bare = suits_jax and not call.rules.filtered
        self.primals = tuple(primals) if self.is_bare else (self.differentiated_group,)
        self.result_selection: LeafSelection | None = None
        # If True, each trace warns of modules that are differentiated and that the function also closes over. A
        # transpose is no derivative, so there is no such warning.
        differentiates = call.transform is not jax.linear_transpose
        self._call_user = call.function(
            function,
            _call_with_aux if has_aux else _call_without_aux,
            caches_traces=False,
            differentiates=differentiates,
        )
        # It looks like the user's function: name, docstring and signature.
        functools.update_wrapper(self, self._call_user, updated=())
        self.__signature__ = self._call_user.__signature__

    def _grouping(self, arguments: Arguments, *, takes_cotangents: bool, takes_structs: bool) -> Grouping:
        """Returns the rule by which leaves are grouped. The group of the leaves that bypass the transform comes first.

        Args:
            arguments: all arguments of the function.
            takes_cotangents: argument of the class. If it is true, references bypass the transform.
            takes_structs: argument of the class. If it is true, inexact `jax.ShapeDtypeStruct`s in modules are
                differentiated.
        """
        # A prefix tree with a boolean for each argument: positional arguments are differentiated, keyword arguments are
        # not. The position of a keyword argument is its name, a string.
        prefix = Branch(tuple([isinstance(position, int) for position in positions_of(arguments.parts()[1])]))
        rules = self.call.rules

        def treatments(tree: FlatDag) -> Sequence[Treatment]:
            """Labels each leaf True if it is differentiated, and False if it bypasses the transform."""
            # Records of leaves outside modules. Under Equinox's filters they are treated as those in modules.
            outside = () if rules.filtered else tree.outside
            # Records of leaves that bypass the transform even if their dtype is inexact. At first these are references
            # and `ShapeDtypeStruct`s. Depending on the options, one or both kinds are taken out again.
            bypassing = undifferentiated_records(tree, rules)
            structs = {number for number in bypassing if isinstance(tree.leaves[number], jax.ShapeDtypeStruct)}
            if not takes_cotangents:
                # Tangents of references are allowed, so only structs bypass the transform.
                bypassing = structs
            if takes_structs:
                bypassing = bypassing - structs
            return (
                Treatment(
                    "primals",
                    prefix,
                    lambda part: isinstance(part, bool),
                    # Outside modules, JAX itself accepts or refuses a leaf.
                    lambda is_primal, leaf, number: (
                        is_primal and number not in bypassing and (number in outside or is_inexact(leaf))
                    ),
                    lambda is_differentiated: "differentiated" if is_differentiated else "not differentiated",
                    groups_by_outcome=True,
                ),
            )

        # `key=None`: no plan is kept. There are always two groups: first the leaves with the label False, then those
        # with the label True.
        return Grouping(self.call.title, treatments, key=None, groups=((False,), (True,)))

    def __call__(self, *primals: Any) -> Any:
        """Calls the user's function. JAX calls this. Sets `result_selection`, unless the result is bare.

        Args:
            primals: the group of the differentiated leaves, or the bare primals.

        Returns:
            A pair of two leaf groups: the differentiated leaves of the result, and all others, which are auxiliary data
            for JAX. If the result is bare, a pair of the value, and the user's auxiliary data or None. If the function
            should return a pair and did not, its result unchanged.
        """
        call = self.call
        if self.is_bare:
            # JAX does not keep ties of bare arrays. Warn of these.
            report_tied_values(call.packed.tree, call.names, call.title, call.policy)
        result = self._call_user(*primals) if self.is_bare else self._call_user(self.bypassing_group, *primals)
        # Is it a pair of leaf groups, and not the bare result of the user's function?
        if type(result) is tuple and len(result) == 2 and type(result[0]) is LeafGroup:
            self.result_selection = result[0].selection
        return result

    def trace_static_floats(self, tangents: Sequence[Any]) -> None:
        """Turns static Python floats and complex numbers of the primals into traced leaves, if they have a tangent.

        In modules, and under Equinox's filters everywhere, a Python number is static. The vanilla transforms
        differentiate it if there is a tangent for it. Does nothing if no static number has a tangent.

        Args:
            tangents: the user's tangents of the primals. None in them stands for no tangent.
        """
        call = self.call
        tree = call.packed.tree
        tags = Tags()
        _, tangent_records, root = walk(tuple(tangents), tags, call.rules)
        # Walk primals and tangents together, and collect the records of the primals for which the tangents hold
        # anything but None. `pairs` yields the records at each path of both trees, and goes on below two nodes of one
        # class. For any other pair it asks the lambda, which accepts it. Whether the tangents fit is checked later.
        with_tangent: set[int] = set()
        for pair in pairs(as_tuple(tree), FlatDag(tangent_records, root), lambda i, j: True):
            if not isinstance(pair, Mismatch) and tags.objects[pair.right] is not None:
                with_tangent.add(pair.left)
        statics = {record: op for record in with_tangent if type(op := tree.records[record][0]) is Static}
        # `peek` returns the static value itself and not a copy.
        promoted = frozenset([record for record, op in statics.items() if _is_float(op.peek())])
        if promoted:
            # The repacking cuts no tie: each record is made from itself, and keeps its children. Only the promoted ones
            # change, into traced leaves.
            children_of = [children for _, children in tree.records]
            call.repack(Repacking(range(len(children_of)), children_of, promoted))
            self.bypassing_group, self.differentiated_group = call.packed.groups
            # This method is not called for bare primals, so the transform gets the leaf group.
            self.primals = (self.differentiated_group,)

    def build_result(self, differentiated_group: Any, bypassing_group: Any) -> tuple[Any, ...]:
        """Builds the result of the user's function from what the transform returned.

        Args:
            differentiated_group: leaf group of the differentiated leaves of the result, or the bare value.
            bypassing_group: leaf group of its other leaves, or the bare auxiliary data.

        Returns:
            A tuple of the value and, if the function returns any, the auxiliary data.
        """
        if type(differentiated_group) is not LeafGroup:
            return (differentiated_group, bypassing_group) if self.has_aux else (differentiated_group,)
        result = build_from_groups((differentiated_group, bypassing_group))
        return tuple(result) if self.has_aux else (result,)

    def pack_tangents(self, tangents: Sequence[Any]) -> tuple[Any, ...]:
        """Packs the user's tangents of the primals. Returns a tuple of one leaf group, or of the bare tangents."""
        if self.is_bare:
            return tuple(tangents)
        return (
            pack_like(
                self.differentiated_group.selection,
                tuple(tangents),
                "tangents",
                self.fit(are_cotangents=False),
                has_aux=False,
            ),
        )

    def build_tangent(self, tangent: Any) -> Any:
        """Builds the tangent of the function's value, as a tree in its shape, from what the transform returned."""
        if type(tangent) is not LeafGroup:
            return tangent
        # The group has the structure of the whole result. With auxiliary data, that is a pair.
        tree = tree_like_arguments((tangent,), is_gradient=False)
        return tree[0] if self.has_aux else tree

    def linear_map(self, function: Any, *, takes_cotangents: bool) -> Any:
        """Returns the linear function for the user, which takes and returns modules.

        If the result of the user's function is bare, its arguments are bare, too. Then JAX's linear function takes and
        returns what the user expects, and is returned as it is.

        Args:
            function: JAX's linear function, returned by the transform: a function of leaf groups or of bare trees.
            takes_cotangents: True if it maps cotangents of the value, False if it maps tangents of the primals.
        """
        # None: the result is bare.
        if self.result_selection is None:
            return function
        selection = self.result_selection if takes_cotangents else self.differentiated_group.selection
        return LinearMap(function, selection, self.has_aux, self.fit(are_cotangents=takes_cotangents), self.is_bare)

    def fit(self, *, are_cotangents: bool) -> Fit:
        """Returns the rules by which cotangents (`are_cotangents=True`) or tangents are fitted to leaves."""
        call = self.call
        return Fit(call.title, call.rules, are_cotangents, none_is_zero=is_of_equinox(call.transform))


def _is_float(value: Any) -> bool:
    """Returns True for a Python number that can be differentiated."""
    return type(value) in (float, complex)


def _suits_jax(tree: FlatDag) -> bool:
    """Returns True if JAX can take a tree as it is. JAX 0.10 does not recover from a tree too deep to flatten."""
    return not holds_modules(tree) and depth_of(tree.records) <= _MAX_DEPTH_FOR_JAX


# What JAX traces in place of the user's function ----------------------------------------------------------------------


def _call_without_aux(trace: FunctionTrace, *operands: Any) -> Any:
    """Calls a function without auxiliary data.

    Returns:
        Two leaf groups of its value, as `_split_result` returns them. If the arguments and the value are bare, the
        value and None.
    """
    result, is_bare = _call_users_function(trace, operands)
    tree = trace.flatten(result)
    # If the arguments are bare, no policy or filter speaks against a bare result. The whole result is the value.
    return (result, None) if is_bare and _suits_jax(tree) else _split_result(tree, tree)


def _call_with_aux(trace: FunctionTrace, *operands: Any) -> Any:
    """Calls a function that returns a value and auxiliary data.

    Returns:
        Two leaf groups of the pair, as `_split_result` returns them. If the arguments and the pair are bare, the pair
        itself. If the function returned no pair, its result unchanged.
    """
    result, is_bare = _call_users_function(trace, operands)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        # JAX refuses it.
        return result
    tree = trace.flatten(tuple(result))
    return result if is_bare and _suits_jax(tree) else _split_result(tree, tree.child(0))


def _call_users_function(trace: FunctionTrace, operands: Sequence[Any]) -> tuple[Any, bool]:
    """Calls the user's function with arguments built from leaf groups, or with the bare arguments.

    Args:
        trace: the trace.
        operands: all leaf groups of the arguments, or the bare arguments.

    Returns:
        The result, and True if the arguments were bare.
    """
    if operands and type(operands[0]) is LeafGroup:
        return trace.call(*operands), False
    return trace.function(*operands), True


def _split_result(tree: FlatDag, value: FlatDag) -> tuple[LeafGroup, LeafGroup]:
    """Packs a result into two leaf groups: the differentiated leaves, and all others.

    Both groups have the structure of the whole result. A leaf is differentiated if it is in the value, and if it is
    inexact or outside modules.

    Args:
        tree: the result.
        value: the value in the result: all of it, or the first entry of the pair.
    """
    group = single_group_of_tree(tree)
    # The records to which plain containers alone lead from the root of the value.
    outside = tree.below(value.root).outside
    leaves_of_value = [number for number in tree.leaf_numbers if number in value.reached]
    differentiated = {number for number in leaves_of_value if number in outside or is_inexact(tree.objects[number])}

    def part(is_differentiated: bool) -> LeafGroup:
        """Makes the group of the differentiated leaves (`is_differentiated=True`), or of all others."""
        # A leaf has a number among the records, and a place among the leaves. A selection has places.
        numbers = enumerate(tree.leaf_numbers)
        places = tuple([place for place, number in numbers if (number in differentiated) is is_differentiated])
        return LeafGroup([group.leaves[place] for place in places], LeafSelection(group.structure, places))

    return part(True), part(False)


# The functions that the transforms return -----------------------------------------------------------------------------


class LinearMap:
    """The function returned by `jax.vjp`, `jax.linearize` and `jax.linear_transpose`, for modules with their ties.

    It is a pytree, as JAX's own functions are, and can be passed through `jax.jit`.

    Args:
        function: JAX's function of leaf groups.
        selection: selection of the leaf group that `function` takes.
        has_aux: True if the user's function returns a pair of a value and auxiliary data. The structure of its result
            is that of the pair, and cotangents and tangents belong to the value.
        fit: how an argument is fitted to that leaf group. `fit.are_cotangents` is True if the function maps cotangents,
            as those of `jax.vjp` and `jax.linear_transpose` do, and False if it maps tangents (`jax.linearize`).
        is_bare: True if the primals are bare. Then their tangents and cotangents are bare, too.
    """

    __slots__ = ("__weakref__", "fit", "function", "has_aux", "is_bare", "selection")

    def __init__(self, function: Any, selection: LeafSelection, has_aux: bool, fit: Fit, is_bare: bool) -> None:
        self.function = function
        self.selection = selection
        self.has_aux = has_aux
        self.fit = fit
        self.is_bare = is_bare

    def __call__(self, /, *args: Any) -> Any:
        """Pulls a cotangent of the value back to the primals, or pushes tangents of the primals forward to the value.

        Args:
            args: the cotangent, or a tangent for each primal.

        Returns:
            A tuple with a cotangent for each primal, or the tangent of the value.
        """
        # Cotangents.
        if self.fit.are_cotangents:
            if len(args) != 1:
                # JAX itself says best what is wrong.
                return self.function(*args)
            group = pack_like(self.selection, args[0], "cotangent", self.fit, has_aux=self.has_aux)
            result = self.function(group)
            if self.is_bare:
                return result
            # With newer JAX, a function made by `with_logs` returns a pair of the cotangents and the logs.
            cotangent_groups, *logs = result if getattr(self.function, "want_logs", False) else (result,)
            cotangents = tuple(tree_like_arguments(cotangent_groups).args)
            return (cotangents, *logs) if logs else cotangents
        # Tangents.
        tangents_in = args if self.is_bare else (pack_like(self.selection, args, "tangents", self.fit, has_aux=False),)
        tangents_out = tree_like_arguments((self.function(*tangents_in),), is_gradient=False)
        return tangents_out[0] if self.has_aux else tangents_out

    @property
    def with_logs(self) -> "LinearMap":
        """The function that `vjp` returned, with another result: a pair of the cotangents and what rules logged.

        Raises:
            AttributeError: if this version of JAX has no `with_logs`.
        """
        return LinearMap(self.function.with_logs, self.selection, self.has_aux, self.fit, self.is_bare)

    def __repr__(self) -> str:
        return f"<function returned by {self.fit.title}, identities preserved>"


# The child is JAX's function, itself a pytree with the arrays that it holds. The rest is aux data.
jtu.register_pytree_node(
    LinearMap,
    lambda item: ((item.function,), (item.selection, item.has_aux, item.fit, item.is_bare)),
    lambda aux, children: LinearMap(children[0], *aux),
)


def pack_like(selection: LeafSelection, value_tree: Any, name: str, fit: Fit, *, has_aux: bool) -> LeafGroup:
    """Packs a user's tangents or cotangents into the leaf group that the transform takes.

    Args:
        selection: selection of the leaf group.
        value_tree: tangents in the shape of the arguments, or a cotangent in the shape of the result.
        name: name of `value_tree` in errors.
        fit: how `value_tree` is fitted. `fit.are_cotangents` is True for a cotangent, False for tangents.
        has_aux: True if the result is a pair, and `value_tree` has the shape of its first entry. Not read for tangents.

    Raises:
        SharingMismatchError: if `value_tree` does not fit.
    """
    structure = selection.structure
    # Places of the differentiated leaves among all leaves. `numbers` is None if all are selected.
    places = set(range(structure.num_leaves) if selection.numbers is None else selection.numbers)
    # `fit_to_leaves` looks at the types only: a float stands for a differentiated leaf, an integer for any other.
    types = [0.0 if place in places else 0 for place in range(structure.num_leaves)]
    tree = FlatDag.of_leaves(structure, types)
    # Tangents have the shape of the positional arguments. A cotangent has that of the value.
    tree = as_tuple(tree) if not fit.are_cotangents else tree.child(0) if has_aux else tree
    value_of = fit_to_leaves(tree, value_tree, name, fit)
    leaves = [value_of[number] for place, number in enumerate(structure.leaf_numbers) if place in places]
    return LeafGroup(leaves, selection)


VJP = TakingOperands(vjp, writes=False, calls_each_time=True)
JVP = TakingOperands(jvp, writes=False, calls_each_time=True)
LINEARIZE = TakingOperands(linearize, writes=False, calls_each_time=True)
LINEAR_TRANSPOSE = TakingOperands(linear_transpose, writes=False)
FILTER_JVP = TakingOperands(filter_jvp, writes=False, calls_each_time=True)
