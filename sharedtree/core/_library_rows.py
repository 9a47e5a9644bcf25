"""Rows of libraries: the questions about their classes that JAX's registry does not answer.

    node_type_by_library(eqx.nn.Linear)  →  asks each row in LIBRARIES for `node_type_of`; Equinox's answers

Nothing here knows any library. Each file of `libraries/` enters a row, a `Library`. A row answers for classes of its
library and returns None for all others.

The walk asks how instances come apart, `Module.parameters` which leaves train, `state` what represents an instance in
plain data, and files how an instance is written and what a file may name. The walk asks once for each class, when the
first instance comes. What a user may change in a class is asked again for each new structure with its instances.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ._class_attributes import dataclass_entries, dataclass_fields
from ._plain_containers import Convention, NodeType, RolesBelow, is_namedtuple


class NativeLayout(NamedTuple):
    """Directions for the native walk to read and make instances itself, without the functions in JAX's registry.

    Attributes:
        shape: the native walk's name for classes of this kind, such as `"FIELDS"`.
        fields: (all names in order; a byte for each, 1 if it is static; a byte for each, its place among the traced or
            the static ones; the traced names; the static names). Those needed by the shape; the others are empty.
        slots: the slots to write besides the instance's dictionary, by name or by descriptor.
        facts: anything else about the class. If it changes, the layout is dropped.
    """

    shape: str
    fields: tuple[Any, ...] = ((), b"", b"", (), ())
    slots: tuple[Any, ...] = ()
    facts: Any = None

    @property
    def native_arguments(self) -> tuple[Any, ...]:
        """The last arguments of `new_kind` in `_native_walk.c`, from `order` on."""
        order, are_static, places, traced, statics = self.fields
        traced_in_order = [name for name, is_static in zip(order, are_static, strict=True) if not is_static]
        statics_in_order = [name for name, is_static in zip(order, are_static, strict=True) if is_static]
        # `statics` may go on after the names in `order`, with attributes that are no fields.
        is_in_order = traced_in_order == [*traced] and statics_in_order == [*statics[: len(statics_in_order)]]
        return order, are_static, places, (*traced, *statics), len(traced), is_in_order, self.slots


Trained = Literal["never", "if marked", "always", "if inexact"]
"""The leaves below an attribute that train: none, those that an inner module marks, all, or the inexact ones."""


class PlainForm(NamedTuple):
    """Representation of an instance in a state: plain data.

    Attributes:
        kind: the holder of the states of the children. `"dict"`: a dictionary by name. `"list"`: a list. `"whole"`:
            nothing, because the instance has one child, and the state of this represents it.
        names: for a dictionary, the name of each child.
        children: the children to put into a state.
        statics: for a dictionary, the static attributes by name.
        make: (new children, new static attributes) → a new instance.
        keys: for a list or `"whole"`, the key entry of each child in paths.
    """

    kind: Literal["dict", "list", "whole"]
    names: Sequence[str]
    children: Sequence[Any]
    statics: Mapping[str, Any]
    make: Callable[[Sequence[Any], Mapping[str, Any]], Any]
    keys: tuple[Any, ...] = ()


# --- in files ---------------------------------------------------------------------------------------------------------

ClassKind = Literal["module", "dataclass", "namedtuple", "attributes", "placeholder", "enum", "registered"]
"""How the instances of a class are written into a file.

`"module"`, `"dataclass"`, `"namedtuple"`: field by field. `"attributes"`: by all attributes that they have.
`"placeholder"`: without any content. `"enum"`: by the name of the member. `"registered"`: by the children and the
auxiliary data that the registered flatten function returns.
"""


class RefusalError(Exception):
    """Refusal to write an object into a file.

    Args:
        reason: why, for the user.
        fix: advice, as text or code.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class Naming(NamedTuple):
    """Questions about names in files, for the rules of a library.

    Attributes:
        why_nameless: object → the reason why no name leads back to it; None if a name does.
        may_be_value: class → whether a file may name the class itself as a value.
    """

    why_nameless: Callable[[Any], str | None]
    may_be_value: Callable[[Any], bool]


class AttributeRules:
    """Rules for writing instances attribute by attribute. The base class has the rules for dataclasses.

    Attributes:
        is_open: whether classes declare no attributes. An unknown one in a file is no mistake then.
        own_entries: the names of the library's bookkeeping in each instance: kinds, marks, metadata. A file
            has them among the attributes, but the authors of classes do not know them.
        is_assigned: whether `reassign` sets the result of a migration. Otherwise it is set as values of a file are.
    """

    is_open: bool = False
    own_entries: frozenset[str] = frozenset()
    is_assigned: bool = False

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """Names of the declared attributes of a class, the traced ones first, each group in JAX's order."""
        declared = sorted(dataclass_fields(cls), key=lambda field: bool(field.metadata.get("static", False)))
        return tuple([field.name for field in declared])

    def may_have(self, cls: Any, name: str) -> bool | None:
        """Tells whether an undeclared attribute may have this name. None leaves it to Python's own rules."""

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Tells whether an instance may lack a field."""
        return False

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        """Finds a function to make the default of a field, for a file without it. None if the field has no default."""
        field = dataclass_entries(cls).get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            return field.default_factory
        if field is not None:
            default = field.default
        else:
            namedtuple_defaults = cls._field_defaults if is_namedtuple(cls) else {}
            default = namedtuple_defaults.get(name, dataclasses.MISSING)
        return None if default is dataclasses.MISSING else lambda: default

    def written(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        """Converts the attributes of an instance for a file. The traced ones come first.

        Args:
            obj: the instance.
            attributes: all of its attributes by name.
            naming: answers questions about names.

        Raises:
            RefusalError: if the instance cannot be written.
        """
        return attributes

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        """Reads the static attributes by name from the auxiliary data that the flatten function returns."""
        return dict(aux)

    def finished(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """Checks and completes an instance, right after it was loaded.

        Args:
            obj: the instance. Its attributes are set as the file has them.
            attributes: these attributes by name.
            new_names: name in the file → name of the attribute now; None if a migration dropped it.

        Returns:
            The instance, or an equal one.

        Raises:
            FormatError: if the attributes do not fit together.
        """
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        """Replaces all attributes of an instance, as assignments would, but without running the class's code."""


class NamesInFiles(NamedTuple):
    """Allow-list of a library: the names for files, as `module:qualname`.

    If a file names a function, it gets into the model, and the model will call it. So functions are listed one by one,
    and only if they compute arrays from arrays. Classes are listed one by one, too, if other classes of the library
    evaluate or call their contents. A name missing from the installed version does no harm.

    Each text is a table: a module and a colon, then the names in it.

    Attributes:
        packages: the top-level packages of the library.
        imported_from: the package to import for these, if it is another one.
        kinds: the kinds of classes whose members may all be named.
        has_methods: whether public methods of the library's modules may be named.
        only_names: whether a user who trusts the package allows no more than the names in this list.
        instances: classes whose instances a model or the state of a training may hold.
        classes: classes that may be named as values. They are no nodes.
        functions: functions that compute arrays from arrays and do nothing else, and a few objects that mark a choice.
        tokens: objects that mark a choice, and whose classes have no name.
        if_trusted: classes to allow if the user trusts their package.
        state: classes of state, as opposed to parameters. Tables of files use these names, since they look up no class.
        state_entry: the entry of an instance with the names of its attributes of state, as a dictionary of texts.
        kept_back: modules, with all below them, and names. Their classes may not be named unless listed above.
    """

    packages: str = ""
    imported_from: str = ""
    kinds: tuple[ClassKind, ...] = ()
    has_methods: bool = False
    only_names: bool = False
    instances: str = ""
    classes: str = ""
    functions: str = ""
    tokens: str = ""
    if_trusted: str = ""
    state: str = ""
    state_entry: str = ""
    kept_back: str = ""


# --- rows -------------------------------------------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """The answer of a row without this hook."""


class Library(NamedTuple):
    """Row of one library: its answers about its classes. Each function returns None for classes of other libraries.

    Attributes:
        name: the name known to users.
        node_type_of: class → its node type, if its instances come apart otherwise than JAX's registry says.
        convention_of: class in JAX's registry → which leaves its instances trace, if not all that JAX can.
        native_layout_of: class → how the native walk reads its instances. None leaves it to the registered functions.
        introduce: prepares the native walk (its argument) for the library, before the first class.
        parts_of_frozen: immutable static value → the values in it.
        marker: the class of the mark for an attribute without a value. At most one library has one.
        held_anyway: classes whose instances keep nothing else alive.
        writes_back: class in JAX's registry → whether the library writes what a function changes in an instance back
            into the caller's. False if nobody would miss the change.
        role_of: class → the roles of the leaves below its instances, see `RolesBelow`.
        trained_below: (class, auxiliary data, number of children) → which leaves train below each child.
        argument_and_filter: value of `argnums` that is a filter of the library → (position of the argument, the filter
            as code).
        plain_form_of: (instance, node type) → its representation in a state, if not its children by key.
        kind_in_files: class → how its instances are written, if not by the registered functions.
        attributes: the rules for writing instances attribute by attribute.
        fault_of_aux: (class, auxiliary data) → the reason why no file may contain it.
        answers_as_told: class → whether reading an attribute of an instance may return whatever a file put there.
        compared_by_parts: classes whose `==` compares all attributes. Subclasses count if they inherit it.
        choices: base classes whose subclasses have no instances. Each subclass is itself a value for a file to name.
        names: the allow-list for files.
    """

    name: str
    node_type_of: Callable[[Any], NodeType | None] = _nothing
    convention_of: Callable[[Any], Convention | None] = _nothing
    native_layout_of: Callable[[Any], NativeLayout | None] = _nothing
    introduce: Callable[[Any], None] = _nothing
    parts_of_frozen: Callable[[Any], Iterable[Any] | None] = _nothing
    marker: type | None = None
    held_anyway: tuple[type, ...] = ()
    writes_back: Callable[[Any], bool | None] = _nothing
    role_of: Callable[[Any], RolesBelow | None] = _nothing
    trained_below: Callable[[Any, Any, int], Sequence[Trained] | None] = _nothing
    argument_and_filter: Callable[[Any], tuple[Any, str] | None] = _nothing
    plain_form_of: Callable[[Any, NodeType], PlainForm | None] = _nothing
    kind_in_files: Callable[[Any], ClassKind | None] = _nothing
    attributes: AttributeRules = AttributeRules()
    fault_of_aux: Callable[[Any, Any], str | None] = _nothing
    answers_as_told: Callable[[Any], bool | None] = _nothing
    compared_by_parts: tuple[type, ...] = ()
    choices: tuple[type, ...] = ()
    names: NamesInFiles = NamesInFiles()


LIBRARIES: list[Library] = []
"""All rows, in the order in which they are asked. The first answer other than None counts."""


def node_type_by_library(cls: Any) -> NodeType | None:
    """Asks the libraries for the node type of a class. None leaves it to JAX's registry."""
    for library in LIBRARIES:
        node_type = library.node_type_of(cls)
        if node_type is not None:
            return node_type
    return None


def convention_by_library(cls: Any) -> Convention | None:
    """Asks the libraries which leaves the instances of a class trace. None if no library says."""
    for library in LIBRARIES:
        convention = library.convention_of(cls)
        if convention is not None:
            return convention
    return None


def writes_back_by_library(cls: Any) -> bool | None:
    """Asks whether changes of an instance are written back into the caller's objects. None if no library says."""
    for library in LIBRARIES:
        writes_back = library.writes_back(cls)
        if writes_back is not None:
            return writes_back
    return None


def role_by_library(cls: Any) -> RolesBelow | None:
    """Asks for the roles of the leaves below the instances of a class. None if no library says."""
    for library in LIBRARIES:
        roles = library.role_of(cls)
        if roles is not None:
            return roles
    return None


def native_layout_of(cls: Any) -> tuple[Library, NativeLayout] | None:
    """Asks how the native walk reads the instances of a class. Returns the first answer, with its library."""
    for library in LIBRARIES:
        layout = library.native_layout_of(cls)
        if layout is not None:
            return library, layout
    return None


def trained_below(cls: Any, aux: Any, num_children: int) -> Sequence[Trained]:
    """Asks which leaves train below each child of a module. The inexact ones, unless a library says otherwise."""
    for library in LIBRARIES:
        trained = library.trained_below(cls, aux, num_children)
        if trained is not None:
            return trained
    return ["if inexact" for _ in range(num_children)]


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Asks what represents a module in a state. None for its children by key."""
    for library in LIBRARIES:
        plain_form = library.plain_form_of(obj, node_type)
        if plain_form is not None:
            return plain_form
    return None


def argument_and_filter(argnums: Any) -> tuple[Any, str] | None:
    """Asks whether a value of `argnums` is a library's filter. Returns the position and the filter as code."""
    for library in LIBRARIES:
        answer = library.argument_and_filter(argnums)
        if answer is not None:
            return answer
    return None


def parts_of_frozen(value: Any) -> Iterable[Any] | None:
    """Asks for the values in a static value, if a library says it is immutable."""
    for library in LIBRARIES:
        parts = library.parts_of_frozen(value)
        if parts is not None:
            return parts
    return None


def library_in_files(cls: Any) -> tuple[Library, ClassKind] | None:
    """Asks how the instances of a class are written. Returns the first answer, with its library."""
    for library in LIBRARIES:
        kind = library.kind_in_files(cls)
        if kind is not None:
            return library, kind
    return None


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """Asks why no file may contain an instance of a class with this auxiliary data. None if a file may.

    Writing asks this, too, because the file could not be read.
    """
    for library in LIBRARIES:
        fault = library.fault_of_aux(cls, aux)
        if fault is not None:
            return fault
    return None


def is_choice(cls: Any) -> bool:
    """Tells whether a class has no instances, but is itself a value for a file to name."""
    return any(issubclass(cls, library.choices) for library in LIBRARIES)


# --- what is asked for each value -------------------------------------------------------------------------------------

# These questions come for each attribute of each instance, so the answers of all rows are collected once.


@functools.cache
def markers() -> frozenset[type]:
    """Classes of the marks for attributes without a value."""
    return frozenset([library.marker for library in LIBRARIES if library.marker is not None])


def without_missing(attributes: dict[str, Any]) -> dict[str, Any]:
    """Drops the attributes without a value. Returns the very dictionary if all have one. Looks at each type."""
    if markers().isdisjoint(map(type, attributes.values())):
        return attributes
    return {name: value for name, value in attributes.items() if type(value) not in markers()}


def compares_by_parts(cls: Any) -> bool:
    """Tells whether, by its library, two instances of a class are equal exactly if all of their attributes are."""
    for base in _compared_by_parts():  # noqa: SIM110 -- a generator takes longer
        if issubclass(cls, base) and cls.__eq__ is base.__eq__:
            return True
    return False


@functools.cache
def _compared_by_parts() -> tuple[type, ...]:
    return tuple([cls for library in LIBRARIES for cls in library.compared_by_parts])
