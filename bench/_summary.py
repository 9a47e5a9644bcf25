"""The benchmarks in three lines: what stands above all tables."""

from . import _libraries, dispatch, serialising, training
from ._kinds import LAYERS, NNX as NNX_KIND
from ._measuring import Measured
from ._names import BY_HAND, EQUINOX, FLAT, IN_PLACE, JAX, NNX, SHAREDTREE
from ._results import Results

_SIZES = (24, 204, 1004)


def summary(run: Results) -> str:
    """Three lines about one run; those whose cases it has not got are left out."""
    lines: list[str] = []
    calls, in_place = (
        [run.cases[name] for size in _SIZES if (name := dispatch.name_of(size, kind)) in run.cases]
        for kind in (LAYERS, NNX_KIND)
    )
    if calls and in_place:
        lines.append(
            f"A call of `{SHAREDTREE}` on linear layers of 24 to 1,004 arrays costs {_range(calls, SHAREDTREE, FLAT)} "
            f"of `{FLAT}`, `{JAX}` {_range(calls, JAX, FLAT)}, `{EQUINOX}` {_range(calls, EQUINOX, FLAT)}; on a model "
            f"of `{NNX_KIND}`, in place, {_range(in_place, IN_PLACE, FLAT)}, `{NNX}` {_range(in_place, NNX, FLAT)}."
        )
    if training.NAME in run.cases:
        step = run.cases[training.NAME].ratio(SHAREDTREE, BY_HAND)
        lines.append(f"A training step with a tied weight costs {step:.2f} of one in which it is tied by hand.")
    save, load = (run.cases.get(name(512)) for name in (serialising.save_name, serialising.load_name))
    if save is not None and load is not None:
        ours, raw = _libraries.SHAREDTREE, _libraries.RAW
        lines.append(
            f"Saving 512 MiB with digests costs {save.ratio(ours, raw):.2f}, loading it "
            f"{load.ratio(ours, raw):.2f} of writing and reading the raw bytes."
        )
    return "\n".join(f"- {line}" for line in lines)


def _range(cases: list[Measured], one: str, other: str) -> str:
    ratios = [case.ratio(one, other) for case in cases]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
