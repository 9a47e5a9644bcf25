"""Demo behind `python -m sharedtree demo`: a language model whose embedding is its output layer, trained on a CPU.

One table of vectors has two uses: it turns bytes into vectors, and it scores each byte by comparing a vector with the
byte's vector (Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017). The model has fewer
parameters and less optimizer state, and each step trains both uses. With `sharedtree` one assignment is enough:
`self.head = self.embed`.

- `preserve_identities(jax.jit)` keeps the two one object inside and outside the compiled step.
- `value_and_grad` sums the gradient of the table over its two uses.
- `optimizer` gives the table one slot.
- `save` and `load` keep it one object in a file.

An *untied twin* shows what happens without: the same model, trained on the same windows by Equinox and optax alone.
They see a tree with two tables, each of which gets the gradient of its own use and drifts away from the other.

Losses are in nats per byte.
"""

import dataclasses
import io
import os
import sys
import tempfile
import time
from typing import Any, NamedTuple, TextIO

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st

from ..core._native_or_python import engine

FilePath = str | os.PathLike[str]
STEPS, QUICK_STEPS = 340, 30
"""Number of steps of a full run and of a quick one. 340 are enough for short words, in a minute on two cores."""

TWIN_STEPS = 60
"""Most steps of the untied twin. Its two tables differ after the first one, and clearly after these."""


class Sizes(NamedTuple):
    """Sizes of the model and of its training.

    Attributes:
        width: numbers in the vector of a byte.
        heads: attention heads of a block. `width // heads` must be even, see `rotated`.
        blocks: number of blocks.
        context: number of bytes seen by the model.
        batch: windows of a text in one step, each of `context` bytes and the one to predict.
    """

    width: int = 128
    heads: int = 4
    blocks: int = 2
    context: int = 64
    batch: int = 16


class Embedding(eqx.Module):
    """Table with a vector for each byte, of shape (256, width). It turns bytes into vectors and vectors into scores."""

    weight: jax.Array


class Attention(eqx.Module):
    """Causal self-attention: each position attends to itself and to earlier positions.

    Attributes:
        inward: layer for queries, keys and values.
        outward: layer for mixing the results of the heads.
        heads: number of heads.
    """

    inward: eqx.nn.Linear
    outward: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __call__(self, features: jax.Array) -> jax.Array:
        """Maps features of shape (context, width) to features of the same shape."""
        context, width = features.shape
        # The last axis holds queries, keys and values, one after another, and each of them holds all heads.
        parts = jax.vmap(self.inward)(features).reshape(context, 3, self.heads, width // self.heads)
        queries, keys, values = jnp.moveaxis(parts, 1, 0)
        attended = jax.nn.dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
        return jax.vmap(self.outward)(attended.reshape(context, width))


class Block(eqx.Module):
    """Attention and then a perceptron. Each reads the features, normalised, and its result is added to them."""

    attention: Attention
    attention_norm: eqx.nn.LayerNorm
    perceptron: eqx.nn.MLP
    perceptron_norm: eqx.nn.LayerNorm

    def __init__(self, width: int, heads: int, *, key: jax.Array) -> None:
        attention_key, perceptron_key = jax.random.split(key)
        inward_key, outward_key = jax.random.split(attention_key)
        inward = eqx.nn.Linear(width, 3 * width, use_bias=False, key=inward_key)
        self.attention = Attention(inward, eqx.nn.Linear(width, width, use_bias=False, key=outward_key), heads)
        self.perceptron = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=perceptron_key)
        self.attention_norm, self.perceptron_norm = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)

    def __call__(self, features: jax.Array) -> jax.Array:
        features = features + self.attention(jax.vmap(self.attention_norm)(features))
        return features + jax.vmap(self.perceptron)(jax.vmap(self.perceptron_norm)(features))


class LanguageModel(eqx.Module):
    """Transformer predicting the byte after each position of a text. Embedding and output layer are tied."""

    embed: Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: Embedding

    def __init__(self, sizes: Sizes, *, key: jax.Array) -> None:
        """Makes a model with random parameters."""
        embed_key, *block_keys = jax.random.split(key, 1 + sizes.blocks)
        # The scale is small, since `head` compares a vector of `embed` with itself. At the usual scale of an embedding,
        # the model would begin with the certainty that each byte follows itself.
        self.embed = Embedding(0.02 * jax.random.normal(embed_key, (256, sizes.width)))
        self.blocks = [Block(sizes.width, sizes.heads, key=block_key) for block_key in block_keys]
        self.norm = eqx.nn.LayerNorm(sizes.width)
        # The tie. Nothing else is needed.
        self.head = self.embed

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes, integers of shape (context,), to logits of shape (context, 256)."""
        features = self.embed.weight[tokens]
        for block in self.blocks:
            features = block(features)
        return jax.vmap(self.norm)(features) @ self.head.weight.T


def rotated(vectors: jax.Array) -> jax.Array:
    """Rotates each vector by an angle growing with its position (RoFormer, 2021).

    The product of two rotated vectors depends on their distance, so attention sees how far apart two bytes are.

    Args:
        vectors: array of shape (context, heads, size). `size` is even, since two numbers are rotated together.
    """
    context, _, size = vectors.shape
    positions = jnp.arange(context, dtype=vectors.dtype)
    # Each pair of numbers rotates at a speed of its own.
    frequencies = 10_000.0 ** (-jnp.arange(0, size, 2, dtype=vectors.dtype) / size)
    angles = (positions[:, None] * frequencies)[:, None]
    x, y = jnp.split(vectors, 2, axis=-1)
    return jnp.concatenate([x * jnp.cos(angles) - y * jnp.sin(angles), x * jnp.sin(angles) + y * jnp.cos(angles)], -1)


class Text(NamedTuple):
    """Text in two parts, as arrays of uint8: one to learn from, and one to measure the loss on."""

    train: np.ndarray
    validation: np.ndarray


def python_help() -> Text:
    """Returns the texts behind `help("topics")`: half a million bytes of English and some Python.

    A tenth is for validation. The texts repeat one another. Each paragraph is kept once, because the validation part
    must not hold what the model has learnt by heart.
    """
    from pydoc_data.topics import topics

    paragraphs = (paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    data = np.frombuffer("\n\n".join(dict.fromkeys(filter(None, paragraphs))).encode(), np.uint8)
    return Text(*np.split(data, [round(0.9 * len(data))]))


def unigram_loss(text: Text) -> float:
    """Returns the loss of a model without context, which knows only how often each byte is in the training part."""
    # Each count is one too large, so no byte has the probability 0, whose loss would be infinite.
    counts = np.bincount(text.train, minlength=256) + 1
    return float(-np.log(counts / counts.sum())[text.validation].mean())


def random_windows(data: np.ndarray, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Cuts windows out of a text, at random positions.

    Args:
        data: the text, as uint8.
        number: number of windows.
        length: bytes of a window.
        generator: source of the positions.

    Returns:
        Array of int32, of shape (number, length).
    """
    starts = generator.integers(0, len(data) - length, number, endpoint=True)
    return data[starts[:, None] + np.arange(length)].astype(np.int32)


def consecutive_windows(data: np.ndarray, length: int) -> np.ndarray:
    """Cuts a text into windows, as int32 of shape (number, length).

    Each window begins with the last byte of the window before, so each byte but the first is predicted once. The rest
    of the text that fills no window is left out.
    """
    return data[np.arange(0, len(data) - length + 1, length - 1)[:, None] + np.arange(length)].astype(np.int32)


def make_optimizer(steps: int, peak: float = 3e-3) -> Any:
    """Makes AdamW for tied models. See `make_vanilla_optimizer`."""
    return st.optimizer(make_vanilla_optimizer(steps, peak))


def make_vanilla_optimizer(steps: int, peak: float = 3e-3) -> Any:
    """Makes optax's AdamW. The learning rate rises during the first tenth of the steps, then falls to zero.

    Args:
        steps: number of steps of the whole training.
        peak: highest learning rate.
    """
    import optax

    warmup = steps // 10
    # The schedule ends one step later than the training. Otherwise the rate of the last step would be zero.
    schedule = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, steps + 1)
    return optax.adamw(schedule, b2=0.99, weight_decay=0.01)


def next_byte_loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """Returns the mean loss of a model predicting each byte of the windows but the first ones.

    Args:
        model: the model.
        windows: integers of shape (batch, context + 1).
    """
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(windows[:, :-1]))
    return -jnp.take_along_axis(log_probabilities, windows[:, 1:, None], axis=-1).mean()


class Checkpoint(NamedTuple):
    """State of a training. It goes on from a checkpoint as if it had not stopped.

    Attributes:
        model: the model.
        optimizer_state: the state of `make_optimizer(steps)`.
        step: number of steps so far.
        windows: state of the NumPy generator for choosing windows.
        key: JAX key for the model's own text at the end.
        sizes: sizes of the model and of its training.
        steps: number of steps of the whole training. It decides the learning rates.
    """

    model: LanguageModel
    optimizer_state: Any
    step: int
    windows: dict[str, Any]
    key: jax.Array
    sizes: Sizes
    steps: int


class Advanced(NamedTuple):
    """Result of some steps.

    Attributes:
        checkpoint: the state after the steps.
        losses: loss of each step, float32.
        seconds: duration of the steps, without the very first one of the training, which is compiled.
    """

    checkpoint: Checkpoint
    losses: np.ndarray
    seconds: float


class Training:
    """Training of a language model on random windows of a text.

    Args:
        data: the text, as uint8.
        sizes: sizes of the model and of its training.
        steps: number of steps of the whole training.
        seed: seed of the model, of the windows and of the model's own text.

    Attributes:
        data: the text.
        traces: number of traces of the step by JAX.
        start: the checkpoint before the first step.
    """

    def __init__(self, data: np.ndarray, sizes: Sizes, *, steps: int, seed: int) -> None:
        """Makes the model, the state of the optimizer and the step."""
        self.data, self.traces = data, 0
        key, optimizer = jax.random.key(seed), make_optimizer(steps)
        model = LanguageModel(sizes, key=key)
        # The state of a generator is plain data, so a checkpoint can hold it.
        windows = dict(np.random.default_rng(seed).bit_generator.state)
        self.start = Checkpoint(model, optimizer.init(model), 0, windows, key, sizes, steps)

        @st.preserve_identities(jax.jit, donate_argnums=(0, 1))
        def step(model: LanguageModel, state: Any, windows: jax.Array) -> tuple[LanguageModel, Any, jax.Array]:
            """Takes one step. Returns the new model, the new state of the optimizer and the loss."""
            # Python code of a jitted function runs only when JAX traces the function.
            self.traces += 1
            loss, gradient = st.value_and_grad(next_byte_loss)(model, windows)
            updates, state = optimizer.update(gradient, state, model)
            return st.apply_updates(model, updates), state, loss

        self._step = step

    def advance(self, start: Checkpoint, until: int, bar: Any) -> Advanced:
        """Takes steps from a checkpoint on.

        Args:
            start: the checkpoint. Its model and optimizer state are donated, so their arrays cannot be used any more.
            until: number of the step to stop before.
            bar: progress bar of tqdm, to which the bytes of each step are added.
        """
        model, state, _, _, key, sizes, steps = start
        generator = np.random.default_rng()
        generator.bit_generator.state = start.windows
        losses: list[jax.Array] = []
        begin = time.perf_counter()
        for number in range(start.step, until):
            windows = random_windows(self.data, sizes.batch, sizes.context + 1, generator)
            model, state, loss = self._step(model, state, jnp.asarray(windows))
            losses.append(loss)
            if number == 0:
                # The clock starts after the compilation.
                loss.block_until_ready()
                begin = time.perf_counter()
            # `float` waits for the step, so it is called only now and then.
            if number % 10 == 0 or number == until - 1:
                bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
            bar.update(sizes.batch * sizes.context)
        seconds = time.perf_counter() - begin
        end = Checkpoint(model, state, until, dict(generator.bit_generator.state), key, sizes, steps)
        return Advanced(end, np.array(losses, np.float32), seconds)


class FirstGradient(NamedTuple):
    """Norms of the gradient of the tied table in the first step, and of its two parts in the untied twin.

    Attributes:
        tied: norm of the one gradient of the tied model.
        embed: norm of the gradient of the twin's `.embed`.
        head: norm of the gradient of the twin's `.head`.
        error: norm of the difference between the one gradient and the sum of the two, as a fraction of `tied`.
    """

    tied: float
    embed: float
    head: float
    error: float


class Twin(NamedTuple):
    """Result of the untied twin.

    Attributes:
        losses: loss of each step, float32.
        difference: norm of the difference between its two tables in the end, as a fraction of the norm of `.embed`.
        parameters: number of its parameters.
        optimizer_bytes: bytes of the state of its optimizer.
        file_bytes: size of the model and the optimizer state, as `eqx.tree_serialise_leaves` writes them.
        gradient: what becomes of the gradient of the table.
    """

    losses: np.ndarray
    difference: float
    parameters: int
    optimizer_bytes: int
    file_bytes: int
    gradient: FirstGradient


def train_twin(training: Training, steps: int, bar: Any) -> Twin:
    """Trains an untied twin as one does without sharedtree: `eqx.filter_jit`, `eqx.filter_value_and_grad` and optax.

    Args:
        training: the training of the tied model, before its first step. The twin begins with copies of its arrays, and
            sees the same windows.
        steps: number of steps. The learning rates are those of the whole training.
        bar: progress bar of tqdm, to which the bytes of each step are added.
    """
    model, _, _, windows_state, _, sizes, all_steps = training.start
    # A new array for each path.
    twin: Any = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)
    tx = make_vanilla_optimizer(all_steps)
    state = tx.init(eqx.filter(twin, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(twin: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array, Any]:
        """Takes one step. Returns the new twin, the new state of the optimizer, the loss and the gradient."""
        loss, gradient = eqx.filter_value_and_grad(next_byte_loss)(twin, windows)
        updates, state = tx.update(gradient, state, eqx.filter(twin, eqx.is_inexact_array))
        return eqx.apply_updates(twin, updates), state, loss, gradient

    generator = np.random.default_rng()
    generator.bit_generator.state = windows_state
    length = sizes.context + 1
    batches = [jnp.asarray(random_windows(training.data, sizes.batch, length, generator)) for _ in range(steps)]
    # In the first step, the two models are equal, so their gradients can be compared.
    whole: Any = st.jit(st.grad(next_byte_loss))(model, batches[0])
    losses: list[float] = []
    gradients: list[FirstGradient] = []
    for windows in batches:
        twin, state, loss, gradient = step(twin, state, windows)
        if not gradients:
            gradients.append(_compared(whole.embed.weight, gradient.embed.weight, gradient.head.weight))
        losses.append(float(loss))
        bar.update(sizes.batch * sizes.context)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, (twin, state))
    difference = jnp.linalg.norm(twin.embed.weight - twin.head.weight) / jnp.linalg.norm(twin.embed.weight)
    return Twin(
        losses=np.array(losses, np.float32),
        difference=float(difference),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(twin, eqx.is_inexact_array))),
        optimizer_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        file_bytes=file.tell(),
        gradient=gradients[0],
    )


def _compared(whole: jax.Array, embed: jax.Array, head: jax.Array) -> FirstGradient:
    """Compares the gradient of the tied table with those of the twin's two tables."""
    norms = [float(jnp.linalg.norm(gradient)) for gradient in (whole, embed, head)]
    return FirstGradient(*norms, error=float(jnp.linalg.norm(whole - (embed + head))) / norms[0])


def mean_loss(model: LanguageModel, data: np.ndarray, sizes: Sizes) -> float:
    """Returns the loss of a model on a text. A rest that fills no batch of windows is left out.

    Args:
        model: the model.
        data: the text, as uint8.
        sizes: sizes of windows and batches.
    """
    windows = consecutive_windows(data, sizes.context + 1)
    batches = windows[: len(windows) // sizes.batch * sizes.batch].reshape(-1, sizes.batch, windows.shape[1])
    loss_of = st.jit(next_byte_loss)
    return float(np.mean([loss_of(model, jnp.asarray(batch)) for batch in batches]))


def continuation(model: LanguageModel, prompt: np.ndarray, length: int, *, key: jax.Array) -> bytes:
    """Lets a model continue a text.

    Bytes are drawn at a temperature of 0.6, so likely bytes become more likely than the model says.

    Args:
        model: the model.
        prompt: the text, integers of shape (context,).
        length: number of bytes to write.
        key: JAX key for the draws.
    """

    def write_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draws the byte after a window. Returns the window that ends with that byte, and the byte."""
        byte = jax.random.categorical(key, model(window)[-1] / 0.6).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    _, written = jax.lax.scan(write_byte, jnp.asarray(prompt), jax.random.split(key, length))
    return np.asarray(written).tobytes()


def reload(checkpoint: Checkpoint, path: FilePath) -> Checkpoint:
    """Saves a checkpoint and loads it again.

    No template is needed. Here all classes are Equinox's. A program with classes of its own passes them to `load` as
    `trusted=`.

    Args:
        checkpoint: the checkpoint.
        path: path of the file.
    """
    st.save(path, checkpoint, metadata={"step": str(checkpoint.step)})
    return st.load(path)


def differences(live: Advanced, resumed: Advanced) -> tuple[str, ...]:
    """Compares two runs of the same steps, from two checkpoints, bit for bit.

    Returns:
        `losses` if the losses differ, the ties that only one of the models has, and the paths of values that differ.
    """
    names = ["losses"] if live.losses.tobytes() != resumed.losses.tobytes() else []
    live_ties, resumed_ties = _tie_texts(live.checkpoint), _tie_texts(resumed.checkpoint)
    live_bits, resumed_bits = _bits_by_path(live.checkpoint), _bits_by_path(resumed.checkpoint)
    paths = [path for path in live_bits | resumed_bits if live_bits.get(path) != resumed_bits.get(path)]
    return (*names, *sorted(live_ties ^ resumed_ties), *paths)


def _tie_texts(checkpoint: Checkpoint) -> set[str]:
    """Returns a text for each tie: `.embed is .head`."""
    return {" is ".join(tie.paths) for tie in st.ties(checkpoint)}


def _bits_by_path(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns path → value in a form that `==` compares bit for bit: the class, and then dtype, shape and bytes."""
    bits: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(checkpoint):
        # A key array has no bytes of its own.
        is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        plain = jax.random.key_data(value) if is_key else value
        is_array = isinstance(plain, (jax.Array, np.ndarray))
        content = (plain.dtype, plain.shape, np.asarray(plain).tobytes()) if is_array else plain
        bits[jax.tree_util.keystr(path)] = type(value), content
    return bits


ANNOUNCEMENT = """\
A small transformer learns to write like the help texts of Python, in {steps} steps. The layer that reads
bytes is the layer that writes them: one object at two paths, .embed and .head. In the end you will see

    what it writes, and its loss beside that of {compared};
    an untied twin, trained for {twin} steps by Equinox and optax alone, whose two tables drift apart,
    and how many parameters, bytes of the optimizer and bytes on disk it has more;
    that .embed is .head as before, and that the train step was traced once;
    that a checkpoint, saved and loaded on the way, gives the last {resumed} steps bit for bit.

"""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Result of a run of the demo. The command prints its `str`.

    Attributes:
        quick: True for a quick run, whose loss is compared with its first loss.
        losses: loss of each step, float32.
        validation_loss: loss of the trained model on the validation part.
        unigram_loss: loss of a model without context, with which a full run is compared.
        prompt: the text for the model to continue.
        sample: the continuation.
        ties_before: ties of the model before the first step.
        ties_after: ties of the model after the last step.
        parameters: number of parameters.
        optimizer_bytes: bytes of the optimizer's state.
        file_bytes: size of the checkpoint.
        twin: the untied twin.
        traces: number of traces of the step by JAX.
        bytes_per_second: bytes of the text learnt from in a second.
        resumed_steps: number of steps taken again from the loaded checkpoint.
        resumed_differences: see `differences`.
    """

    quick: bool
    losses: np.ndarray
    validation_loss: float
    unigram_loss: float
    prompt: str
    sample: str
    ties_before: tuple[st.Tie, ...]
    ties_after: tuple[st.Tie, ...]
    parameters: int
    optimizer_bytes: int
    file_bytes: int
    twin: Twin
    traces: int
    bytes_per_second: float
    resumed_steps: int
    resumed_differences: tuple[str, ...]

    @property
    def first_loss(self) -> float:
        """Loss of the first step."""
        return float(self.losses[0])

    def __str__(self) -> str:
        prompt, sample = _indented(self.prompt), _indented(self.sample)
        head = f"After {len(self.twin.losses)} steps"
        comparison = [f"{head:<18}{'tied, by sharedtree':<21}untied twin, by Equinox and optax"]
        comparison += [f"{name:<18}{tied:<21}{untied}".rstrip() for name, (tied, untied) in self.comparison().items()]
        table = "\n".join(f"{name:<16}{value}" for name, value in self.rows().items())
        sections = ("The model was given", prompt, "and wrote on", sample, "\n".join(comparison), table)
        return "\n\n".join(sections)

    def comparison(self) -> dict[str, tuple[str, str]]:
        """Returns the rows of the first printed table: name of a measurement → tied model, untied twin."""
        twin, gradient = self.twin, self.twin.gradient
        apart = f"two, {twin.difference:.0%} of their size apart"
        parts = f"{gradient.embed:.3f}, {gradient.head:.3f}; {self._sum()}"
        is_one = _TIE in [tie.paths for tie in self.ties_after]

        def more(tied: int, untied: int) -> tuple[str, str]:
            """Compares two amounts."""
            return f"{tied:,}", f"{untied:,}, {untied - tied:,} more"

        return {
            ".embed, .head": ("one object" if is_one else "TWO OBJECTS", apart),
            "loss of training": (f"{_last(self.losses[: len(twin.losses)]):.3f}", f"{_last(twin.losses):.3f}"),
            "parameters": more(self.parameters, twin.parameters),
            "optimizer bytes": more(self.optimizer_bytes, twin.optimizer_bytes),
            "checkpoint bytes": more(self.file_bytes, twin.file_bytes),
            "first gradient": (f"norm {gradient.tied:.3f}", parts),
        }

    def _sum(self) -> str:
        """Says whether the gradient of the tied table is the sum of the twin's two."""
        error = self.twin.gradient.error
        return "their sum is the tied one" if error < _MOST_ERROR else f"their sum DIFFERS by {error:.1%}"

    def rows(self) -> dict[str, str]:
        """Returns the rows of the second printed table: name of a measurement → its result, in words."""
        ties_before, ties_after = _described(self.ties_before), _described(self.ties_after)
        names = ", ".join(self.resumed_differences)
        comparison = f"which DIFFER: {names}" if names else "losses and parameters the same bit for bit"
        return {
            "validation loss": f"{self.validation_loss:.3f} nats/byte (unigram baseline: {self.unigram_loss:.3f})",
            "ties": f"Before: {ties_before}. After: {'the same' if ties_after == ties_before else ties_after}",
            "from the file": f"{self.resumed_steps} steps taken again, {comparison}",
            "train step": f"traced {'once' if self.traces == 1 else f'{self.traces} times'}",
            "training speed": f"{self.bytes_per_second:,.0f} tokens/s, a token being a byte",
            "engine": engine(),
        }


# Paths of the tie of the model.
_TIE = (".embed", ".head")

# A sum of float32 numbers in another order differs by less than this fraction.
_MOST_ERROR = 1e-3


def _last(losses: np.ndarray) -> float:
    """Returns the mean of the last ten losses, since those of single steps differ much."""
    return float(losses[-10:].mean())


def _indented(text: str) -> str:
    """Indents each line of a text."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _described(ties: tuple[st.Tie, ...]) -> str:
    """Describes ties in words."""
    texts = [f"{' is '.join(tie.paths)} ({tie.kind}, {tie.nbytes:,} bytes)" for tie in ties]
    return ", ".join(texts) or "none"


def failures(report: Report) -> tuple[str, ...]:
    """Returns a text for each row of a report that is not as it should be. Empty if all is well."""
    if report.quick:
        baseline, baseline_loss = "first step's loss", report.first_loss
    else:
        baseline, baseline_loss = "unigram baseline", report.unigram_loss
    advice = f"It should be below the {baseline}, {baseline_loss:.3f}. More steps may help: --steps."
    ties, twin = report.ties_before, report.twin
    # Row → what should be so. Nothing, or False, if it is so.
    complaints = {
        # NaN is not below the baseline either, so it fails.
        "validation loss": "" if report.validation_loss < baseline_loss else advice,
        "ties": "" if ties and ties == report.ties_after else "There should be some, and they should last.",
        ".embed, .head": "" if twin.difference > 0 else "The twin's two tables should differ.",
        "checkpoint bytes": "" if report.file_bytes < twin.file_bytes else "What is tied should be saved once.",
        "first gradient": "" if twin.gradient.error < _MOST_ERROR else "It should be the sum over both uses.",
        "from the file": report.resumed_differences and "Training should go on in the same way.",
        "train step": report.traces != 1 and "It should be traced once.",
    }
    texts = {name: " / ".join(pair) for name, pair in report.comparison().items()} | report.rows()
    return tuple(f"{name}: {texts[name]}. {complaint}" for name, complaint in complaints.items() if complaint)


class LogLines:
    """Stream for a progress bar that ends in a log file: each state of the bar is a line of its own.

    Args:
        stream: the stream to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Writes a state of the bar, which begins with a carriage return, as a line. Empty texts are left out."""
        line = text.strip()
        if line:
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        """Flushes the stream."""
        self._stream.flush()


def run(
    *, steps: int, seed: int = 0, quick: bool = False, sizes: Sizes | None = None, save: FilePath | None = None
) -> Report:
    """Trains a language model with tied weights on the help texts of Python, and returns a report.

    Shortly before the end, the model is saved and loaded again. The last steps are taken twice: without interruption,
    and from the loaded checkpoint.

    Args:
        steps: number of steps.
        seed: seed of the model, of the windows and of the model's own text.
        quick: True to let the model write less. The report then compares its loss with the first one.
        sizes: sizes of the model and of its training. Default: those of `Sizes`.
        save: path of the checkpoint. Default: a file to be deleted at the end.

    Raises:
        ImportError: if optax or tqdm is not installed. The message says how to install them.
    """
    try:
        import optax  # noqa: F401
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            f"The demo needs `{error.name}`, which cannot be imported ({error}). Install what it needs:\n"
            "    pip install optax tqdm\n"
            "They are also what the extra of sharedtree brings: `sharedtree[demo]`."
        ) from None
    sizes, num_resumed, num_twin = sizes or Sizes(), max(1, min(20, steps // 2)), min(steps, TWIN_STEPS)
    compared = "the first step" if quick else "a model that knows no context"
    sys.stderr.write(ANNOUNCEMENT.format(steps=steps, compared=compared, twin=num_twin, resumed=num_resumed))
    text = python_help()
    training = Training(text.train, sizes, steps=steps, seed=seed)
    ties_before = st.ties(training.start.model)
    # A token is a byte.
    tokens = sizes.batch * sizes.context
    bar_options: dict[str, Any] = {"unit": "tokens", "unit_scale": True}
    if not sys.stderr.isatty():
        bar_options |= {"file": LogLines(sys.stderr), "mininterval": 60.0, "maxinterval": 60.0}
    # The twin comes first, since the training donates the arrays of the model.
    with tqdm(total=num_twin * tokens, desc="untied twin", **bar_options) as bar:
        twin = train_twin(training, num_twin, bar)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=steps * tokens, desc="training", **bar_options) as bar:
        first = training.advance(training.start, steps - num_resumed, bar)
        path = os.path.join(folder, "checkpoint.safetensors") if save is None else save
        # The checkpoint is saved before its arrays are donated to the last steps.
        reloaded = reload(first.checkpoint, path)
        file_bytes = os.path.getsize(path)
        last = training.advance(first.checkpoint, steps, bar)
    with tqdm(total=num_resumed * tokens, desc="from the file", **bar_options) as bar:
        resumed = training.advance(reloaded, steps, bar)
    model, state, _, _, key, *_ = last.checkpoint
    prompt = text.validation[: sizes.context]
    return Report(
        quick=quick,
        losses=np.concatenate([first.losses, last.losses]),
        validation_loss=mean_loss(model, text.validation, sizes),
        unigram_loss=unigram_loss(text),
        prompt=prompt.tobytes().decode(errors="replace"),
        sample=continuation(model, prompt, 100 if quick else 400, key=key).decode(errors="replace"),
        ties_before=ties_before,
        ties_after=st.ties(model),
        parameters=st.count_parameters(model),
        optimizer_bytes=sum(leaf.nbytes for leaf in st.tree.leaves(state)),
        file_bytes=file_bytes,
        twin=twin,
        traces=training.traces,
        bytes_per_second=(steps - 1) * tokens / (first.seconds + last.seconds),
        resumed_steps=len(resumed.losses),
        resumed_differences=differences(last, resumed),
    )
