"""`Module`, a mutable pytree base class: methods assign attributes, and those with arrays or modules are its children.

The idea is that of treex and PAX: a module is an ordinary object with an `__init__` and a `__call__`, and both may
assign attributes. Its children are the attributes that hold arrays or modules, whenever they were assigned. All other
attributes are part of the structure. The *kind* of an attribute says which of these it is, and whether it is trainable;
`libraries/_sharedtree_module_kinds` has the rules. A *mark* (`parameter`, `state_field`) sets the kind.

A transform passes new modules of the same content to the function. So an attribute that the function assigns is seen in
the module that it returns or, with `in_place=True`, in the caller's own module.

Every class is registered with JAX, so vanilla JAX accepts its instances, too. There, as with any pytree, a shared
object becomes two.
"""

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast, overload

import equinox as eqx
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._static_values import copy_of, with_names
from ..libraries import _sharedtree_module_assignment as assigning, _sharedtree_module_kinds as kinds
from ..libraries._sharedtree_module_values import PARAMETER, STATE, STATIC, Kind, Marked, require_markable
from ._trainable import merged, trainable

if TYPE_CHECKING:
    import wadler_lindig as wl

T = TypeVar("T")

_NOT_GIVEN: Any = object()


@overload
def parameter(value: T, /) -> T: ...
@overload
def parameter(*, default: Any = ..., default_factory: Callable[[], Any] = ..., kw_only: bool = ...) -> Any: ...
def parameter(value: Any = _NOT_GIVEN, /, **options: Any) -> Any:
    """Marks a value as a parameter, for an attribute of a `Module`: traced, and trainable.

    The attribute keeps the mark, and holds the value itself: after `self.weight = st.parameter(w)`, `self.weight is w`.

    Args:
        value: an array, or a container of arrays. A module in the value decides by its own marks which of its leaves
            are trainable. A call without a value declares a field of a dataclass: `weight: jax.Array = st.parameter()`.
        options: `default`, `default_factory` and `kw_only` of `dataclasses.field`, for a call without a value.

    Returns:
        A marked value, to be assigned to an attribute at once. Its static type is that of the value. No copy is made.

    Raises:
        UnregisteredTypeError: if JAX could not trace the value.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> class Scale(st.Module):
        ...     def __init__(self):
        ...         self.factor = st.parameter(jnp.ones(2))
        >>> Scale().factor
        Array([1., 1.], dtype=float32)

    Limitations: a mark belongs to an attribute, so a list must not hold marked values. Mark the list instead.
    """
    return _marked(PARAMETER, "`sharedtree.parameter`", value, options)


@overload
def state_field(value: T, /) -> T: ...
@overload
def state_field(*, default: Any = ..., default_factory: Callable[[], Any] = ..., kw_only: bool = ...) -> Any: ...
def state_field(value: Any = _NOT_GIVEN, /, **options: Any) -> Any:
    """Marks a value as state, for an attribute of a `Module`: traced, and nothing in it is trainable.

    An array that is assigned without a mark is state as well. The mark makes a Python number traced, too, and holds for
    whole modules: nothing in `self.target = st.state_field(network)` is trained.

    Arguments, errors and limitations are those of `parameter`.

    Example:
        >>> import sharedtree as st, jax
        >>> class Counter(st.Module):
        ...     def __init__(self):
        ...         self.calls = st.state_field(0)
        >>> jax.tree.leaves(Counter())
        [0]
    """
    return _marked(STATE, "`sharedtree.state_field`", value, options)


def _marked(kind: Kind, function_name: str, value: Any, options: dict[str, Any]) -> Any:
    """Returns a marked value, or without a value a field of a dataclass that declares the kind.

    Args:
        kind: the kind of the attribute.
        function_name: the name of the public function, for errors.
        value: the value; `_NOT_GIVEN` if there is none.
        options: options for the field.
    """
    if value is _NOT_GIVEN:
        return assigning.field_declaring(kind, **options)
    if options:
        raise TypeError(f"{function_name} takes a value, or the options of a field without a value; not both.")
    require_markable(value, kind, f"What is given to {function_name}")
    return Marked(kind, value)


class Module(kinds.HasKinds):
    """A mutable pytree. Subclasses assign attributes in `__init__`, and in other methods as they like.

    The value that is assigned decides how the attribute is treated:

    - `st.parameter(x)`: traced, and trainable;
    - `st.state_field(x)`, and an array without a mark: traced, not trainable;
    - a module of any library, or a container that holds arrays or modules: a sub-tree;
    - anything else (a function, a string, a number, a tuple of numbers): static, part of the structure.

    An attribute keeps its mark when another value is assigned, and loses it when it is deleted. A class may be a
    dataclass (`@dataclasses.dataclass(eq=False)`). Its fields declare `weight: jax.Array = st.parameter()`, or
    `= equinox.field(static=True)` for a value that is static even if it is an array.

    Modules compare and hash by identity. `copy.copy` makes a module with the same children, and `copy.deepcopy` one
    with copies of them. `pickle` works if the class can be imported. Shared objects stay shared in each of these.

    Example:
        >>> import jax, jax.numpy as jnp, sharedtree as st
        >>> class Linear(st.Module):
        ...     def __init__(self, inputs, outputs, *, key):
        ...         self.weight = st.parameter(jax.random.normal(key, (inputs, outputs)))
        ...         self.calls = st.state_field(jnp.array(0))
        ...         self.activation = jax.nn.relu
        ...     def __call__(self, x):
        ...         self.calls = self.calls + 1
        ...         return self.activation(x @ self.weight)
        >>> linear = Linear(2, 3, key=jax.random.key(0))
        >>> linear
        Linear(
          weight=parameter(f32[2,3]),
          calls=state_field(weak_i32[]),
          activation=<function relu>
        )
        >>> y = st.jit(lambda linear, x: linear(x), in_place=True)(linear, jnp.ones(2))
        >>> int(linear.calls)
        1

    Limitations: attributes live in `__dict__`, so classes have no slots. Do not subclass a `Module` and another pytree
    class at once; hold one in an attribute of the other instead.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Checks a new class, and registers it with JAX."""
        super().__init_subclass__(**options)
        assigning.require_soundness(cls)
        _register(cls)

    # Hidden from type checkers: they would accept any attribute of a class with a `__setattr__`.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # A property or another descriptor of the class gets the value as it is.
            if not assigning.is_assigned_by_class(type(self), name):
                value = assigning.assign(self, name, value)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            super().__delattr__(name)
            assigning.forget(self, name)

    def parameters(self) -> Self:
        """Returns the trainable part: a module of the same shape and ties, with `None` for every other leaf.

        Trainable are the attributes marked by `st.parameter`, every inexact array in modules of other libraries, and
        the values of `nnx.Param`s in modules of Flax NNX. Nothing below `st.state_field` is trainable. A tied leaf is
        trainable if it is trainable at one of its paths.

        Returns:
            A module of new nodes. Arrays are aliased, and static attributes are those of the module.

        Raises:
            CycleError: if the module contains itself.

        Cost: one walk over the nodes.

        Example:
            >>> import jax, jax.numpy as jnp, sharedtree as st
            >>> class Net(st.Module):
            ...     def __init__(self):
            ...         self.weight, self.mean = st.parameter(jnp.ones(2)), jnp.zeros(2)
            >>> Net().parameters()
            Net(weight=parameter(f32[2]), mean=None)
        """
        return trainable(self)

    def merge(self, parameters: Self) -> Self:
        """Returns a module with new values for its trainable part: the inverse of `parameters`.

        Args:
            parameters: a result of `parameters`, with updated values. Where it has `None`, the value of this module
                stays. State and static attributes, and attributes that only one of the two has, are those of this
                module.

        Returns:
            A module of new nodes with the ties of this one. Arrays are aliased. Neither of the two is changed.

        Raises:
            SharingMismatchError: if `parameters` has another shape, or lacks a tie of the module. Names the paths.

        Cost: a walk over the nodes of each.

        Example:
            >>> import jax, jax.numpy as jnp, sharedtree as st
            >>> class Net(st.Module):
            ...     def __init__(self):
            ...         self.weight, self.mean = st.parameter(jnp.ones(2)), jnp.zeros(2)
            >>> net = Net()
            >>> halved = net.merge(st.tree.map(lambda x: x / 2, net.parameters()))
            >>> halved.weight, halved.mean is net.mean
            (Array([0.5, 0.5], dtype=float32), True)
        """
        return merged(self, parameters)

    def __copy__(self) -> Self:
        # A function of (kind, value) that keeps each value.
        return kinds.copied(self, lambda _, value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Of static values, only mutable ones are copied: a copy of `jax.nn.relu` would be another function.
        # The copies made so far are stored in the memo, whose other keys are ids.
        copies = cast("dict[Any, Any]", memo).setdefault(_COPIES, IdentityDict[Any]())

        def copied(kind: Any, value: Any) -> Any:
            return copy_of(value, copies) if kind == STATIC else copy.deepcopy(value, memo)

        return kinds.copied(self, copied, memo)

    def __reduce__(self) -> Any:
        if type(self).__getstate__ is not object.__getstate__:
            state = self.__getstate__()
        else:
            # Pickle finds plain functions by name. `jax.nn.relu` is an object, so its name is put in its place.
            state = {name: with_names(value) for name, value in kinds.attributes_of(self).items()}
        return kinds.with_kinds, (type(self), kinds.noted_kinds(self)), state

    def __repr__(self) -> str:
        return eqx.tree_pformat(self)

    def __pdoc__(self, **options: Any) -> "wl.AbstractDoc":
        """Prints the module for `equinox.tree_pformat`: each module once, and each mark as a call of its function."""
        # Only wadler_lindig calls this method, so it is installed.
        import wadler_lindig as wl

        # The options are passed on to all nodes below, and carry the set of the modules that were printed.
        seen: IdentitySet = options.setdefault("sharedtree_seen", IdentitySet())
        name = type(self).__name__
        if not seen.add(self):
            return wl.TextDoc(f"<{name}, as above>")
        marks = kinds.noted_kinds(self).by_name
        parts: list[wl.AbstractDoc] = []
        for attribute, value in kinds.attributes_of(self).items():
            shown, mark = _doc_of(value, options), _MARKS.get(marks.get(attribute, STATIC))
            if mark is not None and value is not None:
                shown = wl.TextDoc(f"{mark}(") + shown + wl.TextDoc(")")
            parts.append(wl.TextDoc(f"{attribute}=") + shown)
        indent = options.get("indent", 2)
        return wl.bracketed(wl.TextDoc(f"{name}("), parts, wl.comma, wl.TextDoc(")"), indent)


def _doc_of(value: Any, options: dict[str, Any]) -> "wl.AbstractDoc":
    """Prints a value, a function by its name: functions of JAX are objects whose `repr` has an address."""
    import wadler_lindig as wl

    name = getattr(value, "__name__", None)
    if callable(value) and not isinstance(value, (type, Module)) and isinstance(name, str):
        return wl.TextDoc(f"<function {name}>")
    return wl.pdoc(value, **options)


_COPIES = "copies of static values, by sharedtree"
"""The key in the memo of `copy.deepcopy` for the copies of static values."""

# Kind → the name of the function that marks it.
_MARKS = {PARAMETER: "parameter", STATE: "state_field"}


def _register(cls: type) -> None:
    """Registers a class with JAX."""
    jtu.register_pytree_with_keys(
        cls, kinds.take_apart_with_keys, functools.partial(kinds.put_together, cls), kinds.take_apart
    )


_register(Module)
