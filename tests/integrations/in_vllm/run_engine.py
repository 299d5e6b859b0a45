"""Load a model in vLLM with given options, generate a few tokens, and save what every rank holds.

Arguments: a JSON object of `LLM` arguments, and the file to write. Run as a program of its own: vLLM is global state.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `apply_model` sends a function to the workers


def main() -> None:
    """Run."""
    import torch
    from rank_tensors import held
    from vllm import LLM, SamplingParams

    arguments = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    sampling = SamplingParams(max_tokens=4, temperature=0, detokenize=False)
    output = llm.generate([{"prompt_token_ids": [1, 2, 3, 4, 5]}], sampling)
    ranks = llm.apply_model(held)
    torch.save({"ranks": ranks, "tokens": list(output[0].outputs[0].token_ids)}, sys.argv[2])


if __name__ == "__main__":
    main()
