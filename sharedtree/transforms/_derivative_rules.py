"""`jax.custom_vjp`, `jax.custom_jvp`, `jax.custom_gradient`, `custom_vmap`: functions with rules for their derivatives.

The function and its rules take and return modules with their ties. JAX sees leaf groups in place of these:

    f(Pair(w, w), x)                  JAX sees    f(LeafGroup([w, x]))
    fwd(Pair(w, w), x) → y, Net(a)                fwd(LeafGroup([w, x])) → y, LeafGroup([a])
    bwd(Net(a), dy) → Pair(d, e), dx              bwd(LeafGroup([a]), dy) → (LeafGroup([d + e, dx]),)

Arguments in `nondiff_argnums` are called *static* here: JAX passes them to the function and to the rules, and does not
trace them. All other arguments are the *operands*. They are one leaf group for JAX.

A *vanilla object* is what the vanilla transform returns, for example a `jax.custom_vjp` object. JAX may call a rule
long after the call to which it belongs, and while it differentiates another rule. So each call makes a vanilla object
of its own. Its rules know the structures of this call and hold none of its arrays.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..core._call_arguments import Arguments, Position
from ..core._errors import SharingMismatchError
from ..core._pack_and_unpack import Tags, flat_dag_of, pack, unpack
from ..core._prefix_trees import Label, labels
from ..core._printing import listed
from ..core._structure import FlatDag, Structure
from ..libraries._equinox import name_of
from ..ties._leaf_notes import note_tied, noting_whole
from ..ties._list_ties import is_inexact
from ..ties._policy_and_context import Policy
from ._adapter_names import VANILLA_CUSTOM_JVP, VANILLA_CUSTOM_VJP
from ._argument_names import Names
from ._caller_side import Call, build_from_groups
from ._function_and_options import in_code
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace, Terms, receive
from ._function_transform import FunctionTransform
from ._joining_trees import RESULT_KEY, Sides, holds_modules, join
from ._leaf_groups import LeafGroup, single_group, tangents_of
from ._option_lists import lists_options_of, public_name
from ._tangents import Fit, as_tuple, fit_to_leaves
from .checks._ties_lost_in_calls import report_lost_ties, ties_lost_between


class RuleTransform(FunctionTransform):
    """A function with rules, with identities preserved. Its methods, such as `defvjp`, set the rules later.

    `_vanilla` is the vanilla object with the user's own function and rules. It checks options and rules, and raises
    JAX's own errors. For each call, `make_vanilla` makes another vanilla object, whose function and rules take leaf
    groups. A subclass implements `make_vanilla` for one transform.
    """

    takes_rules = True
    rules_given: Any = None
    """The user's arguments of the method that sets the rules, such as `defvjp`. None until the method is called."""
    unsupported_methods: frozenset[str] = frozenset()
    """Methods of the vanilla object that set rules of other forms. An adapter would have to translate these forms."""
    unsupported_options: Sequence[str] = ()
    """Options of the transform, in newer JAX, under which rules have such forms."""
    packs_statics = False
    """True if JAX gets each argument in `nondiff_argnums` in a leaf group of its own, and not as it is."""

    # The transform cannot write changes back (see the base).
    writes = False

    # Attributes of the copy of this object that belongs to one call, see `_for_one_call`.
    _operands: FlatDag
    """The operands, with shapes and dtypes in place of their arrays."""
    _inner_function: Inner | None = None
    """The function that JAX calls in place of the user's, for errors. None under transforms that do not need it."""
    _result_structure: Structure | None
    """The structure of the function's result. None until JAX has called the function itself, and not a rule."""

    # The object that the user has ------------------------------------------------------------------------------------

    def check_options(self) -> None:
        """Applies the transform, which refuses wrong options. Called without rules, it raises JAX's own error.

        Raises:
            TypeError: if one of `unsupported_options` is set.
        """
        # This comes first, so that JAX itself refuses options that it does not know.
        self._vanilla = self.transform(self.function, **self.options)
        for name in self.unsupported_options:
            option = self.options.get(name)
            if option:
                raise self.unsupported_rules_error(f"the rules that it takes with `{name}`", f", {name}={option!r}")
        # Under `jax_custom_vjp3`, JAX 0.10 returns an object of another class, with another name for the attribute.
        static = getattr(self._vanilla, "nondiff_argnums", None) or getattr(self._vanilla, "static_argnums", ())
        self._nondiff_positions = tuple(sorted(static))

    def __getattr__(self, name: str) -> Any:
        """Returns a method of the vanilla object whose name begins with `def`, if this class has none of that name.

        The method sets rules on the user's vanilla object alone. `call_in_python` turns to that object if no other
        rules are set. There the rules get no modules, but what vanilla JAX passes to them.

        Raises:
            TypeError: if the method is one of `unsupported_methods`.
            AttributeError: if the name does not begin with `def`, or the vanilla object has no such method.
        """
        # While this object is made or copied, `_vanilla` may be missing. Then `self._vanilla` below would call this
        # method again, without end.
        if not name.startswith("def") or "_vanilla" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        # First, for the AttributeError of an older JAX without the method.
        method = getattr(self._vanilla, name)
        if name in self.unsupported_methods:
            raise self.unsupported_rules_error(f"the rules that `{name}` sets")
        return method

    def unsupported_rules_error(self, rules: str, option: str = "") -> TypeError:
        """Makes the error for rules whose arguments or results have a form that this class does not translate.

        Args:
            rules: the rules, in words: "the rules that `defremat` sets".
            option: the option that asks for such rules, as code to put after the function: ", with_logs=True". Empty if
                a method sets the rules.
        """
        vanilla = public_name(self.transform) or "jax.custom_vjp"
        return TypeError(
            f"`{self.transform_name}` cannot keep ties in {rules}.\n"
            "Their arguments or results are not those of the usual rules. Set them on this function of a "
            "`sharedtree.Dag`, and call it with `sharedtree.Dag(model)` (docs/transforms.md, “Transforms that need no "
            "adapter”):\n"
            f"    f_of_dag = {vanilla}(lambda dag: f(dag.tree){option})"
        )

    def __reduce__(self) -> Any:
        """Pickles the function and the options as the base does, and the rules as state."""
        reduced = super().__reduce__()
        return reduced if isinstance(reduced, str) else (*reduced, self._rules_to_copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the rules too."""
        duplicate = super().__deepcopy__(memo)
        # The base may return this very object, which has its rules.
        if duplicate is not self:
            # A rule may refer to this object. The caller keeps it alive, so its `id` is valid.
            memo[id(self)] = duplicate
            duplicate.__dict__.update(copy.deepcopy(self._rules_to_copy(), memo))
        return duplicate

    def _rules_to_copy(self) -> dict[str, Any]:
        """Returns the attribute with the rules by its name. Empty if no rules were set on this object."""
        return {name: value for name, value in self.__dict__.items() if name == "rules_given"}

    # One call -------------------------------------------------------------------------------------------------------

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Makes a vanilla object for this call, calls it with leaf groups, and builds the result.

        If no rules were set, calls the user's vanilla object. JAX then raises its own error.

        Raises:
            ValueError: if the policy is in place. Rules do not say how the changes of a function are differentiated.
        """
        if self.rules_given is None:
            return self._vanilla(*args, **kwargs)
        if policy.in_place:
            raise ValueError(
                f"`{self.transform_name}` does not support `in_place=True`: it writes nothing back.\n"
                "Its rules differentiate the result of the function, not its changes. Let `f` return the objects that "
                "it changes, as `return result, model`, and switch `in_place` off:\n"
                f"    f = {in_code(self.transform_name, 'in_place=False', 'f')}"
            )
        args, kwargs = self._bind_by_position(tuple(args), kwargs)
        with self.enter(args, kwargs, policy) as call:
            transform_of_call = self._for_one_call(call)
            terms = transform_of_call.terms(policy, self._shared.history)
            vanilla = transform_of_call.make_vanilla(terms, self.function)
            statics: Sequence[Any] = call.statics
            if self.packs_statics:
                rules = self.rules(Policy())
                statics = [single_group(*pack(value, Tags(), rules)) for value in statics]
            return build_from_groups((vanilla(*call.groups, *statics),))

    def _bind_by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turns keyword arguments and defaults into positional arguments, as JAX does for rules.

        If the function has no signature, or the arguments do not fit it, returns them unchanged. If an argument is
        missing, or can be passed by keyword only, calls the vanilla object first, which raises JAX's own error.

        Returns:
            Positional arguments and keyword arguments.
        """
        try:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            # `bind` writes "missing a required argument: 'x'".
            if str(error).startswith("missing"):
                # Called for JAX's own error.
                self._vanilla(*args, **kwargs)
            return args, kwargs
        bound.apply_defaults()
        if kwargs.keys() & bound.kwargs.keys():
            # `bound.kwargs` has the arguments that can be passed by keyword only. JAX refuses them.
            self._vanilla(*args, **kwargs)
            return args, kwargs
        return bound.args, {}

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions in `nondiff_argnums`, the same for each call. JAX does not trace these arguments."""
        return self._nondiff_positions

    @property
    def _nondiff_positions_for_jax(self) -> tuple[int, ...]:
        """The option `nondiff_argnums` of the vanilla object of a call.

        This object takes the leaf group of all operands first, at position 0, and then the static arguments.
        """
        return tuple(range(1, 1 + len(self._nondiff_positions)))

    def _for_one_call(self, call: Call) -> Self:
        """Makes the copy of this object to which the rules of one call refer. It holds no array of the call."""
        copy_for_call = self._without_function()
        types = [_abstract_leaf(leaf) for leaf in call.tree.leaves.values()]
        copy_for_call._operands = FlatDag.of_leaves(call.tree.structure, types)  # pyright: ignore[reportArgumentType]
        copy_for_call._result_structure = None
        return copy_for_call

    def make_vanilla(self, terms: Terms, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the vanilla object for one call. It takes leaf groups, and so do its rules.

        Called on the copy that `_for_one_call` makes.

        Args:
            terms: facts that all traces of the function and its rules have in common.
            function: the user's function. The copy itself does not refer to it.
        """
        raise NotImplementedError

    # What JAX calls: the function and the rules, on leaf groups -------------------------------------------------------

    def call_inside(self, trace: FunctionTrace, *args: Any) -> Any:
        """Calls the user's function for JAX. Returns the leaf group of its result.

        Keeps the structure of the result in `_result_structure`. Warns of ties that the function lost.

        Args:
            trace: the trace of the function.
            args: the leaf group of the operands, and static arguments.
        """
        result = self.call_with_groups(trace, args)
        trace.check(result)
        packed = trace.pack(result)
        self._result_structure = packed.structure
        return packed

    def call_and_pack_pair(
        self, trace: FunctionTrace, args: Sequence[Any], pack_second: Callable[[Any], Any] = lambda second: second
    ) -> Any:
        """Calls a rule that returns a pair: the function's result, and something else.

        Warns of ties lost in the rule.

        Args:
            trace: the trace of the rule.
            args: the leaf group of the operands, and static arguments.
            pack_second: packs the second entry of the pair for JAX. By default it is returned as it is.

        Returns:
            The leaf group of the function's result, and what `pack_second` returned. If the rule returned no pair, its
            result unchanged, for JAX to refuse.

        Raises:
            SharingMismatchError: if the result has another structure than that of the function.
        """
        pair = self.call_with_groups(trace, args, returns_pair=True)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            return pair
        result, second = pair
        trace.check(result)
        return self._repack_like_function(trace.pack(result), trace.function), pack_second(second)

    def _repack_like_function(self, packed: LeafGroup, rule: Callable[..., Any]) -> LeafGroup:
        """Returns the result in a rule as a leaf group with the structure of the function's own result.

        JAX compares structures as aux data. The two structures may differ, and the results fit even so: a structure
        also holds notes on leaves, such as that a tie was undone on purpose. If JAX has not called the function,
        returns `packed` itself.

        Args:
            packed: the function's result as the rule returned it.
            rule: the rule, for errors.

        Raises:
            SharingMismatchError: if the two differ in shape, static values or ties.
        """
        returned = self._result_structure
        # JAX may run a rule without the function. Then there is nothing to compare.
        if returned is None or returned is packed.structure:
            return packed
        # Words for the two sides in errors. The second argument of `name_of` is printed if the first has no name.
        of_function, of_rule = (f"in what `{name}` returns" for name in (name_of(self, self), name_of(rule, rule)))
        tree_of_function = FlatDag.without_objects(returned)
        tree_of_rule = FlatDag.without_objects(packed.structure)
        path = (RESULT_KEY,)
        # The two trees must have the same ties. An exact join refuses each tie that only its first tree has. Of the
        # ties that only its second tree has, it refuses those of modules and references alone. So there are two joins,
        # and each tree is the first one in one of them. They are called for their errors alone.
        join(tree_of_function, tree_of_rule, Sides(self.transform_name, of_function, of_rule), path, exact=True)
        join(tree_of_rule, tree_of_function, Sides(self.transform_name, of_rule, of_function), path, exact=True)
        return single_group(packed.leaves, returned)

    def call_with_groups(self, trace: FunctionTrace, args: Sequence[Any], *, returns_pair: bool = False) -> Any:
        """Calls the user's function or rule with arguments built from leaf groups. Returns the result.

        Args:
            trace: the trace of the function or the rule.
            args: the leaf group of the operands, and static arguments.
            returns_pair: True for a rule that returns a pair, of which only the first entry reaches the caller.
        """
        group, *statics = args
        received = receive([group], [build_tree(static) for static in statics] if self.packs_statics else statics)
        arguments = received.arguments
        return trace.call_with(received, arguments.args, arguments.kwargs, returns_pair=returns_pair)

    # Cotangents -----------------------------------------------------------------------------------------------------

    def call_cotangent_rule(self, trace: FunctionTrace, *args: Any, may_be_single: bool = False) -> Any:
        """Calls a rule for cotangents, and fits its result to the leaf group of the operands.

        Args:
            trace: the trace of the rule: (*static arguments, residuals, cotangent of the result) → cotangents of the
                operands. Under `jax.custom_gradient`, the rule takes the cotangent alone.
            args: arguments of the rule, with modules and not leaf groups.
            may_be_single: True if the rule may return the cotangent of a single operand by itself, without a tuple.

        Returns:
            A tuple of one leaf group with the cotangents of all operands. For JAX, the vanilla object has one operand:
            the leaf group.

        Raises:
            SharingMismatchError: if there are not as many cotangents as operands; if one differs from its operand in
                shape; or if the rule returned one object at several paths of a tie, and it is not known whether the
                object is the whole sum or the share of each path.
        """
        rule, policy = trace.function, trace.terms.policy
        operands = as_tuple(self._operands)
        num_operands = len(operands.records[operands.root][1])
        # 1. Call the rule. Whatever knows that an array is the whole sum over its paths adds it to `whole_sums`:
        # gradients, pullbacks and `retie` do, inside the rule.
        with noting_whole() as whole_sums:
            received = flat_dag_of(Arguments(Names(rule).of(len(args)), args, {}), self.rules(policy))
            # The last argument is the cotangent of the result.
            cotangent = received.child(len(args) - 1)
            leaves = [received.leaves[number] for number in cotangent.leaf_numbers]
            # The cotangent of a tied leaf of the result is a whole sum, too. The rule may pass it on.
            note_tied(cotangent, leaves)
            result = rule(*args)
        # 2. Refuse a wrong number of cotangents.
        if may_be_single and num_operands == 1 and not isinstance(result, (tuple, list)):
            result = (result,)
        if not isinstance(result, (tuple, list)) or len(result) != num_operands:
            self._raise_jax_error_for_cotangents(rule, result)
            is_sequence = isinstance(result, (tuple, list))
            cotangents = "(cotangent,)" if num_operands == 1 else "tuple(cotangents)"
            description = f"{len(result)} cotangents" if is_sequence else f"a `{type(result).__name__}`"
            raise SharingMismatchError(
                f"The rule `{name_of(rule, rule)}` returned {description}, but `{name_of(self, self)}` has "
                f"{num_operands} differentiated argument{'s' if num_operands != 1 else ''}.\n"
                "Return a tuple with one cotangent for each. None stands for a cotangent of zeros:\n"
                f"    return {cotangents}"
            )
        # 3. Add up the cotangents of each leaf. If they do not fit, JAX raises its own error where it has one.
        fit = self.fit(policy, whole_sums=whole_sums, are_cotangents=True)
        try:
            leaves = list(fit_to_leaves(operands, tuple(result), "cotangents", fit).values())
        except SharingMismatchError:
            self._raise_jax_error_for_cotangents(rule, result)
            raise
        pairs = zip(leaves, operands.leaves.values(), strict=True)
        if any(np.shape(leaf) != np.shape(operand) for leaf, operand in pairs):
            self._raise_jax_error_for_cotangents(rule, result)
        # 4. Warn of lost ties. A rule may take the whole cotangent of a tied leaf and compute with it path by
        # path. Step 3 has added up the arrays that it returned, though each of them may be the whole sum.
        lost = ties_lost_between(cotangent, flat_dag_of(tuple(result), self.rules(policy)), policy)
        report_lost_ties((), lost, policy, Names(rule))
        return (single_group(leaves, self._operands.structure),)  # pyright: ignore[reportArgumentType]

    def fit(self, policy: Policy, *, whole_sums: Any = None, are_cotangents: bool = False) -> Fit:
        """Returns the rules by which the tangents or cotangents that a derivative rule returned are fitted to leaves.

        Args:
            policy: what carries identity.
            whole_sums: arrays known to be the whole sum over their paths. None for tangents.
            are_cotangents: True for cotangents, False for tangents.
        """
        # `convention="jax"`: the traced leaves are those that JAX traces, also in an Equinox module.
        rules = self.rules(policy)._replace(convention="jax")
        return Fit(
            self.transform_name, rules, are_cotangents, none_is_zero=True, is_of_rule=True, whole_sums=whole_sums
        )

    def _raise_jax_error_for_cotangents(self, rule: Callable[..., Any], result: Any) -> None:
        """Lets JAX raise its own error for cotangents that do not fit. Returns if JAX has none.

        For that, makes a dummy function whose dummy rule returns the same cotangents, and differentiates it. Does
        nothing if the transform is not `jax.custom_vjp` (then there is no `_inner_function`), or if an operand holds a
        module: JAX's message would show it as a tree of leaves.

        Args:
            rule: the user's rule.
            result: what the rule returned.

        Raises:
            TypeError, ValueError: JAX's own errors.
        """
        if self._inner_function is None or holds_modules(self._operands):
            return
        # JAX would trace the user's function again, or even call it (`jax_custom_vjp3`). So a dummy with its name and
        # signature takes its place. Another one takes the place of the rule and returns the same result.
        terms = self._inner_function.terms
        vanilla = VANILLA_CUSTOM_VJP(dummy_returning(self._inner_function.function, 0.0, terms))
        vanilla.defvjp(lambda *args: (0.0, None), dummy_returning(rule, result, terms))
        arguments = unpack(self._operands.structure, list(self._operands.leaves.values()))
        # The arguments as the caller's side packed them. A static argument has None as its name there, and is left out.
        operands = [arg for name, arg in zip(arguments.names, arguments.args, strict=True) if name is not None]
        jax.eval_shape(lambda *args: jax.vjp(vanilla, *args)[1](0.0), *operands)


# The transforms: arguments and results of the rules of each ----------------------------------------------------------


class CustomVjpTransform(RuleTransform):
    """A function under `jax.custom_vjp`, with identities preserved."""

    unsupported_methods = frozenset({"defvjp_with_logs", "defvjp_with_accums", "defremat", "defremat_with_logs"})

    @lists_options_of(VANILLA_CUSTOM_VJP.defvjp)
    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any) -> None:
        """Sets the rules, as `jax.custom_vjp.defvjp` does.

        Args:
            fwd: the arguments → (the result, residuals). Both may hold modules, and keep their ties.
            bwd: (residuals, cotangent of the result) → a cotangent for each argument, in the shape of the argument. It
                may be None.
            positional: options of `jax.custom_vjp.defvjp`, by position.
            options: options of `jax.custom_vjp.defvjp`, by name.
        """
        # The user's vanilla object checks the rules and options.
        self._vanilla.defvjp(fwd, bwd, *positional, **options)
        self.rules_given = fwd, bwd, positional, options

    def make_vanilla(self, terms: Terms, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the object of `jax.custom_vjp` for one call, with both of its rules on leaf groups."""
        fwd, bwd, positional, options = self.rules_given
        transform_options = (
            {**self.options, "nondiff_argnums": self._nondiff_positions_for_jax}
            if self._nondiff_positions
            else self.options
        )
        self._inner_function = Inner(function, terms, self.call_inside)
        vanilla = self.transform(self._inner_function, **transform_options)
        inner_fwd = Inner(fwd, terms, self._call_fwd)
        inner_bwd = Inner(bwd, terms, self._call_bwd)
        vanilla.defvjp(inner_fwd, inner_bwd, *positional, **options)
        return vanilla

    def _call_fwd(self, trace: FunctionTrace, *args: Any) -> Any:
        """Calls `fwd` for JAX. Returns the leaf groups of the result and of the residuals."""
        return self.call_and_pack_pair(trace, args, trace.pack)

    def _call_bwd(self, trace: FunctionTrace, *args: Any) -> Any:
        """Calls `bwd` for JAX, which passes static arguments and the leaf groups of the residuals and of the cotangent.

        Returns a tuple of one leaf group: the cotangents of the operands.
        """
        *static, residuals, cotangent = args
        return self.call_cotangent_rule(trace, *static, build_tree(residuals), tangents_of(cotangent))


class CustomGradientTransform(RuleTransform):
    """A function under `jax.custom_gradient`, with identities preserved.

    The function returns its rule beside its result, so no method sets rules.
    """

    # Not None, which would say that the rules have not been set yet.
    rules_given = ()
    unsupported_options = ("with_logs", "remat", "with_accums")

    def make_vanilla(self, terms: Terms, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function under `jax.custom_gradient`. It returns its rule with each result."""
        return self.transform(Inner(function, terms, self._call_function_with_rule), **self.options)

    def _call_function_with_rule(self, trace: FunctionTrace, *args: Any) -> Any:
        """Calls the user's function for JAX. Returns the leaf group of its result, and a rule on leaf groups."""
        return self.call_and_pack_pair(trace, args, lambda rule: Inner(rule, trace.terms, self._call_gradient_rule))

    def _call_gradient_rule(self, trace: FunctionTrace, *args: Any) -> Any:
        """Calls the user's rule for JAX, with a tree in the place of the leaf group of the cotangent.

        Returns a tuple of one leaf group: the cotangents of the operands.
        """
        # JAX lets rules of this transform return the cotangent of a single operand without a tuple.
        return self.call_cotangent_rule(trace, *map(tangents_of, args), may_be_single=True)


class Summands(list[Any]):
    """Tangents of one result, one from each rule that `defjvps` sets. Their sum is the tangent of the result."""


class CustomJvpTransform(RuleTransform):
    """A function under `jax.custom_jvp`, with identities preserved."""

    # To stop the gradient, `jax.custom_jvp` flattens the arguments in `nondiff_argnums` and builds them again. Without
    # leaf groups, they would lose their ties.
    packs_statics = True

    @lists_options_of(VANILLA_CUSTOM_JVP.defjvp)
    def defjvp(self, jvp: Callable[..., Any], *positional: Any, **options: Any) -> Callable[..., Any]:
        """Sets the rule, as `jax.custom_jvp.defjvp` does.

        Args:
            jvp: (tuple of arguments, tuple of tangents in their shapes) → (the result, a tangent in its shape).
            positional: options of `jax.custom_jvp.defjvp`, by position.
            options: options of `jax.custom_jvp.defjvp`, by name.

        Returns:
            The rule.
        """
        self._vanilla.defjvp(jvp, *positional, **options)
        self.rules_given = jvp, positional, options
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Sets a rule for each argument, as `jax.custom_jvp.defjvps` does.

        Args:
            jvps: for each argument, (its tangent, the result, *arguments) → a tangent of the result. None for an
                argument on which the result is treated as not depending: its tangent adds nothing.
        """
        # Raises JAX's own error, for example if there are `nondiff_argnums`.
        self._vanilla.defjvps(*jvps)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            """Calls the function and all rules. Returns the result, and the tangents, which `_pack_tangent` adds up."""
            result = self(*primals)
            # JAX allows fewer rules than arguments.
            pairs = zip(jvps, tangents, strict=False)
            return result, Summands([rule(tangent, result, *primals) for rule, tangent in pairs if rule is not None])

        self.rules_given = jvp, (), {}

    def make_vanilla(self, terms: Terms, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the object of `jax.custom_jvp` for one call, with its rule on leaf groups."""
        jvp, positional, options = self.rules_given
        transform_options = (
            {**self.options, "nondiff_argnums": self._nondiff_positions_for_jax}
            if self._nondiff_positions
            else self.options
        )
        self._inner_function = Inner(function, terms, self.call_inside)
        vanilla = self.transform(self._inner_function, **transform_options)
        vanilla.defjvp(Inner(jvp, terms, self._call_jvp_rule), *positional, **options)
        return vanilla

    def _call_jvp_rule(self, trace: FunctionTrace, *args: Any) -> Any:
        """Calls the user's rule for JAX.

        JAX passes the static arguments, a tuple with the leaf group of all primals, and a tuple with the leaf group of
        all tangents.

        Returns:
            The leaf group of the result, and that of its tangent. If the rule returned no pair, its result unchanged.

        Raises:
            SharingMismatchError: if the result differs from that of the function, or the tangent from the result.
        """
        jvp = trace.function
        *static, (primal_group,), (tangent_group,) = args
        # One entry for each argument of the function. The entries of static arguments are skipped below.
        all_tangents = tangents_of(tangent_group, is_gradient=False).args

        # `call_and_pack_pair` calls this with the arguments of the function, in their order. The user's rule gets the
        # static ones first, and then one tuple of all others.
        def rule(*args: Any) -> Any:
            """Calls the user's rule with static arguments first, as JAX does."""
            statics = [args[i] for i in self._nondiff_positions]
            primals = tuple([arg for i, arg in enumerate(args) if i not in self._nondiff_positions])
            tangents = tuple([arg for i, arg in enumerate(all_tangents) if i not in self._nondiff_positions])
            return jvp(*statics, primals, tangents)

        # The tangent is packed below, when the structure of the result is known.
        packed = self.call_and_pack_pair(FunctionTrace(trace.terms, rule), (primal_group, *static))
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            # The rule returned no pair. JAX refuses its result, with its own error.
            return packed
        result, tangent_out = packed
        if type(tangent_out) is not Summands:
            self._raise_jax_error_for_tangent(jvp, result, tangent_out)
        return result, self._pack_tangent(trace.terms.policy, result, tangent_out)

    def _raise_jax_error_for_tangent(self, jvp: Callable[..., Any], result: LeafGroup, tangent: Any) -> None:
        """Lets JAX raise its own error if the tangent has another structure than the result. Returns if JAX has none.

        For that, makes a dummy function that returns the same value, with a dummy rule that returns the value and the
        tangent, and differentiates it. Does nothing if the result holds a module: JAX's message would show it as a tree
        of leaves.

        Args:
            jvp: the user's rule.
            result: the leaf group of the result.
            tangent: the tangent that the rule returned.

        Raises:
            TypeError: JAX's own error.
        """
        # `make_vanilla` has set `_inner_function`, so it is None for type checkers alone.
        if self._inner_function is None or holds_modules(FlatDag.of_leaves(result.structure, result.leaves)):
            return
        value = build_tree(result)
        if jtu.tree_structure(tangent) != jtu.tree_structure(value):
            # Dummies with the names and signatures of the user's function and rule.
            terms = self._inner_function.terms
            vanilla = VANILLA_CUSTOM_JVP(dummy_returning(self._inner_function.function, value, terms))
            vanilla.defjvp(dummy_returning(jvp, (value, tangent), terms))
            jax.eval_shape(lambda: jax.jvp(vanilla, (0.0,), (0.0,)))

    def _pack_tangent(self, policy: Policy, result: LeafGroup, tangent: Any) -> LeafGroup:
        """Packs a tangent of the result, or the sum of several, like the result. Returns the leaf group.

        Args:
            policy: what carries identity.
            result: the leaf group of the result.
            tangent: a tangent in the shape of the result, or the `Summands` of one.
        """
        tree = FlatDag.of_leaves(result.structure, result.leaves)
        fit = self.fit(policy)
        total: list[Any] = []
        # If all rules of `defjvps` are None, there is no summand, and the tangent is zero: None stands for it.
        for summand in (tangent or [None]) if type(tangent) is Summands else [tangent]:
            pairs = zip(result.leaves, fit_to_leaves(tree, summand, "tangent", fit).values(), strict=True)
            leaves = [_fill_in_zeros(leaf, tangent_of_leaf) for leaf, tangent_of_leaf in pairs]
            if total:
                total = [_add_tangents(*triple) for triple in zip(result.leaves, total, leaves, strict=True)]
            else:
                total = leaves
        return LeafGroup(total, result.selection)


class CustomVmapTransform(RuleTransform):
    """A function under `jax.custom_batching.custom_vmap`, with identities preserved."""

    def def_vmap(self, vmap_rule: Callable[..., Any]) -> Callable[..., Any]:
        """Sets the rule, as `jax.custom_batching.custom_vmap.def_vmap` does.

        Args:
            vmap_rule: (size of the axis, list with a tree of booleans for each argument, *arguments) → (the result, a
                tree of booleans with the structure of the result). True marks a leaf that has the axis.

        Returns:
            The rule.
        """
        self._vanilla.def_vmap(vmap_rule)
        self.rules_given = vmap_rule
        return vmap_rule

    def make_vanilla(self, terms: Terms, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the object of `custom_vmap` for one call, with its rule on leaf groups."""
        vmap_rule = self.rules_given
        vanilla = self.transform(Inner(function, terms, self.call_inside), **self.options)
        vanilla.def_vmap(Inner(vmap_rule, terms, self._call_vmap_rule))
        return vanilla

    def _call_vmap_rule(self, trace: FunctionTrace, size: int, in_batched: Any, group: LeafGroup) -> Any:
        """Calls the user's rule for JAX.

        Args:
            trace: the trace of the rule.
            size: the size of the axis.
            in_batched: a list with a single entry: a leaf group with a boolean for each leaf of `group`.
            group: the leaf group of the operands.

        Returns:
            The leaf group of the result, and a leaf group of booleans. If the rule returned no pair, its result
            unchanged.

        Raises:
            SharingMismatchError: if the result differs from that of the function, or if the paths of a tied leaf have
                different booleans.
        """
        in_batched_trees = list(build_tree(in_batched[0]).args)

        def rule_of_arguments(*args: Any) -> Any:
            """Takes the arguments of the function, as `call_and_pack_pair` passes them, and calls the user's rule."""
            return trace.function(size, in_batched_trees, *args)

        # Only the name is copied, for errors. The signature differs.
        functools.update_wrapper(rule_of_arguments, trace.function, ("__name__", "__qualname__"), ())
        # The booleans are packed below, when the structure of the result is known.
        packed = self.call_and_pack_pair(FunctionTrace(trace.terms, rule_of_arguments), (group,))
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            # The rule returned no pair. JAX refuses its result, with its own error.
            return packed
        return packed[0], self._pack_out_batched(*packed)

    def _pack_out_batched(self, result: LeafGroup, out_batched: Any) -> LeafGroup:
        """Packs the booleans that a rule returned like its result. Returns the leaf group.

        Args:
            result: the leaf group of the result.
            out_batched: a boolean, or a prefix tree of booleans: its shape is the upper part of the result's shape.

        Raises:
            SharingMismatchError: if the paths of a tied leaf have different booleans.
        """
        tree = FlatDag.of(result.structure)
        label_of: dict[int, Label] = {}
        # `labels` yields a leaf once for each boolean that reaches it.
        for label in labels(out_batched, tree, lambda part: isinstance(part, bool), "out_batched"):
            if label_of.setdefault(label.record, label).label is not label.label:
                paths = [jtu.keystr(path) for path in (label_of[label.record].path, label.path)]
                raise SharingMismatchError(
                    f"A rule of `{self.transform_name}` returned one array both as batched and as not batched, at "
                    f"{listed(paths)} of `out_batched`. Choose one of them, or untie the result: `result = "
                    "sharedtree.untie(result)`.",
                    tuple(paths),
                )
        return LeafGroup([label_of[number].label for number in tree.leaf_numbers], result.selection)


def _fill_in_zeros(leaf: Any, tangent: Any) -> Any:
    """Returns the tangent of a leaf, or zeros if it is None. Returns float0 zeros for any leaf that is not inexact.

    Args:
        leaf: the leaf.
        tangent: its tangent.
    """
    if not is_inexact(leaf):
        return np.zeros(jnp.shape(leaf), jax.dtypes.float0)
    return jnp.zeros_like(leaf) if tangent is None else tangent


def _add_tangents(leaf: Any, a: Any, b: Any) -> Any:
    """Adds two tangents of a leaf. Those of a leaf that is not inexact are float0 zeros and cannot be added.

    Args:
        leaf: the leaf.
        a: a tangent.
        b: another one.
    """
    return a + b if is_inexact(leaf) else a


def dummy_returning(function: Callable[..., Any], value: Any, terms: Terms) -> Inner:
    """Makes a function that looks like `function`, and returns `value` for all arguments. It does not read `terms`."""
    return Inner(function, terms, lambda *_: value)


def _abstract_leaf(leaf: Any) -> Any:
    """Returns the shape and dtype of an array. Returns any other leaf unchanged, for example a Python number."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def build_tree(group: LeafGroup) -> Any:
    """Builds the tree that a leaf group was packed from."""
    return unpack(group.structure, group.leaves)
