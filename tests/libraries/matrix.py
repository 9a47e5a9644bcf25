"""What works with the models of each library, found by running it; written into the docs.

    python -m tests.libraries.matrix

The oracle of every column is vanilla JAX on the arrays that a model is made of: one copy of each.
"""

import importlib
import importlib.metadata
import pathlib
import tempfile
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sharedtree as st

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "libraries.md"
BEGIN = "<!-- written by `python -m tests.libraries.matrix` -->\n"
END = "<!-- end -->\n"
YES, NO, NONE = "yes", "no", "-"

W = np.eye(3, dtype=np.float32) * 0.7 + np.tril(np.full((3, 3), 0.2, np.float32))
B = np.array([0.2, 0.4, 0.6], np.float32)
X = jnp.array([0.3, -0.2, 0.5])
STEPS = 3


class Library(NamedTuple):
    """A kind of model in the page.

    Attributes:
        title: as the page prints it.
        distribution: what has to be installed.
        file: of its model, in `models/`.
        since: the first version that all of this is for.
    """

    title: str
    distribution: str
    file: str
    since: str = "0"


LIBRARIES = (
    Library("Equinox", "equinox", "equinox"),
    Library("Equinox with jaxtyping and beartype", "beartype", "jaxtyping"),
    Library("`jax.tree_util.register_dataclass`", "jax", "register_dataclass"),
    Library("`jax.tree_util.register_pytree_node`", "jax", "register_pytree_node"),
    Library("`sharedtree.Module`", "sharedtree", "sharedtree"),
    Library("Flax NNX", "flax", "flax_nnx", since="0.12.1"),
    Library("Flax Linen's variables", "flax", "flax_linen"),
    Library("Flax `TrainState`", "flax", "flax_train_state"),
    Library("`flax.struct`", "flax", "flax_struct"),
    Library("Haiku's parameters", "dm-haiku", "haiku"),
    Library("Chex dataclasses", "chex", "chex"),
    Library("`jax_dataclasses`", "jax_dataclasses", "jax_dataclasses"),
    Library("Penzai's layers and named arrays", "penzai", "penzai"),
    Library("Lineax operators", "lineax", "lineax"),
    Library("Diffrax terms", "diffrax", "diffrax"),
    Library("Optimistix, solving for a model", "optimistix", "optimistix"),
    Library("Distrax distributions", "distrax", "distrax"),
    Library("Distreqx distributions", "distreqx", "distreqx"),
    Library("Quax arrays", "quax", "quax"),
)


class Model:
    """The model of a library, and the same computation with one copy of each array."""

    def __init__(self, library: Library) -> None:
        file = importlib.import_module(f"{__package__}.models.{library.file}")
        self.make, self.loss, self.places, self.bias = file.make, file.loss, file.places, file.bias
        self.params = tuple(map(jnp.asarray, (W, B, *getattr(file, "OTHERS", ()))))
        self.trusted = file.TRUSTED
        self.policy = getattr(file, "POLICY", None)
        self.change: Callable[..., None] | None = getattr(file, "change", None)

    def new(self) -> Any:
        return self.make(*map(jnp.array, self.params))

    def single(self, params: Any, x: Any) -> Any:
        """The loss, from one copy of each array."""
        return self.loss(self.make(*params), x)

    def is_tied(self, model: Any) -> bool:
        first, second = self.places(model)
        return first is second

    def wrapped(self, transform: Any, function: Any, **options: Any) -> Any:
        return st.preserve_identities(transform, policy=self.policy)(function, **options)

    def arrays(self, model: Any) -> tuple[Any, Any]:
        """The `w` and the `b` of a model, or of its gradient."""
        (w, *others), _ = st.tree.flatten(self.places(model)[0])
        assert not [each for each in others if each.shape == w.shape]
        return w, self.bias(model)


def same(got: Any, want: Any) -> bool:
    """Whether numbers agree, up to the order of summation."""
    return all(
        np.allclose(a, b, rtol=2e-5, atol=1e-6)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


def train(gradient: Callable[..., Any], loss: Callable[..., Any], apply: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent, as the body of a scan."""

    def body(model: Any, x: Any) -> tuple[Any, Any]:
        step = st.tree.map(lambda g: -0.1 * g, gradient(model, x))
        return apply(model, step), loss(model, x)

    return body


def check_jit(model: Model) -> None:
    """The tie is one object inside and outside, and another model of the same structure is not traced again."""
    inside = []

    def f(m: Any, x: Any) -> Any:
        inside.append(model.is_tied(m))
        return m, model.loss(m, x)

    jitted = model.wrapped(jax.jit, f)
    for _ in range(2):
        out, value = jitted(model.new(), X)
        assert model.is_tied(out)
        assert same(value, model.single(model.params, X))
    assert inside == [True]


def check_grad(model: Model) -> None:
    """The gradient of the tied array is the sum over its uses, once."""
    gradient = model.wrapped(jax.grad, model.loss)(model.new(), X)
    assert model.is_tied(gradient)
    assert same(model.arrays(gradient), jax.grad(model.single)(model.params, X)[:2])


def check_vmap(model: Model) -> None:
    """One model for a batch of inputs, and a batch of models."""
    xs = jnp.stack([X, 2 * X])
    out, values = model.wrapped(jax.vmap, lambda m, x: (m, model.loss(m, x)), in_axes=(None, 0), out_axes=(None, 0))(
        model.new(), xs
    )
    assert model.is_tied(out)
    assert same(values, jnp.stack([model.single(model.params, x) for x in xs]))
    scales = jnp.array([1.0, 0.5])
    scaled = lambda scale: [scale * param for param in model.params]
    batch = model.wrapped(jax.vmap, lambda scale: model.make(*scaled(scale)))(scales)
    assert model.is_tied(batch)
    inside = []

    def f(m: Any, x: Any) -> Any:
        inside.append(model.is_tied(m))
        return m, model.loss(m, x)

    out, values = model.wrapped(jax.vmap, f, in_axes=(0, None))(batch, X)
    assert inside == [True]
    assert model.is_tied(out)
    assert same(values, jnp.stack([model.single(scaled(scale), X) for scale in scales]))


def check_scan(model: Model) -> None:
    """Gradient descent in a scan, with the model as its carry."""
    xs = jnp.stack([X, 2 * X, -X])
    gradient = model.wrapped(jax.grad, model.loss)
    trained, losses = st.preserve_identities(jax.lax.scan, policy=model.policy)(
        train(gradient, model.loss, st.apply_updates), model.new(), xs
    )
    params, want = jax.lax.scan(train(jax.grad(model.single), model.single, optax.apply_updates), model.params, xs)
    assert model.is_tied(trained)
    assert same(losses, want)
    assert same(model.arrays(trained), params[:2])


def check_in_place(model: Model) -> None:
    """What the function changes in its argument is changed."""
    policy = model.policy or st.Policy()
    new = model.new()

    def f(m: Any, x: Any) -> Any:
        model.change(m, 2 * model.bias(m))
        return model.loss(m, x)

    value = st.preserve_identities(jax.jit, policy=policy, in_place=True)(f)(new, X)
    assert same(value, model.single((W, 2 * B, *model.params[2:]), X))
    assert model.is_tied(new)
    assert same(model.arrays(new), (W, 2 * B))


def check_optimizer(model: Model) -> None:
    """Adam has one slot for the tied array, and does to it what it does to a single copy."""
    ours, theirs = st.optimizer(optax.adam(0.1)), optax.adam(0.1)

    def step(tx: Any, gradient: Any, apply: Any) -> Any:
        def step(m: Any, state: Any, x: Any) -> Any:
            updates, state = tx.update(gradient(m, x), state, m)
            return apply(m, updates), state

        return step

    new, params = model.new(), model.params
    state, want = ours.init(new), theirs.init(params)
    assert sum(np.shape(leaf) == W.shape for leaf in st.tree.leaves(state)) == 2
    trained = model.wrapped(jax.jit, step(ours, model.wrapped(jax.grad, model.loss), st.apply_updates))
    for _ in range(STEPS):
        new, state = trained(new, state, X)
        params, want = step(theirs, jax.grad(model.single), optax.apply_updates)(params, want, X)
    assert model.is_tied(new)
    assert same(model.arrays(new), params[:2])


def check_save(model: Model) -> None:
    """A file that says all, without a template."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.safetensors"
        st.save(path, model.new())
        loaded = st.load(path, trusted=model.trusted)
    assert model.is_tied(loaded)
    assert same(model.loss(loaded, X), model.single(model.params, X))


def check_unshared(model: Model) -> None:
    """Without sharing all is as in vanilla JAX."""
    import equinox as eqx

    model_without = st.untie(model.new())
    vanilla = eqx.filter_jit if isinstance(model_without, eqx.Module) else jax.jit
    f = lambda m, x: (m, model.loss(m, x))
    got, want = model.wrapped(jax.jit, f)(model_without, X), vanilla(f)(model_without, X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_array_equal(a, b)


COLUMNS: dict[str, Callable[[Model], None]] = {
    "jit": check_jit,
    "grad": check_grad,
    "vmap": check_vmap,
    "scan": check_scan,
    "in place": check_in_place,
    "optimizer": check_optimizer,
    "save and load": check_save,
    "unshared": check_unshared,
}

UNMET = {
    ("flax_train_state", "save and load"): (
        st.errors.UnserialisableError,
        "its `tx` holds functions that were made inside others, which no file can name: save with "
        '`leave_out=["apply_fn", "tx"]`, and load with `like=`',
    ),
    ("distrax", "in place"): (
        st.UntiedWarning,
        "it has each array at two places, of which an assignment changes one: return a new distribution",
    ),
    ("distrax", "optimizer"): (
        st.errors.SharingMismatchError,
        "its classes come apart otherwise once a leaf is `None`: give Optax an `st.Dag`",
    ),
    ("distrax", "save and load"): (
        st.errors.UnserialisableError,
        "its treedefs describe lists of arrays that the distribution no longer has: save the parameters, and make the "
        "distribution anew",
    ),
}
"""What does not work: how that shows, and what to do instead."""


def cell(library: Library, column: str) -> str:
    """What the page says of a library in one column."""
    model = Model(library)
    if column == "in place" and model.change is None:
        return NONE
    return NO if (library.file, column) in UNMET else YES


def table() -> str:
    """The page's table, with the versions that are installed, and what stands below it."""
    lines = [f"| library | version | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    for library in LIBRARIES:
        version = importlib.metadata.version(library.distribution)
        cells = " | ".join(cell(library, column) for column in COLUMNS)
        lines.append(f"| {library.title} | {version} | {cells} |")
    titles = {library.file: library.title for library in LIBRARIES}
    lines += [
        "",
        *(
            textwrap.fill(f"- {titles[file]}, {column}: {why}.", 120, subsequent_indent="  ")
            for (file, column), (_, why) in UNMET.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the page's table anew."""
    text = PAGE.read_text(encoding="utf-8")
    begin, _, rest = text.partition(BEGIN)
    _, _, end = rest.partition(END)
    PAGE.write_text(begin + BEGIN + "\n" + table() + "\n" + END + end, encoding="utf-8")


if __name__ == "__main__":
    main()
