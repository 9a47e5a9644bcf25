"""Views in files, honest and forged, in Orbax, in pictures and under shardings: the array counts at its own place."""

import functools
import json

import equinox as eqx
import flax.linen as nn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import sharedtree as st
from sharedtree.serialise import orbax
from tests.serialise.containers import forged, split

W = jnp.arange(6.0).reshape(2, 3)
CONTAINERS = st.Policy(containers=True)


class ViewFirst(eqx.Module):
    """The view comes before the array in the order of the leaves."""

    decoder: object
    embed: jax.Array


def model():
    return ViewFirst(st.View(jnp.transpose, W), W)


def tensors(data):
    header, _ = split(data)
    return sorted(name for name in json.loads(header) if not name.startswith("__"))


def test_a_tensor_has_the_name_of_the_place_of_its_own():
    assert tensors(st.to_bytes(model())) == ["embed"]
    assert tensors(st.to_bytes({"a": st.View(jnp.abs, st.View(jnp.transpose, W)), "b": [W]})) == ["['b'][0]"]
    assert tensors(st.to_bytes(ViewFirst(st.View(jnp.transpose, W), jnp.ones(2)))) == ["decoder.of[0]", "embed"]


def test_a_variable_of_nnx_has_that_too():
    variable = nnx.Param(W)
    data = st.to_bytes({"a": st.View(jnp.transpose, variable), "b": variable})
    assert tensors(data) == ["['b'].value"]
    loaded = st.from_bytes(data, trusted="flax")
    assert loaded["a"].of[0] is loaded["b"]


THROUGH = {
    "a function": jnp.transpose,
    "a partial": functools.partial(jnp.swapaxes, axis1=0, axis2=1),
    "a Partial": jax.tree_util.Partial(jnp.swapaxes, axis1=0, axis2=1),
}


@pytest.mark.parametrize("name", THROUGH)
def test_round_trips(name):
    data = st.to_bytes({"a": W, "b": st.View(THROUGH[name], W)})
    loaded = st.from_bytes(data)
    assert loaded["b"].of[0] is loaded["a"]
    np.testing.assert_array_equal(loaded["b"][...], W.T)
    assert not [request for request in st.audit(data).requests if not request.allowed]


def own_transpose(w):
    return w.T


def test_a_function_of_ones_own_is_named_and_trusted():
    data = st.to_bytes({"a": W, "b": st.View(own_transpose, W)})
    with pytest.raises(st.errors.UntrustedTypeError, match="own_transpose"):
        st.from_bytes(data)
    loaded = st.from_bytes(data, trusted=[own_transpose])
    assert loaded["b"].through is own_transpose
    assert loaded["b"].of[0] is loaded["a"]


FORGED = ["os:system", "builtins:eval", "builtins:exec", "jax:jit", "jax.numpy:save", "jax.debug:callback", "jax:vmap"]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_function_is_refused(name):
    header, data = split(st.to_bytes({"a": W, "b": st.View(jnp.transpose, W)}))
    assert "jax.numpy:transpose" in header
    with pytest.raises(st.errors.UntrustedTypeError):
        st.from_bytes(forged(header.replace("jax.numpy:transpose", name), data))


def edited(value, change):
    """A file with its manifest changed."""
    header, data = split(st.to_bytes(value))
    whole = json.loads(header)
    manifest = json.loads(whole["__metadata__"]["sharedtree"])
    change(manifest)
    whole["__metadata__"]["sharedtree"] = json.dumps(manifest)
    return forged(json.dumps(whole, separators=(",", ":")), data)


@pytest.mark.parametrize("aux", [1, "text", None, ["class", "jax:Array"], 0])
def test_what_is_no_named_function_is_refused_in_its_place(aux):
    def change(manifest):
        (node,) = [node for node in manifest["nodes"] if node[0] == "registered"]
        node[2] = aux

    with pytest.raises(st.SharedTreeError):
        st.from_bytes(edited({"a": W, "b": st.View(jnp.transpose, W)}, change))


def test_a_forged_view_of_no_arrays_calls_nothing():
    def change(manifest):
        (node,) = [node for node in manifest["nodes"] if node[0] == "registered"]
        node[3] = [None]

    loaded = st.from_bytes(edited({"a": W, "b": st.View(jnp.transpose, W)}, change))
    assert "View" in repr(loaded)
    with pytest.raises(st.errors.ViewError):
        _ = loaded["b"][...]
    with pytest.raises(st.errors.ViewError):
        st.unwrap(loaded)


def test_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        orbax.save(manager, 1, model())
        manager.wait_until_finished()
        loaded = orbax.restore(manager, trusted=[ViewFirst])
    assert loaded.decoder.of[0] is loaded.embed
    np.testing.assert_array_equal(loaded.decoder[...], W.T)


def test_a_state_has_one_array_at_both_places():
    state = st.state(model())
    assert state["decoder"]["of"][0] is state["embed"]
    loaded = st.load_state(st.tree.map(jnp.zeros_like, model()), st.state(model()))
    assert loaded.decoder.of[0] is loaded.embed
    np.testing.assert_array_equal(loaded.embed, W)


# --- shown ------------------------------------------------------------------------------------------------------------


def test_ties_name_the_array_first_and_say_the_function():
    (tie,) = st.ties(model())
    assert tie.paths == (".embed", ".decoder.of[0]")
    assert tie.views == (".decoder = transpose(.embed)",)
    assert "views" not in repr(st.ties([W, W]))


def test_a_summary_shows_the_function():
    lines = str(st.summary(model())).split("\n")
    assert any(line.split() == [".decoder", "=", "transpose(.embed)"] for line in lines)
    assert any("#1  .embed = .decoder.of[0]" in line for line in lines)
    assert "6 parameters, 24 bytes" in str(st.summary(model()))


def test_a_summary_of_a_file_shows_it_too(tmp_path, command):
    st.save(tmp_path / "model.safetensors", model())
    status, out, _ = command("show", tmp_path / "model.safetensors")
    assert status == 0
    assert "= transpose(.embed)" in out


def test_explain_shows_the_function():
    text = str(st.explain(st.grad(lambda net: 0.0), model()))
    assert [line.split() for line in text.split("\n")][1:3] == [
        ["net.decoder", "view", "transpose(net.embed)"],
        ["net.embed", "traced", "float32[2,", "3]", "differentiated"],
    ]


def test_a_drawing_shows_the_function():
    pytest.importorskip("igraph")
    pytest.importorskip("drawsvg")
    assert ".decoder = transpose(.embed)" in st.draw(model()).svg


# --- masks, axes and shardings ----------------------------------------------------------------------------------------


def test_a_mask_meets_the_array_at_its_own_place():
    for chosen, spec in ((True, ViewFirst(None, True)), (False, ViewFirst(None, False))):
        kept, rest = st.tree.partition(model(), spec)
        assert (kept.embed is W) is chosen
        assert (kept.decoder.of[0] is W) is chosen
        assert (rest.embed is W) is not chosen
        assert st.tree.combine(kept, rest).decoder.of[0] is W


def test_axes_meet_the_array_at_its_own_place():
    stacked = st.tree.map(lambda x: jnp.stack([x, 2 * x]), model())
    out = st.vmap(lambda net: st.unwrap(net).decoder, in_axes=(ViewFirst(None, 0),))(stacked)
    np.testing.assert_array_equal(out, jnp.stack([W.T, 2 * W.T]))


def test_arguments_apart_are_labelled_apart():
    """A view in one argument and its array in another one: each is what the transform makes of that argument."""
    gradient = st.grad(lambda view, w: (st.unwrap(view) * w.T).sum(), policy=st.Policy(on_untie="ignore"))(
        st.View(jnp.transpose, W), W
    )
    np.testing.assert_array_equal(gradient.of[0], W)


def test_optax_labels_and_masks():
    optax = pytest.importorskip("optax")
    tx = st.optimizer(
        optax.multi_transform({"train": optax.sgd(1.0), "freeze": optax.set_to_zero()}, ViewFirst(None, "train"))
    )
    gradient = st.tree.map(jnp.ones_like, model())
    updates, _ = tx.update(gradient, tx.init(model()), model())
    np.testing.assert_array_equal(updates.embed, -jnp.ones((2, 3)))
    assert updates.decoder.of[0] is updates.embed


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])


def test_a_view_follows_the_sharding_of_its_array(mesh):
    rows = NamedSharding(mesh, PartitionSpec("d", None))
    prefix = ViewFirst(None, rows)
    placed = [
        st.device_put(model(), prefix),
        st.device_put(model(), rows),
        st.jit(lambda net: st.tree.map(lambda x: x + 0, net), in_shardings=(prefix,), out_shardings=prefix)(model()),
        st.jit(lambda net: st.tree.map(lambda x: x + 0, st.with_sharding_constraint(net, prefix)))(model()),
    ]
    for net in placed:
        assert net.decoder.of[0] is net.embed
        np.testing.assert_array_equal(net.embed, W)
    for net in placed[:3]:
        assert net.embed.sharding == rows


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal()
        embed = nn.Embed(4, 2, embedding_init=nn.with_partitioning(init, ("d", None)), name="embed")
        kernel = nn.with_partitioning(init, (None, "d"))
        return nn.Dense(4, kernel_init=kernel, use_bias=False, name="decoder")(embed(tokens))


def test_boxes_of_linen(mesh):
    tokens = jnp.array([1, 2])
    params = Boxed().init(jax.random.key(0), tokens)["params"]
    tied = st.tie(params, lambda p: (p["embed"]["embedding"], p["decoder"]["kernel"]), through=jnp.transpose)
    w = params["embed"]["embedding"].value
    np.testing.assert_allclose(Boxed().apply({"params": tied}, tokens), w[tokens] @ w.T, rtol=1e-5)
    specs = nn.get_partition_spec(tied)
    assert specs["embed"]["embedding"] == PartitionSpec("d", None)
    assert specs["decoder"]["kernel"].of == (PartitionSpec("d", None),)
    shardings = nn.get_sharding(tied, mesh)
    placed = st.device_put(tied, shardings)
    assert placed["decoder"]["kernel"].of[0] is placed["embed"]["embedding"]
    assert placed["embed"]["embedding"].value.sharding == NamedSharding(mesh, PartitionSpec("d", None))
    # In vanilla transforms, too, the shardings have the shape of the parameters.
    out = jax.jit(lambda p: Boxed().apply({"params": p}, tokens), in_shardings=(shardings,))(tied)
    np.testing.assert_allclose(out, w[tokens] @ w.T, rtol=1e-5)


def test_named_shardings_of_nnx(mesh):
    class Tied(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.normal(), ("d", None))
            self.tokens = nnx.Embed(4, 2, rngs=rngs, embedding_init=init)
            self.head = nnx.Linear(2, 4, use_bias=False, rngs=rngs)

    with jax.set_mesh(mesh):
        tied = st.tie(Tied(nnx.Rngs(0)), lambda m: (m.tokens.embedding, m.head.kernel), through=jnp.transpose)
        definition, state = nnx.split(tied)
        shardings = nnx.get_named_sharding(state, mesh)
        again = nnx.merge(definition, jax.device_put(state, shardings))
    assert again.head.kernel.of[0] is again.tokens.embedding
    assert again.tokens.embedding[...].sharding.spec == PartitionSpec("d", None)
    np.testing.assert_array_equal(again.head.kernel[...], tied.tokens.embedding[...].T)


# --- which object of a tie is kept ------------------------------------------------------------------------------------


def test_retie_keeps_the_array_at_its_own_place():
    new = jnp.ones((2, 3))
    changed = eqx.tree_at(lambda net: net.embed, model(), new)
    tied = st.retie(changed, like=model())
    assert tied.embed is new
    assert tied.decoder.of[0] is new
    variables = {"a": st.View(jnp.transpose, old := nnx.Param(W)), "b": old}
    apart = {"a": st.View(jnp.transpose, nnx.Param(W)), "b": nnx.Param(new)}
    tied = st.retie(apart, like=variables)
    assert tied["a"].of[0] is tied["b"]
    np.testing.assert_array_equal(tied["b"][...], new)


def test_untie_leaves_the_array_at_its_own_place():
    loose = st.untie(model())
    assert loose.embed is W
    assert loose.decoder.of[0] is not W
    np.testing.assert_array_equal(loose.decoder.of[0], W)
    loose = st.untie(model(), lambda net: net.decoder)
    assert loose.embed is W
    assert not st.ties(loose)


# --- on random DAGs ---------------------------------------------------------------------------------------------------


@hypothesis.strategies.composite
def dags_with_views(draw):
    """Nested lists and modules of a few arrays and of views of them, in any order."""
    draw_index = lambda parts: draw(hypothesis.strategies.integers(0, len(parts) - 1))
    arrays = [jnp.full(2, float(i)) for i in range(4)]
    sources, parts = list(arrays), list(arrays)
    for _ in range(draw(hypothesis.strategies.integers(1, 8))):
        kind = draw(hypothesis.strategies.sampled_from(["view", "list", "module"]))
        if kind == "view":
            made = st.View(jnp.add, *[sources[draw_index(sources)] for _ in range(2)])
            sources.append(made)
        else:
            children = [parts[draw_index(parts)] for _ in range(2)]
            made = children if kind == "list" else ViewFirst(*children)
        parts.append(made)
    return [parts[draw_index(parts)] for _ in range(4)]


def unfolded(tree, path=()):
    """All arrays with all of their paths, in the order of the tree, and whether a path leads through a view."""
    if isinstance(tree, jax.Array):
        yield tree, path
    else:
        children, _ = jax.tree_util.default_registry.flatten_one_level_with_keys(tree)
        for key, child in children:
            yield from unfolded(child, (*path, key))


@hypothesis.given(dags_with_views())
def test_no_path_through_a_view_represents_what_has_another(tree):
    def is_through_view(path):
        return any(str(key) == ".of" for key in path)

    own_places, arrays = {}, {}
    for array, path in unfolded(tree):
        arrays[id(array)] = array
        if not is_through_view(path):
            own_places.setdefault(id(array), jax.tree_util.keystr(path))
    representatives = {id(leaf): jax.tree_util.keystr(path) for path, leaf in st.tree.leaves_with_path(tree)}
    assert representatives.keys() == arrays.keys()
    for number, path in own_places.items():
        assert representatives[number] == path
    for tie in st.ties(tree):
        if tie.kind == "array":
            assert ".of[" not in tie.paths[0] or all(".of[" in path for path in tie.paths)
    names = tensors(st.to_bytes(tree))
    assert {path.removeprefix(".") for path in own_places.values()} <= set(names)
    assert len(names) == len(arrays)
    for opened, leaf in zip(jax.tree.leaves(st.unwrap(tree)), jax.tree.leaves(st.unwrap(st.copy(tree))), strict=True):
        np.testing.assert_array_equal(opened, leaf)
    loaded = st.from_bytes(st.to_bytes(tree), trusted=[ViewFirst])
    st.assert_same_sharing(loaded, tree)


def test_a_view_that_another_view_is_computed_from_does_not_rename_its_array():
    """The inner view is met through the outer one first, and then in a place of its own. Its array has one before."""
    weight = jnp.ones((2, 3))
    inner = st.View(jnp.transpose, weight)
    data = st.to_bytes({"a": weight, "b": st.View(jnp.negative, inner), "c": inner})
    assert tensors(data) == ["['a']"]


def test_arrays_shared_below_many_views_are_named_in_linear_work():
    view = st.View(jnp.transpose, jnp.ones((2, 2)))
    for _ in range(40):
        view = st.View(jnp.add, view, view)
    data = st.to_bytes([st.View(jnp.negative, view), view])
    assert len(tensors(data)) == 1
