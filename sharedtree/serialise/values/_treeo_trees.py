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
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..._errors import FormatError
from ..trust._allowed import CLASSES, LIBRARIES, NAMES_ONLY
from ..trust._names import NamelessError, RefusalError, name_of, namespace

METADATA = "_field_metadata"

IS_OPEN: bool = False

_ABSENT: Any = object()
_NEVER_OF_AN_INSTANCE = frozenset({"_factory_fields", "_default_field_values"})

# Their instances are their attributes, too.
_HOLDERS = frozenset({("treeo.types", "FieldMetadata"), ("treeo.types", "Hashable")})


def is_of_attributes(cls: type) -> bool:
    """Whether a class is one of treeo's whose instances are all in their attributes: a tree, metadata, a `Hashable`.

    Not so a tree whose class has a flatten or unflatten function of its own, which knows better.
    """
    return (cls.__module__, cls.__qualname__) in _HOLDERS or _is_tree(cls)


def declared_fields(cls: Any) -> tuple[str, ...]:
    """The attributes that a class of this kind declares."""
    if not _is_tree(cls):
        return tuple(getattr(cls, "__annotations__", {}))
    return tuple([name for name in cls._field_metadata if name not in _NEVER_OF_AN_INSTANCE])  # noqa: SLF001


def may_have(cls: Any, name: str) -> None:
    """No rule of its own for attributes that are not declared."""


def default_of(cls: Any, name: str) -> Callable[[], Any] | None:
    """What makes the default of a field that a file lacks; None if it has none."""
    factories: dict[str, Any] = getattr(cls, "_factory_fields", {})
    defaults: dict[str, Any] = getattr(cls, "_default_field_values", {})
    if name in factories:
        return factories[name]
    return (lambda: defaults[name]) if name in defaults else None


def may_stay_unset(cls: type, name: str) -> bool:
    """Whether instances need not have a field: metadata is completed, and what the class holds is found there."""
    if not _is_tree(cls):
        return False
    held = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
    return bool(held) and not isinstance(held[0], dataclasses.Field)


def written(obj: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an instance as they are written: those that JAX traces come first, in JAX's order.

    Raises:
        RefusalError: if it is a tree that cannot be saved.
    """
    cls: Any = type(obj)
    if not _is_tree(cls):
        return attributes
    _require_savable(obj, attributes)
    declared: dict[str, Any] = cls._field_metadata  # noqa: SLF001 -- see the module's docstring
    metadata = attributes.get(METADATA, declared)
    own: dict[str, Any] = {}
    for name, noted in metadata.items():
        by_class = declared.get(name)
        if noted is by_class:
            continue
        if type(noted) is not _metadata_class() or not _are_of_metadata(vars(noted)):
            raise RefusalError(
                f"a `{cls.__qualname__}` whose metadata of `{name}` is no `FieldMetadata` of a flag, a class, and a "
                "flag or a function",
                "Declare it in the class.",
            )
        if not (_is_noted(noted, attributes, name) if by_class is None else _are_equal(noted, by_class)):
            own[name] = noted

    def is_node(name: str) -> bool:
        return metadata[name].node if name in metadata else _noted(attributes[name])["node"]

    nodes = sorted([name for name in attributes if is_node(name)])
    first = {name: attributes[name] for name in nodes if name != METADATA}
    rest = {name: value for name, value in attributes.items() if name not in first and name != METADATA}
    return first | rest | ({METADATA: own} if own else {})


def static_attributes(aux: Any) -> dict[str, Any]:
    """The attributes that JAX does not trace, of the auxiliary data that treeo's flatten function gives."""
    return dict(aux.items)


def finisher(cls: Any, _: Mapping[str, str | None]) -> Callable[[Any, dict[str, Any]], Any] | None:
    """What is done with an instance whose attributes were set as a file has them; None if nothing is.

    Returns:
        (the instance, its attributes) → the instance, checked and completed, or the one that is equal to it. Raises
        `FormatError` if the metadata in the file is none.
    """
    metadata_class = _metadata_class()
    if cls is metadata_class:
        return lambda _, attributes: _the_one(attributes)
    if not _is_tree(cls):
        return None
    declared: dict[str, Any] = cls._field_metadata  # noqa: SLF001 -- see the module's docstring

    def finish(obj: Any, attributes: dict[str, Any]) -> Any:
        own: Any = attributes.get(METADATA, _NO_METADATA)
        if type(own) is not dict or not all(type(name) is str and type(own[name]) is metadata_class for name in own):
            raise _no_metadata()
        metadata = attributes[METADATA] = declared | own
        for name in attributes.keys() - metadata.keys():
            metadata[name] = _the_one(_noted(attributes[name]))
        return obj

    return finish


_NO_METADATA: dict[str, Any] = {}

# --- classes ----------------------------------------------------------------------------------------------------------


def _held(module: str, name: str) -> Any:
    """What a module of treeo or treex holds; None if it is not loaded, so that nothing can be of it."""
    return namespace(sys.modules.get(module)).get(name)


def _is_tree(cls: Any) -> bool:
    tree = _held("treeo.tree", "Tree")
    if tree is None or cls is tree or not _is_below(cls, tree):
        return False
    found = [next(vars(base)[name] for base in cls.__mro__ if name in vars(base)) for name in _ITS_FUNCTIONS]
    return all(function is vars(tree)[name] for name, function in zip(_ITS_FUNCTIONS, found, strict=True))


_ITS_FUNCTIONS = ("tree_flatten", "tree_unflatten")


def _is_below(cls: Any, base: type) -> bool:
    """`issubclass`, without a question to the metaclass."""
    return base in type.__getattribute__(cls, "__mro__")


def _metadata_class() -> Any:
    return _held("treeo.types", "FieldMetadata")


def _require_savable(obj: Any, attributes: dict[str, Any]) -> None:
    name = type(obj).__qualname__
    for module, base, what in _HOLD_CODE:
        held = _held(module, base)
        if held is not None and isinstance(obj, held):
            raise RefusalError(f"a `{name}`, which holds {what}", _WITHOUT_CODE)
    initializer = _held("treex.types", "Initializer")
    if initializer is not None and isinstance(obj, initializer):
        try:
            name_of(attributes.get("f"))
        except NamelessError as error:
            raise RefusalError(
                f"an `Initializer` whose function is {error.reason}: the module that it is in was not initialised",
                "Initialise the model before you save it: `model = model.init(key, inputs)`.",
            ) from None


_HOLD_CODE = (
    ("treex.nn.flax_module", "FlaxModule", "a module of Flax that only its class can make"),
    ("treex.nn.haiku_module", "HaikuModule", "functions that Haiku has transformed"),
    ("treex.optimizer", "Optimizer", "the functions of an optax transformation"),
)

_WITHOUT_CODE = (
    "Save the arrays alone, `sharedtree.save(path, sharedtree.tree.leaves(model))`, and put them into a model that "
    "your code makes: `model = sharedtree.tree.unflatten(sharedtree.tree.structure(model), sharedtree.load(path))`."
)

# --- metadata ---------------------------------------------------------------------------------------------------------


def _noted(value: Any) -> dict[str, Any]:
    """What treeo notes of an attribute that nobody declared; see `treeo.Tree._update_local_metadata`."""
    return {"node": _is_below(type(value), _held("treeo.tree", "Tree")), "kind": type(value), "opaque": False}


_OF_METADATA = ("node", "kind", "opaque")


def _are_of_metadata(fields: dict[str, Any]) -> bool:
    """Whether these are the fields of metadata.

    What `opaque` holds is called when JAX compares structures. So it is a plain function, which a file has by its name,
    and no object of the file's making.
    """
    if fields.keys() != set(_OF_METADATA) or type(fields["node"]) is not bool:
        return False
    return isinstance(fields["kind"], type) and type(fields["opaque"]) in (bool, types.FunctionType)


def _are_equal(one: Any, two: Any) -> bool:
    return all(vars(one).get(name, _ABSENT) is vars(two).get(name, _ABSENT) for name in _OF_METADATA)


def _is_noted(metadata: Any, attributes: dict[str, Any], name: str) -> bool:
    """Whether metadata that the class does not declare is what treeo notes of the attribute, or once noted of it."""
    is_tree = _is_below(metadata.kind, _held("treeo.tree", "Tree"))
    if name not in attributes or metadata.opaque is not False or metadata.node is not is_tree:
        return False
    return metadata.kind is type(attributes[name]) or _is_unlisted(metadata.kind)


def _is_unlisted(kind: Any) -> bool:
    """Whether a kind is the class of a value that was there before, and no file may name it: of a function, say.

    The kinds that people filter by are their own classes, or treex's, which files may name.
    """
    if kind.__module__.partition(".")[0] not in LIBRARIES | NAMES_ONLY | {"builtins"}:
        return False
    try:
        return name_of(kind) not in CLASSES
    except NamelessError:
        return True


_metadata: "weakref.WeakValueDictionary[tuple[bool, type, Any], Any]" = weakref.WeakValueDictionary()
_adding = threading.Lock()


def _the_one(fields: dict[str, Any]) -> Any:
    """The metadata that has these fields.

    Raises:
        FormatError: if they are none of metadata.
    """
    if not _are_of_metadata(fields):
        raise _no_metadata()
    node, kind, opaque = [fields[name] for name in _OF_METADATA]
    with _adding:
        known = _metadata.get((node, kind, opaque))
        if known is None:
            known = object.__new__(_metadata_class())
            known.__dict__.update(fields)
            _metadata[node, kind, opaque] = known
        return known


def _no_metadata() -> FormatError:
    return FormatError(
        "The file has metadata of a `treeo.Tree` that is no `FieldMetadata` of a flag, a class, and a flag or a "
        "function. No save would write that."
    )
