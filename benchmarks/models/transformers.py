"""Transformers as PyTorch modules: BERT, GPT-2, ViT and a Llama block, from configurations.

Weights are random, from a seed; nothing is downloaded. Without the package transformers
`TRANSFORMERS` is empty. Each entry builds a module in evaluation mode and the inputs of a call:

    module, inputs = TRANSFORMERS["bert"].build()
    korch.optimize(module, inputs)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from korch.errors import OptionError

Inputs = dict[str, Any]


@dataclass(frozen=True)
class TransformerModel:
    """A transformer that can be built."""

    name: str  # the key in `TRANSFORMERS`
    summary: str  # one line for listings
    builder: Callable[..., tuple[Any, Inputs]]  # returns a module and its inputs by keyword
    tiny: Mapping[str, int] = field(default_factory=dict)  # arguments that make the model small enough for tests

    def build(self, **options: int) -> tuple[Any, Inputs]:
        """Build the model at its real size; options change sizes or the seed."""
        return self.builder(**options)

    def build_tiny(self) -> tuple[Any, Inputs]:
        """Build a small version of the model: one layer of 64 channels."""
        return self.builder(**self.tiny)


def build_bert(
    *, layers: int = 12, hidden: int = 768, heads: int = 12, sequence: int = 128, vocabulary: int = 30522, seed: int = 0
) -> tuple[Any, Inputs]:
    """Return a BERT encoder with a mask that hides the last eighth of the tokens."""
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=512,
    )
    mask = torch.ones(1, sequence, dtype=torch.int64)
    mask[:, sequence - sequence // 8 :] = 0
    tokens = torch.randint(0, vocabulary, (1, sequence))
    return ready(BertModel(config)), {"input_ids": tokens, "attention_mask": mask}


def build_gpt2(
    *, layers: int = 12, hidden: int = 768, heads: int = 12, sequence: int = 128, vocabulary: int = 50257, seed: int = 0
) -> tuple[Any, Inputs]:
    """Return a GPT-2 that reads a prompt with a causal mask and returns logits."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, vocabulary, (1, sequence))
    return ready(GPT2LMHeadModel(config)), {"input_ids": tokens}


def build_vit(
    *,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    seed: int = 0,
) -> tuple[Any, Inputs]:
    """Return a ViT that classifies one image."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        image_size=image,
        patch_size=patch,
        num_labels=classes,
    )
    pixels = torch.randn(1, 3, image, image)
    return ready(ViTForImageClassification(config)), {"pixel_values": pixels}


def build_llama(
    *,
    layers: int = 1,
    hidden: int = 2048,
    heads: int = 32,
    groups: int = 8,
    wide: int = 8192,
    sequence: int = 128,
    vocabulary: int = 1024,
    seed: int = 0,
) -> tuple[Any, Inputs]:
    """Return Llama blocks: rotary embeddings, grouped-query attention, gated feed-forward."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        use_cache=False,
    )
    embeds = torch.randn(1, sequence, hidden)
    return ready(LlamaModel(config)), {"inputs_embeds": embeds}


def ready(module: Any) -> Any:
    """Return a module in evaluation mode, with noise added to its biases and norms so that they are not 0 and 1."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module.eval()


_TINY = {"layers": 1, "hidden": 64, "heads": 4}

_MODELS = (
    TransformerModel(
        "bert", "BERT encoder, 12 layers, 128 tokens", build_bert, {**_TINY, "sequence": 16, "vocabulary": 100}
    ),
    TransformerModel(
        "gpt2", "GPT-2 prefill, 12 layers, 128 tokens", build_gpt2, {**_TINY, "sequence": 11, "vocabulary": 100}
    ),
    TransformerModel("vit", "ViT-B/16, 3x224x224", build_vit, {**_TINY, "image": 32, "patch": 8, "classes": 10}),
    TransformerModel(
        "llama",
        "Llama block of 2048, 8 groups, 128 tokens",
        build_llama,
        {**_TINY, "groups": 2, "wide": 96, "sequence": 11, "vocabulary": 100},
    ),
)

NAMES = tuple(model.name for model in _MODELS)
"""The names of all models, even if the packages are not installed."""

TRANSFORMERS: dict[str, TransformerModel] = {
    model.name: model for model in _MODELS if find_spec("torch") and find_spec("transformers")
}


def build_transformer(name: str, **options: int) -> tuple[Any, Inputs]:
    """Build the transformer called `name`: a module and its inputs by keyword.

    Raises:
        OptionError: no model has this name, or transformers is not installed.
    """
    if name not in TRANSFORMERS:
        raise OptionError(
            f"there is no transformer {name!r}",
            where="benchmarks.models",
            expected=", ".join(TRANSFORMERS) or "the packages torch and transformers",
        )
    return TRANSFORMERS[name].build(**options)


def export_transformer(name: str, **options: int) -> Any:
    """Build a transformer as an ONNX model that contains its weights, as `optimize_model` reads it.

    Raises:
        OptionError: no model has this name, or transformers is not installed.
    """
    module, inputs = build_transformer(name, **options)
    from korch.frontend.torch import export_module

    return export_module(module, (), inputs).model
