"""Kinds of node for instances of classes: rebuilt field by field, by an unflatten function, or found by name (enums).

Nothing here gets an attribute of an object that a file describes. Its class may have a `__getattr__` that calls what
the file put into the instance.
"""

import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from jax import tree_util as jtu

from ...core._errors import StructureMismatchError
from ...core._jax_internals import rebuild_registered, registered_counts
from ...core._library_rows import RefusalError, fault_of_aux
from ...core._node_types import node_type_of, node_types_by_class
from ...core._printing import printable
from ...tree._dag import Dag
from ..trust._buildable_classes import kind_of
from ._atoms import atom_text, encode_int, encode_str, short
from ._nodes import (
    MAX_STEP,
    TEXT,
    TYPE,
    Apart,
    Child,
    Kind,
    Manifest,
    Node,
    Operand,
    Parts,
    child,
    children,
    require,
    step_of,
)
from ._wrapped_attributes import copy_wrapped_attributes

# --- rebuilt field by field -------------------------------------------------------------------------------------------


def _build_object(parts: Parts, node: Node) -> Any:
    return parts.makers[node[1]](parts.children(node[2]))


def _build_wrapper(parts: Parts, node: Node) -> Any:
    """Builds an Equinox module, and copies name, documentation and annotations from the field that it wraps."""
    obj = _build_object(parts, node)
    require(kind_of(type(obj)) == "module", "its class is no Equinox module")
    copy_wrapped_attributes(obj, parts.child(node[2][parts.fields[node[1]].index(node[3])]))
    return obj


def _steps_of_fields(manifest: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    entry = manifest.types[node[1]]
    for value, name in zip(node[2], (*entry.fields, *entry.extra), strict=True):
        yield value, step_of(name)


def _class_name(manifest: Manifest, node: Node) -> str:
    return manifest.types[node[1]].name.rpartition(":")[2]


# --- registered -------------------------------------------------------------------------------------------------------


def take_registered(obj: Any, type_index: int) -> Apart:
    """Takes an instance of a class that was registered with JAX or with `register_node` apart.

    Raises:
        RefusalError: if its flatten function raises, or gives auxiliary data that no file may have.
    """
    if type(obj) is Dag:
        return _take_dag(obj, type_index)
    node_type = node_type_of(obj)
    assert node_type is not None
    try:
        child_objects, aux = node_type.take_apart(obj)  # children, auxiliary data
        keys = [str(key) for key in node_type.keys_of(obj)]
    except Exception as error:  # noqa: BLE001 -- the class's own code may raise anything
        raise RefusalError(
            f"a `{type(obj).__qualname__}` whose flatten function raises {type(error).__name__}: {error}",
            "Leave it out, or bring it into a state in which JAX can flatten it.",
        ) from error
    # To JAX the object is one constant, so this is no cycle that its user could break.
    if aux is obj:
        raise RefusalError(
            f"a `{type(obj).__qualname__}` that is its own auxiliary data, of which nothing can be written",
            "Let its flatten function give plain values, from which its unflatten function makes it anew.",
        )
    fault = fault_of_aux(type(obj), aux)
    if fault is not None:
        raise RefusalError(
            f"a `{type(obj).__qualname__}` with {fault}, which no file may have", "Set it anew after loading."
        )
    # Positions take the place of keys that do not match the children or make no paths, and of keys with an address or
    # with surrogates, which no file can hold.
    is_sound = len(keys) == len(child_objects) and are_steps(keys)
    if not is_sound or any(" at 0x" in key or type(encode_str(key)) is list for key in keys):
        keys = [f"[{i}]" for i in range(len(child_objects))]
    return Apart(
        [*child_objects, aux],
        [*keys, "<aux>"],
        lambda written: ["registered", type_index, written[-1], written[:-1], keys],
    )


def _take_dag(dag: Dag[Any], type_index: int) -> Apart:
    """Takes a `Dag` apart into its model.

    Raises:
        RefusalError: if packing the model does not give the leaves and the structure of the `Dag`. The model may have
            been changed since, or `jax.tree.map` put other values in the places of the arrays.
    """
    leaves, structure = dag._flatten()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        model_leaves, model_structure = Dag(dag.tree)._flatten()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        pairs = zip(model_leaves, leaves, strict=True)
        is_unchanged = model_structure is structure and all(a is b for a, b in pairs)
    except Exception:  # noqa: BLE001 -- the unflatten functions of any class may raise anything
        is_unchanged = False
    if not is_unchanged:
        raise RefusalError(
            "a `Dag` that holds something else than its model has: the model was changed, or numbers or placeholders "
            "are in the places of arrays",
            "Save its model, `dag.tree`, or its leaves, `jax.tree.leaves(dag)`.",
        )
    return Apart((dag.tree,), (".tree",), lambda written: ["registered", type_index, None, written, [".tree"]])


def are_steps(steps: Any) -> bool:
    """Returns True for a list of different texts, each of which can be a step of a path."""
    if type(steps) is not list or not all(type(step) is str for step in steps):
        return False
    return len(set(steps)) == len(steps) and all(1 < len(step) <= MAX_STEP and step[0] in ".[" for step in steps)


def _build_registered(parts: Parts, node: Node) -> Any:
    """Builds an instance by the unflatten function of its class, and flattens it to check that nothing was dropped."""
    cls, aux, child_objects = parts.makers[node[1]], parts.child(node[2]), parts.children(node[3])
    if cls is Dag:
        require(aux is None and len(child_objects) == 1, "a `Dag` has one model, and nothing else")
        return Dag._of_file(child_objects[0])  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    node_type, counts_in_file = node_types_by_class.get(cls), _count_parts(child_objects, aux)
    fault = fault_of_aux(cls, aux)
    require(fault is None, f"it has {fault}")
    # Dataclasses that are registered with lists of their fields have fixed counts.
    fixed_counts = registered_counts(cls)
    if fixed_counts is not None and fixed_counts != counts_in_file:
        raise _wrong_counts(cls, counts_in_file, fixed_counts)
    try:
        if node_type is not None:
            obj = node_type.put_together(aux, child_objects)
            flattened: Any = node_type.take_apart(obj)
        else:
            obj = rebuild_registered(cls, aux, child_objects)
            flattened = jtu.default_registry.flatten_one_level(obj)
    except Exception as error:
        raise StructureMismatchError(
            f"The unflatten function of `{cls.__qualname__}` raised {type(error).__name__} on what the file holds: "
            f"{printable(str(error)[:200])}. Load it with the version of the class that wrote it."
        ) from error
    # Only the unflatten function knows how many children it takes. One that zips them with names drops the excess.
    counts = None if flattened is None else _count_parts(*flattened)
    if counts != counts_in_file:
        raise _wrong_counts(cls, counts_in_file, counts or (0, None))
    return obj


def _count_parts(child_objects: Sequence[Any], aux: Any) -> tuple[int, int | None]:
    """Returns the number of children and the number of static values. None if aux is no plain collection of values."""
    return len(child_objects), len(aux) if type(aux) in (tuple, list, dict) else None


def _wrong_counts(
    cls: type, counts_in_file: tuple[int, int | None], counts_of_class: tuple[int, int | None]
) -> StructureMismatchError:
    """Returns the error for a node with other numbers of children or static values than its class has."""
    in_file, of_class = _counts_text(*counts_in_file), _counts_text(*counts_of_class)
    return StructureMismatchError(
        f"The file has {in_file} for a `{cls.__qualname__}`, and that has {of_class}. Load it with the version of the "
        "class that wrote it."
    )


def _counts_text(num_children: int, num_static: int | None) -> str:
    return f"{num_children} children and {'other aux data' if num_static is None else f'{num_static} static values'}"


def _steps_of_registered(_: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    yield from zip(node[3], node[4], strict=True)
    yield node[2], "<aux>"


# --- enums ------------------------------------------------------------------------------------------------------------


def take_enum(obj: Any, type_index: int) -> Apart:
    """Takes a member of an enum apart, into its name. A combination of flags without a name is written by its value.

    Raises:
        RefusalError: if the object is no member of its class.
    """
    cls, name, value = type(obj), obj._name_, obj._value_  # noqa: SLF001 -- `name` may be a member's name
    if name is not None and cls.__members__.get(name) is obj:
        member = encode_str(name)
    elif isinstance(obj, enum.Flag) and type(value) is int:
        member = encode_int(value)
    else:
        raise RefusalError(f"a `{cls.__qualname__}` that is no member of its class", "Use one of its members.")
    return Apart((), (), lambda _: ["enum", type_index, member])


MAX_COMBINATIONS, MAX_FLAG_BITS = 1024, 256
"""Most combinations of flags that files may add to a class in one process, and most bits of one combination."""

_combinations: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()
"""Class of flags → number of combinations that files have added to it."""


def _build_enum(parts: Parts, node: Node) -> Any:
    """Finds the member of an enum by its name, or a combination of flags by its value."""
    cls, name_or_value = parts.makers[node[1]], parts.child(node[2])
    if type(name_or_value) is str:
        member = cls.__members__.get(name_or_value)
        if member is None:
            raise StructureMismatchError(
                f"`{cls.__qualname__}` has no member `{printable(name_or_value[:80])}`. Add it again, as an alias if "
                "it was renamed."
            )
        return member
    require(issubclass(cls, enum.Flag), "it is no member")
    members: Any = cls._value2member_map_  # noqa: SLF001 -- `cls(value)` is a call of the user's class
    member = members.get(name_or_value)
    if member is None:
        require(_combinations.get(cls, 0) < MAX_COMBINATIONS, "its class has had too many combinations from files")
        require(name_or_value.bit_length() <= MAX_FLAG_BITS, "it has too many bits")
        num_members = len(members)
        member = enum.Flag._missing_.__func__(cls, name_or_value)  # pyright: ignore  # noqa: SLF001 -- see above
        # The class keeps every combination for ever, because members are compared by identity.
        _combinations[cls] = _combinations.get(cls, 0) + len(members) - num_members
    require(isinstance(member, cls), "it is no member")
    return member


def _enum_text(manifest: Manifest, node: Node) -> str | None:
    """Prints a member of an enum as `Class.NAME` or `Class(value)`."""
    name, member = _class_name(manifest, node), node[2]
    if type(member) is int:
        return None
    return short(f"{name}.{member}" if type(member) is str else f"{name}({atom_text(member)})")


KINDS = (
    Kind("object", (TYPE, children()), build=_build_object, steps=_steps_of_fields, text=_class_name, is_deep=True,
         has_identity=True),
    Kind("wrapper", (TYPE, children(), TEXT), build=_build_wrapper, steps=_steps_of_fields, text=_class_name,
         is_deep=True, has_identity=True),
    Kind("registered", (TYPE, child("<aux>", is_walked=True), children(), Operand("steps")), build=_build_registered,
         steps=_steps_of_registered, text=_class_name, paired=3, has_identity=True),
    Kind("enum", (TYPE, child(".<enum>", "text", "int")), build=_build_enum, inline=_enum_text),
)  # fmt: skip
