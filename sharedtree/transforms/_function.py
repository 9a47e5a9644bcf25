"""Function transformers: `transform(f, **options) → g`. Pack, call, unpack; what a family needs on top it overrides."""

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

from .._context import Policy, PolicyOption, current_policy
from .._copies import Incomparable
from .._equinox_internals import name_of, update_wrapper, warn_of_layers_in
from .._graph import Rules, Tags
from .._jax_internals import hide_frames
from .._native_walk import native
from .._under_way import active, give_back, keeping_limit, keeps_limit, raised
from ._applying import public_name, title_of, transform_named
from ._calling import calling
from ._crossed import Graph, Position
from ._cuts import Leaving, modules_with_prefixes, parted, treated
from ._in_place import InPlace, pack_detached, packed_changes, rules_for_state, write
from ._inner import Inner, Shared, shared_by
from ._inside import Inside, Terms, with_notes
from ._modules import How, is_of_equinox
from ._packing import Call, Entered, pack_call, unpack_call, unpack_result
from ._passing_through import passed_through, unchanged
from ._sorted_results import unsorted
from ._treatments import NO_FATE, Fates, Treatment
from .checks._functions_given import forbid_bound_module, is_refusal, name_counterpart
from .checks._leaks import forbid_tracers


class _Named(type):
    """The class of wrapped functions prints as what makes them: JAX names the class of what it cannot take."""

    def __repr__(cls) -> str:
        is_own = cls.__module__.startswith(f"{__package__}.")
        return "<class 'sharedtree.preserve_identities'>" if is_own else super().__repr__()


class FunctionTransform(metaclass=_Named):
    """A function under a transform, with shared modules and tied arrays kept the same objects.

    Args:
        transform: the vanilla transform.
        function: the user's function.
        policy: what counts as sharing; None for that of the thread at each call.
        options: of the transform.

    The transform is applied once for each policy, to a function that unpacks, calls and packs. It may cache what it
    likes: everything that the inner function learns about a call is in the arguments' structures. Where it does cache,
    all wrappers of one function give it the same inner function (`_inner`).

    Nothing that this refers to refers back to it, so it is freed with the last reference, as a vanilla one is.
    """

    is_plain = False
    """Whether nothing is static, donated or placed, and one transformed function serves all structures."""
    passes_through = False
    caches_traces = False
    only_for_transform: frozenset[str] = frozenset()
    """The options that make no difference to the inner function."""
    shares_alike = False
    own_options: frozenset[str] = frozenset()
    """The options that are ours, and not the transform's."""
    takes_rules = False
    """Whether it has methods of its own, so that of a module, too, it is no module."""

    def __init_subclass__(cls) -> None:
        warn_of_layers_in(cls)

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: PolicyOption,
        options: dict[str, Any],
    ) -> None:
        self.transform = transform
        self.function = function
        self.policy = policy
        self.options = {name: value for name, value in options.items() if name not in self.own_options}
        self.all_options = options
        self.alike = self._made_alike()
        self._shared = self._shared_by(function)
        self.names = self._shared.names
        self.traces = self._shared.traces
        self._seen = self._shared.seen
        self._made: dict[Any, Any] = {}
        self._way: tuple[Any, ...] | None = None  # what `native.call` needs, under the policy of the last call
        update_wrapper(self, function)  # not its `__dict__`, which may be that of another wrapper
        self.__wrapped__ = function
        self.check_options()

    def _made_alike(self) -> How | None:
        """What makes wrappers of one function equal. Equinox's are; JAX's are functions, each equal to itself only."""
        if not is_of_equinox(self.transform):
            return None
        try:
            return How(type(self), self.transform, self.policy, self.all_options)
        except Incomparable:
            return None

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is not type(self) or self.alike is None:
            return self is other
        one, two = self.function, other.function
        return self.alike == other.alike and (one is two or (isinstance(one, FunctionTransform) and one == two))

    def __hash__(self) -> int:
        if self.alike is None:
            return object.__hash__(self)
        function = self.function
        # The function is alive as long as this is.
        return hash((self.alike, function if isinstance(function, FunctionTransform) else id(function)))

    def _shared_by(self, function: Callable[..., Any]) -> Shared:
        if not self.caches_traces:
            return Shared(function)
        options = {name: self.options[name] for name in sorted(self.options) if name not in self.only_for_transform}
        return shared_by(function, (type(self), self.transform), options, alike=self.shares_alike)

    def __reduce__(self) -> Any:
        """By name, as a function, where the name leads here, as that of a decorated function does."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        # Some of JAX's transforms are called other than where they can be found.
        named = public_name(self.transform)
        return _remade, (type(self), named or self.transform, self.function, self.policy, self.all_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """This, as of a function; of a callable object that is copied, a wrapper of the copy."""
        function = copy.deepcopy(self.function, memo)
        if function is self.function:
            return self
        return type(self)(self.transform, function, self.policy, self.all_options)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            policy = current_policy(self.policy)
            if native is not None and self.is_plain:
                way = self._way
                if way is None or way[0] is not policy:
                    way = self._way = self._way_under(policy)
                result = native.call(self, way, active.stack, args, kwargs)
                if result is not native.DEFERRED:
                    return result
            with keeping_limit():
                call = self.executable(self.pack(args, kwargs, policy))
                with calling(self.names, call):
                    result = self.transformed_for(policy, call)(*call.args, **call.kwargs)
                return self.finish(result, call, policy)
        except Exception as error:
            self.explain(error, args, kwargs)
            hide_frames(error)
            raise
        finally:
            if raised:
                give_back()  # what the results of a native call needed

    def explain(self, error: Exception, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Adds to an error of the transform's what it does not know of."""
        if is_refusal(error):
            static = self.static_positions(args, kwargs)
            name_counterpart(error, args, kwargs, static, self.names, self.transform_name)

    def _way_under(self, policy: Policy) -> tuple[Any, ...]:
        """What `native.call` needs to know."""
        rules = policy.rules
        return policy, self.transformed(policy), self.names, rules, native.flags_of(rules), bool(policy.in_place)

    write = staticmethod(write)  # for `native.call`

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<{self.transform_name}({name_of(self.function, self.function, '__qualname__')}), identities preserved>"

    @functools.cached_property
    def transform_name(self) -> str:
        """What the transform is called in errors."""
        return title_of(self.transform)

    def check_options(self) -> None:
        """Applies the transform at once, so that it can refuse its options or the function as it always does."""
        function = self.function
        # The inner function is none of these, so the transform would miss what it refuses.
        if not callable(function) or isinstance(function, staticmethod) or inspect.isgeneratorfunction(function):
            self.transform(function, **self.options)
        else:
            self.transformed(current_policy(self.policy))

    # What families override -------------------------------------------------------------------------------------

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """The arguments that are not packed."""
        return ()

    def treatments(self, num_args: int, keywords: Collection[str]) -> Sequence[Treatment]:
        """What the transform does to its arguments, if it may not do the same to all."""
        return ()

    def treatments_of(self, call: Call) -> Sequence[Treatment]:
        """The same, where it takes the arguments themselves to say it."""
        return self.treatments(len(call.args), call.kwargs)

    def leaving(self, policy: Policy, args: Sequence[Any], kwargs: dict[str, Any]) -> Leaving | None:
        """What the transform will do to what the function returns, if it may not do the same to all of it.

        Args:
            policy: what counts as sharing.
            args: the packed arguments.
            kwargs: the packed keyword arguments.
        """
        return None

    def executable(self, call: Call) -> Call:
        """The call as it can be executed. Raises `InconsistentSharingError` if it could be traced only."""
        return call

    def described(self, call: Call) -> dict[int, str]:
        """What the transform does to each traced leaf in the arguments of a call, if it is worth a word."""
        found: dict[int, list[str]] = {}
        static = self.static_positions(call.args, call.kwargs)
        items = [(position, value) for position, value in call.items() if position not in static]
        for treatment in self.treatments_of(call):
            modules, prefixes = modules_with_prefixes(treatment, items)
            fates = Fates(Graph(modules, call.tags.objects), prefixes, treatment, self.names)
            for (number, _), fate in fates.items() if treatment.is_known else ():
                if fate != NO_FATE and fate in fates.of_leaves:
                    words = treatment.describe(fates.of_leaves[fate])
                    if not words.startswith("not ") and words not in found.setdefault(number, []):
                        found[number].append(words)
        return {number: ", ".join(words) for number, words in found.items()}

    # The two sides ------------------------------------------------------------------------------------------------

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """The caller's side, going in."""
        static = self.static_positions(args, kwargs)
        call = pack_call(args, kwargs, static, policy.rules, self.names)
        treatments = self.treatments_of(call)
        return treated(call, static, treatments, self.names, self.transform_name) if treatments else call

    @keeps_limit
    def finish(
        self, result: Any, call: Call, policy: Policy, used: Callable[[Call], Sequence[Any]] | None = None
    ) -> Any:
        """The caller's side, coming out."""
        result = unsorted(result)
        if policy.in_place:
            changes = InPlace(call)
            pending = None if call.cuts else changes.pending
            result = unpack_result(result, lambda _: call.tags.objects.__getitem__, changes.update, pending)
            changes.commit()
            return result[1]
        return unpack_result(result, lambda structures: passed_through(call, structures, used or self.used))

    def transformed(self, policy: Policy) -> Any:
        """The transformed function under a policy, made on first use. Of threads that make it at once, one wins."""
        made = self._made.get(policy)
        if made is None:
            made = self._made.setdefault(policy, self.transform(self.inner(policy), **self.options))
        return made

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """The transformed function for a call."""
        return self.transformed(policy)

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """The function that the transform sees."""
        shared = self._shared
        inner = shared.inner.get(policy)
        if inner is None:
            forbid_bound_module(self.function, policy, self.transform_name)
            call = functools.partial(self._without_function().call_inside, policy)
            inner = shared.inner.setdefault(policy, Inner(self.function, shared.hold, call))
        return inner

    def _without_function(self) -> Self:
        """The part of this that the inner function may hold: neither the function, nor what holds the inner one."""
        part = object.__new__(type(self))
        vars(part).update(vars(self))
        for name in ("function", "__wrapped__", "_shared", "_made", "_way"):
            vars(part).pop(name, None)
        return part

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Unpacks arguments, calls the user's function and packs its results, inside the transform."""
        inside = Inside(self._terms(policy), function)
        entered = unpack_call(args, kwargs, self.static_positions(args, kwargs))
        result = inside.call_with(entered, *entered.args, **entered.kwargs)
        return self.pack_results(result, inside, self.leaving(policy, args, kwargs))

    def _terms(self, policy: Policy) -> Terms:
        names = self.names
        is_told = self.policy is not None
        return Terms(names, self.transform_name, names, policy, self.traces, self._seen, self.caches_traces, is_told)

    def pack_results(self, result: Any, inside: Inside, leaving: Leaving | None) -> Any:
        """The function's side, going out."""
        policy, entered, graph = inside.terms.policy, inside.entered, inside.entered.graph
        rules = policy.rules._replace(on_static=forbid_tracers(inside.outer))
        if policy.in_place:
            rules = rules_for_state(rules, graph, self.is_taken(entered))
        elif policy.pass_through and self.passes_through:
            rules = rules._replace(given=unchanged(result, graph, self.is_taken(entered)))
        if leaving is not None:
            return self._pack_apart(result, inside, leaving, rules)
        tags = Tags()
        state = inside.pack_state(tags, rules)
        packed: Any = inside.pack_checked(result, tags, rules)
        inside.check(packed, tags.objects, state)
        if policy.in_place:
            packed = packed_changes(result, rules, graph, self.is_taken(entered))
        return with_notes(packed)

    def _pack_apart(self, result: Any, inside: Inside, leaving: Leaving, rules: Rules) -> Any:
        """The same where the transform may not do the same to all of it."""
        tags = Tags()
        came = leaving.state_of(inside.written, self.names)
        is_one = leaving.is_one(came.prefixes)
        # Whether an object can be named depends on how it leaves, which a walk does not ask.
        walked = rules if is_one else rules._replace(given={}, updated={})
        state = inside.pack_state(tags, walked)
        more = pack_detached(inside.written, tags, walked, rules.updated.values(), self.names)
        state += [argument for _, argument in more]
        leaving = leaving._replace(state=[*came.prefixes, *[came.part_of(number) for number, _ in more]])
        packed: Any = inside.pack_checked(result, tags, walked)
        if not is_one:
            changes, packed, tags = parted(state, packed, tags, leaving, came, self.transform_name, rules)
            state = [argument._replace(packed=each) for argument, each in zip(state, changes, strict=True)]
        inside.check(packed, tags.objects, state)
        policy = inside.terms.policy
        if policy.in_place:
            packed = ([argument.packed for argument in state], packed)
        names = [self.names.text(argument.position, argument.path) for argument in state]
        return self.arranged(with_notes(packed), policy, leaving, names)

    def arranged(self, packed: Any, policy: Policy, leaving: Leaving, changed: Sequence[str]) -> Any:
        """What the transform gets of packed results.

        Args:
            packed: the result; in place, a list of what may have been changed and the result.
            policy: which says whether it is in place.
            leaving: what the transform will do to it; its `state` says so of each in that list.
            changed: what these are called.
        """
        return packed

    def used(self, call: Call) -> Sequence[Any]:
        """The leaves among the arguments that the transformed function uses, as far as the transform drops others."""
        return ()

    def is_taken(self, entered: Entered) -> Callable[[int], bool]:
        """Whether an argument's record may not be passed through, because its buffers are taken from the caller."""
        return lambda _: False


def _remade(cls: Any, transform: Any, *rest: Any) -> FunctionTransform:
    """A wrapper that was pickled."""
    return cls(transform_named(transform) if isinstance(transform, str) else transform, *rest)
