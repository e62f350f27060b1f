"""`korch generate`: continue a prompt of token ids."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from korch.errors import OptionError

if TYPE_CHECKING:
    from korch.cli.parser import Commands


def add_generate(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("generate", help="continue a prompt of token ids by a language model")
    parser.add_argument("artifact", metavar="OUT.korch", help="an artifact with states")
    parser.add_argument(
        "--ids", required=True, metavar="ID,ID", help="the token ids of the prompt, separated by commas"
    )
    parser.add_argument("--count", type=int, default=64, metavar="N", help="the most new tokens")
    parser.add_argument("--stop", default="", metavar="ID,ID", help="token ids after which nothing follows")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 for the token with the greatest logit")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="choose among the K tokens with the greatest logits"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices")
    parser.set_defaults(command=generate)


def generate(parsed: argparse.Namespace) -> int:
    """Print the new token ids, one per line, and then on stderr how long they took."""
    from korch.loading import load
    from korch.runtime import generate as loop
    from korch.runtime.stateful import StatefulExecutable

    prompt, stop = _ids(parsed.ids, "--ids"), _ids(parsed.stop, "--stop")
    if parsed.count < 1:
        raise OptionError(f"the value {parsed.count} is too small", "option --count", "at least 1")
    sampling = loop.Sampling(parsed.temperature, parsed.top_k, parsed.seed)
    executable = load(parsed.artifact)
    if not isinstance(executable, StatefulExecutable):
        hint = "Optimize a decoder whose cache may grow: --shape past=0..1023"
        raise OptionError("its model has no states", str(parsed.artifact), "a language model with a cache", hint)
    found = loop.generate(
        executable, prompt, parsed.count, sampling, stop=stop, tell=lambda token: print(token, flush=True)
    )
    steps = len(found.tokens) - 1
    rate = f", {steps / found.steps_s:.1f} tokens/s" if steps else ""
    print(
        f"prompt: {len(prompt)} tokens, {len(prompt) / found.prompt_s:.1f} tokens/s; new: {len(found.tokens)}{rate}",
        file=sys.stderr,
    )
    return 0


def _ids(text: str, flag: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1]
    if any(token < 0 for token in found):
        raise OptionError(f"{text!r} is no list of token ids", f"option {flag}", "such as 17,4,230")
    return found
