import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.models import MODELS, build
from benchmarks.models.__main__ import main
from korch.ablation import Ablation
from korch.api import optimize
from korch.errors import OptionError
from korch.fission import fission_with_report
from korch.frontend.onnx import load_model
from korch.limits import SearchLimits
from korch.primitive.check import check_graph
from korch.primitive.op import Category

TINY = (
    "tiny_candy",
    "tiny_transformer",
    "tiny_efficientvit",
    "tiny_yolox",
    "tiny_yolov4",
    "tiny_segformer",
    "mlp",
    "conv_bn_relu",
)


def _session(model):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(model, seed=0):
    session = _session(model)
    (declared,) = session.get_inputs()
    x = np.random.default_rng(seed).standard_normal(declared.shape).astype(np.float32)
    output = session.run(None, {declared.name: x})[0]
    return x, output


def _initializers(model):
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


@pytest.mark.parametrize("name", [*TINY, "transformer_block"])
def test_each_model_runs_and_its_output_is_finite_moderate_and_not_constant(name):
    model = build(name)
    onnx.checker.check_model(model, full_check=True)
    _, output = _run(model)
    declared = [d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim]
    assert list(output.shape) == declared
    assert np.isfinite(output).all()
    assert output.std() > 0.05
    assert np.abs(output).max() < 50


@pytest.mark.parametrize("name", TINY)
def test_output_depends_on_the_input(name):
    model = build(name)
    assert not np.allclose(_run(model, 0)[1], _run(model, 1)[1], atol=1e-3)


@pytest.mark.parametrize("name", list(MODELS))
def test_the_same_seed_gives_the_same_bytes_and_another_seed_gives_others(name):
    options = {"candy": {"size": 16}, "yolov4": {"width": 4}, "decoder": {"sizes": "tiny"}}.get(name, {})
    first, again, other = (
        build(name, seed=seed, **options).SerializeToString(deterministic=True) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_candy_has_the_layers_of_the_paper_and_the_stated_input():
    model = build("candy")
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Conv") == 16
    assert operators.count("Pad") == 16
    assert operators.count("InstanceNormalization") == 15
    assert operators.count("Relu") == 10
    assert operators.count("Add") == 5
    assert operators.count("Resize") == 2
    (declared,) = model.graph.input
    assert declared.name == "input"
    assert [d.dim_value for d in declared.type.tensor_type.shape.dim] == [1, 3, 224, 224]
    weights = {a.shape for a in _initializers(model).values() if a.ndim == 4}
    assert weights == {
        (32, 3, 9, 9),
        (64, 32, 3, 3),
        (128, 64, 3, 3),
        (128, 128, 3, 3),
        (64, 128, 3, 3),
        (32, 64, 3, 3),
        (3, 32, 9, 9),
    }


def test_the_transformer_is_causal():
    model = build("tiny_transformer")
    session = _session(model)
    x = np.random.default_rng(0).standard_normal((1, 6, 16)).astype(np.float32)
    changed = x.copy()
    changed[0, 3:] += 1
    (before,) = session.run(None, {"input": x})
    (after,) = session.run(None, {"input": changed})
    np.testing.assert_allclose(before[0, :3], after[0, :3], rtol=1e-5, atol=1e-6)
    assert np.abs(before[0, 3:] - after[0, 3:]).max() > 0.1
    assert any(np.isneginf(a).any() for a in _initializers(model).values())


def test_depth_repeats_the_block():
    nodes = [len(build("tiny_transformer", depth=d).graph.node) - 1 for d in (1, 2, 3)]
    assert nodes == [nodes[0], 2 * nodes[0], 3 * nodes[0]]


def test_batch_normalization_is_far_from_the_identity():
    model = build("conv_bn_relu")
    arrays = _initializers(model)
    nodes = [n for n in model.graph.node if n.op_type == "BatchNormalization"]
    assert len(nodes) == 2
    for node in nodes:
        scale, shift, mean, variance = (arrays[name] for name in node.input[1:])
        assert np.abs(mean).max() > 0.3
        assert np.abs(variance - 1).max() > 0.3
        assert np.abs(scale - 1).max() > 0.2
        assert np.abs(shift).max() > 0.2


def test_unknown_names_and_senseless_options_are_refused():
    with pytest.raises(OptionError) as caught:
        build("candyfloss")
    assert str(caught.value) == (f"benchmarks.models: there is no model 'candyfloss'; expected {', '.join(MODELS)}")
    with pytest.raises(OptionError, match=r"^mlp: there is no option 'size'; expected seed, batch"):
        build("mlp", size=3)
    with pytest.raises(OptionError, match="30 pixels can't be halved twice"):
        build("candy", size=30)
    with pytest.raises(OptionError, match="a width of 16 can't be split over 3 heads"):
        build("tiny_transformer", heads=3)


def test_command_line_writes_the_built_model(tmp_path, capsys):
    out = tmp_path / "m.onnx"
    assert main(["tiny_candy", str(out), "--seed", "5", "--size", "16"]) == 0
    assert out.read_bytes() == build("tiny_candy", seed=5, size=16).SerializeToString(deterministic=True)
    assert main(["tiny_candy", str(out), "--size", "17"]) == 1
    assert "error: candy: size: 17 pixels" in capsys.readouterr().err


PUBLISHED = {
    # millions of parameters, GFLOP of the linear operators (two per multiplication)
    "yolov4": (64.4, 59.6),  # Darknet's own count for 416x416; it counts the pads too
    "yolox": (0.91, 1.08),
    "segformer": (3.8, 16.8),
    "efficientvit": (4.8, 6.2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_models_have_the_published_size_and_split_wholly(name):
    model = build(name)
    weights = [a for a in _initializers(model).values() if a.dtype == np.float32 and a.ndim]
    graph, report = fission_with_report(load_model(model))
    check_graph(graph)
    assert report.kept == ()
    flop = sum(graph.work_flop(p) for p in graph.primitives if p.row.category is Category.LINEAR)
    millions, giga = PUBLISHED[name]
    assert sum(a.size for a in weights) / 1e6 == pytest.approx(millions, rel=0.025)
    assert flop / 1e9 == pytest.approx(giga, rel=0.06)


@pytest.mark.long
def test_a_tiny_model_runs_as_it_does_elsewhere(cache_folder):
    """For others, see the test of plans as ONNX."""
    model = build("tiny_efficientvit")
    executable = optimize(
        model,
        measure=False,
        cache_folder=cache_folder,
        search=SearchLimits(max_primitives=3, max_outputs=1, groupings=0),
        ablation=Ablation(baselines=False),
    )
    x, expected = _run(model)
    found = executable(x)[0]
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
