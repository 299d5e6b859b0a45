"""from_pretrained with a request against from_pretrained alone, on SmolLM2 (fetched as the demo does).

    python tests/benchmarks/bench_transformers.py [--rounds N] [--json FILE] [--device cpu|cuda] [--limit RATIO]

Rounds of plain and quantized loading alternate, so that other work on the machine meets both alike; the ratio is that
of the medians. Limit: 1.15.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Final

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
for noisy in ("torchao", "torch.utils._pytree", "quant_kernels"):
    logging.getLogger(noisy).setLevel(logging.ERROR)
ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "tutorial" / "demo"))

import torch  # noqa: E402
import weights  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quant_kernels.integrations.transformers import QuantSpecConfig  # noqa: E402

REQUESTS: Final = ("ptpc_fp8", "mxfp8", "mxfp4", "nvfp4", "per_block_fp8")
LIMIT: Final = 1.15


def seconds_of(folder: Path, word: str | None, device: str) -> float:
    """Load the model once, quantized if a format is given."""
    options: dict[str, object] = {"dtype": torch.bfloat16, "device_map": device}
    if word is not None:
        options["quantization_config"] = QuantSpecConfig({"global_quant_config": word}, write_report=False)
    gc.collect()
    begun = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if device != "cpu":
        torch.cuda.synchronize()
    taken = time.perf_counter() - begun
    assert (word is None) != hasattr(model, "hf_quantizer")
    return taken


def main() -> int:
    """Measure, print ratios, write JSON; 1 if one is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=LIMIT)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = weights.smollm2(arguments.folder)
    kinds: tuple[str | None, ...] = (None, *REQUESTS)
    taken: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    for kind in kinds:
        seconds_of(folder, kind, arguments.device)  # files into the page cache, code into memory
    for _ in range(arguments.rounds):
        for kind in kinds:
            taken[kind].append(seconds_of(folder, kind, arguments.device))
    plain = statistics.median(taken[None])
    ratios = {word: statistics.median(taken[word]) / plain for word in REQUESTS}
    print(f"plain: {plain:.2f} s (median of {arguments.rounds})")
    for word, ratio in ratios.items():
        print(f"{word}: {ratio:.2f} x plain (limit {arguments.limit}){'' if ratio <= arguments.limit else '  ABOVE'}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"plain_seconds": plain, "ratios": ratios}, indent=2), "utf-8")
    return int(any(ratio > arguments.limit for ratio in ratios.values()))


if __name__ == "__main__":
    sys.exit(main())
