"""What implementations are called, in tables and in figures."""

FLAT = "flat list, jax.jit"
SHAREDTREE = "sharedtree.jit"
JAX = "jax.jit"
EQUINOX = "equinox.filter_jit"
NNX = "nnx.jit"
NNX_CACHED = "nnx.cached_partial"
NNX_SPLIT = "jax.jit over nnx.split"
BRAINSTATE = "brainstate.transform.jit"

BY_HAND = "jax.jit, one copy by hand"
UNTIED = "jax.jit, untied twin"
EQUINOX_SHARED = "equinox.nn.Shared"
