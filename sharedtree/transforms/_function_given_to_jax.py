"""The inner function: what a transform sees in place of the user's function.

JAX keys its caches of traces on the function that it was given, and lets go of them when that function dies. So the
inner function is made once for each (function, policy, options), whoever wraps it: then `jit(f)(x)`, said twice, is
traced once, as in vanilla JAX. The function is known by identity, never by a user's `==`, and is held weakly, so that
the table below, and JAX's caches, go when it goes. The wrapper, which the user has, holds it.

What outlives its call, or allows no weak reference, is not shared: the inner function then holds the user's.
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
from ..core._static_kinds import IdentityKey, Incomparable
from ..core._static_values import Static
from ..core._structure import Structure
from ..libraries._equinox import name_of, update_wrapper
from ..ties._policy_and_context import Policy
from ._argument_names import Names
from ._function_and_options import How
from ._leaf_groups import LeafGroup, LeafGroups
from .checks._lost_changes import Unsaid
from .checks._retracing import Traces
from .checks._ties_lost_in_calls import SeenArguments

_MOST = 64
"""So many sets of options are remembered for one function; who uses more has the first ones traced again."""


class _Nameless(str):
    """The name of a group, which prints as nothing, since the paths in the group begin with names already."""

    __slots__ = ()

    def __str__(self) -> str:
        return ""

    def __format__(self, spec: str) -> str:
        return ""

    __hash__ = str.__hash__


class _Bound(NamedTuple):
    """What JAX asks of bound arguments."""

    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Sequence[str] | None
    num_before: int

    @property
    def arguments(self) -> dict[str, Any]:
        """By their names."""
        return {_Nameless(i): self._named(i, arg) for i, arg in enumerate(self.args)} | self.kwargs

    def _named(self, position: int, arg: Any) -> Any:
        names = self.names
        if names is None:
            return arg
        if jtu.all_leaves((arg,)):
            return LeafGroups((arg,), names[position : position + 1])
        own = names[self.num_before :]
        return jtu.tree_map(
            lambda group: group.named(own) if type(group) is LeafGroup else group, arg, is_leaf=_is_group
        )

    def apply_defaults(self) -> None:
        """There are none."""


def _is_group(obj: Any) -> bool:
    return type(obj) is LeafGroup


class _SignatureOfGroups(inspect.Signature):
    """By which JAX names arguments: with as many parameters as there are groups, none of which has a name.

    Args:
        names: of the arguments, if others than in the groups.
        num_before: how many of them are in no group.
    """

    def __init__(self, names: Sequence[str] | None, num_before: int) -> None:
        super().__init__([inspect.Parameter(_Nameless("hands"), inspect.Parameter.VAR_POSITIONAL)])
        self._names = names
        self._num_before = num_before

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        return _Bound(self, args, kwargs, self._names, self._num_before)


class Inner:
    """Calls the user's function on the other side of a transform, and looks like it: name, signature, place in a file.

    Args:
        function: the user's function.
        hold: the way to the function: it, or a weak reference to it, is what this returns.
        call: (function, args, kwargs) → what the transform gets.
        terms: what its traces have in common, for the adapter.
        names: what JAX's messages are to call the arguments, if not as their hands do.
        num_before: how many of these are in no group.
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
        # It would hold the function, and Equinox would look for arrays in it.
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
            ReferenceError: if it is gone. Its wrapper keeps it, so only a transform that calls it later can see that.
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
        """Where JAX finds file and line for its messages."""
        function = inspect.unwrap(self.function)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        return function.__code__

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.function, args, kwargs)


class Learned:
    """What traces of a function have taught, by the structures of the operands, none of which this keeps alive."""

    def __init__(self) -> None:
        self._known: dict[tuple[weakref.ref[Structure], ...], tuple[Any, Any]] = {}

    def get(self, structures: Sequence[Structure]) -> Any:
        """What was learned with these; None if nothing was."""
        return self._known.get(tuple(map(weakref.ref, structures)), (None,))[0]

    def add(self, structures: Sequence[Structure], value: Any) -> None:
        """Learns something, until one of the structures goes."""
        key = tuple(map(weakref.ref, structures))
        known = self._known
        known[key] = value, [weakref.ref(each, lambda _: known.pop(key, None)) for each in structures]


class Shared:
    """What the wrappers of one function with the same transform and options have in common.

    Attributes:
        hold: returns the function. What is in the table must not keep it alive, so there it is a weak reference.
        names: of the parameters.
        traces: of the function.
        seen: the arguments it was traced with.
        unsaid: the changes that were lost in traces which did not run.
        inner: what the transform sees, for each policy.
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
    """What wrappers of this very function have in common, if it can be known again; otherwise something new.

    Args:
        function: the user's function.
        transform: what is done with it; hashable.
        options: those that the inner function depends on.
        alike: whether functions that are made anew whenever they are asked for, but are equal, are one: methods, and
            what Equinox's transforms make of one function. They are for Equinox, which compares by `==`, but not for
            JAX, where their weak references die with them.
    """
    try:
        anchor, made, hold = _held_weakly(function) if alike else (function, None, weakref.ref(function))
        key = transform, made, Static(options)
        with _lock:
            known = _table.get(anchor)
            if known is None:
                known = _table[anchor] = {}
    except (TypeError, Incomparable):
        return Shared(function)
    # Without the lock, for comparing options may run a user's `==`, which may wait for anything, or wrap functions.
    shared = known.get(key)
    if shared is not None:
        return shared
    shared = known.setdefault(key, Shared(function, hold))
    if len(known) > _MOST:
        known.pop(next(iter(known)), None)
    return shared


def _held_weakly(function: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """What a function is made of, how, and the way to make it again as long as that is alive."""
    if isinstance(function, types.MethodType):
        return function.__self__, IdentityKey(function.__func__), weakref.WeakMethod(function)
    how = getattr(function, "alike", None)
    if not isinstance(how, How):
        return function, None, weakref.ref(function)
    anchor, made, hold = _held_weakly(function.function)

    def again() -> Any:
        inside = hold()
        return None if inside is None else how.applied_to(inside)

    return anchor, (how, made), again
