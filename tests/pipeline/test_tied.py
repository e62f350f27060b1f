"""A table of embeddings that is also the weight of a product is stored once."""

import ml_dtypes
import numpy as np
import pytest

import korch
from korch.measure.record import Failed
from korch.primitive import tied
from korch.search.ledger import Ledger
from korch.target import OF_COMPONENTS, detect_target
from tests.support.models import parsed

ROWS, COLUMNS = 500, 64
TEXT = """(int64[1,n] ids, {t}[1,n,64] x) => ({t}[1,n,64] y, {t}[1,n,500] logits) {{
    y = Gather(table, ids)
    scaled = Mul(x, scale)
    weight = Transpose <perm = [1, 0]> (table)
    logits = MatMul(scaled, weight)
}}"""


def optimized(cache_folder, kind: str = "float", **more):
    rng, dtype = np.random.default_rng(0), np.float32 if kind == "float" else ml_dtypes.bfloat16
    table = rng.standard_normal((ROWS, COLUMNS)).astype(dtype)
    model = parsed(TEXT.format(t=kind), table=table, scale=rng.uniform(0.5, 2, COLUMNS).astype(dtype))
    return model, table, korch.optimize(model, measure=False, threads=1, cache_folder=cache_folder, **more)


@pytest.fixture
def of_any_size(monkeypatch) -> None:
    monkeypatch.setattr(tied, "LEAST_BYTES", 1)
    monkeypatch.setattr("korch.pipeline.tied.MOST_LOSS", 10)  # the product takes no longer than the rows here


@pytest.mark.parametrize("kind", ["float", "bfloat16"])
@pytest.mark.parametrize("n", [1, 9])
def test_a_table_is_stored_once(of_any_size, cache_folder, tmp_path, kind, n) -> None:
    if kind == "bfloat16" and n > 1 and detect_target(1, "").isa not in OF_COMPONENTS:
        pytest.skip("products of several rows read the table in float32 here")
    _, table, executable = optimized(cache_folder, kind, shapes={"n": n})
    executable.save(tmp_path / "tied.korch")
    most = 1.1 * table.nbytes + 4 * COLUMNS  # panels may be padded
    assert executable.plan.weights_bytes < most < 2 * table.nbytes
    assert (tmp_path / "tied.korch").stat().st_size > table.nbytes
    ids = np.random.default_rng(1).integers(-ROWS, ROWS, (1, n))
    y, _ = korch.load(tmp_path / "tied.korch")(ids, np.zeros((1, n, COLUMNS), table.dtype))
    np.testing.assert_array_equal(y, table[ids])


def test_a_small_table_is_stored_as_is_fastest(cache_folder) -> None:
    _, table, executable = optimized(cache_folder, shapes={"n": 1})
    assert executable.plan.weights_bytes >= 2 * table.nbytes


def test_in_a_range_plans_share_the_table(of_any_size, cache_folder) -> None:
    _, table, executable = optimized(cache_folder, shapes={"n": range(1, 20)})
    assert executable.report.shared_weights_bytes < 1.1 * table.nbytes + 4 * COLUMNS
    ids = np.random.default_rng(1).integers(0, ROWS, (1, 7))
    np.testing.assert_array_equal(executable(ids, np.zeros((1, 7, COLUMNS), np.float32))[0], table[ids])


def test_a_table_of_equal_elements_is_a_part_of_the_kernel(of_any_size, cache_folder) -> None:
    model = parsed(
        "(int64[n] k, float[8] x) => (float[n, 8] y) { r = Gather(table, k) y = Add(r, x) }",
        table=np.ones((3, 8), np.float32),
    )
    executable = korch.optimize(model, shapes={"n": 2}, measure=False, threads=1, cache_folder=cache_folder)
    np.testing.assert_array_equal(executable(np.array([0, 2]), np.zeros(8, np.float32))[0], np.ones((2, 8)))


@pytest.mark.parametrize("record", [Failed("compile", "no"), None])  # None if the time is over
def test_a_table_keeps_its_layout_if_rows_of_panels_are_not_measured(
    of_any_size, cache_folder, monkeypatch, record
) -> None:
    calls = []

    def measure(self, candidates, deadline):
        calls.extend(candidates)
        return [record]

    monkeypatch.setattr(Ledger, "is_measured", lambda self, candidate: True)
    monkeypatch.setattr(Ledger, "measure", measure)
    _, table, executable = optimized(cache_folder, shapes={"n": 1})
    assert [c.provider for c in calls] == ["generated"] * len(calls) and calls
    assert executable.plan.weights_bytes >= 2 * table.nbytes
