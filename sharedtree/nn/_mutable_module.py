"""`Module`, a mutable pytree base class: attributes are assigned, and what JAX sees follows from what they are.

The idea is that of treex and PAX: a module is an ordinary object with an `__init__` and a `__call__`, and both may
assign attributes. Its children are the attributes that hold arrays or modules, whenever they were assigned; all others
are part of the structure. `libraries/_sharedtree_module_kinds` has the rules. A transform hands a function new modules
of the same content, so what the function assigns is seen where it is returned, or with `in_place=True` in the caller's
own module.

Every class is registered with JAX, so vanilla JAX takes its instances, too; there, as with any pytree, what is one
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
    """Marks what is assigned to an attribute of a `Module` as a parameter: traced, and trainable.

    The attribute keeps the mark, and holds the value itself: `self.weight = st.parameter(w)`, and `self.weight is w`.

    Args:
        value: an array, or a container of arrays. If it is a module, or holds one, that says for itself what in it is
            trainable. Without a value the call declares a field of a dataclass: `weight: jax.Array = st.parameter()`.
        options: `default`, `default_factory` and `kw_only` of `dataclasses.field`, where it declares a field.

    Returns:
        What is to be assigned to an attribute at once, and is the value to a type checker. No copy is made.

    Raises:
        UnregisteredTypeError: if the value is nothing that JAX could trace.

    Example:
        >>> import jax.numpy as jnp, sharedtree as st
        >>> class Scale(st.Module):
        ...     def __init__(self):
        ...         self.factor = st.parameter(jnp.ones(2))
        >>> Scale().factor
        Array([1., 1.], dtype=float32)

    Limitations: a mark belongs to an attribute, so none may stand in a list; mark the list.
    """
    return _marked(PARAMETER, "`sharedtree.parameter`", value, options)


@overload
def state_field(value: T, /) -> T: ...
@overload
def state_field(*, default: Any = ..., default_factory: Callable[[], Any] = ..., kw_only: bool = ...) -> Any: ...
def state_field(value: Any = _NOT_GIVEN, /, **options: Any) -> Any:
    """Marks what is assigned to an attribute of a `Module` as state: traced, and nothing in it is trainable.

    So is an array that is assigned without a mark. The mark makes a Python number traced, too, and holds for whole
    modules: of `self.target = st.state_field(network)` nothing is trained.

    Args, errors and limitations as for `parameter`.

    Example:
        >>> import sharedtree as st, jax
        >>> class Counter(st.Module):
        ...     def __init__(self):
        ...         self.calls = st.state_field(0)
        >>> jax.tree.leaves(Counter())
        [0]
    """
    return _marked(STATE, "`sharedtree.state_field`", value, options)


def _marked(kind: Kind, what: str, value: Any, options: dict[str, Any]) -> Any:
    if value is _NOT_GIVEN:
        return assigning.field_declaring(kind, **options)
    if options:
        raise TypeError(f"{what} takes a value, or the options of a field without a value; not both.")
    require_markable(value, kind, f"What is given to {what}")
    return Marked(kind, value)


class Module(kinds.HasKinds):
    """A mutable pytree. Subclasses assign attributes in `__init__`, and in other methods as they like.

    What an attribute is follows from what is assigned:

    - `st.parameter(x)`: traced, and trainable;
    - `st.state_field(x)`, and an array without a mark: traced, not trainable;
    - a module of any library, or a container that holds arrays or modules: a sub-tree;
    - anything else (a function, a string, a number, a tuple of numbers): static, part of the structure.

    Both marks stay with the attribute when another value is assigned, and go when it is deleted. Classes may be
    dataclasses (`@dataclasses.dataclass(eq=False)`), whose fields declare `weight: jax.Array = st.parameter()`, and
    `= equinox.field(static=True)` for what is to be static whatever it is.

    Modules compare and hash by identity. `copy.copy` gives a module with the same children, `copy.deepcopy` one with
    copies of them, and `pickle` works where the class can be imported. In each what is shared stays shared.

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

    Limitations: attributes live in `__dict__`, so classes have no slots. What a subclass of another pytree type would
    be is not defined; combine by attributes instead.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        assigning.require_soundness(cls)
        _register(cls)

    # Hidden from type checkers, to which a class that has it seems to have every attribute.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if not assigning.is_assigned_by_class(type(self), name):
                value = assigning.assign(self, name, value)
            super().__setattr__(name, value)

        def __delattr__(self, name: str) -> None:
            super().__delattr__(name)
            assigning.forget(self, name)

    def parameters(self) -> Self:
        """The trainable part: a module of the same shape and the same ties, with `None` for every other leaf.

        Trainable is what is marked by `st.parameter`, and in modules of other libraries every inexact array; of Flax
        NNX, what its `nnx.Param`s hold. Nothing below `st.state_field` is. What is tied is trainable if it is at one of
        its paths.

        Returns:
            A module of new nodes; arrays are aliased, static attributes are those of the module.

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
        """A module with the trainable part of another one: the inverse of `parameters`.

        Args:
            parameters: what `parameters` gave, updated; gradients have the same shape. Where it has `None`, the value
                of the module stays. Attributes that only one of the two has, state and static ones, are the module's.

        Returns:
            A module of new nodes with the ties of this one; arrays are aliased. Neither of the two is changed.

        Raises:
            SharingMismatchError: if `parameters` has another shape, or lacks a tie of the module; names the paths.

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
        return kinds.copied(self, lambda _, value: value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Of what is static only what can be mutated is copied: a copy of `jax.nn.relu` would be another function.
        copies = cast("dict[Any, Any]", memo).setdefault(_COPIES, IdentityDict[Any]())  # beside the ids of `deepcopy`

        def copied(kind: Any, value: Any) -> Any:
            return copy_of(value, copies) if kind == STATIC else copy.deepcopy(value, memo)

        return kinds.copied(self, copied, memo)

    def __reduce__(self) -> Any:
        if type(self).__getstate__ is not object.__getstate__:
            state = self.__getstate__()
        else:
            # `jax.nn.relu` and the like are no plain functions, so pickle would not look for their names.
            state = {name: with_names(value) for name, value in kinds.attributes_of(self).items()}
        return kinds.with_kinds, (type(self), kinds.noted_kinds(self)), state

    def __repr__(self) -> str:
        return eqx.tree_pformat(self)

    def __pdoc__(self, **options: Any) -> "wl.AbstractDoc":
        """How `equinox.tree_pformat` prints it: each module once, and each mark by the name of its function."""
        import wadler_lindig as wl  # which asks for this, and so is there

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
    """Functions by their names: those of JAX are objects, whose `repr` has their address."""
    import wadler_lindig as wl

    name = getattr(value, "__name__", None)
    if callable(value) and not isinstance(value, (type, Module)) and isinstance(name, str):
        return wl.TextDoc(f"<function {name}>")
    return wl.pdoc(value, **options)


_COPIES = "copies of static values, by sharedtree"
"""Where the memo of `copy.deepcopy` has what `copy_of` remembers."""

_MARKS = {PARAMETER: "parameter", STATE: "state_field"}


def _register(cls: type) -> None:
    jtu.register_pytree_with_keys(
        cls, kinds.take_apart_with_keys, functools.partial(kinds.put_together, cls), kinds.take_apart
    )


_register(Module)
