"""Calls a module that torch.compile optimizes; prints the seconds of each call, its searches and their least as JSON.

python -m benchmarks.compiled MODULE BUDGET CACHE_FOLDER
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from korch.torch_backend import CompiledGraph

Call = tuple[str, Callable[[], Any]]


def layers(options: dict[str, Any]) -> Iterator[Call]:
    """Two layers: a first batch, another one, which makes a range, and a third."""
    linear = torch.nn.Linear
    compiled = torch.compile(torch.nn.Sequential(linear(64, 64), torch.nn.ReLU(), linear(64, 8)).eval(), **options)
    for name, batch in (("first", 4), ("changed batch", 6), ("third batch", 9)):
        yield name, lambda batch=batch: compiled(torch.randn(batch, 64))


def distilbert(options: dict[str, Any]) -> Iterator[Call]:
    """DistilBERT of two layers: a first length, and another one, which makes a range."""
    from transformers import DistilBertConfig, DistilBertModel

    compiled = torch.compile(DistilBertModel(DistilBertConfig(n_layers=2)).eval(), **options)
    for name, length in (("first", 16), ("changed length", 24), ("third length", 31)):
        tokens = torch.randint(0, 1000, (1, length))
        mask = torch.ones(1, length, dtype=torch.int64)
        yield name, lambda tokens=tokens, mask=mask: compiled(input_ids=tokens, attention_mask=mask)


def llama(options: dict[str, Any]) -> Iterator[Call]:
    """Generation by a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    model.forward = torch.compile(model.forward, **options)
    tokens = torch.randint(0, 256, (1, 5))
    for name in ("generate", "generate again"):
        yield name, lambda: model.generate(tokens, max_new_tokens=8, do_sample=False)


def main() -> None:
    """Run one module."""
    name, budget_s, folder = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    graphs: list[CompiledGraph] = []
    search = CompiledGraph._search

    def counted(graph: CompiledGraph, key: Any, args: Any) -> None:
        graphs.append(graph)
        search(graph, key, args)

    CompiledGraph._search = counted  # type: ignore[method-assign]
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        calls = {"layers": layers, "distilbert": distilbert, "llama": llama}[name]
        for label, call in calls({"backend": "korch", "options": {"budget": budget_s, "cache_folder": folder}}):
            graphs.clear()
            begun_s = time.monotonic()
            call()
            seconds = time.monotonic() - begun_s
            reports = [plan.report for graph in graphs for plan in graph.plans[-1:]]
            parts = [p for r in reports for p in (r.plans.values() if isinstance(r.plans, dict) else [r])]
            least_s = [part.least_s or 0.0 for part in parts]
            rows.append(
                {
                    "call": label,
                    "budget_s": budget_s,
                    "searches": len(graphs),
                    "seconds": seconds,
                    "least_s": max(least_s, default=0.0) or None,
                }
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
