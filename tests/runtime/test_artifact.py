import copy
import errno
import hashlib
import json
import os
import pickle
import platform
import random
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest

import korch
from korch.errors import ArtifactError
from korch.records import plain
from korch.runtime import artifact as artifact_module
from korch.runtime import machine
from korch.runtime.artifact import archive_of, read_artifact
from korch.runtime.executable import Executable
from korch.runtime.machine import Requirements
from korch.runtime.record import ModelRecord
from korch.runtime.report import Report
from korch.target import REQUIRED_FLAGS
from korch.tile.llvm.isa import ISAS
from tests.runtime import runtime_plans as plans

MEMBERS = ("kernels-generic.a", "plan.json", "steps.json", "report.json", "weights.safetensors", "sources/plans.ll")


@pytest.fixture(scope="module")
def content(tmp_path_factory, builder):
    """The bytes of an artifact."""
    from korch.runtime.build import Origin, build

    folder = tmp_path_factory.mktemp("artifact")
    plan = plans.blocked_constant()
    built = build(
        plan.graph,
        plan.steps,
        plans.TARGET,
        builder,
        Origin(ModelRecord("/models/m.onnx", "0" * 64), {"status": "optimal", "gap": float("inf")}),
    )
    archive_of(built.with_report(Report(seconds=1.5))).write(folder / "plan.korch")
    return (folder / "plan.korch").read_bytes()


@pytest.fixture
def path(tmp_path, content):
    found = tmp_path / "plan.korch"
    found.write_bytes(content)
    return found


def message(path):
    with pytest.raises(ArtifactError) as caught:
        _ = Executable.load(path).report
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text.removeprefix(f"{path}: ")


def repack(path, **changes):
    """Write the archive anew with some members changed, and its checksums mended."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for name, change in changes.items():
        members[name] = change(members[name])
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if data is not None:
                archive.writestr(name, data)


def edit_manifest(path, change):
    def edit(data):
        manifest = json.loads(data)
        change(manifest)
        return json.dumps(manifest).encode()

    repack(path, **{"manifest.json": edit})


def member_span(path, name):
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(name)
    data = path.read_bytes()
    start = entry.header_offset + 30
    start += int.from_bytes(data[start - 4 : start - 2], "little")
    start += int.from_bytes(data[entry.header_offset + 28 : entry.header_offset + 30], "little")
    return start, start + entry.file_size


def test_an_artifact_is_read_as_it_was_written(path, content, tmp_path):
    found = read_artifact(path)
    assert found.report == Report(seconds=1.5)
    assert found.plan.model == ModelRecord("/models/m.onnx", "0" * 64)
    assert found.plan.certificate == {"status": "optimal", "gap": "inf"}
    assert found.plan.weights_bytes == (32 + 20) * 4
    archive_of(found).write(tmp_path / "again.korch")
    assert (tmp_path / "again.korch").read_bytes() == content


def test_the_plan_says_what_each_step_reads_writes_and_costs(path):
    mul, add = read_artifact(path).plan.steps
    assert (mul.symbol, mul.provider, mul.cost_ns, mul.bound_ns) == ("k_mul", "hand", 100.0, 10.0)
    assert [(p.layout, p.place) for p in mul.inputs] == [("abcd", "INPUT"), ("aBcd4b", "CONSTANT")]
    assert [(p.type, p.place) for p in add.outputs] == [("f32[1,5,2,2]", "OUTPUT")]
    assert mul.work_flop == 20
    assert mul.size_bytes == (20 + 32 + 20) * 4
    assert " = mul(" in mul.primitives


def test_the_report_is_saved_as_it_is_then(path, tmp_path):
    executable = Executable.load(path)
    executable.report = replace(executable.report, measured_ms=np.float32(0.5))
    executable.save(tmp_path / "again.korch")
    assert Executable.load(tmp_path / "again.korch").report == Report(seconds=1.5, measured_ms=0.5)


def test_the_file_can_be_read_by_others(path, tmp_path):
    before = os.umask(0o022)
    try:
        archive_of(read_artifact(path)).write(tmp_path / "again.korch")
    finally:
        os.umask(before)
    assert (tmp_path / "again.korch").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_byte_is_found_and_its_member_named(name, where, path):
    start, end = member_span(path, name)
    data = bytearray(path.read_bytes())
    data[start + int(where * (end - start - 1))] ^= 0x10
    path.write_bytes(data)
    assert message(path) == f"{name}: it is damaged. Build the artifact again"


def test_a_damaged_manifest_is_found(path):
    start, _ = member_span(path, "manifest.json")
    data = bytearray(path.read_bytes())
    data[start + 10] ^= 0x10
    path.write_bytes(data)
    assert message(path) == "it is truncated or damaged. Build the artifact again"


def test_any_flipped_bit_is_refused_or_changes_nothing(path, content):
    rng = random.Random(0)
    whole = read_artifact(path)
    with zipfile.ZipFile(path) as archive:
        directory = archive.start_dir
        heads = [e.header_offset + i for e in archive.infolist() for i in range(60)]
    for position in rng.sample([*range(directory, len(content)), *heads], 300):
        data = bytearray(content)
        data[position] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            found = read_artifact(path)
        except ArtifactError:
            continue
        assert (found.objects, found.plan) == (whole.objects, whole.plan)
        assert (found.sources, found.report) == (whole.sources, whole.report)
        np.testing.assert_array_equal(found.weights.array(0), whole.weights.array(0))


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.9, 0.99, 0.9999])
def test_a_truncated_file_is_refused(part, path, content):
    path.write_bytes(content[: int(part * len(content))])
    assert message(path) == "it is truncated or damaged. Build the artifact again"


@pytest.mark.parametrize("data", [b"", b"PK", b"PK\x03\x04" + b"\0" * 100, b"\x7fELF" * 50])
def test_another_file_is_no_artifact(data, path):
    path.write_bytes(data)
    assert message(path) == ("it is no Korch artifact; expected a file that `korch optimize` wrote")


def test_another_archive_is_no_artifact(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", '{"format": "other", "schema": 1}')
    assert message(path).startswith("it is no Korch artifact")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "[]")
    assert message(path).startswith("manifest.json: it can't be read: it is no object")


def test_a_member_that_was_exchanged_is_refused(path):
    repack(path, **{"sources/plans.ll": lambda data: data + b"; harmless\n"})
    assert message(path) == (
        "sources/plans.ll: it is not what was written: its checksum differs. Build the artifact again"
    )


def test_a_member_that_was_added_or_left_out_is_refused(path, content):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("sources/more.cpp", "")
    text = "manifest.json: its members are not those that its manifest names. "
    assert message(path) == text + "Build the artifact again"
    path.write_bytes(content)
    repack(path, **{"report.json": lambda data: None})
    assert message(path) == text + "Build the artifact again"


@pytest.mark.parametrize("name", ["weights.safetensors", "plan.json", "steps.json", "report.json"])
def test_an_artifact_without_a_member_that_it_needs_is_refused(name, path):
    kind = "xxh3" if name == "weights.safetensors" else "sha256"
    edit_manifest(path, lambda manifest: manifest[kind].pop(name))
    repack(path, **{name: lambda data: None})
    assert message(path) == f"manifest.json: {name} is missing. Build the artifact again"


def test_a_compressed_artifact_is_refused(path):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    assert message(path) == "it is truncated or damaged. Build the artifact again"


def test_another_schema_is_refused(path):
    edit_manifest(path, lambda manifest: manifest.update(schema=1))
    assert message(path) == ("its schema has version 1; expected version 10. Build it again with this version of Korch")


@pytest.mark.parametrize(("kind", "schema"), [("korch-shaped", 5), ("korch-stateful", 5), ("korch-hosted", 4)])
def test_what_was_written_before_weights_had_their_own_checksums_is_of_another_schema(kind, schema, path):
    manifest = {"format": kind, "schema": 1, "sha256": {}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
    with pytest.raises(ArtifactError, match=rf"its schema has version 1; expected version {schema}\. Build"):
        korch.load(path)


def test_a_plan_that_does_not_fit_the_schema_is_refused(path):
    data = {}

    def drop(content):
        plan = json.loads(content)
        del plan["threads"]
        data["plan"] = json.dumps(plan).encode()
        return data["plan"]

    repack(path, **{"plan.json": drop})
    digest = hashlib.sha256(data["plan"]).hexdigest()
    edit_manifest(path, lambda manifest: manifest["sha256"].update({"plan.json": digest}))
    text = message(path)
    assert text.startswith("plan.json: it can't be read: plan does not have the field threads")


@pytest.mark.parametrize("requires", [None, {}, {"system": "linux", "machine": "x", "cpu_flags": 1}])
def test_a_manifest_that_does_not_say_which_machine_is_refused(requires, path):
    edit_manifest(path, lambda manifest: manifest.update(requires=requires))
    assert message(path) == ("manifest.json: it does not say which machine it is for. Build the artifact again")


def test_another_architecture_is_refused(path):
    edit_manifest(path, lambda manifest: manifest["requires"].update(machine="s390x"))
    assert message(path) == (
        f"it was built for {sys.platform} on s390x, this is {sys.platform} on "
        f"{platform.machine()}. Build it on a machine of this kind"
    )


def test_a_cpu_that_lacks_instructions_is_refused(path, monkeypatch):
    edit_manifest(path, lambda manifest: manifest["requires"].update(cpu_flags=["avx512f", "bmi2", "fma"]))
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"fma", "sse2"}))
    assert message(path) == (
        "it was built for a CPU with avx512f, bmi2, which this CPU lacks. Build it on this machine"
    )
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset({"avx512f", "bmi2", "fma", "x"}))
    Executable.load(path)


def test_a_plan_for_products_of_bfloat16_is_refused_without_them(path, monkeypatch):
    edit_manifest(path, lambda manifest: manifest["requires"].update(cpu_flags=REQUIRED_FLAGS["avx512_bf16"]))
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(REQUIRED_FLAGS["avx512_vnni"]))
    assert message(path).startswith("it was built for a CPU with avx512_bf16, which this CPU lacks.")


def test_what_a_library_needs_follows_from_its_isa(make_artifact):
    artifact = make_artifact(plans.scalar())
    assert artifact.requirements == Requirements(sys.platform, platform.machine(), ())
    assert set(REQUIRED_FLAGS["avx2"]) < set(REQUIRED_FLAGS["avx512"])
    assert machine.cpu_flags()


def test_a_missing_file_is_one_clear_error(tmp_path):
    assert message(tmp_path / "none.korch") == "it can't be read: No such file or directory"
    assert message(tmp_path) == "it can't be read: Is a directory"


def full_disk(artifact, stream):
    stream.write(b"half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_failed_save_leaves_the_old_file(path, content, monkeypatch):
    executable = Executable.load(path)
    monkeypatch.setattr(artifact_module.Archive, "_write", full_disk)
    with pytest.raises(ArtifactError) as caught:
        executable.save(path)
    assert str(caught.value) == (
        f"{path}: it can't be written: No space left on device. "
        "Choose a name of a file in a folder that exists, may be written to and has room"
    )
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_save_leaves_the_old_file(path, content, monkeypatch):
    executable = Executable.load(path)

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact_module.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        executable.save(path)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_save_to_nowhere_is_refused(path, tmp_path):
    executable = Executable.load(path)
    with pytest.raises(ArtifactError, match="it can't be written: No such file or directory"):
        executable.save(tmp_path / "none" / "plan.korch")
    with pytest.raises(ArtifactError, match="it can't be written: it is no regular file"):
        executable.save(tmp_path)
    with pytest.raises(ArtifactError, match="/dev/null: it can't be written: it is no regular"):
        executable.save("/dev/null")


def test_a_save_through_a_link_writes_what_it_points_to(path, tmp_path):
    executable = Executable.load(path)
    link = tmp_path / "link.korch"
    link.symlink_to(path)
    executable.report = Report(rejected="new")
    executable.save(link)
    assert link.is_symlink()
    assert Executable.load(path).report.rejected == "new"


def test_what_json_has_no_word_for_is_refused_before_anything_is_written(path, content):
    executable = Executable.load(path)
    with pytest.raises(TypeError, match="a object can't be written as JSON"):
        executable.report = Report(rejected=object())
    executable.save(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("isa", ISAS)
def test_each_instruction_set_that_the_compiler_may_use_is_required(isa):
    names = {"bmi": "bmi1", "neon": "asimd", "dotprod": "asimddp"}
    names |= {"avx512vnni": "avx512_vnni", "avx512bf16": "avx512_bf16"}
    used = {names.get(name, name) for name in ISAS[isa].features if not name.startswith("amx")}
    assert used <= {*REQUIRED_FLAGS[isa], "prfchw"}
    assert set(REQUIRED_FLAGS) == set(ISAS)


def forge(path, name, text):
    """Exchange a member, with a checksum that fits."""
    digest = hashlib.sha256(text).hexdigest()
    repack(path, **{name: lambda _: text})
    if name != "manifest.json":
        edit_manifest(path, lambda manifest: manifest["sha256"].update({name: digest}))


DEEP = b'{"a":' + 40_000 * b"[" + 40_000 * b"]" + b"}"


@pytest.mark.parametrize("name", ["manifest.json", "plan.json", "report.json"])
@pytest.mark.parametrize(
    "text",
    [b"null", b"[]", b"3", b"{", 100_000 * b"[", DEEP, DEEP.replace(39_900 * b"[", b"").replace(39_900 * b"]", b"")],
    ids=["null", "list", "number", "cut", "deep and cut", "deep", "deeper than ours"],
)
def test_forged_json_is_refused(name, text, path):
    forge(path, name, text)
    assert message(path).startswith(f"{name}: it can't be read")


@pytest.mark.parametrize("forged", [None, 7, "text", [None], {"a": None}])
def test_a_forged_report_is_refused(forged, path):
    for name, value in plain(Report(rules=None)).items():
        forge(path, "report.json", json.dumps({name: forged}).encode())
        try:
            found = read_artifact(path).report
        except ArtifactError as error:
            assert f": report.json: it can't be read: report.{name}" in str(error)
        else:
            assert plain(getattr(found, name)) in (forged, float(forged) if forged == 7 else value)


RUN = """
import sys
import numpy as np
import korch

executable = korch.load(sys.argv[1])
executable(*(np.zeros(i.shape, i.dtype) for i in executable.get_inputs()))
print(*sys.modules)
"""


# All of Korch that a program needs which loads an artifact and runs it.
NEEDED_TO_RUN = """
    errors inputs loading primitive primitive.op primitive.types records runtime runtime.artifact runtime.each_isa
    runtime.executable runtime.library runtime.machine runtime.output_memory runtime.record runtime.recurrent
    runtime.runnable runtime.text runtime.weights system system.alignment system.cores system.files system.libraries
    system.native system.native_build system.scratch target
"""


def test_loading_and_running_imports_neither_onnx_nor_the_optimizer(path):
    names = subprocess.run([sys.executable, "-c", RUN, path], check=True, capture_output=True, text=True).stdout.split()
    assert {"onnx", "ortools", "pandas", "tqdm"}.isdisjoint(names)
    assert sorted(name.removeprefix("korch.") for name in names if name.startswith("korch.")) == NEEDED_TO_RUN.split()


def test_executables_for_several_sizes_import_neither_onnx_nor_the_optimizer():
    code = "import sys, korch.runtime.ranged; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"onnx", "ortools", "korch.primitive.graph", "korch.measure", "korch.tile"}.isdisjoint(names)


def test_the_report_of_another_version_is_refused(path):
    forge(path, "report.json", b'{"other": []}')
    text = message(path)
    assert text.startswith("report.json: it can't be read: report has the unknown field other")
    assert text.endswith(". Build the artifact again")


def test_steps_are_read_when_they_are_needed(path):
    forge(path, "steps.json", b"{")
    executable = Executable.load(path)
    (found,) = executable(np.ones((1, 5, 2, 2), np.float32))
    assert np.isfinite(found).all()
    assert executable.plan.kernel_count == len(executable.plan.steps) == 2
    with pytest.raises(ArtifactError, match=r"steps\.json: it can't be read: "):
        _ = executable.plan.steps[0]


@pytest.mark.parametrize("change", [lambda steps: steps[:1], lambda steps: steps[::-1]])
def test_steps_of_other_kernels_are_refused(change, path):
    with zipfile.ZipFile(path) as archive:
        steps = json.loads(archive.read("steps.json"))["steps"]
    forge(path, "steps.json", json.dumps({"steps": change(steps)}).encode())
    with pytest.raises(ArtifactError, match=r"steps\.json: it has other kernels than plan\.json"):
        _ = Executable.load(path).plan.steps[0]


def test_a_plan_with_other_kernels_is_refused(path):
    with zipfile.ZipFile(path) as archive:
        plan = json.loads(archive.read("plan.json"))
    assert plan["steps"] == ["k_mul", "k_add"]
    for steps, text in (
        (["k_mul"], "its kernels are not those that its plan describes"),
        (None, "plan.json: it can't be read: plan.steps is no list. Build the artifact again"),
        (["k_mul", 1], "plan.json: it can't be read: plan.steps[1] is 1; expected str. Build the artifact again"),
    ):
        forge(path, "plan.json", json.dumps(plan | {"steps": steps}).encode())
        assert message(path) == text


def test_a_forged_plan_with_types_that_there_are_not_is_refused(path):
    with zipfile.ZipFile(path) as archive:
        plan = json.loads(archive.read("plan.json"))
    plan["inputs"][0]["dtype"] = "f99"
    forge(path, "plan.json", json.dumps(plan).encode())
    assert message(path) == "its kernels are not those that its plan describes"


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(name, path, tmp_path):
    executable = Executable.load(path)
    with pytest.raises(ArtifactError, match="it can't be written: "):
        executable.save(tmp_path / name)
    with pytest.raises(ArtifactError, match="it can't be read: the name of a file can't be like this"):
        korch.load(tmp_path / name)


def test_a_save_takes_the_longest_name_and_leaves_nothing_else(path, tmp_path):
    longest = tmp_path / ("n" * 255)
    Executable.load(path).save(longest)
    assert sorted(tmp_path.iterdir()) == sorted([longest, path])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_an_executable_is_copied_and_pickled(copied, path):
    executable = Executable.load(path)
    executable.report = Report(rejected="kept")
    again = copied(executable)
    arrays = plans.random_arrays(plans.blocked_constant().graph)
    expected = executable(*arrays)
    del executable
    for found, wanted in zip(again(*arrays), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert again.report.rejected == "kept"
