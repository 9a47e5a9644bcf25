"""The demo behind `python -m sharedtree demo`: a language model whose embedding is its output layer, trained on a CPU.

One table turns a byte into a vector, and scores each byte by comparing a vector with that byte's (Press and Wolf,
"Using the Output Embedding to Improve Language Models", 2017): fewer parameters, less optimizer state, and each step
teaches both uses. With `sharedtree` that takes one assignment, `self.head = self.embed`. `preserve_identities(jax.jit)`
takes the model in and out as the graph that it is, `value_and_grad` sums the gradient of the table over its two uses,
`optimizer` gives it one slot, and `save` and `load` keep it one in a file. Losses are in nats per byte.
"""

import dataclasses
import io
import os
import sys
import tempfile
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import sharedtree as st

from ..core._native_or_python import engine

FilePath = str | os.PathLike[str]
STEPS, QUICK_STEPS = 900, 30
"""Enough for words, in about a minute on two cores; enough to see the loss fall."""


class Sizes(NamedTuple):
    """How large the model is, and how many windows (`batch`) of how many bytes (`context`) it learns from in a step."""

    width: int = 128
    heads: int = 4  # each gets `width // heads` numbers, which must be even
    blocks: int = 2
    context: int = 64
    batch: int = 16


class Embedding(eqx.Module):
    """A table with a vector for each byte, of shape (256, width), to be read both ways."""

    weight: jax.Array


class Attention(eqx.Module):
    """Causal self-attention, (context, width) → (context, width): each position looks at itself and those before it."""

    inward: eqx.nn.Linear
    outward: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __call__(self, features: jax.Array) -> jax.Array:
        context, width = features.shape
        parts = jax.vmap(self.inward)(features).reshape(context, 3, self.heads, width // self.heads)
        queries, keys, values = jnp.moveaxis(parts, 1, 0)
        found = jax.nn.dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
        return jax.vmap(self.outward)(found.reshape(context, width))


class Block(eqx.Module):
    """Attention and then a perceptron, each on normalised input and added to what it reads."""

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
    """Predicts the byte after each position of a text: (context,) integers → logits of shape (context, 256)."""

    embed: Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: Embedding

    def __init__(self, sizes: Sizes, *, key: jax.Array) -> None:
        embed_key, *block_keys = jax.random.split(key, 1 + sizes.blocks)
        # Small, since a vector in `embed` is compared with itself in `head`: at the usual scale of an embedding the
        # model would start out sure that each byte follows itself.
        self.embed = Embedding(0.02 * jax.random.normal(embed_key, (256, sizes.width)))
        self.blocks = [Block(sizes.width, sizes.heads, key=block_key) for block_key in block_keys]
        self.norm = eqx.nn.LayerNorm(sizes.width)
        self.head = self.embed  # this is all that it takes to tie them

    def __call__(self, tokens: jax.Array) -> jax.Array:
        features = self.embed.weight[tokens]
        for block in self.blocks:
            features = block(features)
        return jax.vmap(self.norm)(features) @ self.head.weight.T


def rotated(vectors: jax.Array) -> jax.Array:
    """Turns vectors, (context, heads, even size), by position, so that attention sees distances: RoFormer, 2021."""
    context, _, size = vectors.shape
    positions = jnp.arange(context, dtype=vectors.dtype)
    frequencies = 10_000.0 ** (-jnp.arange(0, size, 2, dtype=vectors.dtype) / size)
    angles = (positions[:, None] * frequencies)[:, None]
    x, y = jnp.split(vectors, 2, axis=-1)
    return jnp.concatenate([x * jnp.cos(angles) - y * jnp.sin(angles), x * jnp.sin(angles) + y * jnp.cos(angles)], -1)


class Text(NamedTuple):
    """A text in two parts, as arrays of uint8."""

    train: np.ndarray
    validation: np.ndarray


def python_help() -> Text:
    """The texts behind `help("topics")`: half a million bytes of English and some Python, a tenth for validation.

    They repeat one another. Each paragraph is kept once, or a model would be measured on what it learnt by heart.
    """
    from pydoc_data.topics import topics

    found = (paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    data = np.frombuffer("\n\n".join(dict.fromkeys(filter(None, found))).encode(), np.uint8)
    return Text(*np.split(data, [round(0.9 * len(data))]))


def unigram_loss(text: Text) -> float:
    """The loss on the validation part of the best model without context; no byte is impossible for it."""
    counts = np.bincount(text.train, minlength=256) + 1
    return float(-np.log(counts / counts.sum())[text.validation].mean())


def random_windows(data: np.ndarray, number: int, length: int, generator: np.random.Generator) -> np.ndarray:
    """Windows of a text that begin at random places, as int32 of shape (number, length)."""
    starts = generator.integers(0, len(data) - length, number, endpoint=True)
    return data[starts[:, None] + np.arange(length)].astype(np.int32)


def consecutive_windows(data: np.ndarray, length: int) -> np.ndarray:
    """Windows that cover a text, but for a rest. Each begins with the last byte of the one before."""
    return data[np.arange(0, len(data) - length + 1, length - 1)[:, None] + np.arange(length)].astype(np.int32)


def make_optimizer(steps: int, peak: float = 3e-3) -> Any:
    """AdamW for tied models. The learning rate rises during the first tenth of the steps and then falls to zero."""
    import optax

    warmup = steps // 10
    # The schedule ends one step past the last, or the last would be taken at a rate of zero.
    schedule = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, steps + 1)
    return st.optimizer(optax.adamw(schedule, b2=0.99, weight_decay=0.01))


def next_byte_loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """The mean loss of predicting each byte but the first of windows, (batch, context + 1) integers → a scalar."""
    log_probabilities = jax.nn.log_softmax(jax.vmap(model)(windows[:, :-1]))
    return -jnp.take_along_axis(log_probabilities, windows[:, 1:, None], axis=-1).mean()


class Checkpoint(NamedTuple):
    """All that training needs to go on as if it had not stopped."""

    model: LanguageModel
    optimizer_state: Any
    step: int
    windows: dict[str, Any]  # the state of the NumPy generator that chooses what is read
    key: jax.Array  # for the text that is written in the end
    sizes: Sizes
    steps: int  # how many there will be, which decides the learning rates


class Advanced(NamedTuple):
    """The checkpoint after some steps, their losses, and their seconds, without that step which is compiled first."""

    checkpoint: Checkpoint
    losses: np.ndarray
    seconds: float


class Training:
    """A training on random windows of a text, from `start` on. `traces` is how often JAX traced its step."""

    def __init__(self, data: np.ndarray, sizes: Sizes, *, steps: int, seed: int) -> None:
        self.data, self.traces = data, 0
        key, optimizer = jax.random.key(seed), make_optimizer(steps)
        model = LanguageModel(sizes, key=key)
        windows = dict(np.random.default_rng(seed).bit_generator.state)
        self.start = Checkpoint(model, optimizer.init(model), 0, windows, key, sizes, steps)

        @st.preserve_identities(jax.jit, donate_argnums=(0, 1))
        def step(model: LanguageModel, state: Any, windows: jax.Array) -> tuple[LanguageModel, Any, jax.Array]:
            self.traces += 1  # this line is Python, so it runs when JAX traces the function and never again
            loss, gradient = st.value_and_grad(next_byte_loss)(model, windows)
            updates, state = optimizer.update(gradient, state, model)
            return st.apply_updates(model, updates), state, loss

        self._step = step

    def advance(self, start: Checkpoint, until: int, bar: Any) -> Advanced:
        """Trains from a checkpoint on, whose model and optimizer state are donated: their arrays are gone."""
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
                loss.block_until_ready()  # so the compilation is over when the clock starts
                begin = time.perf_counter()
            if number % 10 == 0 or number == until - 1:
                bar.set_postfix(loss=f"{float(loss):.3f}", refresh=False)  # waits
            bar.update(sizes.batch * sizes.context)
        seconds = time.perf_counter() - begin
        end = Checkpoint(model, state, until, dict(generator.bit_generator.state), key, sizes, steps)
        return Advanced(end, np.array(losses, np.float32), seconds)


def mean_loss(model: LanguageModel, data: np.ndarray, sizes: Sizes) -> float:
    """The loss of a model on a text. A rest that fills no batch of windows is left out."""
    windows = consecutive_windows(data, sizes.context + 1)
    batches = windows[: len(windows) // sizes.batch * sizes.batch].reshape(-1, sizes.batch, windows.shape[1])
    loss_of = st.jit(next_byte_loss)
    return float(np.mean([loss_of(model, jnp.asarray(batch)) for batch in batches]))


def continuation(model: LanguageModel, prompt: np.ndarray, length: int, *, key: jax.Array) -> bytes:
    """Lets a model write on after a prompt of shape (context,), at a temperature of 0.6: likelier bytes."""

    def write_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        byte = jax.random.categorical(key, model(window)[-1] / 0.6).astype(window.dtype)
        return jnp.append(window[1:], byte), byte

    return np.asarray(jax.lax.scan(write_byte, jnp.asarray(prompt), jax.random.split(key, length))[1]).tobytes()


class FileSizes(NamedTuple):
    """Bytes: of the file, of the same untied, and of model and optimizer state by `eqx.tree_serialise_leaves`."""

    tied: int
    untied: int
    equinox: int


def reload(checkpoint: Checkpoint, path: FilePath) -> tuple[Checkpoint, FileSizes]:
    """Saves a checkpoint and loads it again, without a template. Classes of your own would need `trusted=`."""
    st.save(path, checkpoint, metadata={"step": str(checkpoint.step)})
    by_equinox = io.BytesIO()
    eqx.tree_serialise_leaves(by_equinox, (checkpoint.model, checkpoint.optimizer_state))
    untied = len(st.to_bytes(st.untie(checkpoint)))
    return st.load(path), FileSizes(os.path.getsize(path), untied, by_equinox.tell())


def differences(live: Advanced, again: Advanced) -> tuple[str, ...]:
    """What is not the same, bit for bit, after the same steps from two checkpoints: `losses`, and paths."""
    found = ["losses"] if live.losses.tobytes() != again.losses.tobytes() else []
    ties, other_ties = ({" is ".join(tie.paths) for tie in st.ties(each.checkpoint)} for each in (live, again))
    bits, other_bits = (_bits_by_path(each.checkpoint) for each in (live, again))
    differing = [path for path in bits | other_bits if bits.get(path) != other_bits.get(path)]
    return (*found, *sorted(ties ^ other_ties), *differing)


def _bits_by_path(checkpoint: Checkpoint) -> dict[str, Any]:
    """Path → what is there: of an array its class, dtype, shape and bytes; of anything else the class and the value."""
    found: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(checkpoint):
        is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        plain = jax.random.key_data(value) if is_key else value
        is_array = isinstance(plain, (jax.Array, np.ndarray))
        content = (plain.dtype, plain.shape, np.asarray(plain).tobytes()) if is_array else plain
        found[jax.tree_util.keystr(path)] = type(value), content
    return found


ANNOUNCEMENT = """\
A small transformer learns to write like the help texts of Python, in {steps} steps. The layer that reads
bytes is the layer that writes them: one object at two paths, .embed and .head. In the end you will see

    what it writes, and its loss beside that of {compared};
    that .embed is .head as before, and that the train step was traced once;
    how many parameters, bytes of the optimizer and bytes on disk that saves;
    that a checkpoint, saved and loaded on the way, gives the last {resumed} steps bit for bit.

"""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What came of a run: `str` of it is what the command prints. A quick one is compared with its own first step."""

    quick: bool
    first_loss: float
    validation_loss: float
    unigram_loss: float
    prompt: str
    sample: str
    ties_before: tuple[st.Tie, ...]
    ties_after: tuple[st.Tie, ...]
    parameters: int
    parameters_untied: int
    optimizer_bytes: int
    optimizer_bytes_untied: int
    traces: int
    bytes_per_second: float
    file_bytes: FileSizes
    resumed_steps: int
    resumed_differences: tuple[str, ...]

    def __str__(self) -> str:
        prompt, sample = ("\n".join(f"    {line}" for line in text.splitlines()) for text in (self.prompt, self.sample))
        table = "\n".join(f"{name:<21}{value}" for name, value in self.rows().items())
        return f"The model was given\n\n{prompt}\n\nand wrote on\n\n{sample}\n\n{table}"

    def rows(self) -> dict[str, str]:
        """What was measured, and what came out."""
        before, after = (
            ", ".join(f"{' is '.join(tie.paths)} ({tie.kind}, {tie.nbytes:,} bytes)" for tie in ties) or "none"
            for ties in (self.ties_before, self.ties_after)
        )
        names = ", ".join(self.resumed_differences)
        same = f"which DIFFER: {names}" if names else "losses and parameters the same bit for bit"

        def saved(tied: int, untied: int) -> str:
            return f"{tied:,} (untied: {untied:,}, {1 - tied / untied:.1%} saved)"

        return {
            "validation loss": f"{self.validation_loss:.3f} nats/byte (unigram baseline: {self.unigram_loss:.3f})",
            "ties": f"Before: {before}. After: {'the same' if after == before else after}",
            "parameters": saved(self.parameters, self.parameters_untied),
            "optimizer bytes": saved(self.optimizer_bytes, self.optimizer_bytes_untied),
            "checkpoint bytes": saved(self.file_bytes.tied, self.file_bytes.untied),
            "the same by Equinox": f"{self.file_bytes.equinox:,} (equinox.tree_serialise_leaves, to fill a template)",
            "from the file": f"{self.resumed_steps} steps taken again, {same}",
            "train step": f"traced {'once' if self.traces == 1 else f'{self.traces} times'}",
            "training speed": f"{self.bytes_per_second:,.0f} tokens/s, a token being a byte",
            "engine": engine(),
        }


def failures(report: Report) -> tuple[str, ...]:
    """The rows of a report that are not what they should be; none if all is well."""
    loss = ("first step's loss", report.first_loss) if report.quick else ("unigram baseline", report.unigram_loss)
    better = f"It should be below the {loss[0]}, {loss[1]:.3f}. More steps may help: --steps."
    (tied, untied, _), ties = report.file_bytes, report.ties_before
    wrong = {
        "validation loss": "" if report.validation_loss < loss[1] else better,  # so put, NaN fails too
        "ties": "" if ties and ties == report.ties_after else "There should be some, and they should last.",
        "checkpoint bytes": "" if tied < untied else "What is tied should be saved once.",
        "from the file": report.resumed_differences and "Training should go on in the same way.",
        "train step": report.traces != 1 and "It should be traced once.",
    }
    return tuple(f"{name}: {report.rows()[name]}. {should}" for name, should in wrong.items() if should)


def run(
    *, steps: int, seed: int = 0, quick: bool = False, sizes: Sizes | None = None, save: FilePath | None = None
) -> Report:
    """Trains a language model with tied weights on the help texts of Python, and reports what came of it.

    Before the last steps it saves a checkpoint, to `save` or to a file that is deleted in the end, loads it, and takes
    those steps twice: as if nothing had been, and from what was loaded. A quick run writes less. What has to be
    installed first is said by an `ImportError`.
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
    sizes, resumed = sizes or Sizes(), max(1, min(20, steps // 2))
    compared = "the first step" if quick else "a model that knows no context"
    sys.stderr.write(ANNOUNCEMENT.format(steps=steps, compared=compared, resumed=resumed))
    text = python_help()
    training = Training(text.train, sizes, steps=steps, seed=seed)
    before = st.ties(training.start.model)
    tokens, bar = sizes.batch * sizes.context, {"unit": "tokens", "unit_scale": True}
    with tempfile.TemporaryDirectory() as folder, tqdm(total=steps * tokens, desc="training", **bar) as shown:
        first = training.advance(training.start, steps - resumed, shown)
        path = os.path.join(folder, "checkpoint.safetensors") if save is None else save
        reloaded, file_bytes = reload(first.checkpoint, path)
        last = training.advance(first.checkpoint, steps, shown)
    with tqdm(total=resumed * tokens, desc="from the file", **bar) as shown:
        again = training.advance(reloaded, steps, shown)
    model, state, _, _, key, *_ = last.checkpoint
    twin = st.untie(model)
    prompt = text.validation[: sizes.context]
    return Report(
        quick=quick,
        first_loss=float([*first.losses, *last.losses][0]),
        validation_loss=mean_loss(model, text.validation, sizes),
        unigram_loss=unigram_loss(text),
        prompt=prompt.tobytes().decode(errors="replace"),
        sample=continuation(model, prompt, 100 if quick else 400, key=key).decode(errors="replace"),
        ties_before=before,
        ties_after=st.ties(model),
        parameters=st.count_parameters(model),
        parameters_untied=st.count_parameters(twin),
        optimizer_bytes=sum(leaf.nbytes for leaf in st.tree.leaves(state)),
        optimizer_bytes_untied=sum(leaf.nbytes for leaf in st.tree.leaves(make_optimizer(steps).init(twin))),
        traces=training.traces,
        bytes_per_second=(steps - 1) * tokens / (first.seconds + last.seconds),
        file_bytes=file_bytes,
        resumed_steps=len(again.losses),
        resumed_differences=differences(last, again),
    )
