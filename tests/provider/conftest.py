import pytest

from tests.support.matrix_units import matrix_units


@pytest.fixture(scope="session")
def units(target, tmp_path_factory):
    """A target with matrix units and a small cache, so that blocks, groups and parts are many, and its compiler."""
    return matrix_units(target, tmp_path_factory.mktemp("units"))
