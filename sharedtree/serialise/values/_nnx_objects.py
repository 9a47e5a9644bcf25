"""The objects of Flax NNX, which its modules are: what is written of one, and what is there again without a file.

Two attributes of an object are NNX's own: `_pytree__state`, which says whether it is being made, and `_pytree__nodes`,
from names to *marks*, whether JAX sees an attribute as a child.

    layer = nnx.Linear(2, 3, rngs=rngs)     kernel: True, bias: True, in_features: False, out_features: False, ...
    layer.sizes = nnx.data([1, 2])          sizes: True, as whoever set it said

Marks that follow from the class or from the value are not written, and neither is the state of an object that is
complete. None of NNX's code runs when a file is loaded: its unflatten function would set any attribute, also those for
which a class has a property. Two classes only hold plain data: `HashableMapping`, and `StateAxes` of recurrent layers.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ...core._errors import FormatError
from ...core._plain_containers import is_namedtuple
from ...libraries._nnx import INT_KEYS, MAPPING, NODES, OWN, Nnx, is_new_state, is_object, new_state, nnx
from ..arrays._placing import is_array
from ..trust._classes import held, nnx_holders
from ..trust._names import NamelessError, RefusalError, name_of
from ._attribute_classes import Library, is_asked_of_all

STATE = OWN + "state"


class NnxObjects(Library):
    """See the module's docstring."""

    is_open = True
    own_entries = frozenset({NODES, STATE})

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """The fields of a dataclass, and functions that are annotated, such as `merge_fn: Callable = _concatenate`.

        Other functions are methods, and no file may set an attribute in their place. So are those that only a base of
        the class annotates that holds them.
        """
        if cls in nnx_holders():
            return tuple(nnx_holders()[cls])
        annotated: set[str] = set()
        held: set[str] = set()
        declared: dict[str, Any] = dict(getattr(cls, "__dataclass_fields__", {}))
        for base in cls.__mro__:
            annotated.update(getattr(base, "__annotations__", ()))
            for name, value in vars(base).items():
                if name not in held and name in annotated and callable(value):
                    declared.setdefault(name)
            held.update(vars(base))
        return tuple(declared)

    def may_have(self, cls: Any, name: str) -> bool:
        """`nnx.List` has numbers for names, `nnx.Dict` any text."""
        if not is_object(cls) or not name or (name.startswith("__") and name.endswith("__")):
            return False
        return not name.startswith(OWN) or name in self.own_entries

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """What the class holds is found there."""
        return is_object(cls) and name not in getattr(cls, "__dataclass_fields__", {})

    def written(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        cls, table = type(obj), nnx()
        assert table is not None
        holder = nnx_holders().get(cls)
        if holder is not None and _is_as_held(attributes, holder):
            return attributes
        _require_savable(cls, attributes)
        mapping = attributes.get(NODES)
        marks: Any = getattr(mapping, MAPPING, None) if type(mapping) is table.mapping else None
        is_whole = _are_marks(marks, (True, False)) and type(attributes.get(STATE)) is table.state
        if holder is not None or not is_whole:
            fault = (
                "lacks what NNX keeps in each of its objects" if holder is None else "does not hold what NNX puts there"
            )
            raise RefusalError(f"a `{cls.__qualname__}` that {fault}", "Make it by calling its class.")
        expected = _marks(cls, attributes, table)
        noted = sorted({**expected, **marks})
        own = {name: marks.get(name) for name in noted if marks.get(name) is not expected.get(name)}
        kept = {name: value for name, value in attributes.items() if name != NODES}
        if is_new_state(kept[STATE], table):
            del kept[STATE]

        def order(name: str) -> tuple[bool, bool, int, str]:
            is_number = getattr(cls, INT_KEYS) and name.isascii() and name.isdecimal()
            return not marks.get(name), not is_number, int(name) if is_number else 0, name

        return {name: kept[name] for name in sorted(kept, key=order)} | ({NODES: own} if own else {})

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        _, names, values = aux
        # What `typing` notes on an instance is no data, and in no file.
        noted = (NODES, "__orig_class__")
        return {str(name): value for name, value in zip(names, values, strict=True) if name not in noted}

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        cls, table = type(obj), nnx()
        assert table is not None
        holder = nnx_holders().get(cls)
        if holder is not None:
            _require(_is_as_held(attributes, holder), cls, "attributes")
            return obj
        own = attributes.pop(NODES, {})
        _require(_are_marks(own, (True, False, None)), cls, NODES)
        if STATE not in attributes:
            attributes[STATE] = new_state(table)
        _require(type(attributes[STATE]) is table.state, cls, STATE)
        marks = _marks(cls, attributes, table) | {new_names.get(name) or name: own[name] for name in own}
        attributes[NODES] = table.mapping({name: mark for name, mark in marks.items() if mark is not None})
        return obj


def step_of(name: str) -> str:
    """How a path continues to an attribute, as JAX prints it: the items of `nnx.List` have numbers for names."""
    return f"[{name}]" if name.isascii() and name.isdecimal() else f".{name}"


def _require(condition: bool, cls: type, name: str) -> None:
    if not condition:
        what = f"a `{cls.__qualname__}` whose `{name}` are not what Flax NNX has there"
        raise FormatError(f"The file has {what}. No save would write that.")


def _is_as_held(attributes: dict[str, Any], form: dict[str, type]) -> bool:
    return attributes.keys() == form.keys() and all(type(attributes[name]) is form[name] for name in form)


def _marks(cls: Any, attributes: dict[str, Any], table: Nnx) -> dict[str, Any]:
    """The marks that follow from the class and the values."""
    marks = dict(getattr(getattr(cls, NODES), MAPPING))
    for name, value in attributes.items():
        if name not in marks:
            own: Any = type(value)
            # A `ShapeDtypeStruct` stands for an array where only a part of a file is loaded.
            is_leaf = is_array(own) or own is jax.ShapeDtypeStruct
            marks[name] = is_leaf or table.variable in type.__getattribute__(own, "__mro__") or is_object(own)
    marks.setdefault(NODES, False)
    return marks


def _are_marks(marks: Any, allowed: tuple[Any, ...]) -> bool:
    if type(marks) is not dict:
        return False
    return all(type(name) is str and any(mark is each for each in allowed) for name, mark in marks.items())


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


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """What is wrong with the auxiliary data of a variable or a state of NNX; None if nothing is, or it is of neither.

    A variable asks the hooks in its metadata whenever somebody looks at it; a state answers to its keys. So a name that
    Python or NumPy asks for, such as `__array_interface__`, is none that a file may have, and nothing in metadata may
    be called. Asked when a file is written, too: what is not read is not written.
    """
    table = nnx()
    if table is None:
        return None
    bases = type.__getattribute__(cls, "__mro__")
    states = [state for name in ("State", "FlatState") if (state := held("flax.nnx", name)) is not None]
    if table.variable in bases:
        are_pairs = type(aux) is tuple and all(type(item) is tuple and len(item) == 2 for item in aux)
        if not are_pairs or not all(type(item[0]) is str for item in aux):
            return "metadata that is no tuple of names with values"
        if any(_has_what_is_called(item[1]) for item in aux):
            return "metadata that can be called, such as a hook"
        names = [item[0] for item in aux if item[0].startswith("__") and item[0].endswith("__")]
    elif any(state in bases for state in states):
        keys: Any = aux if type(aux) in (tuple, list) else [aux]  # or paths of keys
        every = [name for key in keys for name in (key if type(key) in (tuple, list) else [key])]
        names = [name for name in every if is_asked_of_all(name)]  # whose values may be called
    else:
        return None
    return "a name that Python itself or other programs ask for" if names else None


def _has_what_is_called(value: Any) -> bool:
    """Whether a value, or one in it, can be called. Types of numbers and meshes can, and do nothing."""
    seen: set[int] = set()  # ids; the objects are alive in `value`
    stack = [value]
    while stack:
        each = stack.pop()
        if id(each) in seen:  # alive: see `seen`
            continue
        seen.add(id(each))  # alive: see `seen`
        if type(each) in (tuple, list, set, frozenset):
            stack.extend(each)
        elif type(each) is dict:
            stack.extend(each.values())
        elif callable(each) and not isinstance(each, _CALLED_WITHOUT_HARM):
            return True
    return False


_CALLED_WITHOUT_HARM = (np.generic, type, jax.sharding.Mesh, jax.sharding.AbstractMesh)
