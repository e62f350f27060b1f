import pytest

from korch.measure.compiler import Builder
from korch.runtime.build import Origin, build
from korch.runtime.executable import Executable
from tests.runtime.runtime_plans import TARGET


@pytest.fixture(scope="session")
def builder(cache_folder):
    return Builder(TARGET.isa, cache_folder)


@pytest.fixture
def make_artifact(builder):
    return lambda plan, **fields: build(plan.graph, plan.steps, TARGET, builder, Origin(**fields))


@pytest.fixture
def make_executable(make_artifact):
    return lambda plan, **fields: Executable(make_artifact(plan, **fields))
