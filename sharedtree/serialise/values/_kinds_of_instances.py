"""Rows of instances of classes: rebuilt field by field, by the functions that were registered, or found by name.

No attribute is asked of an object that a file describes, for its class may answer with a call of what the file put
there.
"""

import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from jax import tree_util as jtu

from ...core._errors import StructureMismatchError
from ...core._jax_internals import rebuild_registered, registered_counts
from ...core._node_types import RefusalError, fault_of_aux, node_type_of, node_types_by_class
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
    """An instance of a class that was registered with JAX or with `register_node`."""
    if type(obj) is Dag:
        return _take_dag(obj, type_index)
    node_type = node_type_of(obj)
    assert node_type is not None
    try:
        parts, aux = node_type.take_apart(obj)
        keys = [str(key) for key in node_type.keys_of(obj)]
    except Exception as error:  # noqa: BLE001 -- the class's own code may raise anything
        raise RefusalError(
            f"a `{type(obj).__qualname__}` whose flatten function raises {type(error).__name__}: {error}",
            "Leave it out, or bring it into a state in which JAX can flatten it.",
        ) from error
    if aux is obj:  # no cycle that could be broken: for JAX it is one constant
        raise RefusalError(
            f"a `{type(obj).__qualname__}` that is its own auxiliary data, of which nothing can be written",
            "Let its flatten function give plain values, from which its unflatten function makes it anew.",
        )
    fault = fault_of_aux(type(obj), aux)
    if fault is not None:
        raise RefusalError(
            f"a `{type(obj).__qualname__}` with {fault}, which no file may have", "Set it anew after loading."
        )
    # Keys that do not match the children, or make no paths. Texts with an address or surrogates are no good in a file.
    is_sound = len(keys) == len(parts) and are_steps(keys)
    if not is_sound or any(" at 0x" in key or type(encode_str(key)) is list for key in keys):
        keys = [f"[{i}]" for i in range(len(parts))]
    return Apart([*parts, aux], [*keys, "<aux>"], lambda done: ["registered", type_index, done[-1], done[:-1], keys])


def _take_dag(dag: Dag[Any], type_index: int) -> Apart:
    """A Dag as its model, if that is still what the Dag holds: it may have been changed since."""
    leaves, structure = dag._flatten()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    try:
        now, same = Dag(dag.tree)._flatten()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        is_whole = same is structure and all(a is b for a, b in zip(now, leaves, strict=True))
    except Exception:  # noqa: BLE001 -- the unflatten functions of any class may raise anything
        is_whole = False
    if not is_whole:
        raise RefusalError(
            "a `Dag` that holds something else than its model has: the model was changed, or numbers or placeholders "
            "are in the places of arrays",
            "Save its model, `dag.tree`, or its leaves, `jax.tree.leaves(dag)`.",
        )
    return Apart((dag.tree,), (".tree",), lambda done: ["registered", type_index, None, done, [".tree"]])


def are_steps(steps: Any) -> bool:
    """Whether these are texts that paths can be made of, each of which leads to one child."""
    if type(steps) is not list or not all(type(step) is str for step in steps):
        return False
    return len(set(steps)) == len(steps) and all(1 < len(step) <= MAX_STEP and step[0] in ".[" for step in steps)


def _build_registered(parts: Parts, node: Node) -> Any:
    cls, aux, own = parts.makers[node[1]], parts.child(node[2]), parts.children(node[3])
    if cls is Dag:
        require(aux is None and len(own) == 1, "a `Dag` has one model, and nothing else")
        return Dag._of_file(own[0])  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    known, given = node_types_by_class.get(cls), _counts(own, aux)
    fault = fault_of_aux(cls, aux)
    require(fault is None, f"it has {fault}")
    fixed = registered_counts(cls)
    if fixed is not None and fixed != given:
        raise _other_counts(cls, given, fixed)
    try:
        if known is not None:
            made = known.put_together(aux, own)
            again: Any = known.take_apart(made)
        else:
            made = rebuild_registered(cls, aux, own)
            again = jtu.default_registry.flatten_one_level(made)
    except Exception as error:
        raise StructureMismatchError(
            f"The unflatten function of `{cls.__qualname__}` raised {type(error).__name__} on what the file holds: "
            f"{printable(str(error)[:200])}. Load it with the version of the class that wrote it."
        ) from error
    # How many an unflatten function takes only it knows, and those that zip with names drop what is too many.
    counts = None if again is None else _counts(*again)
    if counts != given:
        raise _other_counts(cls, given, counts or (0, None))
    return made


def _counts(own: Sequence[Any], aux: Any) -> tuple[int, int | None]:
    """How many children there are, and static values, if aux data is a plain collection of them."""
    return len(own), len(aux) if type(aux) in (tuple, list, dict) else None


def _other_counts(cls: type, given: tuple[int, int | None], own: tuple[int, int | None]) -> StructureMismatchError:
    told = [f"{n} children and {'other aux data' if m is None else f'{m} static values'}" for n, m in (given, own)]
    return StructureMismatchError(
        f"The file has {told[0]} for a `{cls.__qualname__}`, and that has {told[1]}. Load it with the version of the "
        "class that wrote it."
    )


def _steps_of_registered(_: Manifest, node: Node) -> Iterator[tuple[Child, str]]:
    yield from zip(node[3], node[4], strict=True)
    yield node[2], "<aux>"


# --- enums ------------------------------------------------------------------------------------------------------------


def take_enum(obj: Any, type_index: int) -> Apart:
    """A member of an enum, by its name; of flags that have none, by its value."""
    cls, name, value = type(obj), obj._name_, obj._value_  # noqa: SLF001 -- `name` may be a member's name
    if name is not None and cls.__members__.get(name) is obj:
        member = encode_str(name)
    elif isinstance(obj, enum.Flag) and type(value) is int:
        member = encode_int(value)
    else:
        raise RefusalError(f"a `{cls.__qualname__}` that is no member of its class", "Use one of its members.")
    return Apart((), (), lambda _: ["enum", type_index, member])


MAX_COMBINATIONS, MAX_FLAG_BITS = 1024, 256
"""How many combinations of flags files may add to a class in a process, and how long one may be."""

_combinations: weakref.WeakKeyDictionary[type, int] = weakref.WeakKeyDictionary()


def _build_enum(parts: Parts, node: Node) -> Any:
    cls, member = parts.makers[node[1]], parts.child(node[2])
    if type(member) is str:
        found = cls.__members__.get(member)
        if found is None:
            raise StructureMismatchError(
                f"`{cls.__qualname__}` has no member `{printable(member[:80])}`. Add it again, as an alias if it was "
                "renamed."
            )
        return found
    require(issubclass(cls, enum.Flag), "it is no member")
    members: Any = cls._value2member_map_  # noqa: SLF001 -- `cls(member)` is a call of the user's class
    found = members.get(member)
    if found is None:
        require(_combinations.get(cls, 0) < MAX_COMBINATIONS, "its class has had too many combinations from files")
        require(member.bit_length() <= MAX_FLAG_BITS, "it has too many bits")
        before = len(members)
        found = enum.Flag._missing_.__func__(cls, member)  # pyright: ignore  # noqa: SLF001 -- likewise
        # The class keeps each for ever, since one is compared with another by identity.
        _combinations[cls] = _combinations.get(cls, 0) + len(members) - before
    require(isinstance(found, cls), "it is no member")
    return found


def _enum_text(manifest: Manifest, node: Node) -> str | None:
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
