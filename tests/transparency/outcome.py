"""What a call did, in a form that can be compared: the values it returned in every detail, or the error it raised.

Two calls are transparent to each other if their outcomes are equal. Warnings are errors here, so they count too.
"""

import collections
import dataclasses
import difflib
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Returned:
    """What came back: the tree without its leaves, and each leaf with its type, dtype, place and bytes."""

    treedef: Any
    leaves: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Raised:
    """An error. Equal if the type is the same and the message says much the same; paths and addresses may differ."""

    error: BaseException

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is Raised
            and type(self.error) is type(other.error)
            and similar(str(self.error), str(other.error))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Raised({type(self.error).__name__}: {str(self.error)[:600]!r})"


def similar(one: str, other: str) -> bool:
    """Whether two messages begin alike, up to paths, numbers and addresses."""
    a, b = (_stem(text) for text in (one, other))
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio() > 0.6


def _stem(message: str) -> list[str]:
    return re.findall(r"[A-Za-z_]+", re.sub(r"0x[0-9a-f]+", "", message.strip().partition("\n")[0]))[:60]


def outcome(call: Callable[[], Any]) -> Returned | Raised:
    """Calls and records."""
    try:
        result = call()
    except Exception as error:  # whatever it is, the other side has to raise it too
        return Raised(error)
    leaves, treedef = jax.tree.flatten(result)
    return Returned(treedef, [seen(leaf) for leaf in leaves])


def differing(cases: dict[str, Any], theirs: Callable[[Any], Any], ours: Callable[[Any], Any]) -> dict[str, str]:
    """What differs, by the names of the cases. All go through one call, and through one each if that one differs.

    A program with all cases in it costs little more than one with one of them. The call of all has to work.
    """
    want, found = outcome(lambda: theirs(cases)), outcome(lambda: ours(cases))
    if type(want) is Returned and want == found:
        return {}
    return differing_alone(cases, theirs, ours) or {"all together": _both(want, found)}


def differing_alone(cases: dict[str, Any], theirs: Callable[[Any], Any], ours: Callable[[Any], Any]) -> dict[str, str]:
    """What differs, by the names of the cases, each of which goes through a call of its own, wrong ones too."""
    found = {}
    for name, case in cases.items():
        outcomes = outcome(lambda: theirs({name: case})), outcome(lambda: ours({name: case}))
        if outcomes[0] != outcomes[1]:
            found[name] = _both(*outcomes)
    return found


def _both(want: Any, found: Any) -> str:
    return f"expected {want}\nfound {found}"


def seen(leaf: Any) -> Any:
    """Everything about a leaf that a user could see."""
    if isinstance(leaf, jax.core.Tracer):
        raise AssertionError("a tracer came out of a transform")
    if isinstance(leaf, jax.Array):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        place = (leaf.committed, leaf.sharding)
        weak = False if is_key else leaf.weak_type
        return "jax.Array", str(leaf.dtype), leaf.shape, weak, place, data.tobytes()
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "struct", str(leaf.dtype), leaf.shape, leaf.weak_type, leaf.sharding
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):  # NumPy's, and the literals that some transforms return
        return type(leaf), str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    if isinstance(leaf, float | complex):
        return type(leaf), repr(leaf)
    return type(leaf), leaf


LEAVES: dict[str, Callable[[], Any]] = {
    "python float": lambda: 1.5,
    "python int": lambda: 3,
    "python bool": lambda: True,
    "python complex": lambda: 1.0 + 2.0j,
    "string": lambda: "text",
    "function": lambda: jnp.tanh,
    "float array": lambda: jnp.array([1.0, 2.0, 3.0]),
    "float scalar": lambda: jnp.array(2.0, jnp.float32),
    "int array": lambda: jnp.arange(3),
    "bool array": lambda: jnp.array([True, False, True]),
    "bf16": lambda: jnp.array([1.0, 2.0, 3.0], jnp.bfloat16),
    "complex": lambda: jnp.array([1.0 + 1.0j, 2.0, 3.0]),
    "weak scalar": lambda: jnp.asarray(1.5),
    "weak vector": lambda: jnp.broadcast_to(jnp.asarray(1.5), (3,)),
    "typed key": lambda: jax.random.key(1),
    "typed keys": lambda: jax.random.split(jax.random.key(1), 3),
    "raw key": lambda: jax.random.PRNGKey(1),
    "empty": lambda: jnp.zeros((3, 0)),
    "numpy array": lambda: np.array([1.0, 2.0, 3.0], np.float32),
    "numpy ints": lambda: np.arange(3, dtype=np.int32),
    "numpy float64": lambda: np.array([1.0, 2.0, 3.0]),
    "numpy scalar": lambda: np.float32(1.5),
    "numpy int scalar": lambda: np.int32(3),
    "numpy strings": lambda: np.array(["a", "b", "c"]),
}


def changed(leaf: Any) -> Any:
    """A leaf of the same dtype and another value; strings and functions stay."""
    dtype = getattr(leaf, "dtype", None)
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int | float | complex):
        return leaf + leaf
    if dtype is None:
        return leaf
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(leaf) + jnp.uint32(1))
    return jnp.logical_not(leaf) if dtype == np.bool_ else leaf + leaf


def loss_of(tree: Any) -> Any:
    """A number from whatever in a tree is real."""
    is_real = lambda x: isinstance(x, float) or jax.dtypes.issubdtype(getattr(x, "dtype", None), np.floating)
    return _sum_of_squares([leaf for leaf in jax.tree.leaves(tree) if is_real(leaf)])


@jax.jit
def _sum_of_squares(leaves: list[Any]) -> Any:
    return sum((jnp.sum(leaf * leaf).astype(jnp.float32) for leaf in leaves), start=jnp.zeros((), jnp.float32))


class Model(eqx.Module):
    """An Equinox module with a leaf in each kind of field."""

    leaf: Any
    inside: Any = None
    name: str = eqx.field(static=True, default="model")

    def __call__(self, x: Any) -> Any:
        return self.leaf * x


@jax.tree_util.register_pytree_node_class
class Registered:
    """A class that its author registered by hand."""

    def __init__(self, leaf: Any, name: str = "registered") -> None:
        self.leaf = leaf
        self.name = name

    def tree_flatten(self) -> Any:
        return (self.leaf,), self.name

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        obj = object.__new__(cls)
        (obj.leaf,) = children
        obj.name = aux
        return obj


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """A registered dataclass."""

    leaf: Any
    name: str = dataclasses.field(default="data", metadata={"static": True})


def vec(n: int = 3) -> jax.Array:
    """1, 2, …, n."""
    return jnp.arange(1.0, n + 1)


def of(x: Any) -> Any:
    """The leaf of a module, or what is no module as it is."""
    return x.leaf if isinstance(x, Model | Registered | Data) else x


Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Place:
    """How to put a leaf somewhere. `module` says whose convention holds there."""

    put: Callable[[Any], Any]
    module: str | None = None


PLACES: dict[str, Place] = {
    "bare": Place(lambda x: x),
    "containers": Place(lambda x: {"b": [x, (None,)], "a": Pair(x, collections.OrderedDict(z=x))}),
    "deque": Place(lambda x: [collections.deque([x])]),  # which JAX takes for a leaf
    "equinox": Place(lambda x: {"m": [Model(x, {"k": (x, None)})], "n": Model(Model(x))}, "equinox"),
    "registered": Place(lambda x: (Registered(x), [Data({"k": Registered(x)})]), "jax"),
}


def separate(tree: Any) -> Any:
    """A copy in which no two leaves are one array, so that nothing is shared."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array | np.ndarray) else x, tree)


FILTERED: dict[Any, Any] = {
    jax.jit: eqx.filter_jit,
    jax.grad: eqx.filter_grad,
    jax.value_and_grad: eqx.filter_value_and_grad,
    jax.vmap: eqx.filter_vmap,
    jax.checkpoint: eqx.filter_checkpoint,
}
TRANSFORMS: dict[str, Any] = {
    **{f"jax.{plain.__name__}": plain for plain in FILTERED},
    **{f"eqx.{filtered.__name__}": filtered for filtered in FILTERED.values()},
}


def oracle(transform: Any, module: str | None) -> Any:
    """The transform that has to do the same: Equinox's where the modules are Equinox's, itself otherwise."""
    return FILTERED.get(transform, transform) if module == "equinox" else transform
