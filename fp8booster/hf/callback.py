"""FP8 as a callback of transformers' Trainer, and of those that are made of it, as TRL's are."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fp8booster.comm.ddp import BUCKET_MB
from fp8booster.config import FP8Config, config_or_default
from fp8booster.hf.prepare import convert, is_prepared
from fp8booster.nn.weights.freshness import note_change
from fp8booster.optim import AdamW
from fp8booster.optim.used_gradient import REFUSAL


class FP8Callback(TrainerCallback):
    """Let a Trainer train in FP8: `Trainer(model, arguments, callbacks=[FP8Callback()])`.

    The Trainer's constructor converts the model, in place, as `fp8booster.hf.prepare` does, before it has an optimizer
    and before accelerate wraps it. All else is the Trainer's: autocast by `bf16=True`, evaluation, checkpoints,
    resuming. `ddp_bucket_cap_mb` of the arguments becomes 64 where it is None, since smaller messages are sent
    uncompressed inside a node.

    Args:
        config: which layers, and how; None is `FP8Config()`.
        fused_loss: as in `prepare`; None is True but in TRL's trainers, which read logits or compute the loss
            themselves.

    Raises:
        TypeError: the configuration is no FP8Config.
        ValueError: by the Trainer, as `prepare` says; for several GPUs in one process, for Liger's kernels, where the
            Trainer trains another model than its constructor was given, and where `fp8booster.optim.AdamW` updates in
            backward and gradients are to be clipped, or accumulated over other micro-batches than its own.
    """

    def __init__(self, config: FP8Config | None = None, *, fused_loss: bool | None = None) -> None:
        self.config = config_or_default(config)
        self.fused_loss = fused_loss

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Convert the model, which the Trainer's accelerator has not seen yet."""
        _check(args)
        if args.ddp_bucket_cap_mb is None:
            args.ddp_bucket_cap_mb = BUCKET_MB
        fused_loss = not _is_of_trl(args) if self.fused_loss is None else self.fused_loss
        convert(model, self.config, state=AcceleratorState(), fused_loss=fused_loss)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Refuse a model that is not the one that was converted, and an optimizer that does not do as the Trainer."""
        if model is not None and not is_prepared(model):
            raise ValueError(
                "the model has no FP8 layers: it was made after FP8Callback converted one, or the callback was added "
                "later; give it to the constructor, Trainer(callbacks=[FP8Callback()]), and with model_init let that "
                "function return fp8booster.hf.prepare(model)"
            )
        _check_optimizer(args, getattr(optimizer, "optimizer", optimizer))  # accelerate's wrapper, as a rule

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Let FP8 weights be cast anew, also where no optimizer stepped: LOMO's weights change in backward."""
        note_change([])


def _check(args: TrainingArguments) -> None:
    """Raise ValueError where FP8 layers do not go with what a Trainer was asked for."""
    if args.use_liger_kernel:
        raise ValueError("Liger replaces the layers and the loss that are fused for FP8; leave use_liger_kernel out")
    if args.n_gpu > 1:
        raise ValueError(
            "several GPUs in one process share a model by DataParallel, which copies it at each step; start a process "
            "for each GPU, by torchrun or accelerate launch"
        )


def _check_optimizer(args: TrainingArguments, optimizer: Any) -> None:
    """Raise ValueError where an optimizer that updates in backward would pass over what a Trainer was asked for."""
    if not (isinstance(optimizer, AdamW) and optimizer.updates_in_backward):
        return
    if args.max_grad_norm:
        raise ValueError(f"max_grad_norm is {args.max_grad_norm}, and {REFUSAL}")
    steps = args.gradient_accumulation_steps
    if optimizer.micro_batches != steps:
        raise ValueError(
            f"gradient_accumulation_steps is {steps}, and the AdamW updates in backward after "
            f"{optimizer.micro_batches}; make it with micro_batches={steps}"
        )


def _is_of_trl(args: TrainingArguments) -> bool:
    return any(kind.__module__.startswith("trl.") for kind in type(args).__mro__)
