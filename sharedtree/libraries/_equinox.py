"""The one file that knows what Equinox does not promise: the marker for nothing, and which objects it warns of.

When Equinox takes a module apart whose fields were not all set, it puts a marker in the place of each that is missing,
and when it puts such a module together again (as `jax.tree.map`, `equinox.apply_updates`, `equinox.tree_at` and the
outputs of `equinox.filter_jit` do), the marker stays behind as its `__name__`, `__qualname__`, `__doc__` and so on.
Nobody has set those, so everything here that reads a module's attributes leaves them out.

The marker has no public name. It is found by looking at what Equinox makes of a module that has nothing set. If that is
no class of Equinox's own any more, then no value is taken for a marker.

Equinox warns when a module gets a field like `jax.vmap(layer)`, for nothing will train that layer. It knows such
objects by their types, which it keeps in a set. What wraps functions here is put there, too. If the set vanishes, there
is no warning.
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
    field: Any


def _find_marker() -> Any:
    children = tuple(jtu.default_registry.flatten_one_level(object.__new__(_Unset))[0])
    cls: type = type(children[0]) if children else type(None)
    return cls if cls.__module__.partition(".")[0] == "equinox" else None


# The class, not the marker itself: a copied or pickled module holds another instance.
_MARKER = _find_marker()


def is_missing(value: Any) -> bool:
    """Whether a value stands for an attribute that was never set."""
    return type(value) is _MARKER


def name_of(function: Any, default: Any, attribute: str = "__name__") -> str:
    """The `__name__` or `__qualname__` of a function or of whatever is used as one; the default if it has none.

    Whatever its attributes and its `__repr__` do: a name is asked for where something is printed, as an error is.
    """
    try:
        name = getattr(function, attribute, None)
        return name if isinstance(name, str) else str(default)
    except Exception:  # noqa: BLE001 -- whatever a user's class raises
        return default if isinstance(default, str) else f"<{type(default).__qualname__} object>"


def update_wrapper(wrapper: Any, wrapped: Callable[..., Any]) -> None:
    """`functools.update_wrapper`, but for the `__dict__`, and for attributes that a module has only as markers."""
    assigned = [name for name in functools.WRAPPER_ASSIGNMENTS if not is_missing(getattr(wrapped, name, None))]
    functools.update_wrapper(wrapper, wrapped, assigned=assigned, updated=())


def warn_of_layers_in(cls: type) -> None:
    """Has Equinox warn when an instance that wraps a layer becomes a field of a module."""
    module = sys.modules.get(eqx.Module.__module__)
    getattr(module, "_transform_types", set()).add(cls)


# --- modules, field by field ----------------------------------------------------------------------------------------

WRAPPER_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")
"""What `equinox.module_update_wrapper` copies from a wrapped function into a module."""


def node_type_of(cls: Any) -> NodeType | None:
    """Modules are read field by field.

    Fields may be missing: deleted, or never set. `module_update_wrapper` adds a few that no field declares.
    """
    if not issubclass(cls, eqx.Module):
        return None
    fields = dataclass_fields(cls)
    traced = tuple(f.name for f in fields if not f.metadata.get("static", False))
    static = tuple(f.name for f in fields if f.metadata.get("static", False)) + WRAPPER_ATTRIBUTES
    attributes_of = dict_descriptor(cls).__get__

    def take_apart(obj: Any) -> tuple[Sequence[Any], Any]:
        attributes = without_missing(attributes_of(obj))
        names = tuple([name for name in traced if name in attributes])
        rest = tuple([(name, attributes[name]) for name in static if name in attributes])
        return [attributes[name] for name in names], (names, rest)

    def put_together(aux: Any, children: Sequence[Any]) -> Any:
        names, rest = aux
        obj = object.__new__(cls)
        attributes = attributes_of(obj)
        attributes.update(zip(names, children, strict=True))
        attributes.update(rest)
        return obj

    def keys_of(obj: Any) -> KeyEntries:
        attributes = without_missing(attributes_of(obj))
        return tuple([jtu.GetAttrKey(name) for name in traced if name in attributes])

    return NodeType(
        cls, False, False, "equinox", take_apart, put_together, keys_of, traced + static, roles=role_of(cls)
    )


def native_layout_of(cls: Any) -> NativeLayout | None:
    """All fields in their order; of modules that `object.__new__` makes, with an ordinary dictionary of attributes."""
    if not issubclass(cls, eqx.Module) or built_in_base(cls) is not object:
        return None
    if type(dict_descriptor(cls)) is not types.GetSetDescriptorType:
        return None
    fields = [(sys.intern(field.name), field.metadata.get("static", False)) for field in dataclass_fields(cls)]
    traced = tuple([name for name, is_static in fields if not is_static])
    statics = tuple([name for name, is_static in fields if is_static])
    order = tuple([name for name, _ in fields])
    are_static = bytes([bool(is_static) for _, is_static in fields])
    return NativeLayout("FIELDS", (order, are_static, b"", traced, (*statics, *map(sys.intern, WRAPPER_ATTRIBUTES))))


def convention_of(cls: type) -> Convention | None:
    """Arrays only, also in what Equinox registers that is no module."""
    return "equinox" if cls.__module__.partition(".")[0] == "equinox" else None


def role_of(cls: Any) -> Role | None:
    """What `make_with_state` parts from a model, and the initial values that it takes from there, are state."""
    return "state" if issubclass(cls, (eqx.nn.State, eqx.nn.StateIndex)) else None


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """All fields by name, without what `module_update_wrapper` adds."""
    # Asked first, for it costs little where an `isinstance` asks the metaclass.
    if not node_type.fields or not isinstance(obj, eqx.Module):
        return None
    children, (names, rest) = node_type.take_apart(obj)
    declared = node_type.fields[: -len(WRAPPER_ATTRIBUTES)]

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        pairs = tuple([(name, statics.get(name, value)) for name, value in rest])
        return node_type.put_together((names, pairs), new)

    return PlainForm("dict", names, children, {name: value for name, value in rest if name in declared}, make)


def kind_in_files(cls: Any) -> ClassKind | None:
    """Modules field by field."""
    # What `equinox.nn.Shared` puts where it has taken a node away: a private class, and no pytree node.
    if (cls.__module__, cls.__qualname__) == ("equinox.nn._shared", "SharedNode"):
        return "placeholder"
    return "module" if issubclass(cls, eqx.Module) else None


EQUINOX = Library(
    "Equinox",
    node_type_of,
    convention_of,
    native_layout_of,
    marker=_MARKER,
    role_of=role_of,
    plain_form_of=plain_form_of,
    kind_in_files=kind_in_files,
    # Their `==` has JAX flatten both, path by path.
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
