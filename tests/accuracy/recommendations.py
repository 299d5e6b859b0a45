"""What `quant-spec recommend` gives against hand-written recipes of the same bytes, over permutations of a real model.

SmolLM2-135M-Instruct, weights alone; each column is a permutation that leaves the model's function as it is. The
recipes are attention PTPC + MLP MXFP4 and attention MXFP4 + MLP PTPC; each objective is given the recipe's bytes.

    python tests/accuracy/recommendations.py --tokens 1024 --seeds 2
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
for noisy in ("torchao", "torch.utils._pytree", "quant_kernels"):
    logging.getLogger(noisy).setLevel(logging.ERROR)
ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "docs" / "tutorial" / "demo")]

import torch  # noqa: E402
import weights  # noqa: E402
from permutations import permute  # noqa: E402
from perplexity import evaluation_tokens, perplexity  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import quant_kernels  # noqa: E402
from quant_kernels.loading.folder import open_folder  # noqa: E402
from quant_kernels.recommend.choose import OBJECTIVES  # noqa: E402
from quant_kernels.recommend.measure import Measured, measure  # noqa: E402
from quant_kernels.recommend.recommendation import recommend  # noqa: E402
from quant_spec import QuantizationConfig  # noqa: E402
from quant_spec.formats import format_of_key  # noqa: E402

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECIPES: Final = {
    "attention ptpc_fp8, mlp mxfp4": {
        "global_quant_config": "mxfp4",
        "layer_quant_config": {"*.self_attn.*": "ptpc_fp8"},
    },
    "attention mxfp4, mlp ptpc_fp8": {
        "global_quant_config": "ptpc_fp8",
        "layer_quant_config": {"*.self_attn.*": "mxfp4"},
    },
}
FORMATS: Final = ("mxfp4", "ptpc_fp8")


class Subject:
    """A model whose layers are replaced by what formats make of them, and put back."""

    def __init__(self, folder: Path, seed: int | None, tokens: torch.Tensor) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        permute(self.model, seed)
        self.tokens = tokens
        modules = self.model.named_modules()
        self.layers = {name: each for name, each in modules if isinstance(each, torch.nn.Linear) and name != "lm_head"}
        self.original = {name: layer.weight.detach().bfloat16() for name, layer in self.layers.items()}

    def measured(self) -> Measured:
        """Return the units of the permuted model."""
        with tempfile.TemporaryDirectory() as scratch:
            self.model.to(torch.bfloat16).save_pretrained(scratch)
            self.model.to(torch.float32)
            return measure(open_folder(Path(scratch)), FORMATS)

    @torch.no_grad()
    def perplexity_of(self, request: object | None) -> float:
        """Return the perplexity with the layers in the formats that a request gives."""
        config = None if request is None else QuantizationConfig.from_online(request)
        for name, layer in self.layers.items():
            weight = self.original[name]
            key = None if config is None else config.resolve(name).weight_key
            if key is not None:
                found = format_of_key(key)
                assert found is not None
                weight = quant_kernels.dequantize(quant_kernels.quantize(weight, found), torch.float32)
            layer.weight.copy_(weight)
        return perplexity(self.model, self.tokens)


def nbytes_of(measured: Measured, request: object) -> int:
    """Return the bytes of the checkpoint that a request makes."""
    config = QuantizationConfig.from_online(request)
    total = measured.other_nbytes
    for unit in measured.units:
        key = config.resolve(unit.modules[0]).weight_key
        found = None if key is None else format_of_key(key)
        total += unit.option(None if found is None else found.name).nbytes
    return total


def rows_of(folder: Path, seed: int | None, tokens: torch.Tensor) -> list[dict[str, object]]:
    """Return the figures of one permutation."""
    subject = Subject(folder, seed, tokens)
    measured = subject.measured()
    name = "as it is" if seed is None else str(seed)
    rows: list[dict[str, object]] = [
        {"permutation": name, "recipe": "unquantized", "share": 1.0, "perplexity": subject.perplexity_of(None)}
    ]
    everything = {"global_quant_config": "mxfp4"}
    for recipe, request in {"all mxfp4": everything, **RECIPES}.items():
        share = nbytes_of(measured, request) / measured.nbytes
        rows.append(
            {"permutation": name, "recipe": recipe, "share": share, "perplexity": subject.perplexity_of(request)}
        )
        for objective in OBJECTIVES if request is not everything else OBJECTIVES[-1:]:
            found = recommend(measured, max_bytes=share, objective=objective)
            rows.append(
                {
                    "permutation": name,
                    "recipe": f"  recommended, {objective}",
                    "share": found.fraction,
                    "perplexity": subject.perplexity_of(found.request),
                }
            )
    return rows


def main() -> None:
    """Print the table, the figures of each permutation side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text (a multiple of 256)")
    parser.add_argument("--seeds", type=int, default=2, help="permutations beside the model as it is")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    folder = weights.smollm2(ROOT / "build" / "demo")
    tokens = evaluation_tokens(AutoTokenizer.from_pretrained(folder), arguments.tokens)
    columns = [rows_of(folder, seed, tokens) for seed in (None, *range(1, arguments.seeds + 1))]
    table = Table("recipe", "size", *(str(rows[0]["permutation"]) for rows in columns), "mean")
    for column in table.columns[1:]:
        column.justify = "right"
    for same in zip(*columns, strict=True):
        figures = [float(str(row["perplexity"])) for row in same]
        mean = sum(figures) / len(figures)
        size = f"{float(str(same[0]['share'])):.1%}"
        table.add_row(str(same[0]["recipe"]), size, *(f"{each:.2f}" for each in figures), f"{mean:.2f}")
    Console(width=100).print(table)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps([row for rows in columns for row in rows], indent=2))


if __name__ == "__main__":
    main()
