"""Whole models that are planned and compiled for devices that this machine lacks."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks.models import PAPER, build
from korch.cli import main
from korch.cuda.compile import Cubin, CubinCompiler
from korch.errors import OptionError, UnprovidedError, UnsupportedError
from korch.limits import SearchLimits
from korch.options import Options
from korch.pipeline import plan_model
from tests.support.loops import loop_model

SPILL_BYTES = 512
"""Most memory of a thread for what does not fit into its registers."""


MODELS = PAPER if os.environ.get("KORCH_LONG") else ("candy", "segformer")
"""The three others have kernels of the same kinds, but pools and concatenations (`test_compile.py`)."""

SMALLER = {
    "segformer": {"depth": 1, "widths": (32, 64), "heads": (1, 2)},
    "tiny_segformer": {"widths": (8, 16), "heads": (1, 2)},
}
"""The second block of each scale has the kernels of the first, and the other scales those of these, in other sizes."""


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_of_a_model_compiles(name, cache_folder):
    options = Options(target="cuda:sm_90", cache_folder=cache_folder, search=SearchLimits(max_primitives=8))
    found = plan_model(build(name, **SMALLER.get(name, {})).SerializeToString(), options)
    assert not found.failures, found.to_text()
    assert len(found.kernels) > 5
    spills = [launch.spill_bytes for kernel in found.kernels for launch in kernel.launches]
    assert spills and max(spills) <= SPILL_BYTES, found.to_text()
    older = CubinCompiler(80, cache_folder)
    try:
        cubins = older.compile(found.launches[::8])  # many are equal
    finally:
        older.close()
    for cubin in cubins.values():
        assert isinstance(cubin, Cubin), cubin
        assert cubin.spill_bytes <= SPILL_BYTES


@pytest.mark.parametrize(
    ("name", "target", "precision"),
    [
        ("tiny_segformer", "cuda:sm_90", "float16"),
        ("tiny_candy", "cuda:sm_80", "bfloat16"),
        ("tiny_candy", "cuda:sm_90", "tf32"),
    ],
)
def test_precisions_and_architectures(name, target, precision, cache_folder):
    limits = SearchLimits(max_primitives=8)
    options = Options(target=target, precision=precision, cache_folder=cache_folder, search=limits)
    found = plan_model(build(name, **SMALLER.get(name, {})).SerializeToString(), options)
    assert not found.failures, found.to_text()


def test_the_command_prints_the_plan(tmp_path, cache_folder, capsys):
    model = tmp_path / "m.onnx"
    model.write_bytes(build("mlp").SerializeToString())
    arguments = ["optimize", str(model), "--target", "cuda:sm_90", "--dry-run", "--cache-folder", str(cache_folder)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "sm_90" in text and "regs" in text and "nothing was measured" in text


def test_without_a_device_the_error_says_what_to_do(tmp_path, monkeypatch):
    from korch.cuda import driver

    # Not in `ctypes` itself: PyTorch may be loaded here, and needs it.
    monkeypatch.setattr(driver, "ctypes", SimpleNamespace(CDLL=_missing))
    driver._driver.cache_clear()
    with pytest.raises(UnsupportedError, match="--dry-run"):
        from korch.cuda.measure.device import require_torch

        require_torch()
    driver._driver.cache_clear()
    with pytest.raises(OptionError, match="sm_90"):
        plan_model(build("mlp").SerializeToString(), Options(target="cuda:sm_70"))


def _missing(name):
    raise OSError(f"{name} is not there")


def test_pytorch_is_not_imported_where_there_is_no_driver():
    code = (
        "import sys\n"
        "from korch.errors import UnsupportedError\n"
        "from korch.cuda.measure import device\n"
        "device.has_driver = lambda: False\n"
        "try:\n    device.require_torch()\n"
        "except UnsupportedError as error:\n    print(error)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    text = (
        "option target: there is no CUDA driver here (libcuda.so.1). "
        "Use --target cpu, or --target cuda:sm_90 --dry-run to plan without a device\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_loops_are_for_cpus_only(cache_folder):
    options = Options(target="cuda:sm_90", cache_folder=cache_folder)
    with pytest.raises(UnprovidedError, match="node Scan s: kernels of loops are generated for CPUs only"):
        plan_model(loop_model("scan").SerializeToString(), options)
