"""Files of Equinox and Flax, read by the functions that the documentation shows; both libraries write what is read."""

import io
import pathlib
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.processes import ROOT

flax_serialization = pytest.importorskip("flax.serialization")

PAGE = ROOT / "docs" / "file_contents.md"


def functions_of_page() -> dict[str, Any]:
    """What the page defines, without what it does with that."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Files of Equinox and Flax\n")
    functions = re.findall(r"^def .*?(?=^\S|^```)", section, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"eqx": eqx, "jax": jax, "jnp": jnp, "np": np, "pathlib": pathlib, "st": st}
    exec("import flax.serialization\n" + "\n".join(functions), namespace)
    return namespace


PAGES = functions_of_page()
retied, read_equinox, read_flax = PAGES["retied"], PAGES["read_equinox"], PAGES["read_flax"]


class Layer(eqx.Module):
    """With what a file has, and what it has not: text and a function."""

    weight: Any
    scale: float
    activation: Any
    name: str


class Net(eqx.Module):
    embed: Layer
    head: Layer
    norm: Any


def layer(weight: Any, scale: float = 1.5, name: str = "layer") -> Layer:
    return Layer(weight, scale, jnp.tanh, name)


def net(value: float = 1.0, *, head: Any = None, norm: Any = None) -> Net:
    """A net with a shared layer, or with another one as its head."""
    embed = layer(value * jnp.arange(6.0).reshape(2, 3))
    norm = jnp.arange(4.0, dtype=jnp.bfloat16) if norm is None else norm
    return Net(embed, embed if head is None else head, norm)


def params(value: float = 1.0, **others: Any) -> dict[str, Any]:
    kernel = value * jnp.arange(6.0).reshape(2, 3)
    head = {"kernel": kernel, "bias": jnp.zeros(3, jnp.bfloat16)}
    return {"embed": kernel, "head": head, "step": 7, "name": "net", "nothing": None} | others


def as_leaves(tree: Any, folder: pathlib.Path) -> pathlib.Path:
    eqx.tree_serialise_leaves(folder / "tree.eqx", tree)
    return folder / "tree.eqx"


def as_msgpack(tree: Any, folder: pathlib.Path) -> pathlib.Path:
    path = folder / "tree.msgpack"
    path.write_bytes(flax_serialization.to_bytes(tree))
    return path


def assert_equal(one: Any, two: Any) -> None:
    """Leaf by leaf, dtypes included."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b, strict=isinstance(a, np.ndarray))
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


def shapes_of(tree: Any) -> Any:
    """A template that holds no arrays, with the ties of the tree."""
    return st.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, tree)


def test_equal_copies_are_one_again(tmp_path):
    for like in (net(2.0), shapes_of(net())):
        again = read_equinox(as_leaves(net(), tmp_path), like)
        assert again.embed is again.head
        assert again.embed.weight is again.head.weight
        assert_equal(again, net())
    st.save(tmp_path / "net.safetensors", again)
    assert st.load(tmp_path / "net.safetensors", like=net()).embed.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    tied = params()
    again = read_flax(as_msgpack(tied, tmp_path), params(2.0))
    assert again["embed"] is again["head"]["kernel"]
    assert_equal(again, tied)
    assert st.count_parameters(again) == 9


def test_nan_is_equal_to_itself(tmp_path):
    kernel = jnp.full((2, 3), jnp.nan)
    tied = params() | {"embed": kernel, "head": {"kernel": kernel, "bias": jnp.zeros(3, jnp.bfloat16)}}
    assert np.isnan(read_flax(as_msgpack(tied, tmp_path), params())["embed"]).all()


OTHER_LAYERS = {
    "another array": (
        lambda: layer(jnp.ones((2, 3))),
        r"`\.head\.weight` is tied in the template, and has another value",
    ),
    "another number": (
        lambda: layer(jnp.arange(6.0).reshape(2, 3), scale=2.5),
        r"`\.embed\.scale` and `\.head\.scale` cannot be one object",
    ),
}


@pytest.mark.parametrize(("other", "message"), OTHER_LAYERS.values(), ids=OTHER_LAYERS)
def test_unequal_copies_in_a_file_of_equinox(other, message, tmp_path):
    untied = net(head=other())
    with pytest.raises(ValueError, match=message):
        read_equinox(as_leaves(untied, tmp_path), net())
    again = read_equinox(as_leaves(untied, tmp_path), st.untie(net()))
    assert again.embed is not again.head
    assert_equal(again, untied)


def test_unequal_copies_in_a_file_of_flax(tmp_path):
    untied = params(head={"kernel": -params()["embed"], "bias": jnp.zeros(3, jnp.bfloat16)})  # 0.0 and -0.0 differ
    with pytest.raises(ValueError, match=r"`\['head'\]\['kernel'\]` is tied in the template, and has another value"):
        read_flax(as_msgpack(untied, tmp_path), params())
    assert_equal(read_flax(as_msgpack(untied, tmp_path), st.untie(params())), untied)


def test_a_leaf_more_and_a_leaf_less(tmp_path):
    path = as_leaves([net(), jnp.ones(2)], tmp_path)
    with pytest.raises(ValueError, match="has more leaves than the template"):
        read_equinox(path, [net()])
    with pytest.raises(Exception, match=r"SequenceKey\(idx=1\)"):
        read_equinox(as_leaves([net()], tmp_path), [net(), jnp.ones(2)])
    for written, like in ((params(more=jnp.ones(2)), params()), (params(), params(more=jnp.ones(2)))):
        with pytest.raises(ValueError, match="has other names than the template"):
            read_flax(as_msgpack(written, tmp_path), like)


def test_statics_that_are_missing(tmp_path):
    """Of Equinox's, text and functions are the template's; a file of Flax's has each name, or it is an error."""
    like = net(head=layer(jnp.ones((2, 3)), name="another"))
    written = net(head=layer(jnp.ones((2, 3)), name="head"))
    assert read_equinox(as_leaves(written, tmp_path), like).head.name == "another"
    lacking = params()
    del lacking["name"]
    with pytest.raises(ValueError, match="has other names than the template"):
        read_flax(as_msgpack(lacking, tmp_path), params())
    assert read_flax(as_msgpack(params(name="other"), tmp_path), params())["name"] == "other"


@pytest.mark.parametrize("other", [jnp.ones(4), jnp.zeros(3), jnp.zeros(3, jnp.int32), np.zeros((1, 3)), 1.5])
def test_another_shape_or_dtype(other, tmp_path):
    head = params()["head"] | {"bias": other}
    with pytest.raises(ValueError, match=r"`\['head'\]\['bias'\]` is"):
        read_flax(as_msgpack(params(head=head), tmp_path), params())
    with pytest.raises((RuntimeError, ValueError)):
        read_equinox(as_leaves(net(norm=other), tmp_path), net())


def test_a_layer_at_two_paths_of_an_nnx_model(tmp_path):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, seed: int, *, shares: bool = True) -> None:
            self.embed = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
            self.again = self.embed if shares else nnx.Linear(2, 3, rngs=nnx.Rngs(seed + 1))

    again = read_equinox(as_leaves(Model(0), tmp_path), Model(1))
    assert again.embed is again.again
    np.testing.assert_array_equal(again.embed.kernel[...], Model(0).embed.kernel[...])
    with pytest.raises(ValueError, match="is tied in the template"):
        read_equinox(as_leaves(Model(0, shares=False), tmp_path), Model(1))


def test_a_stream_that_equinox_reads():
    """`retied` by itself, of whatever was read."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, net())
    file.seek(0)
    again = retied(eqx.tree_deserialise_leaves(file, net(2.0)), net(2.0))
    assert again.embed is again.head


def test_the_package_says_where_the_recipe_is():
    with pytest.raises(AttributeError, match="file_contents.md, “Files of Equinox and Flax”") as raised:
        st.convert  # noqa: B018
    assert raised.value.name == "convert"
    assert not hasattr(st, "convert")
    assert "convert" not in dir(st)
    assert "## Files of Equinox and Flax" in PAGE.read_text(encoding="utf-8")
