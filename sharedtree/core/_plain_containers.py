"""Node types: how the instances of one class come apart and are put together. Those of the plain containers.

{"b": w, "a": v}      children [v, w]     auxiliary data ("a", "b")     keys DictKey("a"), DictKey("b")
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from jax import tree_util as jtu

from ._call_arguments import Arguments

Convention = Literal["equinox", "jax", "variable"]
"""Which leaves of a module are traced.

`"equinox"`: arrays only, as in Equinox's filter transforms. `"jax"`: whatever `jax.jit` accepts. `"variable"`: like
`"jax"`, but an array directly in the module is a value, however many variables hold it.
"""


Inherited = Convention | Literal["outside", "any"]
"""The convention at some place in a tree: that of the nearest module, or that there is none.

`"outside"`: outside modules every leaf is the transform's, to trace or to refuse, and no object carries identity.
`"any"`: the same below a mutable container that carries identity by a policy, where arrays carry identity, too.
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
        is_plain: a plain container, which outside modules is a value and not an object.
        is_mutable: a plain container that can be mutated, and so carries identity inside modules.
        convention: which leaves it traces; None inherits that of the enclosing module.
        take_apart: instance → (children, auxiliary data).
        put_together: (auxiliary data, children) → a new instance.
        keys_of: instance → one key entry a child, as in JAX's key paths.
        fields: the names of all fields, for a class that is read field by field. Its auxiliary data is then (names of
            the traced fields that are set, pairs of names and values of the static ones).
        names_children: whether the keys may depend on the instance, and not on class and auxiliary data alone.
        writes_back: whether the library of the class writes changes of an instance back into the caller's. False if
            nobody would miss a change. None if no library says.
        roles: the roles of the leaves below an instance; None if no library says.
        is_view: whether an instance stands for a function of its leaves, which are also elsewhere. A path through one
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
    names_children: bool = False
    writes_back: bool | None = None
    roles: RolesBelow | None = None
    is_view: bool = False

    @property
    def carries_identity(self) -> bool:
        """Whether two occurrences inside a module are a tie."""
        return self.is_mutable or not self.is_plain

    @property
    def is_known_to_jax(self) -> bool:
        """Whether JAX takes a plain container of this class apart, too.

        The classes of `register_node` count as known: sharedtree packs their instances before JAX sees them.
        """
        return self.cls is not collections.deque

    def inherits(self, outer: Inherited, *, containers: bool = False) -> Inherited:
        """Computes the convention for the leaves below an instance.

        Args:
            outer: the convention around it.
            containers: whether mutable containers carry identity outside modules.
        """
        if self.convention is not None:
            return self.convention
        # A variable's convention is only for what is directly in it. A `Partial` has no convention, and outside modules
        # it has none to inherit.
        if outer == "variable" or (outer in ("outside", "any") and not self.is_plain):
            return "jax"
        return "any" if outer == "outside" and containers and self.is_mutable else outer


# --- namedtuples ------------------------------------------------------------------------------------------------------


def is_namedtuple(cls: type) -> bool:
    """Tells whether a class is a namedtuple, by the test that JAX has."""
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
    """The items of an instance of any namedtuple, and no auxiliary data. Runs none of the class's code."""
    return tuple.__getitem__(obj, slice(None)), None


def maker_of_namedtuple(cls: Any) -> Callable[[Sequence[Any]], Any]:
    """Makes a function that makes a namedtuple of its items."""
    # The `__new__` that `collections.namedtuple` writes only calls `tuple.__new__`. If the class has that one, and has
    # neither an `__init__` nor a metaclass that would notice, `tuple.__new__` is called from C, past Python.
    tuple_new: Any = getattr(cls.__new__, "__globals__", {}).get("_tuple_new")
    if type(cls) is type and tuple_new is tuple.__new__ and cls.__init__ is object.__init__:
        return functools.partial(tuple_new, cls)
    return lambda children: cls(*children)


# --- keys -------------------------------------------------------------------------------------------------------------


def has_unordered_keys(node_type: NodeType, aux: Any) -> bool:
    """Tells whether a node is a dictionary that JAX refuses, because its keys cannot be sorted.

    Args:
        node_type: the node type.
        aux: its auxiliary data.
    """
    if node_type.cls not in (dict, collections.defaultdict):
        return False
    names = aux if node_type.cls is dict else aux[1]
    # Most dictionaries have texts for keys, and are not sorted again.
    if all(type(name) is str for name in names):
        return False
    try:
        sorted(names)
    except TypeError:
        return True
    return False


def name_in(key: Any) -> Any:
    """Reads a child's name from its key entry: an attribute name, the key of a dictionary, or an index as a text."""
    if isinstance(key, jtu.GetAttrKey):
        return key.name
    if isinstance(key, jtu.DictKey):
        return key.key
    if isinstance(key, jtu.SequenceKey):
        return str(key.idx)
    return str(key.key) if isinstance(key, jtu.FlattenedIndexKey) else jtu.keystr((key,))


def _sorted_keys(mapping: dict[Any, Any]) -> tuple[Any, ...]:
    """Keys of a dictionary, sorted as JAX does.

    Keys that cannot be sorted stay in the dictionary's order. Outside modules the walk has JAX refuse these.
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
