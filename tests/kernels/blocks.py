"""The kernels of a decoder layer's pointwise parts: for each, cases on which two implementations are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F

from fp8booster.formats import E4M3
from fp8booster.kernels import activation, block_cast, message_rows, rope, row_norm, token_rows
from fp8booster.kernels.group_codes import encode_groups
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.kernels.scales import amax_of

Outputs = list[torch.Tensor]
Case = tuple[str, Callable[[], tuple[Outputs, torch.Tensor | None]], Callable[[], Outputs]]
"""Name; the kernel's outputs and the amax it delivers of the first; the reference's outputs."""

ROUNDINGS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
"""Relative: half a unit in the last place, or what sums in another order and the hardware's exponential leave."""


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


NORMS = {
    "RMS norm": {},
    "RMS norm of 1 + weight": {"unit_offset": True},
    "layer norm": {"centered": True},
    "layer norm with a bias": {"centered": True, "biased": True},
}
"""By name, what `row_norm_backward` is told of it."""


def norm_cases(device: torch.device, shapes: list[tuple[int, int]]) -> Iterator[Case]:
    """Norms, forward and backward, with and without a residual, by one weight and by those of several heads."""
    for ((rows, columns), dtype), norm, of_heads in product(
        zip(shapes, _dtypes(len(shapes)), strict=True), NORMS, (False, True)
    ):
        heads = [next(number for number in (5, 4, 3, 2, 1) if rows % number == 0)] if of_heads else []
        # in eighths, whose sums need no rounding: the interpreter rounds FP32 to BF16 otherwise than the hardware
        x, other = (torch.randint(-16, 17, (rows, columns), device=device).div(8).to(dtype) for _ in range(2))
        dy = _random(rows, columns, dtype=dtype, device=device)
        biased, kind = NORMS[norm].get("biased", False), NORMS[norm]
        weight, bias = 0.1 * _random(2, *heads, columns, dtype=dtype, device=device)
        weight = weight if kind.get("unit_offset") else 1 + weight
        given = {"bias": bias if biased else None} | {name: kind[name] for name in kind if name != "biased"}
        for residual in (None, other):
            name = f"{rows} x {columns} {dtype} residual {residual is not None} heads {heads}"

            def forward(x=x, weight=weight, residual=residual, given=given):
                made = _triton("row_norm").row_norm_triton(x, weight, 1e-5, residual, **given)
                return list(made[:3]), made.amax

            def forward_reference(x=x, weight=weight, residual=residual, given=given):
                return list(row_norm.row_norm.reference(x, weight, 1e-5, residual, **given)[:3])

            yield f"{norm} {name}", forward, forward_reference
            inverse = row_norm.row_norm.reference(x, weight, 1e-5, None, **given).inverse_rms
            for codes, h in (("", x), (" of codes", encode_groups(x))):

                def backward(dy=dy, h=h, weight=weight, inverse=inverse, dh=residual, kind=kind):
                    *made, amax = _triton("row_norm").row_norm_backward_triton(dy, h, weight, inverse, dh, **kind)
                    return [each for each in made if each is not None], amax

                def backward_reference(dy=dy, h=h, weight=weight, inverse=inverse, dh=residual, kind=kind):
                    *made, _ = row_norm.row_norm_backward.reference(dy, h, weight, inverse, dh, **kind)
                    return [each for each in made if each is not None]

                yield f"{norm}, backward{codes} {name}", backward, backward_reference


def activation_cases(device: torch.device, shapes: list[tuple[int, int]]) -> Iterator[Case]:
    """Activations, forward and backward: gated by a tensor, half of the same or codes, and alone; with weights."""
    for ((rows, columns), dtype), kind in product(zip(shapes, _dtypes(len(shapes)), strict=True), activation.KINDS):
        both = 3 * _random(rows, 2 * columns, dtype=dtype, device=device)
        dy = _random(rows, columns, dtype=dtype, device=device)
        halves = both.chunk(2, 1)
        sources = {
            "halves": halves,
            "two": [half.contiguous() for half in halves],
            "codes": [encode_groups(half) for half in halves],
            "one": halves[:1],
            "codes of one": [encode_groups(halves[0])],
        }
        weights = [None, *(row_weights(rows, each, device) for each in (dtype, torch.float32))]
        for (source, parts), of_rows in product(sources.items(), weights):
            how = {"kind": kind, "weights": of_rows}
            name = f"{rows} x {columns} {dtype} {source} weights {None if of_rows is None else of_rows.values.dtype}"

            def forward(parts=parts, how=how):
                made = _triton("activation").activate_triton(*parts, **how)
                return [made.y], made.amax

            def forward_reference(parts=parts, how=how):
                return [activation.activate.reference(*parts, **how).y]

            yield f"{kind} {name}", forward, forward_reference

            def backward(dy=dy, parts=parts, how=how):
                dx, amax, dweights = _triton("activation").activate_backward_triton(dy, *parts, **how)
                return [dx] if dweights is None else [dx, dweights], amax

            def backward_reference(dy=dy, parts=parts, how=how):
                dx, _, dweights = activation.activate_backward.reference(dy, *parts, **how)
                return [dx] if dweights is None else [dx, dweights]

            yield f"{kind}, backward {name}", backward, backward_reference


def row_weights(rows: int, dtype: torch.dtype, device: torch.device) -> activation.RowWeights:
    """One weight for each of some rows, in any order; the others have none. If there is one row, that has one.

    Three weights more have no row.
    """
    order = torch.randperm(rows, dtype=torch.int32, device=device)
    count = max(1, rows * 2 // 3)
    values = _random(count + 3, 1, dtype=dtype, device=device)
    return activation.RowWeights(values, order.masked_fill(order >= count, -1))


PAIRS = {
    "": {},
    ", neighbours, angles in halves": {"interleaved": True},
    ", neighbours": {"interleaved": True, "interleaved_angles": True},
    ", a group for each head of keys": {"groups": None},
    ", the last places": {"last": True},
    ", neighbours of the last places": {"interleaved": True, "last": True},
}


def rope_cases(device: torch.device, shapes: list[tuple[int, ...]]) -> Iterator[Case]:
    """Rotary embedding, forward and backward: (batch, sequence, query heads, key heads, head size, rotated places)."""
    for ((batch, sequence, queries, keys, size, turned), dtype), (kind, pairs) in product(
        zip(shapes, _dtypes(len(shapes)), strict=True), PAIRS.items()
    ):
        if "groups" in pairs:
            pairs = {"groups": keys}
        name = f"{batch} {sequence} {queries}+{keys} heads of {size}, {turned} rotated {dtype}{kind}"
        for angle_batch in {1, batch} if not kind else {batch}:  # which token's angles, whatever the pairs
            angle = _random(angle_batch, sequence, turned, dtype=torch.float32, device=device)
            cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
            qkv = _random(batch, sequence, queries + 2 * keys, size, dtype=dtype, device=device)

            def rotated(rotate, qkv=qkv, cos=cos, sin=sin, heads=queries + keys, pairs=pairs):
                out = qkv.clone()
                rotate(out, cos, sin, heads, **pairs)
                return [out]

            yield (
                f"rope {name}",
                lambda rotated=rotated: (rotated(_triton("rope").rotate_triton), None),
                lambda rotated=rotated: rotated(rope.rotate.reference),
            )
            # as attention gives them: [B, H, S, D] in memory
            gradients = [
                _random(batch, heads, sequence, size, dtype=dtype, device=device).transpose(1, 2)
                for heads in (queries, keys, keys)
            ]

            def back(gradients=gradients, cos=cos, sin=sin, pairs=pairs):
                dqkv, amax = _triton("rope").rotate_back_triton(*gradients, cos, sin, **pairs)
                return [dqkv], amax

            def back_reference(gradients=gradients, cos=cos, sin=sin, pairs=pairs):
                return [rope.rotate_back.reference(*gradients, cos, sin, **pairs)[0]]

            yield f"rope's backward {name}", back, back_reference


def token_cases(device: torch.device, shapes: list[tuple[int, int, int]]) -> Iterator[Case]:
    """Sums of tokens' rows, with and without weights, and their backward: (tokens, rows of each, features)."""
    for (tokens, of_token, features), dtype in zip(shapes, _dtypes(len(shapes)), strict=True):
        # in eighths, as the norm's
        rows, dy = (
            torch.randint(-16, 17, (count, features), device=device).div(8).to(dtype)
            for count in (tokens * of_token, tokens)
        )
        all_places = torch.randperm(tokens * of_token, device=device).view(tokens, of_token)
        # every row has a place; a choice without one is of a token more
        places = F.pad(all_places, (0, 0, 0, 1), value=tokens * of_token)
        dy = F.pad(dy, (0, 0, 0, 1), value=1.0)
        for weight_dtype in (None, dtype, torch.float32):
            weights = None
            if weight_dtype is not None:
                weights = torch.randint(1, 9, places.shape, device=device).div(8).to(weight_dtype)
            name = f"{tokens} x {of_token} x {features} {dtype} weights {weight_dtype}"

            def forward(rows=rows, places=places, weights=weights):
                return [_triton("token_rows").sum_rows_triton(rows, places, weights)], None

            def forward_reference(rows=rows, places=places, weights=weights):
                return [token_rows.sum_rows.reference(rows, places, weights)]

            yield f"sums of rows {name}", forward, forward_reference
            if weights is None:
                continue

            def backward(dy=dy, rows=rows, places=places, weights=weights):
                return list(_triton("token_rows").sum_rows_backward_triton(dy, rows, places, weights)), None

            def backward_reference(dy=dy, rows=rows, places=places, weights=weights):
                return list(token_rows.sum_rows_backward.reference(dy, rows, places, weights))

            yield f"sums of rows, backward {name}", backward, backward_reference

        for block_size in (32, 256, 8192):  # the last is of a whole row
            yield from _message_cases(f"{tokens} x {of_token} x {features} {dtype}", rows, places, block_size)


def _message_cases(name: str, rows: torch.Tensor, places: torch.Tensor, block_size: int) -> Iterator[Case]:
    """Sums of rows that lie in a message."""
    layout = MessageLayout.of(rows.shape[1], len(rows), block_size)
    message = torch.empty(layout.bytes, dtype=torch.uint8, device=rows.device)
    # by powers of two eighths are decoded as they were
    block_cast.encode.reference(rows.view(-1), message, layout, E4M3, True)
    of = message, places, layout, E4M3, rows.dtype

    def forward() -> tuple[Outputs, None]:
        return [_triton("message_rows").sum_message_triton(*of)], None

    def forward_reference() -> Outputs:
        return [message_rows.sum_message.reference(*of)]

    yield f"sums of rows of a message {name} blocks {block_size}", forward, forward_reference


def differences(cases: Iterator[Case]) -> Iterator[str]:
    """What is wrong with each case: an output beyond rounding of its reference, or an amax that is not the output's."""
    for name, ours, reference in cases:
        (outputs, amax), expected = ours(), reference()
        for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
            if not within_rounding(output, right):
                yield f"{name}: output {index}"
        if amax is not None and not torch.equal(amax.amax(), amax_of(outputs[0])):
            yield f"{name}: amax"


def within_rounding(output: torch.Tensor, right: torch.Tensor, largest: float = 0.0) -> bool:
    """Whether values are equal but for two roundings, of themselves or of what was added for them.

    What was added may be as large as `largest`, or as the largest that came out. In the derivative of gelu_tanh the
    rounding of 1 - s counts 34 times where x is 5, so there an FP32 reference is 2^-20 of the largest off.
    """
    if output.shape != right.shape or output.dtype != right.dtype:
        return False
    added = right.double().abs().amax().clamp(min=largest)
    bound = 2 * ROUNDINGS[right.dtype] * right.double().abs() + 2**-18 * added
    return bool(((output.double() - right.double()).abs() <= bound).all())


def _dtypes(count: int) -> list[torch.dtype]:
    return [list(ROUNDINGS)[index % 3] for index in range(count)]


def _triton(kernel: str):
    from importlib import import_module  # Triton looks at TRITON_INTERPRET when it is imported

    return import_module(f"fp8booster.kernels.{kernel}_triton")
