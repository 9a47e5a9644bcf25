"""What a library says of its classes whose instances are all in their attributes, declared or not.

`sharedtree.Module`s, the objects of Flax NNX and the trees of treeo have a file each with what differs. All other
instances are written as `Library` itself has it: as those of a dataclass are.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..._node_types import is_namedtuple

_ASKED = frozenset({"_asdict", "for_json", "to_dict", "to_json", "tolist"})


def is_asked_of_all(name: Any) -> bool:
    """Whether programs ask any object for an attribute of this name, and call what they get.

    Python does so with `__names__`, notebooks with `_repr_html_` and `_ipython_display_`, what makes JSON with
    `tolist`. Where a class lets its instances have any attribute, a file could put a function there.
    """
    if type(name) is not str:
        return False
    is_enclosed = name.startswith("_") and name.endswith("_") and name.strip("_") != ""
    return is_enclosed or name in _ASKED or name.startswith(("_repr_", "_ipython_", "__array", "__jax"))


class Library:
    """How instances are written and completed.

    Attributes:
        is_open: whether the attributes are nowhere declared, so that one that is unknown is no mistake.
        own_entries: the names under which a file has what the library itself keeps in each instance: kinds, marks,
            metadata. They stand among the names of attributes, but those who write classes know nothing of them.
        is_assigned: whether `reassign` gives an instance what a migration made; else it is set as a file's values are.
    """

    is_open: bool = False
    own_entries: frozenset[str] = frozenset()
    is_assigned: bool = False

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """The attributes that a class declares; what JAX traces comes first, as in JAX's order."""
        declared = sorted(dataclasses.fields(cls), key=lambda field: bool(field.metadata.get("static", False)))
        return tuple([field.name for field in declared])

    def may_have(self, cls: Any, name: str) -> bool | None:
        """Whether an attribute that is not declared may have a name; None if there is no rule but Python's."""

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Whether instances need not have a field."""
        return False

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        """What makes the default of a field that a file lacks; None if it has none."""
        field = getattr(cls, "__dataclass_fields__", {}).get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            return field.default_factory
        of_namedtuple = cls._field_defaults if is_namedtuple(cls) else {}
        default = of_namedtuple.get(name, dataclasses.MISSING) if field is None else field.default
        return None if default is dataclasses.MISSING else lambda: default

    def written(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        """The attributes as they are written: those that JAX traces come first. Raises `RefusalError`."""
        return attributes

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        """The attributes that JAX does not trace, of the auxiliary data that the flatten function gives."""
        return dict(aux)

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """An instance whose attributes are as a file has them, checked and completed, or one that is equal to it.

        `new_names` has each name in the file, and the one that the attribute has now, or None if it was dropped. Raises
        `FormatError`.
        """
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        """Gives an instance these attributes and no others, as assignments would. None of the class's code runs."""
