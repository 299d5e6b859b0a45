"""`make accuracy`: what each format and recipe costs on two real models, as a table, JSON and a picture.

SmolLM2-135M-Instruct and all-MiniLM-L6-v2 are loaded by transformers through QuantSpecConfig, once for each recipe with
weights alone quantized, and once with inputs quantized on the fly too; they compute in fp32, so that every run of one
machine gives the same figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
for noisy in ("torchao", "torch.utils._pytree", "quant_kernels"):
    logging.getLogger(noisy).setLevel(logging.ERROR)
ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "docs" / "tutorial" / "demo")]

import attrs  # noqa: E402
import torch  # noqa: E402
import weights  # noqa: E402
from measures import encoder_figures, language_figures, window_logits  # noqa: E402
from perplexity import TOKENS, WINDOW, evaluation_tokens  # noqa: E402
from plot import Point, picture  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from similarity import SENTENCES, embeddings  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from quant_kernels.integrations.transformers import QuantSpecConfig  # noqa: E402
from quant_spec import get_format  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMATS: Final = ("ptpc_fp8", "mxfp8", "per_block_fp8", "nvfp4", "mxfp4")
RECIPES: Final[dict[str, dict[str, str]]] = {
    **{name: {"*": name} for name in FORMATS},
    "attention ptpc_fp8, mlp mxfp4": {"*attn*": "ptpc_fp8", "*attention*": "ptpc_fp8", "*": "mxfp4"},
    "attention mxfp4, mlp ptpc_fp8": {"*attn*": "mxfp4", "*attention*": "mxfp4", "*": "ptpc_fp8"},
    "down_proj mxfp4, rest ptpc_fp8": {"*down_proj": "mxfp4", "*output.dense": "mxfp4", "*": "ptpc_fp8"},
}
"""Name -> patterns over layers, the first that fits counts."""


def request_of(recipe: dict[str, str], *, activations: bool, names: list[str]) -> dict[str, object]:
    """Return the request of a recipe, without patterns that fit no layer of the model."""
    fitting = {pattern: word for pattern, word in recipe.items() if any(pattern.strip("*") in name for name in names)}
    targets = {
        pattern: {"weight": word} if activations else {"weight": word, "activation": None}
        for pattern, word in fitting.items()
    }
    return {"targets": targets, "ignore": ["lm_head"] if "lm_head" in names else []}


def loaded(model_class: type, folder: Path, request: dict[str, object] | None) -> tuple[PreTrainedModel, float, float]:
    """Return a model that computes in fp32, the bits of one of its quantized weights, and the seconds of loading."""
    begun = time.perf_counter()
    options = {} if request is None else {"quantization_config": QuantSpecConfig(request, write_report=False)}
    model = model_class.from_pretrained(folder, dtype=torch.bfloat16 if "Smol" in folder.name else None, **options)
    seconds = time.perf_counter() - begun
    bits = 16.0
    if request is not None:
        layers = model.hf_quantizer.report.layers
        elements = sum(rows * columns for layer in layers for rows, columns in layer.shapes)
        bits = 8 * sum(layer.bytes_after for layer in layers) / elements
    return model.to(torch.float32).eval(), bits, seconds


def smollm2(folder: Path, tokens: int, recipes: dict[str, dict[str, str]], console: Console) -> list[dict[str, object]]:
    """Measure the language model; return one row a model."""
    source = weights.smollm2(folder)
    ids = evaluation_tokens(AutoTokenizer.from_pretrained(source), tokens)
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    model, _, seconds = loaded(AutoModelForCausalLM, source, None)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    reference = window_logits(model, windows)
    rows = [_row("unquantized", "-", 16.0, seconds, language_figures(reference, reference, windows))]
    for name, recipe in recipes.items():
        for series in ("weights", "weights and activations"):
            request = request_of(recipe, activations="activations" in series, names=names)
            model, bits, seconds = loaded(AutoModelForCausalLM, source, request)
            figures = language_figures(window_logits(model, windows), reference, windows)
            rows.append(_row(name, series, bits, seconds, figures))
            console.print(f"{name} ({series}): perplexity {figures.perplexity:.2f}", style="dim")
            del model
            gc.collect()
    return rows


def minilm(folder: Path, recipes: dict[str, dict[str, str]]) -> list[dict[str, object]]:
    """Measure the sentence encoder; return one row a model."""
    source = weights.minilm(folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model, _, seconds = loaded(AutoModel, source, None)
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    reference = embeddings(model, tokenizer)
    rows = [_row("unquantized", "-", 32.0, seconds, encoder_figures(reference, reference))]
    for name, recipe in recipes.items():
        for series in ("weights", "weights and activations"):
            request = request_of(recipe, activations="activations" in series, names=names)
            model, bits, seconds = loaded(AutoModel, source, request)
            rows.append(_row(name, series, bits, seconds, encoder_figures(embeddings(model, tokenizer), reference)))
    return rows


def _row(recipe: str, series: str, bits: float, seconds: float, figures: object) -> dict[str, object]:
    return {
        "recipe": recipe,
        "quantized": series,
        "bits": round(bits, 3),
        "load_seconds": round(seconds, 2),
        **{key: round(value, 5) for key, value in attrs.asdict(figures).items()},
    }


def table(title: str, rows: list[dict[str, object]]) -> Table:
    """Return rows as a table for the terminal."""
    made = Table(title=title, title_justify="left")
    for column in rows[0]:
        made.add_column(column.replace("_", " "), justify="left" if column in ("recipe", "quantized") else "right")
    for row in rows:
        made.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return made


def markdown(rows: list[dict[str, object]]) -> str:
    """Return rows as the table that the documentation shows."""
    columns = [column for column in rows[0] if column != "load_seconds"]
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += [
        "| " + " | ".join(f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c]) for c in columns) + " |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure both models and write what was found."""
    parser = argparse.ArgumentParser(prog="make accuracy", description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "demo", help="where the models are kept")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "accuracy", help="where the results go")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of the text")
    parser.add_argument("--model", choices=["both", "smollm2", "minilm"], default="both")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES), metavar="NAME")
    parser.add_argument("--threads", type=int, help="of torch; on a busy machine, one is fastest")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    recipes = {name: RECIPES[name] for name in arguments.recipes}
    for name in FORMATS:
        get_format(name)
    console = Console(width=150)
    arguments.output.mkdir(parents=True, exist_ok=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {"tokens": arguments.tokens, "machine": platform.machine(), "torch": torch.__version__}
    pages = []
    if arguments.model != "minilm":
        rows = smollm2(arguments.folder, arguments.tokens, recipes, console)
        results["smollm2"] = rows
        points = [
            Point(str(row["recipe"]), str(row["quantized"]), float(str(row["bits"])), float(str(row["divergence"])))
            for row in rows[1:]
        ]
        drawn = picture(points, "SmolLM2-135M-Instruct: divergence against size", "KL divergence a token, nats")
        (arguments.output / "accuracy.svg").write_text(drawn, "utf-8")
        console.print(table(f"SmolLM2-135M-Instruct, {arguments.tokens} tokens in windows of {WINDOW}", rows))
        pages.append(markdown(rows))
    if arguments.model != "smollm2":
        rows = minilm(arguments.folder, recipes)
        results["minilm"] = rows
        console.print(table(f"all-MiniLM-L6-v2, {len(SENTENCES)} sentences", rows))
        pages.append(markdown(rows))
    (arguments.output / "accuracy.json").write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    (arguments.output / "accuracy.md").write_text("\n\n".join(pages) + "\n", "utf-8")
    console.print(f"accuracy.json, accuracy.md, accuracy.svg: in {arguments.output}")


if __name__ == "__main__":
    main()
