"""A *wrapper*: a function under a transform, as an object. Its name, equality, copies and pickles.

    st.jit(f)               name, documentation and signature of `f`
    repr                    <jax.jit(f), identities preserved>
    ==                      under Equinox's transforms: same function and equal options; under JAX's: same object
    copy.deepcopy           the same object; if a callable object is wrapped, a wrapper of its copy
    pickle.dumps            the name, if it leads to the object (`@st.jit` at the top of a module); otherwise the parts

The *vanilla* transform is JAX's or Equinox's own. Functions under it behave in the same way.
"""

import copy
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from ..core._node_types import is_module
from ..core._static_values import Incomparable
from ..libraries._equinox import name_of, update_wrapper, warn_of_layers_in
from ..ties._policy_and_context import PolicyOption, current_policy
from ._caller_side import Caller, CallSettings
from ._function_and_options import How, is_of_equinox, transform_named
from ._function_given_to_jax import Shared, shared_by
from ._option_lists import public_name, title_of
from .checks._refused_arguments import forbid_bound_module


class _PrintedAsPublic(type):
    """The class of `Wrapper` and its subclasses. They print as `preserve_identities`, since JAX's errors print them.

    A user's subclass prints under its own name.
    """

    def __repr__(cls) -> str:
        is_of_package = cls.__module__.startswith(f"{__package__}.")
        return "<class 'sharedtree.preserve_identities'>" if is_of_package else super().__repr__()


class Wrapper(Caller, metaclass=_PrintedAsPublic):
    """A function under a transform. There is a subclass for each family of transforms.

    No object in a wrapper refers back to the wrapper. So a wrapper is freed with the last reference to it, as a
    function under a vanilla transform is.

    Args:
        transform: the vanilla transform.
        function: the user's function.
        policy: what carries identity. None for the policy in force at each call.
        options: options of the transform, and the `package_options`.

    Attributes:
        all_options: the options as they were passed.
        options: the options for the vanilla transform, without `package_options`.
        traced_function: the function that the transform traces: the user's or, if that is a module,
            `function_for_modules`.
        is_filtered: True for Equinox's transforms: only arrays are traced.
        alike: the key by which wrappers are compared: the transform and its options. None if a wrapper equals only
            itself.
        names: names of the function's parameters, for errors.
        settings: facts for C about calls under one policy. None to leave the next call to Python.
        caches_traces: True if a trace serves many calls, so that a retrace is worth a warning.
        calls_each_time: True if each call of the transform calls the function. Then the function gets the static
            objects of this very call, and not equal ones of an earlier call.
        only_for_transform: names of options without influence on a trace of the function.
        shares_alike: True to let equal methods, and equal wrappers of one function, share their traces, although they
            are different objects. See `shared_by`.
        function_for_modules: the function that is traced if the user's is a module: (module, *args, **kwargs) → result.
            The module is then an argument of the transform, so that its leaves are traced. All modules share the
            traces. None to trace the module itself as a function.
        package_options: names of options added by the package. The transform does not take them.
        takes_rules: True if the wrapper has methods to register rules, such as `defvjp`. A module under an Equinox
            transform becomes a module. If `takes_rules` is true, it becomes a wrapper, since a module has no
            `defvjp`.
    """

    caches_traces = False
    calls_each_time = False
    only_for_transform: frozenset[str] = frozenset()
    shares_alike = False
    function_for_modules: Callable[..., Any] | None = None
    package_options: frozenset[str] = frozenset()
    takes_rules = False

    def __init_subclass__(cls) -> None:
        # Equinox warns if a wrapper of a layer becomes a field of a module, since the layer would then be a static
        # value and not trained.
        warn_of_layers_in(cls)

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: PolicyOption,
        options: dict[str, Any],
    ) -> None:
        """Stores the parts, copies the name and documentation of the function, and checks the options and the function.

        Raises:
            TypeError: if the policy says `in_place=True`, and the function is a mutable module or a method of one. The
                vanilla transform may raise other errors. See `check_options`.
        """
        self.transform = transform
        self.function = function
        self.policy = policy
        self.options = {name: value for name, value in options.items() if name not in self.package_options}
        self.all_options = options
        self.is_filtered = is_of_equinox(transform)
        stand_in = self.function_for_modules
        self.traced_function = stand_in if stand_in is not None and is_module(function) else function
        self.alike = self._key_for_comparison()
        self._shared = self._find_shared()
        self.names = self._shared.names
        # The transformed functions made so far. A subclass chooses the keys: all that its transformed functions depend
        # on, such as policy and labels.
        self._made: dict[Any, Any] = {}
        self.settings: CallSettings | None = None
        # This `update_wrapper` is the package's own. It does not copy the `__dict__` of the function: the function may
        # be another wrapper, with other attributes of these names.
        update_wrapper(self, function)
        self.__wrapped__ = function
        forbid_bound_module(function, current_policy(policy), self.transform_name)
        self.check_options()

    def _key_for_comparison(self) -> How | None:
        """Makes `alike`, the key to compare wrappers. None if a wrapper equals only itself.

        It equals only itself under a transform of JAX, and if an option has no usable `==`.
        """
        # JAX's transforms return functions. Equinox's return modules, which compare by their parts. Two objects with
        # rules may have different rules for one function.
        if not self.is_filtered or self.takes_rules:
            return None
        try:
            return How(type(self), self.transform, self.policy, self.all_options)
        except Incomparable:
            return None

    def __eq__(self, other: object) -> bool:
        """Returns True for the same object and, under Equinox's transforms, for an equal one.

        Two wrappers are equal if they wrap one function with equal transforms and options.
        """
        if self is other or type(other) is not type(self) or self.alike is None:
            return self is other
        left, right = self.function, other.function
        # The functions must be one object, or equal wrappers: two results of `filter_grad(filter_jit(f))` are equal,
        # although each holds a wrapper of its own.
        return self.alike == other.alike and (left is right or (isinstance(left, Wrapper) and left == right))

    def __hash__(self) -> int:
        if self.alike is None:
            return object.__hash__(self)
        function = self.function
        # `self` keeps the function alive, so no other object has its `id`.
        return hash((self.alike, function if isinstance(function, Wrapper) else id(function)))

    def _find_shared(self) -> Shared:
        """Returns the data shared by all wrappers of one function with this transform and these options.

        They hold the inner functions, for JAX in place of the user's function, and findings from earlier traces.
        """
        function = self.traced_function
        # Without cached traces there is nothing to share.
        if not self.caches_traces:
            return Shared(function)
        options = {name: self.options[name] for name in sorted(self.options) if name not in self.only_for_transform}
        # The function for all modules is one object.
        alike = self.shares_alike and function is self.function
        return shared_by(function, (type(self), self.transform), options, alike=alike)

    def __reduce__(self) -> Any:
        """Returns what pickle stores: the name by which the wrapper can be imported, as for a function.

        If it cannot be imported, returns `_remade` and its arguments: the parts of the wrapper.
        """
        # `@st.jit` at the top of a module: the wrapper has the qualified name of the function that it replaces. Follow
        # this name, and see whether it leads to the wrapper.
        qualname = getattr(self, "__qualname__", "")
        obj: Any = sys.modules.get(self.__module__)
        for part in qualname.split("."):
            obj = getattr(obj, part, None)
        if obj is self:
            return qualname
        # Pickle would store the transform by its `__qualname__`. Some of JAX's transforms cannot be found under theirs,
        # so the public name is stored, such as "jax.vmap".
        transform = public_name(self.transform) or self.transform
        return _remade, (type(self), transform, self.function, self.policy, self.all_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Python copies a function as the function itself. Then the copy of its wrapper is the wrapper itself. A
        # callable object has a real copy, which gets a wrapper of its own.
        function = copy.deepcopy(self.function, memo)
        if function is self.function:
            return self
        return type(self)(self.transform, function, self.policy, self.all_options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A wrapper in a class body is a method, as a function is.
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<{self.transform_name}({name_of(self.function, self.function, '__qualname__')}), identities preserved>"

    @functools.cached_property
    def transform_name(self) -> str:
        """Name of the transform in errors, such as `jax.jit`."""
        return title_of(self.transform)

    def check_options(self) -> None:
        """Raises the vanilla transform's own errors for wrong options or a wrong function.

        The transform is applied for its errors alone, when the function is wrapped. The result is dropped.
        """
        function = self.function
        # An Equinox module may have a field `__name__` that is no text. Some transforms fail with such a name.
        if callable(function) and not isinstance(getattr(function, "__name__", ""), str):
            function = _with_text_as_name(function)
        self.transform(function, **self.options)


def _with_text_as_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a callable object, with the name of the object's class as its `__name__`."""

    def forwarding_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    update_wrapper(forwarding_function, function)
    forwarding_function.__name__ = type(function).__name__
    return forwarding_function


def _remade(cls: Any, transform: Any, *args: Any) -> Wrapper:
    """Rebuilds a wrapper from its pickle. Pickles store this function by its name, so the name must stay.

    Args:
        cls: class of the wrapper.
        transform: the vanilla transform, or its public name.
        args: the other arguments of its `__init__`: the function, the policy and the options.
    """
    return cls(transform_named(transform) if isinstance(transform, str) else transform, *args)
