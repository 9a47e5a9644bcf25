"""S5: one object, two treatments. Each conflict is an error that names every path and its treatment."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.messages import conflict
from tests.strategies import Layer, Pair


@pytest.fixture
def model():
    w = jnp.ones((2, 2))
    layer = Layer(w, jax.nn.relu, None)
    return Pair(layer, [layer, w])


def use(*trees):
    return sum((x.sum() for x in jax.tree.leaves(trees) if eqx.is_array(x)), jnp.float32(0))


def test_donated_and_not(model):
    error = conflict(lambda: st.jit(lambda a, b: use(a, b), donate_argnums=0)(model, model))
    assert error.paths == (
        *("a.first.weight", "a.second[0].weight", "a.second[1]"),
        *("b.first.weight", "b.second[0].weight", "b.second[1]"),
    )
    assert error.treatments == ("donated",) * 3 + ("not donated",) * 3
    assert "a, b = sharedtree.untie((a, b), lambda t: t[1:])" in str(error)
    assert all(path in str(error) for path in error.paths)
    assert not model.first.weight.is_deleted()


def test_donation_by_name_and_by_position():
    for options in ({"donate_argnums": (0, 1)}, {"donate_argnames": ("a", "b")}, {}):
        w = jnp.zeros(2)
        model = Pair(w, [w])
        f = st.jit(lambda a, b: (st.tree.map(lambda x: x + 1, a), a is b and jnp.array(1)), **options)
        result, same = f(model, model)
        assert same == 1
        assert result.first is result.second[0]
        assert w.is_deleted() == bool(options)
    model = Pair(jnp.ones(2), None)
    for donate in ({"donate_argnames": "b"}, {"donate_argnums": 1}, {"donate_argnums": -1}):
        f = st.jit(lambda a, b: use(a, b), **donate)
        assert "not donated" in str(conflict(lambda f=f: f(model, model)))
        if donate.get("donate_argnums") != -1:
            assert "not donated" in str(conflict(lambda f=f: f(model, b=model)))


def test_axes_of_two_arguments(model):
    filter_vmap = st.preserve_identities(eqx.filter_vmap)
    both = lambda a, b: use(a, b)
    error = conflict(lambda: st.vmap(both, in_axes=(0, 1))(model, model))
    assert set(error.treatments) == {"in_axes 0", "in_axes 1"}
    for call in (
        lambda: st.vmap(both, in_axes=None, axis_size=2)(model, b=model),
        lambda: filter_vmap(both, in_axes=(eqx.if_array(0), None))(model, model),
    ):
        assert set(conflict(call).treatments) == {"in_axes 0", "in_axes None"}
    assert filter_vmap(both, in_axes={"b": 0})(model, model).shape == (2,)  # another function, the same axis
    n = Pair(jnp.ones((2, 3)), None)
    assert st.vmap(both, in_axes=(1, -1))(n, n).shape == (3,)
    # And inside a module.
    axes = jax.tree.map(lambda x: 0 if eqx.is_array(x) else None, model)
    through_the_tied_layer = eqx.tree_at(lambda m: m.second[0].weight, axes, 1)
    error = conflict(lambda: st.vmap(use, in_axes=(through_the_tied_layer,))(model))
    assert dict(zip(error.paths, error.treatments, strict=True))["args[0].second[0].weight"] == "in_axes 1"
    assert st.vmap(use, in_axes=(axes,))(model).shape == (2,)


@pytest.mark.parametrize("transform", [st.vmap, st.preserve_identities(eqx.filter_vmap)])
def test_prefixes_that_reach_inside_modules(transform):
    """Against the vanilla transform on a module without sharing; outputs with another axis for each leaf."""
    vanilla = jax.vmap if transform is st.vmap else eqx.filter_vmap
    model = Pair(jnp.arange(6.0).reshape(2, 3), {"w": jnp.arange(12.0).reshape(3, 2, 2)})
    in_axes = Pair(0, {"w": 1})
    out_axes = Pair(1, {"w": None})

    def f(m, x):
        return Pair(m.first * 2 + m.second["w"].sum() + x, {"w": x}), m.first.sum()

    ours = transform(f, in_axes=(in_axes, None), out_axes=(out_axes, 0))(model, jnp.ones(3))
    theirs = vanilla(f, in_axes=(in_axes, None), out_axes=(out_axes, 0))(model, jnp.ones(3))
    assert eqx.tree_equal(ours, theirs)
    mapped = transform(f, in_axes=(in_axes, None), out_axes=(Pair(1, None), 0))(model, jnp.ones(3))
    assert eqx.tree_equal(mapped, theirs)


def test_prefix_that_does_not_fit(model):
    leaves = Pair(jnp.ones(2), jnp.ones(2))
    with pytest.raises(st.errors.SharingMismatchError, match=r"`in_axes` does not fit the tree at `m`.*`list`"):
        st.vmap(lambda m: m, in_axes=([0, 0],))(leaves)
    with pytest.raises(st.errors.SharingMismatchError, match=r"`out_axes` does not fit the tree at `\.second`"):
        st.vmap(lambda m: m, out_axes=Pair(0, Pair(0, 0)))(Pair(jnp.ones(2), [jnp.ones(2)]))
    f = st.vmap(lambda tree, x: x, in_axes=({"a": 0}, 0))
    other_keys = r"(?s)at `tree`: .*1 child .*\('a',\).*2 children .*'a', 'b'"
    with pytest.raises(st.errors.SharingMismatchError, match=other_keys):
        f({"a": model, "b": jnp.ones(2)}, jnp.ones(2))


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A module whose children have the names that the user chooses, as a `FrozenDict` of Flax."""

    def __init__(self, **children):
        self.children = children

    def tree_flatten_with_keys(self):
        return tuple((jax.tree_util.DictKey(name), self.children[name]) for name in self.children), tuple(self.children)

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(**dict(zip(names, children, strict=True)))


def of_rule(rule, module):
    f = st.custom_vjp(lambda module: module.children["a"].sum())
    f.defvjp(lambda module: (f(module), None), lambda _, y: (rule,))
    return st.grad(f)(module)


def tangent_of_rule(rule, module):
    f = st.custom_jvp(lambda module: module)
    f.defjvp(lambda primals, tangents: (primals[0], rule))
    return st.jvp(f, (module,), (module,))


BY_NAME = {
    "in_axes": lambda part, module: st.vmap(lambda m: m, in_axes=(part(0, None),))(module),
    "out_axes": lambda part, module: st.vmap(lambda m: m, out_axes=part(0, 0))(module),
    "in_shardings": lambda part, module: st.jit(lambda m: m, in_shardings=(part(placements()[0], None),))(module),
    "device_put": lambda part, module: st.device_put(module, part(*placements())),
    "partition": lambda part, module: st.tree.partition(module, part(True, False)),
    "wrt": lambda part, module: st.grad(lambda m: m.children["a"].sum(), wrt=part(True, False))(module),
    "combine": lambda part, module: st.tree.combine(part(None, W), module),
    "custom_vjp": lambda part, module: of_rule(part(W, None), module),
    "custom_jvp": lambda part, module: tangent_of_rule(part(W, W), module),
}
W = jnp.ones(2)


@pytest.mark.parametrize("name", BY_NAME)
def test_children_of_other_names_do_not_fit(name):
    """If they were paired by their positions, each would get what is meant for another."""
    module = Named(a=jnp.ones(2), b=jnp.zeros(2))
    BY_NAME[name](lambda a, b: Named(a=a, b=b), module)
    for other in (lambda a, b: Named(a=a, c=b), lambda a, b: Named(b=b, a=a)):
        with pytest.raises((st.errors.SharingMismatchError, TypeError), match="fit|differ"):
            BY_NAME[name](other, module)


def placements():
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec
    return jax.sharding.NamedSharding(mesh, spec("x")), jax.sharding.NamedSharding(mesh, spec())


def test_shardings_inside_a_module_and_of_results():
    one, other = placements()
    w = jnp.ones(2)
    tied, loose = Pair(w, w), Pair(w, w + 1)
    prefix = Pair(one, other)
    traces = []
    f = st.jit(
        lambda m: traces.append(m.first is m.second) or st.tree.map(lambda x: x * 2, m),
        in_shardings=(prefix,),
        out_shardings=prefix,
    )
    assert conflict(lambda: f(tied)).paths == ("m.first", "m.second")
    for model in (loose, Pair(w + 3, w + 4)):
        result = f(model)
        assert (result.first.sharding, result.second.sharding) == (one, other)
        assert traces == [False]
    uniform = st.jit(lambda m: st.tree.map(lambda x: x * 2, m), in_shardings=(one,), out_shardings=other)(tied)
    assert uniform.first is uniform.second
    assert uniform.first.sharding == other
    conflict(lambda: st.device_put(tied, prefix))
    placed = st.device_put(loose, prefix)
    assert (placed.first.sharding, placed.second.sharding) == (one, other)

    def twice(m):
        new = st.tree.map(lambda x: x * 2, m)
        return new, new

    a, b = st.jit(twice, out_shardings=(one, other))(tied)
    assert (a.first.sharding, b.first.sharding) == (one, other)
    a, b = st.jit(twice, out_shardings=(one, one))(tied)
    assert a is b
    made_tied = st.jit(lambda m: Pair(*[m.first + 1] * 2), out_shardings=prefix)
    assert conflict(lambda: made_tied(loose)).paths == ("result.first", "result.second")
    parted = st.jit(lambda m: st.untie(Pair(*[m.first + 1] * 2)), out_shardings=prefix)(loose)
    assert (parted.first.sharding, parted.second.sharding) == (one, other)


def test_static_and_traced(model):
    config = eqx.nn.Lambda(jnp.tanh)
    f = st.jit(lambda a, b: a.first.sum(), static_argnums=1)
    for _ in range(4):
        assert f(Pair(jnp.ones(2), config), 3) == 2
    error = conflict(lambda: f(Pair(jnp.ones(2), config), config))
    assert error.paths == ("b",)
    assert "static" in str(error)
    assert f(Pair(jnp.ones(2), None), config) == 2


def test_an_unregistered_transform_hides_its_treatments(model):
    hidden = st.preserve_identities(lambda f: jax.vmap(f, in_axes=(0, None)))
    error = conflict(lambda: hidden(lambda a, b: use(a, b))(model, model))
    assert "register_transform" in str(error)
    assert {"a.first.weight", "b.first.weight"} <= set(error.paths)
    assert conflict(lambda: hidden(lambda a, b: use(a, b))(model, b=model)).paths
    inside = st.preserve_identities(lambda f: jax.jit(jax.vmap(f)))(lambda m: m)(model)
    assert inside.first is inside.second[0]


def test_register_transform(model):
    def logged(f):
        return jax.jit(jax.checkpoint(f))

    def mapped(f, **options):
        return jax.vmap(f, **options)

    same = lambda a, b: jnp.array(a is b)
    conflict(lambda: st.preserve_identities(logged)(same)(model, model))
    st.register_transform(logged)
    assert st.preserve_identities(logged)(same)(model, model)
    st.register_transform(mapped, jax.vmap)
    conflict(lambda: st.preserve_identities(mapped)(lambda a, b: use(a, b), in_axes=(0, None))(model, model))
    st.register_transform(mapped, lambda transform, f, policy, options: lambda *args: "my own")
    assert st.preserve_identities(mapped)(same)(model, model) == "my own"
    with pytest.raises(TypeError, match="adapter"):
        st.register_transform(mapped, 3)


@pytest.mark.parametrize("transform", [st.vmap, st.preserve_identities(eqx.filter_vmap)])
def test_axes_of_results(transform):
    n = Pair(jnp.ones((2, 3)), None)

    def twice(m):
        new = Pair(*[m.first * 2] * 2)
        return new, new

    a, b = transform(twice, out_axes=(0, 1))(n)
    assert (a.first.shape, b.first.shape) == ((2, 3), (3, 2))
    assert a.first is a.second
    assert b.first is b.second
    a, b = transform(twice, out_axes=(1, -1))(n)  # the same axis by two names
    assert a is b
    assert a.first.shape == (3, 2)


def test_prevent_cse_of_a_part_of_the_arguments():
    """As JAX has it on the untied twin; one weight under two of them is an error."""

    def f(m, d, *, scale=1.0):
        return jnp.sin(m.first * m.second) @ d["x"] * jnp.sin(scale * d["w"]).sum()

    w, d = jnp.arange(3.0), {"w": jnp.ones(3), "x": jnp.ones(3)}
    tied, twin = Pair(w, w), Pair(w, w + 0)
    flags = []

    def find(jaxpr):
        for eqn in jaxpr.eqns:
            flags.extend([eqn.params["prevent_cse"]] if "prevent_cse" in eqn.params else [])

    with contextlib.suppress(Exception):  # whatever an older JAX says
        find(jax.make_jaxpr(jax.checkpoint(f, prevent_cse=(True, False)))(twin, d).jaxpr)
    if not flags or isinstance(flags[0], bool):
        pytest.skip("this JAX has no prefix here")
    for prefix, keywords, expected in (
        ((True, False), {}, (True, False, False)),
        ((Pair(False, False), {"w": True, "x": False}), {}, (False, True, False)),
        ((False, (False, True)), {}, (False, False, True)),
        (((True, False), {"scale": True}), {"scale": 2.0}, (True, True, False, False)),
        (((True, False), False), {"scale": 2.0}, (True, False, False, False)),
    ):
        own = st.checkpoint(f, prevent_cse=prefix)
        flags.clear()
        find(st.make_jaxpr(lambda m, own=own, keywords=keywords: own(m, d, **keywords))(tied).jaxpr)
        (found,) = flags
        assert sorted(found) == sorted(expected)
        gradient = st.grad(lambda m, own=own, keywords=keywords: own(m, d, **keywords))(tied)
        want = jax.grad(lambda m, keywords=keywords: f(m, d, **keywords))(twin)
        np.testing.assert_allclose(gradient.first, want.first + want.second, rtol=1e-6)
    conflict(lambda: st.checkpoint(lambda m, d: 0.0, prevent_cse=(True, False))(tied, {"m": tied}))
    for wrong in ((True,), (True, False, True), ({"m": True},), ((True, False, True), False)):
        with pytest.raises(ValueError, match="prefix|prevent_cse"):
            st.checkpoint(f, prevent_cse=wrong)(tied, d)
    with pytest.raises((TypeError, ValueError)):
        st.checkpoint(lambda **named: named["m"].first, prevent_cse=((), {"d": True}))(m=tied)
