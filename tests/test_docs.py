"""The documentation is correct: its examples run, its links have targets, its lists are complete."""

import argparse
import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

import korch
from korch import errors
from korch.candidate.candidate import Refusal, make_group
from korch.cli.flags import RENAMED
from korch.cli.parser import make_parser
from korch.errors import KorchError
from korch.options import flagged_fields
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import ValueType
from korch.provider.provider import load_providers
from korch.runtime.unpack import unpack
from korch.testing.kernels import check_offers
from tests.support.c_code import COMPILER
from tests.support.models import parsed

ROOT = Path(__file__).parent.parent
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown's table of contents makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", word) for word in words}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = re.findall(r"`((?:src|tests|docs|benchmarks|web)/[\w/.-]+)`", text)
    made = {"benchmarks/results/suite.json"}
    assert [name for name in named if name not in made and not (ROOT / name).exists()] == []
    # Within `korch` the documentation leaves `src/korch/` out.
    short = re.findall(r"`((?:\w+/)+\w+\.(?:py|h))`", text)
    folders = (ROOT, ROOT / "src" / "korch", ROOT / "src" / "korch" / "equivalence")
    assert [s for s in short if not any((folder / s).exists() for folder in folders)] == []


def test_identifiers_that_are_named_exist() -> None:
    """Names in code style with an underscore or two capitals are in the sources; limits that messages name exist."""
    files = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.[phj]*")]
    sources = "\n".join(path.read_text("utf-8") for path in files if path.suffix in (".py", ".h", ".json"))
    words = set(re.findall(r"\w+", sources)) | set(re.findall(r"\w+", (ROOT / "pyproject.toml").read_text("utf-8")))
    foreign = {"DYNAMIC_QUANTIZATION_GROUP_SIZE", "DataLoader", "perf_event_open", "op_NAME"}
    pages = {page: re.findall(r"`([A-Za-z]\w+)(?:\(.*?\))?`", page.read_text("utf-8")) for page in PAGES}
    named = {word: page.name for page, found in pages.items() for word in found if re.search(r"_|[A-Z]\w*[A-Z]", word)}
    assert {word: page for word, page in named.items() if word not in words | foreign} == {}
    limits = set(re.findall(r"SearchLimits\.([a-z]\w+)", sources))
    assert limits <= set(dir(korch.SearchLimits))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- .*?([\w/-]+\.md)$", navigation, re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]]
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize("page", REFERENCE, ids=name_of)
def test_what_the_reference_names_exists(page: Path) -> None:
    """The site's builder passes over a member that does not exist."""
    entries = re.findall(
        r"^::: ([\w.]+)$(?:\n    options:\n(?:      (?!members).*\n)*      members: \[(.*)\])?",
        page.read_text("utf-8"),
        re.MULTILINE,
    )
    missing = []
    for module, members in entries:
        path = ROOT / "src" / module.replace(".", "/")
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        tree = ast.parse(source.read_text("utf-8"))
        known = {getattr(node, "name", "") for node in tree.body}
        missing += [f"{module}.{m}" for m in members.split(", ") if members and m not in known]
    assert missing == []


def option_table() -> str:
    """Return the options of `korch optimize` as a table."""
    lines = ["| flag | default | what it does |", "|---|---|---|"]
    for field in flagged_fields():
        flag = "--" + RENAMED.get(field.name, field.name).replace("_", "-")
        default = {"threads": "all cores", "cache_folder": "`$KORCH_CACHE`, else `~/.cache/korch`"}
        shown = default.get(field.name, "" if field.default is None else f"`{field.default}`")
        text = field.metadata["help"].replace("|", "\\|")
        lines.append(f"| `{flag}` | {shown} | {text} |")
    return "\n".join(lines)


def test_all_options_are_listed() -> None:
    page = (ROOT / "docs" / "reference" / "options.md").read_text("utf-8")
    listed = re.search(r"^\| flag \|.*?(?=\n\n)", page, re.MULTILINE | re.DOTALL)
    assert listed is not None and listed[0] == option_table()


def test_the_architecture_lists_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    source = ROOT / "src" / "korch"
    folders = [folder.parent.name for folder in source.glob("*/__init__.py")]
    assert [name for name in folders if f"`{name}/`" not in text] == []


def test_the_commands_of_the_documentation_exist() -> None:
    shown = {
        name for page in PAGES for name in re.findall(r"^(?:\| `)?korch (\w+)", page.read_text("utf-8"), re.MULTILINE)
    }
    usage = make_parser().format_help()
    assert {"optimize", "run", "bench", "explain", "doctor"} <= shown
    assert [name for name in shown if not re.search(rf"^ +{name}\b", usage, re.MULTILINE)] == []


def test_the_page_of_errors_has_every_class() -> None:
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KorchError)}
    page = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == classes - {"KorchError"}


@pytest.mark.parametrize(("page", "most"), [("README.md", 700), ("docs/method.md", 1500), ("docs/benchmarks.md", 2000)])
def test_pages_for_users_are_short(page: str, most: int) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", (ROOT / page).read_text("utf-8"))
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= most


def test_the_change_log_has_at_most_40_short_unreleased_lines() -> None:
    unreleased = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("## Unreleased\n")[2].partition("\n## ")[0]
    lines = unreleased.strip().splitlines()
    assert 0 < len(lines) <= 40 and [line for line in lines if not line.startswith("- ") or len(line) > 300] == []


def test_the_flags_of_the_documentation_exist() -> None:
    """The pages on benchmarks also have flags of other programs."""
    others = {"benchmarks.md", "ablation.md", "kernel-limits.md", "measurements.md"}
    shown = {
        (page.name, flag.replace("--no-", "--"))
        for page in PAGES
        if page.name not in others
        for flag in re.findall(r"(?:`|korch [^`\n#]*? )(--[a-z][a-z-]+)", page.read_text("utf-8"))
    }
    (commands,) = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    actions = [action for command in commands.choices.values() for action in command._actions]
    known = {flag.replace("--no-", "--") for action in actions for flag in action.option_strings}
    assert sorted((page, flag) for page, flag in shown if flag not in known) == []


def test_the_example_of_the_readme_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path) -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 3
    model = parsed("(float[1,3,8,8] input) => (float[1,3,8,8] output) { output = Relu(input) }")
    onnx.save(model, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KORCH_CACHE", str(cache_folder))
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    assert isinstance(names["exe"], korch.Executable)
    assert np.array_equal(names["y"], np.zeros((1, 3, 8, 8), np.float32))  # type: ignore[arg-type]


def test_the_example_of_the_quick_start_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path
) -> None:
    (example,) = blocks(ROOT / "docs" / "start.md", "python")
    assert "budget=20" in example
    example = example.replace("budget=20", "budget=1")  # only that the test is quick
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KORCH_CACHE", str(cache_folder))
    names: dict[str, object] = {}
    exec(compile(example, "start.md", "exec"), names)
    np.testing.assert_allclose(np.sum(names["y"], axis=-1), 1, rtol=1e-5)  # type: ignore[call-overload]
    assert korch.load(tmp_path / "small.korch").get_inputs()[0].name == "x"


def test_the_provider_of_the_documentation_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target, builder, rng
) -> None:
    page = ROOT / "docs" / "add-a-provider.md"
    points = tomllib.loads(blocks(page, "toml")[0])["project"]["entry-points"]["korch.providers"]
    (tmp_path / "my_package.py").write_text(blocks(page, "python")[0])
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[korch.providers]", *lines]) + "\n")
    importlib.invalidate_caches()
    with monkeypatch.context() as only_here:  # what is found later stays known: libraries must be found
        only_here.setattr(sys, "path", [str(tmp_path)])
        (provider,) = load_providers()
        only_here.delitem(sys.modules, "my_package")
    assert provider.name == "negate"
    program = tmp_path / "program.py"
    program.write_text(blocks(page, "python")[-1])
    exec(blocks(page, "python")[1], {})
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")]),
        "KORCH_CACHE": str(builder.folder.parent),
    }
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    groups = [group_of("neg", "f32[3,5]"), group_of("neg", "f32[0,2]"), group_of("neg", "f32[]")]
    check_offers(provider, groups, target, builder, rng)
    check_offers(provider, groups, target, builder, rng, specials=True)
    assert provider.offer(group_of("neg", "i32[3]"), target) == Refusal("it is not float32")
    refused = provider.offer(group_of("abs", "f32[3]"), target)
    assert refused == Refusal("it is not a lone negation")


def test_the_guide_to_rules_shows_a_mark_as_the_test_has_it() -> None:
    guide = (ROOT / "docs" / "add-an-equivalence.md").read_text("utf-8")
    (mark,) = re.findall(r"^ +(\"[\w-]+\": \".*\",)$", guide, re.MULTILINE)
    marks = (ROOT / "tests" / "equivalence" / "test_finite_field.py").read_text("utf-8")
    assert mark in marks and "NO_POLYNOMIALS" in marks and "NO_POLYNOMIALS" in guide


def test_users_pages_and_internals_are_apart() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    users, internals = navigation.split("  - Internals:\n")
    assert users.startswith("  - Using Korch:\n") and "start.md" in users
    for page in ("architecture.md", "method.md", "add-a-provider.md", "reference/tiles.md"):
        assert page in internals and page not in users


def test_no_page_claims_more_than_a_bound() -> None:
    pages = (
        *(page for page in PAGES if page.name != "glossary.md"),
        ROOT / "mkdocs.yml",
        ROOT / "pyproject.toml",
        ROOT / "src/korch/__init__.py",
        *(ROOT / "src/korch/cli").glob("*.py"),
    )
    assert [name_of(page) for page in pages if "provably" in page.read_text("utf-8").lower()] == []


def network(rng: np.random.Generator) -> onnx.ModelProto:
    """Return a network as that of the page on deployment, without PyTorch."""
    weights = {"a": (16, 1, 3, 3), "b": (16,), "c": (32, 16, 3, 3), "d": (32,), "e": (10, 32)}
    text = """(float[1,1,28,28] image) => (float[1,10] scores) {
        p = Conv<pads = [1,1,1,1]>(image, a, b)
        q = Relu(p)
        r = Conv<pads = [1,1,1,1], strides = [2,2]>(q, c, d)
        s = Relu(r)
        t = GlobalAveragePool(s)
        u = Flatten(t)
        v = Gemm<transB = 1>(u, e)
        scores = Softmax<axis = 1>(v)
    }"""
    return parsed(text, **{name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in weights.items()})


def opaque(rng: np.random.Generator) -> onnx.ModelProto:
    """Return a model of an operator that ONNX Runtime runs in the kernel."""
    return parsed("(float[3,4] x) => (float[3,4] y) { y = Hardmax(x) }")


def ranged(rng: np.random.Generator) -> onnx.ModelProto:
    """Return a model for a range of sizes, which reads a mask, and whose output is cut."""
    return parsed("(float[n,4] x) => (float[4,n] y) { t = Transpose(x) y = Softmax(t) }")


@pytest.mark.parametrize("model", [network, opaque, ranged])
def test_the_c_program_of_the_documentation_computes_what_python_does(
    model: Callable[[np.random.Generator], onnx.ModelProto], tmp_path: Path, cache_folder: Path, rng
) -> None:
    (program,) = blocks(ROOT / "docs" / "deploy.md", "c")
    assert len([line for line in program.splitlines() if line]) < 50
    shapes = {"n": range(4, 10)} if model is ranged else None
    made = korch.optimize(model(rng), shapes=shapes, threads=1, measure=False, cache_folder=cache_folder)
    made.save(tmp_path / "model.korch")
    executable = korch.load(tmp_path / "model.korch")
    folder = tmp_path / "folder"
    brought = unpack(tmp_path / "model.korch", folder).brought
    assert model is not opaque or brought == ("libonnxruntime.so.1",)
    (tmp_path / "run.c").write_text(program)
    link = [f"-L{folder}", "-lkorch_runtime", "-Wl,-rpath,$ORIGIN/folder"]
    command = [*COMPILER, "-Wall", "-Wextra", "-Werror", f"-I{folder}", "run.c", "-o", "run", *link]
    subprocess.run(command, cwd=tmp_path, check=True)
    shape = [7 if n == "4..9" else n for n in executable.get_inputs()[0].shape]
    given = rng.random(shape, np.float32)
    given.tofile(tmp_path / "x.f32")

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        # No environment: all that it needs lies in the folder.
        return subprocess.run([tmp_path / "run", *arguments], env={}, capture_output=True, text=True, check=False)

    sizes, first = list(map(str, shape)), "4 to 9 in steps of 1" if model is ranged else f"{shape[0]}"
    done = run(folder, tmp_path / "x.f32", *sizes)
    assert (done.returncode, done.stderr) == (0, "")
    (expected,) = executable(given)
    np.testing.assert_array_equal(np.array(done.stdout.split(), np.float32), expected.ravel())
    name = executable.get_inputs()[0].name
    for wrong, text in (
        ((folder, tmp_path / "run.c", *sizes), f"{tmp_path / 'run.c'} needs {given.nbytes} bytes\n"),
        ((tmp_path / "none", tmp_path / "x.f32", "1"), f"can't read {tmp_path / 'none'}/kernels.a\n"),
        ((folder, tmp_path / "none", *sizes), f"can't read {tmp_path / 'none'}\n"),
        (
            (folder, tmp_path / "x.f32", "1000", *sizes[1:]),
            f"input {name}, axis 0: its size is 1000; expected {first}\n",
        ),
        ((folder,), f"usage: {tmp_path / 'run'} FOLDER INPUT.f32 SIZE...\n"),
    ):
        done = run(*wrong)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", text)


def group_of(op: str, type_: str):
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse(type_))
    builder.output("y", builder.add(op, [x]))
    return make_group(builder.freeze(), [0], [1])


def test_the_operator_of_the_documentation_is_the_one_in_the_source() -> None:
    source = (ROOT / "src" / "korch" / "fission" / "activation.py").read_text("utf-8")
    function, line = blocks(ROOT / "docs" / "add-an-operator.md", "python")
    assert function in source and line.strip() in source
