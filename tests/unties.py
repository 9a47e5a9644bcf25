"""Which functions of JAX, Equinox and optax untie a model, found by running each public one on a model with ties."""

import contextlib
import importlib
import inspect
import io
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.models import Leaf

MODULES = (
    "jax",
    "jax.lax",
    "jax.tree",
    "jax.tree_util",
    "jax.ad_checkpoint",
    "equinox",
    "equinox.nn",
    "optax",
    "optax.contrib",
    "optax.projections",
    "optax.tree",
    "optax.tree_utils",
)

NOT_TRIED = frozenset({"equinox.tree_serialise_leaves", "jax.clear_caches", "jax.make_user_context"})
"""Functions with effects outside the test."""


class Net(eqx.Module):
    """A model with a tied array and a shared layer."""

    embed: Any
    head: Any
    layers: list[Any]


def net() -> Net:
    weight, layer = jnp.ones(3), Leaf(jnp.full(3, 2.0))
    return Net(weight, weight, [layer, layer])


def loss(model: Net, *_: Any) -> Any:
    return (model.embed * model.head * model.layers[0].weight * model.layers[1].weight).sum()


def lost(result: Any) -> bool:
    """Whether there is a model in the result that has lost a tie."""
    found = [x for x in jax.tree.leaves(result, is_leaf=lambda x: isinstance(x, Net)) if isinstance(x, Net)]
    return any(x.layers[0] is not x.layers[1] or x.embed is not x.head for x in found)


def calls(name: str, f: Any) -> Iterator[Any]:
    """Ways in which a function might be called with a model. Each is tried; most raise."""
    m = net
    same = lambda x, *_, **__: x
    pick = lambda model: model.embed
    tx: Any = optax.adam(0.1)
    special = {
        "equinox.tree_at": lambda: f(pick, m(), jnp.zeros(3)),
        "equinox.tree_deserialise_leaves": lambda: f(_file(), m()),
        "equinox.nn.make_with_state": lambda: f(net)(),
        "jax.pure_callback": lambda: f(lambda x: x, m(), m()),
        "jax.lax.cond": lambda: f(True, same, same, m()),
        "jax.lax.switch": lambda: f(0, [same, same], m()),
        "jax.lax.scan": lambda: f(lambda c, x: (c, x), m(), jnp.ones(2)),
        "jax.lax.while_loop": lambda: f(lambda _: False, same, m()),
        "jax.lax.fori_loop": lambda: f(0, 2, lambda _, c: c, m()),
        "optax.tree_map_params": lambda: f(tx, same, tx.init(m())),
        "optax.tree_utils.tree_map_params": lambda: f(tx, same, tx.init(m())),
        "optax.tree.map_params": lambda: f(tx, same, tx.init(m())),
        "optax.incremental_update": lambda: f(m(), m(), 0.5),
        "optax.periodic_update": lambda: f(m(), m(), jnp.array(1), 2),
    }
    if name in special:
        yield special[name]
        return
    yield lambda: f(m())
    yield lambda: f(m(), m())
    yield lambda: f(m(), m(), 0.5)
    yield lambda: f(m(), 0.5)
    yield lambda: f(0.5, m())
    yield lambda: f(m(), 0.5, m())
    yield lambda: f(m(), m(), 0.5, 2)
    yield lambda: f(m(), 0.9, jnp.array(1))
    yield lambda: f(jax.random.key(0), m())
    yield lambda: f(m(), eqx.is_array)
    yield lambda: f(m(), jnp.float32)
    yield lambda: f(m(), jax.devices()[0])
    yield lambda: f(same, m())
    yield lambda: f(lambda _, x: x, m())
    yield lambda: f(lambda x, y: x, m(), m())
    yield lambda: f(loss, m())
    yield lambda: f(loss, (m(),), (m(),))
    yield lambda: f(lambda x: x, (m(),), (m(),))
    yield lambda: f(same)(m())
    yield lambda: f(loss)(m())
    yield lambda: f(lambda model: model.embed)(m())
    yield lambda: f(same, in_axes=None, out_axes=None, axis_size=1)(m())
    yield lambda: f(lambda x, y: x)(m(), m())
    yield lambda: f()(same)(m())


def _file() -> Any:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, net())
    file.seek(0)
    return file


def functions(modules: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Every public function of some modules, with its name."""
    for module_name in modules:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:  # in an older version
            continue
        for name in sorted(dir(module)):
            f = getattr(module, name, None)
            if not name.startswith("_") and callable(f) and not inspect.isclass(f):
                yield f"{module_name}.{name}", f


def found(modules: Iterable[str] = MODULES) -> set[str]:
    """The names of the functions in some modules that untie."""
    names: set[str] = set()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name, f in functions(modules):
            if name in NOT_TRIED or "breakpoint" in name:
                continue
            for call in calls(name, f):
                try:
                    result = call()
                except Exception:  # noqa: BLE001, S112 -- of whatever kind: it is not meant to be called so
                    continue
                if lost(result):
                    names.add(name)
                    break
    return names
