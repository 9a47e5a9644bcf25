"""treeo's trees, which the modules of treex are: what a file has of one, and what comes from its class.

Which attributes JAX traces is said in `_field_metadata`, a dictionary of each instance from names to metadata:

    class Linear(tx.Module):
        kernel: Any = tx.Parameter.node()   FieldMetadata(True, Parameter, False), which the class declares
    linear.axis_name = None                 FieldMetadata(False, NoneType, False), which treeo notes of any attribute

Only an instance's own is written. Metadata cannot be changed: what is loaded is one object wherever it is equal, in one
file or in several, and the class's own where the class declares it. So JAX finds most of it equal at a glance.

None of treeo's code runs when a file is loaded. Its unflatten function would set any attribute, and its flatten
function asks `_field_metadata` for things, which a file could answer with an object of its choice.
"""

import dataclasses
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from ..core._class_attributes import ABSENT, dataclass_entries, inherited, loaded
from ..core._errors import FormatError
from ..core._locks import Lock
from ..core._node_types import AttributeRules, ClassKind, Library, NamesInFiles, Naming, RefusalError

METADATA = "_field_metadata"
_DEFAULTS = ("_factory_fields", "_default_field_values")

Noted = tuple[bool, type, Any]
"""What metadata says: `node`, `kind` and `opaque`."""


def writes_back(cls: Any) -> bool | None:
    """Trees, as treex's modules are, keep state that calls change."""
    tree = loaded("treeo.tree", "Tree")
    return True if tree is not None and tree in type.__getattribute__(cls, "__mro__") else None


def kind_in_files(cls: Any) -> ClassKind | None:
    """All attributes of a tree, and of what metadata and hashable values are in."""
    is_holder = cls.__module__ == "treeo.types" and cls.__qualname__ in ("FieldMetadata", "Hashable")
    return "attributes" if is_holder or _is_tree(cls) else None


def _is_tree(cls: Any) -> bool:
    """Whether a class is a tree of treeo's, without a flatten or unflatten function of its own, which knows better."""
    tree = loaded("treeo.tree", "Tree")
    if tree is None or cls is tree or tree not in type.__getattribute__(cls, "__mro__"):
        return False
    return all(inherited(cls, name) is inherited(tree, name) for name in ("tree_flatten", "tree_unflatten"))


class _Rules(AttributeRules):
    """Attributes with their metadata: see the top of the file."""

    own_entries = frozenset({METADATA})

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        names = getattr(cls, METADATA if _is_tree(cls) else "__annotations__", {})
        return tuple([name for name in names if name not in _DEFAULTS])

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Metadata is completed, and what the class holds is found there."""
        found = inherited(cls, name)
        return _is_tree(cls) and found is not ABSENT and not isinstance(found, dataclasses.Field)

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        if name in dataclass_entries(cls):
            return super().default_of(cls, name)
        factories, defaults = (getattr(cls, each, {}) for each in _DEFAULTS)
        return factories.get(name) or ((lambda: defaults[name]) if name in defaults else None)

    def written(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        cls: Any = type(obj)
        if not _is_tree(cls):
            return attributes
        _require_savable(obj, attributes, naming)
        declared: dict[str, Any] = getattr(cls, METADATA)
        metadata = attributes.get(METADATA, declared)
        own: dict[str, Any] = {}
        for name, each in metadata.items():
            by_class = declared.get(name)
            if each is by_class:
                continue
            noted = _noted_in(vars(each)) if type(each) is _metadata_class() else None
            if noted is None:
                raise RefusalError(
                    f"a `{cls.__qualname__}` whose metadata of `{name}` is no `FieldMetadata` of a flag, a class, and "
                    "a flag or a function",
                    "Declare it in the class.",
                )
            is_known = (
                _is_treeos(noted, attributes, name, naming) if by_class is None else noted == _noted_in(vars(by_class))
            )
            if not is_known:
                own[name] = each
        kept = {name: value for name, value in attributes.items() if name != METADATA}
        are_nodes = {n: metadata[n].node if n in metadata else _is_a_tree(type(kept[n])) for n in kept}
        nodes = {name: kept[name] for name in sorted(kept) if are_nodes[name]}
        return nodes | kept | ({METADATA: own} if own else {})

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        return dict(aux.items)

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        cls, metadata_class = type(obj), _metadata_class()
        if cls is metadata_class:
            return _the_one(_noted_in(attributes))
        if _is_tree(cls):
            own: Any = attributes.get(METADATA, {})
            are_texts = type(own) is dict and all(type(name) is str for name in own)
            if not are_texts or not all(type(each) is metadata_class for each in own.values()):
                raise _no_metadata()
            metadata = attributes[METADATA] = getattr(cls, METADATA) | own
            for name in attributes.keys() - metadata.keys():
                metadata[name] = _the_one(_noted_of(attributes[name]))
        return obj


def _require_savable(obj: Any, attributes: dict[str, Any], naming: Naming) -> None:
    for (module, name), what in _HOLD_CODE.items():
        if isinstance(obj, loaded(module, name) or ()):
            raise RefusalError(
                f"a `{type(obj).__qualname__}`, which holds {what}",
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


_HOLD_CODE = {
    ("treex.nn.flax_module", "FlaxModule"): "a module of Flax that only its class can make",
    ("treex.nn.haiku_module", "HaikuModule"): "functions that Haiku has transformed",
    ("treex.optimizer", "Optimizer"): "the functions of an optax transformation",
}


def _metadata_class() -> Any:
    return loaded("treeo.types", "FieldMetadata")


def _is_a_tree(kind: Any) -> bool:
    """`issubclass`, without a question to the metaclass."""
    return loaded("treeo.tree", "Tree") in type.__getattribute__(kind, "__mro__")


def _noted_of(value: Any) -> Noted:
    """What treeo notes of an attribute that nobody declared; see `treeo.Tree._update_local_metadata`."""
    return _is_a_tree(type(value)), type(value), False


def _noted_in(fields: dict[str, Any]) -> Noted | None:
    """What metadata of these fields says; None if they are none of metadata.

    What `opaque` holds is called when JAX compares structures. So it is a plain function, which a file has by its name,
    and no object of the file's making.
    """
    node, kind, opaque = [fields.get(name) for name in ("node", "kind", "opaque")]
    if len(fields) != 3 or type(node) is not bool or not isinstance(kind, type):
        return None
    return (node, kind, opaque) if type(opaque) in (bool, types.FunctionType) else None


def _is_treeos(noted: Noted, attributes: dict[str, Any], name: str, naming: Naming) -> bool:
    """Whether this is what treeo notes of the attribute, or once noted of it.

    It was noted of a value that was there before if its kind is no class that a file may name: of a function, say. The
    kinds that people filter by are their own classes, or treex's, which files may name.
    """
    kind = noted[1]
    if name not in attributes or noted != (_is_a_tree(kind), kind, False):
        return False
    return kind is type(attributes[name]) or not naming.may_be_value(kind)


_metadata: "weakref.WeakValueDictionary[Noted, Any]" = weakref.WeakValueDictionary()
_adding = Lock()


def _the_one(noted: Noted | None) -> Any:
    """The metadata that says this. Raises `FormatError` if it is none."""
    if noted is None:
        raise _no_metadata()
    with _adding:
        known = _metadata.get(noted)
        if known is None:
            known = _metadata[noted] = object.__new__(_metadata_class())
            known.__dict__.update(zip(("node", "kind", "opaque"), noted, strict=True))
        return known


def _no_metadata() -> FormatError:
    return FormatError(
        "The file has metadata of a `treeo.Tree` that is no `FieldMetadata` of a flag, a class, and a flag or a "
        "function. No save would write that."
    )


TREEO = Library(
    "treeo",
    writes_back=writes_back,
    kind_in_files=kind_in_files,
    attributes=_Rules(),
    # Layers and metrics of treex call nothing but the functions that they hold, and those are listed by their own
    # libraries. Not so `FlaxModule`, which calls what it holds by a name that it holds. The classes that are values are
    # kinds of parameters.
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
