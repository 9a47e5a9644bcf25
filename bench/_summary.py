"""The benchmarks in three lines: what stands above all tables."""

from . import _libraries, dispatch, serialising, training
from ._measuring import Measured
from ._models import LAYERS, NO_TIES
from ._names import BY_HAND, EQUINOX, FLAT, JAX, NNX, SHAREDTREE
from ._results import Results

_SIZES = (24, 204, 1004)


def summary(run: Results) -> str:
    """Three lines about one run; those whose cases it has not got are left out."""
    lines: list[str] = []
    calls = [run.cases.get(dispatch.name_of(size, NO_TIES, LAYERS)) for size in _SIZES]
    if all(calls):
        found = [case for case in calls if case is not None]
        lines.append(
            f"A call of `{SHAREDTREE}` on linear layers of 24 to 1,004 arrays costs {_range(found, SHAREDTREE, FLAT)} "
            f"of `{FLAT}`, {_range(found, SHAREDTREE, JAX)} of `{JAX}` on the model; `{EQUINOX}` costs "
            f"{_range(found, EQUINOX, SHAREDTREE)}, `{NNX}` {_range(found, NNX, SHAREDTREE)} of it."
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
