"""How each kind of node comes apart and is put together again, and which of its leaves it traces.

Three kinds are known: the plain containers; Equinox modules, read field by field; and every other class in JAX's
registry, through the flatten function that its author registered. `register_node` adds a fourth: classes that JAX
does not know.
"""

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from ._arguments import Arguments
from ._equinox_internals import without_missing
from ._jax_internals import TYPED_NUMBERS, rebuild_registered, unflatten_of
from .errors import UnregisteredTypeError

Convention = Literal["equinox", "jax"]
"""Which leaves are traced: arrays only (Equinox's filter transforms), or whatever `jax.jit` accepts."""

Inherited = Convention | Literal["outside", "any", "variable"]
"""What holds around a leaf. Outside modules every leaf is the transform's, to trace or to refuse, and nothing there is
an object; but below mutable containers that carry identity arrays are, which is called `"any"`. In a variable of NNX it
is as under JAX's, and an array directly in it is a value, however many variables hold it."""

Keys = tuple[Any, ...]


class NodeType(NamedTuple):
    """How the instances of one class come apart and are put together.

    Attributes:
        cls: the class.
        is_plain: a plain container, which outside modules is a value and not an object.
        is_mutable: a plain container that can be mutated, and so carries identity inside modules.
        convention: which leaves it traces; None inherits that of the enclosing module.
        take_apart: instance → (children, auxiliary data).
        put_together: (auxiliary data, children) → a new instance.
        keys_of: instance → one key entry a child, as in JAX's key paths.
        fields: for classes that are read field by field, the names of all fields; their auxiliary data is (names of
            the traced fields that are there, pairs of names and values of the static ones).
    """

    cls: type
    is_plain: bool
    is_mutable: bool
    convention: Convention | Literal["variable"] | None
    take_apart: Callable[[Any], tuple[Sequence[Any], Any]]
    put_together: Callable[[Any, Sequence[Any]], Any]
    keys_of: Callable[[Any], Keys]
    fields: tuple[str, ...] = ()

    @property
    def carries_identity(self) -> bool:
        """Whether two occurrences inside a module are a tie."""
        return self.is_mutable or not self.is_plain

    @property
    def is_known_to_jax(self) -> bool:
        """Whether JAX takes the instances apart, too; those of `register_node` are packed before it sees them."""
        return self.cls is not collections.deque

    def inherits(self, outer: Inherited, *, containers: bool = False) -> Inherited:
        """The convention for the leaves below an instance.

        Args:
            outer: the one that holds around it.
            containers: whether mutable containers carry identity outside modules.
        """
        if self.convention is not None:
            return self.convention
        if outer == "variable" or (outer in ("outside", "any") and not self.is_plain):
            return "jax"
        return "any" if outer == "outside" and containers and self.is_mutable else outer


def node_type_of(obj: Any) -> NodeType | None:
    """The node type of an object's class; None if the object is a leaf. Cost: a dictionary look-up."""
    cls: type = type(obj)
    plain = _PLAIN.get(cls)
    if plain is not None:
        return plain
    if cls in _COMMON_LEAVES:
        return None
    known = _known.get(cls)
    if known is not None:
        return known
    found = _find(cls, obj)
    return None if found is None else _kept(found)


def _kept(node_type: NodeType) -> NodeType:
    """The one that is known from now on. What JAX's registry holds lives for ever, but a namedtuple is in none."""
    if node_type.is_plain:
        return node_type
    # Of several threads that find it at once, one is right for all.
    return _known.setdefault(node_type.cls, node_type)


def node_type_of_class(cls: type) -> NodeType:
    """The node type of a class of which there is no instance yet.

    Raises:
        UnregisteredTypeError: if it is none that JAX or sharedtree know.
    """
    known = _PLAIN.get(cls) or _known.get(cls)
    if known is None:
        if is_namedtuple(cls):
            known = _find(cls, tuple.__new__(cls, [None] * len(getattr(cls, "_fields", ()))))
        elif issubclass(cls, eqx.Module):
            known = _equinox_type(cls)
        elif _is_in_jax_registry(cls):
            known = _registered_type(cls)
    if known is None:
        name = cls.__qualname__
        raise UnregisteredTypeError(
            f"`{name}` was a pytree node where this was pickled, but it is not registered here. Import the module that "
            f"registers it first, or register it:\n    jax.tree_util.register_pytree_node({name}, flatten, unflatten)",
            ("",),
        )
    return known if cls in _PLAIN else _kept(known)


def is_module(obj: Any) -> bool:
    """Whether an object carries identity wherever it is."""
    node_type = node_type_of(obj)
    return node_type is not None and not node_type.is_plain


def carries_identity(leaf: Any) -> bool:
    """Whether a traced leaf is an object, two occurrences of which are a tie, rather than a value."""
    return isinstance(leaf, _WITH_IDENTITY)


def is_value_of_variable(obj: Any) -> bool:
    """Whether what is directly in a variable of NNX is its value, and not an object that it refers to."""
    if node_type_of(obj) is not None or isinstance(obj, jax.Ref):
        return False
    return carries_identity(obj) and is_traced(obj, "variable")


def is_traced(leaf: Any, convention: Inherited) -> bool:
    """Whether a leaf becomes an input of the computation under the convention of its module."""
    if convention in ("outside", "any"):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return convention == "equinox" or _is_numeric(leaf.dtype)
    if isinstance(leaf, _WITH_IDENTITY):
        return True
    return convention != "equinox" and (type(leaf) in TRACED_NUMBERS or hasattr(type(leaf), "__jax_array__"))


def register_node(
    cls: type,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    *,
    keys: Callable[[Any], Iterable[Any]] | None = None,
    convention: Convention = "jax",
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
    if cls in _PLAIN or cls in _known or _is_in_jax_registry(cls):
        raise ValueError(
            f"`{cls.__qualname__}` is already a registered node. Leave out the call of `register_node`: "
            "sharedtree reads JAX's registry."
        )

    def take_apart(obj: Any) -> tuple[Sequence[Any], Any]:
        children, aux = flatten(obj)
        return tuple(children), aux

    def keys_of(obj: Any) -> Keys:
        if keys is not None:
            return tuple(keys(obj))
        return tuple([jtu.SequenceKey(i) for i in range(len(take_apart(obj)[0]))])

    _known[cls] = NodeType(cls, False, False, convention, take_apart, unflatten, keys_of)
    for tell in when_registered:
        tell()


def is_namedtuple(cls: type) -> bool:
    """Whether a class is a namedtuple, which JAX knows by its fields."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def require_registered(tree: Any) -> None:
    """Raises if `tree` as a whole is an object that holds attributes but cannot be taken apart.

    Raises:
        UnregisteredTypeError: naming the class and the registrations that would mend it.
    """
    if node_type_of(tree) is not None or is_traced(tree, "jax") or callable(tree):
        return
    if not hasattr(tree, "__dict__") or isinstance(tree, type):
        return
    name = type(tree).__name__
    raise UnregisteredTypeError(
        f"`{name}` is not a registered pytree node, so nothing inside it can be seen.\n"
        "Register the class with JAX:\n"
        f"    jax.tree_util.register_pytree_node({name}, flatten, unflatten)\n"
        "or, to keep it a leaf for JAX, with sharedtree only:\n"
        f"    sharedtree.register_node({name}, flatten, unflatten)",
        ("",),
    )


# --- the three kinds ---------------------------------------------------------------------------------------------

when_registered: list[Callable[[], None]] = []
"""Told when a class is registered that JAX does not know."""

_known: dict[type, NodeType] = {}  # filled once a class, by a single assignment, which threads cannot tear

PYTHON_NUMBERS = frozenset({bool, int, float, complex})

TRACED_NUMBERS = PYTHON_NUMBERS | TYPED_NUMBERS
"""Those that JAX gives to rules in their place, too."""

NUMPY_NUMBERS: tuple[type, ...] = tuple(
    {np.dtype(code).type for code in "?bhilqBHILQefdFD"}
    | {np.dtype(getattr(jnp, name)).type for name in dir(jnp) if name.startswith(("bfloat", "float8", "int4", "uint4"))}
)
"""Whose dtypes JAX traces; each has one object for its dtype."""

_COMMON_LEAVES = TRACED_NUMBERS | {str, bytes, np.ndarray}
_WITH_IDENTITY = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, jax.Ref)


def _is_numeric(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


_DEFINED_IN_PYTHON = 1 << 9  # `Py_TPFLAGS_HEAPTYPE`, as `copyreg` asks for it


def built_in_base(cls: type) -> type:
    """The first of its bases that was not defined in Python, which determines how its instances are laid out."""
    return next(base for base in cls.__mro__ if not base.__flags__ & _DEFINED_IN_PYTHON)


def _is_in_jax_registry(cls: type) -> bool:
    if cls is jtu.Partial or is_namedtuple(cls):
        return True
    # NumPy warns if some of its scalars are made of nothing.
    if issubclass(cls, np.generic):
        return False
    built_in: Any = built_in_base(cls)
    try:
        blank = built_in.__new__(cls)
    except TypeError:  # of a layout that only its own constructor can make; JAX knows those in `_PLAIN`
        return False
    return not jtu.all_leaves([blank])


def _find(cls: type, obj: Any) -> NodeType | None:
    if issubclass(cls, eqx.Module):
        return _equinox_type(cls)
    flat = jtu.default_registry.flatten_one_level(obj)
    if flat is None:
        return None
    if is_namedtuple(cls) and flat[1] is cls:  # not registered by its author for something else
        return _namedtuple_type(cls)
    return _registered_type(cls)


class AuxForm(NamedTuple):
    """Another form of what a class's own flatten has as auxiliary data.

    Attributes:
        seen: auxiliary data → what stands for it in a structure, where it is compared by type and value.
        given: the inverse, for the class's own unflatten.
    """

    seen: Callable[[Any], Any]
    given: Callable[[Any], Any]


AUX_FORMS: dict[type, AuxForm] = {}
"""Base class → the form for its classes. Empty unless `sharedtree.compat` has imported treeo."""


def _registered_type(cls: type) -> NodeType:
    form = next((form for base, form in AUX_FORMS.items() if issubclass(cls, base)), None)

    def take_apart_in_form(obj: Any) -> tuple[Sequence[Any], Any]:
        children, aux = jtu.default_registry.flatten_one_level(obj)
        assert form is not None
        return tuple(children), form.seen(aux)

    def put_together(aux: Any, children: Sequence[Any]) -> Any:
        return rebuild_registered(cls, aux if form is None else form.given(aux), children)

    return NodeType(
        cls,
        is_plain=False,
        is_mutable=False,
        convention=_convention_of(cls),
        take_apart=_take_apart_registered if form is None else take_apart_in_form,
        put_together=put_together,
        keys_of=lambda obj: tuple(key for key, _ in jtu.default_registry.flatten_one_level_with_keys(obj)[0]),
    )


def is_registered(node_type: NodeType) -> bool:
    """Whether JAX's registry takes its instances apart."""
    return node_type.take_apart is _take_apart_registered


def _take_apart_registered(obj: Any) -> tuple[Sequence[Any], Any]:
    children, aux = jtu.default_registry.flatten_one_level(obj)
    return tuple(children), aux


def _convention_of(cls: type) -> Convention | Literal["variable"] | None:
    if issubclass(cls, jtu.Partial):
        return None
    if _is_class_of_variables(cls):
        return "variable"
    return "equinox" if cls.__module__.partition(".")[0] == "equinox" else "jax"


def _is_class_of_variables(cls: type) -> bool:
    """Whether its instances are variables of NNX. Flax is not imported."""
    variable = getattr(sys.modules.get("flax.nnx.variablelib"), "Variable", None)
    return variable is not None and issubclass(cls, variable)


def take_namedtuple_apart(obj: Any) -> tuple[Sequence[Any], Any]:
    """The fields of an instance of any of these classes, and no auxiliary data."""
    return tuple.__getitem__(obj, slice(None)), None


def maker_of(cls: type, aux: Any, num_children: int) -> Callable[[tuple[Any, ...]], Any]:
    """What puts instances of a class in JAX's registry together, as a function of the children alone."""
    return _maker_of_namedtuple(cls) if is_namedtuple(cls) else unflatten_of(cls, aux, num_children)


def _maker_of_namedtuple(cls: Any) -> Callable[[Sequence[Any]], Any]:
    own: Any = getattr(cls.__new__, "__globals__", {}).get("_tuple_new")
    if type(cls) is type and own is tuple.__new__ and cls.__init__ is object.__init__:
        return functools.partial(own, cls)  # which is all that a `__new__` of `collections.namedtuple` does
    return lambda children: cls(*children)


def _namedtuple_type(cls: Any) -> NodeType:
    make = _maker_of_namedtuple(cls)
    return NodeType(
        cls,
        is_plain=True,
        is_mutable=False,
        convention=None,
        take_apart=take_namedtuple_apart,
        put_together=lambda _, children: make(children),
        keys_of=lambda _: tuple(jtu.GetAttrKey(name) for name in cls._fields),
    )


_WRAPPER_FIELDS = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def _equinox_type(cls: Any) -> NodeType:
    """Fields may be missing: deleted, or never set. `module_update_wrapper` adds a few that no field declares."""
    fields = dataclasses.fields(cls)
    traced = tuple(f.name for f in fields if not f.metadata.get("static", False))
    static = tuple(f.name for f in fields if f.metadata.get("static", False)) + _WRAPPER_FIELDS
    attributes_of = dict_descriptor(cls).__get__

    def take_apart(obj: Any) -> tuple[Sequence[Any], Any]:
        attributes = without_missing(attributes_of(obj))
        names = tuple([name for name in traced if name in attributes])
        rest = tuple([(name, attributes[name]) for name in static if name in attributes])
        return [attributes[name] for name in names], (names, rest)

    def put_together(aux: Any, children: Sequence[Any]) -> Any:
        names, rest = aux
        obj = object.__new__(cls)
        attributes = attributes_of(obj)
        attributes.update(zip(names, children, strict=True))
        attributes.update(rest)
        return obj

    def keys_of(obj: Any) -> Keys:
        attributes = without_missing(attributes_of(obj))
        return tuple([jtu.GetAttrKey(name) for name in traced if name in attributes])

    return NodeType(cls, False, False, "equinox", take_apart, put_together, keys_of, traced + static)


def dict_descriptor(cls: type) -> Any:
    """Reads and sets `obj.__dict__` past the class's own methods, which on Equinox modules cost four times more."""
    for base in cls.__mro__:
        descriptor = base.__dict__.get("__dict__")
        if descriptor is not None:
            return descriptor
    raise TypeError(f"`{cls.__qualname__}` has no `__dict__`; Equinox modules must have one.")


def _sorted_keys(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    """In JAX's order. Keys that cannot be ordered keep their own; outside modules JAX then raises its own error."""
    try:
        return tuple(sorted(mapping))
    except TypeError:
        return tuple(mapping)


def has_unordered_keys(node_type: NodeType, aux: Any) -> bool:
    """Whether an instance with this auxiliary data is a dictionary that JAX refuses, because its keys have no order."""
    if node_type.cls not in (dict, collections.defaultdict):
        return False
    names = aux if node_type.cls is dict else aux[1]
    if all(type(name) is str for name in names):
        return False
    try:
        sorted(names)
    except TypeError:
        return True
    return False


def _take_apart_dict(obj: dict[Any, Any]) -> tuple[Sequence[Any], Any]:
    names = _sorted_keys(obj)
    return [obj[name] for name in names], names


def _sequence_keys(obj: Any) -> Keys:
    return tuple([jtu.SequenceKey(i) for i in range(len(obj))])


def _plain(
    cls: type,
    take_apart: Callable[[Any], tuple[Sequence[Any], Any]],
    put_together: Callable[[Any, Sequence[Any]], Any],
    keys_of: Callable[[Any], Keys],
    *,
    is_mutable: bool,
) -> NodeType:
    return NodeType(cls, True, is_mutable, None, take_apart, put_together, keys_of)


def _dict_keys(obj: dict[Any, Any]) -> Keys:
    return tuple([dict_key(name) for name in _sorted_keys(obj)])


def dict_key(name: Any) -> Any:
    """The key entry for a key of a dictionary."""
    return jtu.DictKey("None" if name is None else name)  # JAX 0.8 refuses None


_PLAIN: dict[type, NodeType] = {
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
        lambda x: tuple([dict_key(name) for name in x]),
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
