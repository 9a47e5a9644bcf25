"""Programs, compiled or exported, that are called with other arguments than those that they were made for."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import sharedtree as st
from tests.strategies import Mutable, Pair

W = jnp.arange(2.0)
TIED, UNTIED = Pair(W, W), Pair(W, W + 0)
filter_jit = st.preserve_identities(eqx.filter_jit)


def difference(call, *args, **kwargs):
    """What the error says of the difference, and its paths."""
    with pytest.raises(st.errors.SharingMismatchError, match="cannot be traced again") as error:
        call(*args, **kwargs)
    first, _, fix = str(error.value).partition("\n")
    assert fix == "Make a new program for these arguments:\n    program = f.lower(*args).compile()"
    return first.partition("The arguments differ ")[2], error.value.paths


@pytest.mark.parametrize("jit", [st.jit, filter_jit])
def test_ties(jit):
    for first, second, one, two in (
        (TIED, UNTIED, "the original ones", "the new ones"),
        (UNTIED, TIED, "the new ones", "the original ones"),
    ):
        compiled = jit(lambda model: model.first + model.second).lower(first).compile()
        words = f"in sharing: `model.first` and `model.second` are one array in {one}, but two in {two}."
        assert difference(compiled, second) == (words, ("model.first", "model.second"))
        assert compiled(first).tolist() == [0, 2]


def test_classes_and_tied_modules():
    f = st.jit(lambda nets: nets[0].first)
    found = difference(f.lower((TIED,)).compile(), (st.Dag((TIED, TIED)),))[0]
    assert found.startswith(
        "at `nets[0]`: in the original ones it is a `Pair` with 2 children, in the new ones a `Dag`"
    )
    compiled = st.jit(lambda net: net.first.first).lower(Pair(TIED, TIED)).compile()
    assert difference(compiled, Pair(TIED, Pair(W + 0, W + 1)))[1] == ("net.first", "net.second")
    compiled = st.jit(lambda dag: dag.tree["x"]).lower(st.Dag({"x": W, "y": W, "z": W + 1})).compile()
    assert difference(compiled, st.Dag({"x": W, "y": W}))[1] == ("dag",)


def test_static_arguments_are_not_counted():
    compiled = st.jit(lambda n, model: n * model.first, static_argnums=0).lower(3, TIED).compile()
    assert difference(compiled, UNTIED)[1] == ("model.first", "model.second")

    class Holder:
        @st.preserve_identities(jax.jit, static_argnums=(0, 1))
        def method(self, n, model):
            return n * model.first

    assert difference(Holder.method.lower(Holder(), 3, TIED).compile(), UNTIED)[1] == ("model.first", "model.second")


def test_a_keyword_that_is_called_as_a_positional_argument():
    def f(m, /, **others):
        return m.first + others["m"].first

    compiled = filter_jit(f).lower(TIED, m=TIED).compile()
    assert difference(compiled, TIED, m=UNTIED)[0]
    assert compiled(TIED, m=TIED).tolist() == [0, 2]


def test_static_values():
    class Scaled(eqx.Module):
        a: jax.Array
        n: int

    for jit in (st.jit, filter_jit):
        compiled = jit(lambda net: net.a * net.n).lower(Scaled(W, 1)).compile()
        words = "at `net.n`: in the original ones it is the static value 1, in the new ones the static value 2."
        assert difference(compiled, Scaled(W, 2)) == (words, ("net.n",))


@pytest.mark.parametrize("name", ["lower", "trace"])
@pytest.mark.parametrize("options", [{}, {"in_place": True}, {"static_argnums": 1}])
def test_a_program_keeps_no_argument_alive(name, options):
    weight = W + 1
    model, alive = Pair(weight, weight), weakref.ref(weight)
    stage = getattr(st.jit(lambda m, n: 2 * m.first, **options), name)(model, 1)
    program = stage.compile() if name == "lower" else stage.lower().compile()
    del model, weight, stage  # what JAX has traced keeps its arguments
    gc.collect()
    assert alive() is None
    assert program(TIED, *([] if "static_argnums" in options else [1])).tolist() == [0, 2]


def test_many_prefixes_are_translated_in_linear_work():
    flattened = []

    class Counted(Mutable):
        def tree_flatten(self):
            flattened.append(self)
            return super().tree_flatten()

    jax.tree_util.register_pytree_node_class(Counted)
    counts = []
    for n in (5, 20):
        models = [Counted(a=jnp.ones((2, 2)), b=jnp.ones((2, 2))) for _ in range(n)]
        flattened.clear()
        st.vmap(lambda *models: models[0].a, in_axes=tuple([Counted(a=0, b=1) for _ in models]))(*models)
        counts.append(len(flattened))
    assert 0 < counts[1] <= 4 * counts[0]


def test_what_a_stage_says_of_arguments_and_results_is_what_jax_says_of_the_untied_twin():
    w = jnp.ones(3)

    def f(m, x, *, scale):
        return {"m": m, "y": x * scale}

    options = {"donate_argnums": 1, "static_argnames": "scale"}
    ours = st.jit(f, **options, policy=st.Policy(pass_through=False))
    theirs, x = jax.jit(f, **options), {"x": jnp.ones(2), "n": 1.5}["x"]
    tied, twin = Pair(w, [w]), Pair(w, [w + 0])
    for stages in (
        [each.trace(m, x, scale=2) for each, m in ((ours, tied), (theirs, twin))],
        [each.lower(m, x, scale=2) for each, m in ((ours, tied), (theirs, twin))],
        [each.lower(m, x, scale=2).compile() for each, m in ((ours, tied), (theirs, twin))],
    ):
        names = {
            name
            for name in dir(stages[1])
            if name.startswith(("args_", "in_avals", "in_tree", "input_", "out_info", "out_tree", "output_"))
        }
        assert "in_tree" in names
        for name in names:
            found, expected = (getattr(each, name) for each in stages)
            assert str(found) == str(expected), name
        (m, _), keywords = stages[0].args_info
        assert m.first is m.second[0]
        assert not m.first.donated
        assert keywords == {}
