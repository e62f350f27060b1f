"""Language models of the transformers library that generate tokens: eager, and with `forward` compiled by Korch.

Each item is a model with small random weights and a kind of cache. `generate` is called twice with prompts of different
lengths, and again after the searches in the background. Right are the tokens of eager mode (greedy).
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

import korch
from benchmarks.judges import Judge
from korch import torch_backend

TOKENS = 16
"""The number of new tokens."""

PROMPTS = (6, 9)
"""The lengths of the prompts."""

BUDGET_S = 4.0
"""The budget of the search for a graph."""

WAIT_S = 30.0
"""The longest time to wait for the searches in the background."""

VERDICTS = {
    "right": "the tokens of eager mode",
    "partly": "the tokens of eager mode; some graphs run in PyTorch",
    "wrong": "other tokens",
    "timeout": "no end within the limit",
    "crash": "an error",
    "none": "PyTorch itself fails",
}

_TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_WHISPER = {
    "d_model": 64,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 16,
    "max_source_positions": 30,
    "max_target_positions": 64,
    "vocab_size": 160,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 159,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    **_LAYERS,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _TEXT),
    "qwen3": ("Qwen3ForCausalLM", _TEXT),
    "gemma3": ("Gemma3ForCausalLM", {**_TEXT, **_WINDOWS}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
        | {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    ),
    "phi": ("PhiForCausalLM", {**_TEXT, "num_key_value_heads": 4}),
    "mistral": ("MistralForCausalLM", {**_TEXT, "sliding_window": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_TEXT, **_EXPERTS}),
    "mamba": (
        "MambaForCausalLM",
        {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.2}
        | {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 160, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        | {"eos_token_id": 159, "pad_token_id": 0, "decoder_start_token_id": 0, "initializer_factor": 1.0}
        | {"tie_word_embeddings": False},
    ),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
}
"""By name, the library's class of a model, and the fields of its configuration."""

CACHES = ("dynamic", "static")

EXPORTED = ("llama", "qwen3", "gemma3", "phi", "mistral", "qwen3_moe")
"""The models that are exported by `torch.export`, with a static cache as buffers, and optimized by `korch.optimize`."""


def build(name: str) -> Any:
    """Return a model with random weights, the same each time.

    Raises:
        KeyError: there is no model of this name.
    """
    kind, values = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    return made(made.config_class(**values)).eval()


def call(model: Any, length: int) -> dict[str, Any]:
    """Return inputs of `generate`: a prompt, or sound of a fixed length for a model of speech."""
    generator = torch.Generator().manual_seed(length)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(1, 16, 60, generator=generator)}
    ids = torch.randint(2, 150, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class _Watch:
    """What `generate` streams tokens to: it notes when they come."""

    def __init__(self) -> None:
        self.at_s = [time.perf_counter()]

    def put(self, value: Any) -> None:
        """Note the time of a token."""
        self.at_s.append(time.perf_counter())

    def end(self) -> None:
        """There is nothing to do at the end."""

    @property
    def first_s(self) -> float:
        """The seconds before the first token; the prompt is streamed before."""
        return self.at_s[2] - self.at_s[0]

    @property
    def step_ms(self) -> float:
        """The median time of a later token, in milliseconds."""
        return 1e3 * statistics.median(b - a for a, b in zip(self.at_s[2:], self.at_s[3:], strict=False))


def generated(model: Any, length: int, cache: str) -> tuple[list[int], _Watch]:
    """Return the tokens for a prompt, and when they came."""
    watch = _Watch()
    kind = {"cache_implementation": "static"} if cache == "static" else {}
    found = model.generate(
        **call(model, length), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, streamer=watch, **kind
    )
    return found.reshape(-1).tolist(), watch


class Counted:
    """The backend, and all graphs that it has compiled."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        self.graphs.append(torch_backend.korch(graph, inputs, options=self.options))
        return self.graphs[-1]  # type: ignore[no-any-return]

    def wait(self, seconds: float) -> None:
        """Wait for the searches in the background."""
        until_s = time.monotonic() + seconds
        for graph in self.graphs:
            for plan in graph.plans:
                plan.wait(max(0.0, until_s - time.monotonic()))


def _exported(model: Any) -> tuple[str, str]:
    """Return the verdict on an exported model, which takes one token after another, and a message."""
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleForDecoderOnlyLM(model, 1, sum(PROMPTS) + TOKENS)
    token = torch.tensor([[PROMPTS[0]]])
    program = module.export(input_ids=token, cache_position=torch.tensor([0]))
    begun_s = time.perf_counter()
    executable, right = korch.optimize(program, budget=BUDGET_S, threads=1, progress=False), program.module()
    optimized_s = time.perf_counter() - begun_s
    times: tuple[list[float], list[float]] = ([], [])
    for place in range(TOKENS):
        found = []
        for call, own in zip((executable, right), times, strict=True):
            begun_s = time.perf_counter()
            with torch.no_grad():
                found.append(call(input_ids=token, cache_position=torch.tensor([place])))
            own.append(time.perf_counter() - begun_s)
        if not torch.allclose(*found, rtol=1e-3, atol=1e-3):
            return "wrong", f"the logits differ at place {place} by {(found[0] - found[1]).abs().max():.2e}"
        token = found[1].argmax(-1)
    step_ms, eager_ms = (1e3 * statistics.median(own) for own in times)
    return "right", f"optimized_s={optimized_s:.1f} step_ms={step_ms:.3f} eager_step_ms={eager_ms:.3f}"


def _run(item: str) -> dict[str, Any]:
    name, _, cache = item.partition(":")
    torch.set_num_threads(1)
    model = build(name)
    if cache == "exported":
        try:
            verdict, text = _exported(model)
        except Exception as error:  # noqa: BLE001 - a crash, which is what is looked for
            verdict, text = "crash", f"{type(error).__name__}: {error}"[:600]
        return {"item": item, "counts": {cache: {verdict: 1}}, "texts": [f"{verdict}: {text}"]}
    try:
        right = [generated(model, n, cache) for n in (*PROMPTS, PROMPTS[0])]
    except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
        return {"item": item, "counts": {cache: {"none": 1}}, "texts": [f"none: {type(error).__name__}: {error}"[:300]]}
    backend = Counted({"budget": BUDGET_S, "threads": 1})
    model.forward = torch.compile(model.forward, backend=backend)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = [generated(model, n, cache) for n in PROMPTS]
            backend.wait(WAIT_S)
            found.append(generated(model, PROMPTS[0], cache))
        except Exception as error:  # noqa: BLE001 - a crash, which is what is looked for
            text = f"crash: {type(error).__name__}: {error}"[:600]
            return {"item": item, "counts": {cache: {"crash": 1}}, "texts": [text]}
    is_right = [tokens for tokens, _ in found] == [tokens for tokens, _ in right]
    reasons = [str(w.message) for w in said if issubclass(w.category, torch_backend.KorchFallbackWarning)]
    verdict = "wrong" if not is_right else "partly" if reasons else "right"
    figures = {
        "graphs": len(backend.graphs),
        "plans": sum(len(graph.plans) for graph in backend.graphs),
        "first_s": round(found[0][1].first_s, 2),
        "next_first_s": round(found[1][1].first_s, 2),
        "step_ms": round(found[-1][1].step_ms, 3),
        "eager_step_ms": round(right[-1][1].step_ms, 3),
    }
    texts = [f"{verdict}: {' '.join(f'{key}={value}' for key, value in figures.items())}", *reasons]
    texts += [str(w.message) for w in said if issubclass(w.category, torch_backend.KorchShapesWarning)]
    return {"item": item, "counts": {cache: {verdict: 1}}, "texts": texts, "figures": figures}


def _items() -> list[str]:
    return [f"{name}:{cache}" for name in MODELS for cache in CACHES] + [f"{name}:exported" for name in EXPORTED]


JUDGE = Judge(_items, _run, VERDICTS, limit_s=240, life=1)
