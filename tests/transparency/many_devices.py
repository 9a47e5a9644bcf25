"""Where things are: committed, uncommitted and sharded arrays.

Collected by pytest in a process that has eight devices, which `test_shards` starts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import sharedtree as st
from tests.transparency.outcome import FILTERED, PLACES, TRANSFORMS, changed, loss_of, outcome, separate

GRADS = ("grad", "value_and_grad", "filter_grad", "filter_value_and_grad")


def values() -> dict[str, Callable[[], Any]]:
    """What makes an array in each kind of place."""

    def mesh(shape: tuple[int, ...] = (8,), names: tuple[str, ...] = ("x",)) -> Any:
        return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))

    def put(sharding: Any) -> Any:
        return jax.device_put(jnp.arange(16.0).reshape(8, 2), sharding)

    return {
        "uncommitted": lambda: jnp.arange(16.0).reshape(8, 2),
        "committed to 0": lambda: put(jax.devices()[0]),
        "committed to 1": lambda: put(jax.devices()[1]),
        "sharded by rows": lambda: put(NamedSharding(mesh(), P("x"))),
        "sharded both ways": lambda: put(NamedSharding(mesh((4, 2), ("x", "y")), P("x", "y"))),
        "replicated": lambda: put(NamedSharding(mesh(), P())),
        "keys on 2": lambda: jax.device_put(jax.random.split(jax.random.key(0), 8), jax.devices()[2]),
        "weak on 3": lambda: jax.device_put(jnp.broadcast_to(jnp.asarray(1.5), (8,)), jax.devices()[3]),
        "ints on 4": lambda: jax.device_put(jnp.arange(8), jax.devices()[4]),
        "numpy": lambda: np.arange(16, dtype=np.float32).reshape(8, 2),
    }


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "mixture": lambda t, other: {"same": t, "changed": jax.tree.map(changed, t), "beside": other, "new": jnp.ones(2)},
    "constants": lambda t, _: {"new": jnp.zeros(3)},
}
BESIDE = ("nothing", "uncommitted", "committed to 1", "numpy")


def cases() -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """Name, what to do with a wrapped transform, and the transform that it is compared with."""
    make = values()
    for place in ("bare", "equinox", "registered"):
        put, module = PLACES[place].put, PLACES[place].module
        plain = {name: FILTERED.get(t, t) if module == "equinox" else t for name, t in TRANSFORMS.items()}
        for kind in make:
            for function, f in FUNCTIONS.items():
                for beside in BESIDE:
                    if beside != "nothing" and function == "constants":
                        continue

                    def call(t: Any, f: Any = f, kind: str = kind, beside: str = beside, put: Any = put) -> Any:
                        other = None if beside == "nothing" else make[beside]()
                        return t(f)(separate(put(make[kind]())), other)

                    yield f"jax.jit-{place}-{kind}-{function}-{beside}", call, (jax.jit, plain["jax.jit"])
                    if beside == "nothing" and module == "equinox":
                        yield f"eqx.filter_jit-{place}-{kind}-{function}", call, (eqx.filter_jit, eqx.filter_jit)
            if kind in ("keys on 2", "ints on 4", "numpy"):
                continue
            for name, transform in TRANSFORMS.items():
                if name.endswith("jit"):
                    continue
                f = loss_of if name.partition(".")[2] in GRADS else lambda t: (t, jax.tree.map(changed, t))

                def call(t: Any, f: Any = f, kind: str = kind, put: Any = put) -> Any:
                    return t(f)(separate(put(make[kind]())))

                yield f"{name}-{place}-{kind}", call, (transform, plain[name])
    yield from jit_options(make)


def jit_options(make: dict[str, Callable[[], Any]]) -> Iterator[tuple[str, Callable[[Any], Any], Any]]:
    """`in_shardings`, `out_shardings`, committed arguments that contradict each other, and lowering."""
    rows = lambda: make["sharded by rows"]().sharding
    one = lambda: SingleDeviceSharding(jax.devices()[3])
    f = lambda t: (t, jax.tree.map(changed, t))
    for place in ("bare", "registered"):
        put = PLACES[place].put
        for kind in ("uncommitted", "committed to 1", "sharded by rows", "replicated", "numpy"):
            for name, options in {
                "in": lambda: {"in_shardings": rows()},
                "out": lambda: {"out_shardings": rows()},
                "in and out": lambda: {"in_shardings": (rows(),), "out_shardings": (rows(), one())},
                "out to one": lambda: {"out_shardings": one()},
                "out prefix": lambda: {"out_shardings": (rows(), None)},
            }.items():

                def call(t: Any, kind: str = kind, options: Any = options, put: Any = put) -> Any:
                    return t(f, **options())(separate(put(make[kind]())))

                yield f"jax.jit-{place}-{kind}-shardings {name}", call, (jax.jit, jax.jit)

            def lowered(t: Any, kind: str = kind, put: Any = put) -> Any:
                tree = separate(put(make[kind]()))
                return t(f).lower(tree).compile()(tree)

            yield f"jax.jit-{place}-{kind}-lowered", lowered, (jax.jit, jax.jit)

            def compiled_for(t: Any, kind: str = kind, put: Any = put) -> Any:
                struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
                return t(f).lower(jax.tree.map(struct, put(make[kind]()))).compile()(separate(put(make[kind]())))

            yield f"jax.jit-{place}-{kind}-lowered for structs", compiled_for, (jax.jit, jax.jit)
        for pair in (("committed to 0", "committed to 1"), ("committed to 1", "sharded by rows")):

            def contradict(t: Any, pair: Any = pair, put: Any = put) -> Any:
                return t(lambda a, b: jax.tree.map(jnp.add, a, b))(*[separate(put(make[kind]())) for kind in pair])

            yield f"jax.jit-{place}-{pair[0]} and {pair[1]}", contradict, (jax.jit, jax.jit)


def different(call: Callable[[Any], Any], transform: Any, oracle: Any) -> str | None:
    """What the two outcomes are where they differ."""
    want = outcome(lambda: call(oracle))
    found = outcome(lambda: call(st.preserve_identities(transform)))
    return None if found == want else f"expected {want}\nfound {found}"


@pytest.mark.parametrize("one_of", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_everything_is_where_vanilla_puts_it(one_of):
    everything = [*cases()]
    assert len({name for name, *_ in everything}) == len(everything)
    with jax.numpy_dtype_promotion("strict"):
        found = {name: different(call, *both) for name, call, both in everything[::one_of]}
    assert {name: difference for name, difference in found.items() if difference is not None} == {}
