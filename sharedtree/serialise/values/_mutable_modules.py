"""`sharedtree.Module`s: what is written of one, and how its attributes get their kinds when it is loaded.

A module is what its `__dict__` holds, and of which kind each attribute is. The kinds are written as one more attribute,
which modules that are alike in this have together:

    ["object", <Linear>, [weight, calls, activation, {"weight": "parameter", "calls": "state", "activation": "static"}]]

They also say in which order the attributes are, which is that of the leaves. None of the class's code runs when a file
is loaded, and a file that says nothing of the kinds, or not of all attributes, gets those that follow from the values.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ... import _attribute_kinds as attribute_kinds
from ..._assigned_values import ALL_KINDS
from ..._assigning import assign, forget
from ..._attribute_kinds import KINDS_SLOT
from ...errors import FormatError
from ._attribute_classes import Library


class MutableModules(Library):
    """See the module's docstring."""

    is_open = True
    own_entries = frozenset({KINDS_SLOT})
    is_assigned = True

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        return tuple([field.name for field in dataclasses.fields(cls)]) if dataclasses.is_dataclass(cls) else ()

    def written(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        kinds = attribute_kinds.present_kinds(obj)
        return {name: attributes[name] for name in (*kinds.children, *kinds.statics)} | {KINDS_SLOT: kinds.by_name}

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        return attribute_kinds.static_attributes(aux)

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        said: Any = attribute_kinds.noted_kinds(obj)
        if type(said) is attribute_kinds.Kinds:  # the file says nothing of them
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
        attribute_kinds.note_kinds(obj, attribute_kinds.kinds_of(items))
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        attributes = attribute_kinds.attributes_of(obj)
        for name in [name for name in attributes if name not in values]:
            forget(obj, name)
            del attributes[name]
        for name, value in values.items():
            if name not in attributes or attributes[name] is not value:
                attributes[name] = assign(obj, name, value)
