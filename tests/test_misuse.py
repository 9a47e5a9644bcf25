"""What is misused says so in words, and says what to do instead."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import sharedtree as st
from tests.strategies import Pair


class Callable(eqx.Module):
    """A model that is a function, too."""

    a: jax.Array
    b: jax.Array

    def __call__(self, x):
        return x


def models():
    w = jnp.ones((2, 3))
    return [Pair(w, w + 1), Callable(w, w + 1), {"a": w, "b": w + 1}]


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_what_is_no_optax_transformation():
    said = r"(?s)takes an optax transformation.*sharedtree.optimizer\(optax.adam\(1e-3\)\)"
    for wrong in ("adam", optax.adam, 1e-3, None, optax.GradientTransformation, (optax.adam(1.0),)):
        with pytest.raises(TypeError, match=said):
            st.optimizer(wrong)


# --- `where` ---------------------------------------------------------------------------------------------------------

COMPUTING = [
    lambda leaf: leaf.T,
    lambda leaf: leaf.shape,
    lambda leaf: leaf.at[0],
    lambda leaf: leaf[0],
    lambda leaf: leaf * 2,
    lambda leaf: 2 - leaf,
    lambda leaf: -leaf,
    lambda leaf: leaf @ leaf,
    lambda leaf: leaf > 0,
    lambda leaf: leaf(3),
    lambda leaf: list(leaf),
    lambda leaf: float(leaf),
    lambda leaf: len(leaf),
    lambda leaf: jnp.transpose(leaf),
    lambda leaf: jnp.asarray(leaf),
    lambda leaf: jnp.sum(leaf),
]


def test_a_where_that_computes():
    model = Pair(jnp.ones(2), jnp.zeros(2))
    for compute in COMPUTING:
        for call in (
            lambda: st.tie(model, lambda m: (m.first, compute(m.second))),  # noqa: B023
            lambda: st.untie(model, lambda m: compute(m.second)),  # noqa: B023
            lambda: st.tree.at(lambda m: compute(m.second), model, 0),  # noqa: B023
        ):
            with pytest.raises(st.SharingMismatchError, match=r"(?s)of a leaf|with a leaf.*do not compute"):
                call()


def test_other_errors_of_a_where_are_its_own():
    class Marker:
        pass

    def wrong(_):
        raise TypeError("my own")

    model = Pair(jnp.ones(2), jnp.zeros(2))
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'third'"):
        st.tie(model, lambda m: (m.first, m.third))
    with pytest.raises(AttributeError, match="'Marker' object has no attribute 'x'"):
        st.tie(model, lambda m: Marker().x)
    with pytest.raises(TypeError, match="my own"):
        st.tie(model, wrong)


def test_swapped_arguments():
    for model in models():
        for call, right in (
            (lambda: st.tie(lambda m: list(m), model), "sharedtree.tie(model, lambda"),  # noqa: B023
            (lambda: st.untie(lambda m: m, model), "sharedtree.untie(model, lambda"),  # noqa: B023
            (lambda: st.tree.at(model, lambda m: m, 3), "sharedtree.tree.at(lambda m: m.head.weight, model, new)"),  # noqa: B023
        ):
            with pytest.raises(TypeError, match="`where` is a function that takes the tree") as caught:
                call()
            assert right in str(caught.value)


def test_modules_that_can_be_called_may_be_either():
    w = jnp.ones(2)

    class First(eqx.Module):
        scale: jax.Array

        def __call__(self, m):
            return m.a

    model = Callable(w, w + 1)
    assert st.tree.at(First(w), model, 3).a == 3
    assert st.tree.at(lambda m: m.a, model, 3).a == 3
    tied = st.tie(model, lambda m: (m.a, m.b))
    assert tied.a is tied.b


@pytest.mark.parametrize("where", [None, "a", 3, ("a", "b")])
def test_a_where_that_is_no_function(where):
    with pytest.raises(TypeError, match="`where` is a function"):
        st.tie({"a": jnp.ones(2)}, where)


# --- `preserve_identities` -------------------------------------------------------------------------------------------


def test_a_plain_function_in_place_of_a_transform():
    @st.preserve_identities
    def one(model):
        raise AssertionError("it was called")

    @st.preserve_identities
    def several(model, x, *, scale=1):
        raise AssertionError("it was called")

    model, x = models()[0], jnp.ones(2)
    for call in (
        lambda: one(model),
        lambda: one(model=model),
        lambda: one(x),
        lambda: several(model, x),
        lambda: several(model, x, scale=3),
    ):
        with pytest.raises(TypeError, match=r"(?s)takes a transform.*preserve_identities\(jax.jit\)\(f\)"):
            call()


def test_what_is_no_transform():
    for wrong in (5, None, "jit", [jax.jit], Pair(1, 2)):
        with pytest.raises(TypeError, match=r"(?s)takes a transform, not.*preserve_identities\(jax.jit\)"):
            st.preserve_identities(wrong)


def test_what_is_no_function():
    for transform in (st.jit, st.grad, st.value_and_grad, st.vmap, st.checkpoint):
        for wrong in (5, "text", Pair(1, 2)):
            with pytest.raises(TypeError, match="callable"):
                transform(wrong)(jnp.ones(2))
