"""Row of the table of libraries for treeo's trees, among them the modules of treex: their attributes in a file.

`_field_metadata` says whether JAX traces an attribute. It is a dictionary of each instance from names to metadata:

    class Linear(tx.Module):
        kernel: Any = tx.Parameter.node()   FieldMetadata(True, Parameter, False), by the class
    linear.axis_name = None                 FieldMetadata(False, NoneType, False), by treeo, from the value

The *facts* of metadata are its three values: whether the attribute is a node, its kind, and whether it is opaque.

A file has only metadata that does not follow from the class or from the values. Metadata cannot be changed, so
equal metadata from all files is one object, and that of the class wherever the class declares it. Then JAX compares
most of it by `is`.

No code of treeo runs when a file is loaded. Its unflatten function would set any attribute. Its flatten function reads
attributes of the metadata, and a file could put an object of any class in its place.
"""

import dataclasses
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..core._class_attributes import ABSENT, dataclass_entries, inherited, loaded
from ..core._errors import FormatError
from ..core._locks import Lock
from ..core._node_types import (
    AttributeRules,
    ClassKind,
    Library,
    NamesInFiles,
    Naming,
    RefusalError,
    under_present_names,
)

METADATA = "_field_metadata"
# Attributes of a class with the default factories and the defaults of its fields, by name.
_DEFAULTS = ("_factory_fields", "_default_field_values")

MetadataFacts = tuple[bool, type, Any]
"""The facts of metadata: `node`, `kind` and `opaque`."""


def writes_back(cls: Any) -> bool | None:
    """Returns True for trees: calls change the state of treex's modules. None for other classes."""
    tree = loaded("treeo.tree", "Tree")
    return True if tree is not None and tree in type.__getattribute__(cls, "__mro__") else None


def kind_in_files(cls: Any) -> ClassKind | None:
    """Returns "attributes" for trees, and for the classes of metadata and of hashable values. None for others."""
    is_holder = cls.__module__ == "treeo.types" and cls.__qualname__ in ("FieldMetadata", "Hashable")
    return "attributes" if is_holder or _is_tree(cls) else None


def _is_tree(cls: Any) -> bool:
    """Returns True for a class of trees with treeo's own flatten and unflatten functions."""
    tree = loaded("treeo.tree", "Tree")
    if tree is None or cls is tree or tree not in type.__getattribute__(cls, "__mro__"):
        return False
    return all(inherited(cls, name) is inherited(tree, name) for name in ("tree_flatten", "tree_unflatten"))


class _TreeoRules(AttributeRules):
    """Rules for writing and loading trees attribute by attribute. The docstring of this file has the format."""

    own_entries = frozenset({METADATA})

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        names = getattr(cls, METADATA if _is_tree(cls) else "__annotations__", {})
        return tuple([name for name in names if name not in _DEFAULTS])

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Returns True if the class has a value under this name, which then counts for the instance."""
        class_value = inherited(cls, name)
        return _is_tree(cls) and class_value is not ABSENT and not isinstance(class_value, dataclasses.Field)

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        if name in dataclass_entries(cls):
            return super().default_of(cls, name)
        factories, defaults = (getattr(cls, attribute, {}) for attribute in _DEFAULTS)
        return factories.get(name) or ((lambda: defaults[name]) if name in defaults else None)

    def attributes_for_file(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        """Sorts the attributes, nodes first, and leaves out metadata if loading will make it again."""
        cls: Any = type(obj)
        if not _is_tree(cls):
            return attributes
        _require_savable(obj, attributes, naming)
        declared: dict[str, Any] = getattr(cls, METADATA)
        metadata = attributes.get(METADATA, declared)
        # The metadata to write.
        own_metadata: dict[str, Any] = {}
        for name, item in metadata.items():
            by_class = declared.get(name)
            if item is by_class:
                continue
            facts = _facts_in(vars(item)) if type(item) is _metadata_class() else None
            if facts is None:
                raise RefusalError(
                    f"a `{cls.__qualname__}` whose metadata of `{name}` is no `FieldMetadata` of a flag, a class, and "
                    "a flag or a function",
                    "Declare it in the class.",
                )
            # Metadata follows from the class if it declares equal metadata, and otherwise from the value.
            if by_class is None:
                follows = _follows_from_value(facts, attributes, name, naming)
            else:
                follows = facts == _facts_in(vars(by_class))
            if not follows:
                own_metadata[name] = item
        # Nodes come first, sorted by name. All others follow in the order of the `__dict__`.
        values = {name: value for name, value in attributes.items() if name != METADATA}
        are_nodes = {n: metadata[n].node if n in metadata else _has_tree_base(type(values[n])) for n in values}
        nodes = {name: values[name] for name in sorted(values) if are_nodes[name]}
        return nodes | values | ({METADATA: own_metadata} if own_metadata else {})

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        return dict(aux.items)

    def finish_loaded(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """Completes a loaded tree with the metadata of its class.

        Loaded metadata themselves are replaced by the metadata of this process with equal facts.
        """
        cls, metadata_class = type(obj), _metadata_class()
        if cls is metadata_class:
            return _interned_metadata(_facts_in(attributes))
        if _is_tree(cls):
            # The file has only metadata that follows neither from the class nor from the values.
            own_metadata: Any = attributes.get(METADATA, {})
            are_texts = type(own_metadata) is dict and all(type(name) is str for name in own_metadata)
            if not are_texts or not all(type(item) is metadata_class for item in own_metadata.values()):
                raise _not_metadata_error()
            metadata = getattr(cls, METADATA) | under_present_names(own_metadata, new_names)
            attributes[METADATA] = metadata
            for name in attributes.keys() - metadata.keys():
                metadata[name] = _interned_metadata(_facts_from_value(attributes[name]))
        return obj


def _require_savable(obj: Any, attributes: dict[str, Any], naming: Naming) -> None:
    """Raises `RefusalError` for an object with functions that no file can name, with a way to save its arrays."""
    for (module, name), contents in _HOLD_CODE.items():
        if isinstance(obj, loaded(module, name) or ()):
            raise RefusalError(
                f"a `{type(obj).__qualname__}`, which holds {contents}",
                "Save the arrays alone, `sharedtree.save(path, sharedtree.tree.leaves(model))`, and put them into a "
                "model that your code makes: `model = sharedtree.tree.unflatten(sharedtree.tree.structure(model), "
                "sharedtree.load(path))`.",
            )
    if isinstance(obj, loaded("treex.types", "Initializer") or ()):
        why = naming.why_nameless(attributes.get("f"))
        if why is not None:
            raise RefusalError(
                f"an `Initializer` whose function is {why}: the module that it is in was not initialised",
                "Initialise the model before you save it: `model = model.init(key, inputs)`.",
            )


# Module and name of a class → the contents of its instances that cannot be saved.
_HOLD_CODE = {
    ("treex.nn.flax_module", "FlaxModule"): "a module of Flax that only its class can make",
    ("treex.nn.haiku_module", "HaikuModule"): "functions that Haiku has transformed",
    ("treex.optimizer", "Optimizer"): "the functions of an optax transformation",
}


def _metadata_class() -> Any:
    """Returns treeo's class of metadata, or None if treeo was not imported."""
    return loaded("treeo.types", "FieldMetadata")


def _has_tree_base(kind: Any) -> bool:
    """Returns True for a subclass of `treeo.Tree`. Unlike `issubclass`, it does not call the metaclass."""
    return loaded("treeo.tree", "Tree") in type.__getattribute__(kind, "__mro__")


def _facts_from_value(value: Any) -> MetadataFacts:
    """Returns treeo's notes of an undeclared attribute; see `treeo.Tree._update_local_metadata`."""
    return _has_tree_base(type(value)), type(value), False


def _facts_in(fields: dict[str, Any]) -> MetadataFacts | None:
    """Returns the facts in the attributes of metadata. None if there are other attributes or other types.

    If `opaque` is no boolean, JAX calls it when it compares structures. So it must be a plain function: a file has only
    the name of a function, and cannot make one.
    """
    node, kind, opaque = [fields.get(name) for name in ("node", "kind", "opaque")]
    if len(fields) != 3 or type(node) is not bool or not isinstance(kind, type):
        return None
    return (node, kind, opaque) if type(opaque) in (bool, types.FunctionType) else None


def _follows_from_value(facts: MetadataFacts, attributes: dict[str, Any], name: str, naming: Naming) -> bool:
    """Returns True if treeo noted these facts of the value of an undeclared attribute, or of an earlier value.

    An earlier value is assumed if no file may name the kind, for example the class of functions. Users filter by other
    kinds: their own classes, or treex's.
    """
    kind = facts[1]
    if name not in attributes or facts != (_has_tree_base(kind), kind, False):
        return False
    return kind is type(attributes[name]) or not naming.may_be_value(kind)


# Facts → the one loaded metadata with these facts.
_interned: "weakref.WeakValueDictionary[MetadataFacts, Any]" = weakref.WeakValueDictionary()
_interned_lock = Lock()


def _interned_metadata(facts: MetadataFacts | None) -> Any:
    """Returns the one metadata with these facts. Raises `FormatError` for None."""
    if facts is None:
        raise _not_metadata_error()
    with _interned_lock:
        metadata = _interned.get(facts)
        if metadata is None:
            metadata = _interned[facts] = object.__new__(_metadata_class())
            metadata.__dict__.update(zip(("node", "kind", "opaque"), facts, strict=True))
        return metadata


def _not_metadata_error() -> FormatError:
    """Returns the error for an object in the place of metadata in a file."""
    return FormatError(
        "The file has metadata of a `treeo.Tree` that is no `FieldMetadata` of a flag, a class, and a flag or a "
        "function. No save would write that."
    )


TREEO = Library(
    "treeo",
    writes_back=writes_back,
    kind_in_files=kind_in_files,
    attributes=_TreeoRules(),
    # A file may have these classes of treex, because they only call functions that they hold, and each such function is
    # on the list of its own library. `FlaxModule` is left out: a file could choose the method that it calls. The
    # `classes` are kinds of parameters.
    names=NamesInFiles(
        "treeo treex",
        imported_from="sharedtree.compat",
        instances="""
            treeo.types: FieldMetadata Hashable Nothing
            treex: BatchNorm Conv Dropout Embed Flatten GroupNorm Initializer KeySeq Lambda LayerNorm Linear MLP Named
                Sequential
            treex.losses: Reduction
            treex.metrics: Accuracy AuxLosses AuxMetrics Mean MeanAbsoluteError MeanSquareError Metrics Reduce Reduction
            treex.metrics.utils: AverageMethod DataType MDMCAverageMethod
        """,
        classes="""
            treex: BatchStat Cache Log LossLog MetricLog MetricState ModelState OptState Parameter Rng State TreePart
        """,
    ),
)
