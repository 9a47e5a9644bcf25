"""The loops of `jax.lax`, against vanilla loops over arrays that are given once by hand."""

import contextlib
import gc
import weakref

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given

import sharedtree as st
from sharedtree import associative_scan, fori_loop, map as map_over, scan, while_loop
from tests.strategies import Mutable, Pair, copy_dag, dags, partition, python_numbers, unique_arrays

IGNORE = st.Policy(on_untie="ignore")
PARTING = st.Policy(in_place=True, on_untie="ignore")

LOOPS = {
    "scan": lambda f, m, **o: scan(lambda c, _: (f(c), None), m, length=3, **o)[0],
    "while_loop": lambda f, m, **o: while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, m), **o)[1],
    "fori_loop": lambda f, m, **o: fori_loop(0, 3, lambda _, c: f(c), m, **o),
}


class Net(eqx.Module):
    a: jax.Array
    b: jax.Array
    steps: int = 0


def tied(value=2.0):
    w = jnp.full(3, value)
    return Net(w, w)


class Layer(eqx.Module):
    weight: jax.Array


def fix_in(message, **names):
    """Runs the code in a message that names `untie`. Returns the names."""
    (line,) = [line.strip() for line in message.splitlines() if "sharedtree.untie(" in line]
    exec(line, {"sharedtree": st}, names)
    return names


def doubled(tree):
    return st.tree.map(lambda x: x * 2 if eqx.is_inexact_array(x) else x, tree)


@pytest.mark.parametrize(
    ("loop", "variable"),
    [
        (lambda f, init: scan(lambda c, _: (f(c), None), init, length=2)[0], "init"),
        (lambda f, init: fori_loop(0, 2, lambda _, c: f(c), init), "init_val"),
        (lambda f, init: while_loop(lambda c: c["online"].a.weight[0] < 4, f, init), "init_val"),
    ],
)
@pytest.mark.parametrize("models", [("online", "target"), ("online", "target", "second target")])
def test_the_fix_for_a_carry_of_tied_models_keeps_the_ties_inside(loop, variable, models):
    def train(state):
        return {name: st.tree.map(lambda w: w + 1, model) for name, model in state.items()}

    layer = Layer(jnp.full(3, 2.0))
    init = dict.fromkeys(models, Net(layer, layer))
    with pytest.raises(st.errors.SharingMismatchError, match="are one `Net`") as caught:
        loop(train, init)
    init = fix_in(str(caught.value), **{variable: init})[variable]
    state = loop(train, init)
    for tree in init, state:
        assert len({id(tree[name]) for name in models}) == len(models)
        assert all(tree[name].a is tree[name].b for name in models)


@pytest.mark.parametrize("name", LOOPS)
@given(dag=dags())
def test_partition_of_a_carry(name, dag):
    assume(not python_numbers([dag]))  # of weak type in the next iteration
    seen = []

    def f(model):
        seen.append(partition(model))
        return doubled(model)

    result = LOOPS[name](f, dag, policy=IGNORE)
    assert set(seen) == {partition(dag)}
    assert partition(result) == partition(dag)
    for leaf, original in zip(unique_arrays(result), unique_arrays(dag), strict=True):
        factor = 8 if jnp.issubdtype(original.dtype, jnp.inexact) else 1
        np.testing.assert_array_equal(leaf, original * factor)


@given(dag=dags())
@pytest.mark.slow
def test_partition_of_what_is_scanned(dag):
    assume(not python_numbers([dag]))
    stacked = copy_dag(dag, lambda x: jnp.stack([x, x, x]))
    seen = []

    def f(total, model):
        seen.append(partition(model))
        return total + 1, doubled(model)

    _, ys = scan(f, 0, stacked, policy=IGNORE)
    mapped = map_over(lambda model: f(0, model)[1], stacked, policy=IGNORE)
    assert set(seen) == {partition(dag)} == {partition(ys), partition(mapped)}
    for tree in (ys, mapped):
        for leaf, original in zip(unique_arrays(tree), unique_arrays(stacked), strict=True):
            factor = 2 if jnp.issubdtype(original.dtype, jnp.inexact) else 1
            np.testing.assert_array_equal(leaf, original * factor)


def test_an_accidental_tie_is_cut_with_one_more_trace():
    traces = []

    def f(state, x):
        traces.append(state.a is state.b)
        return Net(state.a + x, state.b - x), state.a

    z = jnp.zeros(())
    for _ in range(3):
        with pytest.warns(st.UntiedWarning) if len(traces) < 2 else contextlib.nullcontext():
            last, ys = scan(f, Net(z, z), jnp.arange(4.0))
        assert (float(last.a), float(last.b)) == (6.0, -6.0)
        np.testing.assert_array_equal(ys, [0.0, 0.0, 1.0, 3.0])
    assert traces == [True, False]
    # Where it is untied on purpose nothing is said, nor to who gets it.
    apart = lambda state: Net(state.a + 1, state.b - 1)
    last, _ = scan(lambda state, _: (st.untie(apart(state)), None), Net(z, z), length=3)
    assert (float(last.a), float(last.b)) == (3.0, -3.0)
    kept = st.jit(lambda m: scan(lambda c, _: (st.untie(c), None), m, length=2)[0])(tied())
    assert kept.a is not kept.b


def test_a_tie_that_only_the_result_has_goes_out_twice():
    traces = []

    def f(state, x):
        traces.append(None)
        total = state.a + x
        return Net(total, total), None

    last, _ = scan(f, Net(jnp.zeros(()), jnp.ones(())), jnp.arange(3.0))
    assert (float(last.a), float(last.b)) == (3.0, 3.0)
    assert last.a is not last.b
    assert len(traces) == 1


def test_a_shared_list_is_cut_like_an_array():
    w = [jnp.ones(())]
    last, _ = scan(lambda m, x: (Net([m.a[0] + x], [m.b[0]]), None), Net(w, w), jnp.arange(3.0), policy=IGNORE)
    assert (float(last.a[0]), float(last.b[0])) == (4.0, 1.0)
    assert last.a is not last.b


@pytest.mark.parametrize("loop", LOOPS)
def test_a_static_number_that_changes_becomes_a_leaf(loop):
    traces = []

    def f(model):
        traces.append(None)
        return eqx.tree_at(lambda m: m.steps, model, model.steps + 1)

    for _ in range(2):
        model = tied()
        result = LOOPS[loop](f, Net(model.a, model.b, 0))
        assert int(result.steps) == 3
        assert result.steps.weak_type
        assert result.steps.dtype == jnp.int32
    if loop == "scan":  # which the others give to new lambdas
        assert len(traces) == 4
    same, _ = scan(lambda m, _: (m, None), Net(model.a, model.b, 7), length=2)
    assert same.steps == 7
    assert type(same.steps) is int


@pytest.mark.slow
def test_what_is_learned_of_loops_and_branches_goes_with_their_functions():
    def make():
        class Own(eqx.Module):
            a: jax.Array
            b: jax.Array

        def carried(state, x):
            return Own(state.a + x, state.b), None

        f, g = lambda net: Own(net.a, net.b * 2), lambda net: Own(net.a, net.a)
        w = jnp.zeros(2)
        for _ in range(2):
            scan(carried, Own(w, w), jnp.ones((2, 2)), policy=IGNORE)
            st.cond(True, f, g, Own(w, w + 1))
        return [weakref.ref(each) for each in (carried, f, g, st.tree.structure(Own(w, w + 1)))]

    gone = make()
    jax.clear_caches()
    gc.collect()
    assert [each() for each in gone] == [None] * 4


CONFLICTS = {
    "a tie of modules that is lost": (
        lambda t, _: (Pair(Net(t.first.a, t.first.a), Net(t.second.a, t.second.a)), None),
        lambda: (lambda n: Pair(n, n))(tied()),
        ("`init.first` and `init.second`", "when an iteration begins, but two when it ends"),
    ),
    "a tie of modules that is new": (
        lambda t, _: (Pair(t.first, t.first), None),
        lambda: Pair(tied(), tied()),
        ("`init.first` and `init.second`", "when it ends, but two when an iteration begins"),
    ),
    "another class": (
        lambda t, _: (t.first, None),
        lambda: Pair(tied(), tied()),
        ("`init`", "a `Pair` with 2 children", "a `Net` with 3 children"),
    ),
    "a container in place of a module": (lambda m, _: ((m, m), None), tied, ("`init`", "a `tuple`")),
    "another static value": (
        lambda m, _: (Net(m.a, m.b, "text"), None),
        tied,
        ("`init.steps`", "the static value 0", "'text'"),
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_cannot_be_joined(name):
    f, init, texts = CONFLICTS[name]
    before = init()
    with pytest.raises(st.errors.SharingMismatchError) as error:
        scan(f, before, length=2, policy=IGNORE)
    for text in texts:
        assert text in str(error.value)
    assert "Packed" not in str(error.value)
    scan(lambda m, _: (doubled(m), None), before, length=2)  # the next call works


def test_what_is_carried_and_scanned():
    model, w = tied(), jnp.arange(3.0)
    with pytest.raises(st.errors.InconsistentSharingError, match=r"`init.a`, `init.b`: carried") as error:
        scan(lambda c, x: (c, x), model, {"m": model})
    assert error.value.paths == ("init.a", "init.b", "xs['m'].a", "xs['m'].b")
    assert set(error.value.treatments) == {"carried", "scanned"}
    seen = []

    def f(c, x):
        seen.append((c.a.shape, x.a.shape))
        return Net(c.a + x.a, c.b), x

    # An array is cut.
    last, ys = scan(f, Net(w, jnp.ones(())), Net(w, jnp.zeros(3)))
    assert seen == [((3,), ())]
    np.testing.assert_array_equal(last.a, w + 3)
    np.testing.assert_array_equal(ys.a, w)


def test_a_condition_that_is_a_model():
    with pytest.raises(TypeError, match="must return a scalar boolean"):
        while_loop(lambda m: m, doubled, tied())


@pytest.mark.parametrize("containers", [False, True])
def test_a_carry_that_the_body_itself_changes(containers):
    policy = st.Policy(containers=containers, on_untie="ignore")

    def run(change):
        def body(carry, _):
            change(carry)
            return carry, None

        return scan(body, {"net": tied(), "x": jnp.zeros(())}, length=2, policy=policy)[0]

    assert float(run(lambda c: c.update(x=c["x"] + 1))["x"]) == 2.0
    changes = (
        lambda c: c.update(y=jnp.ones(())),
        lambda c: c.pop("net"),
        lambda c: c.update(net=c["x"]),
        lambda c: c.update(x=c["net"]),
    )
    for change in changes:
        with pytest.raises(st.errors.SharingMismatchError) as error:
            run(change)
        assert "Packed" not in str(error.value)
    elems = {"a": jnp.ones(2), "b": jnp.ones(2)}
    with pytest.raises((ValueError, st.errors.SharingMismatchError)):
        associative_scan(lambda x, y: {"a": x["a"] + y["a"]}, elems, policy=policy)


def test_what_was_learned_belongs_to_containers_and_policies():
    def body(carry, _):
        (net,) = carry
        return type(carry)([net if isinstance(carry, list) else Net(net.a, net.b + 1)]), None

    for carry, is_kept in (([tied()], True), ((tied(),), False), ([tied()], True), ((tied(),), False)):
        (net,), _ = scan(body, carry, length=2, policy=IGNORE)
        assert (net.a is net.b) == is_kept
    with pytest.raises(st.errors.UntiedError):
        scan(body, (tied(),), length=2, policy=st.Policy(on_untie="error"))


def step(model, x):
    return Net(model.a * x + 1, model.b, model.steps), (model.a + model.b).sum()


def test_scan_gives_what_vanilla_gives():
    w, xs = jnp.arange(3.0), jnp.arange(4.0)
    for options in ({}, {"reverse": True}, {"unroll": 2}):
        (a, _), sums = jax.lax.scan(lambda c, x: ((c[0] * x + 1, c[1]), (c[0] + c[1]).sum()), (w, w), xs, **options)
        for disabled in (False, True):
            with jax.disable_jit(disabled):
                last, ys = scan(step, Net(w, w), xs, **options, policy=IGNORE)
            np.testing.assert_allclose(last.a, a)
            np.testing.assert_allclose(ys, sums)


def test_map_gives_what_vanilla_gives():
    w = jnp.arange(12.0).reshape(4, 3)
    for options in ({}, {"batch_size": 2}):
        model, are_one = map_over(lambda m: (doubled(m), m.a is m.b), Net(w, w), **options)
        np.testing.assert_array_equal(model.a, 2 * w)
        assert model.a is model.b
        assert bool(are_one.all())


def test_associative_scan_gives_what_vanilla_gives():
    w, v = jnp.arange(3.0), jnp.arange(3.0) + 1

    def combine(one, two):
        return Net(one.a + two.a, one.b * two.b)

    for reverse in (False, True):
        result = associative_scan(combine, Net(w, v), reverse=reverse)
        want = jax.lax.associative_scan(lambda x, y: (x[0] + y[0], x[1] * y[1]), (w, v), reverse=reverse)
        np.testing.assert_allclose(result.a, want[0])
        np.testing.assert_allclose(result.b, want[1])
    both = associative_scan(lambda x, y: st.tree.map(jnp.add, x, y), Net(w, w))
    assert both.a is both.b
    np.testing.assert_allclose(both.a, np.cumsum(w))


@pytest.mark.parametrize("kind", ["lax", pytest.param("checkpointed", marks=pytest.mark.slow), "bounded"])
@pytest.mark.slow
def test_the_loops_of_equinox(kind):
    ours_scan, ours_while = st.preserve_identities(eqxi.scan), st.preserve_identities(eqxi.while_loop)
    xs = jnp.arange(1.0, 4.0)

    def loss(model, scan, while_loop):
        if kind != "bounded":
            model, ys = scan(lambda m, x: (st.tree.map(lambda w: w * x, m), m.a.sum()), model, xs, kind=kind)
        else:
            ys = jnp.zeros(())
        model = while_loop(lambda m: m.a.sum() < 50, doubled, model, kind=kind, max_steps=16)
        return (model.a * model.b).sum() + ys.sum()

    def vanilla(w):
        ys = jnp.zeros(())
        if kind != "bounded":
            w, ys = eqxi.scan(lambda w, x: (w * x, w.sum()), w, xs, kind=kind)
        w = eqxi.while_loop(lambda w: w.sum() < 50, lambda w: 2 * w, w, kind=kind, max_steps=16)
        return (w * w).sum() + ys.sum()

    model = tied(1.0)
    np.testing.assert_allclose(loss(model, ours_scan, ours_while), vanilla(model.a))
    if kind != "lax":
        gradient = st.grad(loss)(model, ours_scan, ours_while)
        assert gradient.a is gradient.b
        np.testing.assert_allclose(gradient.a, jax.grad(vanilla)(model.a), rtol=1e-6)
    with pytest.raises(ValueError, match="does not support `in_place=True`"):
        st.preserve_identities(eqxi.scan, in_place=True)(lambda m, x: (m, None), model, xs, kind="lax")


# In place, but for what the situations in `test_sharing_situations` try in each loop

IN_PLACE = st.Policy(in_place=True)


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_a_change_is_written_back(name, disabled):
    n = jnp.array(0.0)
    model = Mutable(first=n, second=n)
    pair = Mutable(left=model, right=model, other=Mutable(w=jnp.ones(2)), n=0)
    other, array = pair.other, pair.other.w

    def f(pair):
        assert pair.left is pair.right
        pair.left.first = pair.left.second = pair.left.first + 1
        pair.n = pair.n + 1
        return pair

    with jax.disable_jit(disabled):
        assert LOOPS[name](f, pair, policy=IN_PLACE) is pair
    assert pair.left is pair.right is model
    assert model.first is model.second
    assert float(model.first) == int(pair.n) == 3
    assert pair.other is other
    assert other.w is array


def test_without_jit_each_iteration_may_do_something_else():
    model = Mutable(n=jnp.zeros(()))

    def body(model, x):
        if x > 0:
            model.n = model.n + x
        return model, None

    with jax.disable_jit():
        assert scan(body, model, jnp.array([1.0, 2.0, 0.0]), policy=IN_PLACE)[0] is model
        assert float(model.n) == 3.0
        n = model.n
        assert while_loop(lambda m: False, lambda m: m, model, policy=IN_PLACE) is model
    assert model.n is n


def test_a_list_that_was_parted_is_not_written_twice():
    shared = [jnp.zeros(())]
    model = Mutable(a=shared, b=shared)

    def f(model, _):
        if model.a is model.b:
            model.b = list(model.b)
        model.a[0] = model.a[0] + 1
        model.b[0] = model.b[0] + 2
        return model, None

    before = {"first": Mutable(x=jnp.zeros(())), "model": model}
    with pytest.raises(st.errors.InconsistentSharingError, match="makes several of it") as error:
        scan(lambda c, x: ({**c, "model": f(c["model"], x)[0]}, x), before, length=2, policy=PARTING)
    assert error.value.paths == ("init['model'][<flat index 0>]", "init['model'][<flat index 1>]")
    assert error.value.treatments == ("object 1 inside the function", "object 2 inside the function")
    assert all(f"    `{path}`: " in str(error.value) for path in error.value.paths)
    assert model.a is model.b is shared
    assert float(shared[0]) == 0.0


def test_what_cannot_be_changed_can_be_replaced_in_place():
    model = tied()
    a = model.a
    last, _ = scan(lambda m, _: (doubled(m), None), model, length=3, policy=IN_PLACE)
    assert model.a is a
    np.testing.assert_array_equal(last.a, 8 * a)
    assert last.a is last.b
