"""The measures against cases whose answer is known, and the picture's text."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from measures import encoder_figures, language_figures
from plot import Point, picture

WINDOWS = torch.tensor([[0, 1, 0], [0, 0, 1]])


def test_the_unquantized_model_against_itself() -> None:
    logits = [torch.randn(2, 2, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    found = language_figures(logits, logits, WINDOWS)
    assert (found.divergence, found.agreement) == (0.0, 1.0)
    assert found.cosine == pytest.approx(1.0)


def test_known_predictions() -> None:
    even = [torch.zeros(2, 2)] * 2  # one half for each of two tokens
    sure = [torch.tensor([[math.log(3.0), 0.0]] * 2)] * 2  # three quarters for token 0
    assert language_figures(even, even, WINDOWS).perplexity == pytest.approx(2.0)
    found = language_figures(even, sure, WINDOWS)
    assert found.divergence == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    # tokens 1, 0, 0, 1 at 1/4, 3/4, 3/4, 1/4
    assert language_figures(sure, even, WINDOWS).perplexity == pytest.approx(1 / math.sqrt(0.25 * 0.75))


def test_cosines() -> None:
    reference = torch.eye(3)
    turned = torch.stack([reference[0], reference[1], torch.tensor([0.6, 0.0, 0.8])])
    found = encoder_figures(turned, reference)
    assert found.worst == pytest.approx(0.8)
    assert found.mean == pytest.approx(2.8 / 3)


def test_the_picture_is_well_formed_and_escapes_labels() -> None:
    points = [Point("<a & b>", "weights", 4.25, 0.5), Point("c", "weights and activations", 8.0, 0.02)]
    tree = ET.fromstring(picture(points, "t < u", "m"))  # noqa: S314  (made here)
    texts = [node.text for node in tree.iter() if node.tag.endswith("text")]
    assert {"<a & b>", "t < u", "0.01", "0.1", "1"} <= set(texts)
    assert len([node for node in tree.iter() if node.tag.endswith("circle")]) == 4
