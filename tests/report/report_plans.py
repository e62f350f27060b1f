"""Records of plans and kernels, of which a test gives only the fields that matter to it."""

from typing import Any

from korch.runtime.record import ModelRecord, PlanRecord, PortRecord, StepRecord, TensorRecord


def port_of(
    text: str = "f32[2,8]", layout: str = "ab", place: str = "ARENA", value: int = 0, at: int = 0
) -> PortRecord:
    return PortRecord(value, text, layout, place, at)


def step_of(primitives: str, **fields: Any) -> StepRecord:
    """Return a measured kernel that computes some primitives."""
    known = {"symbol": "k1", "provider": "generated", "variant": "", "candidate": "c1", "origins": ()}
    known |= {"inputs": (port_of(),), "outputs": (port_of(),), "cost_ns": 1000.0, "bound_ns": 500.0}
    known |= {"is_measured": True, "size_bytes": 128, "work_flop": 16, "workspace_bytes": 0}
    return StepRecord(primitives=primitives, **(known | fields))


def plan_of(*steps: StepRecord, path: str = "m.onnx", **fields: Any) -> PlanRecord:
    """Return a plan of kernels."""
    tensor = TensorRecord("x", "f32", (2, 8))
    known = {"threads": 2, "arena_bytes": 0, "arena_bound_bytes": 0, "weights_bytes": 0, "certificate": {}}
    known |= {"inputs": (tensor,), "outputs": (tensor,), "options": {}, "target": {"cpu": "A CPU"}}
    return PlanRecord(korch_version="0", model=ModelRecord(path, ""), steps=steps, **(known | fields))
