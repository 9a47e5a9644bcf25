"""`jax.custom_vjp`, `jax.custom_jvp`, `jax.custom_gradient`, `custom_vmap`: functions with rules for their derivatives.

The function and its rules take and return modules with their ties. JAX sees leaf groups in place of these:

    f(Pair(w, w), x)                  JAX sees    f(LeafGroup([w, x]))
    fwd(Pair(w, w), x) → y, Net(a)                fwd(LeafGroup([w, x])) → y, LeafGroup([a])
    bwd(Net(a), dy) → Pair(d, e), dx              bwd(LeafGroup([a]), dy) → (LeafGroup([d + e, dx]),)

Arguments in `nondiff_argnums` are called *static* here: JAX passes them to the function and to the rules, and does not
trace them. The others are the *operands*, which are one leaf group for JAX.

JAX may call a rule long after the call to which it belongs, and while it differentiates another rule. So each call
makes a vanilla object of its own, for example a new `jax.custom_vjp`. Its rules know the structures of this call and
hold none of its arrays.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ..core._call_arguments import Arguments, Position
from ..core._errors import SharingMismatchError
from ..core._pack_and_unpack import Tags, pack, unpack, walked
from ..core._prefix_trees import Label, labels
from ..core._printing import listed
from ..core._structure import FlatDag, Structure
from ..libraries._equinox import name_of
from ..ties._leaf_notes import note_tied, noting_whole
from ..ties._list_ties import is_inexact
from ..ties._policy_and_context import Policy
from ._adapter_names import VANILLA_CUSTOM_JVP, VANILLA_CUSTOM_VJP
from ._argument_names import Names
from ._caller_side import Call, leave
from ._function_and_options import How, in_code
from ._function_given_to_jax import Inner
from ._function_side import FunctionTrace
from ._function_transform import FunctionTransform
from ._joining_trees import Sides, holds_modules, join
from ._leaf_groups import LeafGroup, single_group, tangents_of
from ._option_lists import lists_options_of, public_name
from ._tangents import Fit, as_tuple, fit_to_leaves
from .checks._ties_lost_in_calls import report_lost_ties, ties_lost_between


class RuleTransform(FunctionTransform):
    """A function with rules, with identities preserved. Its methods, such as `defvjp`, set the rules later.

    `_vanilla` is the vanilla object with the user's own function and rules. It checks options and rules, and raises
    JAX's own errors. For each call, `with_rules` makes another vanilla object. Its function and rules take leaf groups.
    A subclass implements `with_rules` for one transform.
    """

    takes_rules = True
    rules_given: Any = None
    """The arguments of the method that set the rules, such as `defvjp`. None until it is called."""
    unknown_methods: frozenset[str] = frozenset()
    """Names of methods that set rules of a kind unknown to this package."""

    writes = False

    # Attributes of the copy of this object that belongs to one call, see `_for_one_call`.
    _operands: FlatDag
    """The operands, with shapes and dtypes in place of their arrays."""
    _primal: Inner | None = None
    """The function that JAX calls in place of the user's. None under transforms that do not need it again."""
    _returned: Structure | None
    """The structure of the function's result. None until JAX has called the function itself, and not a rule."""

    # The object that the user has ------------------------------------------------------------------------------------

    def _made_alike(self) -> How | None:
        # Two objects of one function may have different rules, so they have no traces in common.
        return None

    def check_options(self) -> None:
        """Applies the transform, which refuses wrong options. Called without rules, it raises JAX's own error."""
        self._vanilla = self.transform(self.function, **self.options)
        # Under `jax_custom_vjp3`, JAX 0.10 returns an object of another class with another name for these.
        static = getattr(self._vanilla, "nondiff_argnums", None) or getattr(self._vanilla, "static_argnums", ())
        self._static = tuple(sorted(static))

    def __getattr__(self, name: str) -> Any:
        """Returns a method of the vanilla object that begins with `def`. Its rules are not translated.

        Raises:
            TypeError: if the method sets rules of a kind unknown to this package.
            AttributeError: if the name does not begin with `def`, or the vanilla object has no such method.
        """
        if not name.startswith("def") or "_vanilla" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        method = getattr(self._vanilla, name)
        if name in self.unknown_methods:
            raise self.unknown_rules(f"the rules that `{name}` sets")
        return method

    def unknown_rules(self, rules: str, option: str = "") -> TypeError:
        """Makes the error for rules with other arguments or results than this class translates.

        Args:
            rules: the rules, in words.
            option: the option that asks for such rules, as code after the function. Empty if a method sets them.
        """
        vanilla = public_name(self.transform) or "jax.custom_vjp"
        return TypeError(
            f"`{self.transform_name}` has no adapter for {rules}.\n"
            "They are handed something else than a cotangent, or return more. Give them to a function of a "
            "`sharedtree.Dag`, which every transform takes as it is (docs/transforms.md, “Transforms that need no "
            "adapter”):\n"
            f"    f_of_dag = {vanilla}(lambda dag: f(dag.tree){option})"
        )

    def __reduce__(self) -> Any:
        """Pickles the function and the options as the base does, and the rules as state."""
        reduced = super().__reduce__()
        return reduced if isinstance(reduced, str) else (*reduced, self._state_of_rules())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the rules too."""
        duplicate = super().__deepcopy__(memo)
        # The base may return this very object, which has its rules.
        if duplicate is not self:
            # A rule may refer to this object. The caller keeps it alive, so its `id` is valid.
            memo[id(self)] = duplicate
            duplicate.__dict__.update(copy.deepcopy(self._state_of_rules(), memo))
        return duplicate

    def _state_of_rules(self) -> dict[str, Any]:
        """Returns the attribute with the rules, if they were set on this object."""
        return {name: value for name, value in self.__dict__.items() if name == "rules_given"}

    # One call -------------------------------------------------------------------------------------------------------

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Makes a vanilla object for this call, calls it with leaf groups, and builds the result.

        Without rules, calls the user's vanilla object, which raises JAX's own error.

        Raises:
            ValueError: if the policy is in place. Rules do not say how the changes of a function are differentiated.
        """
        if self.rules_given is None:
            return self._vanilla(*args, **kwargs)
        if policy.in_place:
            raise ValueError(
                f"`{self.transform_name}` writes nothing back.\n"
                "Its rules say how the result of the function is differentiated, and not what else it changes. Return "
                "what changes, and leave the arguments as they are:\n"
                f"    f = {in_code(self.transform_name, 'in_place=False', 'f')}"
            )
        args, kwargs = self._by_position(tuple(args), kwargs)
        with self.enter(args, kwargs, policy) as call:
            transform_of_call = self._for_one_call(call)
            vanilla = transform_of_call.with_rules(policy, self.function)
            return leave((vanilla(*call.groups, *self.statics_of(call)),))

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Turns keyword arguments and defaults into positional arguments, as JAX does for rules.

        If the function has no signature, the arguments stay as they are. If they do not fit the signature, calls the
        vanilla object for JAX's own error.

        Returns:
            Positional arguments and keyword arguments.
        """
        try:
            bound = inspect.signature(self.function).bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if str(error).startswith("missing"):
                # JAX itself says best what is wrong.
                self._vanilla(*args, **kwargs)
            return args, kwargs
        bound.apply_defaults()
        if kwargs.keys() & bound.kwargs.keys():
            # An argument can be passed by keyword only, which JAX itself refuses.
            self._vanilla(*args, **kwargs)
            return args, kwargs
        return bound.args, {}

    def static_positions(self, num_args: int, keywords: Collection[str]) -> Collection[Position]:
        """Returns the positions in `nondiff_argnums`. JAX does not trace these arguments."""
        return self._static

    def statics_of(self, call: Call) -> Sequence[Any]:
        """Returns the arguments in `nondiff_argnums` as JAX gets them."""
        return call.statics

    @property
    def _positions_of_statics(self) -> tuple[int, ...]:
        """Positions of the static arguments for JAX, after the one leaf group of all other arguments."""
        return tuple(range(1, 1 + len(self._static)))

    def _for_one_call(self, call: Call) -> Self:
        """Returns a copy of this object to which the rules of one call refer. It holds no array of the call."""
        copy_for_call = self._without_function()
        types = [_type_of(leaf) for leaf in call.tree.leaves.values()]
        copy_for_call._operands = FlatDag.of_leaves(call.tree.structure, types)  # pyright: ignore[reportArgumentType]
        copy_for_call._returned = None
        return copy_for_call

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the vanilla object for one call. It takes leaf groups, and so do its rules.

        Called on the copy that belongs to the call.

        Args:
            policy: what carries identity.
            function: the user's function.
        """
        raise NotImplementedError

    # What JAX calls: the function and the rules, on leaf groups -------------------------------------------------------

    def inner_of(self, policy: Policy, call_rule: Callable[..., Any], function: Callable[..., Any]) -> Inner:
        """Makes the function for JAX to call in place of the user's function or rule.

        Args:
            policy: what carries identity.
            call_rule: (policy, `function`, *arguments from JAX) → the result for JAX. A method such as `primal`.
            function: the user's function or rule.
        """
        return Inner(
            function,
            lambda: function,
            lambda current, args, kwargs: call_rule(policy, current, *args, **kwargs),
        )

    def primal(self, policy: Policy, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the user's function for JAX, and packs its result. Records the structure in `_returned`."""
        return self.packed_result(policy, function, args, None)

    def packed_result(
        self,
        policy: Policy,
        rule: Callable[..., Any],
        args: Sequence[Any],
        pack_second: Callable[[FunctionTrace, Any], Any] | None,
    ) -> Any:
        """Calls the function, or a rule that returns a pair of the function's result and something else.

        Args:
            policy: what carries identity.
            rule: the function or the rule.
            args: the leaf group of the operands, and static arguments.
            pack_second: (trace, second of the pair) → what JAX gets for it. None for the function itself, which returns
                no pair.

        Returns:
            For the function, the leaf group of its result. For a rule, a pair: the leaf group of the function's result,
            and what `pack_second` returned. If a rule returned no pair, its result unchanged: JAX says best what is
            wrong.

        Raises:
            SharingMismatchError: if the result of a rule has another structure than that of the function.
        """
        trace, result = self.run(policy, rule, args, returns_pair=pack_second is not None)
        # 1. Take the pair of a rule apart.
        second = None
        if pack_second is not None:
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                return result
            result, second = result
        # 2. Pack the function's result.
        tree = trace.flatten(result)
        trace.check_flattened(tree)
        packed = trace.pack(result)
        if pack_second is None:
            self._returned = packed.structure
            return packed
        return self._like_result_of_function(packed, rule), pack_second(trace, second)

    def _like_result_of_function(self, packed: LeafGroup, rule: Callable[..., Any]) -> LeafGroup:
        """Compares the result in a rule with that of the function. Returns its leaves with the function's structure.

        JAX compares the structures as aux data, so they must be one. Two structures also differ if only the notes on
        their leaves do, such as `untied on purpose`. If JAX has not called the function, returns the result as it is.

        Args:
            packed: the function's result as the rule returned it.
            rule: the rule, for errors.

        Raises:
            SharingMismatchError: if the two differ in shape, static values or ties.
        """
        returned = self._returned
        # JAX may run a rule without the function. Then there is nothing to compare.
        if returned is None or returned is packed.structure:
            return packed
        # Words for the two sides in errors. The second argument of `name_of` is the default.
        of_function, of_rule = (f"in what `{name}` returns" for name in (name_of(self, self), name_of(rule, rule)))
        tree_of_function = FlatDag.of(returned, [None] * len(returned.records))
        tree_of_rule = FlatDag.of(packed.structure, [None] * len(packed.structure.records))
        path = (_Result(),)
        # An exact join refuses each tie that only its first tree has. Of the ties that only its second tree has, it
        # refuses those of modules and references alone. So each tree is the first one once.
        join(tree_of_function, tree_of_rule, Sides(self.transform_name, of_function, of_rule), path, exact=True)
        join(tree_of_rule, tree_of_function, Sides(self.transform_name, of_rule, of_function), path, exact=True)
        return single_group(packed.leaves, returned)

    def run(
        self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], *, returns_pair: bool = False
    ) -> tuple[FunctionTrace, Any]:
        """Calls the user's function or rule with arguments built from leaf groups. Returns the trace and the result.

        Args:
            policy: what carries identity.
            function: the function or the rule.
            args: the leaf group of the operands, and static arguments.
            returns_pair: True if only the first of the two values returned reaches the caller.
        """
        received = self.receive_arguments(args)
        trace = FunctionTrace(self.terms(policy), function)
        arguments = received.arguments
        return trace, trace.call_with(received, arguments.args, arguments.kwargs, returns_pair=returns_pair)

    # Cotangents -----------------------------------------------------------------------------------------------------

    def cotangents(self, policy: Policy, rule: Callable[..., Any], *args: Any) -> Any:
        """Calls a rule for cotangents, and fits its result to the leaf group of the operands.

        Args:
            policy: what carries identity.
            rule: (*static arguments, residuals, cotangent of the result) → cotangents of the operands. Under
                `jax.custom_gradient`, it takes the cotangent alone.
            args: arguments of the rule, as modules.

        Returns:
            A tuple of one leaf group: the cotangent of the one leaf group that the vanilla object takes.

        Raises:
            SharingMismatchError: if there are not as many cotangents as operands; if one differs from its operand in
                shape; or if one object is at several paths of a tie, and it may be the whole sum or a share.
        """
        operands = as_tuple(self._operands)
        num_operands = len(operands.records[operands.root][1])
        # 1. Call the rule. Gradients, pullbacks and `retie` in it add to `whole_sums` the arrays that are the whole sum
        # over their paths.
        with noting_whole() as whole_sums:
            received = walked(Arguments(Names(rule).of(len(args)), args, {}), self.rules(policy))
            # The last argument is the cotangent of the result.
            cotangents = received.child(len(args) - 1)
            leaves = [received.leaves[number] for number in cotangents.leaf_numbers]
            # The cotangent of a tied leaf of the result is a whole sum, too. The rule may pass it on.
            note_tied(cotangents, leaves)
            result = rule(*args)
        # 2. Refuse a wrong number of cotangents.
        result = self.as_several(result, num_operands)
        if not isinstance(result, (tuple, list)) or len(result) != num_operands:
            self._refuse_as_jax(rule, result)
            is_sequence = isinstance(result, (tuple, list))
            description = f"{len(result)} values" if is_sequence else f"a `{type(result).__name__}`"
            raise SharingMismatchError(
                f"`{name_of(rule, rule)}` returned {description} for the {num_operands} operands of "
                f"`{name_of(self, self)}` that are differentiated. It returns a tuple with one cotangent for each, "
                "None where that is zero:\n"
                "    return (cotangent, None)"
            )
        # 3. Add up the cotangents of each leaf. If they do not fit, JAX raises its own error where it has one.
        fit = self.fit(policy, whole_sums=whole_sums, adds_up=True)
        try:
            leaves = list(fit_to_leaves(operands, tuple(result), "cotangents", fit).values())
        except SharingMismatchError:
            self._refuse_as_jax(rule, result)
            raise
        pairs = zip(leaves, operands.leaves.values(), strict=True)
        if any(np.shape(leaf) != np.shape(operand) for leaf, operand in pairs):
            self._refuse_as_jax(rule, result)
        # 4. Warn of lost ties. A rule may take the whole cotangent of a tied leaf and compute with it path by path. The
        # arrays that it returns were added up above, though each of them may be the whole sum.
        lost = ties_lost_between(cotangents, walked(tuple(result), self.rules(policy)), policy)
        report_lost_ties((), lost, policy, Names(rule))
        return (single_group(leaves, self._operands.structure),)  # pyright: ignore[reportArgumentType]

    def as_several(self, result: Any, num_operands: int) -> Any:
        """Returns the result of a rule, in a tuple if JAX lets the rule return a single cotangent without one."""
        return result

    def fit(self, policy: Policy, *, whole_sums: Any = None, adds_up: bool = False) -> Fit:
        """Returns the terms on which the tangents or cotangents that a rule returned are fitted to leaves.

        Args:
            policy: what carries identity.
            whole_sums: arrays known to be the whole sum over their paths.
            adds_up: True for cotangents, False for tangents.
        """
        # Under JAX's convention, the traced leaves are those that JAX traces.
        rules = self.rules(policy)._replace(convention="jax")
        return Fit(self.transform_name, rules, adds_up, may_lack=True, is_of_rule=True, whole_sums=whole_sums)

    def _refuse_as_jax(self, rule: Callable[..., Any], result: Any) -> None:
        """Raises JAX's own error for cotangents that do not fit, by differentiating dummies with the same results.

        Does nothing if JAX finds nothing wrong, if there are modules, which JAX would take apart in its message, or if
        the transform is not `jax.custom_vjp`.

        Args:
            rule: the user's rule.
            result: what the rule returned.
        """
        if self._primal is None or holds_modules(self._operands):
            return
        # JAX would trace the user's function again, or even call it (`jax_custom_vjp3`). So a dummy with its name and
        # signature takes its place. Another one takes the place of the rule and returns the same result.
        vanilla = VANILLA_CUSTOM_VJP(returning(self._primal.function, 0.0))
        vanilla.defvjp(lambda *args: (0.0, None), returning(rule, result))
        arguments = unpack(self._operands.structure, list(self._operands.leaves.values()))
        # Static arguments have None as their name.
        operands = [arg for name, arg in zip(arguments.names, arguments.args, strict=True) if name is not None]
        jax.eval_shape(lambda *args: jax.vjp(vanilla, *args)[1](0.0), *operands)

    def raise_refusal(self, args: Sequence[Any], kwargs: dict[str, Any], error: SharingMismatchError) -> NoReturn:
        """Raises the error. The base calls the vanilla transform first, but that has no rules here."""
        raise error


# The transforms: arguments and results of the rules of each ----------------------------------------------------------


class CustomVjpTransform(RuleTransform):
    """A function under `jax.custom_vjp`, with identities preserved."""

    unknown_methods = frozenset({"defvjp_with_logs", "defvjp_with_accums", "defremat", "defremat_with_logs"})

    @lists_options_of(VANILLA_CUSTOM_VJP.defvjp)
    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], *positional: Any, **options: Any) -> None:
        """Sets the rules, as `jax.custom_vjp.defvjp` does.

        Args:
            fwd: the arguments → (the result, residuals). Both may hold modules, and keep their ties.
            bwd: (residuals, cotangent of the result) → a cotangent for each argument, in its shape or None.
            positional: options of `jax.custom_vjp.defvjp`, by position.
            options: options of `jax.custom_vjp.defvjp`, by name.
        """
        # The vanilla object checks the options, and has the rules where it answers in place of this one.
        self._vanilla.defvjp(fwd, bwd, *positional, **options)
        self.rules_given = fwd, bwd, positional, options

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the object of `jax.custom_vjp` for one call, with both of its rules on leaf groups."""
        fwd, bwd, positional, options = self.rules_given
        transform_options = (
            {**self.options, "nondiff_argnums": self._positions_of_statics} if self._static else self.options
        )
        self._primal = self.inner_of(policy, self.primal, function)
        vanilla = self.transform(self._primal, **transform_options)
        rules = self.inner_of(policy, self._forward, fwd), self.inner_of(policy, self._backward, bwd)
        vanilla.defvjp(*rules, *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, fwd: Callable[..., Any], *args: Any) -> Any:
        """Calls `fwd` for JAX. Returns the leaf groups of the result and of the residuals."""
        return self.packed_result(policy, fwd, args, lambda trace, residuals: trace.pack(residuals))

    def _backward(self, policy: Policy, bwd: Callable[..., Any], *args: Any) -> Any:
        """Calls `bwd` for JAX. It gets static arguments, and the leaf groups of the residuals and of the cotangent."""
        *static, residuals, cotangent = args
        return self.cotangents(policy, bwd, *static, tree_of(residuals), tangents_of(cotangent))


class CustomGradientTransform(RuleTransform):
    """A function under `jax.custom_gradient`, with identities preserved.

    The function returns its rule beside its result, so no method sets rules.
    """

    # Anything but None: there are no rules to wait for.
    rules_given = ()

    def check_options(self) -> None:
        """Refuses the options of newer JAX that give a rule other arguments or another result.

        Raises:
            TypeError: if there is such an option.
        """
        # First, since JAX knows best which options it has.
        super().check_options()
        for name in ("with_logs", "remat", "with_accums"):
            option = self.options.get(name)
            if option:
                raise self.unknown_rules(f"the rules that it takes with `{name}`", f", {name}={option!r}")

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a function under `jax.custom_gradient`. Its rule comes with each result."""
        return self.transform(self.inner_of(policy, self._result_and_rule, function), **self.options)

    def _result_and_rule(self, policy: Policy, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the user's function for JAX. Returns the leaf group of its result, and a rule on leaf groups."""
        return self.packed_result(policy, function, args, lambda _, rule: self.inner_of(policy, self._backward, rule))

    def _backward(self, policy: Policy, rule: Callable[..., Any], *args: Any) -> Any:
        """Calls the user's rule for JAX, with trees in the place of leaf groups of cotangents."""
        return self.cotangents(policy, rule, *map(tangents_of, args))

    def as_several(self, result: Any, num_operands: int) -> Any:
        """Wraps the cotangent of a single operand in a tuple. JAX lets rules of this transform return it by itself."""
        return (result,) if num_operands == 1 and not isinstance(result, (tuple, list)) else result


class Summands(list[Any]):
    """Tangents of one result, one from each rule of `defvjps`. Their sum is its tangent."""


class CustomJvpTransform(RuleTransform):
    """A function under `jax.custom_jvp`, with identities preserved."""

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
                argument whose tangent does not count.
        """
        self._vanilla.defjvps(*jvps)

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            """Is the one rule made of all. `_pack_tangent` adds up the tangents that it returns."""
            result = self(*primals)
            # JAX allows fewer rules than arguments.
            pairs = zip(jvps, tangents, strict=False)
            return result, Summands([rule(tangent, result, *primals) for rule, tangent in pairs if rule is not None])

        self.rules_given = jvp, (), {}

    def statics_of(self, call: Call) -> Sequence[Any]:
        """Packs each argument in `nondiff_argnums` into a leaf group by itself.

        JAX flattens and rebuilds these arguments to stop the gradient, which would lose their ties.
        """
        rules = self.rules(Policy())
        return [single_group(*pack(value, Tags(), rules)) for value in call.statics]

    def receive_arguments(self, args: Sequence[Any]) -> Any:
        """Builds the arguments of the function, also those in `nondiff_argnums`, which `statics_of` has packed."""
        group, *static = args
        return super().receive_arguments([group, *map(tree_of, static)])

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the object of `jax.custom_jvp` for one call, with its rule on leaf groups."""
        jvp, positional, options = self.rules_given
        transform_options = (
            {**self.options, "nondiff_argnums": self._positions_of_statics} if self._static else self.options
        )
        self._primal = self.inner_of(policy, self.primal, function)
        vanilla = self.transform(self._primal, **transform_options)
        vanilla.defjvp(self.inner_of(policy, self._forward, jvp), *positional, **options)
        return vanilla

    def _forward(self, policy: Policy, jvp: Callable[..., Any], *args: Any) -> Any:
        """Calls the user's rule for JAX.

        JAX passes the static arguments, a 1-tuple with the leaf group of all primals, and a 1-tuple with the leaf group
        of all tangents.

        Returns:
            The leaf group of the result, and that of its tangent. If the rule returned no pair, what it returned.

        Raises:
            SharingMismatchError: if the result differs from that of the function, or the tangent from the result.
        """
        *static, (primal_group,), (tangent_group,) = args
        # One tangent for each argument of the function. Static arguments have a place, too, which is skipped below.
        all_tangents = tangents_of(tangent_group, is_gradient=False).args

        # `packed_result` calls this with the arguments of the function, in their order. The user's rule gets the static
        # ones first, and then all others as one tuple.
        def rule(*args: Any) -> Any:
            """Calls the user's rule with static arguments first, as JAX does."""
            statics = [args[i] for i in self._static]
            primals = tuple([arg for i, arg in enumerate(args) if i not in self._static])
            tangents = tuple([arg for i, arg in enumerate(all_tangents) if i not in self._static])
            return jvp(*statics, primals, tangents)

        # The lambda leaves the tangent as it is: it can be packed only when the structure of the result is known.
        packed = self.packed_result(policy, rule, (primal_group, *static), lambda _, tangent_out: tangent_out)
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            # No pair. JAX itself says best what is wrong.
            return packed
        result, tangent_out = packed
        if type(tangent_out) is not Summands:
            self._refuse_tangent_as_jax(jvp, result, tangent_out)
        return result, self._pack_tangent(policy, result, tangent_out)

    def _refuse_tangent_as_jax(self, jvp: Callable[..., Any], result: LeafGroup, tangent: Any) -> None:
        """Raises JAX's own error for a tangent of another structure, by differentiating a dummy with the same result.

        Does nothing if the structure is that of the result, or if there are modules, which JAX would take apart in its
        message.

        Args:
            jvp: the user's rule.
            result: the leaf group of the result.
            tangent: the tangent that the rule returned.
        """
        if self._primal is None or holds_modules(FlatDag.of_leaves(result.structure, result.leaves)):
            return
        value = tree_of(result)
        if jtu.tree_structure(tangent) != jtu.tree_structure(value):
            # Dummies with the names and signatures of the user's function and rule.
            vanilla = VANILLA_CUSTOM_JVP(returning(self._primal.function, value))
            vanilla.defjvp(returning(jvp, (value, tangent)))
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
        # Without a single rule the sum is empty, and the tangent zero.
        for summand in tangent or [None] if type(tangent) is Summands else [tangent]:
            tangents = fit_to_leaves(tree, summand, "tangent", fit).values()
            leaves = [_tangent_or_zeros(primal, leaf) for primal, leaf in zip(result.leaves, tangents, strict=True)]
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
                tree of booleans in its shape). True marks a leaf that has the axis.

        Returns:
            The rule.
        """
        self._vanilla.def_vmap(vmap_rule)
        self.rules_given = vmap_rule
        return vmap_rule

    def with_rules(self, policy: Policy, function: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the object of `custom_vmap` for one call, with its rule on leaf groups."""
        vanilla = self.transform(self.inner_of(policy, self.primal, function), **self.options)
        vanilla.def_vmap(self.inner_of(policy, self._batched, self.rules_given))
        return vanilla

    def _batched(self, policy: Policy, rule: Callable[..., Any], size: int, in_batched: Any, group: LeafGroup) -> Any:
        """Calls the user's rule for JAX.

        Args:
            policy: what carries identity.
            rule: the user's rule.
            size: the size of the axis.
            in_batched: a list of one leaf group of booleans, since the vanilla object takes one leaf group.
            group: the leaf group of the operands.

        Returns:
            The leaf group of the result, and one of booleans. If the rule returned no pair, what it returned.
        """
        in_batched_trees = list(tree_of(in_batched[0]).args)

        def rule_of_arguments(*args: Any) -> Any:
            """Calls the user's rule with the arguments of the function alone, as `packed_result` does."""
            return rule(size, in_batched_trees, *args)

        functools.update_wrapper(rule_of_arguments, rule, ("__name__", "__qualname__"), ())
        # The lambda leaves the booleans as they are: they can be packed only when the structure of the result is known.
        packed = self.packed_result(policy, rule_of_arguments, (group,), lambda _, out_batched: out_batched)
        if type(packed) is not tuple or type(packed[0]) is not LeafGroup:
            # No pair. JAX itself says best what is wrong.
            return packed
        return packed[0], self._pack_out_batched(*packed)

    def _pack_out_batched(self, result: LeafGroup, out_batched: Any) -> LeafGroup:
        """Packs the booleans that a rule returned like its result. Returns the leaf group.

        Args:
            result: the leaf group of the result.
            out_batched: a boolean, or a tree of booleans in the shape of the result or of its beginning.

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
                    f"A rule of `{self.transform_name}` says of one array that it has the axis and that it has not, at "
                    f"{listed(paths)} of `out_batched`. Say one of them, or undo the tie, as "
                    "`result = sharedtree.untie(result)` does.",
                    tuple(paths),
                )
        return LeafGroup([label_of[number].label for number in tree.leaf_numbers], result.selection)


def _tangent_or_zeros(primal: Any, tangent: Any) -> Any:
    """Returns a tangent, or zeros if it is None. For leaves that are not inexact, JAX wants zeros of the dtype float0.

    Args:
        primal: the leaf.
        tangent: its tangent.
    """
    if not is_inexact(primal):
        return np.zeros(jnp.shape(primal), jax.dtypes.float0)
    return jnp.zeros_like(primal) if tangent is None else tangent


def _add_tangents(primal: Any, a: Any, b: Any) -> Any:
    """Adds two tangents of a leaf. Those of a leaf that is not inexact are float0 zeros and cannot be added.

    Args:
        primal: the leaf.
        a: a tangent.
        b: another one.
    """
    return a + b if is_inexact(primal) else a


def returning(function: Callable[..., Any], value: Any) -> Inner:
    """Makes a function that looks like `function` and returns `value` for all arguments."""
    return Inner(function, lambda: function, lambda *_: value)


class _Result:
    """The first key of paths in errors about a result."""

    def __str__(self) -> str:
        return "result"


def _type_of(leaf: Any) -> Any:
    """Returns the shape and dtype of an array. Returns any other leaf unchanged: a number, or what JAX will refuse."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def tree_of(group: LeafGroup) -> Any:
    """Builds the tree that a leaf group was packed from."""
    return unpack(group.structure, group.leaves)
