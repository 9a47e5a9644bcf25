"""Flax NNX: what of its objects trains, what stands for them in plain data, and what a file has of them.

Its modules are its objects. Two attributes of an object are NNX's own: `_pytree__state`, which says whether it is being
made, and `_pytree__nodes`, from names to *marks*, whether JAX sees an attribute as a child.

    layer = nnx.Linear(2, 3, rngs=rngs)     kernel: True, bias: True, in_features: False, out_features: False, ...
    layer.sizes = nnx.data([1, 2])          sizes: True, as whoever set it said

Marks that follow from the class or from the value are not written, and neither is the state of an object that is
complete. None of NNX's code runs when a file is loaded: its unflatten function would set any attribute, also those for
which a class has a property. Two classes only hold plain data: `HashableMapping`, and `StateAxes` of recurrent layers.

Flax is not imported, only looked at if the program has done so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..core._by_identity import IdentitySet
from ..core._class_attributes import dataclass_entries, is_asked_of_all, loaded
from ..core._errors import FormatError
from ..core._node_types import (
    NUMPY_NUMBERS,
    PYTHON_NUMBERS,
    AttributeRules,
    ClassKind,
    Convention,
    Library,
    NamesInFiles,
    Naming,
    NodeType,
    PlainForm,
    RefusalError,
    Role,
    Trained,
    is_namedtuple,
    name_in,
)
from ._nnx_layouts import (
    INT_KEYS,
    MAPPING,
    NODES,
    OWN,
    STATE_FIELD,
    Nnx,
    introduce,
    is_new_state,
    is_object,
    native_layout_of,
    new_state,
    nnx,
    parts_of_frozen,
)


def convention_of(cls: type) -> Convention | None:
    """That of variables, for variables."""
    variable = loaded("flax.nnx.variablelib", "Variable")
    return "variable" if variable is not None and issubclass(cls, variable) else None


def writes_back(cls: Any) -> bool | None:
    """NNX's transforms write objects and variables back. An `Intermediate` is sown by one call and popped after it."""
    if issubclass(cls, loaded("flax.nnx", "Intermediate") or ()):
        return False
    is_own = issubclass(cls, tuple([own for name in ("Variable", "Pytree") if (own := loaded("flax.nnx", name))]))
    return True if is_own else None


def is_variable(obj: Any) -> bool:
    """Tells whether an object is an NNX `Variable`."""
    return isinstance(obj, loaded("flax.nnx.variablelib", "Variable") or ())


def register_as_data(cls: type) -> bool:
    """Lets NNX's objects have instances of a class as attributes with data. False if NNX is not imported."""
    register = loaded("flax.nnx", "register_data_type")
    if register is None:
        return False
    register(cls)
    return True


_STATE = "BatchStat Cache Intermediate OptState RngState"


def role_of(cls: Any) -> Role | None:
    """Of variables: `Param`s train, NNX's own classes of state do not. A user's class of variables may be either."""
    if not issubclass(cls, loaded("flax.nnx", "Variable") or ()):
        return None
    if issubclass(cls, loaded("flax.nnx", "Param") or ()):
        return "parameter"
    state = [loaded("flax.nnx", name) for name in _STATE.split()]
    state.append(loaded("flax.nnx.training.metrics", "MetricState"))
    return "state" if issubclass(cls, tuple([own for own in state if own is not None])) else "unsaid"


def trained_below(cls: Any, _: Any, num_children: int) -> Sequence[Trained] | None:
    """Of variables, those that are `Param`s."""
    if not issubclass(cls, loaded("flax.nnx", "Variable") or ()):
        return None
    is_parameter = issubclass(cls, loaded("flax.nnx", "Param") or ())
    return ["if inexact" if is_parameter else "never" for _ in range(num_children)]


def argument_and_filter(argnums: Any) -> tuple[Any, str] | None:
    """What `nnx.grad` takes as `argnums`: `nnx.DiffState(0, nnx.Param)`."""
    is_one = type(argnums).__name__ == "DiffState" and type(argnums).__module__.startswith("flax.")
    return (argnums.argnum, "nnx.Param") if is_one else None


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """A variable is its value, a `List` a list, and another object its attributes."""
    variable, pytree, of_list = (loaded("flax.nnx", name) or () for name in ("Variable", "Pytree", "List"))
    if not isinstance(obj, (variable, pytree)):
        return None
    children, aux = node_type.take_apart(obj)
    keys = node_type.keys_of(obj)
    if isinstance(obj, variable):
        if len(children) != 1:
            return None
        return PlainForm("whole", (), children, {}, lambda new, _: node_type.put_together(aux, new), keys)
    names = [str(name_in(key)) for key in keys]
    places = [i for i, name in enumerate(names) if not name.startswith(OWN)]
    parts = [children[i] for i in places]

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        every = list(children)
        for i, part in zip(places, new, strict=True):
            every[i] = part
        made = node_type.put_together(aux, every)
        vars(made).update(statics)
        return made

    if isinstance(obj, of_list):
        return PlainForm("list", (), parts, {}, make, tuple([keys[i] for i in places]))
    left = {name: value for name, value in vars(obj).items() if name not in names and not name.startswith(OWN)}
    return PlainForm("dict", [names[i] for i in places], parts, left, make)


# --- in files ---------------------------------------------------------------------------------------------------------


def kind_in_files(cls: Any) -> ClassKind | None:
    """All attributes of an object, and of the two classes that hold plain data."""
    return "attributes" if is_object(cls) or cls in _holders() else None


def _holders() -> dict[Any, dict[str, type]]:
    """The classes that hold plain data and are no objects, and of each what its attributes are."""
    axes, table = loaded("flax.nnx", "StateAxes"), nnx()
    return {} if table is None else {table.mapping: {MAPPING: dict}, axes: {"_filters": tuple, "_axes": tuple}}


def answers_as_told(cls: Any) -> bool:
    """Whether a class is of NNX, of whatever version, or inherits from one that is.

    A variable answers to every name that is in its metadata, and an object has whatever attributes a file says.
    """
    # Two flags, which are in the treedefs that the definition of a graph has.
    if (cls.__module__, cls.__qualname__) == ("flax.nnx.pytreelib", "PytreeState"):
        return False
    bases = type.__getattribute__(cls, "__mro__")
    return any(f"{base.__module__}.".startswith("flax.nnx.") for base in bases)


class _Rules(AttributeRules):
    """Attributes with their marks: see the top of the file."""

    is_open = True
    own_entries = frozenset({NODES, STATE_FIELD})

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """The fields of a dataclass, and functions that are annotated, such as `merge_fn: Callable = _concatenate`.

        Other functions are methods, and no file may set an attribute in their place. So are those that only a base of
        the class annotates that holds them.
        """
        if cls in _holders():
            return tuple(_holders()[cls])
        annotated: set[str] = set()
        held: set[str] = set()
        declared: dict[str, Any] = dict(dataclass_entries(cls))
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
        return is_object(cls) and name not in dataclass_entries(cls)

    def written(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        cls, table = type(obj), nnx()
        assert table is not None
        holder = _holders().get(cls)
        if holder is not None and _is_as_held(attributes, holder):
            return attributes
        _require_savable(cls, attributes, naming)
        mapping = attributes.get(NODES)
        marks: Any = getattr(mapping, MAPPING, None) if type(mapping) is table.mapping else None
        is_whole = _are_marks(marks, (True, False)) and type(attributes.get(STATE_FIELD)) is table.state
        if holder is not None or not is_whole:
            fault = (
                "lacks what NNX keeps in each of its objects" if holder is None else "does not hold what NNX puts there"
            )
            raise RefusalError(f"a `{cls.__qualname__}` that {fault}", "Make it by calling its class.")
        expected = _marks(cls, attributes, table)
        noted = sorted({**expected, **marks})
        own = {name: marks.get(name) for name in noted if marks.get(name) is not expected.get(name)}
        kept = {name: value for name, value in attributes.items() if name != NODES}
        if is_new_state(kept[STATE_FIELD], table):
            del kept[STATE_FIELD]

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
        holder = _holders().get(cls)
        if holder is not None:
            _require(_is_as_held(attributes, holder), cls, "attributes")
            return obj
        own = attributes.pop(NODES, {})
        _require(_are_marks(own, (True, False, None)), cls, NODES)
        if STATE_FIELD not in attributes:
            attributes[STATE_FIELD] = new_state(table)
        _require(type(attributes[STATE_FIELD]) is table.state, cls, STATE_FIELD)
        marks = _marks(cls, attributes, table) | {new_names.get(name) or name: own[name] for name in own}
        attributes[NODES] = table.mapping({name: mark for name, mark in marks.items() if mark is not None})
        return obj


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
            is_leaf = issubclass(own, _ARRAYS) or own is jax.ShapeDtypeStruct
            marks[name] = is_leaf or table.variable in type.__getattribute__(own, "__mro__") or is_object(own)
    marks.setdefault(NODES, False)
    return marks


_ARRAYS = (np.ndarray, jax.Array, Tracer)


def _are_marks(marks: Any, allowed: tuple[Any, ...]) -> bool:
    if type(marks) is not dict:
        return False
    return all(type(name) is str and any(mark is each for each in allowed) for name, mark in marks.items())


def _require_savable(cls: type, attributes: dict[str, Any], naming: Naming) -> None:
    transformation: Any = attributes.get("tx")
    if not is_namedtuple(type(transformation)) or not {"init", "update"} <= set(transformation._fields):
        return
    if naming.why_nameless(transformation.init) or naming.why_nameless(transformation.update):
        raise RefusalError(
            f"a `{cls.__qualname__}` whose `tx` is functions that optax has made, and they have no names",
            "Save its state, `flax.nnx.state(optimizer)`. Put that into a new one after loading: "
            "`flax.nnx.update(optimizer, state)`.",
        )


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """What is wrong with the auxiliary data of a variable or a state of NNX; None if nothing is, or it is of neither.

    A variable asks the hooks in its metadata whenever somebody looks at it; a state answers to its keys. So a name that
    Python or NumPy asks for, such as `__array_interface__`, is none that a file may have, and nothing in metadata may
    be called.
    """
    table = nnx()
    if table is None:
        return None
    bases = type.__getattribute__(cls, "__mro__")
    states = [state for name in ("State", "FlatState") if (state := loaded("flax.nnx", name)) is not None]
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
    """Whether a value, or one in it, can be called. Classes of numbers and meshes can, and run nobody's code."""
    seen = IdentitySet()
    stack = [value]
    while stack:
        each = stack.pop()
        if not seen.add(each):
            continue
        if type(each) in (tuple, list, set, frozenset):
            stack.extend(each)
        elif type(each) is dict:
            stack.extend(each.values())
        elif callable(each) and not isinstance(each, _CALLED_WITHOUT_HARM) and each not in _CLASSES_OF_NUMBERS:
            return True
    return False


_CALLED_WITHOUT_HARM = (np.generic, type(jnp.float32), jax.sharding.Mesh, jax.sharding.AbstractMesh)
_CLASSES_OF_NUMBERS = IdentitySet([*PYTHON_NUMBERS, *NUMPY_NUMBERS])


_NAMES = NamesInFiles(
    # What stands for a carry and for a plain pytree.
    classes="flax.nnx: Carry    flax.nnx.graphlib: GenericPytree",
    state="""
        flax.nnx: BatchStat Cache Intermediate OptArray OptState OptVariable Perturbation RngCount RngKey RngState
        flax.nnx.training.metrics: MetricState
    """,
    functions="""
        flax.nnx: dot_product_attention    flax.nnx.nn.attention: dot_product_attention
        flax.nnx.nn.dtypes: promote_dtype    flax.nnx.nn.recurrent: _concatenate
    """,
    # Layers, variables and metrics, what describes a graph, and the boxes in which Linen has parameters with names of
    # axes. They call nothing but the functions that they hold. Not so what looks up attributes by the file's word
    # (`DelayedAccessor`), wraps a transform, or belongs to the bridge from NNX to Linen.
    if_trusted="""
        flax.nnx: BatchNorm BatchStat Bidirectional Cache Conv ConvTranspose Dict Dropout EMA Einsum Embed FlatState
            GRUCell GraphDef GroupNorm InstanceNorm Intermediate LSTMCell LayerNorm Linear LinearGeneral List LoRA
            LoRALinear LoRAParam ModelAndOptimizer Module MultiHeadAttention MultiMetric OptArray OptState OptVariable
            OptimizedLSTMCell Optimizer PReLU Param PathContains Perturbation RMSNorm RNN RngCount RngKey RngState
            RngStream Rngs RoPE Sequential SimpleCell SpectralNorm State StateAxes Variable WeightNorm
        flax.nnx.graphlib: IndexesPytreeDef LeafAttr NodeAttr NodeDef NodeRef Static VariableDef
        flax.nnx.pytreelib: PytreeState
        flax.nnx.training.metrics: Accuracy Average MetricState Welford
        flax.typing: HashableMapping
        flax.linen: LogicallyPartitioned Partitioned
    """,
    kept_back="flax.nnx flax.typing:HashableMapping",
)

NNX = Library(
    "Flax NNX",
    convention_of=convention_of,
    native_layout_of=native_layout_of,
    introduce=introduce,
    parts_of_frozen=parts_of_frozen,
    writes_back=writes_back,
    role_of=role_of,
    trained_below=trained_below,
    argument_and_filter=argument_and_filter,
    plain_form_of=plain_form_of,
    kind_in_files=kind_in_files,
    attributes=_Rules(),
    fault_of_aux=fault_of_aux,
    answers_as_told=answers_as_told,
    names=_NAMES,
)
