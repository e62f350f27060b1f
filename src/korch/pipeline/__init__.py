"""The pipeline from a model to its executable; `stages.STAGES` is the list of its stages."""

from korch.pipeline.optimize import Watch, front, optimize_model, plan_model, run_until
from korch.pipeline.run import Run
from korch.pipeline.stages import STAGES, PipelineStage
from korch.report.progress import Progress, Update, untold

__all__ = [
    "STAGES",
    "PipelineStage",
    "Progress",
    "Run",
    "Update",
    "Watch",
    "front",
    "optimize_model",
    "plan_model",
    "run_until",
    "untold",
]
