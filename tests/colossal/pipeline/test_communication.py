"""What two stages send each other arrives: rounded to FP8 where it may be, and bit for bit where not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fp8booster import comm, formats
from fp8booster.monitor.traffic import count_traffic
from tests.distributed import ranks

BF16, FP16 = torch.bfloat16, torch.float16
SHAPE = (2, 40, 64)


def communication(overlap: bool = False) -> Any:
    """Of a stage whose neighbour on both sides is the other rank."""
    from fp8booster.colossal.pipeline import FP8PipelineCommunication

    other = 1 - dist.get_rank()
    stage = SimpleNamespace(
        get_prev_rank=lambda: other, get_next_rank=lambda: other, get_p2p_process_group=lambda: dist.group.WORLD
    )
    return FP8PipelineCommunication(stage, overlap)


def transfer(objects: list[Any], cached: bool = False) -> list[Any]:
    """Send each object from rank 0 to rank 1; returns what the latter received, and nothing on the former."""
    from colossalai.pipeline.p2p import create_send_metadata

    transport, metadata, received = communication(), None, []
    for place, sent in enumerate(objects):
        if dist.get_rank() == 0:
            transport.send_forward(sent, send_metadata=not cached or place == 0)
        else:
            found, handles = transport.recv_forward(metadata_recv=metadata)
            assert handles == []
            metadata = create_send_metadata(found) if cached else None
            received.append(found)
    return received


def through_fp8(values: torch.Tensor) -> torch.Tensor:
    """What FP8 keeps of values, with a scale for each 256, in FP64 steps of its own."""
    flat = values.double().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).view(-1, 256)
    scale = formats.MAX[formats.E4M3] / blocks.abs().amax(1, keepdim=True)
    scale = torch.where(scale.isinf(), 1.0, scale).float()
    kept = (blocks.float() * scale).to(formats.E4M3).float() * (1 / scale.double()).float()
    return kept.flatten()[: len(flat)].view(values.shape).to(values.dtype)


@ranks(2)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_magnitudes_may_change_from_message_to_message(dtype: torch.dtype) -> None:
    # 448 is where native changes its format; its receiver decodes by the metadata of the first message
    largest = [1.0, 1e2, 447.0, 449.0, 1e4, 6e4 if dtype is FP16 else 3e38, 1e-6, 0.0, 1.0]
    sent = [{"hidden_states": (torch.randn(SHAPE) * 0.1).clamp(-1, 1).to(dtype) * amax} for amax in largest]
    for message, amax in zip(sent, largest, strict=True):
        message["hidden_states"].view(-1)[::200] = amax
    for message, found in zip(sent, transfer(sent, cached=True), strict=dist.get_rank() == 1):
        values, arrived = message["hidden_states"], found["hidden_states"]
        assert arrived.dtype is dtype
        assert torch.equal(arrived, through_fp8(values))
        # half a step of three bits, and half of the smallest step of its block's scale
        tolerance = values.abs().float() / 16 + values.abs().max().float() / 448 * 2.0**-10
        assert ((arrived.float() - values.float()).abs() <= tolerance).all()


@ranks(2)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_arrives_as_nan_in_its_block(bad: float) -> None:
    values = torch.randn(SHAPE).to(BF16)
    values.view(-1)[300] = bad
    for found in transfer([{"hidden_states": values}]):
        arrived = found["hidden_states"].flatten()
        assert arrived[256:512].isnan().all()
        assert arrived[:256].isfinite().all()
        assert arrived[512:].isfinite().all()


def mixed() -> dict[str, Any]:
    """One of each that a stage may send."""
    mask = torch.zeros(2, 1, 40, 40, dtype=BF16)
    mask[..., 20:] = torch.finfo(BF16).min
    return {
        "hidden_states": torch.randn(SHAPE, dtype=BF16),
        "attention_mask": mask,
        "position_bias": (torch.randn(2, 4, 40, 40) * 3).to(BF16) + mask,
        "past_router_logits": (torch.randn(80, 8, dtype=BF16), torch.randn(80, 8, dtype=BF16)),
        "logits": torch.randn(80, 16, dtype=BF16),
        "position_ids": torch.arange(4096).view(2, -1),
        "padding": torch.rand(SHAPE) > 0.5,
        "loss_scale": torch.tensor(1.1),
        "residual": torch.randn(SHAPE),
        "tiny": torch.randn(7, dtype=BF16),
        "empty": torch.randn(0, 64, dtype=BF16),
        "absent": None,
        "backward_tensor_keys": ["hidden_states"],
    }


@ranks(2)
def test_what_may_not_be_rounded_arrives_bit_for_bit() -> None:
    torch.manual_seed(0)
    sent = mixed()
    comm.reset_statistics()
    for found in transfer([sent]):
        assert list(found) == list(sent)
        assert found["absent"] is None
        assert found["backward_tensor_keys"] == ["hidden_states"]
        assert torch.equal(found["hidden_states"], through_fp8(sent["hidden_states"]))
        for one, other in zip(sent["past_router_logits"], found["past_router_logits"], strict=True):
            assert torch.equal(one, other)
        for name, value in sent.items():
            if isinstance(value, torch.Tensor) and name != "hidden_states":
                assert torch.equal(found[name], value), name
    if dist.get_rank() == 0:
        assert comm.statistics()["send"].uncompressed == {
            "metadata": 1,
            "a mask": 1,
            "a bias": 1,
            "a router": 2,
            "a logits": 1,
            "int64": 1,
            "bool": 1,
            "float32": 2,
            "small": 1,
            "empty": 1,
        }


@ranks(2)
def test_what_is_no_tensor_goes_with_its_metadata_whatever_was_asked_for() -> None:
    transport = communication()
    for number in range(2):
        sent = {"hidden_states": torch.ones(SHAPE, dtype=BF16), "number": number}
        if dist.get_rank() == 0:
            transport.send_forward(sent, send_metadata=False)
        else:
            found, _ = transport.recv_forward()
            assert found["number"] == number
            assert torch.equal(found["hidden_states"], sent["hidden_states"])


@ranks(2)
def test_shapes_may_differ_where_metadata_is_sent() -> None:
    sent = [{"hidden_states": torch.randn(rows, 64, dtype=BF16)} for rows in (40, 17, 80)]
    for message, found in zip(sent, transfer(sent), strict=dist.get_rank() == 1):
        assert torch.equal(found["hidden_states"], through_fp8(message["hidden_states"]))


@ranks(2)
@pytest.mark.parametrize("which", ["forward, forward", "backward, backward", "forward, backward"])
def test_both_stages_may_send_at_once(which: str) -> None:
    from colossalai.pipeline.p2p import create_send_metadata

    for overlap in (False, True):
        transport, metadata = communication(overlap), None
        rank = dist.get_rank()
        for step in range(3):
            messages = [
                {
                    "hidden_states": torch.randn(
                        SHAPE, dtype=BF16, generator=torch.Generator().manual_seed(2 * step + each)
                    )
                }
                for each in (0, 1)
            ]
            how = {"send_metadata": metadata is None, "metadata_recv": metadata, "send_first": rank == 0}
            if which == "forward, backward":
                method = transport.send_backward_recv_forward if rank else transport.send_forward_recv_backward
                found, handles = method(messages[rank], **how)
                assert handles == []  # Colossal-AI never overlaps these
            else:
                name = which.split(", ")[0]
                method = getattr(transport, f"send_{name}_recv_{name}")
                found, handles = method(messages[rank], True, True, **how)
                assert bool(handles) is overlap
            for handle in handles:
                handle.wait()
            metadata = create_send_metadata(found)
            assert torch.equal(found["hidden_states"], through_fp8(messages[1 - rank]["hidden_states"]))


@ranks(2)
def test_model_outputs_arrive_as_such() -> None:
    from transformers.modeling_outputs import MoeModelOutputWithPast

    logits = (torch.randn(80, 8, dtype=BF16),)
    sent = MoeModelOutputWithPast(
        last_hidden_state=torch.randn(SHAPE, dtype=BF16, generator=torch.Generator().manual_seed(1)),
        router_logits=logits,
    )
    for found in transfer([sent]):
        assert type(found) is MoeModelOutputWithPast
        assert torch.equal(found.last_hidden_state, through_fp8(sent.last_hidden_state))
        assert torch.equal(found.router_logits[0], logits[0])


@ranks(2)
def test_a_stage_may_only_send_or_only_receive() -> None:
    transport, sends = communication(), dist.get_rank() == 0
    sent = {"hidden_states": torch.ones(SHAPE, dtype=BF16)}
    found, _ = transport.send_forward_recv_forward(sent, sends, not sends, send_first=sends)
    assert (found is None) is sends
    assert sends or torch.equal(found["hidden_states"], sent["hidden_states"])


@ranks(2)
def test_gradients_arrive_without_history() -> None:
    values = torch.randn(SHAPE, dtype=BF16, requires_grad=True)
    for found in transfer([{"hidden_states": values * 2}]):
        arrived = found["hidden_states"]
        assert arrived.is_leaf
        assert arrived.requires_grad  # as the stage's input must


class _HostReads(TorchDispatchMode):
    """Operators whose result the host must know before it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique"):
            self.seen.append(name)
        return func(*args, **kwargs or {})


@ranks(2)
def test_no_value_is_read_on_the_host() -> None:
    from colossalai.pipeline.p2p import create_send_metadata

    sent = {"hidden_states": torch.randn(SHAPE, dtype=BF16)}
    transport, metadata = communication(), create_send_metadata(sent)
    with _HostReads() as reads:
        if dist.get_rank() == 0:
            transport.send_forward(sent, send_metadata=False)
        else:
            transport.recv_forward(metadata_recv=metadata)
    assert reads.seen == []


@ranks(2)
@pytest.mark.parametrize("cached", [True, False])
def test_statistics_agree_with_what_is_seen_at_torch_distributed(cached: bool) -> None:
    sent = [{"hidden_states": torch.randn(SHAPE, dtype=BF16), "mask": torch.ones(64, 64, dtype=BF16)}] * 3
    comm.reset_statistics()
    with count_traffic() as traffic:
        transfer(sent, cached)
    row = comm.statistics()["send"]
    assert row.wire_bytes == traffic.sent
    if dist.get_rank() == 0:
        assert row.calls == 6 + (1 if cached else 3)
        values = 3 * sent[0]["hidden_states"].numel()
        assert row.raw_bytes - row.wire_bytes >= 2 * values - 0.52 * 2 * values
