"""A function under a transform, as an object: its name, what it is equal to, and how it is copied and pickled.

    st.jit(f)               name, documentation and signature of `f`
    repr                    <jax.jit(f), identities preserved>
    ==                      of Equinox's transforms, two of one function with equal options; of JAX's, identity
    copy.deepcopy           the same object; around a callable object, a wrapper of its copy
    pickle.dumps            a name if it leads to the object, as that of a decorated function does; otherwise the parts

All this is as the vanilla transforms have it.
"""

import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from ..core._static_values import Incomparable
from ..libraries._equinox import name_of, update_wrapper, warn_of_layers_in
from ..ties._policy_and_context import PolicyOption, current_policy
from ._function_and_options import How, is_of_equinox, transform_named
from ._function_given_to_jax import Shared, shared_by
from ._option_lists import public_name, title_of
from ._repeated_calls import Caller, Way
from .checks._refused_arguments import forbid_bound_module


class _PrintedAsPublic(type):
    """The class of wrapped functions. It prints as `preserve_identities`, since JAX's errors name the class."""

    def __repr__(cls) -> str:
        is_of_package = cls.__module__.startswith(f"{__package__}.")
        return "<class 'sharedtree.preserve_identities'>" if is_of_package else super().__repr__()


class Wrapper(Caller, metaclass=_PrintedAsPublic):
    """A function under a transform, for any transform.

    No object below a wrapper refers back to it. So it is freed with the last reference, as a vanilla one is.

    Args:
        transform: the vanilla transform.
        function: the user's function.
        policy: what carries identity. None for the policy in force at each call.
        options: options of the transform, and the `package_options`.

    Attributes:
        caches_traces: True if a trace serves many calls, so that a retrace is worth a warning.
        calls_each_time: True if each call of the transform calls the function, so that it gets the static objects of
            this very call.
        only_for_transform: options without effect on the inner function.
        shares_alike: True to recognise equal methods, and equal wrappers, as one function. See `shared_by`.
        package_options: options of the package. The transform does not take them.
        takes_rules: True if it has methods of its own (`defvjp`). Then it is no module, even around a module.
    """

    caches_traces = False
    calls_each_time = False
    only_for_transform: frozenset[str] = frozenset()
    shares_alike = False
    package_options: frozenset[str] = frozenset()
    takes_rules = False

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
        self.options = {name: value for name, value in options.items() if name not in self.package_options}
        self.all_options = options
        self.is_filtered = is_of_equinox(transform)
        self.alike = self._made_alike()
        self._shared = self._shared_by(function)
        self.names = self._shared.names
        self._made: dict[Any, Any] = {}
        self.way: Way | None = None
        # Does not copy the function's `__dict__`, which may be that of another wrapper.
        update_wrapper(self, function)
        self.__wrapped__ = function
        forbid_bound_module(function, current_policy(policy), self.transform_name)
        self.check_options()

    def _made_alike(self) -> How | None:
        """Makes the key to compare wrappers of one function. None if each is equal to itself only."""
        # JAX's transforms return functions. Equinox's return modules, which compare by their parts.
        if not self.is_filtered:
            return None
        try:
            return How(type(self), self.transform, self.policy, self.all_options)
        except Incomparable:
            return None

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is not type(self) or self.alike is None:
            return self is other
        function, other_function = self.function, other.function
        # Functions are compared by identity, except wrappers of Equinox's transforms: these are made anew on access.
        return self.alike == other.alike and (
            function is other_function or (isinstance(function, Wrapper) and function == other_function)
        )

    def __hash__(self) -> int:
        if self.alike is None:
            return object.__hash__(self)
        function = self.function
        # `self` keeps the function alive, so its `id` stays its own.
        return hash((self.alike, function if isinstance(function, Wrapper) else id(function)))

    def _shared_by(self, function: Callable[..., Any]) -> Shared:
        if not self.caches_traces:
            return Shared(function)
        options = {name: self.options[name] for name in sorted(self.options) if name not in self.only_for_transform}
        return shared_by(function, (type(self), self.transform), options, alike=self.shares_alike)

    def __reduce__(self) -> Any:
        """Pickles by name, as a function is, or by the parts."""
        # A decorated function can be found by its name, so it is pickled by name, as a function is.
        qualname = getattr(self, "__qualname__", "")
        obj: Any = sys.modules.get(self.__module__)
        for part in qualname.split("."):
            obj = getattr(obj, part, None)
        if obj is self:
            return qualname
        # Some of JAX's transforms have a `__qualname__` under which they cannot be found, so pickle would refuse them.
        transform = public_name(self.transform) or self.transform
        return _remade, (type(self), transform, self.function, self.policy, self.all_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Functions are copied by reference, so the wrapper is too. A callable object is copied, and the copy wrapped.
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
        """Name of the transform in errors."""
        return title_of(self.transform)

    def check_options(self) -> None:
        """Applies the vanilla transform, so that it refuses the options or the function when it always does."""
        function = self.function
        # An Equinox module may have a field `__name__` that is no text, with which some transforms fail.
        if callable(function) and not isinstance(getattr(function, "__name__", ""), str):
            function = _with_text_as_name(function)
        self.transform(function, **self.options)


def _with_text_as_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the name of this one's class. It calls this one."""

    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    update_wrapper(named, function)
    named.__name__ = type(function).__name__
    return named


def _remade(cls: Any, transform: Any, *args: Any) -> Wrapper:
    """Rebuilds a wrapper from its pickle. A public transform is stored by its name."""
    return cls(transform_named(transform) if isinstance(transform, str) else transform, *args)
