"""Rows that are encoded one by one."""

from __future__ import annotations

import pytest
import torch

from fp8booster import formats
from fp8booster.comm import Encoding
from fp8booster.comm.rows import WORD, decode_rows, encode_rows, sum_rows
from fp8booster.kernels import token_rows

ENCODINGS = {
    "default": Encoding(),
    "E5M2": Encoding(format=formats.E5M2),
    "small blocks": Encoding(block_size=32),
    "a scale a row": Encoding(block_size=None),
    "powers of two": Encoding(power_of_two=True),
}


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 24, 256, 768, 2880])
def test_who_gets_some_rows_need_not_know_of_the_others(width: int, dtype: torch.dtype, encoding: Encoding) -> None:
    rows = torch.randn(5, width).to(dtype)
    message = encode_rows(rows, encoding)
    for some in ([0, 1, 2, 3, 4], [3, 1], [2], []):
        found = decode_rows(message[some], width, dtype, encoding)
        assert found.dtype is dtype
        assert found.shape == (len(some), width)
        if some:
            error = (found - rows[some]).float().norm() / rows[some].float().norm()
            assert error < (0.08 if encoding.format is formats.E5M2 else 0.045)


@pytest.mark.parametrize("width", [768, 1024, 2048, 2880, 4096, 7168])
def test_scales_and_padding_take_little_of_a_long_row(width: int) -> None:
    message = encode_rows(torch.ones(3, width), Encoding())
    assert message.shape[0] == 3
    assert message.shape[1] * WORD <= 1.021 * width


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
@pytest.mark.parametrize("width", [7, 256, 300])
def test_a_word_is_nan_only_where_a_value_is(width: int, encoding: Encoding) -> None:
    """So who looks for NaN among gradients, as autograd's anomaly mode does, finds those that there are."""
    rows = torch.randn(200, width) * torch.logspace(-30, 30, 200).unsqueeze(1)
    assert not encode_rows(rows, encoding).isnan().any()
    rows[3, width // 2] = torch.nan
    assert encode_rows(rows, encoding)[3].isnan().any()


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_a_sum_of_rows_is_that_of_the_decoded_ones(encoding: Encoding) -> None:
    tokens, chosen, width = 6, 2, 40
    message = encode_rows(torch.randn(tokens * chosen, width).bfloat16(), encoding)
    places = torch.randperm(tokens * chosen).view(tokens, chosen)
    places[1, 1], places[2] = 12, 99  # of a choice without a row nothing is added
    rows = decode_rows(message, width, torch.bfloat16, encoding)
    found = sum_rows(message, places, width, torch.bfloat16, encoding)
    assert torch.equal(found, token_rows.sum_rows(rows, places))
    assert torch.equal(found[1], rows[places[1, 0]])
    assert not found[2].any()
    assert not sum_rows(message[:0], places, width, torch.bfloat16, encoding).any()


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_a_row_that_is_not_finite_spoils_no_other(encoding: Encoding) -> None:
    rows = torch.randn(4, 40)
    right = decode_rows(encode_rows(rows, encoding), 40, torch.float32, encoding)
    rows[1, 3], rows[2] = torch.inf, torch.nan
    found = decode_rows(encode_rows(rows, encoding), 40, torch.float32, encoding)
    assert torch.equal(found[[0, 3]], right[[0, 3]])
    assert found[2].isnan().all()
    assert not found[1].isfinite().all()
