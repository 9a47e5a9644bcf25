"""Node types: how the instances of a class come apart and are put together, and which of their leaves are traced.

    node_type_of({"b": w, "a": v})     children [v, w], auxiliary data ("a", "b"), keys DictKey("a"), DictKey("b")
    node_type_of(eqx_module)           by the row of Equinox: field by field
    node_type_of(partial)              by JAX's registry
    node_type_of(1)                    None: a leaf

There are four kinds: the plain containers; classes that a library's row takes apart, as Equinox modules are, field by
field; every other class in JAX's registry, by the flatten function that its author registered; and the classes of
`register_node`, which JAX does not know.

Whether a leaf is traced depends on the module that holds it: the library of the module has a *convention* for this.

    leaf            traced by Equinox    traced by JAX    carries identity
    an array        yes                  yes              yes
    np.float32(1)   yes                  yes              no
    1.0             no                   yes              no
    jax.nn.relu     no                   no               no

Nothing here knows any library. Each file of `libraries/` enters a *row*, a `Library`: functions and facts that answer
questions about its classes to which JAX's registry has no answer. A function of a row returns None for the classes of
all other libraries. The walk asks how instances come apart, `Module.parameters` which leaves train, `state` what
represents an instance in plain data, and files how an instance is written and what a file may name. The walk asks once
for each class, when the first instance comes. What a user may change in a class is asked again for each new structure
with its instances.

The *native walk* is the walk in C, which reads many classes by itself. A *static* attribute or leaf is not traced. The
*auxiliary data* of a node is all that its class needs besides the children.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ._call_arguments import Arguments
from ._class_attributes import built_in_base, dataclass_entries, dataclass_fields
from ._errors import UnregisteredTypeError
from ._jax_internals import TYPED_NUMBERS, rebuild_registered, unflatten_of

Convention = Literal["equinox", "jax", "variable"]
"""Which leaves of a module are traced.

`"equinox"`: arrays only, as in Equinox's filter transforms. `"jax"`: whatever `jax.jit` accepts. `"variable"`: like
`"jax"`, but an array directly in the module is a value, however many variables hold it.
"""


LocalConvention = Convention | Literal["outside", "any"]
"""The convention at some place in a tree: that of the nearest module around it, or one of two outside all modules.

`"outside"`: every leaf counts as traced, and the transform refuses what it cannot trace. Only modules and references
carry identity.
`"any"`: below a mutable container that carries identity by a policy. Every leaf counts as traced here, too, but arrays
and mutable containers carry identity.
"""


KeyEntries = tuple[Any, ...]
"""One key entry of JAX for each child: `GetAttrKey`, `DictKey`, `SequenceKey`, or a class's own."""


Role = Literal["parameter", "unsaid", "state"]
"""How an optimizer treats a leaf, as its library says: it is trained; trained, although the library does not say; or
left alone."""

RolesBelow = Role | Callable[[Any], Sequence[Role | None] | None]
"""The role of all leaves below an instance. Or a function of its auxiliary data that returns one role for each child:
None for a child whose role is not known, and None in place of all roles if no child's is."""


class NodeType(NamedTuple):
    """Description of a class of nodes: how its instances come apart and are put together.

    Attributes:
        cls: the class.
        is_plain: whether it is a plain container, which outside modules is a value and not an object.
        is_mutable: whether it is a plain container that can be mutated, and so carries identity inside modules. False
            for all modules.
        convention: which leaves below an instance are traced; None inherits the convention of the enclosing module.
        take_apart: instance → (children, auxiliary data).
        put_together: (auxiliary data, children) → a new instance.
        keys_of: instance → one key entry a child, as in JAX's key paths.
        fields: the names of all fields, for a class that is read field by field. Its auxiliary data is then (names of
            the traced fields that are set, pairs of names and values of the static ones).
        keys_vary: whether the keys may depend on the instance, and not on class and auxiliary data alone.
        writes_back: what becomes of a change that a function makes in an instance. True: the library of the class
            writes it back into the caller's object. False: the change is lost, and nobody would miss it. None: no
            library says.
        roles: the roles of the leaves below an instance; None if no library says.
        is_view: True if an instance stands for a function of its leaves, which are also elsewhere. A path through one
            represents a leaf only if there is no other path.
    """

    cls: type
    is_plain: bool
    is_mutable: bool
    convention: Convention | None
    take_apart: Callable[[Any], tuple[Sequence[Any], Any]]
    put_together: Callable[[Any, Sequence[Any]], Any]
    keys_of: Callable[[Any], KeyEntries]
    fields: tuple[str, ...] = ()
    keys_vary: bool = False
    writes_back: bool | None = None
    roles: RolesBelow | None = None
    is_view: bool = False

    @property
    def carries_identity(self) -> bool:
        """True if two occurrences of one instance inside a module are a tie."""
        return self.is_mutable or not self.is_plain

    @property
    def is_known_to_jax(self) -> bool:
        """True if JAX takes a plain container of this class apart, too.

        The classes of `register_node` count as known: sharedtree packs their instances before JAX sees them.
        """
        return self.cls is not collections.deque

    def inherits(self, outer: LocalConvention, *, containers: bool = False) -> LocalConvention:
        """Computes the convention for the leaves below an instance.

        Args:
            outer: the convention around it.
            containers: whether mutable containers carry identity outside modules.
        """
        if self.convention is not None:
            return self.convention
        # The class has none of its own: it is a plain container or a `Partial`. The convention of a variable is only
        # for what is directly in it. A `Partial` outside modules has nothing to inherit, so it gets JAX's.
        if outer == "variable" or (outer in ("outside", "any") and not self.is_plain):
            return "jax"
        # A mutable container that carries identity by a policy: so do the arrays below it.
        return "any" if outer == "outside" and containers and self.is_mutable else outer


# --- which leaves are traced and which carry identity -----------------------------------------------------------------


PYTHON_NUMBERS = frozenset({bool, int, float, complex})

TRACED_NUMBERS = PYTHON_NUMBERS | TYPED_NUMBERS
"""Classes of numbers that JAX traces: Python's, and the subclasses that JAX passes to derivative rules instead."""

_NAMES_OF_DTYPES = [name for name in dir(jnp) if name.startswith(("bfloat", "float8", "int4", "uint4"))]

NUMPY_NUMBERS: tuple[type, ...] = tuple(
    {np.dtype(code).type for code in "?bhilqBHILQefdFD"}
    | {np.dtype(getattr(jnp, name)).type for name in _NAMES_OF_DTYPES}
)
"""NumPy's scalar classes whose dtypes JAX traces. For each of them there is one dtype object."""

_WITH_IDENTITY = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, jax.Ref)


def carries_identity(leaf: Any) -> bool:
    """Tells whether a traced leaf is an object and not a value: if so, two occurrences inside a module are a tie."""
    return isinstance(leaf, _WITH_IDENTITY)


def is_traced(leaf: Any, convention: LocalConvention) -> bool:
    """Tells whether a leaf becomes an input of the computation, under the convention at its place."""
    # Outside modules all leaves do, and the transform raises its own error for one that it cannot trace.
    if convention in ("outside", "any"):
        return True
    # JAX refuses NumPy arrays of texts and objects, so in its convention they are static. To Equinox all are arrays.
    if isinstance(leaf, np.ndarray | np.generic):
        return convention == "equinox" or _is_numeric(leaf.dtype)
    # All other kinds of arrays, and references, are traced under every convention.
    if isinstance(leaf, _WITH_IDENTITY):
        return True
    # Numbers, and objects that JAX can convert to arrays, are static under Equinox's convention alone.
    return convention != "equinox" and (type(leaf) in TRACED_NUMBERS or hasattr(type(leaf), "__jax_array__"))


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


# --- node types of classes --------------------------------------------------------------------------------------------


def node_type_of(obj: Any) -> NodeType | None:
    """Looks up the node type of an object's class. None if it is a leaf. Cost: two or three dictionary look-ups."""
    cls: type = type(obj)
    plain = PLAIN.get(cls)
    if plain is not None:
        return plain
    # Without this, each number and array would be looked up in JAX's registry below.
    if cls in _COMMON_LEAVES:
        return None
    node_type = node_types_by_class.get(cls)
    if node_type is not None:
        return node_type
    new_type = _new_node_type(cls, obj)
    return None if new_type is None else _remembered(new_type)


def _remembered(node_type: NodeType) -> NodeType:
    """Enters a node type into the table, and returns the one that the table has for the class from now on."""
    # The table keeps its classes alive. JAX's registry does so for ever anyway; but a namedtuple is in no registry, and
    # a program may make new ones without end.
    if node_type.is_plain:
        return node_type
    # Several threads may come here with the same class. `setdefault` lets one of them win for all.
    return node_types_by_class.setdefault(node_type.cls, node_type)


def node_type_of_class(cls: type) -> NodeType:
    """Finds the node type of a class without having an instance.

    Raises:
        UnregisteredTypeError: if neither JAX nor sharedtree know the class.
    """
    node_type = PLAIN.get(cls) or node_types_by_class.get(cls)
    # The class is new here, as it may be in a process that loads a pickle.
    if node_type is None:
        if is_namedtuple(cls):
            # JAX's registry answers for an instance only, so one is made of Nones.
            node_type = _new_node_type(cls, tuple.__new__(cls, [None] * len(getattr(cls, "_fields", ()))))
        else:
            node_type = node_type_by_library(cls) or (_registered_type(cls) if is_in_jax_registry(cls) else None)
    if node_type is None:
        name = cls.__qualname__
        raise UnregisteredTypeError(
            f"`{name}` was a pytree node where this was pickled, but it is not registered here. Import the module that "
            f"registers it first, or register it:\n    jax.tree_util.register_pytree_node({name}, flatten, unflatten)",
            ("",),
        )
    return node_type if cls in PLAIN else _remembered(node_type)


def is_module(obj: Any) -> bool:
    """Tells whether an object is a module, which carries identity wherever it is."""
    node_type = node_type_of(obj)
    return node_type is not None and not node_type.is_plain


def is_value_of_variable(obj: Any) -> bool:
    """Tells whether an object directly in an NNX `Variable` is an array, which carries no identity at this place.

    A `jax.Ref` in a variable carries identity, and so may a node. This returns False for both.
    """
    if node_type_of(obj) is not None or isinstance(obj, jax.Ref):
        return False
    return carries_identity(obj) and is_traced(obj, "variable")


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    *,
    keys: Callable[[Any], Iterable[Any]] | None = None,
    convention: Literal["equinox", "jax"] = "jax",
) -> None:
    """Teaches sharedtree a node type that JAX does not know.

    Classes in JAX's own registry need no registration here. A class registered here is a module inside every
    sharedtree function and transform; vanilla JAX still sees its instances as leaves.

    Args:
        cls: the class; its subclasses are not included.
        flatten: takes an instance and returns its children and its auxiliary data, one level deep. The children may
            be any objects; the auxiliary data is compared by type and value, and may be mutable or unhashable.
        unflatten: takes the auxiliary data and the children and returns a new instance. It should not call
            `__init__`, and it must take whatever objects the transforms put in place of the children.
        keys: takes an instance and returns one key entry for each child (`jax.tree_util.GetAttrKey("weight")`), for
            paths. Default: positions.
        convention: which leaves are traced: `"jax"`, whatever `jax.jit` accepts, or `"equinox"`, arrays only.

    Raises:
        ValueError: if the class is a plain container, or JAX or sharedtree already know it.

    Example:
        >>> import sharedtree as st
        >>> import jax.numpy as jnp
        >>> class Pair:
        ...     def __init__(self, a, b):
        ...         self.a, self.b = a, b
        >>> st.register_node(Pair, lambda p: ((p.a, p.b), None), lambda aux, children: Pair(*children))
        >>> w = jnp.ones(3)
        >>> [tie.paths for tie in st.ties(Pair(w, w))]
        [('[0]', '[1]')]
    """
    if cls in PLAIN or cls in node_types_by_class or is_in_jax_registry(cls):
        raise ValueError(
            f"`{cls.__qualname__}` is already a registered node. Leave out the call of `register_node`: "
            "sharedtree reads JAX's registry."
        )

    def take_apart(obj: Any) -> tuple[Sequence[Any], Any]:
        # A user's function may return any iterable, even one that can be read only once.
        children, aux = flatten(obj)
        return tuple(children), aux

    def keys_of(obj: Any) -> KeyEntries:
        if keys is not None:
            return tuple(keys(obj))
        children, _ = take_apart(obj)
        return tuple([jtu.SequenceKey(i) for i in range(len(children))])

    node_types_by_class[cls] = NodeType(cls, False, False, convention, take_apart, unflatten, keys_of)
    for callback in registration_callbacks:
        callback()


def require_registered(tree: Any) -> None:
    """Raises an error if `tree` itself is an instance of a class that nobody registered.

    A node, a leaf that JAX can trace, a callable and an object without attributes are fine. Any other object with
    attributes looks like a model.

    Raises:
        UnregisteredTypeError: with the class, and the two ways to register it as code.
    """
    if node_type_of(tree) is not None or is_traced(tree, "jax") or callable(tree):
        return
    # Numbers, texts and the like have no attributes. A class as a whole has, but is no instance.
    if not hasattr(tree, "__dict__") or isinstance(tree, type):
        return
    name = type(tree).__name__
    raise UnregisteredTypeError(
        f"`{name}` is not a registered pytree node, so nothing inside it can be seen.\n{how_to_register(name)}", ("",)
    )


def how_to_register(name: str) -> str:
    """Writes the two ways to make a class a node, as code.

    Args:
        name: the name of the class.
    """
    return (
        "Register the class with JAX:\n"
        f"    jax.tree_util.register_pytree_node({name}, flatten, unflatten)\n"
        "or, to keep it a leaf for JAX, with sharedtree only:\n"
        f"    sharedtree.register_node({name}, flatten, unflatten)"
    )


# --- how a node type is found -----------------------------------------------------------------------------------------

registration_callbacks: list[Callable[[], None]] = []
"""Called after each call of `register_node`, since instances of the class were leaves before."""

node_types_by_class: dict[type, NodeType] = {}
"""The node types of all modules seen so far, and of the classes of `register_node`. Each entry is one assignment, which
threads cannot tear."""


_COMMON_LEAVES = TRACED_NUMBERS | {str, bytes, np.ndarray}
"""Classes of frequent leaves. Looking a class up here is faster than asking JAX's registry."""


def is_in_jax_registry(cls: type) -> bool:
    """Tells whether JAX takes instances of a class apart. Not for the classes in `PLAIN`."""
    if cls is jtu.Partial or is_namedtuple(cls):
        return True
    # NumPy warns if some of its scalars are made by a bare `__new__`. None of them is a node.
    if issubclass(cls, np.generic):
        return False
    # JAX has no public question about a class, only about objects. So an instance is made without `__init__`; JAX looks
    # at its class alone.
    built_in: Any = built_in_base(cls)
    try:
        blank = built_in.__new__(cls)
    except TypeError:  # of a layout that only its own constructor can make; JAX knows those in `PLAIN`
        return False
    return not jtu.all_leaves([blank])


def _new_node_type(cls: type, obj: Any) -> NodeType | None:
    """Makes the node type of a class that was not seen before. None if its instances are leaves.

    Args:
        cls: the class.
        obj: an instance. If no library knows the class, JAX's registry is asked to take it apart, one level deep.
    """
    by_library = node_type_by_library(cls)
    if by_library is not None:
        return by_library
    flat = jtu.default_registry.flatten_one_level(obj)
    if flat is None:
        return None
    # For a namedtuple JAX's auxiliary data is the class, unless its author registered a flatten function for it.
    _, aux = flat
    if is_namedtuple(cls) and aux is cls:
        return namedtuple_type(cls)
    return _registered_type(cls)


class AuxConversion(NamedTuple):
    """Replacement for the auxiliary data that a class's own flatten function returns.

    A structure compares auxiliary data by type and value. The replacement is such that this is right: the fields are in
    one order, for example, and a wrapper without `==` is replaced by what it holds.

    Attributes:
        to_structure: auxiliary data → its replacement in a structure.
        from_structure: the inverse, for the class's own unflatten function.
    """

    to_structure: Callable[[Any], Any]
    from_structure: Callable[[Any], Any]


AUX_CONVERSIONS: dict[type, AuxConversion] = {}
"""Base class → the conversion for its classes. Empty unless `sharedtree.compat` has imported treeo."""


def _registered_type(cls: type) -> NodeType:
    """Makes the node type of a class in JAX's registry, by the functions that its author registered."""
    # Nearly always None: only `sharedtree.compat` enters conversions.
    conversion = next((entry for base, entry in AUX_CONVERSIONS.items() if issubclass(cls, base)), None)

    def take_apart_and_convert(obj: Any) -> tuple[Sequence[Any], Any]:
        children, aux = jtu.default_registry.flatten_one_level(obj)
        assert conversion is not None
        return tuple(children), conversion.to_structure(aux)

    def put_together(aux: Any, children: Sequence[Any]) -> Any:
        return rebuild_registered(cls, aux if conversion is None else conversion.from_structure(aux), children)

    return NodeType(
        cls,
        is_plain=False,
        is_mutable=False,
        # A `Partial` has no convention, and inherits that of the module around it. JAX's is that of all classes about
        # which no library says anything.
        convention=None if issubclass(cls, jtu.Partial) else convention_by_library(cls) or "jax",
        take_apart=_take_apart_registered if conversion is None else take_apart_and_convert,
        put_together=put_together,
        keys_of=lambda obj: tuple(key for key, _ in jtu.default_registry.flatten_one_level_with_keys(obj)[0]),
        # A registered function may make the keys from anything in the instance. For a class with a layout, or with a
        # conversion (treeo's classes), they are the names of its fields.
        keys_vary=conversion is None and native_layout_of(cls) is None,
        writes_back=writes_back_by_library(cls),
        roles=role_by_library(cls),
    )


def is_taken_apart_by_registry(node_type: NodeType) -> bool:
    """Tells whether a class is taken apart by its functions in JAX's registry alone, without an `AuxConversion`."""
    return node_type.take_apart is _take_apart_registered


def _take_apart_registered(obj: Any) -> tuple[Sequence[Any], Any]:
    children, aux = jtu.default_registry.flatten_one_level(obj)
    return tuple(children), aux


def maker_of(cls: type, aux: Any, num_children: int) -> Callable[[tuple[Any, ...]], Any]:
    """Makes a function that puts an instance together from its children alone: children → instance.

    Args:
        cls: a namedtuple, or a class in JAX's registry.
        aux: the auxiliary data that all instances get.
        num_children: how many children each instance has.
    """
    return maker_of_namedtuple(cls) if is_namedtuple(cls) else unflatten_of(cls, aux, num_children)


# --- namedtuples ------------------------------------------------------------------------------------------------------


def is_namedtuple(cls: type) -> bool:
    """Tells whether a class is a namedtuple, by the same test as JAX's."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def namedtuple_type(cls: Any) -> NodeType:
    """Makes the node type of a namedtuple."""
    make = maker_of_namedtuple(cls)
    return NodeType(
        cls,
        is_plain=True,
        is_mutable=False,
        convention=None,
        take_apart=take_namedtuple_apart,
        put_together=lambda _, children: make(children),
        keys_of=lambda _: tuple(jtu.GetAttrKey(name) for name in cls._fields),
    )


def take_namedtuple_apart(obj: Any) -> tuple[Sequence[Any], Any]:
    """Returns the items of a namedtuple as its children, and None as its auxiliary data. Runs no code of the class."""
    return tuple.__getitem__(obj, slice(None)), None


def maker_of_namedtuple(cls: Any) -> Callable[[Sequence[Any]], Any]:
    """Makes a function that makes a namedtuple of a class: items → instance."""
    # The `__new__` that `collections.namedtuple` writes only calls `tuple.__new__`. If the class has that `__new__`,
    # and neither an `__init__` nor a metaclass that would notice, the result calls `tuple.__new__` directly, which is
    # faster.
    tuple_new: Any = getattr(cls.__new__, "__globals__", {}).get("_tuple_new")
    if type(cls) is type and tuple_new is tuple.__new__ and cls.__init__ is object.__init__:
        return functools.partial(tuple_new, cls)
    return lambda children: cls(*children)


# --- keys of dictionaries and other nodes -----------------------------------------------------------------------------


def has_unsortable_keys(node_type: NodeType, aux: Any) -> bool:
    """Tells whether a node is a dictionary that JAX refuses, because its keys cannot be sorted.

    Args:
        node_type: the node type of the node.
        aux: the auxiliary data of the node. For a dictionary it has the keys.
    """
    if node_type.cls not in (dict, collections.defaultdict):
        return False
    # The auxiliary data of a `defaultdict` is its factory and the keys.
    keys = aux if node_type.cls is dict else aux[1]
    # Most dictionaries have texts for keys, which can be sorted. So this is not tried.
    if all(type(key) is str for key in keys):
        return False
    try:
        sorted(keys)
    except TypeError:
        return True
    return False


def name_in(key: Any) -> Any:
    """Reads a child's name from its key entry of JAX.

    Returns:
        The name of an attribute; the key of a dictionary, which may be of any type; the index in a sequence, or the
        number of a child without a better name, as a text. For a class's own kind of entry, its text in a path.
    """
    if isinstance(key, jtu.GetAttrKey):
        return key.name
    if isinstance(key, jtu.DictKey):
        return key.key
    if isinstance(key, jtu.SequenceKey):
        return str(key.idx)
    return str(key.key) if isinstance(key, jtu.FlattenedIndexKey) else jtu.keystr((key,))


def _sorted_keys(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    """Returns the keys of a dictionary, sorted as JAX sorts them.

    Keys that cannot be sorted stay in the dictionary's order. Outside modules the walk has JAX raise its error for
    such a dictionary.
    """
    try:
        return tuple(sorted(mapping))
    except TypeError:
        return tuple(mapping)


def _take_apart_dict(obj: dict[Any, Any]) -> tuple[Sequence[Any], Any]:
    names = _sorted_keys(obj)
    return [obj[name] for name in names], names


def _sequence_keys(obj: Any) -> KeyEntries:
    return tuple([jtu.SequenceKey(i) for i in range(len(obj))])


def _dict_keys(obj: dict[Any, Any]) -> KeyEntries:
    return tuple([jtu.DictKey(name) for name in _sorted_keys(obj)])


# --- the plain containers ---------------------------------------------------------------------------------------------


def _plain(
    cls: type,
    take_apart: Callable[[Any], tuple[Sequence[Any], Any]],
    put_together: Callable[[Any, Sequence[Any]], Any],
    keys_of: Callable[[Any], KeyEntries],
    *,
    is_mutable: bool,
) -> NodeType:
    """Makes the node type of a plain container."""
    return NodeType(cls, True, is_mutable, None, take_apart, put_together, keys_of)


PLAIN: dict[type, NodeType] = {
    type(None): _plain(type(None), lambda _: ((), None), lambda *_: None, lambda _: (), is_mutable=False),
    tuple: _plain(tuple, lambda x: (x, None), lambda _, xs: tuple(xs), _sequence_keys, is_mutable=False),
    list: _plain(list, lambda x: (tuple(x), None), lambda _, xs: list(xs), _sequence_keys, is_mutable=True),
    dict: _plain(
        dict,
        _take_apart_dict,
        lambda names, xs: dict(zip(names, xs, strict=True)),
        _dict_keys,
        is_mutable=True,
    ),
    collections.OrderedDict: _plain(
        collections.OrderedDict,
        lambda x: (tuple(x.values()), tuple(x)),
        lambda names, xs: collections.OrderedDict(zip(names, xs, strict=True)),
        lambda x: tuple([jtu.DictKey(name) for name in x]),
        is_mutable=True,
    ),
    collections.defaultdict: _plain(
        collections.defaultdict,
        lambda x: (_take_apart_dict(x)[0], (x.default_factory, _sorted_keys(x))),
        lambda aux, xs: collections.defaultdict(aux[0], zip(aux[1], xs, strict=True)),
        _dict_keys,
        is_mutable=True,
    ),
    collections.deque: _plain(
        collections.deque,
        lambda x: (tuple(x), x.maxlen),
        lambda maxlen, xs: collections.deque(xs, maxlen),
        _sequence_keys,
        is_mutable=True,
    ),
    Arguments: _plain(Arguments, Arguments.parts, Arguments.of_parts, Arguments.keys, is_mutable=False),
}


# --- what libraries say of their classes ------------------------------------------------------------------------------


class NativeLayout(NamedTuple):
    """Directions for the native walk to read and make instances itself, without the functions in JAX's registry.

    Attributes:
        shape: the native walk's name for the way to read and make them, such as `"FIELDS"`.
        fields: (all names in order; a byte for each name, 1 if it is static; a byte for each name, its place among the
            traced or among the static ones; the traced names; the static names). An entry that the shape does not need
            is empty.
        slots: the slots to write besides the instance's dictionary, by name or by descriptor.
        facts: anything else that the layout depends on. Layouts are compared: if that of a class has changed, the
            native walk leaves its instances to the registered functions from then on.
    """

    shape: str
    fields: tuple[Any, ...] = ((), b"", b"", (), ())
    slots: tuple[Any, ...] = ()
    facts: Any = None

    @property
    def native_arguments(self) -> tuple[Any, ...]:
        """The last arguments of `new_kind` in `_native_walk.c`, from `order` on.

        They are: all names in order; for each whether it is static; for each its place among the traced or the static
        ones; the traced and then the static names; the number of traced ones; whether both kinds are in the order of
        all names; the slots.
        """
        order, are_static, places, traced, statics = self.fields
        traced_in_order = [name for name, is_static in zip(order, are_static, strict=True) if not is_static]
        statics_in_order = [name for name, is_static in zip(order, are_static, strict=True) if is_static]
        # `statics` may go on after the names in `order`, with attributes that are no fields.
        is_in_order = traced_in_order == [*traced] and statics_in_order == [*statics[: len(statics_in_order)]]
        return order, are_static, places, (*traced, *statics), len(traced), is_in_order, self.slots


Trained = Literal["never", "if marked", "always", "if inexact"]
"""The leaves below a child of a module that train: none, those that an inner module marks, all, or the inexact ones."""


class PlainForm(NamedTuple):
    """Representation of an instance in a state: plain data.

    Attributes:
        kind: what holds the states of the children. `"dict"`: a dictionary by name. `"list"`: a list. `"whole"`:
            nothing, because the instance has one child, and the state of this child stands for both.
        names: for a dictionary, the name of each child.
        children: the children to put into a state.
        statics: for a dictionary, the static attributes by name.
        make: (new children, new static attributes) → a new instance.
        keys: for `"list"` or `"whole"`, the key entry of each child in paths.
    """

    kind: Literal["dict", "list", "whole"]
    names: Sequence[str]
    children: Sequence[Any]
    statics: Mapping[str, Any]
    make: Callable[[Sequence[Any], Mapping[str, Any]], Any]
    keys: tuple[Any, ...] = ()


# --- what libraries say of files --------------------------------------------------------------------------------------

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
        is_open: whether classes declare no attributes. Then an attribute in a file that the class does not declare is
            no mistake.
        own_entries: the names of the library's bookkeeping in each instance: kinds, marks, metadata. A file
            has them among the attributes, but the authors of classes do not know them.
        is_assigned: whether the attributes that a migration returns are set by `reassign`. If not, they are set in the
            same way as those of a file.
    """

    is_open: bool = False
    own_entries: frozenset[str] = frozenset()
    is_assigned: bool = False

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """Names of the declared attributes of a class, the traced ones first, each group in JAX's order."""
        declared = sorted(dataclass_fields(cls), key=lambda field: bool(field.metadata.get("static", False)))
        return tuple([field.name for field in declared])

    def may_have(self, cls: Any, name: str) -> bool | None:
        """Tells whether an undeclared attribute may have this name. None: if Python lets an instance have it."""

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Tells whether an instance may lack a field."""
        return False

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        """Finds a function that makes the default of a field, for a file without the field. None if it has none."""
        field = dataclass_entries(cls).get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            return field.default_factory
        if field is not None:
            default = field.default
        else:
            namedtuple_defaults = cls._field_defaults if is_namedtuple(cls) else {}
            default = namedtuple_defaults.get(name, dataclasses.MISSING)
        return None if default is dataclasses.MISSING else lambda: default

    def attributes_for_file(self, obj: Any, attributes: dict[str, Any], naming: Naming) -> dict[str, Any]:
        """Returns the attributes of an instance as a file has them, the traced ones first. By default, changes nothing.

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

    def finish_loaded(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """Checks and completes an instance, right after it was loaded. By default, changes nothing.

        Args:
            obj: the instance. Its attributes are set as the file has them.
            attributes: these attributes by name.
            new_names: name in the file → name of the attribute now; None if a migration dropped it.

        Returns:
            The instance; or another object in its place, if only one object with this content may exist.

        Raises:
            FormatError: if the attributes do not fit together.
        """
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        """Replaces all attributes of an instance, as assignments would, but without running the class's code.

        Only called if `is_assigned` is true.
        """


class NamesInFiles(NamedTuple):
    """Allow-list of a library: what a file may name, as `module:qualname`.

    A function that a file names gets into the model, and the model will call it. So functions are listed one by one,
    and only if they compute arrays from arrays. Classes are listed one by one, too, if some classes of the library
    evaluate or call their contents. A name that is missing from the installed version does no harm.

    Each text is a table: a module and a colon, then the names in it.

    Attributes:
        packages: the top-level packages of the library.
        imported_from: the package to import in order to have these, if it is not one of them.
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


# --- rows of libraries, and the questions to all of them --------------------------------------------------------------


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
        held_anyway: classes whose instances keep nothing alive that could otherwise die, so that keys may keep them.
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
        has_arbitrary_attributes: class → True if reading an attribute of an instance may return anything that a file
            put there.
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
    has_arbitrary_attributes: Callable[[Any], bool | None] = _nothing
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
    """Asks the libraries what becomes of changes in an instance. See `NodeType.writes_back`."""
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
    """Asks which leaves train below each child of a module. If no library says, the inexact ones do."""
    for library in LIBRARIES:
        trained = library.trained_below(cls, aux, num_children)
        if trained is not None:
            return trained
    return ["if inexact" for _ in range(num_children)]


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Asks what represents a module in a state. None if its children by key do."""
    for library in LIBRARIES:
        plain_form = library.plain_form_of(obj, node_type)
        if plain_form is not None:
            return plain_form
    return None


def argument_and_filter(argnums: Any) -> tuple[Any, str] | None:
    """Asks whether a value of `argnums` is a library's filter.

    Returns:
        (The position of the argument, the filter as code). None for any other value.
    """
    for library in LIBRARIES:
        answer = library.argument_and_filter(argnums)
        if answer is not None:
            return answer
    return None


def parts_of_frozen(value: Any) -> Iterable[Any] | None:
    """Asks for the values in a static value that a library declares immutable. None for any other value."""
    for library in LIBRARIES:
        parts = library.parts_of_frozen(value)
        if parts is not None:
            return parts
    return None


def library_in_files(cls: Any) -> tuple[Library, ClassKind] | None:
    """Asks how the instances of a class are written into a file. Returns the first answer, with its library."""
    for library in LIBRARIES:
        kind = library.kind_in_files(cls)
        if kind is not None:
            return library, kind
    return None


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """Asks why no file may contain an instance of a class with this auxiliary data. None if a file may.

    Reading refuses such a file. Writing asks, too, so that it writes no file that nobody could read.
    """
    for library in LIBRARIES:
        fault = library.fault_of_aux(cls, aux)
        if fault is not None:
            return fault
    return None


def is_choice(cls: Any) -> bool:
    """Tells whether a class has no instances, but is itself a value for a file to name."""
    return any(issubclass(cls, library.choices) for library in LIBRARIES)


# --- questions for each value -----------------------------------------------------------------------------------------

# These questions come for each attribute of each instance, so the answers of all rows are collected once.


@functools.cache
def markers() -> frozenset[type]:
    """Classes of the marks for attributes without a value."""
    return frozenset([library.marker for library in LIBRARIES if library.marker is not None])


def without_missing(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns attributes without those that have a mark in place of a value; the very dictionary if none has."""
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
