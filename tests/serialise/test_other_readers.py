"""Files that `save` writes, read by others: safetensors, NumPy by hand, PyTorch, Orbax. They see each array once."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy

import sharedtree as st
from tests.models import Dense


class Model(eqx.Module):
    embed: jax.Array
    blocks: list
    head: jax.Array
    mask: np.ndarray
    key: jax.Array
    date: np.ndarray
    empty: jax.Array
    name: str = "tied"


@pytest.fixture
def model():
    weight = jnp.arange(32, dtype=jnp.float32).reshape(4, 8) / 3
    block = Dense(jnp.arange(5, dtype=jnp.float16), np.arange(6, dtype=np.int64).reshape(3, 2)[:, ::-1])
    return Model(
        embed=weight,
        blocks=[block, block],
        head=weight,
        mask=np.array([True, False, True]),
        key=jax.random.key(7),
        date=np.array(["2020-01-01", "1969-12-31"], "M8[D]"),
        empty=jnp.zeros((0, 3)),
    )


@pytest.fixture
def path(tmp_path, model):
    path = tmp_path / "model.safetensors"
    st.save(path, model, metadata={"run": "first"})
    return path


@pytest.fixture
def expected(model):
    """What is in the file, worked out by hand: ties once, under their first paths; keys and dates as raw data."""
    return {
        "embed": np.asarray(model.embed),
        "blocks[0].weight": np.asarray(model.blocks[0].weight),
        "blocks[0].bias": np.array([[1, 0], [3, 2], [5, 4]]),
        "mask": np.array([True, False, True]),
        "key": np.array([0, 7], np.uint32),
        "date": np.array([18262, -1], "<i8").view(np.uint8).reshape(2, 8),
        "empty": np.zeros((0, 3), np.float32),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        other = np.asarray(found[name])
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        np.testing.assert_array_equal(other, array, strict=True)


def test_safetensors(path, model, expected):
    assert_same(safetensors.numpy.load_file(path), expected)
    assert_same(safetensors.numpy.load(st.to_bytes(model)), expected)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert {"sharedtree", "sharedtree.digests", "sharedtree.header", "run"} == set(file.metadata())
        assert file.metadata()["run"] == "first"
        np.testing.assert_array_equal(file.get_slice("embed")[1:3, 2:], expected["embed"][1:3, 2:])
        assert_same({name: file.get_tensor(name) for name in file.keys()}, expected)  # noqa: SIM118 -- no mapping
    with jax.enable_x64(True):
        found = safetensors.flax.load_file(path)
        assert all(isinstance(array, jax.Array) for array in found.values())
        assert_same(found, expected)


STORED = {
    "bf16": ("BF16", [8]), "e4m3": ("F8_E4M3", [8]), "e5m2": ("F8_E5M2", [8]), "int4": ("U8", [8, 1]),
    "complex": ("U8", [8, 8]),
}  # fmt: skip


def test_low_precision(tmp_path):
    values = np.arange(8, dtype=np.float32)
    dtypes = {"bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
    tree = {name: jnp.asarray(values, dtype) for name, dtype in dtypes.items()}
    tree |= {"int4": jnp.asarray(np.arange(-4, 4).astype(ml_dtypes.int4)), "complex": jnp.asarray(values * 1j)}
    path = tmp_path / "low.safetensors"
    st.save(path, tree)
    found = {name[2:-2]: tensor for name, tensor in safetensors.deserialize(path.read_bytes())}
    assert {name: (tensor["dtype"], tensor["shape"]) for name, tensor in found.items()} == STORED
    for name, array in tree.items():
        assert bytes(found[name]["data"]) == np.asarray(array).tobytes()
    with safetensors.safe_open(path, framework="flax") as file:
        read = file.get_tensor("['bf16']")
    assert read.dtype == jnp.bfloat16
    assert read.astype(jnp.float32).tolist() == values.tolist()


def test_pytorch(path, expected):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load, load_file

    found = load_file(path)
    assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
    assert_same({name: tensor.numpy() for name, tensor in found.items()}, expected)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        (tensor,) = load(st.to_bytes([jnp.asarray([0.0, 1.0, -2.0, 4.0], name)])).values()
        assert tensor.dtype == getattr(torch, name)
        assert tensor.float().tolist() == [0.0, 1.0, -2.0, 4.0]


def test_orbax(path, expected):
    """Orbax's newer interface, where it reads safetensors. Early ones trip over the format's `__metadata__`."""
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
    if not hasattr(v1, "load") or not hasattr(v1.options.CheckpointLayout, "SAFETENSORS"):
        pytest.skip("this Orbax does not read safetensors")
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P("d"))
    with v1.Context(checkpoint_layout=v1.options.CheckpointLayout.SAFETENSORS), jax.enable_x64(True):
        assert_same(v1.load(path), expected)
        want = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for name, a in expected.items()}
        found = v1.load(path, want)
    assert all(array.sharding == sharding for array in found.values())
    assert_same(found, expected)
