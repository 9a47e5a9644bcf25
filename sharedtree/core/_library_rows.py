"""What is asked of libraries, which nothing here knows: a row for each, entered by the files of `libraries/`.

The walk asks how instances come apart, `Module.parameters` which leaves train, `state` what stands for an instance in
plain data, and files what is written of one and what they may name. A row answers for its own classes and says None of
all others. A class is asked of once, when it is first met, and what can be changed in a class is asked again whenever a
structure with its instances is new.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ._class_attributes import dataclass_entries, dataclass_fields
from ._plain_containers import Convention, NodeType, RolesBelow, is_namedtuple


class NativeLayout(NamedTuple):
    """How the native walk reads and makes the instances of a class, past the functions in JAX's registry.

    Attributes:
        shape: the name that the native walk has for classes of this kind.
        fields: all names in their order, which of them are static, of each its place among the traced or the static
            ones, the traced names, and the static ones; as far as the shape asks for them.
        slots: what is written of an instance beside its dictionary, by name or by the descriptor of the slot.
        facts: whatever else has to go on holding of the class.
    """

    shape: str
    fields: tuple[Any, ...] = ((), b"", b"", (), ())
    slots: tuple[Any, ...] = ()
    facts: Any = None

    @property
    def described(self) -> tuple[Any, ...]:
        """The fields and slots as C has them: all names, how many are children, and whether they are in that order."""
        order, are_static, places, traced, statics = self.fields
        marked = list(zip(order, are_static, strict=True))
        sorts = [[name for name, is_static in marked if is_static == sort] for sort in (0, 1)]
        is_in_order = sorts == [[*traced], [*statics[: len(sorts[1])]]]
        return order, are_static, places, (*traced, *statics), len(traced), is_in_order, self.slots


Trained = Literal["never", "if marked", "always", "if inexact"]
"""Which leaves below an attribute train: none, those that an inner module marks, all, or all that are inexact."""


class PlainForm(NamedTuple):
    """What stands for an instance in a state, which is plain data.

    Attributes:
        kind: what holds the states of its parts: a dictionary by name, a list, or nothing, where the state of the only
            part is that of the instance.
        names: of a dictionary, the name of each child.
        children: those that count.
        statics: of a dictionary, the static attributes by name.
        make: new children and new static attributes → a new instance.
        keys: of what is no dictionary, the key entry of each child in paths.
    """

    kind: Literal["dict", "list", "whole"]
    names: Sequence[str]
    children: Sequence[Any]
    statics: Mapping[str, Any]
    make: Callable[[Sequence[Any], Mapping[str, Any]], Any]
    keys: tuple[Any, ...] = ()


# --- in files ---------------------------------------------------------------------------------------------------------

ClassKind = Literal["module", "dataclass", "namedtuple", "attributes", "placeholder", "enum", "registered"]
"""How the instances of a class are written: those of the first two and of namedtuples field by field, those of the
fourth by all attributes that they have; a placeholder is only there; a member of an enum by its name; and what was
registered by what its functions make of it."""


class RefusalError(Exception):
    """An object cannot be written. The text says why, the fix says what to do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class Naming(NamedTuple):
    """What those who write an instance can ask of names in files.

    Attributes:
        why_nameless: object → why no name leads back to it; None if one does.
        may_be_value: class → whether a file may name it as a value.
    """

    why_nameless: Callable[[Any], str | None]
    may_be_value: Callable[[Any], bool]


class AttributeRules:
    """How instances that are written attribute by attribute are written and completed; here, as those of a dataclass.

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
        declared = sorted(dataclass_fields(cls), key=lambda field: bool(field.metadata.get("static", False)))
        return tuple([field.name for field in declared])

    def may_have(self, cls: Any, name: str) -> bool | None:
        """Whether an attribute that is not declared may have a name; None if there is no rule but Python's."""

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Whether instances need not have a field."""
        return False

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        """What makes the default of a field that a file lacks; None if it has none."""
        field = dataclass_entries(cls).get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            return field.default_factory
        of_namedtuple = cls._field_defaults if is_namedtuple(cls) else {}
        default = of_namedtuple.get(name, dataclasses.MISSING) if field is None else field.default
        return None if default is dataclasses.MISSING else lambda: default

    def written(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
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


class NamesInFiles(NamedTuple):
    """What of a library files may name, as `module:qualname`.

    A file that names a function hands it to the model, and the model will call it. So functions are listed one by one:
    those that compute arrays from arrays. Classes are listed, too, where others of the library evaluate or call what
    they hold. A name that the installed version lacks is no harm. Each text is a table: a module, with a colon, stands
    before what it holds.

    Attributes:
        packages: the top-level packages of the library.
        imported_from: the package of which these are to be imported, if it is another one.
        kinds: the kinds of classes of which all may be named.
        has_methods: whether public methods of its modules may be.
        only_names: whether only single names are allowed, also if the package is trusted.
        instances: classes whose instances a model or the state of a training may hold.
        classes: classes that are no nodes, but may be named as values.
        functions: those that compute arrays from arrays and do nothing else; and a few objects that mark a choice.
        tokens: objects that stand for a choice, each of a class of its own to which no name leads.
        if_trusted: classes that a file may name if the user trusts their package.
        state: classes that hold state, which nobody trains, for tables of files, of which no class is looked up.
        state_entry: the entry of an instance that says which of its attributes are state, as a dictionary of texts.
        kept_back: modules, with all below them, and names, of which no class may be named otherwise.
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
    return None


class Library(NamedTuple):
    """What one library says of its classes.

    Attributes:
        name: as users know it.
        node_type_of: class → how its instances come apart, where that is not what JAX's registry says.
        convention_of: class in JAX's registry → which leaves its instances trace, where that is not JAX's own.
        native_layout_of: class → how the native walk reads its instances; None leaves it to the registered functions.
        introduce: tells the native walk of the library, before it is told of the first of its classes.
        parts_of_frozen: static value that nobody changes → what it holds.
        marker: the class of what stands for an attribute that was never set, of one library at most.
        held_anyway: classes of which keeping an instance keeps nothing else alive.
        writes_back: class in JAX's registry → whether the library writes what a function changes in an instance back
            into the caller's; False if what is in instances is never missed, None of classes that are not its own.
        role_of: class → the role of all leaves below its instances; or, where each child has its own, a function of the
            auxiliary data, with None for those of which nothing is said; None if nothing is said of any.
        trained_below: class, auxiliary data and number of children → which leaves train below each child.
        argument_and_filter: what was given as a position of an argument, but is a filter of the library's → the
            position, and a filter as code.
        plain_form_of: instance and node type → what stands for it in a state, if its children by their keys do not.
        kind_in_files: class → how its instances are written, if not as its registered functions have it.
        attributes: how they are written attribute by attribute, where that is the kind.
        fault_of_aux: class and auxiliary data → why no file may have an instance of the class with that.
        answers_as_told: class → whether its instances answer, to whoever asks for an attribute, what a file says.
        compared_by_parts: classes whose `==` is equality of all attributes. It is that of subclasses that inherit it.
        choices: classes of which those below have no instances, but stand themselves for a choice that a file may name.
        names: what of the library files may name.
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
"""In the order in which they are asked."""


def node_type_by_library(cls: Any) -> NodeType | None:
    """How the instances of a class come apart, if a library says so."""
    return next((found for library in LIBRARIES if (found := library.node_type_of(cls)) is not None), None)


def convention_by_library(cls: Any) -> Convention | None:
    """Which leaves the instances of a class trace, if a library says so."""
    return next((found for library in LIBRARIES if (found := library.convention_of(cls)) is not None), None)


def writes_back_by_library(cls: Any) -> bool | None:
    """Whether a library writes changes of instances back into the caller's objects; None if no library says."""
    return next((found for library in LIBRARIES if (found := library.writes_back(cls)) is not None), None)


def native_layout_of(cls: Any) -> tuple[Library, NativeLayout] | None:
    """How the native walk reads the instances of a class, and who says so."""
    found = ((library, library.native_layout_of(cls)) for library in LIBRARIES)
    return next(((library, layout) for library, layout in found if layout is not None), None)


def parts_of_frozen(value: Any) -> Iterable[Any] | None:
    """What a static value holds, if a library says that nobody changes it."""
    return next((parts for library in LIBRARIES if (parts := library.parts_of_frozen(value)) is not None), None)


# What follows is asked so often that asking each library would take long.


@functools.cache
def markers() -> frozenset[type]:
    """Classes of what stands for attributes that were never set."""
    return frozenset([library.marker for library in LIBRARIES if library.marker is not None])


def without_missing(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of an instance that were set: the very dictionary if that is all of them. Looks at each type."""
    if markers().isdisjoint(map(type, attributes.values())):
        return attributes
    return {name: value for name, value in attributes.items() if type(value) not in markers()}


@functools.cache
def _compared_by_parts() -> tuple[type, ...]:
    return tuple([cls for library in LIBRARIES for cls in library.compared_by_parts])


def role_by_library(cls: Any) -> RolesBelow | None:
    """What the leaves below the instances of a class are to an optimizer, if a library says so (see `Library`)."""
    return next((found for library in LIBRARIES if (found := library.role_of(cls)) is not None), None)


def trained_below(cls: Any, aux: Any, num_children: int) -> Sequence[Trained]:
    """Which leaves train below each child of a module: those that are inexact, unless a library says otherwise."""
    for library in LIBRARIES:
        found = library.trained_below(cls, aux, num_children)
        if found is not None:
            return found
    return ["if inexact" for _ in range(num_children)]


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """What stands for a module in a state, if a library says so."""
    for library in LIBRARIES:
        form = library.plain_form_of(obj, node_type)
        if form is not None:
            return form
    return None


def argument_and_filter(argnums: Any) -> tuple[Any, str] | None:
    """The position and the code of a filter, if what was given as a position is a library's filter."""
    return next((each for library in LIBRARIES if (each := library.argument_and_filter(argnums)) is not None), None)


def compares_by_parts(cls: Any) -> bool:
    """Tells from a library's row whether instances of a class are equal if all of their attributes are."""
    for base in _compared_by_parts():  # noqa: SIM110 -- a generator takes longer
        if issubclass(cls, base) and cls.__eq__ is base.__eq__:
            return True
    return False


def is_choice(cls: Any) -> bool:
    """Tells whether a class has no instances, but is itself what a file may name."""
    return any(issubclass(cls, library.choices) for library in LIBRARIES)


def library_in_files(cls: Any) -> tuple[Library, ClassKind] | None:
    """The library that says how the instances of a class are written, and which kind it says."""
    for library in LIBRARIES:
        kind = library.kind_in_files(cls)
        if kind is not None:
            return library, kind
    return None


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """Why no file may have an instance of a class with this auxiliary data; None if it may.

    Asked when a file is written, too: what is not read is not written.
    """
    return next((fault for library in LIBRARIES if (fault := library.fault_of_aux(cls, aux)) is not None), None)
