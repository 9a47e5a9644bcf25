"""The objects of Flax NNX, which its modules are: what is written of one, and what is there again without a file.

An object is what its `__dict__` holds. Two of its attributes are NNX's own: `_pytree__state`, which says whether it is
being made, and `_pytree__nodes`, a `HashableMapping` from names to *marks*, whether JAX sees an attribute as a child.

    layer = nnx.Linear(2, 3, rngs=rngs)     kernel: True, bias: True, in_features: False, out_features: False, ...
    layer.sizes = nnx.data([1, 2])          sizes: True, as whoever set it said

Nearly all marks follow from the class, which declares some, or from the value: arrays, variables and objects of NNX are
children, and nothing else is. These are not written. Neither is the state of an object that is complete.

None of NNX's code runs when a file is loaded. Its unflatten function would set any attribute, also those for which a
class has a property.

Two classes that are no objects of NNX's hold plain data in attributes of their own: `HashableMapping`, a dictionary
that cannot be changed, and `StateAxes`, which a recurrent layer has.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..._errors import FormatError
from ..._nnx_internals import INT_KEYS, MAPPING, NODES, OWN, Nnx, is_new_state, is_object, new_state, nnx
from ..._node_types import is_namedtuple
from ..arrays._arrays import is_array
from ..trust._names import NamelessError, RefusalError, name_of, namespace

STATE = OWN + "state"

IS_OPEN: bool = True

_ABSENT: Any = object()


def is_of_attributes(cls: type) -> bool:
    """Whether a class is one of NNX's whose instances are all in their attributes."""
    return is_object(cls) or cls in _holders()


def declared_fields(cls: Any) -> tuple[str, ...]:
    """The attributes that a class of this kind declares: the fields of one that is a dataclass, and functions.

    A function in a class is a method, and no file may set an attribute in its place; but not one that is annotated:

        merge_fn: Callable = _concatenate

    The annotation must be of the class that holds the function, or of one derived from it: where a base class annotates
    what a class derived from it defines, the function is a method.
    """
    holder = _holders().get(cls)
    if holder is not None:
        return tuple(holder)
    annotated: set[str] = set()
    held: dict[str, Any] = {}
    declared: dict[str, Any] = dict(getattr(cls, "__dataclass_fields__", {}))
    for base in cls.__mro__:
        annotated.update(getattr(base, "__annotations__", ()))
        for name, value in vars(base).items():
            if name not in held and name in annotated and callable(value):
                declared.setdefault(name)
            held.setdefault(name, value)
    return tuple(declared)


def may_stay_unset(cls: Any, name: str) -> bool:
    """Whether instances need not have a field: what the class holds is found there."""
    return is_object(cls) and name not in getattr(cls, "__dataclass_fields__", {})


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """What is wrong with the auxiliary data of a variable or a state of NNX; None if nothing is, or it is of neither.

    A variable answers to whatever name is in its metadata, and asks the hooks there whenever somebody looks at it; a
    state answers to its keys. So a name that Python or NumPy asks for, such as `__array_interface__`, is none that a
    file may have, and nothing in metadata may be called. Asked when a file is written, too: what is not read is not
    written.
    """
    table = nnx()
    if table is None:
        return None
    bases = type.__getattribute__(cls, "__mro__")
    if table.variable in bases:
        if type(aux) is not tuple or not all(type(item) is tuple and len(item) == 2 for item in aux):
            return "metadata that is no tuple of names with values"
        names = [item[0] for item in aux]
        if not all(type(name) is str for name in names):
            return "metadata that is no tuple of names with values"
        if any(_is_called(item[1]) for item in aux):
            return "metadata that can be called, such as a hook"
    elif any(state in bases for state in _states()):
        names = _texts_in(aux)
    else:
        return None
    return "a name that Python itself asks for" if any(map(_is_special, names)) else None


def _states() -> tuple[Any, ...]:
    held = namespace(sys.modules.get("flax.nnx"))
    return tuple([held[name] for name in ("State", "FlatState") if name in held])


def _texts_in(keys: Any) -> list[Any]:
    """The texts in keys, or in paths of keys."""
    if type(keys) not in (tuple, list):
        return [keys]
    return [text for key in keys for text in (key if type(key) in (tuple, list) else (key,))]


def _is_special(name: Any) -> bool:
    return type(name) is str and name.startswith("__") and name.endswith("__")


def _is_called(value: Any) -> bool:
    """Whether a value, or one in it, can be called. Types of numbers and meshes can, and do nothing."""
    if type(value) in (tuple, list, set, frozenset):
        return any(map(_is_called, value))
    if type(value) is dict:
        return any(map(_is_called, value.values()))
    return callable(value) and not isinstance(value, (np.generic, type, jax.sharding.Mesh, jax.sharding.AbstractMesh))


def default_of(cls: Any, name: str) -> None:
    """No defaults but those of the fields of a dataclass."""


def _holders() -> dict[Any, dict[str, type]]:
    """The classes that are no objects of NNX's, and of each what its attributes are."""
    table = nnx()
    if table is None:
        return {}
    axes = namespace(sys.modules["flax.nnx"]).get("StateAxes")
    return {table.mapping: {MAPPING: dict}, axes: {"_filters": tuple, "_axes": tuple}}


def _is_as_held(attributes: dict[str, Any], form: dict[str, type]) -> bool:
    return attributes.keys() == form.keys() and all(type(attributes[name]) is form[name] for name in form)


def may_have(cls: type, name: str) -> bool:
    """Whether an object may have an attribute of this name in a file: `nnx.List` has numbers, `nnx.Dict` any text."""
    if not is_object(cls) or not name or (name.startswith("__") and name.endswith("__")):
        return False
    return not name.startswith(OWN) or name in (NODES, STATE)


def step_of(name: str) -> str:
    """How a path continues to an attribute, as JAX prints it: the items of `nnx.List` have numbers for names."""
    return f"[{name}]" if name.isascii() and name.isdecimal() else f".{name}"


def written(obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an instance as they are written: those that JAX traces come first, in JAX's order.

    Raises:
        RefusalError: if it cannot be saved.
    """
    cls, table = type(obj), nnx()
    assert table is not None
    holder = _holders().get(cls)
    if holder is not None:
        if not _is_as_held(attributes, holder):
            raise RefusalError(
                f"a `{cls.__qualname__}` that does not hold what NNX puts there", "Make it by calling its class."
            )
        return attributes
    _require_savable(cls, attributes)
    mapping = attributes.get(NODES)
    marks: Any = getattr(mapping, MAPPING, None) if type(mapping) is table.mapping else None
    is_marked = type(marks) is dict and _are_marks(marks, (True, False))
    if not is_marked or type(attributes.get(STATE)) is not table.state:
        raise RefusalError(
            f"a `{cls.__qualname__}` that lacks what NNX keeps in each of its objects",
            "Make it by calling its class.",
        )
    expected = _marks(cls, attributes, table)
    noted = sorted({**expected, **marks})
    own = {name: marks.get(name) for name in noted if marks.get(name) is not expected.get(name)}
    kept = {name: value for name, value in attributes.items() if name != NODES}
    if is_new_state(kept[STATE], table):
        del kept[STATE]
    names = sorted(kept, key=_order(cls))
    names.sort(key=lambda name: not marks.get(name))
    return {name: kept[name] for name in names} | ({NODES: own} if own else {})


def static_attributes(aux: Any) -> dict[str, Any]:
    """What JAX does not trace of an object, of the auxiliary data that NNX's flatten function gives."""
    _, names, values = aux
    return {str(name): value for name, value in zip(names, values, strict=True) if name != NODES}


def finisher(cls: Any, new_names: Mapping[str, str | None]) -> Callable[[Any, dict[str, Any]], Any]:
    """What is done with an instance whose attributes were set as a file has them.

    Args:
        cls: its class.
        new_names: of attributes that are called something else now, the name in the file → the name.

    Returns:
        (the instance, its attributes) → the instance, checked and completed. Raises `FormatError` if it is none that
        a save would write.
    """
    table, holder = nnx(), _holders().get(cls)
    assert table is not None

    def finish_holder(obj: Any, attributes: dict[str, Any]) -> Any:
        if holder is None or not _is_as_held(attributes, holder):
            raise _malformed(cls, "attributes")
        return obj

    def finish(obj: Any, attributes: dict[str, Any]) -> Any:
        own = attributes.pop(NODES, {})
        if type(own) is not dict or not _are_marks(own, (True, False, None)):
            raise _malformed(cls, NODES)
        state = attributes.get(STATE, _ABSENT)
        if state is _ABSENT:
            attributes[STATE] = new_state(table)
        elif type(state) is not table.state:
            raise _malformed(cls, STATE)
        marks = _marks(cls, attributes, table)
        for name, mark in own.items():
            marks[new_names.get(name) or name] = mark
        attributes[NODES] = table.mapping({name: mark for name, mark in marks.items() if mark is not None})
        return obj

    return finish if holder is None else finish_holder


def _marks(cls: Any, attributes: dict[str, Any], table: Nnx) -> dict[str, Any]:
    """The marks that follow from the class and the values."""
    marks = dict(getattr(getattr(cls, NODES), MAPPING))
    for name, value in attributes.items():
        if name not in marks:
            marks[name] = _is_child(type(value), table)
    marks.setdefault(NODES, False)
    return marks


def _is_child(cls: Any, table: Nnx) -> bool:
    # A `ShapeDtypeStruct` stands for an array where only a part of a file is loaded.
    if is_array(cls) or cls is jax.ShapeDtypeStruct:
        return True
    return table.variable in type.__getattribute__(cls, "__mro__") or is_object(cls)


def _are_marks(marks: dict[Any, Any], allowed: tuple[Any, ...]) -> bool:
    return all(type(name) is str and any(mark is each for each in allowed) for name, mark in marks.items())


def _order(cls: Any) -> Callable[[str], Any] | None:
    if not getattr(cls, INT_KEYS):
        return None

    def numbers_first(name: str) -> tuple[Any, ...]:
        return (0, int(name)) if name.isascii() and name.isdecimal() else (1, name)

    return numbers_first


def _require_savable(cls: type, attributes: dict[str, Any]) -> None:
    transformation: Any = attributes.get("tx")
    if not is_namedtuple(type(transformation)) or not {"init", "update"} <= set(transformation._fields):
        return
    try:
        name_of(transformation.init)
        name_of(transformation.update)
    except NamelessError:
        raise RefusalError(
            f"a `{cls.__qualname__}` whose `tx` is functions that optax has made, and they have no names",
            "Save its state, `flax.nnx.state(optimizer)`. Put that into a new one after loading: "
            "`flax.nnx.update(optimizer, state)`.",
        ) from None


def _malformed(cls: type, name: str) -> FormatError:
    return FormatError(
        f"The file has a `{cls.__qualname__}` whose `{name}` are not what Flax NNX has there. No save would write that."
    )
