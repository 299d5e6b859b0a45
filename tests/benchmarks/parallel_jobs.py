"""What one rank does in bench_parallel.py: shapes of the models' layers, ways to quantize them, and their figures."""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from torch import nn

from quant_kernels import quantize, quantize_model, quantize_shard
from quant_kernels.loading.distributed import ProcessRanks
from quant_spec import LoadError, QuantizationConfig, get_format

if TYPE_CHECKING:
    from collections.abc import Callable

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "nvfp4")
KILL_TIMEOUT = 20.0
MOST_WHOLE_BYTES = 8 << 30
"""Bytes of a whole bf16 weight that is gathered; stacks beyond it lose experts."""


@attrs.frozen
class Weight:
    """A weight [N, K] or [E, N, K] of a layer: the rows of its projections, and the side that is cut, or `expert`."""

    name: str
    rows: tuple[int, ...]
    k: int
    cut: str | None
    experts: int = 0

    def local(self, size: int, shrink: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        n, k = sum(self.local_rows(size, shrink)), self.k // shrink // (size if self.cut == "row" else 1)
        return (self.local_experts(size, shrink), n, k) if self.experts else (n, k)

    def local_rows(self, size: int, shrink: int) -> tuple[int, ...]:
        """Return the rows of each projection on a rank."""
        return tuple(rows // shrink // (size if self.cut == "column" else 1) for rows in self.rows)

    def local_experts(self, size: int, shrink: int) -> int:
        """Return the experts on a rank: a part of them where whole experts are spread."""
        share = size if self.cut == "expert" else 1
        return max(1, self.experts // shrink**2 // share)


@attrs.frozen
class Model:
    """A model's layer, how often it comes, and what it is asked to become."""

    name: str
    request: dict[str, object]
    weights: tuple[Weight, ...]
    layers: int
    block_fp8: bool = False


def qwen3(name: str, hidden: int, heads: int, inner: int, layers: int, target: str, *, spread: bool = False) -> Model:
    up, down = ("expert", "expert") if spread else ("column", "row")
    weights = (
        Weight("qkv_proj", (heads * 128, 512, 512), hidden, "column"),
        Weight("o_proj", (hidden,), heads * 128, "row"),
        Weight("experts.w13_weight", (inner, inner), hidden, up, 128),
        Weight("experts.w2_weight", (hidden,), inner, down, 128),
    )
    return Model(f"{name}{' EP' if spread else ''}", {"global_quant_config": target}, weights, layers)


R1 = Model(
    "DeepSeek-R1",
    {"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"}},
    (
        Weight("q_b_proj", (24576,), 1536, "column"),
        Weight("kv_b_proj", (32768,), 512, "column"),
        Weight("o_proj", (7168,), 16384, "row"),
        Weight("shared_experts.gate_up_proj", (2048, 2048), 7168, "column"),
        Weight("shared_experts.down_proj", (7168,), 2048, "row"),
        Weight("experts.w13_weight", (2048, 2048), 7168, "column", 256),
        Weight("experts.w2_weight", (7168,), 2048, "row", 256),
    ),
    58,
    block_fp8=True,
)


def models_for(size: int) -> list[Model]:
    """Return the models whose rank shapes are asked for at so many ranks."""
    small = qwen3("Qwen3-30B", 2048, 32, 768, 48, "ptpc_fp8")
    large = qwen3("Qwen3-235B", 4096, 64, 1536, 94, "mxfp4")
    spread = qwen3("Qwen3-235B", 4096, 64, 1536, 94, "mxfp4", spread=True)
    return {2: [small, spread], 4: [small, large], 8: [large, R1]}.get(size, [large])


class Rank:
    """One rank: where it runs, and the pieces of weights that it makes up."""

    def __init__(self, rank: int, size: int, shrink: int, rounds: int) -> None:
        self.rank, self.size, self.shrink, self.rounds = rank, size, shrink, rounds
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

    def values(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed * 1000 + self.rank)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, 0.02, generator=generator)

    def seconds(self, function: Callable[[], object]) -> float:
        """Return the median time of a call that all ranks make at once."""
        times = []
        for _ in range(self.rounds + 1):
            dist.barrier()
            self.wait()
            started = time.perf_counter()
            function()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float) -> float:
        """Return the greatest of a figure over the ranks."""
        found = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    # -- one weight -------------------------------------------------------------------------------------------------

    def gathered(self, shard: torch.Tensor, weight: Weight, name: str) -> torch.Tensor:
        """Gather and quantize the whole weight, as one would without agreeing; return this rank's codes."""
        parts = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(parts, shard)
        rows = weight.local_rows(self.size, self.shrink)
        if weight.cut == "row":
            whole = torch.cat(parts, dim=-1)
        else:
            by_projection = zip(*(part.split(rows, dim=-2) for part in parts), strict=True)
            whole = torch.cat([piece for projection in by_projection for piece in projection], dim=-2)
        del parts
        codes = quantize(whole, name).data.view(torch.uint8)
        if weight.cut == "row":
            return codes.chunk(self.size, dim=-1)[self.rank]
        wholes = codes.split([each * self.size for each in rows], dim=-2)
        return torch.cat([whole.chunk(self.size, dim=-2)[self.rank] for whole in wholes], dim=-2)

    def equal_shards(self, model: Model) -> list[dict[str, object]]:
        """Compare the shards of every weight and format with those of the quantized whole, and time both ways."""
        ranks = ProcessRanks(dist.group.WORLD)
        found: list[dict[str, object]] = []
        for index, weight in enumerate(model.weights):
            if weight.cut not in ("column", "row"):
                continue
            shape = weight.local(self.size, self.shrink)
            fits = MOST_WHOLE_BYTES // (2 * shape[-1] * shape[-2] * self.size)
            shard = self.values((min(shape[0], max(1, fits)), *shape[1:]) if weight.experts else shape, index)
            for name in FORMATS:
                if weight.cut == "row" and shape[-1] % get_format(name).k_multiple:
                    continue  # such a cut cannot be stored
                options = {"parallel": weight.cut, "group": ranks, "shards": len(weight.rows)}
                before = ranks.sent_bytes
                made = quantize_shard(shard, name, **options)
                sent = ranks.sent_bytes - before
                same = torch.equal(made.data.view(torch.uint8), self.gathered(shard, weight, name))
                ours = self.seconds(lambda: quantize_shard(shard, name, **options))  # noqa: B023  (called at once)
                peer = self.seconds(lambda: self.gathered(shard, weight, name))  # noqa: B023
                found.append(
                    {
                        "weight": f"{model.name} {weight.name} {list(shard.shape)}",
                        "cut": weight.cut,
                        "format": name,
                        "equal": self.slowest(float(not same)) == 0,
                        "agree_seconds": self.slowest(ours),
                        "gather_seconds": self.slowest(peer),
                        "agree_bytes": sent,
                        "gather_bytes": shard.nbytes * (self.size - 1),
                    }
                )
        return found

    # -- whole ranks ------------------------------------------------------------------------------------------------

    def build(self, model: Model, layers: int) -> nn.Module:
        """Return some layers of a rank's model, with values."""
        return nn.ModuleList(self._layer(model, index) for index in range(layers))

    def _layer(self, model: Model, index: int) -> nn.Module:
        layer = nn.Module()
        for number, weight in enumerate(model.weights):
            *above, last = weight.name.split(".")
            owner, attribute = layer, last
            for name in above:
                if name not in owner._modules:
                    owner.add_module(name, nn.Module())
                owner = owner.get_submodule(name)
            if not weight.experts:
                owner.add_module(last, nn.Module())
                owner, attribute = owner.get_submodule(last), "weight"
            owner.quant_parallel = _style(weight)
            values = self.values(weight.local(self.size, self.shrink), 100 * index + number)
            if weight.cut == "expert":
                count = values.shape[0]
                owner.expert_ids = range(self.rank * count, (self.rank + 1) * count)
            if len(weight.rows) > 1 and not weight.experts:
                owner.output_partition_sizes = list(weight.local_rows(self.size, self.shrink))
            if model.block_fp8:
                stored = quantize(values, "per_block_fp8")
                values = stored.data
                owner.register_buffer(f"{attribute}_scale_inv", stored.scale)
            owner.register_parameter(attribute, nn.Parameter(values, requires_grad=False))
        return layer

    def job(self, model: Model, layers: int) -> dict[str, object]:
        """Time a rank's layers: by rank 0 alone, by all at once without agreeing, and by all, agreeing."""
        source = QuantizationConfig.from_dict(
            {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
            if model.block_fp8
            else None
        )
        config = QuantizationConfig.from_online(model.request, source=source)

        def convert(group: object) -> tuple[float, int]:
            held = self.build(model, layers)
            self.wait()
            report = quantize_model(held, config, group=group, write_report=False)
            assert report.loading is not None
            return report.elapsed_seconds, report.loading.sent_bytes

        def median(group: object) -> float:
            times = []
            for _ in range(self.rounds + 1):
                if group is not None:
                    dist.barrier()
                times.append(convert(group)[0])
            return statistics.median(times[1:])

        alone = median(None) if self.rank == 0 else 0.0
        dist.barrier()
        apart = median(None)
        dist.barrier()
        together = median(dist.group.WORLD)
        return {
            "model": model.name,
            "layers": layers,
            "of": model.layers,
            "alone_seconds": self.slowest(alone),
            "apart_seconds": self.slowest(apart),
            "together_seconds": self.slowest(together),
            "sent_bytes": convert(dist.group.WORLD)[1] // self.size,
        }

    # -- a rank that is killed --------------------------------------------------------------------------------------

    def killed(self, model: Model, victim: int) -> dict[str, object]:
        """Quantize some layers while one rank is killed in the middle; return what this rank raised, and when."""

        class Mortal(ProcessRanks):
            def reduce_max(self, values: torch.Tensor, what: str) -> torch.Tensor:
                if self.rank == victim and ".1." in f".{what}":
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().reduce_max(values, what)

        request = {"global_quant_config": "nvfp4"}  # every layer takes a collective
        held = self.build(attrs.evolve(model, block_fp8=False), 3)
        started, text = time.perf_counter(), "no error"
        try:
            ranks = Mortal(dist.group.WORLD, timeout=KILL_TIMEOUT)
            quantize_model(held, request, group=ranks, write_report=False)
        except LoadError as error:
            text = str(error).partition("\n")[0]
        return {"seconds": time.perf_counter() - started, "text": text, "named": f"rank {victim}" in text}


def _style(weight: Weight) -> str:
    if weight.experts:
        return "expert" if weight.cut == "expert" else "tensor"
    return weight.cut or "replicated"
