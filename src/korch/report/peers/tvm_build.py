"""ONNX -> a shared library of TVM's, in a process of its own: `python -m ... REQUEST`.

The passes are those of TVM's `static_shape_tuning_pipeline`, including layouts of weights. Only the
trials of a task differ: if there are fewer than 64 for each task, all tasks have the same number,
while the pipeline would leave the last ones without any.

The results of tuning are in a folder that is named after the model's content, the shapes, the
target, the threads, the number of trials and TVM's version. A run that did not end is repeated.
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
"""As many as MetaSchedule tries at a time."""

_PATIENCE_S = 300.0
"""What a trial may take to be built, and to run. With TVM's own 30 s, all of them are lost where
others keep the cores busy: a process that builds first computes for 15 s to import TVM's parts."""

_NO_TIME_S = 1e9
"""TVM writes more than this for a trial that failed."""


def main() -> None:
    """Build what the only argument asks for."""
    request = json.loads(sys.argv[1])
    os.environ["TVM_NUM_THREADS"] = str(request["threads"])  # for this process and its measurers
    with tempfile.TemporaryDirectory(prefix="korch-tvm-") as folder:
        hide_torch(Path(folder))
        build(request).export_library(request["library"])


def hide_torch(folder: Path) -> None:
    """Let neither this process nor those that it starts import PyTorch, which TVM does not need.

    Each builder of a trial searches all that is imported for each function that it reads: with
    PyTorch, it computes for 40 s before it builds anything, where TVM gives it 30.

    Args:
        folder: an empty one, which is imported from first.
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
    """Return the folder of the database, which is filled first if it is not there."""
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
    if min(times_s, default=_NO_TIME_S) >= _NO_TIME_S:  # it would be an untuned TVM's
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
