"""The models of PyTorch's benchmark runners, with random weights: names, how each is built, and its inputs.

timm: the runner's models, and those of its earlier versions. transformers: the runner's classes with the default
configuration of each, or the published sizes in `TRANSFORMERS`, and more families. torchvision: one or two models of
each family.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

TIMM = """
adv_inception_v3 beit_base_patch16_224 botnet26t_256 cait_s24_224 coat_lite_mini convit_base convmixer_768_32
convnext_base convnextv2_nano crossvit_9_240 cspdarknet53 deit_base_distilled_patch16_224 deit_tiny_patch16_224 dla102
dm_nfnet_f0 dpn107 eca_botnext26ts_256 eca_halonext26ts ese_vovnet19b_dw fbnetc_100 fbnetv3_b gernet_l ghostnet_100
gmixer_24_224 gmlp_s16_224 hrnet_w18 inception_v3 lcnet_050 levit_128 mixer_b16_224 mixnet_l mnasnet_100
mobilenetv2_100 mobilenetv3_large_100 mobilevit_s nest_base nfnet_l0 pit_b_224 pnasnet5large poolformer_m36
regnety_002 repvgg_a2 res2net101_26w_4s res2net50_14w_8s res2next50 resmlp_12_224 resnest101e resnext101_32x16d
rexnet_100 sebotnet33ts_256 selecsls42b spnasnet_100 swin_base_patch4_window7_224 tf_efficientnet_b0 tf_mixnet_l
tinynet_a tnt_s_patch16_224 twins_pcpvt_base visformer_small vit_base_patch14_dinov2 vit_base_patch16_224
vit_base_patch16_siglip_256 volo_d1_224 xcit_large_24_p8_224
"""

CLASSIFIERS = """
alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet1_0
mobilenet_v2 mobilenet_v3_large regnet_x_400mf regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x1_0
squeezenet1_1 swin_t swin_v2_t vgg11 vgg16_bn vit_b_16 wide_resnet50_2
"""
SEGMENTERS = "deeplabv3_mobilenet_v3_large deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large"
DETECTORS = """
fasterrcnn_mobilenet_v3_large_320_fpn fasterrcnn_resnet50_fpn fcos_resnet50_fpn keypointrcnn_resnet50_fpn
maskrcnn_resnet50_fpn retinanet_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large
"""

DETECTOR_SIZE = 320
"""The size of the images of detectors, and the least size to which they scale them (800 by default)."""

_LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
_QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
_GEMMA = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
_GPT_NEO = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
_VOCABULARY = {"vocab_size": 32768}

_BY_CLASS = """
AlbertForMaskedLM AlbertForQuestionAnswering BartForCausalLM BartForConditionalGeneration BertForMaskedLM
BertForQuestionAnswering BlenderbotForCausalLM BlenderbotForConditionalGeneration BlenderbotSmallForCausalLM
BlenderbotSmallForConditionalGeneration DebertaV2ForMaskedLM DebertaV2ForQuestionAnswering DistilBertForMaskedLM
DistilBertForQuestionAnswering ElectraForCausalLM ElectraForQuestionAnswering GPT2ForSequenceClassification
GPTJForCausalLM GPTJForQuestionAnswering LayoutLMForMaskedLM
LayoutLMForSequenceClassification M2M100ForConditionalGeneration MBartForCausalLM MBartForConditionalGeneration
MegatronBertForCausalLM MegatronBertForQuestionAnswering MobileBertForMaskedLM MobileBertForQuestionAnswering
MT5ForConditionalGeneration OPTForCausalLM PegasusForCausalLM PegasusForConditionalGeneration PLBartForCausalLM
PLBartForConditionalGeneration RobertaForCausalLM RobertaForQuestionAnswering TrOCRForCausalLM XGLMForCausalLM
XLNetLMHeadModel
"""
"""Classes of transformers with their default configurations, by their own names."""

TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AllenaiLongformerBase": ("LongformerForMaskedLM", {}),
    "CamemBert": ("CamembertForMaskedLM", {}),
    "DistillGPT2": ("GPT2LMHeadModel", {"n_layer": 6}),
    "GPTNeoForCausalLM": ("GPTNeoForCausalLM", _GPT_NEO),
    "GPTNeoForSequenceClassification": ("GPTNeoForSequenceClassification", _GPT_NEO),
    "GoogleFnet": ("FNetForMaskedLM", {}),
    "T5Small": ("T5ForConditionalGeneration", {}),
    "T5ForConditionalGeneration": ("T5ForConditionalGeneration", {"d_model": 768, "d_ff": 3072, "num_heads": 12}),
    "YituTechConvBert": ("ConvBertForMaskedLM", {}),
    "Llama-3.2-1B": ("LlamaForCausalLM", _LLAMA | _VOCABULARY),
    "gemma-2-2b": ("Gemma2ForCausalLM", {"hidden_size": 2304, "intermediate_size": 9216} | _VOCABULARY),
    "gemma-3-1b": ("Gemma3ForCausalLM", _GEMMA | {"head_dim": 256, "sliding_window": 64} | _VOCABULARY),
    "whisper-tiny": ("WhisperForConditionalGeneration", {}),
    "Qwen3-0.6B": ("Qwen3ForCausalLM", _QWEN | {"head_dim": 128} | _VOCABULARY),
    "Mistral-7B": ("MistralForCausalLM", {"sliding_window": 64}),
    "gpt-oss-20b": ("GptOssForCausalLM", {"hidden_size": 1024, "intermediate_size": 1024, "num_local_experts": 8}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", _QWEN | _EXPERTS | _VOCABULARY),
    "Mamba-130m": ("MambaForCausalLM", {"hidden_size": 768, "num_hidden_layers": 24}),
    "Mamba2": ("Mamba2ForCausalLM", {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "n_groups": 1} | _VOCABULARY),
    "ModernBert": ("ModernBertForMaskedLM", {}),
    "ViT": ("ViTForImageClassification", {}),
    "Segformer": ("SegformerForSemanticSegmentation", {}),
    "CLIP": ("CLIPModel", {}),
    "Wav2Vec2": ("Wav2Vec2ForCTC", {}),
} | {name: (name, {}) for name in _BY_CLASS.split()}
"""By name, the library's class, and the fields of its configuration that differ from the default."""

LENGTH = 128
"""The number of tokens of a text."""

MOST_PARAMETERS = 60_000_000
"""A model with more parameters is cut to `LAYERS` layers."""

LAYERS = 2

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")
"""Fields of configurations with numbers of layers."""


@dataclass(frozen=True)
class Listed:
    """A model with random weights."""

    module: Any  # the module, in evaluation mode
    # returns the keyword arguments of a call, or positional ones as "args", for a seed
    inputs: Callable[[int], dict[str, Any]]
    cut: str = ""  # how it is smaller than the library's; "" if it is not


def items() -> list[str]:
    """Return the names of all models, with their libraries."""
    vision = f"{CLASSIFIERS} {SEGMENTERS} {DETECTORS}"
    lists = {"timm": TIMM.split(), "torchvision": vision.split(), "transformers": list(TRANSFORMERS)}
    return [f"{library}/{name}" for library, names in lists.items() for name in names]


def build(item: str) -> Listed:
    """Return a model by the name that `items` has, with the same weights each time."""
    library, _, name = item.partition("/")
    torch.manual_seed(0)
    made = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[library](name)
    made.module.eval()
    _vary(made.module)
    return made


def _vary(module: Any) -> None:
    """Change weights that are all equal, such as zeros after which a block has no effect, and statistics."""
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.numel() < 2 or not tensor.is_floating_point() or tensor.std() != 0:
                continue
            if name.endswith("running_var"):
                tensor.mul_(torch.exp(0.1 * torch.randn_like(tensor)))
            elif isinstance(tensor, torch.nn.Parameter) or name.endswith("running_mean"):
                tensor.add_(0.1 * torch.randn_like(tensor))


def _images(*shape: int) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"args": (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)}


def _timm(name: str) -> Listed:
    import timm

    module = timm.create_model(name, pretrained=False)
    return Listed(module, _images(1, *module.default_cfg["input_size"]))


def _torchvision(name: str) -> Listed:
    from torchvision import models

    if name in DETECTORS.split():
        size = {} if name.startswith("ssd") or "320" in name else {"min_size": DETECTOR_SIZE, "max_size": DETECTOR_SIZE}
        module = models.get_model(name, weights=None, weights_backbone=None, **size)
        cut = f"images of {DETECTOR_SIZE} x {DETECTOR_SIZE}" if size else ""
        side = 300 if name.startswith("ssd300") else DETECTOR_SIZE
        return Listed(module, lambda seed: {"args": ([_images(3, side, side)(seed)["args"][0].sigmoid()],)}, cut)
    own = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    if name in SEGMENTERS.split():
        own = {"weights_backbone": None}
    module = models.get_model(name, weights=None, **own)
    side = 299 if name == "inception_v3" else 224
    return Listed(module, _images(1, 3, side, side))


def _transformers(name: str) -> Listed:
    import transformers

    kind, fields = TRANSFORMERS[name]
    made = getattr(transformers, kind)
    with torch.device("meta"):
        count = sum(p.numel() for p in made(made.config_class(**fields)).parameters())
    cut = {}
    if count > MOST_PARAMETERS:
        full = made.config_class(**fields)
        cut = {
            field: LAYERS for field in DEPTHS if getattr(full, field, 0) > LAYERS and field not in full.attribute_map
        }
    module = made(made.config_class(**{**fields, **cut}))
    return Listed(module, _Inputs(module), " ".join(f"{field}={value}" for field, value in {**fields, **cut}.items()))


class _Inputs:
    """Inputs of a model of transformers: tokens, images or sound, and labels where it takes them."""

    def __init__(self, module: Any) -> None:
        self.config, self.kind = module.config, type(module).__name__
        self.takes = inspect.signature(module.forward).parameters

    def __call__(self, seed: int) -> dict[str, Any]:
        """Return keyword arguments."""
        generator = torch.Generator().manual_seed(seed)
        text = getattr(self.config, "text_config", self.config)
        images = getattr(self.config, "vision_config", self.config)

        def tokens() -> Any:
            most = getattr(text, "max_position_embeddings", LENGTH)
            length = min(LENGTH, most) if most > 0 else LENGTH
            return torch.randint(2, text.vocab_size - 2, (1, length), generator=generator)

        if "input_features" in self.takes:
            sound = torch.randn(1, self.config.num_mel_bins, 2 * self.config.max_source_positions, generator=generator)
            return {"input_features": sound, "labels": tokens()}
        if "input_values" in self.takes:
            return {"input_values": torch.randn(1, 16000, generator=generator)}
        found: dict[str, Any] = {}
        if "pixel_values" in self.takes:
            side = getattr(images, "image_size", 512)
            found["pixel_values"] = torch.randn(1, 3, side, side, generator=generator)
        if "input_ids" in self.takes:
            found["input_ids"] = tokens()
            if self.config.is_encoder_decoder:
                found["decoder_input_ids"] = tokens()
            if "start_positions" in self.takes:
                found |= {key: torch.randint(0, LENGTH, (1,), generator=generator) for key in _POSITIONS}
            elif "labels" in self.takes:
                found["labels"] = torch.tensor([1]) if "SequenceClassification" in self.kind else tokens()
        return found


_POSITIONS = ("start_positions", "end_positions")
