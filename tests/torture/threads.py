"""Many threads at once: configs made, asked and dropped; loaders that fill one quantizer; processes forked afterwards.

    python tests/torture/threads.py [--seconds N] [--seed N] [--threads N] [--loaders N]

Every answer is compared with that of one thread by itself. The last lines give the counts.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import nn

from quant_kernels import OnlineQuantizer, quantize, quantize_model
from quant_spec import LoadError, QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FORMATS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
LEAVES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate", "mlp.experts")
NAMES = tuple(f"model.layers.{block}.{leaf}" for block in range(48) for leaf in LEAVES)
FORK_SECONDS = 60


def a_request(chance: random.Random) -> dict[str, object]:
    """Return a request of globs, literals and excludes."""
    patterns = {
        chance.choice((f"*.{chance.randrange(48)}.{leaf}", f"*{leaf}", f"re:.*[0-9]+\\.{leaf}")): chance.choice(FORMATS)
        for leaf in chance.sample(LEAVES, 3)
    }
    excluded = [f"*.{chance.randrange(48)}.*", "*.gate"]
    return {"global_quant_config": chance.choice(FORMATS), "layer_quant_config": patterns, "exclude_layer": excluded}


def answers(request: dict[str, object], names: Sequence[str]) -> list[str]:
    """Return the weight formats that a config, made anew, gives."""
    config = QuantizationConfig.from_online(request)
    return [str(config.resolve(name).weight) for name in names]


def resolving(threads: int, seconds: float, seed: int) -> int:
    """Resolve in many threads, each on configs of its own and on some that all share; return the number of answers.

    Raises:
        AssertionError: an answer differs from that of one thread.
    """
    chance = random.Random(seed)  # noqa: S311  (repeatable, no secret)
    requests = [a_request(chance) for _ in range(12)]
    expected = [answers(request, NAMES) for request in requests]
    shared = [QuantizationConfig.from_online(request) for request in requests]
    deadline = time.monotonic() + seconds

    def work(thread: int) -> int:
        own = random.Random(seed + thread)  # noqa: S311  (repeatable, no secret)
        count = 0
        while time.monotonic() < deadline:
            which = own.randrange(len(requests))
            picked = own.sample(range(len(NAMES)), 40)
            fresh = own.random() < 0.5
            config = QuantizationConfig.from_online(requests[which]) if fresh else shared[which]
            if own.random() < 0.1:
                shared[which] = QuantizationConfig.from_online(requests[which])  # the old one is dropped while in use
            for index in picked:
                found = str(config.resolve(NAMES[index]).weight)
                assert found == expected[which][index], (requests[which], NAMES[index], found)
            count += len(picked)
        return count

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, range(threads)))


class Experts(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        for name, shape in (("w13_weight", (4, 128, 64)), ("w2_weight", (4, 64, 64))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device=device)))


class Block(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.o_proj = nn.Linear(64, 64, bias=True, dtype=torch.bfloat16, device=device)
        self.experts = Experts(device)


def new_model(device: str = "meta", blocks: int = 4) -> nn.Module:
    return nn.ModuleList(Block(device) for _ in range(blocks))


def pieces(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a model, experts one by one."""
    found = []
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        for expert, matrix in enumerate(tensor if tensor.dim() == 3 else ()):
            if leaf == "w2_weight":
                found.append((f"{stem}.{expert}.down_proj.weight", matrix))
            else:
                found += [
                    (f"{stem}.{expert}.{each}.weight", half)
                    for each, half in zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
                ]
        if tensor.dim() < 3:
            found.append((name, tensor))
    return found


def loading(loaders: int, seconds: float, seed: int) -> tuple[int, int]:
    """Fill quantizers from several threads; in every third job one of them fails; return jobs and failed ones.

    Raises:
        AssertionError: a result differs from that of `quantize_model`, or an error from what it should be.
    """
    chance = random.Random(seed)  # noqa: S311  (repeatable, no secret)
    generator = torch.Generator().manual_seed(seed)
    source = new_model("cpu")
    for parameter in source.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16()
    tensors = pieces(source)
    expected = {}
    for name in FORMATS:
        quantize_model(source_copy := _copy(source), {"global_quant_config": name}, write_report=False)
        expected[name] = source_copy.state_dict()
    deadline, jobs, failed = time.monotonic() + seconds, 0, 0
    while time.monotonic() < deadline:
        name = chance.choice(FORMATS)
        tight = chance.random() < 0.5
        order = tensors if tight else chance.sample(tensors, len(tensors))
        harm = order[chance.randrange(len(order))][0] if jobs % 3 == 2 else None
        staging = 1 << 16 if tight else 1 << 30  # less than one layer beside the first, or all of them
        model = new_model()
        quantizer = OnlineQuantizer(model, {"global_quant_config": name}, staging_bytes=staging, write_report=False)
        quantizer._budget._patience = 0.5 if harm else 30.0
        error = _load_by(loaders, quantizer, order, harm)
        if harm is None:
            assert error is None, error
            assert _equal(model.state_dict(), expected[name]), name
        else:
            assert isinstance(error, (OSError, LoadError)), error
            assert not quantizer._queue._thread.is_alive()
            failed += 1
        jobs += 1
    return jobs, failed


def _load_by(
    loaders: int, quantizer: OnlineQuantizer, order: Sequence[tuple[str, torch.Tensor]], harm: str | None
) -> BaseException | None:
    def load(pair: tuple[str, torch.Tensor]) -> None:
        if pair[0] == harm:
            message = f"{harm}: the disk is gone"
            raise OSError(message)
        quantizer.load(*pair)

    try:
        with quantizer, ThreadPoolExecutor(loaders) as pool:
            list(pool.map(load, order))
    except (OSError, LoadError) as error:
        return error
    return None


def _copy(model: nn.Module) -> nn.Module:
    made = new_model("cpu")
    made.load_state_dict(model.state_dict())
    return made


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor if tensor.dim() else tensor.reshape(1)).contiguous().view(torch.uint8)

    return one.keys() == other.keys() and all(torch.equal(raw(one[name]), raw(other[name])) for name in one)


def forking(rounds: int, seed: int) -> int:
    """Fork after import and use, while other threads resolve; each child resolves and quantizes; return the children.

    Raises:
        AssertionError: a child hung, or gave another answer than its parent.
    """
    chance = random.Random(seed)  # noqa: S311  (repeatable, no secret)
    request = a_request(chance)
    expected = answers(request, NAMES)
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
    codes = quantize(weight, "ptpc_fp8").data.view(torch.uint8)
    stop = threading.Event()

    def resolve_on() -> None:
        while not stop.is_set():
            answers(request, NAMES[:50])

    thread = threading.Thread(target=resolve_on)
    thread.start()
    try:
        for _ in range(rounds):
            status = _in_child(
                lambda: (
                    answers(request, NAMES) == expected
                    and torch.equal(quantize(weight, "ptpc_fp8").data.view(torch.uint8), codes)
                )
            )
            assert status == 0, f"a forked child ended with status {status}"
    finally:
        stop.set()
        thread.join()
    return rounds


def _in_child(check: Callable[[], bool]) -> int:
    """Run a check in a forked child; return its status: 0 if it holds, -9 if it had to be killed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # threads of a pool do not survive a fork
            status = 0 if check() else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + FORK_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--loaders", type=int, default=8)
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)  # threads change places fifty times as often as usual
    forked = forking(max(1, int(options.seconds)), options.seed)
    print(f"threads: seed {options.seed}, {forked} children forked beside a running thread")
    resolved = resolving(options.threads, options.seconds, options.seed)
    print(f"threads: {resolved:,} answers in {options.threads} threads")
    jobs, failed = loading(options.loaders, options.seconds, options.seed)
    print(f"threads: {jobs} models filled by {options.loaders} loaders, {failed} of them with a loader that fails")


if __name__ == "__main__":
    main()
