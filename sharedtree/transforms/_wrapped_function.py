"""A function under a transform, as an object: its name, what it is equal to, and how it is copied and pickled.

    st.jit(f)               name, documentation and signature of `f`
    repr                    <jax.jit(f), identities preserved>
    ==                      under Equinox's transforms: same function and equal options; under JAX's: same object
    copy.deepcopy           the same object; if a callable object is wrapped, a wrapper of its copy
    pickle.dumps            the name, if it leads to the object (`@st.jit` at the top of a module); otherwise the parts

Functions under the vanilla transforms behave in the same way.
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
from ._repeated_calls import Caller, CallSettings
from .checks._refused_arguments import forbid_bound_module


class _PrintedAsPublic(type):
    """The class of `Wrapper` and its subclasses. They print as `preserve_identities`, since JAX's errors print them."""

    def __repr__(cls) -> str:
        is_of_package = cls.__module__.startswith(f"{__package__}.")
        return "<class 'sharedtree.preserve_identities'>" if is_of_package else super().__repr__()


class Wrapper(Caller, metaclass=_PrintedAsPublic):
    """A function under a transform. There is a subclass for each family of transforms.

    Nothing that a wrapper refers to refers back to it. So it is freed with the last reference to it, as a vanilla one
    is.

    Args:
        transform: the vanilla transform.
        function: the user's function.
        policy: what carries identity. None for the policy in force at each call.
        options: options of the transform, and the `package_options`.

    Attributes:
        alike: the transform and its options, by which wrappers are compared. None if a wrapper equals only itself.
        caches_traces: True if a trace serves many calls, so that a retrace is worth a warning.
        calls_each_time: True if each call of the transform calls the function. Then the function gets the static
            objects of this very call, and not equal ones of an earlier call.
        only_for_transform: names of options on which a trace of the function does not depend.
        shares_alike: True to recognise equal methods, and equal wrappers, as one function. See `shared_by`.
        package_options: names of options that the package adds. The transform does not take them.
        takes_rules: True if the wrapper has methods of its own (`defvjp`). Then a module under the transform becomes a
            wrapper, too, and no module.
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
        """Takes the name and documentation of the function, and checks the options."""
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
        self.settings: CallSettings | None = None
        # Does not copy the function's `__dict__`, which may be that of another wrapper.
        update_wrapper(self, function)
        self.__wrapped__ = function
        forbid_bound_module(function, current_policy(policy), self.transform_name)
        self.check_options()

    def _made_alike(self) -> How | None:
        """Makes `alike`, the key by which wrappers are compared. None if a wrapper equals only itself."""
        # JAX's transforms return functions. Equinox's return modules, which compare by their parts.
        if not self.is_filtered:
            return None
        try:
            return How(type(self), self.transform, self.policy, self.all_options)
        except Incomparable:
            return None

    def __eq__(self, other: object) -> bool:
        """Returns True for the same object and, under Equinox's transforms, for an equal one."""
        if self is other or type(other) is not type(self) or self.alike is None:
            return self is other
        function, other_function = self.function, other.function
        # The functions must be one object. But a method under an Equinox transform is wrapped anew on each access, so
        # wrappers may also be equal.
        return self.alike == other.alike and (
            function is other_function or (isinstance(function, Wrapper) and function == other_function)
        )

    def __hash__(self) -> int:
        if self.alike is None:
            return object.__hash__(self)
        function = self.function
        # `self` keeps the function alive, so no other object has its `id`.
        return hash((self.alike, function if isinstance(function, Wrapper) else id(function)))

    def _shared_by(self, function: Callable[..., Any]) -> Shared:
        """Returns the state that wrappers of one function share: its inner functions and its traces."""
        # Without cached traces there is nothing to share.
        if not self.caches_traces:
            return Shared(function)
        options = {name: self.options[name] for name in sorted(self.options) if name not in self.only_for_transform}
        return shared_by(function, (type(self), self.transform), options, alike=self.shares_alike)

    def __reduce__(self) -> Any:
        """Returns the name by which the wrapper can be found, as for a function, or its parts."""
        # A decorated function of a module has the name of the function that it replaces.
        qualname = getattr(self, "__qualname__", "")
        obj: Any = sys.modules.get(self.__module__)
        for part in qualname.split("."):
            obj = getattr(obj, part, None)
        if obj is self:
            return qualname
        # Pickle stores a transform by its `__qualname__`. Some of JAX's cannot be found under theirs, so the public
        # name is stored.
        transform = public_name(self.transform) or self.transform
        return _remade, (type(self), transform, self.function, self.policy, self.all_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy of a function is the function itself, so the copy of its wrapper is the wrapper itself. A callable
        # object has a copy, which is wrapped.
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
        """Applies the vanilla transform, so that it raises its own errors for the options and the function at once."""
        function = self.function
        # An Equinox module may have a field `__name__` that is no text. Some transforms fail with such a name.
        if callable(function) and not isinstance(getattr(function, "__name__", ""), str):
            function = _with_text_as_name(function)
        self.transform(function, **self.options)


def _with_text_as_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls another one, and has the name of its class."""

    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    update_wrapper(named, function)
    named.__name__ = type(function).__name__
    return named


def _remade(cls: Any, transform: Any, *args: Any) -> Wrapper:
    """Rebuilds a wrapper from its pickle. A public transform is stored by its name."""
    return cls(transform_named(transform) if isinstance(transform, str) else transform, *args)
