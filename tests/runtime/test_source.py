import subprocess
from dataclasses import replace

import numpy as np
import pytest

from korch.errors import CompileError
from korch.measure.toolchain import find_compiler
from korch.provider.provider import Kernel
from korch.runtime.bind import bind_steps
from korch.runtime.source import print_plan
from korch.system.libraries import find_library
from korch.system.native import native_text
from korch.tile.llvm.constants import llvm_string
from tests.runtime import runtime_plans as plans


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


def test_the_artifacts_sources_compile_alone(make_artifact, tmp_path):
    artifact = make_artifact(plans.state())
    names = ("", "_apart", "_cores", "_interrupts", "_oversubscription", "_plan", "_tasks", "_team", "_wait")
    headers = {f"korch{name}.h" for name in names}
    (plan,) = {*artifact.sources} - {"k_state.cpp", "korch_runtime.cpp", "plans.ll"} - headers
    assert plan.startswith("plan_")
    for name, text in artifact.sources.items():
        (tmp_path / name).write_text(text)
    found = find_compiler()
    command = [*found.command, *found.openmp, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror"]
    for name in ("korch_runtime.cpp", "k_state.cpp"):
        subprocess.run([*command, name], cwd=tmp_path, check=True)


def test_the_headers_that_kernels_include_are_among_the_sources(make_artifact):
    plan = plans.scalar()
    kernel = plan.steps[0].kernel
    including = replace(kernel, source='#include "korch_units.h"\n' + kernel.source)
    artifact = make_artifact(replace(plan, steps=(replace(plan.steps[0], kernel=including),)))
    assert artifact.sources["korch_units.h"] == native_text("korch_units.h")


def test_the_interface_is_plain_c(tmp_path):
    (tmp_path / "use.c").write_text('#include "korch.h"\nint main(void) { return 0; }\n')
    (tmp_path / "korch.h").write_text(native_text("korch.h"))
    command = [*find_compiler().command, "-x", "c", "-std=c99", "-pedantic", "-Wall", "-Werror"]
    subprocess.run([*command, "-fsyntax-only", "use.c"], cwd=tmp_path, check=True)


def test_a_source_that_does_not_compile_is_a_clear_error(make_artifact):
    plan = plans.scalar()
    bad = replace(plan.steps[0], kernel=Kernel("k_broken", "int k_broken_run(;\n"))
    with pytest.raises(CompileError, match="the compiler refused a source"):
        make_artifact(replace(plan, steps=(bad,)))


@pytest.mark.skipif(find_library("dnnl") is None, reason="oneDNN is not installed")
def test_kernels_find_the_libraries_that_they_call(make_executable, tmp_path):
    plan = plans.scalar()
    declaration = 'extern "C" const char *dnnl_status2str(int);\n'
    body = plans.run_source("k_dnnl", "*(float *)buffers[1] = dnnl_status2str(0)[0];")
    kernel = Kernel("k_dnnl", declaration + body, libraries=("dnnl",))
    executable = make_executable(replace(plan, steps=(replace(plan.steps[0], kernel=kernel),)))
    assert executable.plan.libraries[0] == "dnnl"
    assert executable(np.array(0, np.float32))[0] == ord("s")  # success
