"""`equinox.filter_closure_convert`: the converted function takes and gives models with sharing, and is a pytree.

The oracle is Equinox's own, on models without sharing or on a model with one copy of the weight, written by hand.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.strategies import Mutable, Pair
from tests.test_solvers import Net

closure_convert = st.preserve_identities(eqx.filter_closure_convert)


def tied(value=1.0):
    w = jnp.array([value, value + 1])
    return Net(w, w)


def untied(value=1.0):
    return Net(jnp.array([value, value + 1]), jnp.array([value, value + 1]))


def scaling(scale):
    """A function with a closure."""

    def f(net, power=1):
        return Net(scale * net.embed**power, scale * net.head**power)

    return f


def plain(net):
    return Net(2 * net.embed, net.embed + net.head)


def test_ties_inside_and_outside():
    seen = []
    scale = jnp.array(3.0)

    def f(net, other, *, factor):
        seen.append((net.embed is net.head, net is other, net.name))
        w = factor * scale * net.embed
        return {"net": Net(w, w), "more": [w[:1], net.name]}

    net = tied()
    converted = closure_convert(f, net, net, factor=jnp.ones(()))
    assert seen == [(True, True, "net")]
    another = tied(4.0)
    result = converted(another, another, factor=jnp.array(2.0))
    assert result["net"].embed is result["net"].head
    np.testing.assert_allclose(result["net"].embed, [24.0, 30.0])
    assert len(seen) == 1  # it is not traced again
    # So have the shapes, as which the example can be given, too.
    (given, again), named = converted.in_struct
    assert given is again
    assert given.embed is given.head
    assert named["factor"].shape == ()
    shapes = converted.out_struct
    assert shapes["net"].embed is shapes["net"].head
    assert (shapes["more"][0].shape, shapes["more"][1]) == ((1,), "net")
    of_shapes = closure_convert(lambda other: other.head + net.head, st.eval_shape(lambda net: net, net))
    np.testing.assert_allclose(of_shapes(tied(2.0)), [3.0, 5.0])


def test_what_it_closes_over_is_there_once():
    model = tied(3.0)
    net = tied()
    converted = closure_convert(lambda x: x.embed * model.embed + model.head, net)
    assert [each is model.embed for each in converted.consts] == [True]
    assert len(converted.jaxpr.invars) == 1
    vanilla = eqx.filter_closure_convert(lambda x: x.embed * model.embed + model.head, net)
    assert len(vanilla.jaxpr.invars) == 2
    np.testing.assert_array_equal(converted(net), vanilla(net))


def test_as_vanilla_without_sharing():
    for f in (plain, scaling(3.0), scaling(jnp.array([1.0, 2.0]))):
        ours, vanilla = (convert(f, untied()) for convert in (closure_convert, eqx.filter_closure_convert))
        for net in (untied(), untied(7.0)):
            assert bool(eqx.tree_equal(ours(net), vanilla(net)))
        assert eqx.tree_equal(ours.out_struct, vanilla.out_struct) is True
        assert eqx.tree_equal(ours.in_struct, vanilla.in_struct) is True
        for args in ((), (untied(), untied()), (Net(jnp.ones(3), jnp.ones(2)),)):
            for each in (ours, vanilla):
                with pytest.raises(ValueError, match="example arg"):
                    each(*args)
    x = jnp.ones(2)
    double = lambda x: 2 * x
    assert type(closure_convert(double, x)) is type(eqx.filter_closure_convert(double, x))
    with pytest.raises(TypeError, match="not callable"):
        closure_convert(3, x)


def test_a_function_without_a_closure_is_called_as_it_is():
    def chooses(net):
        return net if net.embed[0] > 1 else None

    net = tied(5.0)
    converted = closure_convert(chooses, tied())
    assert converted(net) is net
    assert converted(tied(0.0)) is None
    assert closure_convert(plain, untied()).out_struct.embed.shape == (2,)
    shapes = closure_convert(lambda net: net, net).out_struct
    assert shapes.embed is shapes.head
    with pytest.raises(st.errors.SharingMismatchError, match=r"`net\.embed` and `net\.head`"):
        converted(untied())


def tied_to(w):
    return Net(w, w)


def converted_and_given(weight):
    net = tied_to(weight)
    scale = 2 * weight
    return closure_convert(lambda net: (scale * net.embed * net.head).sum(), net), net


def test_it_crosses_transforms():
    """(2 w) · w · w, differentiated in what was closed over, in the argument, and in both."""
    w = jnp.array([1.0, 3.0])
    converted, net = converted_and_given(w)
    want = 2 * (w**3).sum()
    count = 0

    def call(g, net):
        nonlocal count
        count += 1
        return g(net)

    jitted = st.jit(call)
    for _ in range(2):
        np.testing.assert_allclose(jitted(converted, tied_to(w)), want)
        jitted(jax.tree.map(lambda x: x, converted), st.copy(net))
    assert count == 1
    np.testing.assert_allclose(st.preserve_identities(eqx.filter_jit)(call)(converted, net), want)
    np.testing.assert_allclose(eqx.filter_jit(lambda g, w: g(tied_to(w)))(converted, w), want)
    np.testing.assert_allclose(st.grad(call)(converted, net).consts[0], w * w)
    np.testing.assert_allclose(eqx.filter_grad(lambda g, w: g(tied_to(w)))(converted, w).consts[0], w * w)
    of_net = st.grad(lambda net, g: g(net))(net, converted)
    assert of_net.embed is of_net.head
    np.testing.assert_allclose(of_net.embed, 4 * w * w)
    np.testing.assert_allclose(jax.grad(lambda w: call(*converted_and_given(w)))(w), 6 * w * w)
    many = st.vmap(call, in_axes=(None, 0))(converted, tied_to(jnp.stack([w, 2 * w])))
    np.testing.assert_allclose(many, [want, 4 * want])


def test_ties_that_the_example_lacks():
    """Arrays alias by accident, so a tie of arrays in the call only is none; modules must agree."""
    converted = closure_convert(scaling(jnp.array(2.0)), untied())
    np.testing.assert_allclose(converted(tied(3.0)).head, [6.0, 8.0])
    leaf = tied()
    both = closure_convert(lambda two: two.first.embed * jnp.float32(2), Pair(tied(), tied()))
    np.testing.assert_allclose(both(Pair(tied(), tied())), [2.0, 4.0])
    with pytest.raises(st.errors.SharingMismatchError, match=r"`two\.first` and `two\.second`"):
        both(Pair(leaf, leaf))
    tied_both = closure_convert(lambda two: two.first.embed * leaf.head, Pair(leaf, leaf))
    np.testing.assert_allclose(tied_both(Pair(leaf, leaf)), [1.0, 4.0])
    with pytest.raises(st.errors.SharingMismatchError, match="sharedtree.retie"):
        tied_both(Pair(tied(), tied()))
    np.testing.assert_allclose(tied_both(Pair(leaf, leaf)), [1.0, 4.0])  # and after an error


OTHERS = [
    (lambda: ((tied(), tied()), {}), r"they are `\(net, other=\)`, in those of the call `\(net, args\[1\]\)`"),
    (lambda: ((tied(),), {}), r"they are `\(net, other=\)`, in those of the call `\(net\)`"),
    (lambda: ((tied(),), {"other": untied()}), r"`net` and `other`"),
    (lambda: ((3.0,), {"other": tied()}), r"at `net`"),
    (lambda: ((Pair(tied(), tied()),), {"other": tied()}), r"at `net`"),
    (lambda: ((Net(*[jnp.ones(2)] * 2, name="other"),), {"other": tied()}), r"at `net\.name`"),
]


def test_other_structure_is_refused():
    scale = jnp.array(2.0)
    net = tied()
    converted = closure_convert(lambda net, other: scale * net.embed * other.head, net, other=net)
    for make, where in OTHERS:
        args, kwargs = make()
        with pytest.raises(st.errors.SharingMismatchError, match=where):
            converted(*args, **kwargs)
        np.testing.assert_allclose(converted(net, other=net), [2.0, 8.0])


def test_nothing_is_written_back():
    for options in ({"in_place": True}, {"policy": st.Policy(in_place=True)}):
        with pytest.raises(ValueError, match="not what it changed"):
            st.preserve_identities(eqx.filter_closure_convert, **options)(plain, tied())
    model = Mutable(x=jnp.ones(2))

    def f(m):
        m.x = m.x + model.x
        return m

    np.testing.assert_allclose(closure_convert(f, model)(model).x, [2.0, 2.0])
    np.testing.assert_allclose(model.x, [1.0, 1.0])


def test_a_lost_tie_warns_when_it_is_converted():
    scale = 2.0
    with pytest.warns(st.UntiedWarning, match="result.embed"):
        converted = closure_convert(lambda net: Net(scale * net.embed, scale * net.head), tied())
    assert converted(tied()).embed is not None  # and only then


def test_policies():
    scale = jnp.array(2.0)
    w = jnp.ones(2)
    f = lambda d: scale * float(d["a"] is d["b"])
    given = {"a": w, "b": w}
    assert closure_convert(f, given)(given) == 0
    with st.Context(st.Policy(containers=True)):
        converted = closure_convert(f, given)
    assert converted(given) == 2  # as it was made
