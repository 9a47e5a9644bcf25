"""What a node type is, and those of the plain containers: how they come apart and are put together again."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jax import tree_util as jtu

from ._call_arguments import Arguments

Convention = Literal["equinox", "jax", "variable"]
"""Which leaves are traced: arrays only (Equinox's filter transforms), or whatever `jax.jit` accepts. In a `"variable"`
it is as under JAX's, and an array directly in it is a value, however many variables hold it."""


Inherited = Convention | Literal["outside", "any"]
"""What holds around a leaf. Outside modules every leaf is the transform's, to trace or to refuse, and nothing there is
an object; but below mutable containers that carry identity arrays are, which is called `"any"`."""


KeyEntries = tuple[Any, ...]


Role = Literal["parameter", "unsaid", "state"]
"""What a leaf is to an optimizer, as its library says: trained; trained, although nobody says so; or left alone."""

RolesBelow = Role | Callable[[Any], Sequence[Role | None] | None]
"""The role of all leaves below an instance; or, of its auxiliary data, that of each child, None if nothing is said."""


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
        writes_back: whether the library of the class writes what a function changes back into the caller's objects;
            False if what is in its instances is never missed; None if nothing is said.
        roles: what the leaves below an instance are to an optimizer; None if nothing is said of any.
        fields: for classes that are read field by field, the names of all fields; their auxiliary data is (names of
            the traced fields that are there, pairs of names and values of the static ones).
        names_children: Whether an instance may call its children other than its class and its auxiliary data say.
    """

    cls: type
    is_plain: bool
    is_mutable: bool
    convention: Convention | None
    take_apart: Callable[[Any], tuple[Sequence[Any], Any]]
    put_together: Callable[[Any, Sequence[Any]], Any]
    keys_of: Callable[[Any], KeyEntries]
    fields: tuple[str, ...] = ()
    names_children: bool = False
    writes_back: bool | None = None
    roles: RolesBelow | None = None

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


def is_namedtuple(cls: type) -> bool:
    """Whether a class is a namedtuple, which JAX knows by its fields."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def take_namedtuple_apart(obj: Any) -> tuple[Sequence[Any], Any]:
    """The fields of an instance of any of these classes, and no auxiliary data."""
    return tuple.__getitem__(obj, slice(None)), None


def maker_of_namedtuple(cls: Any) -> Callable[[Sequence[Any]], Any]:
    """What makes a namedtuple of its items: past Python where nobody would see the difference."""
    own: Any = getattr(cls.__new__, "__globals__", {}).get("_tuple_new")
    if type(cls) is type and own is tuple.__new__ and cls.__init__ is object.__init__:
        return functools.partial(own, cls)  # which is all that a `__new__` of `collections.namedtuple` does
    return lambda children: cls(*children)


def namedtuple_type(cls: Any) -> NodeType:
    """How the instances of a namedtuple come apart."""
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


def name_in(key: Any) -> Any:
    """What a key entry leads to a child by: a name, the key of a dictionary, or an index as a text."""
    if isinstance(key, jtu.GetAttrKey):
        return key.name
    if isinstance(key, jtu.DictKey):
        return key.key
    if isinstance(key, jtu.SequenceKey):
        return str(key.idx)
    return str(key.key) if isinstance(key, jtu.FlattenedIndexKey) else jtu.keystr((key,))


def _sorted_keys(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    """In JAX's order. Keys that cannot be ordered keep their own; outside modules JAX then raises its own error."""
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


def _plain(
    cls: type,
    take_apart: Callable[[Any], tuple[Sequence[Any], Any]],
    put_together: Callable[[Any, Sequence[Any]], Any],
    keys_of: Callable[[Any], KeyEntries],
    *,
    is_mutable: bool,
) -> NodeType:
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
