"""llama.cpp as an engine for steps of a decoder: `LLAMA`, and the GGUF file of a decoder that it runs.

    pip install llama-cpp-python gguf

The cache is filled once; each run reads one more token at the same position, after the last one's rows are removed.
The cache has the type of the activations: float32, or float16 beside weights of 16 bits.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.models.decoder import BITS, DECODERS, EPSILON, DecoderSizes, Weights, quantized, random_weights
from korch.report.peers.peer import Array, Arrays, Run, missing, require

PROMPT = 512
"""Tokens that are read together while the cache is filled."""


@dataclass(frozen=True, slots=True)
class LlamaPeer:
    """llama.cpp; the model is a GGUF file, and the inputs are those of one step of the decoder."""

    name: str = "llama.cpp"

    def is_available(self) -> str | None:
        """Check whether the package is installed, without importing it."""
        return missing("bench", "llama_cpp")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Load the model and fill its cache with random tokens, as many as a step's cache has rows."""
        require(self)
        return _Session(model_path, inputs, threads)


LLAMA = LlamaPeer()


class _Session:
    """A context with a filled cache."""

    def __init__(self, path: Path, inputs: Arrays, threads: int) -> None:
        import llama_cpp as lib

        self._lib, self._ids = lib, inputs["input_ids"].reshape(-1)
        past = inputs["attention_mask"].shape[1] - self._ids.size
        is_narrow = inputs["past_key_values.0.key"].dtype.itemsize == 2
        lib.llama_log_set(_QUIET, ctypes.c_void_p(0))
        options = lib.llama_model_default_params()
        options.use_mmap = True
        self._model = lib.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {path}")
        context = lib.llama_context_default_params()
        context.n_ctx = -(-(past + self._ids.size) // 256) * 256
        context.n_batch = context.n_ubatch = PROMPT
        context.n_threads = context.n_threads_batch = threads
        context.type_k = context.type_v = lib.GGML_TYPE_F16 if is_narrow else lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(self._model, context)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        tokens = np.random.default_rng(0).integers(0, self._vocabulary, past)
        for first in range(0, past, PROMPT):
            self._read(tokens[first : first + PROMPT], first)
        self._past = past

    def _read(self, tokens: NDArray[np.int64], first: int) -> None:
        lib, count = self._lib, len(tokens)
        batch = lib.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), first + i, 1, i == count - 1
            batch.seq_id[i][0] = 0
        code = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama.cpp can't decode: {code}")

    def __call__(self) -> list[Array]:
        lib = self._lib
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, self._past, -1)
        self._read(self._ids, self._past)
        pointer = lib.llama_get_logits_ith(self._context, -1)
        logits = np.ctypeslib.as_array(pointer, (self._vocabulary,))
        return [logits.reshape(1, 1, -1)]


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _QUIET(level: int, text: bytes, data: Any) -> None:  # noqa: N802  # a constant: the library keeps its address
    pass


def write_gguf(path: Path, sizes: str, dtype: str, seed: int = 0) -> None:
    """Write the decoder that `build_decoder` builds as a GGUF file with the same weights."""
    import gguf

    at = DECODERS[sizes]
    arch = "qwen2" if at.has_bias else "qwen3" if at.has_norms else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(1 << 15)
    writer.add_embedding_length(at.hidden)
    writer.add_block_count(at.layers)
    writer.add_feed_forward_length(at.wide)
    writer.add_head_count(at.heads)
    writer.add_head_count_kv(at.groups)
    writer.add_key_length(at.head)
    writer.add_value_length(at.head)
    writer.add_rope_dimension_count(at.head)
    writer.add_rope_freq_base(at.theta)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_vocab_size(at.vocabulary)
    writer.add_tokenizer_model("none")
    for name, weights in random_weights(at, seed).items():
        array, kind = _stored(at, name, weights, dtype)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(at: DecoderSizes, name: str, weights: Weights, dtype: str) -> tuple[Array, Any]:
    """Return a tensor in the type of the file; vectors stay float32."""
    import gguf

    if not at.has_bias and not at.has_norms and name.endswith(("attn_q.weight", "attn_k.weight")):
        pairs = weights.reshape(-1, 2, at.head // 2, weights.shape[1])  # this architecture rotates adjacent features
        weights = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)
    if weights.ndim == 1 or dtype == "float32":
        return weights, gguf.GGMLQuantizationType.F32
    if dtype in BITS:
        numbers, scales = quantized(weights, BITS[dtype])
        if BITS[dtype] == 8:
            packed = (numbers.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
        else:
            packed = numbers[..., :16] | numbers[..., 16:] << 4
        parts = [scales.astype(np.float16).view(np.uint8), packed]
        kind = gguf.GGMLQuantizationType.Q8_0 if BITS[dtype] == 8 else gguf.GGMLQuantizationType.Q4_0
        return np.concatenate(parts, -1).reshape(len(weights), -1), kind
    kind = gguf.GGMLQuantizationType.F16 if dtype == "float16" else gguf.GGMLQuantizationType.BF16
    return gguf.quantize(weights, kind), kind
