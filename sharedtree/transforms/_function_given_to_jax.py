"""The inner function: the argument of a transform in place of the user's function.

An inner function takes *leaf groups*: pytree nodes with the leaves of the arguments, and with the structure of all
arguments. It builds the arguments from them, and calls the user's function.

JAX keys its caches of traces on the function it gets, and drops them when the function dies. So there is one inner
function for each user's function, policy and set of options, even if the function is wrapped several times:

    st.jit(f)(x)                f, weakly  →  Shared  →  inner function for each policy  →  JAX's traces
    st.jit(f)(x)                the same f, so the same inner function: nothing is traced again, as in vanilla JAX

A function is found again by identity, never by a user's `==`. The table in this file refers to it weakly, so that the
entry and JAX's caches are freed with the function. The *wrapper*, `st.jit(f)`, keeps it alive.

Some inner functions are not shared, and keep the user's function alive: derivative rules, since JAX may call them
after the wrapper is gone, and the inner functions of functions without weak references.
"""

import copy
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
from ._function_side import FunctionTrace, Terms, TraceHistory
from ._leaf_groups import LeafGroup, LeafGroups
from .checks._lost_changes import DeferredLosses
from .checks._retracing import Traces
from .checks._ties_lost_in_calls import SeenArguments

_MAX_SETS_OF_OPTIONS = 64
"""Number of sets of options that are kept for one function. With one more, the oldest set is dropped.

If it is used again, the function is traced again.
"""


class NewProgramError(Exception):
    """C called a transformed function, and JAX began a program that Python must know first. Nothing was run."""


class Inner:
    """Traces the user's function inside a transform. Looks like this function: same name, documentation and source.

    Args:
        function: the user's function. Its name and documentation are copied.
        terms: facts that all traces of the function have in common.
        body: (a new `FunctionTrace`, *arguments from the transform) → result for the transform. It does the work: it
            builds the arguments of the function from leaf groups, calls the function, and packs its result.
        get_function: returns the function, or None if it has been freed. An inner function that is shared refers to the
            function by this alone, and weakly: then `terms` and `body` must not refer to it, either. None to keep the
            function alive.
        names: names of the arguments in JAX's messages. None to name them by the paths in their leaf groups.
        num_before: number of arguments in front of the leaf groups.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        terms: Terms,
        body: Callable[..., Any],
        get_function: Callable[[], Any] | None = None,
        names: Sequence[str] | None = None,
        num_before: int = 0,
    ) -> None:
        """Makes the inner function look like the user's."""
        update_wrapper(self, function)
        # `__wrapped__` would keep the function alive, and Equinox would look for arrays in it.
        del self.__dict__["__wrapped__"]
        self.__name__ = name_of(function, type(function).__name__)
        self._get_function = get_function or (lambda: function)
        self._body = body
        # For a transform to keep what it made of this function, so that all its wrappers share it.
        self.transformed: dict[Any, Any] = {}
        self.terms = terms
        self.num_before = num_before
        self.__signature__ = _SignatureOfGroups(names, num_before)

    @property
    def function(self) -> Any:
        """The user's function.

        Raises:
            ReferenceError: if the function has been freed. Its wrapper keeps it alive, so the wrapper is gone, too. A
                transform may get here if it keeps the inner function for later calls.
        """
        function = self._get_function()
        if function is None:
            raise ReferenceError(
                f"`{self.__name__}` was called by a transform after the function and its wrapper were deleted. Keep a "
                "reference to the wrapper as long as it may be called, or register the transform:\n"
                "    sharedtree.register_transform(transform)"
            )
        return function

    @property
    def __code__(self) -> Any:
        """The code object of the user's function. JAX reads its file and line from here, for messages."""
        # The user's own function may be under decorators and partials.
        function = inspect.unwrap(self.function)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        return function.__code__

    def guarded(self, require: Callable[[], None]) -> "Inner":
        """Returns an inner function like this one, that calls `require` first, which may raise to end the trace."""
        run_body = self._body

        def body(trace: FunctionTrace, *args: Any, **kwargs: Any) -> Any:
            require()
            return run_body(trace, *args, **kwargs)

        guarded = copy.copy(self)
        guarded._body = body
        guarded.transformed = {}
        return guarded

    def __repr__(self) -> str:
        return f"<function {self.__name__}>"

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._body(FunctionTrace(self.terms, self.function), *args, **kwargs)


# ---- Finding the inner function again ----


class Shared:
    """Data shared by all wrappers of one function with the same transform and options.

    Args:
        function: the user's function.
        get_function: returns the function, or None if it has been freed. It refers to the function weakly. None for
            an object outside the table: it may then keep the function alive.

    Attributes:
        get_function: returns the function, or None if it has been freed.
        names: names of the parameters.
        history: findings from the traces of the function.
    """

    def __init__(self, function: Callable[..., Any], get_function: Callable[[], Any] | None = None) -> None:
        # The lambda keeps the function alive as long as this object lives.
        self.get_function = get_function or (lambda: function)
        self.names = Names(function)
        self.history = TraceHistory(Traces(), SeenArguments(), DeferredLosses())
        self._inner: dict[Policy, Inner] = {}

    def inner_for(self, policy: Policy, make: Callable[[], Inner]) -> Inner:
        """Returns the inner function under a policy. It is made on first use, so that JAX finds its traces again.

        Args:
            policy: the policy.
            make: makes the inner function. It must hold `get_function`, `history` and nothing else of this object.
        """
        inner = self._inner.get(policy)
        if inner is None:
            # If another thread was faster, both threads take its inner function, so that JAX traces once.
            inner = self._inner.setdefault(policy, make())
        return inner


# Owner → (transform, steps, options) → the shared data. The owner is the user's function, and is held weakly. If the
# function is made anew on each access, as a method is, the owner is the object that makes it. See `_Origin`.
_table: WeakIdentityDict[dict[Any, Shared]] = WeakIdentityDict()
_lock = Lock()


def shared_by(function: Callable[..., Any], transform: Any, options: dict[str, Any], *, alike: bool = False) -> Shared:
    """Returns the data shared by all wrappers of one function. Makes new data if there are none yet.

    New data are kept for later calls with the same arguments. They are not kept if the function has no weak references
    or if the options cannot be compared.

    Args:
        function: the user's function.
        transform: key for the transform. It must be hashable.
        options: the options with an influence on the inner function.
        alike: True to return one object for equal methods, and for equal wrappers of Equinox's transforms, although
            they are made anew on each access. Equinox's transforms compare functions by `==`, JAX's by identity.
    """
    # Find the shared data of all wrappers of this function, or begin with none.
    try:
        owner, steps, get_function = _origin_of(function) if alike else (function, None, weakref.ref(function))
        key = transform, steps, Static(options)
        with _lock:
            shared_of_key = _table.get(owner)
            if shared_of_key is None:
                shared_of_key = _table[owner] = {}
    # No weak references, or options without a usable `==`.
    except (TypeError, Incomparable):
        return Shared(function)
    # From here on without the lock. Comparing options may run a user's `==`, which may wait for another thread or wrap
    # a function itself.
    shared = shared_of_key.get(key)
    if shared is not None:
        return shared
    # If another thread was faster, both get its object.
    shared = shared_of_key.setdefault(key, Shared(function, get_function))
    # Drop the oldest object if there are too many.
    if len(shared_of_key) > _MAX_SETS_OF_OPTIONS:
        shared_of_key.pop(next(iter(shared_of_key)), None)
    return shared


class _Origin(NamedTuple):
    """The source of a function that is made anew on each access, and how the function is made from it.

    Attributes:
        owner: the source. It is the function itself if the function is not made anew.
        steps: a hashable key for how the function is made from the owner. None if the two are one object.
        get_function: returns the function, perhaps made again. Returns None once the owner has been freed, since
            it refers to the owner weakly.
    """

    owner: Any
    steps: Any
    get_function: Callable[[], Any]


def _origin_of(function: Any) -> _Origin:
    """Finds the source of a function that is made anew on each access, and how it is made.

        model.loss               owner `model`      step: the function `loss`
        st.filter_jit(f)         owner `f`          step: the transform with its options
        f                        owner `f`          no step

    Raises:
        TypeError: if the owner has no weak references.
    """
    if isinstance(function, types.MethodType):
        return _Origin(function.__self__, IdentityKey(function.__func__), weakref.WeakMethod(function))
    how = getattr(function, "alike", None)
    if not isinstance(how, How):
        return _Origin(function, None, weakref.ref(function))
    # A wrapper of an Equinox transform. The function in it may be a method or another such wrapper, so this recurses.
    owner, steps, get_wrapped_function = _origin_of(function.function)

    # It must not refer to the owner, which it would keep alive.
    def make_again() -> Any:
        wrapped_function = get_wrapped_function()
        return None if wrapped_function is None else how.applied_to(wrapped_function)

    return _Origin(owner, (how, steps), make_again)


class Learned:
    """A cache of findings from the traces of a function: structures of the operands → any value.

    It refers to the structures weakly. When one of them is freed, its entries are dropped.
    """

    def __init__(self) -> None:
        # Structures → the value, and weak references to the structures, whose callbacks drop the entry.
        self._entries: dict[tuple[weakref.ref[Structure], ...], tuple[Any, Any]] = {}

    def get(self, structures: Sequence[Structure]) -> Any:
        """Returns the value added for these structures. None if no value was added."""
        # Weak references to one object are equal. An entry begins with its value.
        return self._entries.get(tuple(map(weakref.ref, structures)), (None,))[0]

    def add(self, structures: Sequence[Structure], value: Any) -> None:
        """Keeps a value for these structures, until one of them is freed."""
        key = tuple(map(weakref.ref, structures))
        # The callbacks refer to the dictionary alone, so that they do not keep `self` alive.
        entries = self._entries
        entries[key] = value, [weakref.ref(structure, lambda _: entries.pop(key, None)) for structure in structures]


# ---- Names of arguments in JAX's messages ----


class _SignatureOfGroups(inspect.Signature):
    """The signature of an inner function. JAX takes names of arguments from it, for messages.

    JAX prints the name of an argument and then the path of a leaf in it. The paths in a leaf group begin with the names
    of the user's arguments already, such as `model.weight`. So the name of the group itself prints as nothing.

    Args:
        names: names of the user's arguments, to begin the paths in the groups. None to keep the names in the paths.
        num_before: number of arguments in front of the leaf groups.
    """

    def __init__(self, names: Sequence[str] | None, num_before: int) -> None:
        # Any number of arguments: `*groups`, with a name that prints as nothing.
        super().__init__([inspect.Parameter(_Nameless("groups"), inspect.Parameter.VAR_POSITIONAL)])
        self._names = names
        self._num_before = num_before

    # JAX calls `bind`, and reads the names from the keys of `arguments` in what it returns.
    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        return _Bound(self, args, kwargs, self._names, self._num_before)


class _Nameless(str):
    """The name of a leaf group among the arguments. It is compared as its text, and prints as nothing."""

    __slots__ = ()

    def __str__(self) -> str:
        return ""

    def __format__(self, spec: str) -> str:
        return ""

    __hash__ = str.__hash__


class _Bound(NamedTuple):
    """Bound arguments of a `_SignatureOfGroups`, with the attributes of `inspect.BoundArguments` that JAX reads.

    Attributes:
        signature: the signature.
        args: positional arguments of the inner function.
        kwargs: its keyword arguments.
        names: see `_SignatureOfGroups`.
        num_before: see `_SignatureOfGroups`.
    """

    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: Sequence[str] | None
    num_before: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Name → argument. The name of a positional argument prints as nothing."""
        return {_Nameless(i): self._with_names(i, arg) for i, arg in enumerate(self.args)} | self.kwargs

    def _with_names(self, position: int, arg: Any) -> Any:
        """Returns an argument with other paths, which begin with `names`. JAX uses it for messages, to print the paths.

        Args:
            position: position of the argument.
            arg: an array, a leaf group, or a pytree of leaf groups.
        """
        names = self.names
        if names is None:
            return arg
        # A bare array has no path. So a node is put around it, and the key of its only child is the name. The node is a
        # `LeafGroups`, because that class takes the keys of its children as they are given. Here `names` has one name
        # for each argument of the inner function.
        if jtu.all_leaves((arg,)):
            return LeafGroups((arg,), names[position : position + 1])
        # Here `names` has one name for each argument of the user's function. The groups hold those after the first
        # `num_before`. `named` changes the paths in a group.
        names_in_groups = names[self.num_before :]
        return jtu.tree_map(
            lambda group: group.named(names_in_groups) if type(group) is LeafGroup else group, arg, is_leaf=_is_group
        )

    def apply_defaults(self) -> None:
        """Does nothing, since no parameter has a default. JAX calls it."""


def _is_group(obj: Any) -> bool:
    return type(obj) is LeafGroup
