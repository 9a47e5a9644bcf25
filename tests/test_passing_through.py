"""S6: what `jax.jit` returns unchanged is the caller's own object; and everything else is what vanilla returns."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.strategies import Layer, Mutable, Pair, is_array


@pytest.fixture
def model():
    w = jnp.ones((2, 2))
    layer = Layer(w, jax.nn.relu, [w])
    return Pair(layer, {"again": layer, "b": jnp.zeros(2)})


def outputs(f, *args):
    return len(f.trace(*args).jaxpr.jaxpr.outvars)


def test_the_very_object_and_no_output(model):
    f = st.jit(lambda m: m)
    assert f(model) is model
    assert outputs(f, model) == 0
    shapes = f.eval_shape(model)
    assert isinstance(shapes.first.weight, jax.ShapeDtypeStruct)
    assert shapes.first is shapes.second["again"]
    assert st.jit(lambda m: (m, {"also": m.first}))(model)[1]["also"] is model.first
    part = st.jit(lambda m: Pair(m.second["b"] + 1, m.first))
    assert part(model).second is model.first
    assert outputs(part, model) == 1
    # An array of what passes through is that array, and alone a new one, as in vanilla JAX.
    new, same = st.jit(lambda m: (Pair(m.first.weight, 1), m))(model)
    assert same is model
    assert new.first is model.first.weight
    assert st.jit(lambda m: Pair(m.first.weight, None))(model).first is not model.first.weight


def put_back(m):
    x = m.x
    m.x = x + 1
    m.x = x
    return m


def test_mutated_and_put_back():
    m = Mutable(x=jnp.ones(2), y=jnp.zeros(2))
    assert st.jit(put_back)(m) is m


@pytest.mark.parametrize(
    ("change", "length"),
    [
        (lambda layer: eqx.tree_at(lambda each: each.weight, layer, layer.weight + 0), 1),
        (lambda layer: Layer(layer.weight, jnp.tanh, layer.parts), 1),
        (lambda layer: Layer(layer.weight, layer.activation, list(layer.parts)), 1),
        (lambda layer: layer.parts.append(jnp.zeros(1)) or layer, 2),
    ],
)
def test_changed_deep_down(model, change, length):
    f = st.jit(lambda m, change=change: Pair(change(m.first), m.second), policy=st.Policy(on_untie="ignore"))
    result = f(model)
    assert result.first is not model.first
    assert len(model.first.parts) == 1
    assert len(result.first.parts) == length


def test_not_by_policy_nor_what_is_donated_nor_where_shardings_are_given(model):
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for options in ({"policy": st.Policy(pass_through=False)}, {"donate_argnums": 0}, {"out_shardings": where}):
        f = st.jit(lambda m: m, **options)
        assert outputs(f, model) == 2
        given = st.tree.map(lambda x: x + 0, model)
        result = f(given)
        assert result is not given
        assert result.first is result.second["again"]
        committed = jax.jit(lambda x: x, **{k: v for k, v in options.items() if k != "policy"})(jnp.ones(2)).committed
        assert result.first.weight.committed == committed


def test_what_is_one_stays_one_where_something_is_made_anew(model):
    mixed = Pair(model.first, Pair(model.first, np.ones(2, np.float32)))
    one, two = st.jit(lambda m: (m.first, m.second))(mixed)
    assert two.first is one
    assert isinstance(two.second, jax.Array)


def test_committedness_of_another_argument(model):
    x = jax.device_put(jnp.ones(2), jax.devices()[0])
    assert x.committed
    assert not model.first.weight.committed
    theirs = jax.jit(lambda w, x: (w, x))(model.first.weight, x)[0]
    ours = st.jit(lambda m, x: (m, x))(model, x)[0]
    assert ours.first.weight.committed == theirs.committed
    assert ours.first is ours.second["again"]
    committed = st.device_put(model, jax.devices()[0])
    assert st.jit(lambda m, x: m)(committed, x) is committed


def test_references(model):
    ref = jax.new_ref(jnp.zeros(2))
    holder = Pair(ref, [ref])

    @st.jit
    def f(holder, ref):
        assert holder.first is holder.second[0]
        holder.first[...] = holder.second[0][...] + 1
        return holder, ref

    with pytest.raises(Exception):  # noqa: B017 -- a reference aliased outside modules is packed on its own
        jax.jit(lambda a, b: a)(ref, ref)
    same, again = f(holder, ref)
    assert same is holder
    assert again is ref
    np.testing.assert_array_equal(ref[...], [1, 1])


def test_donating_the_result_donates_the_original(model):
    """Documented: they are one object."""
    model = st.tree.map(lambda x: x + 0, model)
    result = st.jit(lambda m: m)(model)
    st.jit(lambda m: st.tree.map(lambda x: x * 2, m), donate_argnums=0)(result)
    assert all(x.is_deleted() for x in st.tree.leaves(model) if is_array(x))


@jax.tree_util.register_pytree_node_class
class Wrapping:
    """Hands its attributes over in a new dictionary each time, within a new list, as treeo's trees do."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def tree_flatten(self):
        return ([dict(vars(self))],), "aux"

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(**children[0][0])


def test_containers_that_a_class_makes_when_it_is_taken_apart():
    part = Wrapping(w=jnp.ones(2))
    model = Wrapping(first=part, second=part, items=[jnp.zeros(2)])
    f = st.jit(lambda m: m)
    assert f(model) is model
    assert outputs(f, model) == 0
    assert st.jit(lambda m: [m.second])(model)[0] is part


@pytest.mark.parametrize(
    "change",
    [
        lambda m: vars(m).update(extra=m.first),
        lambda m: vars(m).pop("items"),
        lambda m: vars(m).update(first=Wrapping(w=m.first.w)),
        lambda m: vars(m).update(items=list(m.items)),
        lambda m: vars(m).update(renamed=vars(m).pop("items")),
        lambda m: vars(m.first).update(w=m.first.w + 1),
        lambda m: m.items.append(m.first.w),
    ],
    ids=["added", "removed", "other part", "other list", "renamed", "other array", "longer list"],
)
def test_what_is_changed_in_them_comes_out(change):
    part = Wrapping(w=jnp.ones(2))
    model = Wrapping(first=part, second=part, items=[jnp.zeros(2)])

    def run(m):
        change(m)
        return m

    result = st.jit(run)(model)
    assert result is not model
    expected = st.copy(model)
    change(expected)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
