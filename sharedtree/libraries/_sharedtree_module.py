"""`sharedtree.Module`: what of its instances trains, what stands for one in plain data, and what a file has of one.

A module is what its `__dict__` holds, and of which kind each attribute is. The kinds are written to files as one more
attribute, which modules that are alike in this have together:

    ["object", <Linear>, [weight, calls, activation, {"weight": "parameter", "calls": "state", "activation": "static"}]]

They also say in which order the attributes are, which is that of the leaves. None of the class's code runs when a file
is loaded, and a file that says nothing of the kinds, or not of all attributes, gets those that follow from the values.
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
from . import _sharedtree_module_kinds as kept
from ._sharedtree_module_assignment import assign, forget
from ._sharedtree_module_kinds import KINDS_SLOT, HasKinds, Kinds, is_read_by_kinds, kinds_in
from ._sharedtree_module_values import ALL_KINDS, PARAMETER, STATE


def _is_one(cls: Any) -> bool:
    return issubclass(cls, HasKinds)


def native_layout_of(cls: Any) -> NativeLayout | None:
    """Each instance says of which kinds its attributes are."""
    return NativeLayout("MODULE", slots=(vars(HasKinds)[KINDS_SLOT],)) if is_read_by_kinds(cls) else None


def introduce(native: Any) -> None:
    """Where an instance has its `Kinds`, and these what is in them."""
    slots = (HasKinds, KINDS_SLOT), (Kinds, "names"), (Kinds, "are_static")
    native.take_over("modules", Kinds, *[vars(of)[name] for of, name in slots])


def writes_back(cls: Any) -> bool | None:
    """Modules that keep state are changed by calls, and `in_place=True` writes that back."""
    return True if _is_one(cls) else None


def role_of(cls: Any) -> Callable[[Any], Sequence[Role | None] | None] | None:
    """What `state_field` marks is state."""
    return _roles if _is_one(cls) else None


def _roles(aux: Any) -> Sequence[Role | None] | None:
    kinds = kinds_in(aux)
    if kinds is None:
        return None
    return ["state" if kinds.by_name[name] == STATE else None for name in kinds.children]


def trained_below(_: Any, aux: Any, __: int) -> Sequence[Trained] | None:
    """As the kinds say; modules in what is not marked say for themselves."""
    kinds = kinds_in(aux)
    if kinds is None:
        return None
    each = [kinds.by_name[name] for name in kinds.children]
    return ["never" if kind == STATE else "always" if kind == PARAMETER else "if marked" for kind in each]


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """All attributes by name."""
    if not _is_one(type(obj)):
        return None
    children, aux = node_type.take_apart(obj)
    kinds = kinds_in(aux)
    if kinds is None:
        return None

    def make(new: Sequence[Any], statics: Mapping[str, Any]) -> Any:
        return node_type.put_together((kinds, tuple(statics.values())), new)

    return PlainForm("dict", kinds.children, children, kept.static_attributes(aux), make)


# --- in files ---------------------------------------------------------------------------------------------------------


def kind_in_files(cls: Any) -> ClassKind | None:
    """All attributes of an instance."""
    return "attributes" if _is_one(cls) else None


class _Rules(AttributeRules):
    """See the module's docstring."""

    is_open = True
    own_entries = frozenset({KINDS_SLOT})
    is_assigned = True

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        return tuple([field.name for field in dataclass_fields(cls)])

    def written(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        kinds = kept.present_kinds(obj)
        return {name: attributes[name] for name in (*kinds.children, *kinds.statics)} | {KINDS_SLOT: kinds.by_name}

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        return kept.static_attributes(aux)

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        said: Any = kept.noted_kinds(obj)
        if type(said) is kept.Kinds:  # the file says nothing of them
            return obj
        # Texts first: an object of the file's making would be asked for its hash.
        are_texts = type(said) is dict and all(type(text) is str for text in (*said, *said.values()))
        if not are_texts or not ALL_KINDS.issuperset(said.values()):
            what = f"kinds of the attributes of a `{type(obj).__qualname__}` that are none"
            raise FormatError(f"The file has {what}. No save would write that.")
        known = {new_names.get(name) or name: kind for name, kind in said.items()}
        items = [(name, kind) for name, kind in known.items() if name in attributes]
        values = dict(attributes)
        attributes.clear()
        attributes.update({name: values.pop(name) for name, _ in items} | values)
        kept.note_kinds(obj, kept.kinds_of(items))
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        attributes = kept.attributes_of(obj)
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
    answers_as_told=_is_one,
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
