"""S5: arrays and mutable containers are cut between treatments, modules are not. Against what `strategies` knows."""

import contextlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as hst

import sharedtree as st
from tests import strategies
from tests.laws import assert_gradient, floats, loss
from tests.messages import conflict
from tests.strategies import (
    MODULES,
    Layer,
    Mutable,
    Pair,
    copy_dag,
    is_array,
    occurrences,
    partition,
    paths,
    python_numbers,
    twin,
)

IGNORE = st.Policy(on_untie="ignore", pass_through=False)


@hst.composite
def soft_arguments(draw):
    """Two or three modules that share arrays, containers and modules without arrays, but none with."""
    shared = draw(hst.lists(strategies.arrays(), min_size=1, max_size=3))
    shared.append(Layer(None, jnp.tanh, None))
    for _ in range(draw(hst.integers(0, 2))):
        some = [shared[draw(hst.integers(0, len(shared) - 1))] for _ in range(draw(hst.integers(0, 2)))]
        shared.append(draw(hst.sampled_from([list, lambda xs: dict(zip("ab", xs, strict=False))]))(some))

    def argument():
        pool = list(shared)
        for _ in range(draw(hst.integers(1, 3))):
            pool.append(draw(strategies.nodes(pool)))
        return Pair(pool[-1], [pool[draw(hst.integers(0, len(pool) - 1))]])

    found = tuple(argument() for _ in range(draw(hst.integers(2, 3))))
    assume(not python_numbers(found))
    assume(sum(1 for arg in found for _ in paths(arg)) < 300)
    return found


def fate(obj, label, is_treated):
    """The treatments of the leaves in an object; nothing for one that holds none."""
    if is_array(obj):
        return {label if is_treated(obj) else "untreated"}
    inside = [x for _, x, _ in paths(obj) if is_array(x)]
    return {label if is_treated(x) else "untreated" for x in inside}


def expected_partition(args, labels, is_treated=lambda _: True):
    """By object for modules, by object and treatment for what is soft; None if a module has two treatments."""
    classes = {}
    fates = {}
    for path, obj in occurrences(args, inside=False).items():
        found = frozenset(fate(obj, labels[path[0]], is_treated))
        if isinstance(obj, MODULES):
            if fates.setdefault(id(obj), found) != found:
                return None
            found = None
        classes.setdefault((id(obj), found), set()).add(path)
    return frozenset(map(frozenset, classes.values()))


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def chosen(labels):
    return tuple(i for i, label in enumerate(labels) if label)


def on_the_mesh(*spec):
    return jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec(*spec))


def everything(_):
    return True


# The transform, its options for arguments with and without a label, and what of an argument they are about.
WAYS = {
    "grad": (jax.grad, lambda labels: {"argnums": chosen(labels) or 0}, is_float),
    "vmap": (jax.vmap, lambda labels: {"in_axes": tuple(0 if x else None for x in labels), "axis_size": 2}, everything),
    "donation": (jax.jit, lambda labels: {"donate_argnums": chosen(labels)}, everything),
    "shardings": (
        jax.jit,
        lambda labels: {"in_shardings": tuple(on_the_mesh() if x else None for x in labels)},
        everything,
    ),
    "unregistered": (lambda f: jax.jit(f), lambda labels: {}, everything),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", WAYS)
@given(args=hst.one_of(soft_arguments(), strategies.arguments()), data=hst.data())
@settings(max_examples=15)
def test_identity_is_object_and_treatment(name, args, data):
    assume(not python_numbers(args))
    if name == "grad":  # what is bare must be a float to be differentiated
        args = tuple(arg for arg in args if isinstance(arg, MODULES))
        assume(args)
    if name == "vmap":
        args = copy_dag(args, lambda x: jnp.stack([x, x]))
    labels = [data.draw(hst.booleans()) for _ in args]
    if name == "grad":
        labels[0] = labels[0] or not any(labels)
    if name == "unregistered":
        labels = list(range(len(args)))
    transform, options, is_treated = WAYS[name]
    seen = []

    def traced():  # nothing is computed, so that nothing is compiled for it
        wrapped = st.preserve_identities(transform, policy=IGNORE)(f, **options(labels))
        jax.eval_shape(lambda: ((wrapped.trace if name == "donation" else wrapped)(*args), 0)[1])

    def f(*args):
        seen.append(partition(args, inside=False))
        return loss(*args)

    expected = expected_partition(args, labels, is_treated)
    if expected is None:
        with pytest.raises(st.errors.InconsistentSharingError):
            traced()
    else:
        traced()
        assert seen[0] == expected


@given(args=soft_arguments())
@settings(max_examples=10)
def test_a_cut_gradient_is_that_of_vanilla(args):
    """Each tie within the differentiated argument sums; what flows through the others is dropped."""
    gradient = st.preserve_identities(jax.grad, policy=IGNORE)(loss)(*args)
    per_path = eqx.filter_grad(lambda first, rest: loss(first, *rest))(twin(args[0]), args[1:])
    assert_gradient(args[0], gradient, per_path)


@pytest.mark.parametrize("transform", [st.vmap, st.preserve_identities(eqx.filter_vmap)])
def test_axes_that_differ_at_an_array(transform):
    vanilla = jax.vmap if transform is st.vmap else eqx.filter_vmap
    w = jnp.arange(4.0).reshape(2, 2)
    a, b = Pair(w, w), Pair(w, w)

    def f(a, b):
        return Pair(a.first + 2 * b.second, (3 * a.second * b.first).sum())

    for in_axes in ((0, None), (0, 1), (Pair(0, 1), Pair(1, None)), (Pair(None, 0), 0), (None, 1)):
        is_within = any(isinstance(axes, Pair) for axes in in_axes)
        # Between arguments a tie is cut in silence; within one module it is said.
        with pytest.warns(st.UntiedWarning, match="cut in") if is_within else contextlib.nullcontext():
            ours = transform(f, in_axes=in_axes)(a, b)
        assert eqx.tree_equal(ours, vanilla(f, in_axes=in_axes)(twin(a), twin(b))), in_axes


@pytest.mark.parametrize("make", [lambda a, b: {"a": a, "b": b}, lambda a, b: [a, b], lambda a, b: (a, [b])])
def test_axes_that_differ_between_the_modules_of_one_argument_are_said(make):
    w = jnp.arange(4.0).reshape(2, 2)
    model, axes = make(Pair(w, 1), Pair(w, 1)), make(Pair(0, None), Pair(1, None))
    total = lambda m: sum(jnp.vdot(x, x) for x in jax.tree.leaves(m) if eqx.is_array(x))
    with pytest.warns(st.UntiedWarning, match="cut in"):
        st.vmap(total, in_axes=(axes,))(model)
    st.vmap(total, in_axes=(make(Pair(0, None), Pair(0, None)),))(model)
    st.vmap(total, in_axes=(axes,))(st.untie(model))


def axes_of_one_module(container):
    w = jnp.arange(4.0).reshape(2, 2)
    subtract = lambda m: m.first - m.second if container is Pair else m["first"] - m["second"]
    made = (lambda a, b: Pair(a, b)) if container is Pair else lambda a, b: {"first": a, "second": b}
    call = lambda model, **options: st.vmap(subtract, in_axes=(made(0, 1),), **options)(model)
    return w, made(w, w), call


@pytest.mark.parametrize("container", [Pair, dict])
def test_axes_that_differ_within_one_module_are_cut_and_said(container):
    w, model, call = axes_of_one_module(container)
    policy = {"on_untie": "warn", "containers": container is dict}
    with pytest.warns(st.UntiedWarning, match=r"cut in `.*subtract|cut in `.*lambda") as caught:
        np.testing.assert_array_equal(call(model, policy=st.Policy(**policy)), w - w.T)
    assert len(caught) == 1
    text = str(caught[0].message)
    one, two = ("`m.first`", "`m.second`") if container is Pair else ("`m['first']`", "`m['second']`")
    assert f"{one}: in_axes 0" in text
    assert f"{two}: in_axes 1" in text
    assert len(text.splitlines()) <= 8
    # What is no tie, or was said not to be one, is mapped in silence.
    for quiet in (st.untie(model), copy_dag(twin(model))):
        np.testing.assert_array_equal(call(quiet, policy=st.Policy(**policy)), w - w.T)
    np.testing.assert_array_equal(call(model, policy=st.Policy(**{**policy, "on_untie": "ignore"})), w - w.T)
    with pytest.raises(st.errors.UntiedError) as error:
        call(model, policy=st.Policy(**{**policy, "on_untie": "error"}))
    assert error.value.paths == (one.strip("`"), two.strip("`"))
    if container is dict:  # under the usual policy, arrays in a dict are values
        np.testing.assert_array_equal(call(model), w - w.T)


def test_many_arrays_with_two_axes_are_one_warning_for_a_trace():
    w, v = jnp.arange(4.0).reshape(2, 2), jnp.ones((2, 2))
    model, axes = Pair(Pair(w, v), Pair(w, v)), Pair(Pair(0, 0), Pair(1, 1))
    call = st.jit(lambda m: st.vmap(lambda m: m.first.first + m.second.second, in_axes=(axes,))(m))
    with pytest.warns(st.UntiedWarning, match=r"2 ties were cut") as caught:
        [call(model) for _ in range(3)]
    assert len(caught) == 1


def test_containers_of_one_module_have_one_axis():
    w = jnp.arange(4.0).reshape(2, 2)
    shared = [w]
    for axes in (Pair([0], [1]), Pair(0, 1)):
        error = conflict(lambda: st.vmap(lambda m: m.first[0] - m.second[0], in_axes=(axes,))(Pair(shared, shared)))
        assert error.paths == ("m.first[0]", "m.second[0]")
        assert error.treatments == ("in_axes 0", "in_axes 1")
        assert "m = sharedtree.untie(m, lambda m: m.second[0])" in str(error)


def test_a_module_reached_twice_by_prefixes_that_agree():
    model = Pair(jnp.arange(4.0).reshape(2, 2), jnp.arange(6.0).reshape(3, 2))
    axes = Pair(0, 1)
    seen = []
    f = lambda a, b: seen.append(a is b) or a.first.sum() + b.second.sum()
    ours = st.vmap(f, in_axes=(axes, Pair(-2, -1)))(model, model)
    assert seen == [True]
    np.testing.assert_array_equal(ours, jax.vmap(lambda m: m.first.sum() + m.second.sum(), in_axes=(axes,))(model))


def test_ties_of_results_within_one_treatment_are_kept():
    w = jnp.ones(2)
    a, b, c = st.vmap(lambda x: (Pair(x, x), Pair(x, x), 1), out_axes=(Pair(0, 0), 0, None), axis_size=2)(w)
    assert a.first is a.second is b.first is b.second


def test_where_a_partial_gradient_is_meant_nothing_is_said():
    def total(a, b):
        return sum((x * y).sum() for x, y in zip(floats(a), floats(b), strict=False))

    w, v = jnp.ones(2), jnp.zeros(2)
    model = Pair(Layer(w, jax.nn.relu, [v, w]), Layer(w, None, None))
    filtered = st.tree.filter(model, lambda x: x is w)
    target = st.tree.map(lambda x: x, model)  # other nodes, the same arrays
    for first, second in [(model, target), (filtered, model), (model, filtered)]:
        gradient = st.grad(total)(first, second)
        vanilla = eqx.filter_grad(total)(twin(first), twin(second))
        assert_gradient(first, gradient, vanilla)
        st.jit(st.grad(total))(first, second)
    counts = Pair(jnp.arange(2), w)  # an integer has no gradient, so nothing is lost
    st.grad(lambda a, b: a.weight.sum() * b.first.sum())(Layer(v, None, counts.first), counts)


def test_a_mask_that_disagrees_at_a_tie_is_said():
    w = jnp.ones(2)
    some, rest = eqx.partition(Pair(w, w), Pair(True, False))
    # Put back beside the whole model, too, the gradient lacks what flows through the second.
    for other in (rest, Pair(w, w)):
        with pytest.warns(st.UntiedWarning, match=r"`some.first` lacks what flows through `other.second`"):
            st.grad(lambda some, other: (some.first * other.second).sum())(some, other)


def test_what_is_lost_is_found_without_unfolding():
    w = jnp.ones(())

    def f(a, b):
        while isinstance(a, strategies.Record):
            a, b = a.left, b.left if isinstance(b, strategies.Record) else b.a
        return a * b

    st.grad(f)(strategies.tower(60, w), strategies.tower(60, w))
    with pytest.warns(st.UntiedWarning, match="lacks what flows through"):
        st.grad(f)(strategies.tower(60, w), strategies.tower(60, w, lambda a, b: Mutable(a=a, b=b)))


def test_of_many_paths_the_first_eight_are_named():
    layer = Layer(jnp.ones(2), None, None)
    shared = Pair(layer, [layer])
    model = Pair(shared, shared)
    error = conflict(lambda: st.jit(lambda a, b: 0, donate_argnums=0)(model, {"teacher": shared}))
    below = (".first.weight", ".second[0].weight")
    places = ("a.first", "a.second", "b['teacher']")
    assert error.paths == tuple(place + path for place in places for path in below)
    assert error.treatments == ("donated",) * 4 + ("not donated",) * 2
    model = strategies.tower(60, model)
    error = conflict(lambda: st.jit(lambda a, b: 0, donate_argnums=0)(model, shared))
    assert len(error.paths) == 10
    assert "… and more: donated" in str(error)
    assert error.treatments[-2:] == ("not donated",) * 2
    shared = strategies.tower(20, shared)
    error = conflict(lambda: st.jit(lambda a, b: 0, donate_argnums=0)(shared, shared))
    assert len(error.paths) == 16
    assert str(error).count("`, … and more: donated\n") == str(error).count("`, … and more: not donated\n") == 1


def test_the_recipe_for_three_arguments_keeps_what_is_treated_alike_tied():
    """Of two, each recipe runs in `tests/fix_scenarios.py`."""
    f = st.grad(lambda model, one, two: (model.first * one.first).sum() if one is two else None)
    model = Pair(jnp.ones(2), None)
    error = conflict(lambda: f(model, model, model))
    recipe, *_ = [line for line in str(error).splitlines() if line.startswith("    ") and " = sharedtree." in line]
    names = {"sharedtree": st, "model": model, "one": model, "two": model}
    exec(recipe.strip(), names)
    f(names["model"], names["one"], names["two"])


def test_a_buffer_that_is_given_away_is_not_also_kept():
    w = jnp.ones(2)
    model = Pair(w, None)
    f = st.jit(lambda a, b: jax.tree.leaves(a)[0] + jax.tree.leaves(b)[0], donate_argnums=0)
    for a, b in [(w, w), (model, w), (w, model), ({"x": w}, [w]), (model, [{"y": w}]), (model, Layer(w, None, None))]:
        for _ in range(2):
            error = conflict(lambda: f(a, b))
            assert error.treatments == ("donated", "not donated")
            assert not w.is_deleted()
        assert error.paths[0].startswith("a")
        with pytest.raises(st.errors.InconsistentSharingError):
            st.explain(f, a, b)
        f.lower(a, b)
        f.trace(a, b)
        f.eval_shape(a, b)
        jax.jit(lambda w, f=f, a=a, b=b: f(*jax.tree.map(lambda _, w=w: w, (a, b))))(w)
        np.testing.assert_array_equal(jax.jit(lambda: f(a, b))(), 2 * w)  # noqa: B023
        with jax.disable_jit():
            f(a, b)
        with pytest.raises(st.errors.InconsistentSharingError):
            f.lower(jax.tree.map(lambda x: x + 1, a), b).compile()(a, b)
    f(np.ones(2), model)
    ones = np.ones(2)
    f(Pair(ones, None), Layer(ones, None, None))  # NumPy keeps its own buffer


def test_donation_with_static_arguments():
    f = st.jit(lambda k, m, x: (st.tree.map(lambda v: v + x, m), x), static_argnums=0, donate_argnums=1)
    for i in range(4):
        f(0, Pair(jnp.ones(2), None), jnp.ones(2))
        w = jnp.zeros(2)
        error = conflict(lambda: f(0, Pair(w, None), w))
        assert error.paths == ("m.first", "x"), i
        assert not w.is_deleted()
    compiled = f.lower(0, Pair(w, None), w).compile()
    with pytest.raises(
        st.errors.InconsistentSharingError, match="(?s)`m.first`: donated.*`x`: not donated.*untie"
    ) as caught:
        compiled(Pair(w, None), w)
    assert caught.value.paths == ("m.first", "x")
    new, _ = compiled(Pair(w + 1, None), w)
    assert new.first[0] == 1


@given(args=soft_arguments(), data=hst.data())
@settings(max_examples=8)
def test_calls_with_cuts_and_without_in_turn(args, data):
    """Structures without a tie are the same as those with a cut one, so it is the objects that tell them apart."""
    seen = []
    f = st.preserve_identities(jax.jit, policy=IGNORE)(
        lambda *args: seen.append(partition(args, inside=False)) or loss(*args),
        in_shardings=(on_the_mesh(), *[None] * 2)[: len(args)],
    )
    labels = [i == 0 for i in range(len(args))]
    expected = expected_partition(args, labels)
    parted = (copy_dag(args[0]), *copy_dag(args[1:]))
    order = data.draw(hst.permutations([args, parted] * 3))
    for each in order:
        np.testing.assert_allclose(f(*each), loss(*each), rtol=1e-5, atol=1e-5)
    assert all(each == expected for each in seen[:1]) or order[0] is parted


def test_a_cut_container_cannot_be_written_back():
    log = [jnp.zeros(2)]
    a, b = Mutable(log=log), Mutable(log=log, more=None)
    f = st.preserve_identities(jax.vmap, policy=st.Policy(in_place=True), in_axes=(0, None), out_axes=None)

    def append(a, b):
        a.log.append(a.log[0] + 1)
        return jnp.float32(0)

    error = conflict(lambda: f(append)(a, b))
    assert error.paths == ("a[<flat index 0>][0]", "b[<flat index 0>][0]")
    assert len(log) == 1
    f(lambda a, b: jnp.float32(0))(a, b)  # nothing to write
    assert a.log is b.log is log

    def count(a, b):
        a.count = a.log[0] + b.log[0].sum()
        return jnp.float32(0)

    f(count)(a, b)
    np.testing.assert_array_equal(a.count, jnp.zeros(2))


def test_a_cut_container_is_found_on_a_cached_call():
    a, b = Mutable(log=[jnp.zeros(2)]), Mutable(log=[jnp.zeros(2)])
    f = st.preserve_identities(jax.jit, policy=st.Policy(in_place=True), in_shardings=(on_the_mesh(), None))(
        lambda a, b: a.log.append(a.log[0])
    )
    f(a, b)
    assert len(a.log) == 2
    assert len(b.log) == 1
    b = Mutable(log=[jnp.zeros(2)])
    a = Mutable(log=b.log)
    with pytest.raises(st.errors.InconsistentSharingError):
        f(a, b)
    assert len(b.log) == 1


def test_what_is_returned_along_another_axis_is_not_the_callers_object():
    """In place: state goes back along the axis along which it came in; a result that leaves along another is new."""
    w = jnp.arange(6.0).reshape(2, 3)
    for step in (0, 1):
        model = Mutable(w=w, n=None)

        def change(m, step=step):
            m.w = m.w + step if step else m.w
            return m, m

        same, other = st.preserve_identities(jax.vmap, in_place=True, out_axes=(0, 1))(change)(model)
        assert same is model
        np.testing.assert_array_equal(model.w, w + step)
        np.testing.assert_array_equal(other.w, (w + step).T)


def test_explain_shows_the_ties_of_shared_layers():
    layer = Layer(jnp.ones(2), None, None)
    shared = [jnp.ones(1)]
    found = {row.path: row for row in st.explain(st.jit(lambda m: 0), Pair([layer, shared], (layer, shared))).leaves}
    assert (found["m.second[0]"].kind, found["m.second[0]"].value) == ("module", "Layer")
    assert found["m.second[0]"].tied_to == "m.first[0]"
    assert (found["m.second[1]"].kind, found["m.second[1]"].tied_to) == ("container", "m.first[1]")
    assert "m.first" not in found


@given(args=strategies.arguments())
@settings(max_examples=30)
def test_a_copy_has_the_same_ties_and_nothing_in_common(args):
    copied = st.copy(args)
    assert partition(args) == partition(copied)
    before = {id(obj) for obj in occurrences(args).values()}
    for (path, x, _), (other, y, _) in zip(paths(args), paths(copied), strict=True):
        assert path == other
        assert type(x) is type(y) or is_array(x)
        if strategies.carries_identity(y):
            assert id(y) not in before
        if is_array(x):
            assert isinstance(x, np.ndarray) == isinstance(y, np.ndarray)
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            np.testing.assert_array_equal(x, y)


def test_copies_of_other_leaves():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    ref = jax.new_ref(jnp.ones(2))
    config = {"a": [1]}
    placed = jax.device_put(jnp.ones(2), jax.devices()[0])

    arrays = [struct, struct, ref, placed, jax.random.key(0), jnp.asarray(1.0)]
    tree = (Layer(arrays, None, None, width=config), jnp.tanh, 3, "text")
    copied = st.copy(tree)
    new, old = copied[0].weight, tree[0].weight
    assert new[0] is new[1] is not struct
    assert new[0] == struct
    new[2][...] = jnp.zeros(2)
    np.testing.assert_array_equal(ref[...], jnp.ones(2))
    assert new[3].committed
    assert not st.copy([jnp.ones(2)])[0].committed
    assert jnp.array_equal(jax.random.key_data(new[4]), jax.random.key_data(old[4]))
    assert new[5].weak_type == old[5].weak_type
    assert copied[1:] == tree[1:]
    assert copied[0].width == config
    assert copied[0].width is not config
    with contextlib.suppress(RuntimeError):
        placed.delete()
    np.testing.assert_array_equal(new[3], jnp.ones(2))
