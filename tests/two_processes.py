"""Trains a model with a tied weight, data-parallel over as many processes as there are. A script for `test_shards`.

Arguments: the address of the first process, the number of processes, the number of this one. Prints what it ends with.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sharedtree as st


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array


def model():
    w = jnp.linspace(-1, 1, 12).reshape(4, 3)
    return Net(w, w)


def batch():
    return np.sin(np.arange(32.0, dtype=np.float32)).reshape(8, 4)


def loss(net, x):
    assert net.embed is net.head
    return (((x @ net.embed) @ net.head.T - x) ** 2).mean()


def train(mesh):
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    mine = np.split(batch(), jax.process_count())[jax.process_index()]
    x = jax.make_array_from_process_local_data(rows, mine)
    net = st.device_put(model(), whole)
    tx = st.optimizer(optax.adam(0.05))
    state = st.jit(tx.init)(net)
    by_device = st.shard_map(
        lambda net, x: jax.lax.pmean(loss(net, x), "data"),
        mesh=mesh,
        in_specs=(Net(P(), P()), P("data")),
        out_specs=P(),
    )

    @st.jit
    def step(net, state, x):
        value, gradient = st.value_and_grad(loss)(net, x)
        again, same = st.value_and_grad(by_device)(net, x)
        gradient = st.tree.map(lambda one, other: (one + other) / 2, gradient, same)
        updates, state = tx.update(gradient, state, net)
        return (value + again) / 2, st.apply_updates(net, updates), state

    for _ in range(5):
        value, net, state = step(net, state, x)
        assert net.embed is net.head
    assert len(jax.tree.leaves(st.tree.leaves(net))) == 1
    assert net.embed.sharding == whole
    return [float(value), *np.asarray(net.embed.addressable_data(0)).ravel().tolist()]


if __name__ == "__main__":
    address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number)
    assert len(jax.devices()) == count
    devices = np.asarray(jax.devices())
    sys.stdout.write(f"\n{train(jax.sharding.Mesh(devices, ('data',), axis_types=(AxisType.Auto,)))!r}")
