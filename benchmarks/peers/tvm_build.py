"""ONNX -> a shared library compiled by TVM, in a separate process: `python -m ... REQUEST`.

The passes are those of TVM's `static_shape_tuning_pipeline`, including the layouts of weights. The only
difference is the number of trials of a task: if there are fewer than 64 trials for each task, all tasks get
the same number, while the pipeline would give none to the last tasks.

The results of tuning are in a folder whose name is a hash of the model's content, the shapes, the
target, the threads, the number of trials and TVM's version. A tuning run that did not finish is repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

_TRIALS_A_TASK = 64
"""The number of trials that MetaSchedule runs in one batch."""

_PATIENCE_S = 300.0
"""The time limit to build a trial, and to run it. With TVM's default of 30 s, all trials fail if other processes keep
the cores busy, because each building process first needs 15 s of processor time to import TVM."""

_NO_TIME_S = 1e9
"""TVM records a larger time than this for a trial that failed."""


def main() -> None:
    """Build the library of the request, which is the only argument."""
    request = json.loads(sys.argv[1])
    os.environ["TVM_NUM_THREADS"] = str(request["threads"])  # for this process and its measurers
    with tempfile.TemporaryDirectory(prefix="korch-tvm-") as folder:
        hide_torch(Path(folder))
        build(request).export_library(request["library"])


def hide_torch(folder: Path) -> None:
    """Prevent this process and its child processes from importing PyTorch, which TVM does not need.

    The builder of a trial searches all imported modules for each function that it reads. With PyTorch imported,
    this takes 40 s before anything is built, which is more than TVM's limit of 30 s.

    Args:
        folder: an empty folder, which becomes the first on the import path.
    """
    (folder / "torch.py").write_text('raise ImportError("TVM does not need PyTorch")\n')
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    sys.modules["torch"] = None  # type: ignore[assignment]  # says that it can't be imported


def build(request: dict[str, Any]) -> Any:
    """Import, tune if there are trials, and compile."""
    import onnx
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    shapes = {name: shape for name, (shape, _) in request["inputs"].items()}
    types = {name: dtype for name, (_, dtype) in request["inputs"].items()}
    cpu = tvm.target.codegen.llvm_get_system_cpu()
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "num-cores": request["threads"]})
    transform = relax.transform
    module = from_onnx(onnx.load(request["model"]), shapes, types)
    with target:
        module = tvm.transform.Sequential(
            [transform.DecomposeOpsForInference(), transform.CanonicalizeBindings(), relax.get_pipeline("zero")]
        )(module)
        if request["trials"]:
            module = transform.AttachAttrLayoutFreeBuffers()(module)
            folder = _tuned(module, target, request)
            module = tvm.transform.Sequential(
                [
                    transform.MetaScheduleApplyDatabase(str(folder)),
                    transform.SplitLayoutRewritePreproc(),
                    transform.LiftTransformParams(),
                    transform.FoldConstant(),
                ]
            )(module)
    return tvm.compile(module, target=target)


def _tuned(module: Any, target: Any, request: dict[str, Any]) -> Path:
    """Return the folder of the tuning database; the model is tuned first if there is none."""
    from tvm.s_tir.meta_schedule.builder import LocalBuilder
    from tvm.s_tir.meta_schedule.relax_integration import extract_tasks, tune_relax
    from tvm.s_tir.meta_schedule.runner import LocalRunner

    folder = Path(request["kept"]) / _key(target, request)
    done = folder / "done"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trials = request["trials"]
    tasks = max(1, len(extract_tasks(module, target)))
    share = trials if trials >= _TRIALS_A_TASK * tasks else -(-trials // tasks)
    database = tune_relax(
        module,
        {},
        target,
        str(folder),
        trials,
        share,
        seed=0,
        builder=LocalBuilder(timeout_sec=_PATIENCE_S),
        runner=LocalRunner(timeout_sec=_PATIENCE_S),
    )
    times_s = [float(s) for r in database.get_all_tuning_records() for s in r.run_secs or ()]
    if min(times_s, default=_NO_TIME_S) >= _NO_TIME_S:  # the result would be untuned
        raise RuntimeError(f"none of {trials} trials gave a time; {folder / 'logs'} says why")
    done.touch()
    return folder


def _key(target: Any, request: dict[str, Any]) -> str:
    import tvm

    asked = {name: request[name] for name in ("inputs", "threads", "trials")}
    digest = hashlib.sha256(json.dumps([asked, str(target), tvm.__version__]).encode())
    with Path(request["model"]).open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
