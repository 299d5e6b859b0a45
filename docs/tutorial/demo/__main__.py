"""`make demo`: a real language model quantized by a recipe, reported, loaded back and measured."""

from __future__ import annotations

import logging
import os


def main() -> None:
    """Run the demo, with the libraries it uses told to be quiet before they are imported."""
    # Nothing may be fetched from a model hub. transformers imports torchao where that is installed, whose remarks about
    # GPU libraries of its own say nothing about this demo.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)

    from program import run  # noqa: PLC0415  (it imports torch and transformers)

    run()


if __name__ == "__main__":
    main()
