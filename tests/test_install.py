"""The statements about installation are true, and the wheel contains all files that Korch needs."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from korch.provider.provider import load_providers
from korch.system.extras import DISTRIBUTION, install_command
from korch.system.native import runtime_path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
BUNDLE = Path("src/korch/report/web/libraries.js")
FOLDERS = ("src", "docs", "benchmarks", "web")
TEXTS = sorted(
    path
    for path in (
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "Makefile",
        *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*")),
    )
    if path.suffix in {".md", ".py", ".html", ".js", ""}
    and path.is_file()
    and "node_modules" not in path.parts
    and not path.parent.name.endswith(".egg-info")
)
WRONG = re.compile(
    r"""pip3?\ (install|download)\b[^\n]*?[\s'"]korch(?!\w*-[^\s]*\.whl)   # by a name on an index
      | korch(-compiler|_compiler)?\[[a-z]                               # an extra of such a name
    """,
    re.VERBOSE,
)


def test_no_text_says_to_install_korch_from_an_index() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}" for path in TEXTS for match in WRONG.finditer(path.read_text("utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "text",
    [
        "pip install korch",
        "pip install 'korch[torch]'",
        "python -m pip install -U korch-compiler",
        "Install korch[cuda], or",
        "pip install --quiet korch==1",
    ],
)
def test_such_texts_would_be_found(text: str) -> None:
    assert WRONG.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        "pip install '.[torch]' in a checkout of Korch",
        "pip install -e '.[test]'",
        "pip install dist/korch_compiler-0.1.0.dev0-py3-none-any.whl",
        "import korch",
    ],
)
def test_other_texts_are_not(text: str) -> None:
    assert not WRONG.search(text)


def test_the_command_for_an_extra_names_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / f"{DISTRIBUTION.replace('-', '_')}-1.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", "Version: 1"]
    lines += [
        "Requires-Dist: numpy<3",
        'Requires-Dist: torch<3,>=2.6; extra == "torch"',
        'Requires-Dist: onnxscript<1; extra == "torch"',
        'Requires-Dist: mp; platform_machine == "z80" and extra == "torch"',
        f'Requires-Dist: here; sys_platform == "{sys.platform}" and extra == "torch"',
        'Requires-Dist: openvino; platform_machine == "z80" and extra == "openvino"',
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("torch") == "pip install 'torch<3,>=2.6' 'onnxscript<1' here"
    assert install_command("openvino") == "there is no package of 'openvino' for this machine"
    monkeypatch.setattr(sys, "path", [])
    assert install_command("torch") == "pip install '.[torch]' in a checkout of Korch"


def test_every_extra_that_a_hint_names_exists() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    sources = [path.read_text("utf-8") for path in TEXTS if path.suffix == ".py"]
    named = {
        name for text in sources for name in re.findall(r"""(?:install_command|\bmissing)\(["']([\w-]+)["']""", text)
    }
    assert {"torch", "cuda", "onnxruntime", "iree"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


def test_engines_are_no_dependencies() -> None:
    names = {re.split(r"[<>=]", text)[0] for text in PROJECT["dependencies"]}
    assert names == {"llvmlite", "ml-dtypes", "numpy", "onnx", "onnx-ir", "ortools", "threadpoolctl", "tqdm", "xxhash"}


def test_an_older_installation_under_another_name_does_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("korch", DISTRIBUTION):
        info = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        points = "[korch.providers]\ngenerated = korch.provider.generated:GeneratedProvider\n"
        (info / "entry_points.txt").write_text(points)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [provider.name for provider in load_providers()] == ["generated"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what pip would install, made of a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    runtime_path()  # is there, so that the wheel only has to take it
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=skip)
    (copy / BUNDLE).write_text("// as `make web` would make it, with Node.js")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            folder,
            copy,
        ],
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("korch_compiler-*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_file_of_the_package(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {str(path.relative_to(root)) for path in found}

    bundle = str(BUNDLE.relative_to("src/korch"))
    assert files(installed / "korch") == files(ROOT / "src" / "korch") | {bundle}
    assert {f"report/web/{name}" for name in ("page.js", "page.css")} <= files(installed / "korch")


def test_the_wheel_runs_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    (info,) = installed.glob("*.dist-info")
    found = importlib.metadata.PathDistribution(info)
    assert found.metadata["Name"] == DISTRIBUTION
    assert {(e.name, e.value) for e in found.entry_points if e.group == "console_scripts"} == {
        ("korch", "korch.cli:main")
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import korch.system.extras, korch.system.native, korch.cli; korch.system.native.runtime();"
            "from korch.report.page import _web; print(korch.__file__, len(_web('page.css')) > 100, "
            "korch.system.extras.install_command('openvino')); korch.cli.main(['--version'])",
        ],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(str(installed)) and "pip install 'openvino<" in done.stdout
    assert done.stdout.splitlines()[-1] == f"korch {PROJECT['version']}"
