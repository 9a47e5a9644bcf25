"""Row of the table of libraries for Flax NNX: its trainable leaves, and its objects in states and files.

Modules of NNX are *objects*, that is instances of `nnx.Pytree`. NNX itself sets two attributes of an object. The flags
in `_pytree__state` tell whether the object is still being made. `_pytree__nodes` maps names to *marks*. A mark is True
if the attribute is a child for JAX:

    layer = nnx.Linear(2, 3, rngs=rngs)     kernel: True, bias: True, in_features: False, out_features: False, ...
    layer.sizes = nnx.data([1, 2])          sizes: True, because the user said so by `nnx.data`

A file does not have marks that follow from the class or from the value, nor the flags of a complete object. No code of
NNX runs when a file is loaded: its unflatten function would set any attribute, even one for which the class has a
property. Two classes are no objects, but *holders* of plain data: `HashableMapping`, and `StateAxes` of recurrent
layers.

This file never imports Flax. `loaded` and `nnx()` look it up, and return None if the program has not imported it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..core._by_identity import IdentitySet
from ..core._class_attributes import dataclass_entries, is_protocol_name, loaded
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
    node_type_of,
    under_present_names,
)
from ._nnx_layouts import (
    INT_KEYS,
    MAPPING,
    NODES,
    OWN,
    STATE_FIELD,
    Nnx,
    frozen_mapping,
    introduce,
    is_new_state,
    is_object,
    native_layout_of,
    new_state,
    nnx,
    parts_of_frozen,
)


def convention_of(cls: type) -> Convention | None:
    """Returns "variable" for variables. None for other classes."""
    variable = loaded("flax.nnx.variablelib", "Variable")
    return "variable" if variable is not None and issubclass(cls, variable) else None


def writes_back(cls: Any) -> bool | None:
    """Returns True for objects and variables, whose changes NNX's transforms write back. None for other classes.

    False for an `Intermediate`: one call sows it and the user pops it, so nobody misses a change.
    """
    if issubclass(cls, loaded("flax.nnx", "Intermediate") or ()):
        return False
    bases = [loaded("flax.nnx", name) for name in ("Variable", "Pytree")]
    return True if issubclass(cls, tuple([base for base in bases if base])) else None


def is_variable(obj: Any) -> bool:
    """Returns True if an object is an NNX `Variable`."""
    return isinstance(obj, loaded("flax.nnx.variablelib", "Variable") or ())


def is_hijax_variable(obj: Any) -> bool:
    """Returns True for a variable of NNX made with `hijax=True`, and for a tracer of one.

    Such a variable is a value to JAX, and no pytree. Flax 0.12.12 can neither differentiate nor jit a function of a
    module that has one at two paths.
    """
    return is_variable(obj) and node_type_of(obj) is None


def is_object_of_nnx(obj: Any) -> bool:
    """Returns True for a module of NNX, an optimizer, or another instance of `nnx.Pytree`."""
    return isinstance(obj, loaded("flax.nnx", "Pytree") or ())


def is_optimizer_of_nnx(obj: Any) -> bool:
    """Returns True for an `nnx.Optimizer`, after its `__init__`.

    Its attribute `wrt` is the filter for the variables that it trains, and `opt_state` has their slots.
    """
    return isinstance(obj, loaded("flax.nnx", "Optimizer") or ()) and {"wrt", "opt_state"} <= vars(obj).keys()


def wraps_linen(cls: type) -> bool:
    """Returns True for the class of NNX modules that wrap a module of Flax Linen.

    Such a module has the parameters in dicts. It passes them to Linen, and raises for what is no variable.
    """
    return issubclass(cls, loaded("flax.nnx.bridge", "ToNNX") or ())


def register_as_data(cls: type) -> bool:
    """Lets NNX's objects have instances of a class as attributes with data. Returns False if NNX is not imported."""
    register = loaded("flax.nnx", "register_data_type")
    if register is None:
        return False
    register(cls)
    return True


# Classes of variables that are state of a model. `OptState` is that of an optimizer.
_STATE = "BatchStat Cache Intermediate RngState"


def role_of(cls: Any) -> Role | None:
    """Returns the role of a class of variables. None for other classes.

    It is "parameter" for `Param`, "optimizer state" for `OptState`, and "state" for NNX's other classes of state. It is
    "unsaid" for all others: their class does not say whether they are trained, so the user decides.
    """
    if not issubclass(cls, loaded("flax.nnx", "Variable") or ()):
        return None
    if issubclass(cls, loaded("flax.nnx", "Param") or ()):
        return "parameter"
    if issubclass(cls, loaded("flax.nnx", "OptState") or ()):
        return "optimizer state"
    state_classes = [loaded("flax.nnx", name) for name in _STATE.split()]
    state_classes.append(loaded("flax.nnx.training.metrics", "MetricState"))
    return "state" if issubclass(cls, tuple([base for base in state_classes if base is not None])) else "unsaid"


def trained_below(cls: Any, _: Any, num_children: int) -> Sequence[Trained] | None:
    """Returns "if inexact" for each child of a `Param`, "never" for other variables, and None for other classes."""
    if not issubclass(cls, loaded("flax.nnx", "Variable") or ()):
        return None
    is_parameter = issubclass(cls, loaded("flax.nnx", "Param") or ())
    return ["if inexact" if is_parameter else "never" for _ in range(num_children)]


def argument_and_filter(argnums: Any) -> tuple[Any, str] | None:
    """Reads an `nnx.DiffState(0, nnx.Param)`, an argument for the `argnums` of `nnx.grad`. None for other values.

    Returns:
        The position, and code for the filter. That is always `nnx.Param`, as an example for errors.
    """
    is_diff_state = type(argnums).__name__ == "DiffState" and type(argnums).__module__.startswith("flax.")
    return (argnums.argnum, "nnx.Param") if is_diff_state else None


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Returns the plain data for an object or a variable in a state. None for other classes.

    A variable is represented by its value, a `List` by a list, any other object by its attributes.
    """
    variable, pytree, list_class = (loaded("flax.nnx", name) or () for name in ("Variable", "Pytree", "List"))
    if not isinstance(obj, (variable, pytree)):
        return None
    children, aux = node_type.take_apart(obj)
    keys = node_type.keys_of(obj)
    if isinstance(obj, variable):
        if len(children) != 1:
            return None
        # The function makes a variable from new children. A variable has no static attributes.
        return PlainForm("whole", (), children, {}, lambda new, _: node_type.put_together(aux, new), keys)
    names = [str(name_in(key)) for key in keys]
    # Indices of the children that are not NNX's own.
    indices = [i for i, name in enumerate(names) if not name.startswith(OWN)]
    user_children = [children[i] for i in indices]

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        """Makes an object from new children and static attributes. Children of NNX's own stay."""
        all_children = list(children)
        for i, child in zip(indices, new, strict=True):
            all_children[i] = child
        new_obj = node_type.put_together(aux, all_children)
        vars(new_obj).update(statics)
        return new_obj

    if isinstance(obj, list_class):
        return PlainForm("list", (), user_children, {}, make, tuple([keys[i] for i in indices]))
    # Everything else is static, except for the attributes that NNX keeps for itself.
    not_static = {*names, *[name for name in vars(obj) if name.startswith(OWN)]}
    statics = {name: value for name, value in vars(obj).items() if name not in not_static}
    return PlainForm("dict", [names[i] for i in indices], user_children, statics, make)


# --- in files ---------------------------------------------------------------------------------------------------------


def kind_in_files(cls: Any) -> ClassKind | None:
    """Returns "attributes" for objects and holders: a file has all their attributes. None for other classes."""
    return "attributes" if is_object(cls) or cls in _holders() else None


def _holders() -> dict[Any, dict[str, type]]:
    """Returns the two holders, and for each its attributes with their types."""
    state_axes, table = loaded("flax.nnx", "StateAxes"), nnx()
    if table is None:
        return {}
    return {table.mapping: {MAPPING: dict}, state_axes: {"_filters": tuple, "_axes": tuple}}


def has_arbitrary_attributes(cls: Any) -> bool:
    """Returns True for classes of NNX and their subclasses: an attribute may be whatever a file says.

    A variable has an attribute for each name in its metadata, and an object has the attributes in the file.
    """
    # A `PytreeState` has two flags and nothing else. It occurs in the treedefs of a graph's definition.
    if (cls.__module__, cls.__qualname__) == ("flax.nnx.pytreelib", "PytreeState"):
        return False
    bases = type.__getattribute__(cls, "__mro__")
    return any(f"{base.__module__}.".startswith("flax.nnx.") for base in bases)


class _NnxRules(AttributeRules):
    """Rules for writing and loading objects and holders attribute by attribute, see the docstring of this file."""

    is_open = True
    own_entries = frozenset({NODES, STATE_FIELD})

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """Returns the fields of a dataclass, and annotated functions such as `merge_fn: Callable = _concatenate`.

        Other functions are methods, and no file may replace them. A function also counts as a method if the class that
        defines it has no annotation for it, itself or in a class before it in the method resolution order.
        """
        if cls in _holders():
            return tuple(_holders()[cls])
        annotated: set[str] = set()
        # Names that a class before in the method resolution order defines.
        defined: set[str] = set()
        declared: dict[str, Any] = dict(dataclass_entries(cls))
        for base in cls.__mro__:
            annotated.update(getattr(base, "__annotations__", ()))
            for name, value in vars(base).items():
                if name not in defined and name in annotated and callable(value):
                    declared.setdefault(name)
            defined.update(vars(base))
        return tuple(declared)

    def may_have(self, cls: Any, name: str) -> bool:
        """Returns False for `""`, dunder names and names of NNX. `nnx.Dict` and `nnx.List` need all others."""
        if not is_object(cls) or not name or (name.startswith("__") and name.endswith("__")):
            return False
        return not name.startswith(OWN) or name in self.own_entries

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Returns True for attributes that are no dataclass fields: the class has a value for them."""
        return is_object(cls) and name not in dataclass_entries(cls)

    def attributes_for_file(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        """Sorts the attributes, children first, without marks and flags if loading will make them again."""
        cls, table = type(obj), nnx()
        assert table is not None
        holder = _holders().get(cls)
        if holder is not None and _has_attributes_of_holder(attributes, holder):
            return attributes
        _require_savable(cls, attributes, naming)
        mapping = attributes.get(NODES)
        marks: Any = getattr(mapping, MAPPING, None) if type(mapping) is table.mapping else None
        is_complete = _are_marks(marks, (True, False)) and type(attributes.get(STATE_FIELD)) is table.state
        if holder is not None or not is_complete:
            fault = (
                "lacks what NNX keeps in each of its objects" if holder is None else "does not hold what NNX puts there"
            )
            raise RefusalError(f"a `{cls.__qualname__}` that {fault}", "Make it by calling its class.")
        # `own_marks` are the marks that do not follow from class and values, and go into the file. If the object lacks
        # a mark that would follow, the file has None in its place.
        expected = _expected_marks(cls, attributes, table)
        marked_names = sorted({**expected, **marks})
        own_marks = {name: marks.get(name) for name in marked_names if marks.get(name) is not expected.get(name)}
        values = {name: value for name, value in attributes.items() if name != NODES}
        if is_new_state(values[STATE_FIELD], table):
            del values[STATE_FIELD]

        def order(name: str) -> tuple[bool, bool, int, str]:
            """Returns the key to sort by, as in NNX: children first, and the names of a list by their numbers."""
            is_number = getattr(cls, INT_KEYS) and name.isascii() and name.isdecimal()
            return not marks.get(name), not is_number, int(name) if is_number else 0, name

        return {name: values[name] for name in sorted(values, key=order)} | ({NODES: own_marks} if own_marks else {})

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        # The auxiliary data of an object has the names of the children first.
        _, names, values = aux
        # `typing` sets `__orig_class__` on an instance. It is no data, and in no file.
        omitted = (NODES, "__orig_class__")
        return {str(name): value for name, value in zip(names, values, strict=True) if name not in omitted}

    def finish_loaded(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """Checks a loaded object, and sets its marks and flags as NNX would have done. Returns the object.

        Args:
            obj: the object.
            attributes: its `__dict__`, to be changed.
            new_names: name of an attribute in the file → its name in the class today. None if it was removed.

        Raises:
            FormatError: if the file has something else where NNX has marks and flags.
        """
        cls, table = type(obj), nnx()
        assert table is not None
        holder = _holders().get(cls)
        if holder is not None:
            _require(_has_attributes_of_holder(attributes, holder), cls, "attributes")
            return obj
        own_marks = attributes.pop(NODES, {})
        _require(_are_marks(own_marks, (True, False, None)), cls, NODES)
        if STATE_FIELD not in attributes:
            attributes[STATE_FIELD] = new_state(table)
        _require(type(attributes[STATE_FIELD]) is table.state, cls, STATE_FIELD)
        marks = _expected_marks(cls, attributes, table) | under_present_names(own_marks, new_names)
        # None stands for a mark that the object did not have.
        attributes[NODES] = table.mapping({name: mark for name, mark in marks.items() if mark is not None})
        return obj


def _require(condition: bool, cls: type, name: str) -> None:
    """Raises `FormatError` unless a condition about an attribute holds."""
    if not condition:
        fault = f"a `{cls.__qualname__}` whose `{name}` are not what Flax NNX has there"
        raise FormatError(f"The file has {fault}. No save would write that.")


def _has_attributes_of_holder(attributes: dict[str, Any], types: dict[str, type]) -> bool:
    """Returns True if the attributes of a holder have exactly these names and types."""
    return attributes.keys() == types.keys() and all(type(attributes[name]) is types[name] for name in types)


def _expected_marks(cls: Any, attributes: dict[str, Any], table: Nnx) -> dict[str, Any]:
    """Returns the marks to be expected from the class and the values."""
    marks = dict(getattr(getattr(cls, NODES), MAPPING))
    for name, value in attributes.items():
        if name not in marks:
            value_class: Any = type(value)
            # If only a part of a file is loaded, other arrays are `ShapeDtypeStruct`s.
            is_leaf = issubclass(value_class, _ARRAYS) or value_class is jax.ShapeDtypeStruct
            is_variable = table.variable in type.__getattribute__(value_class, "__mro__")
            marks[name] = is_leaf or is_variable or is_object(value_class)
    marks.setdefault(NODES, False)
    return marks


_ARRAYS = (np.ndarray, jax.Array, Tracer)


def _are_marks(marks: Any, allowed: tuple[Any, ...]) -> bool:
    """Returns True for a dictionary from texts to allowed marks. Marks are compared by `is`, which runs no `__eq__`."""
    if type(marks) is not dict:
        return False
    return all(type(name) is str and any(mark is value for value in allowed) for name, mark in marks.items())


def _require_savable(cls: type, attributes: dict[str, Any], naming: Naming) -> None:
    """Raises `RefusalError` for an optimizer whose optax functions have no names, with a way to save its state."""
    transformation: Any = attributes.get("tx")
    if not is_namedtuple(type(transformation)) or not {"init", "update"} <= set(transformation._fields):
        return
    if naming.why_nameless(transformation.init) or naming.why_nameless(transformation.update):
        raise RefusalError(
            f"a `{cls.__qualname__}` whose `tx` is functions that optax has made, and they have no names",
            "Save its state, `flax.nnx.state(optimizer)`. Put that into a new one after loading: "
            "`flax.nnx.update(optimizer, state)`.",
        )


def is_keyed_by_aux(cls: Any) -> bool:
    """Returns True for `nnx.State` and its subclasses: their auxiliary data is their keys."""
    return issubclass(cls, loaded("flax.nnx", "State") or ())


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """Returns a fault of the auxiliary data of a variable or an `nnx.State` in a file, in words. None without a fault.

    A variable calls the hooks in its metadata whenever its value is read, and an `nnx.State` has an attribute for each
    of its keys. So a file must have no callable in metadata. Nor may it have a name for Python or NumPy to look up, for
    example `__array_interface__`.
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
        if any(_has_callable(item[1]) for item in aux):
            return "metadata that can be called, such as a hook"
        names = [item[0] for item in aux if item[0].startswith("__") and item[0].endswith("__")]
    elif any(state in bases for state in states):
        # The auxiliary data is a sequence of keys, or of paths, which are sequences of keys.
        keys: Any = aux if type(aux) in (tuple, list) else [aux]
        all_names = [name for key in keys for name in (key if type(key) in (tuple, list) else [key])]
        # Python and NumPy may call the values under these names.
        names = [name for name in all_names if is_protocol_name(name)]
    else:
        return None
    return "a name that Python itself or other programs ask for" if names else None


def _has_callable(value: Any) -> bool:
    """Returns True if a value or a part of it can be called. Harmless classes of numbers and meshes do not count."""
    seen = IdentitySet()
    stack = [value]
    while stack:
        part = stack.pop()
        # `add` returns False if the part was seen before.
        if not seen.add(part):
            continue
        if type(part) in (tuple, list, set, frozenset):
            stack.extend(part)
        elif type(part) is dict:
            stack.extend(part.values())
        elif callable(part) and not isinstance(part, _CALLED_WITHOUT_HARM) and part not in _CLASSES_OF_NUMBERS:
            return True
    return False


_CALLED_WITHOUT_HARM = (np.generic, type(jnp.float32), jax.sharding.Mesh, jax.sharding.AbstractMesh)
_CLASSES_OF_NUMBERS = IdentitySet([*PYTHON_NUMBERS, *NUMPY_NUMBERS])


_NAMES = NamesInFiles(
    # Classes that occur as values: they stand for a carry and for a plain pytree.
    classes="flax.nnx: Carry    flax.nnx.graphlib: GenericPytree",
    state="""
        flax.nnx: BatchStat Cache Intermediate Perturbation RngCount RngKey RngState
        flax.nnx.training.metrics: MetricState
    """,
    optimizer_state="flax.nnx: OptArray OptState OptVariable",
    functions="""
        flax.nnx: dot_product_attention    flax.nnx.nn.attention: dot_product_attention
        flax.nnx.nn.dtypes: promote_dtype    flax.nnx.nn.recurrent: _concatenate
    """,
    # Layers, variables, metrics, parts of a graph's definition, and Linen's boxes for parameters with names of axes.
    # They only call functions that they hold. Left out are `DelayedAccessor`, which looks up attributes that a file
    # names, wrappers of transforms, and the bridge from NNX to Linen.
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
    frozen_mapping=frozen_mapping,
    writes_back=writes_back,
    role_of=role_of,
    trained_below=trained_below,
    argument_and_filter=argument_and_filter,
    plain_form_of=plain_form_of,
    kind_in_files=kind_in_files,
    attributes=_NnxRules(),
    fault_of_aux=fault_of_aux,
    is_keyed_by_aux=is_keyed_by_aux,
    has_arbitrary_attributes=has_arbitrary_attributes,
    names=_NAMES,
)
