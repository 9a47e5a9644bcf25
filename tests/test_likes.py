"""Results in the shape of the arguments: Jacobians, Hessians, and what unknown transforms hand back."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.strategies import Layer, Mutable, Pair, Record

jacfwd, jacrev, hessian = (st.preserve_identities(t) for t in (jax.jacfwd, jax.jacrev, jax.hessian))


def model(shared_layer, shared_weight):
    """Modules of three libraries; which layers and weights are one is the test's affair."""
    w, v = jnp.array([1.0, 2.0]), jnp.array([3.0, -1.0])
    one = Layer(w, jax.nn.relu, [v, 7], width=2)
    two = one if shared_layer else Layer(w if shared_weight else w + 1, jax.nn.relu, [v, 7], width=2)
    return Pair(Mutable(x=one, y=jnp.arange(2)), Record(two, "text"))


def weights(m):
    one, two = m.first.x, m.second.left
    return one.weight, one.parts[0], two.weight, two.parts[0]


def outputs(m):
    a, b, c, d = weights(m) if isinstance(m, Pair) else m
    y = jnp.sin(a) * b + c * d**2
    return y, (a * d).sum()


def sums_of(blocks, m):
    """The blocks of the untied model, summed over the paths of each weight."""
    found = {}
    for w, block in zip(weights(m), blocks, strict=True):
        found[id(w)] = found.get(id(w), 0) + block  # alive in the model
    return [found[id(w)] for w in weights(m)]


@pytest.mark.slow
def test_jacobians_are_modules_with_the_blocks_summed_over_the_paths():
    for shared_layer, shared_weight in ((True, True), (False, True), (False, False)):
        m = model(shared_layer, shared_weight)
        want = jax.jacrev(lambda *weights: outputs(weights), argnums=(0, 1, 2, 3))(*weights(m))
        for transform in (jacrev, jacfwd):
            got = transform(lambda m: {"out": Pair(*outputs(m)), "bare": outputs(m)[1]})(m)
            assert type(got["out"]) is Pair
            for jacobian, blocks in ((got["out"].first, want[0]), (got["out"].second, want[1]), (got["bare"], want[1])):
                assert (jacobian.first.y, jacobian.second.right, jacobian.first.x.activation) == (None, None, None)
                for one, two in zip(weights(jacobian), sums_of(blocks, m), strict=True):
                    np.testing.assert_allclose(one, two, rtol=1e-5)
                assert (jacobian.first.x is jacobian.second.left) == shared_layer
                assert (jacobian.first.x.weight is jacobian.second.left.weight) == shared_weight


@pytest.mark.slow
def test_argnums():
    a, b = Pair(jnp.ones(2), jnp.ones(2) * 2), Pair(jnp.ones(2) * 3, jnp.ones(2) * 4)

    def f(a, b):
        return (a.first * a.second * b.first * b.second).sum()

    def block(row, at):
        """Of each leaf's tuple, one for each argument, the part that these arguments have."""
        part = lambda blocks: tuple(blocks[j] for j in at) if isinstance(at, list) else blocks[at]
        return jax.tree.map(part, row, is_leaf=lambda x: type(x) is tuple)

    rows = jax.hessian(f, argnums=(0, 1))(a, b)
    for argnums in (0, 1, (0, 1), (1, 0), -1, np.int64(1), np.array([1, 0])):
        at = np.asarray(argnums).tolist()
        want = tuple(block(rows[i], at) for i in at) if isinstance(at, list) else block(rows[at], at)
        got = hessian(f, argnums)(a, b)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, two)


@pytest.mark.parametrize("transform", [st.jacfwd, st.jacrev])
@pytest.mark.slow
def test_a_module_that_is_all_of_an_earlier_argument(transform):
    a, b, c = jnp.array([1.0, 2.0]), jnp.array([3.0, -1.0]), jnp.array([0.5, 4.0])
    m = Pair(a, b)

    def f(p, q, r):
        return {"x": p.first * q.second * r.second, "y": p.first + 3 * q.first.second, "z": Pair(p.first, p.second)}

    want = jax.jacrev(lambda a, b, c: f(Pair(a, b), Pair(Pair(a, b), c), Pair(a, b)), (0, 1, 2))(a, b, c)
    expected = [want["x"], want["y"], want["z"].first, want["z"].second]
    for argnums in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (2, 0, 1)):
        got = transform(f, argnums=argnums)(m, Pair(m, c), m)
        for blocks, parts in zip((got["x"], got["y"], got["z"].first, got["z"].second), expected, strict=True):
            for position, block in zip(argnums, blocks, strict=True):
                of_model = block.first if position == 1 else block
                np.testing.assert_allclose(of_model.first, parts[0], rtol=1e-6)
                np.testing.assert_allclose(of_model.second, parts[1], rtol=1e-6)
                if position == 1:
                    np.testing.assert_allclose(block.second, parts[2])
                else:
                    assert of_model is blocks[argnums.index(0)]


@pytest.mark.parametrize(
    ("kind", "as_pair"), [("jacfwd", list), ("jacrev", tuple), ("filter_jacfwd", list), ("filter_jacrev", tuple)]
)
def test_modules_in_the_value_and_in_the_auxiliary_data(kind, as_pair):
    w = jnp.array([1.0, 2.0])
    jacobian = st.preserve_identities(getattr(eqx if kind.startswith("filter") else jax, kind))

    def f(m):
        out = Pair(m.x * 2, m.y**2)
        kept = Pair(m.x * 3, 1)
        return as_pair([{"out": out, "again": out}, {"out": out, "kept": kept, "twice": (kept, m)}])

    got, aux = jacobian(f, has_aux=True)(Mutable(x=w, y=w))
    want = jax.jacrev(lambda w: (w * 2, w**2))(w)
    assert got["out"] is got["again"]
    assert got["out"].first.x is got["out"].first.y
    np.testing.assert_allclose(got["out"].first.x, want[0])
    np.testing.assert_allclose(got["out"].second.y, want[1])
    assert aux["kept"] is aux["twice"][0]
    np.testing.assert_allclose(aux["kept"].first, 3 * w)
    np.testing.assert_allclose(aux["out"].second, w**2)
    assert aux["twice"][1].x is aux["twice"][1].y


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian"])
@pytest.mark.sampled(every=3)
def test_a_module_in_the_value_in_place(name, has_aux):
    w = jnp.array([1.0, 2.0])
    m = Mutable(x=w, y=w, n=jnp.array(0))

    def f(m):
        m.n = m.n + 1
        out = Pair(m.x**2 * m.y, {"k": m.x})
        return (out, {"m": m, "out": out}) if has_aux else out

    got = getattr(st, name)(f, in_place=True, has_aux=has_aux)(m)
    got, aux = got if has_aux else (got, None)
    assert m.n == 1
    assert m.x is m.y is w
    vanilla = getattr(jax, name)(lambda w: (w**3, w))(w)
    block = got.first.x if name != "hessian" else got.first.x.y
    np.testing.assert_allclose(block, vanilla[0])
    block = got.second["k"].y if name != "hessian" else got.second["k"].y.x
    np.testing.assert_allclose(block, vanilla[1])
    if has_aux:
        assert aux["m"] is m
        np.testing.assert_allclose(aux["out"].first, w**3)


@pytest.mark.parametrize("result", [lambda m: m, lambda m: (m, m, m), lambda m: (m,)])
def test_no_auxiliary_data(result):
    m = Pair(jnp.ones(2), 1.0)
    for name in ("jacfwd", "jacrev"):
        with pytest.raises((TypeError, ValueError)) as vanilla:
            getattr(jax, name)(result, has_aux=True)(m)
        with pytest.raises(vanilla.type):
            getattr(st, name)(result, has_aux=True)(m)


@pytest.mark.parametrize("name", ["filter_jacfwd", "filter_jacrev", "filter_hessian"])
@pytest.mark.slow
def test_equinox_jacobians(name):
    transform = getattr(eqx, name)
    linear, x = eqx.nn.Linear(2, "scalar", key=jax.random.key(0)), jnp.ones(2)
    got = st.preserve_identities(transform)(lambda m, x: jnp.tanh(m(x)))(linear, x)
    want = transform(lambda m, x: jnp.tanh(m(x)))(linear, x)
    assert jax.tree.structure(eqx.filter(got, eqx.is_array)) == jax.tree.structure(eqx.filter(want, eqx.is_array))
    for one, two in zip(*(jax.tree.leaves(eqx.filter(t, eqx.is_array)) for t in (got, want)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


def opaque(f, **options):
    return jax.value_and_grad(f, **options)


def test_something_like_the_arguments_beside_what_the_function_returned():
    w = jnp.ones(2)
    m, n = Pair(w, w), Pair(jnp.zeros(2), 1.0)
    ours = st.preserve_identities(opaque)(
        lambda x, m, n: ((m.first * m.second).sum(), (n, m, n)), argnums=1, has_aux=True
    )
    (value, (n1, aux, n2)), gradient = ours(0.0, m, n)
    assert value == 2
    assert n1 is n2
    assert aux.first is aux.second
    assert gradient.first is gradient.second
    np.testing.assert_allclose(gradient.first, [2.0, 2.0])


def test_a_transform_that_calls_twice_and_reorders():
    def both(f):
        return lambda *args: (f(*args)[::-1], f(*args))

    st.register_transform(both)
    w = jnp.ones(2)
    m = Pair(w, [w])
    (a, b), (c, d) = st.preserve_identities(both)(lambda m: (m, Pair(m, m.second)))(m)
    assert b is a.first is not c
    assert d.first is c
    assert a.second is b.second
    assert c.first is c.second[0]


def test_a_part_of_the_results_that_refers_to_the_rest():
    def last(f):
        return lambda *args: f(*args)[-1]

    m = Pair(jnp.ones(2), 1.0)
    assert st.preserve_identities(last)(lambda m: (m, Pair(m.first * 2, 3.0)))(m).second == 3
    with pytest.raises(st.errors.SharingMismatchError, match="a part of the function's result"):
        st.preserve_identities(last)(lambda m: (m, Pair(m, 3.0)))(m)


def second(f):
    """Passes the second of two models, and returns what the function makes of it."""
    return lambda models: f(models[1])


@pytest.mark.parametrize("register", [False, True])
def test_a_part_of_the_arguments(register):
    if register:
        st.register_transform(second)
    w = jnp.ones(2)
    m = Pair(3 * w, [3 * w])
    m.second[0] = m.first
    result = st.preserve_identities(second)(lambda m: Pair(m.first is m.second[0], st.tree.map(jnp.negative, m)))(
        [Pair(w, None), m]
    )
    assert result.first is True
    assert result.second.first is result.second.second[0]
    np.testing.assert_array_equal(result.second.first, [-3.0, -3.0])
    with pytest.raises(
        st.errors.SharingMismatchError, match=r"drops an argument that shares `models\[0\]\.first` with another one"
    ):
        st.preserve_identities(second)(lambda models: models)([m, Pair(m, 1.0)])


def test_the_parts_of_two_results():
    """Each of them is of its own result, or it is an error: what two parts share is not taken from the other result."""

    def of_two(f):
        return lambda m, n: (f(m)[0], f(n)[1])

    m, n = Pair(jnp.zeros(2), None), Pair(jnp.ones(2), None)
    apart = st.preserve_identities(of_two)(lambda m: (Pair(m.first + 1, 0), Pair(m.first + 2, m.first)))(m, n)
    np.testing.assert_array_equal(apart[0].first, [1.0, 1.0])
    np.testing.assert_array_equal(apart[1].first, [3.0, 3.0])
    for shared in (lambda m: (m, m), lambda m: (m, Pair(m.first, 1.0))):
        with pytest.raises(st.errors.SharingMismatchError, match="a part of the function's result"):
            st.preserve_identities(of_two)(shared)(m, n)


@pytest.mark.parametrize("transform", [lambda f: lambda m: f(f(m)), lambda f: jax.jit(lambda m: f(f(m)))])
def test_a_transform_that_calls_the_function_with_its_result(transform):
    w = jnp.ones(2)
    result = st.preserve_identities(transform)(lambda m: st.tree.map(lambda x: 2 * x, m))(Pair(w, [w]))
    assert result.first is result.second[0]
    np.testing.assert_array_equal(result.first, [4.0, 4.0])
    several = st.preserve_identities(transform)(lambda ms: [ms[1], Pair(ms[1], ms[0].first)])([Pair(w, 1), Pair(w, 2)])
    assert several[1].first is several[0]
    # Only what it returned first has a tie that it can lose.
    lose = lambda m: Pair(m.first, [m.first]) if m.second is None else jax.tree.map(jnp.negative, m)
    with pytest.warns(st.UntiedWarning, match=r"`m\.first` and `m\.second\[0\]`"):
        result = st.preserve_identities(transform)(lose)(Pair(w, None))
    assert result.first is not result.second[0]


def test_a_transform_that_passes_one_argument_twice():
    m = Pair(jnp.ones(2), None)
    assert st.preserve_identities(lambda f: lambda m: f(m, [m]))(lambda m, n: m is n[0])(m)


def test_a_gradient_of_one_of_the_arguments():
    """Of the second, which begins where the first one ends; inside an argument, what is tied stays so."""
    w = jnp.arange(3.0)
    shared = Pair(2 * w, None)
    m, n = Pair(jnp.ones(3), None), [shared, Pair(shared, 3 * w)]

    def loss(m, n):
        return (m.first * n[0].first * n[1].second).sum() + (n[1].first.first ** 2).sum()

    for transform in (lambda f: jax.grad(f, argnums=1), lambda f: jax.jit(jax.grad(f, argnums=1))):
        gradient = st.preserve_identities(transform)(loss)(m, n)
        assert gradient[1].first is gradient[0]
        np.testing.assert_allclose(gradient[0].first, 3 * w + 4 * w)
        np.testing.assert_allclose(gradient[1].second, 2 * w)


def test_how_one_transform_treats_a_structure_is_not_remembered_for_another():
    def registered(f):
        return jax.jit(f)

    st.register_transform(registered)
    for _ in range(2):
        for transform, are_one in ((registered, True), (lambda f: jax.jit(f), False)):
            w = jnp.ones(2)
            same = st.preserve_identities(transform)(lambda a, b: int(a.first is b.first))
            assert bool(same(Pair(w, 1), Pair(w, 2))) is are_one


def test_arrays_are_cut_between_arguments_but_references_are_an_error():
    """Also where a call of the same structure was remembered, in which it was an array."""
    read = st.preserve_identities(lambda f: f)(lambda a, b: a.first[...] + b.first[...])
    for _ in range(2):
        w = jnp.ones(2)
        np.testing.assert_array_equal(read(Pair(w, None), Pair(w, None)), [2.0, 2.0])
        ref = jax.new_ref(w)
        with pytest.raises(st.errors.InconsistentSharingError) as caught:
            read(Pair(ref, None), Pair(ref, None))
        assert caught.value.paths == ("a.first", "b.first")


def test_a_shape_in_a_module_that_is_returned():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    result = st.preserve_identities(lambda f: jax.jit(f))(lambda m: [Pair(shape, m.first)])(Pair(jnp.ones(2), None))
    assert result[0].first == shape
    np.testing.assert_array_equal(result[0].second, [1.0, 1.0])


def negated(f):
    return jax.jit(f)


def test_in_place_under_a_transform_that_is_registered():
    st.register_transform(negated)
    w = jnp.ones(2)
    m = Mutable(first=w, second=[w])
    n = Mutable(first=m, second=None)

    def change(models, x):
        m, n = models
        m.first = m.second[0] = -m.first
        n.second = x
        return [m.second, Pair(n, m)]

    container, pair = st.preserve_identities(negated, in_place=True)(change)((m, n), jnp.zeros(1))
    assert m.first is m.second[0]
    np.testing.assert_array_equal(m.first, [-1.0, -1.0])
    np.testing.assert_array_equal(n.second, [0.0])
    assert n.first is pair.second is m
    assert pair.first is n
    np.testing.assert_array_equal(container[0], m.first)
    st.register_transform(second)
    with pytest.raises(st.errors.SharingMismatchError, match="cannot write changes back"):
        st.preserve_identities(second, in_place=True)(lambda m: m.first)([n, m])


def test_a_group_prints_as_what_it_stands_for():
    """JAX quotes what a function returned."""
    m = Pair(jnp.ones(2), None)
    with pytest.raises(TypeError, match=r"Output was .*Pair\(first=f32\[2\], second=f32\[2\]\)"):
        st.preserve_identities(lambda f: jax.grad(f))(lambda m: Pair(m.first, m.first))(m)


def elsewhere(f):
    """Calls the function in another thread."""

    def call(*args):
        found = []
        thread = threading.Thread(target=lambda: found.append(f(*args)))
        thread.start()
        thread.join()
        return found[0]

    return call


def test_a_transform_that_calls_the_function_elsewhere():
    w = jnp.ones(2)
    for register in (False, True):
        if register:
            st.register_transform(elsewhere)
        result = st.preserve_identities(elsewhere)(lambda m: st.tree.map(jnp.negative, m))(Pair(w, w))
        assert result.first is result.second
    nested = st.preserve_identities(elsewhere)(lambda m: st.jit(lambda m: m)(m))(Pair(w, w))
    assert nested.first is nested.second


TIED_NUMBERS = {
    "modules": lambda w: Pair(w, Record(w, None)),
    "dicts": lambda w: {"a": w, "b": [w]},
    "a shared module": lambda w: [Pair(w, None)] * 2,
}


@pytest.mark.parametrize("kind", TIED_NUMBERS)
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_ties_of_what_numpy_makes_numbers_of(kind, of):
    """From arrays without dimensions NumPy computes numbers, and two numbers are no tie."""
    make = TIED_NUMBERS[kind]
    option = {"policy": st.Policy(containers=True)}
    m = make(jnp.float32(3))
    tangent = make(of(np.float32(0.5)))

    def tied(tree):
        one, other = jax.tree.leaves(tree)
        return one is other and bool(st.ties(tree))

    def doubled(tree):
        return st.tree.map(lambda x: 2 * x, tree)

    @(lambda f: st.custom_vjp(f, **option))
    def square(m):
        return st.tree.map(lambda x: x**2, m)

    def bwd(m, g):
        assert tied(g)
        return st.vjp(lambda m: st.tree.map(lambda x: x**2, m), m, **option)[1](doubled(g))

    square.defvjp(lambda m: (square(m), m), bwd)
    for found, expected in (
        (doubled(tangent), 1.0),
        (doubled(doubled(doubled(tangent))), 4.0),
        *[
            (pull(cotangent)[0], factor * paths * 0.5)  # of an untied one, both
            for paths, cotangent in ((1, tangent), (2, st.untie(tangent)))
            for factor, pull in (
                (1, st.vjp(lambda m: m, m, **option)[1]),
                (2, st.linear_transpose(doubled, m, **option)),
                (2 * 2 * 3, st.vjp(square, m, **option)[1]),
            )
        ],
        (st.jvp(doubled, (m,), (tangent,), **option)[1], 1.0),
        (st.linearize(doubled, m, **option)[1](tangent), 1.0),
    ):
        assert tied(found)
        np.testing.assert_allclose(jax.tree.leaves(found), expected)
