"""The same tensors quantized by this library and by what users have: bytes, error, seconds.

    python tests/benchmarks/bench_peers.py [--rows N] [--columns K] [--rounds R] [--json FILE]

Peers: torchao (`to_mx` in its scale modes, FP8 row-wise), compressed-tensors (its own scales and compressors) and
vLLM's `fp8_per_channel`; one that is not installed is left out, by name. Tensors: normal bf16 values, and the same with
one value in a thousand 20 times as large. Error: SQNR in dB of each project's own decoding. Bytes: codes and scales.
Seconds: median of the rounds, on one machine, with as many threads as torch takes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from quant_kernels import dequantize, quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logging.getLogger("torchao").setLevel(logging.ERROR)
warnings.simplefilter("ignore")
FORMATS: Final = ("ptpc_fp8", "mxfp8", "mxfp4", "nvfp4", "per_block_fp8")
GROUP: Final = 32


class Stored(NamedTuple):
    """What a project made of a weight: its tensors, and how it reads them."""

    tensors: tuple[torch.Tensor, ...]
    decode: Callable[[], torch.Tensor]


class Peer(NamedTuple):
    """One way to quantize a weight."""

    project: str
    format: str
    variant: str
    run: Callable[[torch.Tensor], Stored]


def ours() -> Iterator[Peer]:
    """Yield this library's formats."""

    def run(word: str) -> Callable[[torch.Tensor], Stored]:
        def made(weight: torch.Tensor) -> Stored:
            q = quantize(weight, word)
            tensors = (q.data, q.scale) if q.second_scale is None else (q.data, q.scale, q.second_scale)
            return Stored(tensors, lambda: dequantize(q, torch.float32))

        return made

    for word in FORMATS:
        yield Peer("quant_kernels", word, "", run(word))


def torchao() -> Iterator[Peer]:
    """Yield torchao's MX formats in each of its scale modes, and FP8 by rows."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.quantization import Float8Tensor

    elements = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}

    def mx(element: torch.dtype, mode: ScaleCalculationMode) -> Callable[[torch.Tensor], Stored]:
        def made(weight: torch.Tensor) -> Stored:
            scale, data = to_mx(weight, element, GROUP, mode)
            return Stored((data, scale), lambda: to_dtype(data, scale, element, GROUP, torch.float32))

        return made

    def rows(weight: torch.Tensor) -> Stored:
        made = Float8Tensor.from_hp(weight)
        return Stored((made.qdata, made.scale), lambda: made.qdata.float() * made.scale.float())

    for word, element in elements.items():
        for mode in ScaleCalculationMode:
            yield Peer("torchao", word, mode.name.lower(), mx(element, mode))
    yield Peer("torchao", "ptpc_fp8", "Float8Tensor", rows)


def compressed_tensors() -> Iterator[Peer]:
    """Yield compressed-tensors' presets: scales from the weight's extremes, then its own compressor."""
    from compressed_tensors.compressors.base import compress_module, decompress_module
    from compressed_tensors.quantization import (
        QuantizationScheme,
        initialize_module_for_quantization,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    def run(preset: str, group: int) -> Callable[[torch.Tensor], Stored]:
        def made(weight: torch.Tensor) -> Stored:
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            layer.weight.data = weight
            scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
            initialize_module_for_quantization(layer, scheme)
            grouped = weight.unflatten(-1, (-1, group)) if group else weight.unsqueeze(1)
            low, high = grouped.amin(-1), grouped.amax(-1)
            scale, _ = calculate_qparams(low, high, scheme.weights)
            layer.weight_scale.data.copy_(scale)
            compress_module(layer)
            tensors = tuple(each.detach() for each in layer.parameters())

            def decode() -> torch.Tensor:
                decompress_module(layer)
                return layer.weight.detach().float()

            return Stored(tensors, decode)

        return made

    for word, preset, group in (("ptpc_fp8", "FP8_DYNAMIC", 0), ("mxfp8", "MXFP8", GROUP), ("mxfp4", "MXFP4", GROUP)):
        yield Peer("compressed-tensors", word, preset, run(preset, group))


def vllm() -> Iterator[Peer]:
    """Yield vLLM's `fp8_per_channel`: the functions that its online method calls for each layer."""
    from vllm.model_executor.layers.quantization.online import fp8

    def rows(weight: torch.Tensor) -> Stored:
        scale = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
        data = fp8._fp8_quant_per_channel(weight, scale)
        return Stored((data, scale), lambda: data.float() * scale)

    yield Peer("vllm", "ptpc_fp8", "fp8_per_channel", rows)


def weights(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return the tensors that everyone quantizes, bf16 [rows, columns]."""
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=random) * 0.02
    rare = torch.rand(rows, columns, generator=random) < 1e-3
    return {"normal": normal.bfloat16(), "with outliers": torch.where(rare, 20 * normal, normal).bfloat16()}


def sqnr_db(weight: torch.Tensor, decoded: torch.Tensor) -> float:
    """Return 10·log10(Σ w² / Σ (w − ŵ)²)."""
    wanted = weight.double()
    return float(10 * torch.log10(wanted.square().sum() / (wanted - decoded.double()).square().sum()))


def measured(peer: Peer, weight: torch.Tensor, rounds: int) -> dict[str, object]:
    """Return one row of the table."""
    taken = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        stored = peer.run(weight)
        taken.append(time.perf_counter() - begun)
    return {
        "project": peer.project,
        "format": peer.format,
        "variant": peer.variant,
        "bytes": sum(tensor.nbytes for tensor in stored.tensors),
        "sqnr_db": round(sqnr_db(weight, stored.decode()), 2),
        "seconds": statistics.median(taken[1:]),
    }


def main() -> int:
    """Measure every peer that is installed, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peers: list[Peer] = []
    for project in (ours, torchao, compressed_tensors, vllm):
        with contextlib.suppress(ImportError):
            peers += project()
    present = {peer.project for peer in peers}
    print("left out, not installed:", ", ".join({"torchao", "compressed-tensors", "vllm"} - present) or "none")
    results: dict[str, list[dict[str, object]]] = {}
    for name, weight in weights(arguments.rows, arguments.columns).items():
        found = [measured(peer, weight, arguments.rounds) for peer in peers]
        results[name] = found
        own = {str(row["format"]): float(str(row["seconds"])) for row in found if row["project"] == "quant_kernels"}
        print(f"\n{name}: bf16 [{arguments.rows}, {arguments.columns}]")
        print(f"{'format':<14}{'project':<20}{'variant':<17}{'bytes':>12}{'SQNR dB':>9}{'seconds':>10}{'x ours':>8}")
        for row in sorted(found, key=lambda row: FORMATS.index(str(row["format"]))):
            seconds = float(str(row["seconds"]))
            ratio = seconds / own[str(row["format"])]
            print(
                f"{row['format']:<14}{row['project']:<20}{row['variant']:<17}{row['bytes']:>12,}"
                f"{row['sqnr_db']:>9}{seconds:>10.4f}{ratio:>8.1f}"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
