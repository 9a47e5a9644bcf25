"""A function under a transform, as an object: what it is called, to what it is equal, how it is copied and pickled."""

import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from ..core._static_kinds import Incomparable
from ..libraries._equinox import name_of, update_wrapper, warn_of_layers_in
from ..ties._policy_and_context import PolicyOption, current_policy
from ._function_and_options import How, is_of_equinox, transform_named
from ._function_given_to_jax import Shared, shared_by
from ._option_lists import public_name, title_of
from ._repeated_calls import Caller, Way
from .checks._refused_arguments import forbid_bound_module


class _Named(type):
    """The class of wrapped functions prints as what makes them: JAX names the class of what it cannot take."""

    def __repr__(cls) -> str:
        is_own = cls.__module__.startswith(f"{__package__}.")
        return "<class 'sharedtree.preserve_identities'>" if is_own else super().__repr__()


class Wrapper(Caller, metaclass=_Named):
    """A function under a transform, whatever the transform does.

    Args:
        transform: the vanilla transform.
        function: the user's function.
        policy: what counts as sharing; None for that of the thread at each call.
        options: of the transform.

    Nothing that this refers to refers back to it, so it is freed with the last reference, as a vanilla one is.
    """

    caches_traces = False
    """Whether a trace serves many calls, so that a retrace is worth a word."""
    calls_each_time = False
    """Whether the function is called in each call of the transform, so that it gets the static objects of that call."""
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
        self.is_filtered = is_of_equinox(transform)
        self.alike = self._made_alike()
        self._shared = self._shared_by(function)
        self.names = self._shared.names
        self._made: dict[Any, Any] = {}
        self.way: Way | None = None
        update_wrapper(self, function)  # not its `__dict__`, which may be that of another wrapper
        self.__wrapped__ = function
        forbid_bound_module(function, current_policy(policy), self.transform_name)
        self.check_options()

    def _made_alike(self) -> How | None:
        """What makes wrappers of one function equal. Equinox's are; JAX's are functions, each equal to itself only."""
        if not self.is_filtered:
            return None
        try:
            return How(type(self), self.transform, self.policy, self.all_options)
        except Incomparable:
            return None

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is not type(self) or self.alike is None:
            return self is other
        one, two = self.function, other.function
        return self.alike == other.alike and (one is two or (isinstance(one, Wrapper) and one == two))

    def __hash__(self) -> int:
        if self.alike is None:
            return object.__hash__(self)
        function = self.function
        # The function is alive as long as this is.
        return hash((self.alike, function if isinstance(function, Wrapper) else id(function)))

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
        if callable(function) and not isinstance(getattr(function, "__name__", ""), str):  # as of an Equinox module
            function = _named(function)
        self.transform(function, **self.options)


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stands for one whose name is no text, as a field of an Equinox module may be called so."""

    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    update_wrapper(named, function)
    named.__name__ = type(function).__name__
    return named


def _remade(cls: Any, transform: Any, *rest: Any) -> Wrapper:
    """A wrapper that was pickled."""
    return cls(transform_named(transform) if isinstance(transform, str) else transform, *rest)
