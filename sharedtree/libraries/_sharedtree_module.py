"""Row of the table of libraries for `sharedtree.Module`, and assignments to the attributes of its instances.

A module consists of its `__dict__`, and of the kind of each attribute: parameter, state, sub-tree or static (see
`_sharedtree_module_kinds`). A file has the kinds as one more attribute, which modules with equal kinds share:

    ["object", <Linear>, [weight, calls, activation, {"weight": "parameter", "calls": "state", "activation": "static"}]]

The order of the kinds is the order of the attributes, and of the leaves. If a file lacks the kinds of some or all
attributes, they follow from the values. No code of the class runs when a file is loaded.

An assignment takes the mark off a value, stores the kind of the attribute, and refuses some values. Parameter and state
are *marked* by `st.parameter` and `st.state_field`, or *declared* by a field of a dataclass. The *stored* kinds are
in a slot of the instance.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core._class_attributes import dataclass_fields, inherited
from ..core._errors import CycleError, FormatError
from ..core._node_types import (
    PYTHON_NUMBERS,
    AttributeRules,
    ClassKind,
    Library,
    NamesInFiles,
    Naming,
    NativeLayout,
    NodeType,
    PlainForm,
    Role,
    Trained,
    under_present_names,
)
from . import _sharedtree_module_kinds as module_kinds
from ._sharedtree_module_kinds import (
    ALL_KINDS,
    DECLARED,
    KINDS_SLOT,
    MARKED,
    PARAMETER,
    STATE,
    SUBTREE,
    AttributeKind,
    HasKinds,
    Kinds,
    Marked,
    attributes_of,
    facts_of,
    is_array,
    is_read_by_kinds,
    kind_of_value,
    kinds_in,
    kinds_of,
    require_markable,
    store_kinds,
    stored_kinds,
)


def _is_module_class(cls: Any) -> bool:
    """Returns True for `Module` and its subclasses."""
    return issubclass(cls, HasKinds)


def native_layout_of(cls: Any) -> NativeLayout | None:
    """Returns the layout for the native walk: the slot in which each instance has its kinds."""
    return NativeLayout("MODULE", slots=(vars(HasKinds)[KINDS_SLOT],)) if is_read_by_kinds(cls) else None


def introduce(native: Any) -> None:
    """Tells the native walk the slots in which an instance has its `Kinds`, and a `Kinds` its contents."""
    slots = (HasKinds, KINDS_SLOT), (Kinds, "names"), (Kinds, "are_static")
    native.take_over("modules", Kinds, *[vars(owner)[name] for owner, name in slots])


def writes_back(cls: Any) -> bool | None:
    """Returns True for modules: `in_place=True` writes changes of their state back. None for other classes."""
    return True if _is_module_class(cls) else None


def role_of(cls: Any) -> Callable[[Any], Sequence[Role | None] | None] | None:
    """Returns the function that gives the roles of a module's children. None for other classes."""
    return _roles if _is_module_class(cls) else None


def _roles(aux: Any) -> Sequence[Role | None] | None:
    """Returns "state" for each child that `state_field` marks, and None for all other children.

    Returns None if the auxiliary data is not that of a module.
    """
    kinds = kinds_in(aux)
    if kinds is None:
        return None
    return ["state" if kinds.by_name[name] == STATE else None for name in kinds.children]


def trained_below(_: Any, aux: Any, __: int) -> Sequence[Trained] | None:
    """Returns, for each child, which leaves below it are trainable: all of a parameter, none of a state.

    Below a sub-tree (an attribute without a mark) the modules decide by their own marks. Returns None if the auxiliary
    data is not that of a module.
    """
    kinds = kinds_in(aux)
    if kinds is None:
        return None
    return [_TRAINED.get(kinds.by_name[name], "if marked") for name in kinds.children]


_TRAINED: dict[AttributeKind, Trained] = {STATE: "never", PARAMETER: "always"}
"""Kind of an attribute → which leaves below it are trainable."""


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Returns the plain data for a module in a state: all its attributes. None for other classes."""
    if not _is_module_class(type(obj)):
        return None
    children, aux = node_type.take_apart(obj)
    kinds = kinds_in(aux)
    if kinds is None:
        return None

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        """Makes the module again, from its children and its static attributes."""
        return node_type.put_together((kinds, tuple(statics.values())), new)

    return PlainForm("dict", kinds.children, children, module_kinds.static_attributes(aux), make)


# --- in files ---------------------------------------------------------------------------------------------------------


def kind_in_files(cls: Any) -> ClassKind | None:
    """Returns "attributes": a file has all attributes of a module. None for other classes."""
    return "attributes" if _is_module_class(cls) else None


class _ModuleRules(AttributeRules):
    """Rules for writing and loading modules attribute by attribute. The docstring of this file has the format."""

    is_open = True
    own_entries = frozenset({KINDS_SLOT})
    is_assigned = True

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        return tuple([field.name for field in dataclass_fields(cls)])

    def attributes_for_file(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        """Returns the attributes to write, children first, and the kinds under the name of their slot."""
        kinds = module_kinds.present_kinds(obj)
        return {name: attributes[name] for name in (*kinds.children, *kinds.statics)} | {KINDS_SLOT: kinds.by_name}

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        return module_kinds.static_attributes(aux)

    def finish_loaded(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """Stores the kinds of a loaded module, and sorts its attributes in the order of the kinds. Returns the module.

        So far, the slot for the stored kinds holds the object from the file.

        Args:
            obj: the module.
            attributes: its `__dict__`, to be changed.
            new_names: name of an attribute in the file → its name in the class today. None if it was removed.

        Raises:
            FormatError: if the object from the file is no dict of names and kinds.
        """
        file_kinds: Any = module_kinds.stored_kinds(obj)
        # The file has no kinds, so the slot still has its first value.
        if type(file_kinds) is module_kinds.Kinds:
            return obj
        # Check that all are texts before anything is hashed: the file could run the `__hash__` of an object in there.
        are_texts = type(file_kinds) is dict and all(type(text) is str for text in (*file_kinds, *file_kinds.values()))
        if not are_texts or not ALL_KINDS.issuperset(file_kinds.values()):
            fault = f"kinds of the attributes of a `{type(obj).__qualname__}` that are none"
            raise FormatError(f"The file has {fault}. No save would write that.")
        # Attributes may also be missing in the file.
        items = [item for item in under_present_names(file_kinds, new_names).items() if item[0] in attributes]
        # The attributes with kinds come first, in the order of the kinds.
        values = dict(attributes)
        attributes.clear()
        attributes.update({name: values.pop(name) for name, _ in items} | values)
        module_kinds.store_kinds(obj, module_kinds.kinds_of(items))
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        """Sets attributes with new values, and deletes attributes not in `values`. All others keep their kinds."""
        attributes = module_kinds.attributes_of(obj)
        for name in [name for name in attributes if name not in values]:
            forget(obj, name)
            del attributes[name]
        for name, value in values.items():
            if name not in attributes or attributes[name] is not value:
                attributes[name] = assign(obj, name, value)


MODULE = Library(
    "Module",
    native_layout_of=native_layout_of,
    introduce=introduce,
    held_anyway=(Kinds,),
    writes_back=writes_back,
    role_of=role_of,
    trained_below=trained_below,
    plain_form_of=plain_form_of,
    kind_in_files=kind_in_files,
    attributes=_ModuleRules(),
    has_arbitrary_attributes=_is_module_class,
    names=NamesInFiles(
        "sharedtree",
        state_entry=KINDS_SLOT,
        instances="""
            sharedtree: Dag View
            sharedtree.cli._demo: Attention Block Checkpoint Embedding LanguageModel Sizes
            sharedtree.serialise._export: WrittenDag
        """,
    ),
)


# --- assignments ------------------------------------------------------------------------------------------------------

OWN_METHODS = frozenset({"merge", "parameters"})
"""Public methods of `Module`. An attribute must not have such a name."""


def assign(module: Any, name: str, value: Any) -> Any:
    """Stores the kind of an attribute before an assignment, and returns the value without its mark. The caller sets it.

    Raises:
        UnregisteredTypeError: if the value holds arrays or modules where no pytree could hold them.
        CycleError: if the value is the module itself.
        AttributeError: if a method of `Module` has this name.
    """
    cls: Any = type(module)
    if name in OWN_METHODS:
        raise AttributeError(
            f"`{cls.__name__}.{name}` is a method of `sharedtree.Module`, which an attribute of that name would hide. "
            "Give the attribute another name."
        )
    if value is module:
        raise CycleError(
            f"`{cls.__name__}.{name}` is assigned the module itself, which would then contain itself.\n"
            "A DAG has no cycles. Give it to the methods that need it, as an argument of the call.",
            ("", f".{name}"),
        )
    stored = stored_kinds(module)
    stored_kind = stored.by_name.get(name)
    declared = facts_of(cls).declared.get(name)
    # A mark wins over the stored and the declared kind, and these over the kind that follows from the value.
    if type(value) is Marked:
        kind, value = value.kind, value.value
    elif stored_kind in MARKED or declared in MARKED:
        kind = stored_kind if stored_kind in MARKED else declared
        assert kind is not None
        require_markable(value, kind, f"`{cls.__name__}.{name}`")
    elif declared is not None:
        kind = declared
    else:
        kind = kind_of_value(value, f"`{cls.__name__}.{name}`")
        # An array that becomes a number stays traced, as in a counter that is reset to 0. So does this number if it
        # becomes another number.
        current = attributes_of(module).get(name)
        if stored_kind == SUBTREE and (is_array(current) or _is_number(current)) and _is_number(value):
            kind = SUBTREE
    if kind != stored_kind and name not in facts_of(cls).ignored:
        kinds: dict[str, AttributeKind] = {**stored.by_name, name: kind}
        store_kinds(module, kinds_of(kinds.items()))
    return value


def _is_number(value: Any) -> bool:
    """Returns True for a Python number or a NumPy scalar."""
    return type(value) in PYTHON_NUMBERS or isinstance(value, np.number | np.bool_)


def forget(module: Any, name: str) -> None:
    """Removes the stored kind of a deleted attribute, and with it its mark."""
    stored = stored_kinds(module)
    if name in stored.by_name:
        store_kinds(module, kinds_of([item for item in stored.items if item[0] != name]))


def require_soundness(cls: Any) -> None:
    """Checks that the instances of a new class can be modules.

    Raises:
        TypeError: if the class has slots, or if an attribute of the class itself is a marked value. An empty
            `__slots__` is accepted.
    """
    # Python itself refuses `"__dict__"` and `"__weakref__"` as slots, since the base class has both.
    if vars(cls).get("__slots__"):
        raise TypeError(
            f"`{cls.__name__}` has `__slots__`, but the attributes of a `sharedtree.Module` live in its `__dict__`. "
            "Leave the slots out; of a dataclass, leave out `slots=True`."
        )
    for name, value in vars(cls).items():
        if type(value) is Marked:
            raise TypeError(
                f"`{cls.__name__}.{name}` is a marked attribute of the class, which all instances would share. Mark "
                "it in `__init__`, or declare a field of a dataclass:\n"
                f"    {name}: jax.Array = sharedtree.{_FUNCTIONS[value.kind]}(default_factory=...)"
            )


# Kind of an attribute → name of the function that marks it.
_FUNCTIONS: dict[AttributeKind, str] = {PARAMETER: "parameter", STATE: "state_field"}


def is_assigned_by_class(cls: type, name: str) -> bool:
    """Returns True if a property or another descriptor of the class handles assignments to an attribute."""
    return hasattr(type(inherited(cls, name)), "__set__")


def field_declaring(kind: AttributeKind, **options: Any) -> Any:
    """Returns a field of a dataclass, declaring the kind of its attribute. The options are `dataclasses.field`'s."""
    return dataclasses.field(metadata={DECLARED: kind}, **options)
