"""A config under load: the names of a model asked for again and again, then names that never come back.

    python tests/torture/load.py [--seconds N] [--one-off N]

The first part asks for DeepSeek-R1's names in a loop, for a minute unless told otherwise; the second for millions of
names that are asked for once. Memory must stay flat in both, and the first answer must still hold at the end. The last
lines give rates and memory.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import resource
import sys
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

from quant_spec import QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, EXPERTS = 61, 256
REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {"*.mlp.experts.*": "mxfp4", "model.layers.[3-9].self_attn.*": "mxfp8"},
    "exclude_layer": ["lm_head", "*.mlp.gate"],
}
FLAT_BYTES = 2**20
"""What memory may grow by once a model's names are known, or once a cache of one-off names is full."""
KEPT_BYTES = 96 * 2**20
"""What one-off names may occupy at all, caches and the interpreter's arenas together."""
LATE_BYTES = 16 * 2**20
"""What resident memory may grow by over the second half of them."""


def model_names() -> list[str]:
    """Return names as an engine asks for them, and those of every expert's projections."""
    names = []
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        names += [f"{prefix}.self_attn.{leaf}" for leaf in ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")]
        names += [f"{prefix}.mlp.gate", f"{prefix}.mlp.experts"]
        names += [
            f"{prefix}.mlp.experts.{expert}.{leaf}"
            for expert in range(EXPERTS)
            for leaf in ("gate_proj", "up_proj", "down_proj")
        ]
    return names


def one_off_names() -> Iterator[str]:
    """Yield names that are all different."""
    for index in itertools.count():
        yield f"session.{index}.model.layers.{index % LAYERS}.mlp.experts.{index % EXPERTS}.up_proj"


def sustained(seconds: float) -> tuple[float, int]:
    """Ask for a model's names over and over; return names a second, and the bytes by which memory grew after the start.

    Raises:
        AssertionError: an answer changed, or memory grew.
    """
    config = QuantizationConfig.from_online(REQUEST)
    names = model_names()
    resolve = config.resolve
    first = [resolve(name) for name in names]
    tracemalloc.start()
    for name in names:
        resolve(name)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    asked = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for name in names:
            resolve(name)
        asked += len(names)
    rate = asked / (time.perf_counter() - started)
    tracemalloc.start()
    for name in names:
        resolve(name)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert all(resolve(name) is answer for name, answer in zip(names, first, strict=True)), "an answer changed"
    assert grown < FLAT_BYTES, f"memory grew by {grown} bytes"
    return rate, grown


def resident() -> int:
    """Return the bytes that this process holds in memory."""
    with Path("/proc/self/statm").open() as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def never_again(count: int) -> tuple[float, int, int]:
    """Ask for names once each; return names a second, bytes grown in all, and bytes grown over the second half.

    Raises:
        AssertionError: an answer is wrong, or memory is not bounded.
    """
    config = QuantizationConfig.from_online(REQUEST)
    names = one_off_names()
    wanted = str(config.resolve("model.layers.0.mlp.experts.0.up_proj").weight)
    gc.collect()
    before = middle = resident()
    started = time.perf_counter()
    for index in range(count):
        answer = config.resolve(next(names))
        if index == count // 2:
            middle = resident()
        if not index % 4096:
            assert str(answer.weight) == wanted, answer
    rate = count / (time.perf_counter() - started)
    after = resident()
    assert after - before < KEPT_BYTES, f"{after - before} bytes are kept for names that never come back"
    assert after - middle < LATE_BYTES, f"memory grew by {after - middle} bytes over the second half"
    return rate, after - before, after - middle


def main() -> int:
    """Run both parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--one-off", type=int, default=2_000_000)
    arguments = parser.parse_args()
    rate, grown = sustained(arguments.seconds)
    sys.stdout.write(f"{rate:,.0f} names a second over {arguments.seconds:g} s, memory {grown:+,} bytes\n")
    rate, kept, late = never_again(arguments.one_off)
    sys.stdout.write(
        f"{rate:,.0f} one-off names a second, {arguments.one_off:,} of them: {kept:,} bytes resident, "
        f"{late:+,} over the second half\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
