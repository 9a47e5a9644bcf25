"""How the demo trains the model, measures it and lets it write: plain JAX, Equinox and optax, with the ties kept.

Three calls keep them. `sharedtree.preserve_identities(jax.jit)` takes the model in and out as the graph that it is,
`sharedtree.value_and_grad` sums the gradient of the tied table over its two uses, and `sharedtree.optimizer` gives it
one slot. The model and the state of the optimizer are donated, which JAX alone refuses to do with a tied array.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st

from ._help_texts import consecutive_windows, random_windows
from ._model import LanguageModel, Sizes


class Checkpoint(NamedTuple):
    """All that training needs to go on as if it had not stopped.

    Attributes:
        model: the model.
        optimizer_state: that belongs to it.
        step: how many steps were taken.
        windows: the state of the NumPy generator that chooses which parts of the text are seen.
        key: of JAX's randomness, for the text that the model writes in the end.
        sizes: of the model, and of what it is trained on at a time.
        steps: how many there will be, which decides the learning rates.
    """

    model: LanguageModel
    optimizer_state: Any
    step: int
    windows: dict[str, Any]
    key: jax.Array
    sizes: Sizes
    steps: int


class Advanced(NamedTuple):
    """Some steps of training.

    Attributes:
        checkpoint: after the last of them.
        losses: one a step, in nats per byte.
        seconds: how long they took, without that step of a training which is compiled first.
    """

    checkpoint: Checkpoint
    losses: np.ndarray
    seconds: float


class Trained(NamedTuple):
    """What training came to.

    Attributes:
        end: the checkpoint after the last step.
        first_loss: of the first step, in nats per byte, before anything was learnt.
        traces: how often JAX traced the train step.
        bytes_per_second: how much text was learnt from, compilation left out; 0 if there was one step only.
        last: the steps after the checkpoint in between.
        again: the same steps, from what `reload` made of that checkpoint; None if there was no `reload`.
    """

    end: Checkpoint
    first_loss: float
    traces: int
    bytes_per_second: float
    last: Advanced
    again: Advanced | None

    @property
    def model(self) -> LanguageModel:
        """The trained model."""
        return self.end.model

    @property
    def optimizer_state(self) -> Any:
        """The state of the optimizer that belongs to it."""
        return self.end.optimizer_state


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


class TrainStep:
    """One step of training, compiled once. The model and the state that it is given are donated: they are gone.

    Args:
        steps: how many there will be, at least 1.

    Attributes:
        init: model → the state of the optimizer at the beginning.
        traces: how often JAX traced it.
    """

    def __init__(self, steps: int) -> None:
        optimizer = make_optimizer(steps)
        self.init = optimizer.init
        self.traces = 0

        @st.preserve_identities(jax.jit, donate_argnums=(0, 1))
        def step(model: LanguageModel, state: Any, windows: jax.Array) -> tuple[LanguageModel, Any, jax.Array]:
            self.traces += 1  # this line is Python, so it runs when JAX traces the function and never again
            loss, gradient = st.value_and_grad(next_byte_loss)(model, windows)
            updates, state = optimizer.update(gradient, state, model)
            return st.apply_updates(model, updates), state, loss

        self._step = step

    def __call__(self, model: LanguageModel, state: Any, windows: np.ndarray) -> tuple[LanguageModel, Any, jax.Array]:
        """(model, state, windows) → (model, state, loss)."""
        return self._step(model, state, jnp.asarray(windows))


def advance(step: TrainStep, start: Checkpoint, data: np.ndarray, until: int, bar: Any) -> Advanced:
    """Trains from a checkpoint on.

    Args:
        step: the train step.
        start: where to begin. Its model and state are donated: their arrays are gone afterwards.
        data: bytes, of shape (anything,).
        until: the number of the step to stop before, not below `start.step`.
        bar: a progress bar.
    """
    model, state, _, _, key, sizes, steps = start
    generator = np.random.default_rng()
    generator.bit_generator.state = start.windows
    losses: list[jax.Array] = []
    begin = time.perf_counter()
    for number in range(start.step, until):
        windows = random_windows(data, sizes.batch, sizes.context + 1, generator)
        model, state, loss = step(model, state, windows)
        losses.append(loss)
        if number == 0:
            loss.block_until_ready()  # so the compilation is over when the clock starts
            begin = time.perf_counter()
        if number % 10 == 0 or number == until - 1:
            bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)  # waits
        bar.update(sizes.batch * sizes.context)
    seconds = time.perf_counter() - begin
    windows_state = dict(generator.bit_generator.state)
    end = Checkpoint(model, state, until, windows_state, key, sizes, steps)
    return Advanced(end, np.array([np.asarray(loss) for loss in losses], np.float32), seconds)


def train(
    model: LanguageModel,
    data: np.ndarray,
    sizes: Sizes,
    *,
    steps: int,
    seed: int,
    reload: Callable[[Checkpoint], Checkpoint] | None = None,
) -> Trained:
    """Trains a model on random windows of a text, with a progress bar on standard error.

    Args:
        model: the model. It is donated: its arrays are gone afterwards.
        data: bytes, of shape (anything,).
        sizes: those of the model; `context` and `batch` are used here.
        steps: how many, at least 1.
        seed: decides which windows are seen.
        reload: called with the checkpoint before the last steps; returns one from which those are taken once more.

    Returns:
        The trained model and what is to be said about the training.
    """
    from tqdm import tqdm

    step = TrainStep(steps)
    windows = dict(np.random.default_rng(seed).bit_generator.state)
    start = Checkpoint(model, step.init(model), 0, windows, jax.random.key(seed), sizes, steps)
    tokens = sizes.batch * sizes.context
    with tqdm(total=steps * tokens, unit="tokens", unit_scale=True, desc="training") as bar:
        first = advance(step, start, data, steps - steps_after_checkpoint(steps), bar)
        reloaded = reload(first.checkpoint) if reload is not None else None
        last = advance(step, first.checkpoint, data, steps, bar)
    again = None
    if reloaded is not None:
        left = steps - reloaded.step
        with tqdm(total=left * tokens, unit="tokens", unit_scale=True, desc="from the file") as bar:
            again = advance(step, reloaded, data, steps, bar)
    first_loss = float([*first.losses, *last.losses][0])
    bytes_per_second = (steps - 1) * tokens / (first.seconds + last.seconds)
    return Trained(last.checkpoint, first_loss, step.traces, bytes_per_second, last, again)


def steps_after_checkpoint(steps: int) -> int:
    """How many steps are left at the checkpoint: half of them, at most 20, at least one."""
    return max(1, min(20, steps // 2))


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
    model: LanguageModel, prompt: np.ndarray, length: int, *, key: jax.Array, temperature: float = 0.6
) -> bytes:
    """Lets a model write on.

    Args:
        model: the model.
        prompt: bytes of shape (context,), how the text begins.
        length: how many bytes to write.
        key: decides which of the likely bytes are chosen.
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

    written = write(model, jnp.asarray(prompt), jax.random.split(key, length))
    return np.asarray(written).tobytes()
