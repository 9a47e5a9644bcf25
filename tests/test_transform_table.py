"""The page of transforms says what each does, found by running it."""

import jax
import pytest

from tests import transform_table
from tests.processes import run


@pytest.mark.slow
def test_the_page_says_what_the_transforms_do():
    """In a process with eight devices."""
    # Other tests register transforms of their own.
    code = (
        "from tests import transform_table as t; assert t.SCENARIOS.keys() == t.NAME_OF_ADAPTER.keys(); "
        "print(t.table())"
    )
    table = run(code, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu")
    written = transform_table.PAGE.read_text(encoding="utf-8")
    assert written == transform_table.page_with(table.strip() + "\n"), "python -m tests.transform_table"


def test_each_is_tested_where_the_table_says():
    folder = transform_table.PAGE.parents[1] / "tests"
    for transform, scenario in transform_table.SCENARIOS.items():
        text = (folder / f"{scenario.tested}.py").read_text(encoding="utf-8")
        names = {transform.__name__, transform_table.name_of(transform).rpartition(".")[2]}
        assert any(name in text for name in names), (names, scenario.tested)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.vjp, jax.lax.scan, jax.lax.cond])
def test_vanilla_transforms_do_none_of_it(transform):
    """The scenarios can fail."""

    def vanilla(transform, **_):
        return transform

    inside, outside, aliases, treatments, in_place = transform_table.row(transform, vanilla)
    assert (inside, outside, aliases, in_place) == ("no",) * 4
    assert treatments in ("no", "alike")


def test_nothing_is_silently_not_written_back():
    _, _, rest = transform_table.PAGE.read_text(encoding="utf-8").partition(transform_table.BEGIN)
    table, _, _ = rest.partition(transform_table.END)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line]
    silent = {row[0].strip("`") for row in rows if row[5] == "no"}
    assert silent == {"jax.eval_shape", "equinox.filter_eval_shape", "jax.make_jaxpr", "equinox.filter_make_jaxpr"}
    assert all(row[i] != "no" for row in rows for i in (1, 2, 3, 4, 6))
