"""Gemini's optimizer wrapper over FP8 chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.zero.gemini import GeminiOptimizer

from fp8booster.colossal.boosted_optimizer import BoostedOptimizer
from fp8booster.colossal.gemini.masters import Part
from fp8booster.colossal.gemini.model import FP8GeminiDDP
from fp8booster.optim.one_pass import OURS, has_hooks
from fp8booster.optim.steps import clipping_divisor


class FP8GeminiOptimizer(BoostedOptimizer, GeminiOptimizer):
    """GeminiOptimizer for a `FP8GeminiDDP`."""

    module: FP8GeminiDDP

    @property
    def trained(self) -> FP8GeminiDDP:
        """As in `BoostedOptimizer`."""
        return self.module

    before_update: Callable[[], object] | None = None
    """Called in each step when the gradients' norm is known, where it is asked for, and no weight has changed; what it
    raises ends the step, whose gradients are gone then: some lie where weights do. With a hook of the optimizer inside,
    its amaxes would not be believed (`_known_amaxes`)."""

    def _set_grad_ptr(self) -> None:
        for group in self.param_groups:
            for shard in group["params"]:
                chunk = self.param_to_chunk16[shard]
                begin, end = self.param_to_range[shard]
                # first the gradient as the value, so that it may have another dtype than the value has
                shard.data = self.chunk_manager.gradient_chunk(chunk).payload[begin:end]
                shard.grad = shard.data
                updated = chunk.paired_chunk if self.module.master_weights else chunk
                shard.data = updated.payload[begin:end]

    def _update_fp16_params(self) -> None:
        self._put_weights_back()
        self.module.publish_masters(self._known_amaxes())

    def _put_weights_back(self) -> None:
        """Round 16-bit weights from their masters, in the place of their gradients."""
        # Colossal-AI moves an empty tensor to the device for each shard
        nothing: dict[torch.device, torch.Tensor] = {}
        for group in self.param_groups:
            for shard in group["params"]:
                device = shard.device
                if device not in nothing:
                    nothing[device] = torch.empty(0, dtype=torch.float32, device=device)
                shard.data = nothing[device]
        for chunk in self.chunk16_set:
            chunk.optim_update()

    def _known_amaxes(self) -> dict[Part, torch.Tensor]:
        """Take the amaxes that the optimizer found as it wrote the masters: a step that is skipped finds none."""
        # only these find amaxes while they write the masters
        if type(self.optim) not in OURS:
            return {}
        device = get_accelerator().get_current_device()
        # those of offloaded masters come from the host, which need not wait until they are there
        amaxes = {shard: amax.to(device, non_blocking=True) for shard, amax in self.optim.amaxes.items()}
        self.optim.amaxes = {}
        if has_hooks(self.optim):  # which may have changed the masters since
            return {}
        return {(self.param_to_chunk16[shard], self.param_to_range[shard][0]): amax for shard, amax in amaxes.items()}

    def _maybe_move_fp32_params(self) -> None:
        super()._maybe_move_fp32_params()
        for chunk in self.chunk16_set:
            gradients, masters = self.chunk_manager.gradient_chunk(chunk), chunk.paired_chunk
            if gradients is not None and gradients.device_type == "cpu" != masters.device_type:
                # the optimizer steps masters where they lie: those that were moved to the GPU need their gradients
                # there too
                self.chunk_manager.move_chunk(gradients, get_accelerator().get_current_device())

    def _clear_global_norm(self) -> None:
        for chunk in self.chunk16_set:
            gradients = self.chunk_manager.gradient_chunk(chunk)
            if gradients is not None:
                gradients.l2_norm = None

    def _calc_global_norm(self) -> torch.Tensor:
        """Return the norm over all ranks: float64 [], on the device.

        Each value is counted once; Colossal-AI leaves out those of other tensor parallel ranks.
        """
        zero = torch.zeros((), dtype=torch.float32, device=get_accelerator().get_current_device())
        kinds = list(itertools.product((False, True), repeat=2))
        """(sharded by ZeRO, sharded by tensor parallelism)"""
        found: dict[tuple[bool, bool], list[torch.Tensor]] = {kind: [zero] for kind in kinds}
        for chunk in self.chunk_manager.get_chunks(self.module.fp16_params):
            gradients = self.chunk_manager.gradient_chunk(chunk)
            found[not chunk.keep_gathered, chunk.tensor_parallel].append(gradients.l2_norm)
            gradients.l2_norm = None
        # by kind, since each has to be added over other ranks: two reductions in all, of a few bytes
        squares = torch.stack([torch.stack(found[kind]).sum() for kind in kinds]).view(2, 2)
        # chunks that stay gathered have whole gradients on every rank, and count once without it
        dist.all_reduce(squares[1], group=self.module.zero_group)
        whole, sharded = squares.sum(0)
        if self.tp_group is not None:
            dist.all_reduce(sharded, group=self.tp_group)
        return (whole + sharded).double().sqrt()

    def _get_combined_scale(self) -> torch.Tensor | float:
        """Return the divisor of gradients; Colossal-AI asks for it right before the optimizer's step."""
        divisor = self._divisor()
        if self.before_update is not None:
            try:
                self.before_update()
            except BaseException:
                self.zero_grad()
                self._give_up()
                raise
        return divisor

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients, of a backward too that no step shall follow.

        In Colossal-AI those lie where the weights did, and the next forward reads them.
        """
        super().zero_grad(*args, **kwargs)
        manager = self.chunk_manager
        broke_off = manager.reuse_fp16_chunk and manager.accessed_mem != 0  # in the middle of a backward
        if self.module.trained_since_step and not broke_off:
            self.module.trained_since_step.clear()
            self._give_up()

    def _give_up(self) -> None:
        """Do without a step: drop the gradients, and put weights where some of them lie."""
        if self.clipping_flag:
            self._clear_global_norm()
        if self.chunk_manager.reuse_fp16_chunk:
            self._put_weights_back()  # those in FP8 are as they were
        self.chunk_manager.accumulating_grads = False  # the next backward adds to none of these
        self.chunk_manager.drop_weight_gradients(self.module.fp8_chunks)

    def _divisor(self) -> torch.Tensor | float:
        """Find the divisor that undoes the loss scale and clips; -1: nothing is to be divided.

        Where it depends on the norm it is a tensor, float32 [], which the host does not wait for.
        """
        if not self.clipping_flag:
            return super()._get_combined_scale()
        scale = self.mix_precision_mixin.get_grad_div_scale()
        self._current_grad_norm = norm = self._calc_global_norm()
        divisor = clipping_divisor(norm, scale, self.max_norm)
        if type(self.optim) in OURS:
            # these read it on the device, so the host waits for no norm
            return divisor.float()
        number = divisor.item()  # which is what Colossal-AI's own optimizers take
        return -1 if number == 1 else number

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Update the masters and cast the weights of the next forward from them.

        Raises:
            RuntimeError: a trained parameter has got no gradient since the last step.
        """
        # before the optimizer touches a master: a step of part of the chunks could not be undone
        self.module.require_gradients()
        result = super().step(*args, **kwargs)
        self.chunk_manager.drop_weight_gradients(self.module.fp8_chunks)
        return result
