"""The recipes of online quantization from end to end, on the module trees of the real models, over processes (gloo).

    python tests/loading/recipes.py                                        all four recipes
    python tests/loading/recipes.py --model DeepSeek-R1 -tp 8 --method mtp
    python tests/loading/recipes.py --model Qwen3-235B-A22B -tp 2 --enable-expert-parallel
    python tests/loading/recipes.py --model Qwen3-30B-A3B -tp 2 --online_quant_config '{"global_quant_config": "mxfp8"}'

First the plan on the true sizes (no values). Then a checkpoint with all layers and experts but small sides is streamed
into every rank; the ranks' codes and scales must be those of the quantized whole, byte for byte, and the report must
name the layers and formats of the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from model_trees import (
    BLOCK_FP8,
    QWEN3_30B,
    QWEN3_235B,
    SMALL_QWEN3,
    SMALL_R1,
    bf16_tensors,
    block_fp8_tensors,
    deepseek,
    qwen3,
)
from torch import Tensor, nn

from quant_kernels import OnlineQuantizer, plan_model
from quant_spec import QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quant_spec.report import QuantReport

KEPT = ["lm_head", "*.gate.*"]
MIXED = {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}, "exclude_layer": KEPT}
COLUMN, ROW = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
STYLES = {f"*{leaf}": "column" for leaf in COLUMN} | {f"*{leaf}": "row" for leaf in ROW}
MODELS = ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-R1")


@attrs.frozen
class Expected:
    """What ranks are compared with.

    Attributes:
        tensors: the checkpoint.
        whole: the quantized whole model.
        planned: layer -> format.
    """

    tensors: list[tuple[str, Tensor]]
    whole: dict[str, Tensor]
    planned: dict[str, str]


@attrs.frozen
class Recipe:
    """One command.

    Attributes:
        model: one of `MODELS`.
        request: the online_quant_config.
        ranks: tensor-parallel ranks.
        spread_experts: whole experts on different ranks instead of pieces of each on all.
        mtp: with the block that predicts several tokens.
    """

    model: str
    request: dict[str, object]
    ranks: int = 1
    spread_experts: bool = False
    mtp: bool = False

    def config(self) -> QuantizationConfig:
        """Return the request over the checkpoint's own config."""
        source = QuantizationConfig.from_dict(BLOCK_FP8) if self.model == "DeepSeek-R1" else None
        return QuantizationConfig.from_online(self.request, source=source)

    def styles(self) -> dict[str, str]:
        """Return how layers are spread."""
        return {"*mlp.experts": "expert" if self.spread_experts else "tensor", **STYLES}

    def tree(self, *, small: bool = True, share: int = 1) -> nn.Module:
        """Return the model on meta: true or small sides, whole or the sides of one of `share` ranks."""
        if self.model == "DeepSeek-R1":
            sides = {**SMALL_R1, "num_attention_heads": 8, "num_key_value_heads": 8} if small else {}
            sides |= {"moe_intermediate_size": 256, "intermediate_size": 256} if small else {}
            cut = ("num_attention_heads", "num_key_value_heads", "moe_intermediate_size", "intermediate_size")
            return deepseek(_shared({"n_routed_experts": 256, "n_group": 8, **sides}, cut, share), mtp=self.mtp)
        true = QWEN3_30B if self.model == "Qwen3-30B-A3B" else QWEN3_235B
        sides = {**true, **SMALL_QWEN3, "moe_intermediate_size": 64} if small else true
        experts = "num_experts" if self.spread_experts else "moe_intermediate_size"
        return qwen3(_shared(sides, ("num_attention_heads", "num_key_value_heads", experts), share))

    def rank_tree(self, rank: int) -> nn.Module:
        """Return one rank's model: its sides, its experts, a router over all experts."""
        model = self.tree(share=self.ranks)
        if self.spread_experts:
            for name, module in model.named_modules():
                if name.endswith("mlp.experts"):
                    count = module.num_experts
                    module.expert_ids = range(rank * count, (rank + 1) * count)
                    router = model.get_submodule(name.removesuffix("experts") + "gate")
                    n, k = router.weight.shape
                    router.weight = nn.Parameter(torch.empty(n * self.ranks, k, dtype=torch.bfloat16, device="meta"))
        return model

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return the checkpoint, the same for everyone."""
        if self.model == "DeepSeek-R1":
            # 45,000 tensors of single experts are many for two ranks already.
            return block_fp8_tensors(self.tree(), stacked=self.ranks > 2)
        return bf16_tensors(self.tree())


RECIPES = (
    Recipe("Qwen3-30B-A3B", {"global_quant_config": "ptpc_fp8", "exclude_layer": KEPT}, 2),
    Recipe("Qwen3-235B-A22B", {"global_quant_config": "mxfp4", "exclude_layer": KEPT}, 2, spread_experts=True),
    Recipe("DeepSeek-R1", MIXED, 2),
    Recipe("DeepSeek-R1", MIXED, 8, mtp=True),
)


def _shared(sides: dict[str, int], cut: tuple[str, ...], share: int) -> dict[str, int]:
    if share > 1 and "num_attention_heads" in cut and "num_attention_heads" not in sides:
        sides = {**sides, "num_attention_heads": 128, "num_key_value_heads": 128}
    return {**sides, **{name: sides[name] // share for name in cut if name in sides}}


def load(recipe: Recipe, model: nn.Module, tensors: Iterable[tuple[str, Tensor]], **options: object) -> QuantReport:
    with OnlineQuantizer(model, recipe.config(), **options) as quantizer:
        quantizer.load_all(tensors)
    return quantizer.report


def raw(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dim() else tensor.reshape(1)).contiguous().view(torch.uint8)


def piece(name: str, whole: Tensor, own: Tensor, recipe: Recipe, rank: int) -> Tensor:
    """Return a rank's piece of a whole tensor, told from what it is and from the piece's shape."""
    if tuple(whole.shape) == tuple(own.shape):
        return whole
    if recipe.spread_experts and ".mlp.experts." in name:
        return whole[rank * own.shape[0] : (rank + 1) * own.shape[0]]
    side = next(axis for axis in range(whole.dim()) if whole.shape[axis] != own.shape[axis])
    size = own.shape[side]
    if "gate_up_proj" in name:
        halves = whole.chunk(2, side)
        return torch.cat([half.narrow(side, rank * size // 2, size // 2) for half in halves], side)
    return whole.narrow(side, rank * size, size)


def compare(whole: dict[str, Tensor], model: nn.Module, recipe: Recipe, rank: int) -> int:
    """Compare a rank's tensors with the whole's; return their number."""
    found = model.state_dict()
    missing = whole.keys() ^ found.keys()
    assert not missing, sorted(missing)[:4]
    for name, own in found.items():
        expected = piece(name, whole[name], own, recipe, rank)
        assert torch.equal(raw(own), raw(expected)), f"rank {rank}: {name} differs from the whole's piece"
    return len(found)


def work(rank: int, recipe: Recipe, expected: Expected, folder: str) -> None:
    """Be one rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=recipe.ranks)
    model = recipe.rank_tree(rank)
    options = {"group": dist.group.WORLD, "parallel": recipe.styles(), "report_dir": folder}
    report = load(recipe, model, expected.tensors, **options)
    count = compare(expected.whole, model, recipe, rank)
    if rank == 0:
        reported = {layer.layer: layer.target for layer in report.layers}
        assert reported == expected.planned, sorted(reported.items() ^ expected.planned.items())[:4]
        document = json.loads(Path(report.saved_to or "").read_text())
        assert document["num_layers"] == len(expected.planned)
        facts = report.loading
        assert facts is not None
        print("  " + "\n  ".join(report.log_lines()[:2]))
        print(f"  {count} tensors of each rank equal the whole's; {facts.sent_bytes:,} bytes agreed on by all ranks")


def plan_true_sizes(recipe: Recipe) -> dict[str, str]:
    """Return layer -> format as planned for the model's true sides, cut over the ranks."""
    plan = plan_model(recipe.tree(small=False), recipe.config())
    nbytes = [pair for module in plan.changed if (pair := module.nbytes("bfloat16"))]
    before, after = (sum(each) / 1e9 for each in zip(*nbytes, strict=True))
    print(f"  plan of the true sizes: {len(plan.changed)} layers, {before:,.1f} GB -> {after:,.1f} GB")
    assert not plan.warnings, plan.warnings
    assert not plan.unmatched, plan.unmatched
    return {module.name: str(module.decision.config.weight) for module in plan.changed}


def run(recipe: Recipe) -> bool:
    """Run one recipe; return whether all ranks were content."""
    how = f"tp {recipe.ranks}{', experts spread' * recipe.spread_experts}{', MTP' * recipe.mtp}"
    print(f"{recipe.model}, {how}: {json.dumps(recipe.request)}", flush=True)
    started = time.perf_counter()
    planned = plan_true_sizes(recipe)
    tensors = list(recipe.tensors())
    model = recipe.tree()
    load(recipe, model, tensors, write_report=False)
    expected = Expected(tensors, model.state_dict(), planned)
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, recipe, expected, folder) for rank in range(recipe.ranks)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    fine = not any(statuses)
    print(f"  {'passed' if fine else 'FAILED'} in {time.perf_counter() - started:.0f} s", flush=True)
    return fine


def _fork(rank: int, recipe: Recipe, expected: Expected, folder: str) -> int:
    """Start one rank, which shares the memory of what is expected; return its process."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work(rank, recipe, expected, folder)
        status = 0
    except Exception as error:  # noqa: BLE001  (the end of this process)
        print(f"  rank {rank}: {type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: all four recipes")
    parser.add_argument("-tp", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument("--method", choices=["mtp"])
    parser.add_argument("--online_quant_config", "--online-quant-config", type=json.loads, help="JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads does not survive the forks
    recipes: Iterable[Recipe] = RECIPES
    if options.model:
        usual = next(each.request for each in RECIPES if each.model == options.model)
        request = options.online_quant_config or usual
        spread, mtp = options.enable_expert_parallel, options.method == "mtp"
        recipes = [Recipe(options.model, request, options.tensor_parallel_size, spread, mtp)]
    outcomes = [run(recipe) for recipe in recipes]
    if not all(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
