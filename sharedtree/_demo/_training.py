"""How the demo trains the model, measures it and lets it write: plain JAX, Equinox and optax, with the ties kept.

Three calls keep them. `sharedtree.preserve_identities(jax.jit)` takes the model in and out as the graph that it is,
`sharedtree.value_and_grad` sums the gradient of the tied table over its two uses, and `sharedtree.optimizer` gives it
one slot. The model and the state of the optimizer are donated, which JAX alone refuses to do with a tied array.
"""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st

from ._model import LanguageModel, Sizes
from ._text import consecutive_windows, random_windows


class Trained(NamedTuple):
    """What training came to.

    Attributes:
        model: the trained model.
        optimizer_state: that belongs to it.
        first_loss: of the first step, in nats per byte, before anything was learnt.
        traces: how often JAX traced the train step.
        bytes_per_second: how much text was learnt from, compilation left out; 0 if there was one step only.
    """

    model: LanguageModel
    optimizer_state: Any
    first_loss: float
    traces: int
    bytes_per_second: float


def make_optimizer(steps: int, peak: float = 3e-3) -> Any:
    """AdamW for tied models. The learning rate rises during the first tenth of the steps and then falls to zero.

    Args:
        steps: how many there will be, at least 1.
        peak: the highest learning rate.

    Returns:
        An `optax.GradientTransformationExtraArgs`.
    """
    import optax

    warmup = steps // 10
    # The schedule ends one step past the last, or the last would be taken at a rate of zero.
    schedule = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, steps + 1)
    return st.optimizer(optax.adamw(schedule, b2=0.99, weight_decay=0.01))


def next_byte_loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """The mean loss of predicting each byte of each window, but the first, from those before it.

    Args:
        model: the model.
        windows: integers of shape (batch, context + 1).

    Returns:
        A scalar, in nats per byte.
    """
    logits = jax.vmap(model)(windows[:, :-1])
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, windows[:, 1:, None], axis=-1).mean()


def train(model: LanguageModel, data: np.ndarray, sizes: Sizes, *, steps: int, seed: int) -> Trained:
    """Trains a model on random windows of a text, with a progress bar on standard error.

    Args:
        model: the model. It is donated: its arrays are gone afterwards.
        data: bytes, of shape (anything,).
        sizes: those of the model; `context` and `batch` are used here.
        steps: how many, at least 1.
        seed: decides which windows are seen.

    Returns:
        The trained model and what is to be said about the training.
    """
    from tqdm import tqdm

    optimizer = make_optimizer(steps)
    traces = 0

    @st.preserve_identities(jax.jit, donate_argnums=(0, 1))
    def train_step(model: LanguageModel, state: Any, windows: jax.Array) -> tuple[LanguageModel, Any, jax.Array]:
        nonlocal traces
        traces += 1  # this line is Python, so it runs when JAX traces the function and never again
        loss, gradient = st.value_and_grad(next_byte_loss)(model, windows)
        updates, state = optimizer.update(gradient, state, model)
        return st.apply_updates(model, updates), state, loss

    state = optimizer.init(model)
    generator = np.random.default_rng(seed)
    first_loss, start, seconds = float("nan"), 0.0, 0.0
    with tqdm(total=steps * sizes.batch * sizes.context, unit="tokens", unit_scale=True, desc="training") as bar:
        for step in range(steps):
            windows = random_windows(data, sizes.batch, sizes.context + 1, generator)
            model, state, loss = train_step(model, state, windows)
            if step == 0:
                first_loss = float(loss)  # waits, so the compilation is over when the clock starts
                start = time.perf_counter()
            if step % 10 == 0 or step == steps - 1:
                bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
            seconds = time.perf_counter() - start
            bar.update(sizes.batch * sizes.context)
    bytes_after_first_step = (steps - 1) * sizes.batch * sizes.context
    return Trained(model, state, first_loss, traces, bytes_after_first_step / seconds)


def mean_loss(model: LanguageModel, data: np.ndarray, sizes: Sizes) -> float:
    """The loss of a model on a text, in nats per byte.

    Args:
        model: the model.
        data: bytes, of shape (anything,); a rest that fills no batch of windows is left out.
        sizes: those of the model; `context` and `batch` are used here.
    """
    windows = consecutive_windows(data, sizes.context + 1)
    num_batches = len(windows) // sizes.batch
    batches = windows[: num_batches * sizes.batch].reshape(num_batches, sizes.batch, -1)
    loss_of = st.jit(next_byte_loss)
    return float(np.mean([loss_of(model, jnp.asarray(batch)) for batch in batches]))


def continuation(
    model: LanguageModel, prompt: np.ndarray, length: int, *, seed: int, temperature: float = 0.6
) -> bytes:
    """Lets a model write on.

    Args:
        model: the model.
        prompt: bytes of shape (context,), how the text begins.
        length: how many bytes to write.
        seed: decides which of the likely bytes are chosen.
        temperature: below 1 for a text of likelier bytes, above for one of rarer ones.

    Returns:
        What follows the prompt.
    """

    @st.jit
    def write(model: LanguageModel, window: jax.Array, keys: jax.Array) -> jax.Array:
        def write_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            byte = jax.random.categorical(key, model(window)[-1] / temperature).astype(window.dtype)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(write_byte, window, keys)[1]

    written = write(model, jnp.asarray(prompt), jax.random.split(jax.random.key(seed), length))
    return np.asarray(written).tobytes()
