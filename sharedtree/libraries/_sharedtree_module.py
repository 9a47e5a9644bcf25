"""`sharedtree.Module`: its trainable leaves, its plain data in a state, and its attributes in a file.

A module consists of its `__dict__`, and of the kind of each attribute: parameter, state, sub-tree or static (see
`_sharedtree_module_kinds`). A file has the kinds as one more attribute, which modules with equal kinds share:

    ["object", <Linear>, [weight, calls, activation, {"weight": "parameter", "calls": "state", "activation": "static"}]]

The order of the kinds is the order of the attributes, and of the leaves. If a file lacks the kinds of some
or all attributes, they follow from the values. No code of the class runs when a file is loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core._class_attributes import dataclass_fields
from ..core._errors import FormatError
from ..core._node_types import (
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
)
from . import _sharedtree_module_kinds as module_kinds
from ._sharedtree_module_assignment import assign, forget
from ._sharedtree_module_kinds import KINDS_SLOT, HasKinds, Kinds, is_read_by_kinds, kinds_in
from ._sharedtree_module_values import ALL_KINDS, PARAMETER, STATE


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
    """Returns "state" for each child that `state_field` marks, and None for the others."""
    kinds = kinds_in(aux)
    if kinds is None:
        return None
    return ["state" if kinds.by_name[name] == STATE else None for name in kinds.children]


def trained_below(_: Any, aux: Any, __: int) -> Sequence[Trained] | None:
    """Tells which leaves below each child train: all of a parameter, none of a state.

    Below a sub-tree, an attribute without a mark, the modules decide by their own marks.
    """
    kinds = kinds_in(aux)
    if kinds is None:
        return None
    child_kinds = [kinds.by_name[name] for name in kinds.children]
    return ["never" if kind == STATE else "always" if kind == PARAMETER else "if marked" for kind in child_kinds]


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Represents a module in a state by all its attributes. None for other classes."""
    if not _is_module_class(type(obj)):
        return None
    children, aux = node_type.take_apart(obj)
    kinds = kinds_in(aux)
    if kinds is None:
        return None

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        return node_type.put_together((kinds, tuple(statics.values())), new)

    return PlainForm("dict", kinds.children, children, module_kinds.static_attributes(aux), make)


# --- in files ---------------------------------------------------------------------------------------------------------


def kind_in_files(cls: Any) -> ClassKind | None:
    """Returns "attributes": a file has all attributes of a module. None for other classes."""
    return "attributes" if _is_module_class(cls) else None


class _Rules(AttributeRules):
    """The rules for writing and loading modules attribute by attribute; see the docstring of this file."""

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
        """Notes the kinds of a loaded module, and sorts its attributes in the order of the kinds.

        Before, the slot holds the object from the file.
        """
        file_kinds: Any = module_kinds.noted_kinds(obj)
        # The file has no kinds, so the slot still has its first value.
        if type(file_kinds) is module_kinds.Kinds:
            return obj
        # Check that all are texts before anything is hashed: the file could run the `__hash__` of an object in there.
        are_texts = type(file_kinds) is dict and all(type(text) is str for text in (*file_kinds, *file_kinds.values()))
        if not are_texts or not ALL_KINDS.issuperset(file_kinds.values()):
            fault = f"kinds of the attributes of a `{type(obj).__qualname__}` that are none"
            raise FormatError(f"The file has {fault}. No save would write that.")
        current_kinds = {new_names.get(name) or name: kind for name, kind in file_kinds.items()}
        items = [(name, kind) for name, kind in current_kinds.items() if name in attributes]
        values = dict(attributes)
        attributes.clear()
        attributes.update({name: values.pop(name) for name, _ in items} | values)
        module_kinds.note_kinds(obj, module_kinds.kinds_of(items))
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        """Gives a module these attributes, as by assignments and deletions. Unchanged attributes keep their kinds."""
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
    attributes=_Rules(),
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
