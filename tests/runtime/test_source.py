from dataclasses import replace

import numpy as np
import pytest

from korch.errors import CompileError
from korch.provider.provider import Kernel
from korch.runtime.bind import bind_steps
from korch.runtime.source import print_plan
from korch.tile.llvm.constants import llvm_string
from korch.tile.llvm.print import MARK
from tests.runtime import runtime_plans as plans
from tests.support.c_code import program_of


@pytest.mark.parametrize(
    ("text", "constant"),
    [("x", r'c"x\00"'), ('a"b\\c', r'c"a\22b\5Cc\00"'), ("??/\n1", r'c"??/\0A1\00"'), ("é", r'c"\C3\A9\00"')],
)
def test_names_become_constants(text, constant):
    assert llvm_string(text) == constant


def test_names_survive_the_library(make_executable):
    name = 'in "1"\\n??/é\n'
    builder, x = plans.new_graph(**{name: "f32[2]"})
    builder.output("out:0", builder.add("neg", [x]))
    graph = builder.freeze()
    steps = (plans.step(graph, [graph.outputs[0][1]], plans.loop("k_n", 2, "o0[i] = -i0[i];")),)
    executable = make_executable(plans.Plan(graph, steps, lambda x: (-x,)))
    (found,) = executable.run(["out:0"], {name: np.ones(2, np.float32)})
    np.testing.assert_array_equal(found, [-1, -1])


def test_a_plan_is_tables_that_depend_on_nothing_but_the_plan(target):
    plan = plans.state()
    name, text = print_plan(plan.graph, bind_steps(plan.graph, plan.steps), target)
    assert (name, text) == print_plan(plan.graph, bind_steps(plan.graph, plan.steps), target)
    assert text.count("declare void @k_state_create()") == 1
    assert "ptr @k_state_run, ptr null, ptr null, ptr @k_state_create, ptr @k_state_destroy, i64 2, i64 1 }" in text
    assert f"@{name} = hidden constant" in text
    assert "define" not in text


def test_an_artifacts_objects_are_those_of_its_sources(make_artifact, builder):
    artifact = make_artifact(plans.state())
    (plan,) = {*artifact.sources} - {"k_state.ll", "plans.ll"}
    assert plan.startswith("plan_")
    assert artifact.objects == {"generic": builder.objects(list(artifact.sources.values()))}


def test_the_interface_is_plain_c(tmp_path):
    text = '#include "korch.h"\nint main(void) { return 0; }\n'
    program_of(text, tmp_path, flags=("-std=c99", "-pedantic"))


def test_a_source_that_does_not_compile_is_a_clear_error(make_artifact):
    plan = plans.scalar()
    bad = replace(plan.steps[0], kernel=Kernel("k_broken", f"{MARK}generic\ndefine nothing\n"))
    with pytest.raises(CompileError, match="the compiler refused a source"):
        make_artifact(replace(plan, steps=(bad,)))
