"""Sharding on eight devices: collected by pytest in a process of its own, which `test_shards` starts.

A process has as many devices as it had when JAX started. The oracle is vanilla JAX, on the untied twin of the model or
on a model with one copy of the weight, written by hand.
"""

import collections
import contextlib
import functools
import re

import equinox as eqx
import hypothesis
import hypothesis.strategies as hs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sharedtree as st
from tests.messages import conflict
from tests.models import BiasedNet
from tests.strategies import Mutable, Pair

IN_PLACE = st.Policy(in_place=True)
IGNORE = st.Policy(on_untie="ignore")


def counter(count):
    return Mutable(count=count, same=count, table=weight())


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture
def explicit():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


NET = BiasedNet(P("x"), P("x"), None)
"""How both arrays of a model are split."""


def weight():
    return jnp.arange(32.0).reshape(8, 4)


def tied():
    w = weight()
    return BiasedNet(w, w)


def untied():
    return BiasedNet(weight(), weight())


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same_values(one, other):
    for a, b in zip(values(one), values(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def same_arrays(found, expected):
    """Equal values, in the same places."""
    same_values(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.sharding, a.committed) == (b.sharding, b.committed)


def eqns_of(jaxpr, name):
    """All equations of a primitive, wherever they are nested."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name == name else []
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            found += eqns_of(inner, name) if hasattr(inner, "eqns") else []
    return found


def test_a_tied_leaf_is_one_input_and_one_output(mesh):
    for in_specs, out_specs in ((P("x"), P("x")), ((NET,), NET)):
        f = st.shard_map(lambda net: st.tree.map(jnp.sin, net), mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        (eqn,) = eqns_of(st.jit(lambda net, f=f: f(net)).trace(tied()).jaxpr.jaxpr, "shard_map")
        assert (len(eqn.invars), len(eqn.outvars)) == (1, 1)


def nets_in(tree):
    is_net = lambda value: isinstance(value, BiasedNet)
    return list(filter(is_net, jax.tree.leaves(tree, is_leaf=is_net)))


# What is called, its specifications, the arguments that a model is part of, and what the model and another are inside.
AS_VANILLA = {
    "one specification for all": (
        lambda net: (st.tree.map(lambda w: 2 * w, net), jax.lax.psum((net.embed * net.head).sum(), "x")),
        P("x"), (P("x"), P()), lambda net: (net,), (True, True),
    ),
    "an array in two arguments": (
        lambda net, other: jax.lax.psum((net.embed * other.embed[0]).sum(), "x"),
        (P("x"), P()), P(), lambda net: (net, BiasedNet(net.embed, net.embed)), (True, False),
    ),
    "results that leave in two ways": (
        lambda net: (net, net), P(), (BiasedNet(P(), P(), None), P("x")), lambda net: (net,), (True, True),
    ),
    **{
        f"one specification written as {other}": (
            lambda a, b: a.embed + b.head, (P("x"), other), P("x"), lambda net: (net, net), (True, True),
        )
        for other in (P("x", None), P(("x",)), P(("x",), ()))
    },
    "where no leaf is traced there is no treatment": (
        lambda a, b, x: x * 2, (P("x"), P(), P("x")), P("x"),
        lambda _: (*[BiasedNet(None, None)] * 2, weight()), (True, True),
    ),
    **{
        f"in a container as {in_specs}": (
            lambda d: {"a": d["net"].embed + d["net"].head, "b": d["y"]}, in_specs, out_specs,
            lambda net: ({"net": net, "y": jnp.ones(3)},), (True, True),
        )
        for in_specs, out_specs in (
            (({"net": NET, "y": P()},), {"a": P("x"), "b": P()}),
            (({"net": P("x"), "y": P()},), {"a": P("x"), "b": P()}),
            (P(), P()),
        )
    },
    "static": (
        lambda net, x: x * net.embed.sum() * isinstance(net.embed, np.ndarray), (None, P("x")), P("x"),
        lambda _: (BiasedNet(*[np.ones(2, np.float32)] * 2), weight()), (True, True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AS_VANILLA)
@pytest.mark.sampled(every=3)
def test_as_vanilla(mesh, name):
    f, in_specs, out_specs, arguments, expected = AS_VANILLA[name]
    ours, theirs = [], []

    def seeing(seen, *args):
        nets = nets_in(args)
        seen.append((nets[0].embed is nets[0].head, nets[0].embed is nets[-1].embed))
        return f(*args)

    def results_of(library, seen, net):
        mapped = library.shard_map(
            functools.wraps(f)(functools.partial(seeing, seen)), mesh=mesh, in_specs=in_specs, out_specs=out_specs
        )
        assert mapped.__name__ == f.__name__
        jitted = library.jit(lambda *args: mapped(*args))
        return [call(*arguments(net)) for call in (mapped, mapped, jitted, jitted)]

    for found, vanilla in zip(results_of(st, ours, tied()), results_of(jax, theirs, untied()), strict=True):
        same_arrays(found, vanilla)
        assert all(net.embed is net.head for net in nets_in(found))
    # Traced as often, too.
    assert ours == [expected] * len(theirs)


def test_a_module_under_two_specifications(mesh):
    a = b = tied()
    mapped = lambda f, *in_specs: st.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=P("x"))
    for one in (P("x"), None):
        error = conflict(lambda one=one: mapped(lambda a, b: 0, one, P())(a, b))
        assert error.paths == ("a.embed", "a.head", "b.embed", "b.head")
        assert error.treatments == (f"in_specs {one}",) * 2 + (f"in_specs {P()}",) * 2
        assert "jax.shard_map" in str(error)
    fix = re.search(r"^    (a, b = .*|b = .*)", str(error), re.MULTILINE)
    names = {"a": a, "b": b, "sharedtree": st}
    exec(fix.group(1), names)
    product = mapped(lambda a, b: a.embed @ b.head.T, P("x"), P())(names["a"], names["b"])
    np.testing.assert_array_equal(product, weight() @ weight().T)
    error = conflict(lambda: mapped(lambda t: t, Pair(NET, BiasedNet(P(), P(), None)))(Pair(a, a)))
    assert error.paths == ("t.first.embed", "t.first.head", "t.second.embed", "t.second.head")


def test_an_explicit_mesh_needs_no_specifications(explicit):
    w = jax.device_put(weight(), NamedSharding(explicit, P("x")))
    with jax.set_mesh(explicit):
        seen = []

        def f(net):
            seen.append((net.embed is net.head, net.embed.shape))
            return net.embed + net.head

        result = st.shard_map(f, out_specs=P("x"))(BiasedNet(w, w))
        assert seen == [(True, (2, 4))]
        np.testing.assert_array_equal(result, 2 * weight())
        assert result.sharding == jax.shard_map(lambda w: w + w, out_specs=P("x"))(w).sharding
        with pytest.raises(ValueError, match="in_specs"):
            st.shard_map(f, out_specs=P("x"), policy=IN_PLACE)(BiasedNet(w, w))


def test_some_axes_of_the_mesh_and_other_transforms(mesh):
    both = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    options = {"mesh": both, "in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
    f = st.jit(lambda net: st.shard_map(lambda net: st.tree.map(lambda w: w * 2, net), **options)(net))
    result = f(tied())
    assert result.embed is result.head
    np.testing.assert_array_equal(result.embed, 2 * weight())

    def inside(net):
        net, _ = st.scan(lambda net, _: (st.tree.map(lambda w: w / 2, net), None), net, length=2)
        return st.vmap(lambda net: net.embed + net.head)(net)

    result = st.shard_map(inside, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(tied())
    np.testing.assert_array_equal(result, weight() / 2)
    mapped = st.shard_map(lambda net: net.embed + net.head, mesh=mesh, in_specs=(NET,), out_specs=P("x"))
    w = jnp.stack([weight(), weight() + 1])
    np.testing.assert_array_equal(st.vmap(mapped)(BiasedNet(w, w)), 2 * w)


ERRORS = [
    *[{"in_specs": specs} for specs in ((P("x"), P("x")), [P("x")], {"net": P("x")}, P("z"), (5,))],
    *[{"in_specs": specs} for specs in (P("x", None, None), P(None, "x"))],
    *[{"out_specs": specs} for specs in (5, P("z"), P())],
    *[{"mesh": mesh} for mesh in (None, 5)],
]


def texts_of_errors(call):
    """What vanilla JAX and the library say of a call, which have an error of one class."""
    with pytest.raises(Exception) as expected:  # noqa: PT011 -- whatever it is
        call(jax)
    with pytest.raises(expected.type) as found:
        call(st)
    return str(expected.value), str(found.value)


def test_errors_are_those_of_jax(mesh):
    mapped = lambda library, **o: library.shard_map(
        lambda net: net, **{"mesh": mesh, "in_specs": P("x"), "out_specs": P("x"), **o}
    )
    for call in (
        lambda library: mapped(library)(net=untied()),
        lambda library: mapped(library, in_specs=P("x", None, None))(weight()),
        *[lambda library, options=options: mapped(library, **options)(untied()) for options in ERRORS],
    ):
        expected, found = texts_of_errors(call)
        assert found == expected
    pmapped = lambda library, **options: library.pmap(lambda net: net, **options)
    for call in (
        lambda library: pmapped(library)(BiasedNet(jnp.ones(9), jnp.ones(9))),
        *[lambda library, axes=axes: pmapped(library, in_axes=axes)(untied()) for axes in ("x", None)],
        lambda library: pmapped(library, out_axes="x")(untied()),
        lambda library: pmapped(library, static_broadcasted_argnums=3)(untied()),
    ):
        expected, found = texts_of_errors(call)
        assert found.partition("/")[0] == expected.partition("/")[0]
    # This one names all arguments, and so also how they are packed.
    texts_of_errors(lambda library: pmapped(library, in_axes=(0, 0))(untied()))


def test_errors_name_the_leaf(mesh):
    shard = lambda in_specs, out_specs: st.shard_map(lambda n: n, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    with pytest.raises(ValueError, match=r"out_specs is P\w*\(\)"):
        st.jit(shard(P("x"), BiasedNet(P("x"), P(), None)))(untied())
    with pytest.raises(ValueError, match=r"\(\*args\).head has shape float32\[1,4\]"):
        shard(P("x"), BiasedNet(P("x"), P("x", None, None)))(untied())
    with pytest.raises((TypeError, ValueError), match="out_specs"):
        shard(P("x"), BiasedNet(P("x"), None, None))(untied())
    for wrong in (Pair(P(), P()), {"a": P()}):
        with pytest.raises(st.errors.SharingMismatchError, match="`out_specs` does not fit"):
            shard(P("x"), wrong)(tied())
        with pytest.raises(st.errors.SharingMismatchError, match="`in_specs` does not fit"):
            shard((wrong,), P())(tied())


def loss(net, x):
    return (((x @ net.embed) @ net.head.T) ** 2).mean()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.sampled(every=2)
def test_data_parallel_gradients(mesh, check_vma):
    x = jnp.linspace(0, 1, 128).reshape(16, 8)

    def single(w):
        return jax.value_and_grad(lambda w: loss(BiasedNet(w, w), x))(w)

    def step(net, x):
        value, gradient = st.value_and_grad(lambda net: jax.lax.pmean(loss(net, x), "x"))(net)
        assert gradient.embed is gradient.head
        return value, gradient

    def outside(net, x):
        mean = st.shard_map(
            lambda net, x: jax.lax.pmean(loss(net, x), "x"),
            mesh=mesh,
            in_specs=(BiasedNet(P(), P(), None), P("x")),
            out_specs=P(),
            check_vma=check_vma,
        )
        return st.value_and_grad(mean)(net, x)

    functions = [outside]
    if check_vma:  # without it JAX does not know that a gradient is to be summed over devices
        functions.append(st.shard_map(step, mesh=mesh, in_specs=(P(), P("x")), out_specs=P()))
    for f in functions:
        value, gradient = st.jit(f)(tied(), x)
        assert gradient.embed is gradient.head
        np.testing.assert_allclose(value, single(weight())[0], rtol=1e-5)
        np.testing.assert_allclose(gradient.embed, single(weight())[1], rtol=1e-4)


def test_what_the_function_changes_goes_out_as_it_came_in(mesh):
    seen = []

    def f(counter, x):
        seen.append(counter.count is counter.same)
        counter.count = counter.same = counter.count + jax.lax.psum(x.sum(), "x")
        counter.table = counter.table + x
        return x

    whole = counter(jnp.zeros(()))
    options = {"mesh": mesh, "out_specs": P("x"), "policy": IN_PLACE}
    with pytest.raises(ValueError, match="replicat"):  # what is whole on each device may not differ there
        st.shard_map(f, in_specs=(P(), P("x")), **options)(whole, weight())
    assert whole.table.shape == (8, 4)
    assert whole.count == 0
    split = counter(jnp.zeros(()))
    specs = st.tree.map(lambda leaf: P() if leaf.ndim == 0 else P("x"), split)
    st.shard_map(f, in_specs=(specs, P("x")), **options)(split, weight())
    assert split.count is split.same
    assert split.count == weight().sum()
    np.testing.assert_array_equal(split.table, 2 * weight())
    assert all(seen)


SPECS = (P("x"), P(None, "x"), P())


@hypothesis.given(hs.data())
def test_as_vanilla_on_the_untied_twin(data):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    arrays = [jnp.arange(64.0).reshape(8, 8) + i for i in range(3)]
    many = lambda leaves: Pair(leaves, None)
    which = data.draw(hs.lists(hs.sampled_from(range(3)), min_size=1, max_size=5))
    choose = lambda: data.draw(hs.lists(hs.sampled_from(SPECS), min_size=len(which), max_size=len(which)))
    in_specs = choose()
    model = many([arrays[i] for i in which])
    twin = many([arrays[i] + 0 for i in which])
    inside = []

    def f(model):
        inside.append(model.first)
        return many([jax.lax.all_gather(x, "x") if each else x for each, x in zip(gathered, model.first, strict=True)])

    gathered = [spec == P() for spec in in_specs]
    out_specs = [P() if each else spec for each, spec in zip(gathered, in_specs, strict=True)]
    options = {"mesh": mesh, "in_specs": (many(in_specs),), "out_specs": many(out_specs), "check_vma": False}
    result = st.jit(st.shard_map(f, **options, policy=IGNORE), policy=IGNORE)(model)
    expected = jax.jit(jax.shard_map(f, **options))(twin)
    same_arrays(result, expected)
    leaves = inside[0]
    for i in range(len(which)):
        for j in range(len(which)):
            assert (leaves[i] is leaves[j]) == (which[i] == which[j] and in_specs[i] == in_specs[j])


def test_pmap():
    """Under one axis ties are kept, on both sides; inside of a module each array may have an axis of its own."""
    seen = []

    def f(net, k):
        seen.append((net.embed is net.head, net.embed.shape, net.head.shape))
        total = jax.lax.psum(net.embed.sum(), "i")
        return BiasedNet(net.embed * k, net.head + total, None if net.bias is None else net.bias * 2)

    parted = BiasedNet(weight(), weight(), jnp.arange(16.0).reshape(2, 8))
    parted_axes = {"in_axes": (BiasedNet(0, None, 1), None), "out_axes": BiasedNet(1, None, 0)}
    one_axis = {"in_axes": (0, None), "out_axes": 0}
    for options, net, twin, shapes in (
        (one_axis, tied(), untied(), (True, (4,), (4,))),
        (parted_axes, BiasedNet(parted.embed, parted.embed, parted.bias), parted, (False, (4,), (8, 4))),
    ):
        options |= {"axis_name": "i", "static_broadcasted_argnums": 1}
        mapped, vanilla = st.pmap(f, policy=IGNORE, **options), jax.pmap(f, **options)
        seen.clear()
        for k in (2, 2, 3):
            result = mapped(net, k)
        assert seen == [shapes] * 2
        same_arrays(result, vanilla(twin, 3))
    both = st.pmap(
        lambda net: st.tree.map(jnp.sin, net), in_axes=(BiasedNet(0, 0, None),), out_axes=BiasedNet(0, 0, None)
    )(tied())
    assert both.embed is both.head


def test_pmap_conflicts_and_donation():
    net = tied()
    error = conflict(lambda: st.pmap(lambda a, b: a.embed, in_axes=(0, None))(net, net))
    assert error.paths == ("a.embed", "a.head", "b.embed", "b.head")
    assert error.treatments == ("in_axes 0",) * 2 + ("in_axes None",) * 2
    error = conflict(lambda: st.pmap(lambda a, b: a.embed, donate_argnums=0)(net, net))
    assert error.treatments == ("donated",) * 2 + ("not donated",) * 2
    conflict(lambda: st.pmap(lambda a, b: a.embed, donate_argnums=0)(net, net.embed))
    assert not net.embed.is_deleted()
    w = jax.pmap(lambda x: x)(weight())
    result = st.pmap(lambda net: st.tree.map(lambda w: w + 1, net), donate_argnums=0)(BiasedNet(w, w))
    assert w.is_deleted()
    assert result.embed is result.head
    np.testing.assert_array_equal(result.embed, weight() + 1)


def test_pmap_in_place():
    def f(model, x):
        model.count = model.same = model.count + x
        model.table = model.table + model.count
        return x

    model = counter(jnp.zeros(8))
    st.pmap(f, policy=IN_PLACE)(model, jnp.arange(8.0))
    assert model.count is model.same
    np.testing.assert_array_equal(model.count, jnp.arange(8.0))
    np.testing.assert_array_equal(model.table, weight() + jnp.arange(8.0)[:, None])


def test_pmap_in_place_of_one_object_for_all_devices():
    """What each device has is another value. The first one's is written, which the warning says that it would be."""

    class Seen(st.Module):
        def __init__(self):
            self.x = st.state_field(jnp.zeros(()))

    def see(model, x):
        model.x = x

    with pytest.warns(st.errors.LostChangeWarning, match="`in_place=True` would write the value of the first device"):
        st.pmap(see, in_axes=(None, 0))(Seen(), 3 + jnp.arange(8.0))
    model = Seen()
    st.pmap(see, in_axes=(None, 0), in_place=True)(model, 3 + jnp.arange(8.0))
    assert model.x == 3


ROWS = P("x")


def sharded(mesh, spec=ROWS):
    return NamedSharding(mesh, spec)


def test_filter_shard(mesh):
    filter_shard = st.preserve_identities(eqx.filter_shard)
    net = tied()
    for place in (sharded(mesh), jax.devices()[3], BiasedNet(sharded(mesh), sharded(mesh), None)):
        moved = filter_shard(net, place)
        assert moved.embed is moved.head
        expected = eqx.filter_shard(untied(), place)
        assert moved.embed.sharding == expected.embed.sharding
        both = st.jit(lambda net: filter_shard(net, place))(net) if not isinstance(place, jax.Device) else moved
        assert both.embed is both.head
    error = conflict(lambda: filter_shard(tied(), BiasedNet(sharded(mesh), sharded(mesh, P()), None)))
    assert error.paths == ("tree.embed", "tree.head")
    assert "equinox.filter_shard" in str(error)
    mixed = filter_shard({"net": tied(), "name": "text", "number": 1.5}, sharded(mesh, P()))
    assert mixed["net"].embed is mixed["net"].head
    assert (mixed["name"], mixed["number"]) == ("text", 1.5)


def test_device_put_and_constraints_inside_a_module(mesh):
    net = tied()
    for place in (sharded(mesh), BiasedNet(sharded(mesh), sharded(mesh), None)):
        moved = st.device_put(net, place)
        assert moved.embed is moved.head
        assert [shard.data.shape for shard in moved.embed.addressable_shards] == [(1, 4)] * 8
    error = conflict(lambda: st.device_put(net, BiasedNet(sharded(mesh), sharded(mesh, P()), None)))
    assert error.paths == ("tree.embed", "tree.head")
    where = BiasedNet(sharded(mesh, P(None, None)), sharded(mesh, P(None, None)), None)
    f = st.jit(
        lambda net: st.with_sharding_constraint(net, where),
        in_shardings=(BiasedNet(sharded(mesh), sharded(mesh), None),),
    )
    assert len(eqns_of(f.trace(net).jaxpr.jaxpr, "sharding_constraint")) == 1
    result = f(net)
    assert result.embed is result.head
    assert result.embed.is_fully_replicated


def test_specifications_that_differ_within_one_module_are_cut_and_said(mesh):
    model = BiasedNet(jnp.arange(64.0).reshape(8, 8), None)
    model = BiasedNet(model.embed, model.embed)
    f = lambda net: net.embed + net.head.T
    options = {"mesh": mesh, "in_specs": (BiasedNet(P("x"), P(None, "x"), None),), "out_specs": P("x")}
    with pytest.warns(st.UntiedWarning, match=r"(?s)cut in.*`net.embed`: in_specs.*`net.head`: in_specs") as caught:
        result = st.shard_map(f, **options)(model)
    assert len(caught) == 1
    np.testing.assert_array_equal(result, jax.shard_map(f, **options)(BiasedNet(model.embed + 0, model.head + 0)))
    st.shard_map(f, **options)(st.untie(model))


RULES = (("x",), ("x", None), (("x",),), (None, "x"), (), (None, None), None)
"""Specifications that a rule may answer; some of them are one place written in several ways. None is no sharding."""

BY_RULES = {
    "in_shardings": lambda model, rules: st.jit(lambda m: st.tree.map(lambda x: x + 1, m), in_shardings=(rules,))(
        model
    ),
    "out_shardings": lambda model, rules: st.jit(lambda m: st.tree.map(lambda x: x + 1, m), out_shardings=rules)(model),
    "in place": lambda model, rules: st.jit(
        lambda m: st.tree.map(lambda x: x + 1, m), out_shardings=rules, in_place=True
    )(model),
    "device_put": lambda model, rules: st.tree.map(lambda x: x + 1, st.device_put(model, rules)),
    "with_sharding_constraint": lambda model, rules: st.jit(
        lambda m: st.tree.map(lambda x: x + 1, st.with_sharding_constraint(m, rules))
    )(model),
}


def place_of(answer):
    """What a specification says of an array with two axes: which one is split, if one is; None if nothing is said."""
    return None if answer is None else tuple(i for i, axis in enumerate(answer) if axis in ("x", ("x",)))


@pytest.mark.parametrize("name", BY_RULES)
@hypothesis.settings(max_examples=15)
@hypothesis.given(data=hs.data())
@pytest.mark.sampled(every=3)
def test_rules_by_name_keep_a_tie_or_are_refused(name, data):
    """The oracle is written by hand: whether all paths of each array have one place."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    arrays = [jnp.arange(64.0).reshape(8, 8) + 100 * i for i in range(3)]
    which = data.draw(hs.lists(hs.sampled_from(range(3)), min_size=2, max_size=5))
    rule = hs.sampled_from([each for each in RULES if each is not None or name != "with_sharding_constraint"])
    answers = data.draw(hs.lists(rule, min_size=len(which), max_size=len(which)))
    if data.draw(hs.booleans()):  # otherwise, rules seldom agree
        first = {own: place_of(answer) for own, answer in reversed(list(zip(which, answers, strict=True)))}
        written = {own: [each for each in RULES if place_of(each) == place] for own, place in first.items()}
        answers = [data.draw(hs.sampled_from(written[own])) for own in which]
    half = len(which) // 2
    build = lambda leaves: Pair(leaves[:half], Pair(leaves[half:], None))
    model = build([arrays[own] for own in which])
    rules = build([None if answer is None else NamedSharding(mesh, P(*answer)) for answer in answers])
    places = {}
    for own, answer in zip(which, answers, strict=True):
        places.setdefault(own, set()).add(place_of(answer))
    if any(len(own) > 1 for own in places.values()):
        error = conflict(lambda: BY_RULES[name](model, rules))
        assert len(set(error.treatments)) > 1
        return
    result = BY_RULES[name](model, rules)
    leaves = jax.tree.leaves(result)
    for i, own in enumerate(which):
        np.testing.assert_array_equal(leaves[i], arrays[own] + 1)
        assert all((leaves[i] is leaves[j]) == (own == other) for j, other in enumerate(which))
        if name in ("out_shardings", "in place") and answers[i] is not None:
            assert leaves[i].sharding.is_equivalent_to(NamedSharding(mesh, P(*answers[i])), 2)


def test_the_error_of_two_places_names_both_and_its_fixes_run(mesh):
    model = BiasedNet(jnp.arange(64.0).reshape(8, 8), None)
    model = BiasedNet(model.embed, model.embed)
    rule = lambda path, leaf: sharded(mesh, P("x") if "embed" in jax.tree_util.keystr(path) else P(None, "x"))
    rules = jax.tree_util.tree_map_with_path(rule, BiasedNet(1, 2))
    double = lambda net: st.tree.map(lambda x: 2 * x, net)
    calls = {
        "net": lambda model, shardings: st.jit(double, in_shardings=(shardings,))(model),
        "result": lambda model, shardings: st.jit(double, out_shardings=shardings)(model),
        "tree": st.device_put,
    }
    for root, call in calls.items():
        error = conflict(lambda call=call: call(model, rules))
        assert error.paths == (f"{root}.embed", f"{root}.head")
        assert [text.partition(" ")[2] for text in error.treatments] == [str(P("x")), str(P(None, "x"))]
        assert len(str(error).splitlines()) <= 8
        (fix,) = [line for line in str(error).splitlines() if line.startswith("    shardings = ")]
        names = {"sharedtree": st, "equinox": eqx, "rule": rule, "model": model}
        exec(fix.strip(), names)
        moved = call(model, names["shardings"])
        assert moved.embed is moved.head
        if root == "net":
            exec("net = sharedtree.untie(net)", names | (own := {"net": model, "sharedtree": st}), own)
            assert call(own["net"], rules).head.sharding.is_equivalent_to(sharded(mesh, P(None, "x")), 2)
    apart = st.jit(lambda net: st.untie(net), out_shardings=rules)(model)
    assert [leaf.sharding.spec for leaf in (apart.embed, apart.head)] == [P("x"), P(None, "x")]


@pytest.mark.parametrize("holder", ["dict", "tuple", "named tuple", "list"])
def test_one_place_also_across_the_modules_of_one_argument(mesh, holder):
    """A dictionary of layers is a model, and its rules by name are those of one."""
    make = {
        "dict": lambda a, b: {"embed": a, "head": b},
        "tuple": lambda a, b: (a, b),
        "named tuple": collections.namedtuple("Holder", ["embed", "head"]),
        "list": lambda a, b: [a, b],
    }[holder]
    rows, columns, w = sharded(mesh), sharded(mesh, P(None, "x")), jnp.arange(64.0).reshape(8, 8)
    model, rules = (
        make(BiasedNet(w, None, None), BiasedNet(w, None, None)),
        make(BiasedNet(rows, None, None), BiasedNet(columns, None, None)),
    )
    calls = [
        lambda rules: st.jit(lambda m: m, in_shardings=(rules,))(model),
        lambda rules: st.jit(lambda m, x: st.tree.map(lambda y: y * x, m), in_shardings=(rules, None))(model, 2.0),
        lambda rules: st.device_put(model, rules),
    ]
    if holder != "tuple":  # whose parts are results of their own
        calls.append(lambda rules: st.jit(lambda m: m, out_shardings=rules)(model))
    for call in calls:
        assert len(conflict(lambda call=call: call(rules)).paths) == 2
        one, other = jax.tree.leaves(call(make(BiasedNet(rows, None, None), BiasedNet(rows, None, None))))
        assert one is other
    plain = {"q": w, "k": w}  # arrays of a batch
    out = st.jit(lambda d: d, in_shardings=({"q": rows, "k": columns},))(plain)
    assert [leaf.sharding.spec for leaf in (out["q"], out["k"])] == [P("x"), P(None, "x")]


def test_arrays_in_two_arguments_or_results_stay_soft(mesh):
    """A target network starts as the model's arrays, and each is put where its own rules say."""
    rows, columns, w = sharded(mesh), sharded(mesh, P(None, "x")), jnp.arange(64.0).reshape(8, 8)
    add = lambda a, b: (a.embed + b.embed, (a, b))
    f = st.jit(add, in_shardings=(BiasedNet(rows, rows, None), BiasedNet(columns, columns, None)))
    total, (a, b) = f(BiasedNet(w, w), BiasedNet(w, w))
    np.testing.assert_array_equal(total, 2 * w)
    assert a.embed is a.head
    assert b.embed is b.head
    parted = st.jit(lambda net: (net, net), out_shardings=(rows, columns))(BiasedNet(w, w))
    assert [net.embed.sharding.spec for net in parted] == [P("x"), P(None, "x")]
    assert all(net.embed is net.head for net in parted)


@pytest.mark.parametrize("answers", [(P("x"), P(None, "x")), (P("x"), P()), (P(), P(None, "x")), (P("x"), None)])
@pytest.mark.parametrize("of", ["floats", "keys", "large", "NumPy"])
@pytest.mark.sampled(every=3)
def test_copies_that_vanilla_placed_differently_have_lost_their_tie(mesh, answers, of):
    """And what differs in value, or tells nothing, has not."""
    base = {
        "floats": lambda: jnp.arange(64.0).reshape(8, 8),
        "NumPy": lambda: np.arange(64.0, dtype=np.float32).reshape(8, 8),
        "keys": lambda: jax.random.split(jax.random.key(0), (8, 8)),
        "large": lambda: jnp.arange(2**20, dtype=jnp.float32).reshape(2**7, 2**13),
    }[of]
    use = st.jit(lambda net: jax.tree.map(lambda x: x.shape, net) and 1)
    w = base()
    use(BiasedNet(w, w))
    place = lambda leaf, spec: leaf if spec is None else jax.device_put(leaf, sharded(mesh, spec))
    for other in (base(), base()[::-1]):
        loose = BiasedNet(place(base(), answers[0]), place(other, answers[1]))
        is_lost = other[0, 0] == w[0, 0]
        with pytest.warns(st.UntiedWarning, match="earlier call") if is_lost else contextlib.nullcontext():
            use(loose)
        use = st.jit(lambda net: jax.tree.map(lambda x: x.shape, net) and 1)
        use(BiasedNet(w, w))
    zeros = jnp.zeros((8, 8))
    use(BiasedNet(zeros, zeros))
    use(BiasedNet(place(zeros, answers[0]), place(zeros + 0, answers[1])))


def test_a_function_with_shardings_is_traced_once_and_as_it_is_called(explicit):
    with jax.set_mesh(explicit):
        where = sharded(explicit, P("x", "y"))
        net = st.device_put(tied(), where)
        seen = []

        def f(net, name):
            seen.append(jax.typeof(net.embed).sharding.spec)
            return st.tree.map(lambda w: 2 * w, net), name == "this"

        specs = BiasedNet(where, where, None)
        for options in ({"in_shardings": (specs,)}, {}):
            seen.clear()
            f = st.jit(f, static_argnums=1, out_shardings=(specs, None), **options)
            for _ in range(2):
                result, word = f(net, "this")
                assert (result.embed is result.head, result.embed.sharding, bool(word)) == (True, where, True)
            assert seen == [P("x", "y")]
            f = f.__wrapped__


@pytest.mark.slow
def test_explicit_meshes(explicit):
    with jax.set_mesh(explicit):
        net = st.device_put(tied(), sharded(explicit, P("x", "y")))
        assert net.embed is net.head
        assert jax.typeof(net.embed).sharding.spec == P("x", "y")
        seen = []

        def f(net, x):
            seen.append((net.embed is net.head, jax.typeof(net.embed).sharding.spec))
            hidden = jnp.einsum("bi,ij->bj", x, net.embed, out_sharding=P("x", "y"))
            return (jnp.einsum("bj,ij->bi", hidden, net.head, out_sharding=P("x", None)) ** 2).mean()

        x = jax.device_put(jnp.linspace(0, 1, 128).reshape(16, 8), sharded(explicit, P("x", None)))
        step = st.jit(st.value_and_grad(f))
        value, gradient = step(net, x)
        step(net, x)
        assert seen == [(True, P("x", "y"))]
        assert gradient.embed is gradient.head
        assert gradient.embed.sharding == net.embed.sharding
        vanilla = jax.value_and_grad(lambda w: ((np.asarray(x) @ w @ w.T) ** 2).mean())(weight())
        np.testing.assert_allclose(value, vanilla[0], rtol=1e-4)
        np.testing.assert_allclose(gradient.embed, vanilla[1], rtol=1e-4)
        result = st.jit(lambda net: st.tree.map(lambda w: jax.sharding.reshard(w, P("y", None)), net))(net)
        assert result.embed is result.head
        assert jax.typeof(result.embed).sharding.spec == P("y", None)
        specs = BiasedNet(P("x", "y"), P("x", "y"), None)
        result = st.shard_map(lambda net: net.embed + net.head, in_specs=(specs,), out_specs=P("x", "y"))(net)
        np.testing.assert_array_equal(result, 2 * weight())
