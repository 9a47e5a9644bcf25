"""`jax.lax.cond` and `jax.lax.switch`: sharing survives a branch, and what branches share differently is joined."""

import functools
import gc
import itertools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, strategies as hst

import sharedtree as st
from tests import strategies
from tests.models import Leaf, Net
from tests.strategies import MODULES, Mutable, Pair, children, dags, is_array, partition, python_numbers, with_children

IGNORE = st.Policy(on_untie="ignore")


class State(eqx.Module):
    mu: Any
    nu: Any
    steps: Any = 0
    name: str = "state"


def tied():
    leaf = Leaf(jnp.arange(1.0, 4.0))
    return Net(leaf, leaf)


def double(net):
    return st.tree.map(lambda x: 2 * x, net)


def same(net):
    return net


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree) if eqx.is_array_like(x)]


def is_tied(tree):
    a, b = (tree.mu, tree.nu) if isinstance(tree, State) else (tree.embed, tree.head)
    return a is b


def assert_equal(tree, expected):
    for one, two in zip(arrays(tree), arrays(expected), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=1e-6)


def ways(functions):
    """`cond` and `switch` over the functions, each branch in turn: (call, which)."""
    if len(functions) == 2:
        yield lambda *operands: st.cond(True, *functions, *operands), 0
        yield lambda *operands: st.cond(False, *functions, *operands), 1
    for i in range(len(functions)):
        yield functools.partial(lambda i, *operands: st.switch(i, list(functions), *operands), i), i


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, function):
        self.function = function
        self.count = 0
        functools.update_wrapper(self, function)

    def __call__(self, *operands):
        self.count += 1
        return self.function(*operands)


def test_a_result_is_never_the_callers_object():
    """Not even one that every branch returns as it was, since JAX compares what the branches return."""
    net = tied()
    for call, _ in ways((same, lambda net: net)):
        result = call(net)
        assert result.embed is result.head
        assert result is not net
        assert result.embed is not net.embed


@given(dag=dags())
def test_operands_are_partitioned_as_outside(dag):
    seen = []

    def f(dag, again):
        seen.append(partition((dag, again), inside=False))
        return dag, again

    def g(dag, again):
        return f(dag, again)

    result = st.cond(True, f, g, dag, dag.second)
    assert all(each == partition((dag, dag.second), inside=False) for each in seen)
    assert len(seen) == 2
    if not python_numbers([dag]):
        assert partition(result, inside=False) == seen[0]


def parted(tree, is_cut):
    """A tree with the same modules shared, and some ties of arrays and containers cut."""
    made = {}

    def visit(obj):
        keeps = isinstance(obj, MODULES) or (strategies.carries_identity(obj) and not is_cut())
        if keeps and id(obj) in made:  # alive in `tree`
            return made[id(obj)]
        below = children(obj)
        new = jnp.array(obj) if is_array(obj) else with_children(obj, [visit(c) for _, c in below]) if below else obj
        if type(obj) in (list, dict) and not below:
            new = type(obj)()
        if keeps:
            made[id(obj)] = new
        return new

    return visit(tree)


@given(dag=dags(), data=hst.data())
def test_what_comes_out_is_tied_where_all_branches_tie(dag, data):
    assume(not python_numbers([dag]))
    branches = [parted(dag, lambda: data.draw(hst.booleans())) for _ in range(data.draw(hst.integers(2, 3)))]
    each = [partition(branch, inside=False) for branch in branches]
    common = each[0]
    for other in each[1:]:
        common = frozenset(a & b for a, b in itertools.product(common, other) if a & b)
    functions = [lambda branch=branch: branch for branch in branches]
    for call, which in ways(functions):
        result = call()
        assert partition(result, inside=False) == common
        assert_equal(result, branches[which])


def reset(x):
    z = 0 * x
    return State(z, z)


def advance(x):
    return State(x + 1, x + 2)


def test_two_traces_once_and_none_after():
    nothing = lambda x: None
    cases = [(reset, advance, 2), (advance, reset, 2), (reset, reset, 1), (advance, advance, 1), (nothing, nothing, 1)]
    counted = [[Counted(function) for function in functions] for *functions, _ in cases]
    for _ in range(2):
        for functions in counted:
            for call, which in ways(functions):
                result = call(jnp.ones(2))
                expected = functions[which].function(jnp.ones(2))
                assert_equal(result, expected)
                if result is not None:
                    ties = [function.function is reset for function in functions]
                    assert (result.mu is result.nu) == all(ties)
        gc.collect()  # what was learned is kept as long as the functions are
    for functions, (_, _, traces) in zip(counted, cases, strict=True):
        assert [function.count for function in functions] == [2 * traces] * 2  # under cond, and under switch
    f, net = Counted(same), tied()
    for pred in (True, False, True):
        # Operands in other containers are other calls.
        for operand in ((net,), [net], {"net": net}, (net, {"x": net.embed})):
            st.cond(pred, f, f, operand)
    assert f.count == 4


def test_other_branches_other_meets():
    """What one pair of branches has in common says nothing of another pair."""
    f, g, h = (Counted(function) for function in (reset, advance, reset))
    x = jnp.ones(2)
    for _ in range(2):
        assert is_tied(st.cond(True, f, h, x)) is True
        assert is_tied(st.cond(True, f, g, x)) is False
        assert is_tied(st.cond(True, g, f, x)) is False
        assert is_tied(st.switch(0, [f, f], x)) is True


def advance_leaf(leaf):
    return advance(leaf.weight)


def test_results_that_depend_on_shapes():
    """The meet of an earlier call with operands of one structure is no rule for the next."""

    def f(leaf):
        return reset(leaf.weight) if leaf.weight.shape == (2,) else advance(leaf.weight)

    def g(leaf):
        return State(leaf.weight, leaf.weight, name=f"of size {leaf.weight.size}")

    def h(leaf):
        return State(leaf.weight + 1, leaf.weight + 2, name=f"of size {leaf.weight.size}")

    for size in (2, 3, 2):
        for functions in ((f, advance_leaf), (g, h)):
            for call, which in ways(functions):
                result, leaf = call(Leaf(jnp.ones(size))), Leaf(jnp.ones(size))
                assert_equal(result, functions[which](leaf))
                assert result.mu is not result.nu
                assert result.name == functions[which](leaf).name


NUMBERS = [(0, 1), (0.5, 1.5), (True, False), (1j, 2j), (0, jnp.int32(3)), (0.5, jnp.ones(()))]


def test_a_number_that_differs_comes_out_as_an_array():
    for a, b in NUMBERS:
        functions = [Counted(lambda x, number=number: State(x, x, number)) for number in (a, b)]
        for pred in (True, False, True):
            steps = st.cond(pred, *functions, jnp.ones(2)).steps
            vanilla = jax.lax.cond(pred, lambda a=a: a, lambda b=b: b)
            assert isinstance(steps, jax.Array)
            assert (steps.dtype, steps.weak_type, steps) == (vanilla.dtype, vanilla.weak_type, vanilla)
        assert [function.count for function in functions] == [2, 2]
    for numbers in ((3, 3, 3), (3, 3, 4)):
        for call, which in ways([lambda x, i=i: State(x, x, i) for i in numbers]):
            steps = call(jnp.ones(2)).steps
            assert steps == numbers[which]
            assert type(steps) is int if len({*numbers}) == 1 else steps.weak_type
    with pytest.raises(TypeError, match=r"(?s)cond branches must have equal output types.*\.steps") as caught:
        st.cond(True, lambda x: State(x, x, 1), lambda x: State(x, x, 1.5), jnp.ones(2))
    assert "Packed" not in str(caught.value)


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (lambda x: State(x, x, name="other"), "result.net.name"),
        (lambda x: State(x, x, "text"), "result.net.steps"),
        (lambda x: State(x, Leaf(x)), "result.net.nu"),
        (lambda x: State(x, (x,)), "result.net.nu"),
        (lambda x: Net(x, x), "result.net"),
    ],
)
def test_static_values_and_classes_must_agree(other, path):
    path = path.replace("result.net", "result['net']")

    def f(x):
        return {"net": State(x, x), "x": x}

    def g(x):
        return {"net": other(x), "x": x}

    for functions in ((f, g), (g, f)):
        with pytest.raises(st.errors.SharingMismatchError) as caught:
            st.cond(True, *functions, jnp.ones(2))
        assert caught.value.paths[0] in (path, path.removesuffix(".name"))
        assert "`jax.lax.cond`" in str(caught.value)
        assert "in the result of `true_fun`" in str(caught.value)
        assert "in the result of `false_fun`" in str(caught.value)
        assert "Packed" not in str(caught.value)
    assert st.cond(True, f, f, jnp.ones(2))["net"].steps == 0


def test_ties_of_modules_must_agree():
    def loosen(net):
        return Net(Leaf(net.embed.weight), Leaf(net.head.weight))

    for functions, names in (
        ((same, loosen), ("true_fun", "false_fun")),
        ((loosen, same), ("false_fun", "true_fun")),
        ((same, double, loosen), ("branches[0]", "branches[2]")),
    ):
        for call, _ in ways(functions) if len(functions) == 3 else [*ways(functions)][:2]:
            with pytest.raises(st.errors.SharingMismatchError) as caught:
                call(tied())
            text = str(caught.value)
            assert caught.value.paths == ("result.embed", "result.head")
            assert f"are one `Leaf` in the result of `{names[0]}`, but two in the result of `{names[1]}`" in text
            assert "sharedtree.tree.map(" in text
            assert "Packed" not in text
    net = st.cond(True, same, double, tied())
    assert net.embed is net.head


class Bare(eqx.Module):
    """A layer without arrays."""


@pytest.mark.parametrize("is_tied", [True, False])
def test_layers_without_arrays_may_be_one_or_two(is_tied):
    """Nothing could drift apart."""
    one = Bare()
    before = Net(one, one) if is_tied else Net(one, Bare())
    become = lambda net, x: (Net(Bare(), Bare()) if is_tied else Net(*[Bare()] * 2), x + 1)
    for result in (
        st.cond(True, become, lambda net, x: (net, x), before, jnp.zeros(())),
        st.cond(True, lambda net, x: (net, x), become, before, jnp.zeros(())),
        st.while_loop(lambda carry: carry[1] < 2, lambda carry: become(*carry), (before, jnp.zeros(()))),
        st.fori_loop(0, 2, lambda i, carry: become(*carry), (before, jnp.zeros(()))),
        st.scan(lambda carry, _: (become(*carry), None), (before, jnp.zeros(())), length=2)[0],
    ):
        assert jax.tree.structure(result[0]) == jax.tree.structure(before)


def tied_arrays():
    w = jnp.arange(1.0, 4.0)
    return Net(w, w)


def vanilla_double(net):
    return jax.tree.map(lambda x: 2 * x, net)


def test_a_branch_that_loses_a_tie_warns_once():
    for functions in ((lambda net: net, vanilla_double), (vanilla_double, lambda net: net)):
        call = functools.partial(st.cond, True, *functions, tied_arrays())
        with pytest.raises(st.errors.UntiedError, match=r"operands\[0\]\.head"):
            call(policy=st.Policy(on_untie="error"))
        with pytest.warns(st.UntiedWarning) as record:
            result = call()
        (warning,) = record
        assert "vanilla_double" in str(warning.message)
        assert "`operands[0].embed` and `operands[0].head`" in str(warning.message)
        assert warning.filename == __file__
        assert result.embed is not result.head
        assert_equal(result, functions[0](tied_arrays()))
        call()


def test_untie_silences_and_is_handed_on():
    """What one branch unties on purpose is untied on purpose in the result, also for an enclosing function."""
    meant = lambda net: st.untie(vanilla_double(net))
    for functions in ((same, meant), (meant, same), (meant, meant)):
        result = st.jit(lambda net, fs=functions: st.cond(net.embed[0] > 0, *fs, net))(tied_arrays())
        assert result.embed is not result.head
        assert_equal(result, functions[0](tied_arrays()))


@pytest.mark.parametrize(
    "other",
    [
        lambda net: Net(net.embed[:2], net.head[:2]),
        lambda net: Net(net.embed.astype(int), net.head.astype(int)),
        lambda net: Net(net.embed[:2], net.embed[:2]),
        lambda net: net.embed,
        lambda net: (net, net),
        lambda net: {"a": net},
        lambda net: None,
    ],
)
def test_no_private_name_is_in_an_error(other):
    for left, right in ((same, other), (other, same), (lambda net: {"b": net}, other)):
        with pytest.raises((TypeError, st.errors.SharingMismatchError)) as caught:
            st.cond(True, left, right, st.untie(tied_arrays()), policy=IGNORE)
        text = str(caught.value)
        internal_names = ("LeafGroup", "LeafSelection", "Structure(", "OperandsWithAgreement", "Agreement", "agree")
        assert not any(name in text for name in internal_names)
        if left is same and "`result`" in text:
            assert "at `result`: in the result of `true_fun` it is a `Net` with 2 children, in" in text
            assert "in the result of `false_fun` a" in text


def test_a_branch_that_is_not_the_same_when_traced_again():
    count = itertools.count()

    def fickle(x):
        return State(x, x, name="second" if next(count) else "state")

    with pytest.raises(
        st.errors.SharingMismatchError, match=r"`jax\.lax\.cond` returned another structure when it was traced"
    ):
        st.cond(True, fickle, lambda x: State(x, x + 1), jnp.ones(2))


def test_a_tracer_in_a_static_leaf():
    with pytest.raises(st.errors.StaticTracerError):
        st.cond(True, same, lambda net: Net(net.embed, lambda: net.head.weight), tied())


def test_jax_names_operands_as_the_function_does():
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"net\.embed\.weight"):
        st.cond(True, lambda net: double(net) if net.embed.weight.sum() > 0 else net, same, tied())


def test_operand_and_branches_with_operands_of_their_own():
    for pred in (True, False):
        assert is_tied(st.cond(pred, double, same, operand=tied())) is True
        assert st.cond(pred, lambda _: 1, lambda _: 2, operand=None) == (1 if pred else 2)
        net, other = tied(), tied()
        result = st.preserve_identities(jax.lax.cond)(pred, net, double, other, same)
        assert result.embed is result.head
        assert_equal(result, double(net) if pred else other)
    for result in (
        st.switch(1, [same, double], operand=tied()),
        st.switch(0, (same,), tied()),
        st.switch(7, iter([same, double]), tied()),
    ):
        assert result.embed is result.head
    assert st.switch(1, [lambda: 1, lambda: 2]) == 2


def test_without_jit_only_one_branch_runs():
    calls = []

    def f(net):
        calls.append("f")
        assert net.embed is net.head
        return net.embed.weight, State(net.embed.weight, net.embed.weight)

    def g(net):
        calls.append("g")
        return net.embed.weight, State(net.embed.weight, net.embed.weight + 1)

    with jax.disable_jit():
        _, state = st.cond(True, f, g, tied())
        assert state.mu is state.nu
        st.switch(1, [f, g], tied())
    assert calls == ["f", "g"]
    for _ in range(2):
        assert is_tied(st.cond(True, f, g, tied())[1]) is False
    with jax.disable_jit():
        np.testing.assert_array_equal(st.cond(False, f, g, tied())[1].nu, jnp.arange(2.0, 5.0))


def test_joined_under_a_gradient():
    """The meet, in an enclosing trace: against the two branches by hand."""

    def through(x, pred):
        state = st.cond(pred, lambda x: (lambda y: State(y, y, 1))(jnp.sin(x)), lambda x: State(x, x * x, 2), x)
        return (state.mu * state.nu * state.steps).sum()

    x = np.array([0.3, 0.7], np.float32)
    gradient = jax.jit(jax.grad(through))
    # Of the squares of the sines, and of twice the cubes.
    for pred, by_hand in ((True, np.sin(2 * x)), (False, 6 * x**2)):
        np.testing.assert_allclose(gradient(x, pred), by_hand, rtol=1e-5)
    several = jax.vmap(gradient, in_axes=(None, 0))(x, jnp.array([True, False]))
    np.testing.assert_allclose(several, [np.sin(2 * x), 6 * x**2], rtol=1e-5)


# In place, but for what the situations in `test_sharing_situations` try in each branch


def counters():
    n = jnp.array(0.0)
    one = Mutable(first=n, second=n)
    return Mutable(left=one, right=one, other=Mutable(w=jnp.ones(2)))


def increased(pair, _=None):
    pair.left.first = pair.left.second = pair.left.first + 1
    return pair


def other_changed(pair, _=None):
    pair.other.w = pair.other.w * 2
    return pair


IN_PLACE = st.Policy(in_place=True)


def test_what_a_branch_changes_is_written_and_what_it_leaves_stays_what_it_is():
    for call, which in ways((increased, other_changed)):
        pair = counters()
        left, other, first, w = pair.left, pair.other, pair.left.first, pair.other.w
        with st.Context(IN_PLACE):
            assert call(pair) is call(pair) is pair
        assert pair.left is pair.right is left
        assert left.first is left.second
        assert pair.other is other
        np.testing.assert_array_equal(left.first, first if which else first + 2)
        np.testing.assert_array_equal(other.w, 4 * w if which else w)
    pair = counters()
    w = pair.other.w
    assert st.cond(True, increased, lambda pair: pair, pair, policy=IN_PLACE) is pair
    assert pair.other.w is w


def test_what_one_branch_changes_of_numbers_and_of_one_of_two_tied_arrays():
    def changed(model, *_):
        model.p.w = model.p.w + 10
        model.n = model.n + 1

    v = jnp.array(1.0)
    model = Mutable(p=Mutable(w=v), q=Mutable(w=v), n=0)
    with pytest.warns(st.UntiedWarning):
        st.cond(True, changed, lambda model: None, model, policy=IN_PLACE)
    assert (float(model.p.w), float(model.q.w), int(model.n)) == (11.0, 1.0, 1)
    assert model.q.w is v


def test_one_branch_returns_what_it_got_in_place():
    w = jnp.ones(2)
    net = Pair(w, w)
    for predicate, factor in ((True, 1), (False, 2)):
        result = st.cond(predicate, lambda n: n, lambda n: st.tree.map(lambda x: 2 * x, n), net, policy=IN_PLACE)
        np.testing.assert_array_equal(result.first, factor * w)
        assert result.first is result.second
    one, two = counters(), counters()
    result = st.cond(True, lambda a, b: a, lambda a, b: b, one, two, policy=IN_PLACE)
    assert result.left is result.right
