"""Node types: how the instances of a class come apart and are put together, and which of their leaves are traced.

    node_type_of({"b": w, "a": v})     children [v, w], auxiliary data ("a", "b"), keys DictKey("a"), DictKey("b")
    node_type_of(eqx_module)           by the row of Equinox: field by field
    node_type_of(partial)              by JAX's registry
    node_type_of(1)                    None: a leaf

There are four kinds of classes. The *plain containers* (`PLAIN`, and namedtuples) are the built-in ones, such as lists
and dicts. All others are *modules*:

- Classes of a library with a row in this package, such as Equinox modules. The row takes instances apart field by
  field.
- Every other class in JAX's registry, by the flatten function that its author registered.
- The classes of `register_node`, which JAX does not know.

Whether a leaf is traced depends on the module that holds it: the library of the module has a *convention* for this.

    leaf            traced by Equinox    traced by JAX    carries identity
    an array        yes                  yes              yes
    np.float32(1)   yes                  yes              no
    1.0             no                   yes              no
    jax.nn.relu     no                   no               no

This file knows no library. Each file of `libraries/` enters a *row*, a `Library`: functions and facts about the classes
of the library that JAX's registry does not have. A function of a row returns None for the classes of all other
libraries. The rows are asked

- by the walk, how instances come apart: once for each class, when its first instance comes. Facts that a user may
  change later in a class are asked for again with each new structure that has instances of it;
- by `Module.parameters`, which leaves train;
- by `state`, what represents an instance in plain data;
- by files, how an instance is written and what a file may name.

Words: the *walk* takes a tree apart. The *native walk* does it in C, and reads many classes by itself. A *static*
attribute or leaf is not traced. The *auxiliary data* of a node is all that its class needs besides the children. An
object *carries identity* at a place if an occurrence at another place is a tie with it, and not just an equal value.
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
from ._class_attributes import dataclass_entries, dataclass_fields
from ._errors import UnregisteredTypeError
from ._jax_internals import TYPED_NUMBERS, is_in_registry, rebuild_registered, unflatten_of

Convention = Literal["equinox", "jax", "variable"]
"""Which leaves of a module are traced.

`"equinox"`: arrays only, as in Equinox's filter transforms. `"jax"`: whatever `jax.jit` accepts. `"variable"`, for a
`Variable` of NNX: like `"jax"`, but the array directly in it carries no identity. So two variables that hold one array
are not tied.
"""


LocalConvention = Convention | Literal["outside", "any"]
"""The convention at one place in a tree: that of the nearest module around it, or one of two outside all modules.

`"outside"`: every leaf counts as traced, and the transform raises an error for a leaf that it cannot trace. Only
modules and references carry identity.
`"any"`: below a mutable container that carries identity outside modules, as a policy may ask for. Every leaf counts as
traced here, too, but arrays and mutable containers carry identity.
"""


KeyEntries = tuple[Any, ...]
"""One key entry of JAX for each child: `GetAttrKey`, `DictKey`, `SequenceKey`, or a class's own."""


Role = Literal["parameter", "unsaid", "state", "optimizer state"]
"""What an optimizer does with a leaf, by its library. `"parameter"`: trains it. `"unsaid"`: trains it, although the
library does not say that it is a parameter. `"state"` and `"optimizer state"`: does not train it. Tables of a model
count the two apart."""

RolesBelow = Role | Callable[[Any], Sequence[Role | None] | None]
"""The role of all leaves below an instance. Or a function: auxiliary data → one role for each child, with None for a
child without a known role. If no child has one, the function may return None in place of the whole sequence."""


class NodeType(NamedTuple):
    """Description of a class of nodes: how its instances come apart and are put together.

    Attributes:
        cls: the class.
        is_plain: whether it is a plain container. Outside modules, a plain container carries no identity.
        is_mutable: whether it is a mutable plain container, and so carries identity inside modules. False
            for all modules.
        convention: which leaves below an instance are traced. None inherits the convention of the enclosing module.
        take_apart: instance → (children, auxiliary data).
        put_together: (auxiliary data, children) → a new instance.
        keys_of: instance → one key entry for each child, as in JAX's key paths.
        fields: the names of all fields, for a class that is read field by field. Its auxiliary data is then (names of
            the traced fields that are set, pairs of names and values of the static ones).
        keys_vary: whether two instances with equal auxiliary data may have different keys.
        writes_back: what becomes of a change that a function makes in an instance. True: the library of the class
            writes it back into the caller's object. False: the change is lost, and nobody would miss it. None: no
            library has an answer.
        roles: the roles of the leaves below an instance. None if no library has an answer.
        is_view: True if an instance stands for a result computed from its leaves, such as the transpose of a weight
            that is also elsewhere in the model. A path through a view represents a leaf only if there is no other path.
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
        """True unless JAX takes instances of the class for leaves. That is so for a `deque` alone.

        The classes of `register_node` count as known: sharedtree packs their instances before JAX sees them.
        """
        return self.cls is not collections.deque

    def convention_below(self, outer: LocalConvention, *, containers: bool = False) -> LocalConvention:
        """Returns the convention for what is below an instance.

        Args:
            outer: the convention at the place of the instance.
            containers: whether mutable containers carry identity outside modules.
        """
        if self.convention is not None:
            return self.convention
        # Without a convention of its own, the class is a plain container or a `Partial`. "variable" holds only for what
        # is directly in a variable. A `Partial` outside modules has nothing to inherit, so it gets JAX's convention.
        if outer == "variable" or (outer in ("outside", "any") and not self.is_plain):
            return "jax"
        # If a mutable container carries identity outside modules, the arrays below it carry identity, too.
        return "any" if outer == "outside" and containers and self.is_mutable else outer


# --- which leaves are traced and which carry identity -----------------------------------------------------------------


PYTHON_NUMBERS = frozenset({bool, int, float, complex})

TRACED_NUMBERS = PYTHON_NUMBERS | TYPED_NUMBERS
"""Classes of numbers that JAX traces: Python's, and the subclasses that JAX passes to derivative rules instead."""

# Dtypes that JAX has and NumPy has not, such as `bfloat16`.
_NAMES_OF_JAX_DTYPES = [name for name in dir(jnp) if name.startswith(("bfloat", "float8", "int4", "uint4"))]

# The codes are those of NumPy's own dtypes: bool, signed and unsigned integers, float16 to float64, complex.
NUMPY_NUMBERS: tuple[type, ...] = tuple(
    {np.dtype(code).type for code in "?bhilqBHILQefdFD"}
    | {np.dtype(getattr(jnp, name)).type for name in _NAMES_OF_JAX_DTYPES}
)
"""NumPy's scalar classes whose dtypes JAX traces. For each of them there is one dtype object."""

_CLASSES_WITH_IDENTITY = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, jax.Ref)


def carries_identity(leaf: Any) -> bool:
    """Returns True if a traced leaf carries identity: if so, two occurrences inside a module are a tie.

    True for arrays and references, False for numbers. It does not look at the place of the leaf.
    """
    return isinstance(leaf, _CLASSES_WITH_IDENTITY)


def is_traced(leaf: Any, convention: LocalConvention) -> bool:
    """Returns True if a leaf becomes an input of the computation, under the convention at its place."""
    # Outside modules all leaves are traced, and the transform raises its own error for a leaf that it cannot trace.
    if convention in ("outside", "any"):
        return True
    # JAX refuses NumPy arrays of texts and objects, so in its convention they are static. To Equinox all are arrays.
    if isinstance(leaf, np.ndarray | np.generic):
        return convention == "equinox" or _is_numeric(leaf.dtype)
    # All other kinds of arrays, and references, are traced under every convention.
    if isinstance(leaf, _CLASSES_WITH_IDENTITY):
        return True
    # Numbers, and objects that JAX can convert to arrays, are static under Equinox's convention alone.
    return convention != "equinox" and (type(leaf) in TRACED_NUMBERS or hasattr(type(leaf), "__jax_array__"))


def _is_numeric(dtype: Any) -> bool:
    """Returns True if a dtype is one of numbers or booleans, JAX's own included."""
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


# --- node types of classes --------------------------------------------------------------------------------------------


def node_type_of(obj: Any) -> NodeType | None:
    """Returns the node type of an object's class. None if the object is a leaf.

    Cost: two or three dictionary look-ups, unless the class is new.
    """
    cls: type = type(obj)
    plain = PLAIN.get(cls)
    if plain is not None:
        return plain
    # Otherwise each number and array would be looked up in JAX's registry below.
    if cls in _COMMON_LEAVES:
        return None
    node_type = node_types_by_class.get(cls)
    if node_type is not None:
        return node_type
    new_type = _new_node_type(cls, obj)
    return None if new_type is None else _enter_in_table(new_type)


def _enter_in_table(node_type: NodeType) -> NodeType:
    """Enters a node type into `node_types_by_class`, and returns the one that the table has for the class from now on.

    Namedtuples are not entered. Their node type is returned, and made again when the next instance comes.
    """
    # Of plain types, only those of namedtuples come here. The table would keep their classes alive, and a program may
    # make new namedtuples without end. JAX's registry keeps all other classes alive anyway.
    if node_type.is_plain:
        return node_type
    # Several threads may come here with the same class. `setdefault` keeps the first node type, and returns it to all.
    return node_types_by_class.setdefault(node_type.cls, node_type)


def node_type_of_class(cls: type) -> NodeType:
    """Returns the node type of a class without having an instance.

    Raises:
        UnregisteredTypeError: if neither JAX nor sharedtree know the class. The text speaks of unpickling.
    """
    node_type = PLAIN.get(cls) or node_types_by_class.get(cls)
    # The class is new here, as it may be in a process that loads a pickle.
    if node_type is None:
        if is_namedtuple(cls):
            # JAX's registry can be asked about an instance only. So an instance is made, with None for each item.
            node_type = _new_node_type(cls, tuple.__new__(cls, [None] * len(getattr(cls, "_fields", ()))))
        else:
            node_type = node_type_by_library(cls) or (_registered_type(cls) if is_in_jax_registry(cls) else None)
    if node_type is None:
        name = cls.__qualname__
        raise UnregisteredTypeError(
            f"`{name}` was a pytree node where this was pickled, but it is not registered here. Import the module that "
            f"registers it first, or register it:\n    jax.tree_util.register_pytree_node({name}, flatten, unflatten)",
            paths=("",),  # the root
        )
    return node_type if cls in PLAIN else _enter_in_table(node_type)


def is_module(obj: Any) -> bool:
    """Returns True if an object is a module: a node, but no plain container. It carries identity wherever it is."""
    node_type = node_type_of(obj)
    return node_type is not None and not node_type.is_plain


def is_value_of_variable(obj: Any) -> bool:
    """Returns True if an object directly in an NNX `Variable` is its array, without identity at this place.

    False for a `jax.Ref`, which carries identity in a variable, too; for a node; and for a number.
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

    Classes in JAX's own registry need no registration here. To sharedtree's functions and transforms, an instance of a
    class registered here is a module: it is taken apart, and keeps its identity. Vanilla JAX still sees a leaf.

    Args:
        cls: the class; its subclasses are not included.
        flatten: takes an instance and returns its children and its auxiliary data, one level deep. The children may
            be any objects; the auxiliary data is compared by type and value, and may be mutable or unhashable.
        unflatten: takes the auxiliary data and the children and returns a new instance. It should not call
            `__init__`, and it must take whatever objects the transforms put in place of the children.
        keys: takes an instance and returns one key entry for each child (`jax.tree_util.GetAttrKey("weight")`), for
            paths. Default: positions, `[0]`, `[1]` and so on.
        convention: which leaves are traced: `"jax"`, whatever `jax.jit` accepts, or `"equinox"`, arrays only.

    Raises:
        ValueError: if the class is a plain container, is in JAX's registry, or already has a node type in sharedtree.

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
    is_known_to_jax = cls in PLAIN or is_in_jax_registry(cls)
    if is_known_to_jax or cls in node_types_by_class:
        reason = "sharedtree reads JAX's registry." if is_known_to_jax else "it was registered with sharedtree before."
        raise ValueError(
            f"`{cls.__qualname__}` is already a registered node. Leave out the call of `register_node`: {reason}"
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

    node_types_by_class[cls] = NodeType(
        cls,
        is_plain=False,
        is_mutable=False,
        convention=convention,
        take_apart=take_apart,
        put_together=unflatten,
        keys_of=keys_of,
    )
    for callback in registration_callbacks:
        callback()


def require_registered(tree: Any) -> None:
    """Raises an error if `tree` itself looks like a model of a class that nobody registered.

    An object with attributes looks like a model. A node, a leaf that JAX can trace, and a callable raise no error.
    Objects below `tree` are not looked at.

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
        f"`{name}` is not a registered pytree node, so nothing inside it can be seen.\n{how_to_register(name)}",
        paths=("",),  # the root
    )


def how_to_register(name: str) -> str:
    """Returns the two ways to make a class a node, as lines of text and code for an error.

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
"""Functions that drop what was computed while instances of a class were leaves. `register_node` calls each of them."""

node_types_by_class: dict[type, NodeType] = {}
"""Class → node type, for all classes of modules seen so far and for those of `register_node`. It needs no lock, because
threads cannot tear the assignment of an entry."""


_COMMON_LEAVES = TRACED_NUMBERS | {str, bytes, np.ndarray}
"""Classes of frequent leaves. Looking a class up here is faster than asking JAX's registry."""


def is_in_jax_registry(cls: type) -> bool:
    """Returns True if JAX takes instances of a class apart. Not to be asked about the classes in `PLAIN`."""
    if cls is jtu.Partial or is_namedtuple(cls):
        return True
    return is_in_registry(cls)


def _new_node_type(cls: type, obj: Any) -> NodeType | None:
    """Makes the node type of a class. Does not enter it into the table. Returns None if instances are leaves.

    Args:
        cls: the class.
        obj: an instance. If no library knows the class, JAX's registry is asked to take it apart, one level deep.
    """
    by_library = node_type_by_library(cls)
    if by_library is not None:
        return by_library
    children_and_aux = jtu.default_registry.flatten_one_level(obj)
    if children_and_aux is None:
        return None
    _, aux = children_and_aux
    # JAX takes any namedtuple apart, with the class itself as auxiliary data. If the author of this one has registered
    # a flatten function, `aux` comes from there, and the class is treated like any other registered class.
    if is_namedtuple(cls) and aux is cls:
        return namedtuple_type(cls)
    return _registered_type(cls)


class AuxConversion(NamedTuple):
    """Functions that replace the auxiliary data from a class's own flatten function, and restore it.

    A structure compares auxiliary data by type and value. For some classes this would find a difference where there is
    none. In the replacement the fields have one order, for example, and a wrapper without `==` is replaced by its
    content.

    Attributes:
        to_structure: auxiliary data → its replacement in a structure.
        from_structure: the inverse, for the class's own unflatten function.
    """

    to_structure: Callable[[Any], Any]
    from_structure: Callable[[Any], Any]


AUX_CONVERSIONS: dict[type, AuxConversion] = {}
"""Base class → the conversion for its classes. Empty unless `sharedtree.compat` has imported treeo."""


def _registered_type(cls: type) -> NodeType:
    """Makes the node type of a class in JAX's registry, by the functions registered by its author."""
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
        # A `Partial` has no convention, and inherits that of the module around it. Any other class has JAX's convention
        # if no library says otherwise.
        convention=None if issubclass(cls, jtu.Partial) else convention_by_library(cls) or "jax",
        take_apart=_take_apart_registered if conversion is None else take_apart_and_convert,
        put_together=put_together,
        keys_of=lambda obj: tuple(key for key, _ in jtu.default_registry.flatten_one_level_with_keys(obj)[0]),
        # A registered function may make the keys from anything in the instance, so they may vary. For a class with a
        # native layout or a conversion (treeo's classes) they do not: they are the names of its fields.
        keys_vary=conversion is None and native_layout_of(cls) is None,
        writes_back=writes_back_by_library(cls),
        roles=role_by_library(cls),
    )


def is_taken_apart_by_registry(node_type: NodeType) -> bool:
    """Returns True if JAX's registry takes instances apart, and its auxiliary data is unchanged."""
    return node_type.take_apart is _take_apart_registered


def _take_apart_registered(obj: Any) -> tuple[Sequence[Any], Any]:
    """Returns the children and the auxiliary data of an instance, by the flatten function in JAX's registry."""
    children, aux = jtu.default_registry.flatten_one_level(obj)
    return tuple(children), aux


def maker_of(cls: type, aux: Any, num_children: int) -> Callable[[tuple[Any, ...]], Any]:
    """Makes a function to put an instance together from its children alone: children → instance.

    Args:
        cls: a namedtuple, or a class in JAX's registry.
        aux: the auxiliary data of all instances.
        num_children: how many children each instance has.
    """
    return maker_of_namedtuple(cls) if is_namedtuple(cls) else unflatten_of(cls, aux, num_children)


# --- namedtuples ------------------------------------------------------------------------------------------------------


def is_namedtuple(cls: type) -> bool:
    """Returns True if a class is a namedtuple, by the same test as JAX's."""
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
        roles=role_by_library(cls),
    )


def take_namedtuple_apart(obj: Any) -> tuple[Sequence[Any], Any]:
    """Returns the items of a namedtuple as its children, and None as its auxiliary data. Runs no code of the class."""
    return tuple.__getitem__(obj, slice(None)), None


def maker_of_namedtuple(cls: Any) -> Callable[[Sequence[Any]], Any]:
    """Makes a function that makes instances of a namedtuple: items → instance."""
    # The `__new__` that `collections.namedtuple` generates only calls `tuple.__new__`, which its global `_tuple_new`
    # holds. To call `tuple.__new__` directly is faster. It does the same if the class has neither a `__new__`, an
    # `__init__` nor a metaclass of its own.
    tuple_new: Any = getattr(cls.__new__, "__globals__", {}).get("_tuple_new")
    if type(cls) is type and tuple_new is tuple.__new__ and cls.__init__ is object.__init__:
        return functools.partial(tuple_new, cls)
    return lambda children: cls(*children)


# --- keys of dictionaries and other nodes -----------------------------------------------------------------------------


def has_unsortable_keys(node_type: NodeType, aux: Any) -> bool:
    """Returns True if a node is a dictionary that JAX refuses, because its keys cannot be sorted.

    Args:
        node_type: the node type of the node.
        aux: the auxiliary data of the node. For a dictionary it has the keys.
    """
    if node_type.cls not in (dict, collections.defaultdict):
        return False
    # The auxiliary data of a `defaultdict` is its factory and the keys.
    keys = aux if node_type.cls is dict else aux[1]
    # Most dictionaries have texts for keys. Texts can be sorted, so there is no need to sort them.
    if all(type(key) is str for key in keys):
        return False
    try:
        sorted(keys)
    except TypeError:
        return True
    return False


def name_in(key: Any) -> Any:
    """Returns the name of a child, from its key entry of JAX.

        GetAttrKey("weight")     "weight"
        DictKey(7)               7              the key itself, which may be of any type
        SequenceKey(0)           "0"
        FlattenedIndexKey(0)     "0"            for a class that was registered without keys

    For a class's own kind of entry, returns its text in a path.
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

    Keys that cannot be sorted stay in the order of the dictionary. The walk accepts such a dictionary in modules only.
    Outside modules, JAX raises its own error for it (see `has_unsortable_keys`).
    """
    try:
        return tuple(sorted(mapping))
    except TypeError:
        return tuple(mapping)


def _take_apart_dict(obj: dict[Any, Any]) -> tuple[Sequence[Any], Any]:
    """Returns the values of a dictionary as its children, in the order of the sorted keys, and the keys."""
    names = _sorted_keys(obj)
    return [obj[name] for name in names], names


def _sequence_keys(obj: Any) -> KeyEntries:
    """Returns one key entry for each item of a sequence: its index."""
    return tuple([jtu.SequenceKey(i) for i in range(len(obj))])


def _dict_keys(obj: dict[Any, Any]) -> KeyEntries:
    """Returns one key entry for each value of a dictionary, in the order of `_take_apart_dict`."""
    return tuple([jtu.DictKey(name) for name in _sorted_keys(obj)])


# --- the plain containers ---------------------------------------------------------------------------------------------


def _plain_type(
    cls: type,
    take_apart: Callable[[Any], tuple[Sequence[Any], Any]],
    put_together: Callable[[Any, Sequence[Any]], Any],
    keys_of: Callable[[Any], KeyEntries],
    *,
    is_mutable: bool,
) -> NodeType:
    """Makes the node type of a plain container. The parameters are fields of `NodeType`."""
    return NodeType(
        cls,
        is_plain=True,
        is_mutable=is_mutable,
        convention=None,
        take_apart=take_apart,
        put_together=put_together,
        keys_of=keys_of,
    )


PLAIN: dict[type, NodeType] = {
    type(None): _plain_type(type(None), lambda _: ((), None), lambda *_: None, lambda _: (), is_mutable=False),
    tuple: _plain_type(tuple, lambda x: (x, None), lambda _, xs: tuple(xs), _sequence_keys, is_mutable=False),
    list: _plain_type(list, lambda x: (tuple(x), None), lambda _, xs: list(xs), _sequence_keys, is_mutable=True),
    dict: _plain_type(
        dict,
        _take_apart_dict,
        lambda names, xs: dict(zip(names, xs, strict=True)),
        _dict_keys,
        is_mutable=True,
    ),
    collections.OrderedDict: _plain_type(
        collections.OrderedDict,
        lambda x: (tuple(x.values()), tuple(x)),
        lambda names, xs: collections.OrderedDict(zip(names, xs, strict=True)),
        lambda x: tuple([jtu.DictKey(name) for name in x]),
        is_mutable=True,
    ),
    collections.defaultdict: _plain_type(
        collections.defaultdict,
        lambda x: (_take_apart_dict(x)[0], (x.default_factory, _sorted_keys(x))),
        lambda aux, xs: collections.defaultdict(aux[0], zip(aux[1], xs, strict=True)),
        _dict_keys,
        is_mutable=True,
    ),
    collections.deque: _plain_type(
        collections.deque,
        lambda x: (tuple(x), x.maxlen),
        lambda maxlen, xs: collections.deque(xs, maxlen),
        _sequence_keys,
        is_mutable=True,
    ),
    # The arguments of a call, which are the root of its tree.
    Arguments: _plain_type(Arguments, Arguments.parts, Arguments.of_parts, Arguments.keys, is_mutable=False),
}
"""Class → node type, for the plain containers with a fixed class. Namedtuples are plain containers, too: see
`namedtuple_type`."""


# --- what libraries say of their classes ------------------------------------------------------------------------------


class NativeLayout(NamedTuple):
    """Directions for the native walk to read and make instances itself, without the functions in JAX's registry.

    For example, for a dataclass with the traced fields `w` and `b`, and the static field `name` between them:

        NativeLayout("DATACLASS", (("w", "name", "b"), bytes((0, 1, 0)), bytes((0, 0, 1)), ("w", "b"), ("name",)))

    Attributes:
        shape: the native walk's name for the way to read and make instances, such as `"FIELDS"`.
        fields: five entries: all names in order; for each name a byte, 1 if it is static; for each name a byte, its
            index among the traced or among the static names; the traced names; the static names. An entry that the
            shape does not need is empty.
        slots: the slots to write besides the instance's dictionary. Some shapes have names here, others descriptors.
        facts: anything else that the layout depends on. It serves only to compare two layouts of a class. If they
            differ, because a user has changed the class, the native walk leaves its instances to the registered
            functions from then on.
    """

    shape: str
    fields: tuple[Any, ...] = ((), b"", b"", (), ())
    slots: tuple[Any, ...] = ()
    facts: Any = None

    @property
    def native_arguments(self) -> tuple[Any, ...]:
        """The layout in the form that `new_kind` in `_native_walk.c` takes: its last arguments, from `order` on.

        - All names in order.
        - For each name, whether it is static.
        - For each name, its index among the traced or among the static names.
        - The traced names, and then the static names.
        - The number of traced names.
        - Whether the traced names are in the order of all names, and the static names, too.
        - The slots.
        """
        order, are_static, indices, traced, statics = self.fields
        traced_in_order = [name for name, is_static in zip(order, are_static, strict=True) if not is_static]
        statics_in_order = [name for name, is_static in zip(order, are_static, strict=True) if is_static]
        # `statics` may go on after the names in `order`, with attributes that are no fields.
        is_in_order = traced_in_order == [*traced] and statics_in_order == [*statics[: len(statics_in_order)]]
        return order, are_static, indices, (*traced, *statics), len(traced), is_in_order, self.slots


Trained = Literal["never", "if marked", "always", "if inexact"]
"""Which leaves below a child of a module train.

`"never"`: none. `"if marked"`: those that an inner module declares to be parameters. `"always"`: all. `"if inexact"`:
those with a floating-point or complex dtype.
"""


class PlainForm(NamedTuple):
    """Representation of an instance in a state: plain data.

    Attributes:
        kind: the kind of representation. `"dict"`: a dictionary, name → state of the child. `"list"`: a list of the
            states of the children. `"whole"`: the state of the one child.
        names: for `"dict"`, the name of each child. Otherwise empty.
        children: the children with a state, in order.
        statics: for `"dict"`, the static attributes by name. Otherwise empty.
        make: (new children, new static attributes) → a new instance.
        keys: for `"list"` or `"whole"`, the key entry of each child in paths. Otherwise empty.
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

`"module"`, `"dataclass"`, `"namedtuple"`: field by field. `"attributes"`: by all attributes of the instance, declared
or not. `"placeholder"`: without any content. `"enum"`: by the name of the member. `"registered"`: by the children and
the auxiliary data that the registered flatten function returns.
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
    """Functions that answer questions about names in files. The rules of a library get them from the writer.

    A file has functions and classes by name, as `module:qualname`.

    Attributes:
        why_nameless: object → the reason why a file cannot have it by name, for an error. None if it can.
        may_be_value: class → whether a file may have the class itself, by name, as a value.
    """

    why_nameless: Callable[[Any], str | None]
    may_be_value: Callable[[Any], bool]


def under_present_names(facts: Mapping[str, Any], new_names: Mapping[str, str | None]) -> dict[str, Any]:
    """Returns facts about attributes in a file, by the present names. Those about dropped attributes are left out.

    Args:
        facts: name of an attribute in the file → fact about it, such as its kind.
        new_names: as for `AttributeRules.finish_loaded`.
    """
    pairs = [(new_names.get(name, name), fact) for name, fact in facts.items()]
    return {name: fact for name, fact in pairs if name is not None}


class AttributeRules:
    """Rules for writing instances attribute by attribute. The base class has the rules for dataclasses.

    Attributes:
        is_open: True if classes need not declare their attributes. Then a file may have attributes that the class does
            not declare.
        own_entries: the names of attributes that the library adds to each instance for its bookkeeping, such as its
            metadata. A file has them, too, but no migration written by a user sees them.
        is_assigned: True if the attributes from a migration are set by `reassign`. Otherwise they are set in
            the same way as attributes of a file.
    """

    is_open: bool = False
    own_entries: frozenset[str] = frozenset()
    is_assigned: bool = False

    def declared_fields(self, cls: Any) -> tuple[str, ...]:
        """Returns the names of the declared attributes of a class: the traced ones, then the static ones.

        Each of the two groups is in the order of JAX's flatten function.
        """
        # `sorted` keeps the order of the fields within each group.
        declared = sorted(dataclass_fields(cls), key=lambda field: bool(field.metadata.get("static", False)))
        return tuple([field.name for field in declared])

    def may_have(self, cls: Any, name: str) -> bool | None:
        """Returns True if an undeclared attribute may have this name.

        None leaves the answer to Python: yes if an instance of the class can have such an attribute.
        """
        return None

    def may_stay_unset(self, cls: Any, name: str) -> bool:
        """Returns True if an instance may have no value for a declared field. By default, no."""
        return False

    def default_of(self, cls: Any, name: str) -> Callable[[], Any] | None:
        """Returns a function that makes the default value of a field. None if the field has no default.

        Asked if a file lacks the field, because it was written before the class had the field.
        """
        # The entries are a dictionary, which `dataclass_fields` is not. Nobody asks for the `ClassVar`s among them.
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
        """Returns the attributes of an instance as a file has them. By default, returns `attributes` unchanged.

        An override may leave attributes out, replace values, or change the order. In its result, too, the traced
        attributes come first.

        Args:
            obj: the instance.
            attributes: all of its attributes by name, the traced ones first.
            naming: tells which functions and classes a file can have by name.

        Raises:
            RefusalError: if the instance cannot be written. By default, never.
        """
        return attributes

    def static_attributes(self, aux: Any) -> dict[str, Any]:
        """Reads the static attributes by name from the auxiliary data returned by the flatten function."""
        return dict(aux)

    def finish_loaded(self, obj: Any, attributes: dict[str, Any], new_names: Mapping[str, str | None]) -> Any:
        """Checks and completes an instance, right after it was loaded. By default, returns it unchanged.

        Args:
            obj: the instance. Its attributes have the values from the file, under their present names.
            attributes: these attributes by name. It is the `__dict__` of the instance.
            new_names: name of an attribute in the file → its present name; None if the attribute is dropped. A name
                without an entry has not changed.

        Returns:
            The instance. Some classes allow only one object with equal content. Then the existing object is returned.

        Raises:
            FormatError: if the attributes do not fit together.
        """
        return obj

    def reassign(self, obj: Any, values: Mapping[str, Any]) -> None:
        """Replaces all attributes of an instance by `values`, as assignments would.

        Runs no code of the class, such as a `__setattr__`. Only called if `is_assigned` is true.
        """


class NamesInFiles(NamedTuple):
    """Allow-list of a library: what a file may name, as `module:qualname`.

    If a file names a function, the function gets into the model, and the model will call it. So functions are listed
    one by one, and only if they compute arrays from arrays. In some libraries, some classes evaluate or call their
    contents. There, classes are listed one by one, too. A listed name may be missing from the installed version.

    Each text is a table: a module and a colon, then the names in it.

    Attributes:
        packages: the top-level packages of the library.
        imported_from: the package to import in order to have `packages`, if it is not one of them.
        kinds: the kinds of classes that a file may name without an entry in this list (see `ClassKind`).
        has_methods: whether public methods of the library's modules may be named.
        only_names: whether a user who trusts the package allows no more than the names in this list.
        instances: classes with instances that a model or the state of a training may hold.
        classes: classes that may be named as values. They are no nodes.
        functions: functions that compute arrays from arrays and do nothing else, and a few objects that mark a choice.
        tokens: objects that mark a choice. Their classes have no name, so the objects are named instead.
        if_trusted: classes allowed only if the user trusts their package.
        state: classes of state, as opposed to parameters. A table of a file's contents tells state from parameters by
            these names, without importing a class.
        optimizer_state: classes of the state of an optimizer, for such tables, too.
        state_entry: the name of an attribute that files have for each instance: a dictionary, name of an attribute →
            `"state"` if it is state.
        kept_back: modules, with all modules below them, and names. Their classes may not be named unless they are
            listed above.
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
    optimizer_state: str = ""
    state_entry: str = ""
    kept_back: str = ""


# --- rows of libraries, and the questions to all of them --------------------------------------------------------------


def _no_answer(*_: Any) -> None:
    """Returns None. It stands in a row for a function that the library does not have."""


class Library(NamedTuple):
    """Row of one library: its answers about its classes.

    The functions may be called with any class or value. They return None for those of other libraries, and also if
    their own library has nothing to say about it.

    Attributes:
        name: the name known to users.
        node_type_of: class → its node type. None leaves it to JAX's registry.
        convention_of: class in JAX's registry → which leaves its instances trace. None stands for all that JAX can.
        native_layout_of: class → how the native walk reads its instances. None leaves it to the registered functions.
        introduce: prepares the native walk, its argument, for the library. Called before the first class of it comes.
        parts_of_frozen: static value declared immutable by the library → the values in it.
        marker: the class of the objects marking an attribute without a value. At most one library has one.
        frozen_mapping: class → the attribute with the dictionary of an instance, for a class of mappings that nobody
            changes, equal exactly if their dictionaries are. None for any other class.
        held_anyway: classes with instances that keep nothing alive that could otherwise die. So the table of structures
            may keep instances alive.
        writes_back: class in JAX's registry → True if the library writes a change that a function makes in an instance
            back into the caller's object. False if the change is lost, and nobody would miss it.
        role_of: class → the roles of the leaves below its instances, see `RolesBelow`.
        role_in_files: name of a class in a file → the role of all leaves below its instances. It need not know the
            names in `names.state` and `names.optimizer_state`.
        trained_below: (class, auxiliary data, number of children) → which leaves train below each child.
        argument_and_filter: value of `argnums` that is a filter of the library → (position of the argument, the filter
            as code).
        plain_form_of: (instance, node type) → its representation in a state. None stands for its children by key.
        kind_in_files: class → how its instances are written. None leaves it to the registered functions.
        attributes: the rules for writing instances attribute by attribute.
        fault_of_aux: (class, auxiliary data) → the reason why no file may contain an instance with this data.
        is_keyed_by_aux: class → True if its unflatten function makes a dict whose keys are the items of the auxiliary
            data. A file must not choose many keys with the same hash.
        has_arbitrary_attributes: class → True if reading an attribute of an instance may return anything that a file
            put there.
        compared_by_parts: classes whose `==` compares all attributes. Subclasses count if they inherit it.
        choices: base classes whose subclasses have no instances. Each subclass is itself a value for a file to name.
        names: the allow-list for files.
    """

    name: str
    node_type_of: Callable[[Any], NodeType | None] = _no_answer
    convention_of: Callable[[Any], Convention | None] = _no_answer
    native_layout_of: Callable[[Any], NativeLayout | None] = _no_answer
    introduce: Callable[[Any], None] = _no_answer
    parts_of_frozen: Callable[[Any], Iterable[Any] | None] = _no_answer
    marker: type | None = None
    frozen_mapping: Callable[[Any], str | None] = _no_answer
    held_anyway: tuple[type, ...] = ()
    writes_back: Callable[[Any], bool | None] = _no_answer
    role_of: Callable[[Any], RolesBelow | None] = _no_answer
    role_in_files: Callable[[str], Role | None] = _no_answer
    trained_below: Callable[[Any, Any, int], Sequence[Trained] | None] = _no_answer
    argument_and_filter: Callable[[Any], tuple[Any, str] | None] = _no_answer
    plain_form_of: Callable[[Any, NodeType], PlainForm | None] = _no_answer
    kind_in_files: Callable[[Any], ClassKind | None] = _no_answer
    attributes: AttributeRules = AttributeRules()
    fault_of_aux: Callable[[Any, Any], str | None] = _no_answer
    is_keyed_by_aux: Callable[[Any], bool | None] = _no_answer
    has_arbitrary_attributes: Callable[[Any], bool | None] = _no_answer
    compared_by_parts: tuple[type, ...] = ()
    choices: tuple[type, ...] = ()
    names: NamesInFiles = NamesInFiles()


LIBRARIES: list[Library] = []
"""All rows, in the order in which they are asked. The first answer other than None counts."""


def node_type_by_library(cls: Any) -> NodeType | None:
    """Asks the libraries for the node type of a class. Returns None if JAX's registry decides."""
    for library in LIBRARIES:
        node_type = library.node_type_of(cls)
        if node_type is not None:
            return node_type
    return None


def convention_by_library(cls: Any) -> Convention | None:
    """Asks the libraries which leaves the instances of a class trace. Returns None if no library has an answer."""
    for library in LIBRARIES:
        convention = library.convention_of(cls)
        if convention is not None:
            return convention
    return None


def writes_back_by_library(cls: Any) -> bool | None:
    """Asks the libraries what becomes of changes in an instance. Returns the value of `NodeType.writes_back`."""
    for library in LIBRARIES:
        writes_back = library.writes_back(cls)
        if writes_back is not None:
            return writes_back
    return None


def role_by_library(cls: Any) -> RolesBelow | None:
    """Asks the libraries for the roles of the leaves below the instances of a class.

    Returns None if no library has an answer.
    """
    for library in LIBRARIES:
        roles = library.role_of(cls)
        if roles is not None:
            return roles
    return None


def role_in_files(name: str) -> Role | None:
    """Asks the libraries for the role of all leaves below the instances of a class, by its name in a file.

    Returns None if no library has an answer.
    """
    for library in LIBRARIES:
        role = library.role_in_files(name)
        if role is not None:
            return role
    return None


def native_layout_of(cls: Any) -> tuple[Library, NativeLayout] | None:
    """Asks the libraries how the native walk reads the instances of a class.

    Returns the answering library and its answer. None if none does.
    """
    for library in LIBRARIES:
        layout = library.native_layout_of(cls)
        if layout is not None:
            return library, layout
    return None


def trained_below(cls: Any, aux: Any, num_children: int) -> Sequence[Trained]:
    """Asks the libraries which leaves train below each child of a module. If none has an answer, the inexact ones."""
    for library in LIBRARIES:
        trained = library.trained_below(cls, aux, num_children)
        if trained is not None:
            return trained
    return ["if inexact" for _ in range(num_children)]


def plain_form_of(obj: Any, node_type: NodeType) -> PlainForm | None:
    """Asks the libraries what represents a module in a state. Returns None if its children by key represent it."""
    for library in LIBRARIES:
        plain_form = library.plain_form_of(obj, node_type)
        if plain_form is not None:
            return plain_form
    return None


def argument_and_filter(argnums: Any) -> tuple[Any, str] | None:
    """Asks the libraries whether a value of `argnums` is a filter of theirs, such as `nnx.DiffState(0, nnx.Param)`.

    Returns:
        (The position of the argument, the filter as source text for messages), here `(0, "nnx.Param")`. None for any
        other value.
    """
    for library in LIBRARIES:
        answer = library.argument_and_filter(argnums)
        if answer is not None:
            return answer
    return None


def parts_of_frozen(value: Any) -> Iterable[Any] | None:
    """Returns the values in a static value, if a library declares the static value immutable ("frozen").

    Returns None if no library does.
    """
    for library in LIBRARIES:
        parts = library.parts_of_frozen(value)
        if parts is not None:
            return parts
    return None


def frozen_mapping(cls: Any) -> str | None:
    """Returns the attribute with the dictionary of a mapping, if a library declares its class immutable.

    Returns None for any other class.
    """
    for library in LIBRARIES:
        attribute = library.frozen_mapping(cls)
        if attribute is not None:
            return attribute
    return None


def library_in_files(cls: Any) -> tuple[Library, ClassKind] | None:
    """Asks the libraries how the instances of a class are written into a file.

    Returns the answering library and its answer. None if the registered functions decide.
    """
    for library in LIBRARIES:
        kind = library.kind_in_files(cls)
        if kind is not None:
            return library, kind
    return None


def fault_of_aux(cls: Any, aux: Any) -> str | None:
    """Asks the libraries why no file may contain an instance of a class with this auxiliary data.

    Returns None if a file may. The reader refuses a file for which there is a reason. The writer asks, too, to write
    no file that nobody could read.
    """
    for library in LIBRARIES:
        fault = library.fault_of_aux(cls, aux)
        if fault is not None:
            return fault
    return None


def is_keyed_by_aux(cls: Any) -> bool:
    """Returns True if the unflatten function of a class makes a dict whose keys are the items of the auxiliary data."""
    return any(library.is_keyed_by_aux(cls) for library in LIBRARIES)


def is_choice(cls: Any) -> bool:
    """Returns True if a class itself is a value that a file may name. Such a class has no instances (`choices`)."""
    return any(issubclass(cls, library.choices) for library in LIBRARIES)


# --- questions for each value -----------------------------------------------------------------------------------------

# These questions come for each attribute of each instance. So the answers of all rows are collected once, on first use,
# when all rows are there.


@functools.cache
def markers() -> frozenset[type]:
    """Returns the classes of objects marking an attribute without a value: the `marker` of each library."""
    return frozenset([library.marker for library in LIBRARIES if library.marker is not None])


def without_missing(attributes: dict[str, Any]) -> dict[str, Any]:
    """Removes the attributes with a mark in place of a value. If none has, returns the same dictionary."""
    if markers().isdisjoint(map(type, attributes.values())):
        return attributes
    return {name: value for name, value in attributes.items() if type(value) not in markers()}


def compares_by_parts(cls: Any) -> bool:
    """Returns True if a library says that two instances of a class are equal exactly if all of their attributes are."""
    for base in _compared_by_parts():  # noqa: SIM110 -- a generator takes longer
        if issubclass(cls, base) and cls.__eq__ is base.__eq__:
            return True
    return False


@functools.cache
def _compared_by_parts() -> tuple[type, ...]:
    """Returns the classes in `compared_by_parts` of all libraries."""
    return tuple([cls for library in LIBRARIES for cls in library.compared_by_parts])
