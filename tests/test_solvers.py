"""`custom_root` and `custom_linear_solve` on models: against the solution and its derivative worked out by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

custom_root = st.preserve_identities(jax.lax.custom_root)
custom_linear_solve = st.preserve_identities(jax.lax.custom_linear_solve)


class Net(eqx.Module):
    embed: jax.Array
    head: jax.Array
    name: str = "net"


def tied(value=1.0):
    w = jnp.array([value, value])
    return Net(w, w)


def is_tied(net):
    return net.embed is net.head and net.name == "net"


def newton(f, net):
    """Newton's method for a diagonal Jacobian."""
    assert is_tied(net)
    for _ in range(12):
        value, slope = jax.jvp(lambda w: f(Net(w, w)).embed, (net.embed,), (jnp.ones(2),))
        net = st.tree.map(lambda w, value=value, slope=slope: w - value / slope, net)
    return net


def diagonal(g, y):
    assert is_tied(y)
    slope = g(st.tree.map(jnp.ones_like, y))
    assert is_tied(slope)
    return st.tree.map(lambda a, b: a / b, y, slope)


def root_of(a, *, has_aux=False):
    """The root of w * w = a, of which there are two and one is near."""

    def f(net):
        assert is_tied(net)
        return st.tree.map(lambda w: w * net.head - a, net)

    solve = (lambda f, net: (newton(f, net), net)) if has_aux else newton
    return custom_root(f, tied(), solve, diagonal, has_aux=has_aux)


A = jnp.array([2.0, 5.0])


def test_a_root():
    root, first = root_of(A, has_aux=True)
    assert is_tied(root)
    assert is_tied(first)
    np.testing.assert_allclose(root.embed, jnp.sqrt(A), rtol=1e-6)
    np.testing.assert_allclose(first.embed, [1, 1])
    both = jax.jit(jax.vmap(jax.value_and_grad(lambda a: root_of(a).head.sum())))(jnp.stack([A, 2 * A]))
    np.testing.assert_allclose(both[0][0], jnp.sqrt(A).sum(), rtol=1e-6)
    np.testing.assert_allclose(both[1], 0.5 / jnp.sqrt(jnp.stack([A, 2 * A])), rtol=1e-6)
    # And of a model that the function closes over.
    gradient = st.grad(lambda net: root_of(net.embed + net.head).embed.sum())(tied(1.5))
    assert gradient.embed is gradient.head
    np.testing.assert_allclose(gradient.embed, [1 / jnp.sqrt(3.0)] * 2, rtol=1e-6)


def solved(a, b, **options):
    def matvec(net):
        assert is_tied(net)
        return st.tree.map(lambda w: a * w, net)

    def solve(matvec, b):
        assert is_tied(b)
        slope = matvec(st.tree.map(jnp.ones_like, b))
        assert is_tied(slope)
        x = st.tree.map(lambda b, s: b / s, b, slope)
        return (x, {"b": b}) if options.get("has_aux") else x

    return custom_linear_solve(matvec, b, solve, **({"transpose_solve": solve} | options))


@pytest.mark.parametrize("options", [{}, {"symmetric": True}, {"symmetric": True, "transpose_solve": None}])
def test_a_linear_solve(options):
    b = tied(3.0)
    x = solved(A, b, **options)
    assert is_tied(x)
    np.testing.assert_allclose(x.embed, 3.0 / A, rtol=1e-6)
    of_a = jax.jit(jax.grad(lambda a: solved(a, b, **options).embed.sum()))(A)
    np.testing.assert_allclose(of_a, -3.0 / A**2, rtol=1e-6)
    of_b = st.grad(lambda b: solved(A, b, **options).embed.sum())(b)
    assert of_b.embed is of_b.head
    np.testing.assert_allclose(of_b.embed, 1 / A, rtol=1e-6)
    x, aux = solved(A, b, has_aux=True, **options)
    assert is_tied(x)
    assert is_tied(aux["b"])


def test_what_has_another_structure():
    untied = lambda net: Net(net.embed * 1, net.head * 2)
    with (
        pytest.warns(st.UntiedWarning),
        pytest.raises(st.errors.SharingMismatchError, match="are one array in the operand") as error,
    ):
        custom_root(untied, tied(), newton, diagonal)
    assert error.value.paths == ("initial_guess.embed", "initial_guess.head")
    with pytest.raises(st.errors.SharingMismatchError, match="initial_guess"):
        custom_root(lambda net: (net,), tied(), newton, diagonal)
    with pytest.raises(st.errors.SharingMismatchError, match="static value 'net'"):
        custom_root(lambda net: net, tied(), lambda f, net: Net(net.embed, net.head, "other"), diagonal)
    with pytest.raises(st.errors.SharingMismatchError, match="differ in sharing"):
        custom_root(lambda net: net, tied(), lambda f, net: f(Net(net.embed, net.embed * 1)), diagonal)
    with pytest.raises(TypeError, match="returned a `Net`"):
        custom_root(lambda net: net, tied(), lambda f, net: net, diagonal, has_aux=True)
    assert is_tied(root_of(A))


def test_values_are_as_in_vanilla():
    f, solve = lambda x: x * x - 2.0, lambda f, x: jnp.sqrt(x + 1.0)
    tangent_solve = lambda g, y: y / g(1.0)
    assert custom_root(f, 1.0, solve, tangent_solve) == jax.lax.custom_root(f, 1.0, solve, tangent_solve)
    beside = lambda both: (both[0], both[1] * both[1] - 2.0)
    solution = custom_root(beside, (tied(), 1.0), lambda f, both: (both[0], jnp.sqrt(both[1] + 1.0)), lambda g, y: y)
    assert solution[1] == jnp.sqrt(2.0)
    tree = {"a": jnp.ones(2), "b": (jnp.ones(3),)}
    same = lambda matvec, b: b
    got = custom_linear_solve(lambda x: x, tree, same, symmetric=True)
    assert jax.tree.structure(got) == jax.tree.structure(tree)


WRONG = {"a tuple": lambda x: (x, x), "None": lambda x: None, "a dict": lambda x: {"a": x}, "a list": lambda x: [x]}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", ["f", "solve", "matvec"])
def test_a_function_that_returns_another_tree(place, wrong):
    """An error of the class that JAX raises, a TypeError here and a ValueError there."""
    other, x = WRONG[wrong], jnp.ones(2)
    calls = {
        "f": lambda root, linear: root(other, x, lambda f, guess: guess, lambda g, y: y),
        "solve": lambda root, linear: root(lambda y: y, x, lambda f, guess: other(guess), lambda g, y: y),
        "matvec": lambda root, linear: linear(other, x, lambda f, y: y),
    }
    vanilla = jax.lax.custom_root, jax.lax.custom_linear_solve
    with pytest.raises((TypeError, ValueError)) as want:
        calls[place](*vanilla)
    with pytest.raises(want.type):
        calls[place](*map(st.preserve_identities, vanilla))
