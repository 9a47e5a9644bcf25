"""treeo's trees, which the modules of treex are: what is written of one, and what comes from its class.

A tree is what its `__dict__` holds. Which of it JAX traces is said in `_field_metadata`, a dictionary of each instance:
the name of an attribute → `FieldMetadata(node, kind, opaque)`. Nearly all of that is the class's, or treeo notes it:

    class Linear(tx.Module):
        kernel: Any = tx.Parameter.node()   FieldMetadata(True, Parameter, False), which the class declares
    linear.axis_name = None                 FieldMetadata(False, NoneType, False), which treeo notes of any attribute

Such metadata is not written. It is there again after loading: from the class, as with the fields of a dataclass, or by
treeo's rule. What is written is an instance's own: of the subtrees that `compact` made, or by `update_field_metadata`.

Metadata cannot be changed. What is loaded is one object wherever it is equal, in one file or in several, and the
class's own where the class declares it. Nothing keeps a copy for each tree, and JAX finds most of it equal at a glance.

None of treeo's code runs when a file is loaded. Its unflatten function would set any attribute, and its flatten
function asks `_field_metadata` for things, which a file could answer with an object of its choice.
"""

import dataclasses
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..._class_attributes import ABSENT, inherited
from ..._errors import FormatError
from ..trust._allowed import CLASSES, LIBRARIES, NAMES_ONLY
from ..trust._classes import held, is_tree
from ..trust._names import NamelessError, RefusalError, name_of
from ._attribute_classes import Finish, Library

METADATA = "_field_metadata"

_DEFAULTS = ("_factory_fields", "_default_field_values")
_OF_METADATA = ("node", "kind", "opaque")
_OF_VALUES = LIBRARIES | NAMES_ONLY | {"builtins"}


class TreeoTrees(Library):
    """See the module's docstring."""

    own_entries = frozenset({METADATA})

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        if not is_tree(cls):
            return tuple(getattr(cls, "__annotations__", {}))
        return tuple([name for name in _declared(cls) if name not in _DEFAULTS])

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Metadata is completed, and what the class holds is found there."""
        found = inherited(cls, name)
        return is_tree(cls) and found is not ABSENT and not isinstance(found, dataclasses.Field)

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        factories, defaults = (getattr(cls, each, {}) for each in _DEFAULTS)
        return factories.get(name) or ((lambda: defaults[name]) if name in defaults else None)

    def written(self, obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
        cls: Any = type(obj)
        if not is_tree(cls):
            return attributes
        _require_savable(obj, attributes)
        declared = _declared(cls)
        metadata = attributes.get(METADATA, declared)
        own: dict[str, Any] = {}
        for name, noted in metadata.items():
            by_class = declared.get(name)
            if noted is by_class:
                continue
            if type(noted) is not _metadata_class() or not _are_of_metadata(vars(noted)):
                raise RefusalError(
                    f"a `{cls.__qualname__}` whose metadata of `{name}` is no `FieldMetadata` of a flag, a class, and "
                    "a flag or a function",
                    "Declare it in the class.",
                )
            if not (_is_noted(noted, attributes, name) if by_class is None else _are_equal(noted, by_class)):
                own[name] = noted

        def is_node(name: str) -> bool:
            return metadata[name].node if name in metadata else _noted(attributes[name])["node"]

        kept = {name: value for name, value in attributes.items() if name != METADATA}
        nodes = {name: attributes[name] for name in sorted(kept) if is_node(name)}
        return nodes | kept | ({METADATA: own} if own else {})

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        return dict(aux.items)

    def finisher(self, cls: Any, new_names: Mapping[str, str | None]) -> Finish | None:
        metadata_class = _metadata_class()
        if cls is metadata_class:
            return lambda _, attributes: _the_one(attributes)
        if not is_tree(cls):
            return None
        declared = _declared(cls)

        def finish(obj: Any, attributes: dict[str, Any]) -> Any:
            own: Any = attributes.get(METADATA, {})
            if type(own) is not dict or not all(
                type(name) is str and type(own[name]) is metadata_class for name in own
            ):
                raise _no_metadata()
            metadata = attributes[METADATA] = declared | own
            for name in attributes.keys() - metadata.keys():
                metadata[name] = _the_one(_noted(attributes[name]))
            return obj

        return finish


def _declared(cls: Any) -> dict[str, Any]:
    return cls._field_metadata  # noqa: SLF001 -- see the module's docstring


def _metadata_class() -> Any:
    return held("treeo.types", "FieldMetadata")


def _require_savable(obj: Any, attributes: dict[str, Any]) -> None:
    for (module, name), what in _HOLD_CODE.items():
        if isinstance(obj, held(module, name) or ()):
            raise RefusalError(f"a `{type(obj).__qualname__}`, which holds {what}", _WITHOUT_CODE)
    if isinstance(obj, held("treex.types", "Initializer") or ()):
        try:
            name_of(attributes.get("f"))
        except NamelessError as error:
            raise RefusalError(
                f"an `Initializer` whose function is {error.reason}: the module that it is in was not initialised",
                "Initialise the model before you save it: `model = model.init(key, inputs)`.",
            ) from None


_HOLD_CODE = {
    ("treex.nn.flax_module", "FlaxModule"): "a module of Flax that only its class can make",
    ("treex.nn.haiku_module", "HaikuModule"): "functions that Haiku has transformed",
    ("treex.optimizer", "Optimizer"): "the functions of an optax transformation",
}

_WITHOUT_CODE = (
    "Save the arrays alone, `sharedtree.save(path, sharedtree.tree.leaves(model))`, and put them into a model that "
    "your code makes: `model = sharedtree.tree.unflatten(sharedtree.tree.structure(model), sharedtree.load(path))`."
)


def _is_a_tree(kind: Any) -> bool:
    """`issubclass`, without a question to the metaclass."""
    return held("treeo.tree", "Tree") in type.__getattribute__(kind, "__mro__")


def _noted(value: Any) -> dict[str, Any]:
    """What treeo notes of an attribute that nobody declared; see `treeo.Tree._update_local_metadata`."""
    return {"node": _is_a_tree(type(value)), "kind": type(value), "opaque": False}


def _are_of_metadata(fields: dict[str, Any]) -> bool:
    """Whether these are the fields of metadata.

    What `opaque` holds is called when JAX compares structures. So it is a plain function, which a file has by its name,
    and no object of the file's making.
    """
    if fields.keys() != set(_OF_METADATA) or type(fields["node"]) is not bool:
        return False
    return isinstance(fields["kind"], type) and type(fields["opaque"]) in (bool, types.FunctionType)


def _are_equal(one: Any, two: Any) -> bool:
    return all(vars(one).get(name, ABSENT) is vars(two).get(name, ABSENT) for name in _OF_METADATA)


def _is_noted(metadata: Any, attributes: dict[str, Any], name: str) -> bool:
    """Whether metadata that the class does not declare is what treeo notes of the attribute, or once noted of it.

    It was noted of a value that was there before if its kind is no class that a file may name: of a function, say. The
    kinds that people filter by are their own classes, or treex's, which files may name.
    """
    kind = metadata.kind
    if name not in attributes or metadata.opaque is not False or metadata.node is not _is_a_tree(kind):
        return False
    if kind is type(attributes[name]):
        return True
    try:
        return kind.__module__.partition(".")[0] in _OF_VALUES and name_of(kind) not in CLASSES
    except NamelessError:
        return True


_metadata: "weakref.WeakValueDictionary[tuple[Any, ...], Any]" = weakref.WeakValueDictionary()
_adding = threading.Lock()


def _the_one(fields: dict[str, Any]) -> Any:
    """The metadata that has these fields. Raises `FormatError` if they are none of metadata."""
    if not _are_of_metadata(fields):
        raise _no_metadata()
    key = tuple([fields[name] for name in _OF_METADATA])
    with _adding:
        known = _metadata.get(key)
        if known is None:
            known = _metadata[key] = object.__new__(_metadata_class())
            known.__dict__.update(fields)
        return known


def _no_metadata() -> FormatError:
    return FormatError(
        "The file has metadata of a `treeo.Tree` that is no `FieldMetadata` of a flag, a class, and a flag or a "
        "function. No save would write that."
    )
