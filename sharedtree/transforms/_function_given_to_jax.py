"""The inner function: what a transform gets in place of the user's function.

JAX keys its caches of traces on the function that it gets, and drops them when that function dies. So there is one
inner function for each function, policy and set of options, however often it is wrapped:

    st.jit(f)(x)                f, weakly  →  Shared  →  inner function for each policy  →  JAX's traces
    st.jit(f)(x)                the same f, so the same inner function: nothing is traced again, as in vanilla JAX

A function is recognised by identity, never by a user's `==`. The table below holds it weakly, so that its entry and
JAX's caches are freed with it. The wrapper, which the user has, keeps it alive.

Two inner functions are not shared and hold the user's function: one that outlives its call, such as a derivative rule,
and that of a function without weak references.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ..core._by_identity import WeakIdentityDict
from ..core._locks import Lock
from ..core._static_values import IdentityKey, Incomparable, Static
from ..core._structure import Structure
from ..libraries._equinox import name_of, update_wrapper
from ..ties._policy_and_context import Policy
from ._argument_names import Names
from ._function_and_options import How
from ._leaf_groups import LeafGroup, LeafGroups
from .checks._lost_changes import Unsaid
from .checks._retracing import Traces
from .checks._ties_lost_in_calls import SeenArguments

_MAX_SETS_OF_OPTIONS = 64
"""Number of sets of options that are kept for one function. With more, the function is traced again under the first."""


class Inner:
    """Calls the user's function inside a transform. Looks like that function: same name, documentation and source.

    Args:
        function: the user's function.
        hold: returns the function, or None if it is gone. A weak reference if the inner function is shared.
        call: (function, args, kwargs) → result for the transform.
        terms: facts shared by all traces of the function, for the adapter.
        names: names of the arguments in JAX's messages. None for the paths in their leaf groups.
        num_before: number of these arguments without a group. They come first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        hold: Callable[[], Any],
        call: Callable[[Any, Sequence[Any], dict[str, Any]], Any],
        terms: Any = None,
        names: Sequence[str] | None = None,
        num_before: int = 0,
    ) -> None:
        update_wrapper(self, function)
        # `__wrapped__` would keep the function alive, and Equinox would look for arrays in it.
        del self.__dict__["__wrapped__"]
        self.__name__ = name_of(function, type(function).__name__)
        self._hold = hold
        self._call = call
        self.terms = terms
        self.num_before = num_before
        self.__signature__ = _SignatureOfGroups(names, num_before)

    @property
    def function(self) -> Any:
        """The user's function.

        Raises:
            ReferenceError: if it is gone. Its wrapper keeps it alive, so the wrapper is gone too.
        """
        function = self._hold()
        if function is None:
            raise ReferenceError(
                f"`{self.__name__}` was called by a transform after the function and its wrapper were gone. Keep the "
                "wrapper as long as it may be called, or register the transform as one that nothing is known about:\n"
                "    sharedtree.register_transform(transform)"
            )
        return function

    @property
    def __code__(self) -> Any:
        """The code of the function, whose file and line JAX puts into its messages."""
        function = inspect.unwrap(self.function)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        return function.__code__

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.function, args, kwargs)


# ---- Finding the inner function again ----


class Shared:
    """State shared by all wrappers of one function with the same transform and options.

    Attributes:
        hold: returns the function. In the table, a weak reference, so that the function can die.
        names: names of the parameters.
        traces: traces of the function.
        seen: the arguments of earlier traces.
        unsaid: changes lost in traces without a run. A later run warns of them.
        inner: for each policy, the inner function.
    """

    def __init__(self, function: Callable[..., Any], hold: Callable[[], Any] | None = None) -> None:
        self.hold = hold or (lambda: function)
        self.names = Names(function)
        self.traces = Traces()
        self.seen = SeenArguments()
        self.unsaid = Unsaid()
        self.inner: dict[Policy, Inner] = {}


_table: WeakIdentityDict[dict[Any, Shared]] = WeakIdentityDict()
_lock = Lock()


def shared_by(function: Callable[..., Any], transform: Any, options: dict[str, Any], *, alike: bool = False) -> Shared:
    """Finds the state shared by all wrappers of one function. Makes new state if there is none yet.

    Args:
        function: the user's function.
        transform: key for the transform. It must be hashable.
        options: the options on which the inner function depends.
        alike: True to recognise equal methods, and equal wrappers of Equinox's transforms, as one function. Both are
            made anew on each access. Equinox compares by `==`, so for it they are one. For JAX they are not, since
            their weak references die with them.

    If the function or the options cannot be recognised again, the new state is not kept.
    """
    try:
        anchor, steps, hold = _held_weakly(function) if alike else (function, None, weakref.ref(function))
        key = transform, steps, Static(options)
        with _lock:
            shared_of_key = _table.get(anchor)
            if shared_of_key is None:
                shared_of_key = _table[anchor] = {}
    except (TypeError, Incomparable):
        return Shared(function)
    # From here on without the lock. Comparing options may run a user's `==`, which may wait for another thread or wrap
    # a function itself.
    shared = shared_of_key.get(key)
    if shared is not None:
        return shared
    shared = shared_of_key.setdefault(key, Shared(function, hold))
    if len(shared_of_key) > _MAX_SETS_OF_OPTIONS:
        shared_of_key.pop(next(iter(shared_of_key)), None)
    return shared


def _held_weakly(function: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """Finds the object behind a function, if the function is made anew on each access.

    Returns:
        The object, as it lives longer; the steps from it to the function, hashable; and a callable. This makes the
        function again, or returns None once the object is gone.
    """
    if isinstance(function, types.MethodType):
        return function.__self__, IdentityKey(function.__func__), weakref.WeakMethod(function)
    how = getattr(function, "alike", None)
    if not isinstance(how, How):
        return function, None, weakref.ref(function)
    # A wrapper of Equinox's transforms, perhaps around a method or another such wrapper.
    # Its table entry is that of the function inside.
    anchor, steps, hold = _held_weakly(function.function)

    def make_again() -> Any:
        inside = hold()
        return None if inside is None else how.applied_to(inside)

    return anchor, (how, steps), make_again


class Learned:
    """Findings of the traces of a function, by the structures of the operands. Keeps no structure alive."""

    def __init__(self) -> None:
        self._entries: dict[tuple[weakref.ref[Structure], ...], tuple[Any, Any]] = {}

    def get(self, structures: Sequence[Structure]) -> Any:
        """Returns the value added for these structures. None if there is none."""
        return self._entries.get(tuple(map(weakref.ref, structures)), (None,))[0]

    def add(self, structures: Sequence[Structure], value: Any) -> None:
        """Keeps a value until one of the structures dies."""
        key = tuple(map(weakref.ref, structures))
        # The callbacks refer to the dictionary alone, so that they do not keep `self` alive.
        entries = self._entries
        entries[key] = value, [weakref.ref(structure, lambda _: entries.pop(key, None)) for structure in structures]


# ---- Names of arguments in JAX's messages ----


class _SignatureOfGroups(inspect.Signature):
    """A signature for JAX, to name the arguments: any number of nameless groups.

    A name would be one too many, as the paths of the leaves in a group begin with the names of the user's arguments.

    Args:
        names: names of the arguments, if others than in their groups.
        num_before: number of arguments without a group.
    """

    def __init__(self, names: Sequence[str] | None, num_before: int) -> None:
        super().__init__([inspect.Parameter(_Nameless("hands"), inspect.Parameter.VAR_POSITIONAL)])
        self._names = names
        self._num_before = num_before

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        return _Bound(self, args, kwargs, self._names, self._num_before)


class _Nameless(str):
    """The name of a group. It prints as nothing."""

    __slots__ = ()

    def __str__(self) -> str:
        return ""

    def __format__(self, spec: str) -> str:
        return ""

    __hash__ = str.__hash__


class _Bound(NamedTuple):
    """Bound arguments with the attributes of `inspect.BoundArguments` as far as JAX reads them."""

    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Sequence[str] | None
    num_before: int

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by their names."""
        return {_Nameless(i): self._with_names(i, arg) for i, arg in enumerate(self.args)} | self.kwargs

    def _with_names(self, position: int, arg: Any) -> Any:
        """Returns a copy of an argument with `names` at the beginning of the paths of its leaves."""
        names = self.names
        if names is None:
            return arg
        if jtu.all_leaves((arg,)):
            return LeafGroups((arg,), names[position : position + 1])
        names_in_groups = names[self.num_before :]
        return jtu.tree_map(
            lambda group: group.named(names_in_groups) if type(group) is LeafGroup else group, arg, is_leaf=_is_group
        )

    def apply_defaults(self) -> None:
        """Does nothing, since no parameter has a default."""


def _is_group(obj: Any) -> bool:
    return type(obj) is LeafGroup
