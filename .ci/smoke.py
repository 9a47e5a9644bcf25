"""What an installed package must do without any extra, in a second or two: run it outside the checkout."""

import pathlib
import sys
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp

import sharedtree as st
from sharedtree.core._native_or_python import engine


class Net(eqx.Module):
    """Two places for a layer."""

    embed: eqx.nn.Linear
    head: eqx.nn.Linear


def loss(net, x):
    """Goes through both places."""
    assert net.embed is net.head
    return (net.head(net.embed(x)) ** 2).sum()


layer = eqx.nn.Linear(3, 3, use_bias=False, key=jax.random.key(0))
net, x = Net(layer, layer), jnp.arange(3.0)
gradient = st.jit(st.grad(loss))(net, x)
assert gradient.embed is gradient.head
as_two = eqx.filter_grad(lambda net: (net.head(net.embed(x)) ** 2).sum())(net)
both = as_two.embed.weight + as_two.head.weight
assert jnp.allclose(gradient.head.weight, both, rtol=1e-5), (gradient.head.weight, both)
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "net.safetensors"
    st.save(path, net)
    again = st.load(path, trusted=[Net])
assert again.embed is again.head
assert bool((again.head.weight == layer.weight).all())
assert len(jax.tree.leaves(st.Dag(net))) == 1
many = [[float(i)] for i in range(100)]
for _ in range(10_000):  # many walks, as a leak or a wrong count of references would show itself
    st.Dag(many)
python = sys.version.split()[0]
sys.stdout.write(f"sharedtree {st.__version__}, {engine()}, on Python {python} with JAX {jax.__version__}\n")
