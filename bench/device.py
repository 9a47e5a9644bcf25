"""What sharing costs and saves on the default device, above all on a GPU: dispatch, donation, pass-through and files.

    python -m bench.device                    prints four tables, in less than four minutes
    python -m bench.device --quick            small sizes, to see that everything runs
    python -m bench.device --out FILE.json    also writes every number

This file imports JAX, Equinox, optax and this checkout, and nothing that has to be installed besides.

Each measurement runs in a process of its own, since a process has one peak of device memory and can't forget it. Within
a process the implementations take turns, as in all of these benchmarks (`_measuring`), and their results must be equal.

- **Dispatch.** A tied model of 200 arrays takes many steps without waiting, as a training loop does. *host* is the time
  until a call returns, *step* the time until its result is there, divided by the number of steps. The short computation
  ends before the next call comes, so a step costs what the host costs. Behind the long one the host should disappear:
  then all implementations have the same *step*.
- **Donation.** The peak of device memory over training steps with Adam whose model and optimizer state are donated. The
  vanilla program gets the tied array twice and can't donate it.
- **Pass-through.** A jitted function returns its large model unchanged beside a number. Equinox's copies the model.
- **Files.** A model of 2 GiB is saved from the device and loaded onto it, beside the raw bytes.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sharedtree as st

from ._measuring import TIME, Case, Effort, Measured, Subject, measure
from ._names import BY_HAND, EQUINOX, SHAREDTREE

Numbers = dict[str, dict[str, float]]
"""Implementation → measurement → number."""

TWIN = "equinox.filter_jit, untied twin"
NOT_DONATED = "equinox.filter_jit, nothing donated"


class Sizes(NamedTuple):
    """Sizes of all parts, chosen for a GPU with 40 GB or more.

    Attributes:
        short_width: width of the layers of the short computation.
        long_width: width of the layers of the long one. Its device time should be several times the host's.
        steps: calls in a row, without waiting.
        rows: rows of the tied table in the donation part, where it is most of the model.
        model_bytes: size of the model that passes through.
        file_bytes: size of the saved model.
    """

    short_width: int
    long_width: int
    steps: int
    rows: int
    model_bytes: int
    file_bytes: int


FULL = Sizes(8, 1024, 100, 262_144, 2**30, 2**31)
QUICK = Sizes(8, 64, 5, 512, 2**20, 2**21)
_TABLE_WIDTH = 1024
_NUM_LAYERS = 99  # with a weight and a bias each; the table and the scale make it 200 arrays


class Tied(eqx.Module):
    """Layers between a table and an output layer that has the same weight.

    Attributes:
        table: the embedding, of shape (rows, width).
        layers: layers of shape (width, width).
        scale: a vector of shape (width,).
        head: the weight of the output layer, of shape (rows, width).
    """

    table: jax.Array
    layers: list[eqx.nn.Linear]
    scale: jax.Array
    head: jax.Array

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Gives logits of shape (tokens, rows) for the tokens, which are int32 of shape (tokens,)."""
        hidden = self.table[tokens]
        for layer in self.layers:
            hidden = hidden + jnp.tanh(jax.vmap(layer)(hidden))
        return (hidden * self.scale) @ self.head.T


def make_model(width: int, rows: int, num_layers: int = _NUM_LAYERS, *, tied: bool = True) -> Tied:
    """Makes a float32 model on the default device. If it is not tied, the head is a copy of the table."""
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    table = jax.random.normal(keys[-1], (rows, width)) / width
    layers = [eqx.nn.Linear(width, width, key=key) for key in keys[:-1]]
    return Tied(table, layers, jnp.ones(width), table if tied else table.copy())


# Dispatch


def _dispatch(width: int, steps: int) -> Numbers:
    """Measures the host's part and the whole of a step, by three implementations."""
    tokens = jnp.arange(256, dtype=jnp.int32) % 64

    def step(model: Tied) -> jax.Array:
        return model(tokens).sum()

    by_hand = make_model(width, rows=64)
    arrays, treedef = jax.tree.flatten((by_hand.layers, by_hand.scale))

    def flat_step(table: jax.Array, arrays: list[jax.Array]) -> jax.Array:
        return step(Tied(table, *jax.tree.unflatten(treedef, arrays), head=table))

    jitted_flat = jax.jit(flat_step)
    calls: dict[str, Callable[[], jax.Array]] = {
        BY_HAND: lambda: jitted_flat(by_hand.table, arrays),
        SHAREDTREE: _call_with_model(st.jit(step), by_hand),
        EQUINOX: _call_with_model(eqx.filter_jit(step), by_hand),
    }
    return _in_turns({name: _looping(call, steps) for name, call in calls.items()}, ["host", "step"])


def _call_with_model(function: Callable[[Tied], jax.Array], model: Tied) -> Callable[[], jax.Array]:
    return lambda: function(model)


def _looping(call: Callable[[], jax.Array], steps: int) -> Subject:
    def run() -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(steps):
            result = call()
        returned = time.perf_counter()
        result.block_until_ready()
        return {"host": (returned - start) / steps, "step": (time.perf_counter() - start) / steps}

    return Subject(run, lambda: [call()], measures=True)


def _in_turns(subjects: dict[str, Subject], measurements: list[str], rounds: int = 7) -> Numbers:
    """Measures subjects in turns, and returns the median of each measurement."""
    first = next(iter(subjects))
    case = Case(
        name="device",
        group="device",
        parameters={},
        implementations={name: lambda subject=subject: subject for name, subject in subjects.items()},
        reference=first,
        effort=Effort(quick=False, rounds=rounds, seconds=rounds),
        units=dict.fromkeys(measurements, "s"),
        tolerance=1e-3,  # XLA may order the sums of two programs differently
    )
    measured: Measured = measure(case)
    return {name: {each: measured.median(name, each) for each in measurements} for name in subjects}


# Donation


def _donation(name: str, rows: int) -> Numbers:
    """Takes three training steps, and returns the most memory that the device had in use."""
    adam = optax.adam(1e-3)
    model = make_model(_TABLE_WIDTH, rows, num_layers=2, tied=name != TWIN)
    tokens = jnp.arange(16, dtype=jnp.int32)

    def loss_fn(model: Tied) -> jax.Array:
        return jax.nn.logsumexp(model(tokens), axis=-1).mean()

    if name == SHAREDTREE:
        optimizer = st.optimizer(adam)

        @st.jit(donate_argnums=(0, 1))
        def step(model: Tied, state: Any) -> tuple[Tied, Any, jax.Array]:
            loss, gradient = st.value_and_grad(loss_fn)(model)
            updates, state = optimizer.update(gradient, state, model)
            return st.apply_updates(model, updates), state, loss

    else:
        optimizer = adam

        # Donating the tied model is an error in Equinox, too: JAX would be given one buffer twice.
        @eqx.filter_jit(donate="all" if name == TWIN else "none")
        def step(model: Tied, state: Any) -> tuple[Tied, Any, jax.Array]:
            loss, gradient = eqx.filter_value_and_grad(loss_fn)(model)
            updates, state = optimizer.update(gradient, state, model)
            return eqx.apply_updates(model, updates), state, loss

    state = jax.jit(optimizer.init)(eqx.filter(model, eqx.is_array)) if name != SHAREDTREE else optimizer.init(model)
    for _ in range(3):
        model, state, loss = step(model, state)
    loss.block_until_ready()
    parameters = sum(array.nbytes for array in st.tree.leaves(model))
    return {name: {"peak": float(_peak_bytes()), "parameters": float(parameters), "loss": float(loss)}}


def _peak_bytes() -> int:
    """The most bytes that the device had in use. A CPU does not know, so there it is the peak of the process."""
    statistics = jax.devices()[0].memory_stats()
    if statistics:
        return statistics["peak_bytes_in_use"]
    from .memory import _resident  # here, since it imports the demo, which needs tqdm

    return _resident("VmHWM")


# Pass-through


def _pass_through(model_bytes: int) -> Numbers:
    """Measures a function that returns its model and a number."""
    arrays = [jnp.full(model_bytes // 16 // 4, float(i)) for i in range(16)]  # float32
    layer = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    layers = [eqx.tree_at(lambda layer: layer.weight, layer, array) for array in arrays[2:]]
    large = Tied(arrays[0], layers, arrays[1], head=arrays[0])

    def evaluate(model: Tied) -> tuple[Tied, jax.Array]:
        return model, model.scale[0] + model.table[0]

    subjects = {}
    for name, jit in ((EQUINOX, eqx.filter_jit), (SHAREDTREE, st.jit)):
        function = jit(evaluate)

        def run(function: Callable[[Tied], tuple[Tied, jax.Array]] = function) -> None:
            jax.block_until_ready(jax.tree.leaves(eqx.filter(function(large), eqx.is_array)))

        subjects[name] = Subject(run, lambda function=function: [function(large)[1]])
    return _in_turns(subjects, [TIME])


# Files


def _files(file_bytes: int) -> Numbers:
    """Saves a model from the device and loads it onto the device, beside copying the raw bytes there and back."""
    num_arrays = 32
    arrays = [jnp.full(file_bytes // num_arrays // 4, float(i)) for i in range(num_arrays)]  # float32
    jax.block_until_ready(arrays)
    numbers: Numbers = {"raw bytes": {}, "sharedtree": {}}
    with tempfile.TemporaryDirectory() as folder:
        raw, saved = pathlib.Path(folder, "raw"), pathlib.Path(folder, "model.safetensors")
        numbers["raw bytes"]["save"] = _seconds(lambda: _write_raw(raw, arrays))
        numbers["sharedtree"]["save"] = _seconds(lambda: st.save(saved, arrays))
        numbers["raw bytes"]["load"] = _seconds(lambda: _read_raw(raw, arrays))
        numbers["sharedtree"]["load"] = _seconds(lambda: jax.block_until_ready(st.load(saved)))
        loaded = st.load(saved)
        assert all(jnp.array_equal(a, b) for a, b in zip(arrays, loaded, strict=True))
    return numbers


def _write_raw(path: pathlib.Path, arrays: list[jax.Array]) -> None:
    with path.open("wb") as file:
        for array in arrays:
            file.write(np.asarray(array).data)
        file.flush()
        os.fsync(file.fileno())  # as `st.save` does


def _read_raw(path: pathlib.Path, like: list[jax.Array]) -> None:
    with path.open("rb") as file:
        parts = [np.frombuffer(file.read(array.nbytes), array.dtype) for array in like]
    jax.block_until_ready(jax.device_put(parts))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# All of them


PARTS: dict[str, Callable[[Sizes], Numbers]] = {
    "dispatch, short": lambda sizes: _dispatch(sizes.short_width, sizes.steps),
    "dispatch, long": lambda sizes: _dispatch(sizes.long_width, sizes.steps),
    f"donation, {SHAREDTREE}": lambda sizes: _donation(SHAREDTREE, sizes.rows),
    f"donation, {TWIN}": lambda sizes: _donation(TWIN, sizes.rows),
    f"donation, {NOT_DONATED}": lambda sizes: _donation(NOT_DONATED, sizes.rows),
    "pass-through": lambda sizes: _pass_through(sizes.model_bytes),
    "files": lambda sizes: _files(sizes.file_bytes),
}


def main() -> None:
    """Runs every part in a process of its own, and prints its numbers."""
    parser = argparse.ArgumentParser(prog="python -m bench.device", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: see that everything runs")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json", help="where to write every number")
    parser.add_argument("--part", choices=PARTS, help="one part in this process, printed as JSON")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](sizes)))
        return

    device, start = _describe_device(), time.perf_counter()
    print(f"{device}; jax {jax.__version__}, equinox {eqx.__version__}, sharedtree {st.__version__}")
    results: dict[str, Numbers] = {}
    for part in PARTS:
        results[part] = _run_alone(part, quick=arguments.quick)
        for implementation, numbers in results[part].items():
            print(f"{part:45} {implementation:38} {_in_words(numbers)}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")
    if arguments.out:
        arguments.out.write_text(json.dumps({"device": device, **results}, indent=2))


def _describe_device() -> str:
    # Asked in a process that ends, so that this one holds no memory of the device while the parts are measured.
    program = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind, sep=', ')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def _run_alone(part: str, *, quick: bool) -> Numbers:
    command = [sys.executable, "-m", "bench.device", "--part", part, *(["--quick"] if quick else [])]
    done = subprocess.run(
        command, cwd=pathlib.Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command[1:])}` failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _in_words(numbers: dict[str, float]) -> str:
    words = []
    for name, number in numbers.items():
        if name in ("peak", "parameters"):
            words.append(f"{name} {number / 2**20:,.0f} MiB")
        elif name == "loss":
            words.append(f"{name} {number:.4f}")
        else:
            words.append(f"{name} {number * 1e6:,.1f} µs" if number < 1e-2 else f"{name} {number:.3f} s")
    return ", ".join(words)


if __name__ == "__main__":
    main()
