"""Strategies for weights. torch is imported when a weight is drawn, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

if TYPE_CHECKING:
    import torch

_DTYPES: Final = ("bfloat16", "float16", "float32")
_ZERO_SHARE: Final = 0.15
_KINDS: Final = ("normal", "uniform", "tiny", "huge", "zeros", "steps")


def weights(
    *,
    k_multiple: int = 32,
    max_rows: int = 40,
    max_groups: int = 5,
    stacked: bool = False,
    bad_values: bool = False,
) -> st.SearchStrategy[torch.Tensor]:
    """Return a strategy for weights of shape [N, K], or [E, N, K] if `stacked`, in bf16, fp16 or fp32.

    Values are drawn from distributions that reach the corners: subnormal and near-greatest magnitudes, rows and blocks
    of zeros, both zeros, powers of two and the midpoints between codes.

    Args:
        k_multiple: K is a multiple of this.
        max_rows: greatest N.
        max_groups: greatest K, in multiples.
        stacked: True for stacks of experts.
        bad_values: True to put NaN and Inf into some.
    """
    bad = st.sampled_from(["nan", "inf", "-inf", ""]) if bad_values else st.just("")
    return st.builds(
        _weight,
        seed=st.integers(0, 2**31 - 1),
        dtype=st.sampled_from(_DTYPES),
        kind=st.sampled_from(_KINDS),
        shape=st.tuples(
            st.integers(1, 3) if stacked else st.just(0),
            st.integers(1, max_rows),
            st.integers(1, max_groups).map(lambda groups: groups * k_multiple),
        ),
        group=st.just(k_multiple),
        bad=bad,
    )


def _weight(*, seed: int, dtype: str, kind: str, shape: tuple[int, int, int], group: int, bad: str) -> torch.Tensor:
    import torch  # noqa: PLC0415  (importing this module must not import torch)

    generator = torch.Generator().manual_seed(seed)
    size = shape if shape[0] else shape[1:]
    final = getattr(torch, dtype)
    normal = torch.randn(size, generator=generator)
    greatest = float(torch.finfo(final).max)
    made = {
        "normal": normal * 0.02,
        "uniform": torch.rand(size, generator=generator) * 2 - 1,
        "tiny": normal * float(torch.finfo(final).tiny),
        "huge": normal.clamp(-1, 1) * greatest,
        "zeros": torch.where(torch.rand(size, generator=generator) < _ZERO_SHARE, 0.0, normal.sign() * 0.0),
        "steps": torch.round(normal * 4) / 4 * torch.exp2(torch.round(normal * 3)),
    }[kind]
    if kind != "zeros":  # zero rows, and zero groups in others
        rows = torch.rand((*size[:-1], 1), generator=generator) > _ZERO_SHARE
        groups = torch.rand((*size[:-1], -(-size[-1] // group)), generator=generator) > _ZERO_SHARE
        made *= rows & groups.repeat_interleave(group, -1)[..., : size[-1]]
    if bad:
        made.view(-1)[seed % made.numel()] = float(bad)
    return made.to(final)
