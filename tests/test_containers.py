"""`Policy(containers=True)`: parameters in plain dicts keep their ties, and nothing else changes."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as hst

import sharedtree as st

from .strategies import Mutable, Pair, copy_dag, partition, pools
from .transform_table import SCENARIOS, name_of
from .transparency.leaves import IN_A_DEQUE, JITS, TRIED, apart, of_one, put
from .transparency.outcome import LEAVES, differing, differing_alone, outcome

POLICY = st.Policy(containers=True)
jit, grad, vmap = (functools.partial(transform, policy=POLICY) for transform in (st.jit, st.grad, st.vmap))


@hst.composite
def containers(draw: Any) -> Any:
    """A list or dict over a random pool, in which arrays, containers and modules are shared."""
    pool = draw(pools())

    def pick() -> Any:
        return pool[draw(hst.integers(0, len(pool) - 1))]

    if draw(hst.booleans()):
        return [pick(), (pick(), pick()), pick()]
    return {"b": pick(), "a": {"x": (pick(),), "y": pick()}}


@given(containers())
def test_what_is_one_object_outside_is_one_object_inside_and_after(tree):
    inside = []

    @jit
    def through(t, again):
        inside.append((partition(t), t is again))
        return t, [t]

    classes = partition(tree)
    known = frozenset().union(*classes)
    for _ in range(3):
        out, also = through(tree, tree)
        assert {each & known for each in partition(out)} - {frozenset()} == classes  # a number becomes an array
        assert also[0] is out
        assert out is not tree  # as of vanilla JAX
    assert [({each & known for each in found} - {frozenset()}, is_one) for found, is_one in inside] == [(classes, True)]
    through(copy_dag(tree), out)
    assert len(inside) == 2 or partition(copy_dag(tree)) != classes  # other sharing between the arguments


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", [name_of(t) for t in SCENARIOS if SCENARIOS[t].tested != "on_eight_devices"])
def test_ties_inside_every_transform_and_of_what_comes_out(name):
    ((transform, scenario),) = [(t, each) for t, each in SCENARIOS.items() if name_of(t) == name]
    w = jnp.arange(1.0, 9.0)
    one, two = ({"a": w, "b": w} for _ in range(2))
    seen = []

    def f(one, two):
        seen.append(one["a"] is one["b"] is two["a"])
        return st.tree.map(lambda x: x * 1, one)

    with st.Context(POLICY):
        out = scenario.call(st.preserve_identities(transform), f, one, two)
    is_model = lambda x: isinstance(x, dict)
    assert all(seen)
    assert seen
    assert all(x["a"] is x["b"] for x in jax.tree.leaves(out, is_leaf=is_model) if is_model(x))


def test_only_what_is_reached_through_a_container_is_an_object():
    w = jnp.ones(2)

    @jit
    def check(x, y, pair, *rest, **more):
        assert x is not y
        assert pair[0] is not pair[1]
        assert rest[0] is not rest[1]
        assert more["a"] is not more["b"]
        assert pair[2]["a"] is pair[2]["b"] is rest[2][0]
        return (x, x), [x, x]

    for _ in range(3):
        bare, held = check(w, w, (w, w, {"a": w, "b": w}), w, w, [w], a=w, b=w)
        assert bare[0] is not bare[1]
        assert held[0] is held[1]


def test_modules_in_containers_pass_through_and_containers_in_modules_are_shared():
    shared = {"w": jnp.ones(2)}
    model = Pair(shared, jnp.zeros(2))

    @jit
    def f(params, model):
        assert params["own"] is model.first
        assert params["model"] is model
        return {"model": model, "own": params["own"]}

    for _ in range(2):
        out = f({"own": shared, "model": model}, model)
        assert out["model"] is model
        assert out["own"] is shared  # it is part of what passed through


@pytest.mark.parametrize(
    ("name", "place"),
    # To Equinox's filters a bare deque is static, and cannot be hashed; we compare it by what is in it.
    [*[(name, "containers") for name in TRIED], *[(name, "deque") for name in TRIED if not name.startswith("eqx.")]],
)
@pytest.mark.slow
def test_without_sharing_nothing_differs(name, place):
    transform = TRIED[name]
    function = of_one(transform, place)
    theirs, ours = transform(function), st.preserve_identities(transform, policy=POLICY)(function)
    alone = put(place, IN_A_DEQUE if place == "deque" else apart(transform, place))
    together = {} if place == "deque" else put(place, [leaf for leaf in LEAVES if leaf not in alone])
    for _ in range(2 if transform in JITS else 1):
        assert differing_alone(alone, theirs, ours) == {}
        assert not together or differing(together, theirs, ours) == {}


def test_keys_without_an_order_are_refused_as_jax_does():
    for tree in ({1: 2.0, "a": 3.0}, [{1: 2.0, "a": 3.0}], collections.defaultdict(int, {1: 2.0, "a": 3.0})):
        assert outcome(lambda t=tree: jit(lambda t: t)(t)) == outcome(lambda t=tree: jax.jit(lambda t: t)(t))
    inside = [Mutable(a={1: jnp.ones(2), "b": jnp.ones(2)})]  # there they are allowed
    assert jit(lambda t: t)(inside)[0].a[1].tolist() == [1, 1]


def tied() -> Any:
    params = {
        "embed": {"w": jnp.arange(1.0, 4)},
        "head": {"w": jnp.zeros(3), "b": jnp.ones(3)},
        "layers": [jnp.ones(3)],
    }
    return st.tie(params, lambda p: (p["embed"]["w"], p["head"]["w"]))


def loss(p: Any, x: Any = 2.0) -> Any:
    return jnp.sum((p["embed"]["w"] * x * p["head"]["w"] * p["layers"][0] + p["head"]["b"] - 1.5) ** 2)


def test_the_gradient_of_a_tie_is_the_sum_over_its_paths():
    params, scale = tied(), [jnp.ones(3)]
    parts = jax.grad(loss)(st.untie(params))

    def f(p, s):
        return loss(p) * s[0][0], {"p": p, "s": s}

    (first, second), aux = grad(f, argnums=(0, 1), has_aux=True)(params, scale)
    assert first["embed"]["w"] is first["head"]["w"]
    np.testing.assert_allclose(first["embed"]["w"], parts["embed"]["w"] + parts["head"]["w"], rtol=1e-6)
    np.testing.assert_allclose(first["head"]["b"], parts["head"]["b"], rtol=1e-6)
    assert len(st.tree.leaves(first)) == 3
    np.testing.assert_allclose(second[0], [loss(params), 0, 0], rtol=1e-6)
    assert aux["p"]["embed"]["w"] is aux["p"]["head"]["w"]
    layer = {"w": jnp.full(2, 3.0), "f": [jnp.ones(2)]}
    gradient = grad(lambda p: (p["a"]["w"] * p["b"]["w"] * p["a"]["f"][0]).sum())({"a": layer, "b": layer})
    assert gradient["a"] is gradient["b"]
    assert gradient["a"]["w"].tolist() == [6, 6]


W, V = jnp.ones(2), jnp.zeros(2)
HELD = [W, {"x": V}]
SHARED = {
    "dict": {"a": W, "b": W},
    "list in a dict": {"a": W, "b": [W, V]},
    "one list twice": {"a": HELD, "b": HELD, "c": V},
    "module after": {"a": W, "m": Pair(W, V)},
    "module before": [Pair(V, W), W, W],
}


@pytest.mark.parametrize("place", SHARED)
def test_cotangents_at_the_paths_of_a_tie_are_summed_wherever_these_are(place):
    tree = SHARED[place]
    leaves, treedef = jax.tree.flatten(tree)
    given = treedef.unflatten([jnp.full(2, 2.0**i) for i in range(len(leaves))])
    copies = list({id(leaf): leaf for leaf in leaves}.values())
    numbers = [next(i for i, copy in enumerate(copies) if copy is leaf) for leaf in leaves]
    of_copies = jax.vjp(lambda each: [each[i] for i in numbers], copies)[1](jax.tree.leaves(given))[0]
    want = [of_copies[i].tolist() for i in numbers]

    @functools.partial(st.custom_vjp, policy=POLICY)
    def f(tree):
        return 0.0

    f.defvjp(lambda tree: (0.0, None), lambda *_: (given,))
    pullback = st.vjp(lambda tree: tree, tree, policy=POLICY)[1]
    for found in (pullback(given)[0], jit(lambda g: pullback(g)[0])(given), grad(f)(tree)):
        assert [leaf.tolist() for leaf in jax.tree.leaves(found)] == want
        assert st.same_sharing(found, tree)
    with pytest.raises(st.errors.SharingMismatchError, match="but the tangents there are"):
        st.jvp(lambda tree: tree, (tree,), (given,), policy=POLICY)


@pytest.mark.parametrize("place", SHARED)
@pytest.mark.parametrize(
    "evaluate", [lambda f, x: st.eval_shape(f, x, policy=POLICY), lambda f, x: jit(f).eval_shape(x)]
)
def test_shapes_have_the_sharing(place, evaluate):
    assert st.same_sharing(evaluate(lambda tree: tree, SHARED[place]), SHARED[place])


NOT_INEXACT = {"integers": jnp.arange(3), "booleans": jnp.ones(3, bool), "key": jax.random.key(0)}
REFUSING = [
    *[(t, name, {}) for t in (jax.grad, jax.value_and_grad, jax.jacfwd, jax.hessian) for name in NOT_INEXACT],
    *[(t, name, {"allow_int": True}) for t in (jax.grad, jax.jacrev) for name in ("integers", "booleans")],
]


def test_what_cannot_be_differentiated_is_refused_wherever_else_it_is():
    """Also if an argument that is not differentiated holds the same object."""
    f = lambda a, b: jnp.sum(b["w"] ** 2)
    for transform, leaf, options in REFUSING:
        made = NOT_INEXACT[leaf]
        held = {"deep": [made]}
        wrapped = st.preserve_identities(transform, policy=POLICY)
        for before, after in [([made], made), ({"x": held}, held), ([made, held], (held, made))]:
            params = {"w": jnp.ones(3), "i": after}
            for args, argnum in [((before, params), 1), ((params, before), 0)]:
                g = f if argnum else lambda b, a: f(a, b)
                vanilla, ours = (each(g, argnums=argnum, **options) for each in (transform, wrapped))
                apart_from_us = [jax.tree.map(lambda x: x, arg) for arg in args]
                assert outcome(functools.partial(ours, *args)) == outcome(functools.partial(vanilla, *apart_from_us))


def test_what_cannot_be_differentiated_inside_a_module_stays_tied():
    steps = jnp.arange(3)

    def f(a, b):
        assert a[0] is b["m"].second
        return jnp.sum(b["m"].first * b["m"].second)

    gradient = grad(f, argnums=1)([steps], {"m": Pair(jnp.ones(3), steps)})
    assert gradient["m"].first.tolist() == [0, 1, 2]
    assert gradient["m"].second is None


def test_axes_reach_inside_containers():
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": [jnp.arange(3.0), jnp.ones((3, 2))], "m": Pair(jnp.ones(3), 1.0)}
    axes = {"a": 1, "b": [0, 0], "m": None}

    def f(p, x):
        return {"sum": p["a"].sum() + p["b"][0] + x, "rest": [p["b"][1], p["a"]]}

    out_axes = {"sum": 0, "rest": [0, 1]}
    x = jnp.arange(3.0)
    expected = jax.vmap(f, in_axes=(axes, 0), out_axes=out_axes)(params, x)
    found = vmap(f, in_axes=(axes, 0), out_axes=out_axes)(params, x)
    assert outcome(lambda: found) == outcome(lambda: expected)
    w = jnp.ones((3, 2))
    shared = {"a": w, "b": [w, w], "m": Pair(w, 1.0)}
    out = vmap(lambda p: p, in_axes=({"a": 0, "b": 0, "m": 0},), out_axes={"a": 0, "b": 0, "m": 0})(shared)
    assert out["a"] is out["b"][0] is out["m"].first


def test_shardings_reach_inside_containers():
    mesh = jax.make_mesh((1,), ("x",))
    here, there = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in (None, "x"))
    params = tied()
    shardings = {"embed": here, "head": here, "layers": [there]}
    f = jit(lambda p: p, in_shardings=(shardings,), out_shardings=shardings)
    for _ in range(3):
        out = f(params)
        assert out["embed"]["w"] is out["head"]["w"]
        assert out["layers"][0].sharding == there
        assert out["head"]["b"].sharding == here
    expected = jax.jit(lambda p: p, in_shardings=(shardings,), out_shardings=shardings)(st.untie(params))
    assert jax.tree.map(lambda x: x.sharding, out) == jax.tree.map(lambda x: x.sharding, expected)


def test_containers_are_written_back():
    inner = [jnp.ones(1)]
    params = {"z": 0.0, "keep": 1, "b": jnp.ones(2), "gone": 3, "list": inner, "again": inner}
    before = params["keep"]

    @st.jit(policy=st.Policy(containers=True, in_place=True))
    def change(p):
        p["z"] = p.pop("b") + 1
        p["list"].append(p["z"])
        del p["gone"]
        return p["list"]

    returned = change(params)
    assert returned is params["list"] is params["again"] is inner
    assert list(params) == ["z", "keep", "list", "again"]
    assert params["z"] is inner[1]
    assert params["z"].tolist() == [2, 2]
    assert params["keep"] is before

    @st.jit(policy=st.Policy(containers=True, in_place=True))
    def fail(p):
        p["z"] = 5.0
        raise KeyError("no")

    with pytest.raises(KeyError):
        fail(params)
    assert params["z"].tolist() == [2, 2]


def test_the_policy_of_a_context_counts_and_is_cached_by_itself():
    params = tied()
    seen = []

    @st.jit
    def f(p):
        seen.append(p["embed"]["w"] is p["head"]["w"])
        return p

    with pytest.warns(st.UntiedWarning, match="are one array"):
        f(params)
    for _ in range(2):
        with st.Context(POLICY):
            assert f(params)["embed"]["w"] is not params["embed"]["w"]
    assert seen == [False, True]


def test_a_tie_lost_inside_is_reported_and_explained():
    with pytest.warns(st.UntiedWarning, match=r"p\['embed'\]\['w'\]` and `p\['head'\]\['w'\]"):
        jit(lambda p, x: jax.tree.map(lambda w: w * x, p))(tied(), 2.0)
    with pytest.warns(st.UntiedWarning, match="embed"):  # one level down, too
        jit(lambda s: jax.tree.map(lambda w: w * 2, s["params"]))({"params": tied(), "step": 0})
    jit(lambda p: {"mean": p["a"] * 1, "var": p["b"] * 2})({"a": (w := jnp.ones(2)), "b": w})  # other keys
    jit(lambda p: st.untie(jax.tree.map(lambda w: w * 2, p)))(tied())
    rows = {row.path: row for row in st.explain(jit(lambda p: p, donate_argnums=0), tied()).leaves}
    assert rows["p['head']['w']"].tied_to == "p['embed']['w']"
    assert rows["p['layers'][0]"].treatment == "donated"


def test_containers_are_cut_between_treatments():
    params = tied()
    target = jax.grad(lambda p, q: loss(p) * loss(q))
    expected = target(st.untie(params), st.untie(params))

    def f(p, q):
        assert p is not q
        assert p["embed"]["w"] is p["head"]["w"] is not q["head"]["w"]
        assert q["embed"]["w"] is q["head"]["w"]
        return loss(p) * loss(q)

    gradient = grad(f)(params, params)
    total = expected["embed"]["w"] + expected["head"]["w"]
    np.testing.assert_allclose(gradient["embed"]["w"], total, rtol=1e-6)
    assert gradient["embed"]["w"] is gradient["head"]["w"]

    hidden = st.preserve_identities(lambda g: jax.jit(g), policy=POLICY)
    assert hidden(lambda p, q: p["embed"]["w"] is not q["embed"]["w"] and p["embed"]["w"] is p["head"]["w"])(
        params, params
    )


def test_two_axes_for_one_container_are_two_containers():
    shared = [jnp.arange(4.0).reshape(2, 2)]
    tree = {"a": shared, "b": shared, "c": [Pair(None, shared[0])]}
    axes = {"a": 0, "b": [1], "c": 0}

    def f(t):
        assert t["a"] is not t["b"]
        assert t["a"][0] is t["c"][0].second is not t["b"][0]
        return t["a"][0] - t["b"][0]

    expected = jax.vmap(lambda t: t["a"][0] - t["b"][0], in_axes=(axes,))(tree)
    with pytest.warns(st.UntiedWarning, match=r"(?s)`t\['a'\]\[0\]`: in_axes 0.*`t\['b'\]\[0\]`: in_axes 1"):
        np.testing.assert_array_equal(vmap(f, in_axes=(axes,))(tree), expected)
    one, two = Pair([shared], None), Pair([shared], None)
    with pytest.raises(st.errors.InconsistentSharingError, match="in_axes 1"):  # a module is the same error as ever
        vmap(lambda t: t, in_axes=({"a": 0, "b": 1},))({"a": one, "b": one})
    with pytest.warns(st.UntiedWarning, match="cut in"):
        vmap(lambda t: t["a"].first[0], in_axes=({"a": 0, "b": 1},))({"a": one, "b": two})


def test_a_donated_tie_is_donated_once_and_refused_where_it_is_also_kept():
    params = tied()
    f = jit(lambda p, q: st.tree.map(lambda x: x + 1, p), donate_argnums=0)
    with pytest.raises(st.errors.InconsistentSharingError, match="donated"):
        f(params, params)
    assert not params["embed"]["w"].is_deleted()
    f.lower(params, params)
    out = f(params, tied())
    assert params["embed"]["w"].is_deleted()
    assert out["embed"]["w"] is out["head"]["w"]


# Half a gradient under the policy

W = jnp.array([1.0, 2.0])


def product(p, q):
    return (p["a"] * q["b"]).sum()


def square(p):
    return product(p, p)


HALVES = {
    "a filter of paths": (square, {"wrt": lambda path, value: path[0] == "a"}, lambda w: ({"a": w, "b": w},)),
    "booleans": (square, {"wrt": {"a": True, "b": False}}, lambda w: ({"a": w, "b": w},)),
    "below": (lambda p: square(p[0]), {"wrt": [{"a": True, "b": False}]}, lambda w: ([{"a": w, "b": w}],)),
    "two arguments": (product, {}, lambda w: ({"a": w}, {"b": w})),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("jit", [False, True])
def test_half_a_gradient_of_a_dictionary_is_said(name, jit):
    """The oracle is the gradient with respect to the one array, of which a part is missing."""
    f, options, arguments = HALVES[name]
    whole = jax.grad(lambda w: f(*arguments(w)))(W)
    call = st.grad(f, policy=POLICY, **options)
    with pytest.warns(st.UntiedWarning, match="the gradient misses a term") as caught:
        gradient = (st.jit(call, policy=POLICY) if jit else call)(*arguments(W))
    (part,) = jax.tree.leaves(gradient)
    assert not np.array_equal(part, whole)
    assert len(caught) == 1


def test_the_fix_for_two_dictionaries_gives_the_whole_gradient():
    p, q = HALVES["two arguments"][2](W)
    with pytest.warns(st.UntiedWarning) as caught:
        st.grad(product, policy=POLICY)(p, q)
    lines = str(caught[0].message).splitlines()
    (both,) = [line.strip() for line in lines if "argnums=(0, 1)" in line]
    names = {"sharedtree": st, "f": product, "product": product, "p": p, "q": q}
    of_p, of_q = eval(both, names)  # noqa: S307 -- the text of the message
    whole = jax.grad(lambda w: (w * w).sum())(W)
    assert np.array_equal(of_p["a"], whole)
    assert np.array_equal(of_q["b"], whole)


def test_a_target_that_starts_as_the_dictionary_is_no_half():
    """It has the array at the same path, as with modules."""
    gradient = st.grad(lambda p, target: (p["a"] * target["a"]).sum(), policy=POLICY)({"a": W}, {"a": W})
    assert np.array_equal(gradient["a"], W)
