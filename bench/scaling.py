"""What the library adds for each leaf and each device, as ratios to what JAX and Orbax need themselves: a table.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m bench.scaling

A model of small arrays, two of which are tied, under `st.jit`, beside a flat list of the same arrays under `jax.jit`;
and its checkpoint beside Orbax's own of that list. What is counted is the processor time of the calling thread, the
least of many calls that take turns, and bytes on disk. `docs/scaling.md` has the outcome.
"""

import math
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import sharedtree as st

ROUNDS = 40


class Layer(eqx.Module):
    """Two leaves."""

    weight: jax.Array
    bias: jax.Array


def model_of(num_leaves: int, sharding: NamedSharding) -> list[Layer]:
    """Layers, of which the first comes again at the end."""
    arrays = [jax.device_put(np.full(8, i, np.float32), sharding) for i in range(num_leaves)]
    layers = [Layer(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]
    return [*layers, layers[0]]


def seconds(call: Callable[[], Any]) -> float:
    """Of the processor, in this thread."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def least(*calls: Callable[[], Any]) -> list[float]:
    """The least of each, in turns."""
    rounds = [[seconds(call) for call in calls] for _ in range(ROUNDS)]
    return [min(each) for each in zip(*rounds, strict=True)]


def ours(model: Any) -> Any:
    return st.tree.map(lambda x: x + 1, model)


def theirs(leaves: list[jax.Array]) -> list[jax.Array]:
    return [x + 1 for x in leaves]


def calls(num_leaves: int, num_devices: int) -> tuple[float, float]:
    """A warm call, and tracing and lowering: how often as long as JAX's own."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("d",))
    model = model_of(num_leaves, NamedSharding(mesh, P("d")))
    leaves = st.tree.leaves(model)
    assert len(leaves) == num_leaves
    # A new function each time, of which JAX has no trace.
    traced = min(
        seconds(lambda: st.jit(lambda model: ours(model)).lower(model))
        / seconds(lambda: jax.jit(lambda leaves: theirs(leaves)).lower(leaves))
        for _ in range(3)
    )
    with_ties, flat = st.jit(ours), jax.jit(theirs)
    changed = with_ties(model)
    assert changed[0] is changed[-1]
    np.testing.assert_array_equal(changed[-1].bias, flat(leaves)[1])
    one, other = least(lambda: with_ties(model), lambda: flat(leaves))
    return one / other, traced


def bytes_added(num_leaves: int, num_devices: int) -> int:
    """What a checkpoint has beside Orbax's own of the same arrays: the manifest."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("d",))
    model = model_of(num_leaves, NamedSharding(mesh, P("d")))
    with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
        st.orbax.save(manager, 0, model)
        manager.wait_until_finished()
        manifests = [path for path in pathlib.Path(folder).rglob("*") if path.is_file() and _is_manifest(path)]
        (manifest,) = manifests
        return manifest.stat().st_size


def _is_manifest(path: pathlib.Path) -> bool:
    return path.read_bytes().startswith(b'{"sharedtree"')


def main() -> None:
    """Prints the table."""
    say = sys.stdout.write
    say("| leaves | devices | warm call | trace and lowering | manifest, bytes a leaf |\n|---|---|---|---|---|\n")
    for num_leaves, num_devices in [(250, 1), (1_000, 1), (1_000, 2), (1_000, 4), (1_000, 8), (2_000, 8)]:
        call, traced = calls(num_leaves, num_devices)
        manifest = math.ceil(bytes_added(num_leaves, num_devices) / num_leaves)
        say(f"| {num_leaves:,} | {num_devices} | {call:.2f} | {traced:.2f} | {manifest} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
