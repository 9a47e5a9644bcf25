"""Equinox: how its modules are read, built and saved, and two private parts of Equinox.

*The marker.* Equinox flattens a module with a marker in the place of each missing field. When it unflattens
the module (in `jax.tree.map`, `equinox.apply_updates`, `equinox.tree_at` and the outputs of `equinox.filter_jit`), the
marker stays behind in attributes: `__name__`, `__qualname__`, `__doc__` and so on. Nobody set these attributes, so the
code here leaves them out. They are called *missing*.

The marker has no public name, so we take it from a module without any field set. If its class is not one of Equinox's,
no value counts as a marker.

*Warnings of wrapped layers.* Equinox warns if a module gets a field like `jax.vmap(layer)`, because nothing will train
the layer. It has a set of the types of these fields, to which we add our own wrappers of functions. If a version of
Equinox lacks the set, it does not warn of them.
"""

import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
from jax import tree_util as jtu

from ..core._class_attributes import built_in_base, dataclass_fields, dict_descriptor
from ..core._node_types import (
    ClassKind,
    Convention,
    KeyEntries,
    Library,
    NamesInFiles,
    NativeLayout,
    NodeType,
    PlainForm,
    Role,
    without_missing,
)


class _Unset(eqx.Module):
    """A module whose field is never set, to find the marker."""

    field: Any


def _find_marker() -> Any:
    """Returns the class of the marker, or None if Equinox has none."""
    children = tuple(jtu.default_registry.flatten_one_level(object.__new__(_Unset))[0])
    cls: type = type(children[0]) if children else type(None)
    return cls if cls.__module__.partition(".")[0] == "equinox" else None


# We compare classes, because a copied or pickled module holds another instance of the marker.
_MARKER = _find_marker()


def is_missing(value: Any) -> bool:
    """Returns True for the marker of an attribute without a value."""
    return type(value) is _MARKER


def name_of(function: Any, default: Any, attribute: str = "__name__") -> str:
    """Returns the `__name__` or `__qualname__` of a function or another callable, or the text of a default.

    It never raises, because it is called to print errors.

    Args:
        function: the function.
        default: a text, or an object whose text is used if the function has no name.
        attribute: the name of the attribute.
    """
    try:
        name = getattr(function, attribute, None)
        return name if isinstance(name, str) else str(default)
    except Exception:  # noqa: BLE001 -- whatever a user's class raises
        return default if isinstance(default, str) else f"<{type(default).__qualname__} object>"


def update_wrapper(wrapper: Any, wrapped: Callable[..., Any]) -> None:
    """Calls `functools.update_wrapper` without copying the `__dict__` and attributes missing in a module."""
    assigned = [name for name in functools.WRAPPER_ASSIGNMENTS if not is_missing(getattr(wrapped, name, None))]
    functools.update_wrapper(wrapper, wrapped, assigned=assigned, updated=())


def warn_of_layers_in(cls: type) -> None:
    """Lets Equinox warn if an instance of this class, a wrapper of a layer, becomes a field of a module."""
    module = sys.modules.get(eqx.Module.__module__)
    getattr(module, "_transform_types", set()).add(cls)


# --- modules, field by field ----------------------------------------------------------------------------------------

WRAPPER_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")
"""The attributes that `equinox.module_update_wrapper` copies from a wrapped function into a module."""


def node_type_of(cls: Any) -> NodeType | None:
    """Returns the node type of a module, which is read field by field. None for classes of other libraries.

    An instance may lack fields, if they were deleted or never set. It may also have the attributes of
    `module_update_wrapper`, which count as static fields. Its auxiliary data is a pair: the names of the children,
    and the static fields as pairs of name and value.
    """
    if not issubclass(cls, eqx.Module):
        return None
    fields = dataclass_fields(cls)
    traced = tuple(f.name for f in fields if not f.metadata.get("static", False))
    static = tuple(f.name for f in fields if f.metadata.get("static", False)) + WRAPPER_ATTRIBUTES
    attributes_of = dict_descriptor(cls).__get__

    # Three functions of the node type, which read the `__dict__` without calling methods of the class.
    def take_apart(obj: Any) -> tuple[Sequence[Any], Any]:
        """Returns the children, and the auxiliary data."""
        # `without_missing` leaves out the attributes that hold the marker.
        attributes = without_missing(attributes_of(obj))
        names = tuple([name for name in traced if name in attributes])
        static_items = tuple([(name, attributes[name]) for name in static if name in attributes])
        return [attributes[name] for name in names], (names, static_items)

    def put_together(aux: Any, children: Sequence[Any]) -> Any:
        """Makes an instance."""
        names, static_items = aux
        # As in Equinox, no `__init__` runs.
        obj = object.__new__(cls)
        attributes = attributes_of(obj)
        attributes.update(zip(names, children, strict=True))
        attributes.update(static_items)
        return obj

    def keys_of(obj: Any) -> KeyEntries:
        """Returns JAX's key for each child."""
        attributes = without_missing(attributes_of(obj))
        return tuple([jtu.GetAttrKey(name) for name in traced if name in attributes])

    return NodeType(
        cls,
        is_plain=False,
        is_mutable=False,
        convention="equinox",
        take_apart=take_apart,
        put_together=put_together,
        keys_of=keys_of,
        fields=traced + static,
        roles=role_of(cls),
    )


def native_layout_of(cls: Any) -> NativeLayout | None:
    """Returns the layout for the native walk: all fields of a module, in order, with their places.

    None for modules that `object.__new__` cannot make, and for those without an ordinary `__dict__`.
    """
    if not issubclass(cls, eqx.Module) or built_in_base(cls) is not object:
        return None
    if type(dict_descriptor(cls)) is not types.GetSetDescriptorType:
        return None
    # Interned, so that the native walk can compare names by identity.
    fields = [(sys.intern(field.name), field.metadata.get("static", False)) for field in dataclass_fields(cls)]
    traced = tuple([name for name, is_static in fields if not is_static])
    statics = tuple([name for name, is_static in fields if is_static])
    order = tuple([name for name, _ in fields])
    are_static = bytes([bool(is_static) for _, is_static in fields])
    return NativeLayout("FIELDS", (order, are_static, b"", traced, (*statics, *map(sys.intern, WRAPPER_ATTRIBUTES))))


def convention_of(cls: type) -> Convention | None:
    """Returns "equinox" for all classes of Equinox, modules or not: their arrays are traced, and nothing else."""
    return "equinox" if cls.__module__.partition(".")[0] == "equinox" else None


def role_of(cls: Any) -> Role | None:
    """Returns "state" for an `equinox.nn.State`, and for a `StateIndex`, the holder of its initial value."""
    return "state" if issubclass(cls, (eqx.nn.State, eqx.nn.StateIndex)) else None


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Returns the plain data for a module: its fields. None for classes of other libraries.

    It stands for the module in a state: here the plain data of a whole model, no `equinox.nn.State`. Attributes of
    `module_update_wrapper` are left out.
    """
    # `fields` is tested first, to skip most other classes: `isinstance` is slow, since it calls the metaclass.
    if not node_type.fields or not isinstance(obj, eqx.Module):
        return None
    children, (names, static_items) = node_type.take_apart(obj)
    declared = node_type.fields[: -len(WRAPPER_ATTRIBUTES)]

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        """Makes the module again, from its children and its static fields."""
        # The attributes of `module_update_wrapper` are not in `statics`, so they stay.
        new_items = tuple([(name, statics.get(name, value)) for name, value in static_items])
        return node_type.put_together((names, new_items), new)

    statics = {name: value for name, value in static_items if name in declared}
    return PlainForm("dict", names, children, statics, make)


def kind_in_files(cls: Any) -> ClassKind | None:
    """Returns "module" for modules, which are written field by field, and "placeholder" for the class in `Shared`."""
    # `equinox.nn.Shared` puts instances of this private class, which is no pytree node, where it has removed a node.
    if (cls.__module__, cls.__qualname__) == ("equinox.nn._shared", "SharedNode"):
        return "placeholder"
    return "module" if issubclass(cls, eqx.Module) else None


def is_keyed_by_aux(cls: Any) -> bool:
    """Returns True for `equinox.nn.State`: its auxiliary data is its keys."""
    return cls is eqx.nn.State


EQUINOX = Library(
    "Equinox",
    node_type_of,
    convention_of,
    native_layout_of,
    marker=_MARKER,
    role_of=role_of,
    plain_form_of=plain_form_of,
    kind_in_files=kind_in_files,
    is_keyed_by_aux=is_keyed_by_aux,
    # The `==` of modules lets JAX flatten both, which visits a shared object once for each path.
    compared_by_parts=(eqx.Module,),
    choices=(eqx.Enumeration,),
    names=NamesInFiles(
        "equinox",
        kinds=("module", "namedtuple", "placeholder", "enum"),
        has_methods=True,
        state="equinox.nn: State StateIndex",
        instances="equinox: if_array    equinox._module._flatten: _Missing    equinox.nn: State",
        functions="""
            equinox.nn._mlp: _identity    equinox.nn._weight_norm: _norm_except_axis
            equinox.nn._attention: standard_attention
        """,
    ),
)
