"""`wrt=`: which leaves are differentiated; what the gradients should be is what vanilla JAX gives of those leaves."""

import copy
import pickle
import re
import warnings
from typing import Any

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as hst

import sharedtree as st
from tests.deep import in_a_thread, link
from tests.strategies import Layer, Mutable, Pair, dags, paths, tower, twin

A, B, C = (jnp.array(values) for values in ([1.0, 2.0], [3.0, -1.0], [0.5, 4.0]))


def f(a, b, c):
    return (a * a * b * jnp.sin(c)).sum()


def of_pair(pair):
    return f(pair.first, pair.second["b"], pair.second["c"])


def pair():
    return Pair(A, {"b": B, "c": C, "n": jnp.array(3)})


def is_close(one, two):
    np.testing.assert_allclose(one, two, rtol=1e-5)


def is_first(path, value):
    return path == ("first",)


def test_one_leaf_is_selected():
    for only_b in (
        lambda path, value: path[-1] == "b",
        [lambda path, value: path == ("second", "b"), False],
        (None, (False, lambda path, value: path == ("second", "b"))),
    ):
        gradient = st.grad(of_pair, wrt=only_b)(pair())
        assert type(gradient) is Pair
        assert gradient.first is gradient.second["c"] is gradient.second["n"] is None
        is_close(gradient.second["b"], jax.grad(f, 1)(A, B, C))
    # A class selects what is in modules of it.
    model = Pair(A, {"b": Layer(B, None, None), "c": Pair(C, None)})
    gradient = st.grad(lambda m: f(m.first, m.second["b"].weight, m.second["c"].first), wrt=Layer)(model)
    is_close(gradient.second["b"].weight, jax.grad(f, 1)(A, B, C))
    assert jax.tree.leaves(gradient) == [gradient.second["b"].weight]


def test_everything_and_none_are_what_it_is_without():
    expected = st.grad(of_pair)(pair())
    for everything in (..., True, [...], lambda path, value: True, jax.Array, eqx.Module, None):
        gradient = st.grad(of_pair, wrt=everything)(pair())
        assert jax.tree.structure(gradient) == jax.tree.structure(expected)
        assert st.tree.equal(gradient, expected)


def test_paths_are_names_keys_and_indices():
    seen = []

    def note(path, value):
        seen.append((path, value))
        return True

    tree = {"x": [A, (B,)], 3: Pair(C, Mutable(w=Layer(A, "t", None)))}
    st.grad(lambda tree: tree["x"][0].sum(), wrt=note)({key: tree[key] for key in ("x",)})
    assert {path for path, _ in seen} == {("x", 0), ("x", 1, 0)}
    seen.clear()
    st.grad(lambda pair: pair.first.sum(), wrt=note)(tree[3])
    assert {path for path, _ in seen} == {("first",), ("second", 0, "weight")}
    assert all(isinstance(value, jax.Array) for _, value in seen)


def test_what_is_constant_arrives_whole_beside_none():
    """None is where a leaf was left out, and where there was none; outside modules, too."""

    def loss(x, tree, y):
        assert tree["none"] is None
        assert y == [None, 7]
        assert tree["pair"].second is None
        assert tree["rest"][1:3] == (3, "text")
        return f(x, tree["a"], tree["rest"][0]) + tree["pair"].first.sum()

    tree = {"a": A, "rest": (B, 3, "text", jnp.array(1)), "none": None, "pair": Pair(C, None)}
    gradient = st.grad(loss, argnums=1, wrt=lambda path, value: path[0] == "rest")(C, tree, [None, 7])
    assert (gradient["a"], gradient["none"], gradient["pair"].first) == (None, None, None)
    assert gradient["rest"][1:] == (None, None, None)
    is_close(gradient["rest"][0], jax.grad(f, 2)(C, A, B))


def test_several_arguments():
    def loss(one, two):
        return f(one["a"], two["a"], one["b"]) + two["b"].sum()

    expected = jax.grad(f, (0, 1))(A, C, B)
    for argnums in ((0, 1), (1, 0), (-1, 0)):
        gradients = st.grad(loss, argnums, wrt=lambda path, value: path[-1] == "a")({"a": A, "b": B}, {"a": C, "b": A})
        for argnum, gradient in zip(argnums, gradients, strict=True):
            assert gradient["b"] is None
            is_close(gradient["a"], expected[argnum])


def test_an_array_selected_at_one_path_is_two_with_a_warning():
    tied = Pair(A, {"b": A, "c": C, "n": jnp.array(3)})
    gradient = st.grad(of_pair, wrt=is_first, policy=st.Policy(on_untie="ignore"))
    assert gradient(tied).second["b"] is None
    is_close(gradient(tied).first, jax.grad(f)(A, A, C))
    with pytest.warns(st.UntiedWarning, match=r"`pair.first` lacks what flows through `pair.second\['b'\]`"):
        st.grad(of_pair, wrt=is_first)(tied)
    with pytest.raises(st.errors.UntiedError):
        st.grad(of_pair, wrt=is_first, policy=st.Policy(on_untie="error"))(tied)
    # Between two arguments it is the same.
    with pytest.warns(st.UntiedWarning, match=r"`one.first` lacks what flows through `two.second`"):
        one, two = st.grad(lambda one, two: f(one.first, two.second, C), (0, 1), wrt=is_first)(Pair(A, B), Pair(C, A))
    is_close(one.first, jax.grad(f)(A, A, C))
    is_close(two.first, 0)


def weighted(tree):
    """Every path counts, each with a weight of its own."""
    found = [x for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]
    return sum(((i + 1) * jnp.sin(x).sum() for i, x in enumerate(found)), jnp.float32(0))


def offered(call):
    """The code that an error or a warning offers for `wrt`; None if there is neither."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", st.UntiedWarning)
        try:
            call()
        except st.errors.InconsistentSharingError as error:
            offer = re.search("^    (wrt = .*)$", str(error), re.MULTILINE)
            return offer[1] if {*error.treatments} == {"differentiated", "not differentiated"} else "other treatments"
    # It is one argument, so there are no two to be put into one.
    assert not any("of_both" in str(warning.message) for warning in caught)
    found = [re.search("^    (wrt = .*)$", str(warning.message), re.MULTILINE)[1] for warning in caught]
    return found[0] if found else None


@hypothesis.given(dags(), hst.sets(hst.integers(0, 40), min_size=1), hst.booleans())
def test_the_code_that_is_offered_selects_what_was_selected_somewhere_at_all_of_its_paths(tree, chosen, in_dag):
    at = {path: obj for path, obj, _ in paths(tree) if eqx.is_inexact_array(obj)}
    # As many as a message writes down.
    hypothesis.assume(0 < len(at) <= 20)
    selected = [path for i, path in enumerate(at) if i in chosen]
    meant = {id(at[path]) for path in selected}  # alive in `tree`
    hypothesis.assume(meant)
    names = {"wrt": lambda path, value: path in selected}
    differentiated, given = (lambda dag: weighted(dag.tree), st.Dag(tree)) if in_dag else (weighted, tree)
    for _ in range(len(at)):
        code = offered(lambda: st.grad(differentiated, wrt=names["wrt"])(given))
        if code is None:
            break
        exec(code, names)
    gradient = st.grad(differentiated, wrt=names["wrt"])(given)
    gradient = gradient.tree if in_dag else gradient
    loose = twin(tree)
    of_paths = dict(zip(at, jax.tree.leaves(eqx.filter_grad(weighted)(loose)), strict=True))
    sums = {}
    for path, part in of_paths.items():
        sums[id(at[path])] = sums.get(id(at[path]), 0) + part  # alive in `tree`
    found = {path: obj for path, obj, _ in paths(gradient)}
    for path, obj in at.items():
        if id(obj) in meant:  # as above
            np.testing.assert_allclose(found[path], sums[id(obj)], rtol=1e-5)
        else:
            assert found.get(path) is None


def test_a_partial_gradient_is_said_once_and_taken_as_the_warning_says_is_the_whole_one():
    """Without `wrt`: an array is in an argument that is differentiated, and in one that is not."""

    def of_two(one, two):
        return f(one.first, two.second, C)

    model, other = Pair(A, B), Pair(C, A)
    whole, part = jax.grad(lambda a: f(a, a, C))(A), jax.grad(f)(A, A, C)
    with pytest.warns(st.UntiedWarning, match=r"`one.first` lacks what flows through `two.second`") as caught:
        is_close(st.grad(of_two)(model, other).first, part)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(st.errors.UntiedError) as error, st.Context(st.Policy(on_untie="error")):
        st.grad(of_two)(model, other)
    assert error.value.paths == ("one.first", "two.second")
    for policy in (st.Policy(on_untie="ignore"), st.Policy(arrays=False)):  # without arrays there is no tie
        st.grad(of_two, policy=policy)(model, other)
    _, *ways, untie = re.findall("^    (.*)$", str(caught[0].message), re.MULTILINE)
    names = {"sharedtree": st, "equinox": eqx, "of_two": of_two, "one": model, "two": other}
    gradients = []
    for line in ways:
        if line.startswith("sharedtree"):
            gradients.append(eval(line, names))
        else:
            exec(line, names)
    assert len(gradients) == 2
    for one, two in gradients:
        is_close(one.first, whole)
        assert one.first is two.second
    exec(untie, names)
    is_close(st.grad(of_two)(names["one"], names["two"]).first, part)


def test_what_is_not_selected_may_be_in_another_argument():
    layer = Pair(A, B)
    gradient = st.grad(
        lambda model, own: (own.first * model.second).sum(), wrt=lambda path, value: path == ("second",)
    )(Pair(layer, C), layer)
    is_close(gradient.second, A)


@pytest.mark.parametrize("in_place", [False, True])
def test_under_jit_and_in_place(in_place):
    def loss(model):
        if in_place:
            model.calls = model.calls + 1
        return f(model.w, model.pair.first, model.pair.second)

    model = Mutable(w=A, pair=Pair(B, C), calls=jnp.array(0))

    @st.jit(in_place=in_place)
    def value_and_gradient(model):
        return st.value_and_grad(loss, wrt=lambda path, value: len(path) == 2, in_place=in_place)(model)

    value, gradient = value_and_gradient(model)
    assert gradient.w is None
    is_close(value, f(A, B, C))
    is_close(gradient.pair.second, jax.grad(f, 2)(A, B, C))
    assert int(model.calls) == in_place


def test_equinox_decorators_copies_and_auxiliary_data():
    def with_aux(pair):
        return of_pair(pair), pair.first

    @st.preserve_identities(eqx.filter_value_and_grad, wrt=is_first)
    def loss(pair):
        return of_pair(pair)

    @st.grad(wrt=is_first, has_aux=True)
    def other(pair):
        return with_aux(pair)

    value, gradient = loss(pair())
    is_close(value, of_pair(pair()))
    found, aux = other(pair())
    is_close(aux, A)
    wrapped = st.grad(of_pair, wrt=is_first)
    copies = pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)  # noqa: S301
    for each in (gradient, found, *[f(pair()) for f in copies]):
        assert each.second["b"] is None
        is_close(each.first, jax.grad(f)(A, B, C))
    text = str(st.explain(wrapped, pair()))
    assert [line.split()[0] for line in text.splitlines() if line.endswith("differentiated")] == ["pair.first"]


@pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian"])
def test_jacobians(name):
    def g(a, b, c):
        return f(a, b, c) if name == "hessian" else a * a * b * jnp.sin(c)

    # Of an array alone, and of one in a module.
    model = [A, {"w": B, "pair": Pair(C, None)}, C]
    for path, argnum in ((("w",), 1), (("pair", "first"), 2)):
        of_tree = lambda tree: g(tree[0], tree[1]["w"], tree[1]["pair"].first)
        jacobian = getattr(st, name)(of_tree, wrt=lambda at, value, path=path: at[1:] == path)(model)
        get = (lambda tree: tree[1]["w"]) if argnum == 1 else (lambda tree: tree[1]["pair"].first)
        block = get(jacobian)
        assert jacobian[0] is jacobian[2] is None
        if name == "hessian":
            assert block[0] is block[2] is None
            block = get(block)
        is_close(block, getattr(jax, name)(g, argnum)(A, B, C))


def test_containers_under_the_policy():
    tree = {"a": A, "again": {"a": A}, "n": jnp.array(1)}
    gradient = st.grad(
        lambda tree: f(tree["a"], tree["again"]["a"], C),
        wrt=lambda path, value: path[-1] == "a",
        policy=st.Policy(containers=True),
    )(tree)
    assert gradient["n"] is None
    assert gradient["a"] is gradient["again"]["a"]
    is_close(gradient["a"], sum(jax.grad(f, (0, 1))(A, A, C)))


def test_deep_models():
    deep = None
    for _ in range(300):
        deep = link(jnp.array(2.0), deep)

    wrt = lambda path, value: len(path) == 2
    gradient = in_a_thread(lambda: st.grad(lambda model: model.next.scale * model.scale, wrt=wrt)(deep))
    assert gradient.scale is gradient.next.next.scale is None
    is_close(gradient.next.scale, 2.0)


def test_a_model_with_more_paths_than_can_be_walked():
    tree = tower(60, Mutable(first=A, second=B), lambda one, two: Mutable(first=one, second=two))

    def first(tree):
        return f(tree.first, tree.second, C) if isinstance(tree.second, jax.Array) else first(tree.first)

    for wrt in (jax.Array, ["tag", Mutable]):
        gradient = st.grad(first, wrt=wrt)(tree)
        assert gradient.first is gradient.second
        is_close(st.tree.leaves(gradient)[0], jax.grad(f)(A, B, C))


def test_what_is_no_filter():
    for wrong in (0, (0,), {}, A, lambda: True, lambda path, value, more: True, [lambda: True], {"a": 0}):
        with pytest.raises(TypeError, match="wrt"):
            st.grad(of_pair, wrt=wrong)
    for wrong in (lambda path, value: 1, lambda path, value: value > 0, lambda path, value: None):
        with pytest.raises(TypeError, match=rf"`.*<lambda>` \({re.escape(__file__)}:\d+\) must return True or False"):
            st.grad(of_pair, wrt=wrong)(pair())
    for transform in (st.jit, st.vmap, st.checkpoint):
        with pytest.raises(TypeError, match="wrt"):
            transform(of_pair, wrt=...)


def test_to_select_nothing_is_an_error():
    never = lambda path, value: False
    for nothing in (False, (), "tag", eqx.nn.Linear, never, ["tag", (never, False)]):
        with pytest.raises(ValueError, match=r"(?s)selects nothing.*` at \('first',\)") as caught:
            st.grad(of_pair, wrt=nothing)(pair())
        text = str(caught.value)
        assert "'n'" not in text
        assert "    `jax.Array` at ('first',)" in text
        assert "ArrayImpl" not in text
        assert (f"which asks `test_to_select_nothing_is_an_error.<locals>.<lambda>` ({__file__}:" in text) is (
            "lambda" in str(nothing)
        )
    gradient = st.grad(lambda tree, x: x, wrt=...)(Pair(jnp.array(1), None), 1.0)  # there is nothing to select
    assert (gradient.first, gradient.second) == (None, None)


@pytest.fixture
def nnx() -> Any:
    pytest.importorskip("flax", minversion="0.12.1")
    return pytest.importorskip("flax.nnx")


def net(nnx):
    class Net(nnx.Module):
        def __init__(self):
            self.embed = nnx.Dict(kernel=nnx.Param(A), bias=nnx.Param(B))
            self.norm = nnx.Dict(mean=nnx.BatchStat(C + 1), bias=nnx.Param(C))
            self.lora = nnx.LoRAParam(B + 1)
            self.head = nnx.Dict(kernel=self.embed.kernel)
            self.scale = nnx.Param(A + 1, tag="scale")
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self):
            hidden = self.embed.kernel[...] * self.lora[...] + self.embed.bias[...] - self.norm.mean[...]
            return (hidden * self.norm.bias[...] * self.head.kernel[...] * self.scale[...]).sum()

    return Net()


def test_filters_of_nnx_select_what_they_do_there(nnx):
    filters = {
        "Param": nnx.Param,
        "LoRAParam": nnx.LoRAParam,
        "BatchStat": nnx.BatchStat,
        "a tag": "scale",
        "everything inexact": (nnx.Param, nnx.BatchStat),
        "All, Not": nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)),
        # Of a tied variable NNX knows the first path only.
        "a path": nnx.Any(nnx.PathContains("embed"), nnx.PathContains("head")),
        "a function": lambda path, value: path[-1] == "bias" and isinstance(value, nnx.Param),
    }
    for name, wrt in filters.items():
        gradient = st.grad(lambda model: model(), wrt=wrt, in_place=True)(net(nnx))
        expected = nnx.grad(lambda model: model(), argnums=nnx.DiffState(0, wrt))(net(nnx))
        own = nnx.to_flat_state(nnx.state(gradient))
        own = {path: variable[...] for path, variable in own if variable.get_raw_value() is not None}
        flat = {path: variable[...] for path, variable in nnx.to_flat_state(expected)}
        assert own.keys() == flat.keys(), name
        for path, value in flat.items():
            np.testing.assert_allclose(own[path], value, rtol=1e-4, atol=1e-6, err_msg=f"{name}, {path}")
        assert gradient.head.kernel is gradient.embed.kernel


def test_what_is_said_of_filters_of_nnx(nnx):
    with pytest.raises(st.errors.InconsistentSharingError, match="head"):
        st.grad(lambda model: 0.0, wrt=nnx.PathContains("head"))(net(nnx))
    with pytest.raises(TypeError, match=r"sharedtree.grad\(f, argnums=1, wrt=nnx.Param\)"):
        st.grad(lambda x, model: 0.0, argnums=nnx.DiffState(1, nnx.Param))
    gradient = st.grad(lambda m: (m.embed.kernel[...] ** 2).sum(), wrt=nnx.Param[jax.Array])(net(nnx))
    assert gradient.norm.mean.get_raw_value() is None
    assert gradient.embed.kernel[...].any()
