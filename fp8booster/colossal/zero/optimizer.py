"""Colossal-AI's ZeRO optimizer with FP8 on the wire.

1. Backward makes gradients, which fill buckets. A full bucket is reduce-scattered in FP8 while backward goes on, and
   each rank keeps its own part of the means.
2. `step` divides by loss scale and norm, and each rank updates its shards of the FP32 masters: first those of weights
   that are sent in 16 bits, which are gathered while the others are updated.
3. The weights of FP8 layers are cast from the masters and gathered in FP8 (`gathered_weights`).

Subclasses of Colossal-AI's optimizer have a class here that is both: `class FP8...(FP8ZeroOptimizer, Native...)`.
`LowLevelZeroOptimizer.step` (zero/low_level/low_level_optim.py:514) is one piece that ends by gathering every weight in
16 bits, so it is written anew here over the same stores, with the same arithmetic. So is `_run_reduction` (:323), which
reduces whole gradients on every rank in stage 1, where each rank needs its part alone. In every stage gradients enter
the buckets as backward makes them, so that the blocks that share a scale, and with them the bits, are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.nn.optimizer import DistributedLamb
from colossalai.tensor.moe_tensor.api import is_moe_tensor
from colossalai.zero.low_level import LowLevelZeroOptimizer
from colossalai.zero.low_level._utils import all_gather_into_flat_tensor_nd, get_nd_rank, release_param_grad
from colossalai.zero.low_level.zero_hook import set_all_gather_handle
from torch import nn
from torch.distributed import ReduceOp

from fp8booster import comm
from fp8booster.colossal.boosted_optimizer import BoostedOptimizer
from fp8booster.colossal.zero.buckets import GradientBucket, Trained
from fp8booster.colossal.zero.gathered_weights import GatheredWeights
from fp8booster.colossal.zero.gradient_store import AccumulatedGradients
from fp8booster.colossal.zero.noted_norms import noted_norms
from fp8booster.comm import AutomaticScaling, Encoding
from fp8booster.comm.threshold import ranks_of
from fp8booster.comm.transport import gather_many
from fp8booster.config import FP8Config
from fp8booster.kernels.message_layout import side_by_side
from fp8booster.nn.modules import change_class
from fp8booster.optim import AdamW, one_pass
from fp8booster.optim.steps import clipping_divisor
from fp8booster.optim.used_gradient import REFUSAL
from fp8booster.reading import first_of

_ADDS_UP, _NAME = attrgetter("adds_up"), attrgetter("name")


class FP8ZeroOptimizer(BoostedOptimizer, LowLevelZeroOptimizer):
    """The ZeRO optimizer of stages 1 and 2, sending FP8."""

    before_update: Callable[[], object] | None = None
    """Called in each step when the gradients' norm is known and no weight has changed; what it raises ends the step. A
    hook of the optimizer inside would make it step in more passes (`one_pass.why_not`)."""

    gathered_weights: GatheredWeights
    gradient_encoding: Encoding
    automatic_scaling: AutomaticScaling | None

    reduces_beside_backward: bool
    """Buckets are reduced on streams of their own."""

    pg_to_grad_store: dict[dist.ProcessGroup | tuple[dist.ProcessGroup, ...], AccumulatedGradients]

    updates_in_backward: bool
    """The optimizer inside updates a bucket's masters when it is reduced, and no gradient is kept for the step."""

    _trained: dict[int, Trained]
    """By the id of the working weight, in the order of the groups."""

    _updated_amaxes: dict[Trained, torch.Tensor]
    """Of each parameter that this backward has updated the master of, the amax of this rank's shard."""

    _frozen: dict[str, nn.Parameter]
    """Parameters that required no gradient when ZeRO chose what it trains, by their names."""

    _warned_of_no_sync: bool = False

    @classmethod
    def convert_in_place(cls, optimizer: LowLevelZeroOptimizer, model: nn.Module, config: FP8Config) -> None:
        """Turn a ZeRO optimizer into this class in place.

        Args:
            optimizer: made by Colossal-AI's plugin; no step taken yet.
            model: what it trains, its linear layers converted.
            config: how gradients are scaled, and add up over micro-batches.
        """
        # the object stays: Colossal-AI's hooks on the parameters refer to it
        change_class(optimizer, cls)
        optimizer.trained = model
        optimizer.gathered_weights = GatheredWeights(model, optimizer)
        optimizer._updated_amaxes = {}
        optimizer.gradient_encoding = config.messages or Encoding()
        optimizer.automatic_scaling = None
        if optimizer.gradient_encoding.automatic_scaling:
            # of the largest group: over fewer ranks, as those of an expert, sums have more room than they need
            ranks = max(store.world_size for store in optimizer.pg_to_grad_store.values())
            optimizer.automatic_scaling = AutomaticScaling(ranks, get_accelerator().get_current_device())
        # Colossal-AI's flag makes the host wait for the device after each backward; here streams wait for each other
        optimizer.reduces_beside_backward = optimizer._overlap_communication
        optimizer._overlap_communication = False
        optimizer.updates_in_backward = isinstance(optimizer.optim, AdamW) and optimizer.optim.updates_in_backward
        for store in optimizer.pg_to_grad_store.values():
            AccumulatedGradients.convert_in_place(store, config.gradient_accumulation, widens=optimizer._master_weights)
        for bucket in optimizer.pg_to_bucket_store.values():
            GradientBucket.convert_in_place(bucket)
        names = {id(each): name for name, each in model.named_parameters()}
        optimizer._frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
        optimizer._trained = {
            id(working): optimizer._known_of(working, group_id, names.get(id(working), "a parameter of no module"))
            for group_id, group in optimizer._working_param_groups.items()
            for working in group
        }
        if not optimizer.grad_handles:
            optimizer._attach_reduction_hook()  # Colossal-AI has none in stage 1 without overlap

    def _known_of(self, working: nn.Parameter, group_id: int, name: str) -> Trained:
        """Gather what the stores know of a parameter."""
        key = id(working)
        padding, ranks = self.get_param_padding_size(working), self.pid_to_bucket_store[key].world_size
        return Trained(
            working,
            self.working_to_master_param[key],
            group_id,
            self.gathered_weights.of(working),
            self.pid_to_grad_store[key],
            padding,
            (working.numel() + padding) // ranks % (self.gradient_encoding.block_size or 1) != 0,
            is_moe_tensor(working),
            name,
        )

    # --- backward: buckets of gradients are reduced, and each rank keeps its part

    def _add_to_bucket(self, param: nn.Parameter, group_id: int) -> None:
        # in Colossal-AI a bucket ends where the parameter group changes, and with vectors in a group of their own,
        # without weight decay, that is in each layer: many messages, too small for FP8
        bucket, trained = self.pid_to_bucket_store[id(param)], self._trained[id(param)]
        if bucket.trained and bucket.values + param.numel() > self._reduce_bucket_size:
            self._reduce_bucket(bucket)  # this one alone: others may still fill
        bucket.trained.append(trained)
        bucket.values += trained.values

    def _reduce_grad(self, partition_grad: bool) -> None:
        """Reduce what the hooks left: the last bucket, and what earlier micro-batches alone gave (`no_sync`)."""
        self._run_reduction()
        self._sync_grad()

    def _sync_grad(self) -> None:
        """Reduce what hooks left, and zeros for experts without a gradient (zero/low_level/low_level_optim.py:723)."""
        for each in self._trained.values():
            working = each.working
            # Colossal-AI takes an expert whose gradient the hooks have reduced for one without
            if working.grad is None and each.is_expert and working.requires_grad and not each.store.holds(*each.place):
                # ranks with tokens for it wait for this one's part of the message
                working.grad = torch.zeros_like(working)
            if working.grad is not None and working.requires_grad:
                self._add_to_bucket(working, each.group_id)
        self._run_reduction()

    def _run_reduction(self) -> None:
        accelerator = get_accelerator()
        for bucket in self.pg_to_bucket_store.values():
            if bucket.trained:
                self._reduce_bucket(bucket)
            bucket.leave_norms()
            # the step reads the sums on the current stream, and the host need not wait for them
            if self.reduces_beside_backward and accelerator.name == "cuda":
                accelerator.current_stream().wait_stream(bucket.comm_stream)

    def _reduce_bucket(self, bucket: GradientBucket) -> None:
        """Reduce-scatter a bucket's gradients; add this rank's part of each to its sum, or update the master by it."""
        trained, gradients = bucket.take_out()
        if self.updates_in_backward:
            self.gathered_weights.wait()  # it overwrites what they are cast from
        accelerator = get_accelerator()
        stream = accelerator.current_stream()
        # a bucket is reduced beside the layers whose gradients come next; the wait below is for backward to have
        # written these
        if self.reduces_beside_backward and gradients[0].is_cuda:
            stream = bucket.comm_stream
            stream.wait_stream(accelerator.current_stream())
            for gradient in gradients:
                gradient.record_stream(stream)  # its memory outlives its last use on this stream
        # norms and sums too: they would hold up backward, and read what this stream writes
        with accelerator.stream(stream):
            # ranks that used other layers of the same sizes would add up gradients of different parameters
            parts = self._reduced(bucket, gradients, tuple(map(_NAME, trained)))
            if self.updates_in_backward:
                self._update(dict(zip(trained, parts, strict=True)))
                return
            store = trained[0].store  # of the ranks of the bucket
            sums = store.add(parts, [each.place for each in trained])
            if store.kind != "8-bit":  # whose norms are those of what the step decodes
                bucket.find_norms(sums)

    def _reduced(
        self, bucket: GradientBucket, gradients: list[torch.Tensor], of: tuple[str, ...]
    ) -> Sequence[torch.Tensor]:
        """Return this rank's parts of the means over ranks of the gradients of what is named.

        Sums are FP32 and rounded once, to BF16 where gradients are BF16, as Colossal-AI's sums are: the optimizer reads
        half as much. FP16 is too narrow for a sum that is yet to be divided by the loss scale.
        """
        # without masters an optimizer steps the working weight itself, with a gradient of its dtype
        rounds = gradients[0].dtype is torch.bfloat16 or not self._master_weights
        kept = gradients[0].dtype if rounds else torch.float32
        if self._communication_dtype is not None:
            gradients = [gradient.to(self._communication_dtype) for gradient in gradients]
        # graphs write the gradients of the next backward where those of this one lie, which are copied if they stay
        stays = True in map(_ADDS_UP, self.pg_to_grad_store.values())
        if bucket.world_size == 1 and not stays and self.automatic_scaling is None:
            return [gradient if gradient.dtype is kept else gradient.to(kept) for gradient in gradients]
        groups = bucket.torch_pg if isinstance(bucket.torch_pg, tuple) else (bucket.torch_pg,)
        for group, ranks in zip(groups, bucket.sizes, strict=True):
            sizes = [gradient.numel() // ranks for gradient in gradients]
            if self.automatic_scaling is None:
                # with two groups the first mean is not the result: rounding it would round twice
                dtype = kept if group is groups[-1] else torch.float32
                part = gradients[0].new_empty(sum(sizes), dtype=dtype)
                comm.reduce_scatter_coalesced(
                    part, gradients, ReduceOp.AVG, group, encoding=self.gradient_encoding, of=of
                )
            else:
                whole = side_by_side(gradients, ranks)
                part = whole.new_empty(sum(sizes))
                self.automatic_scaling.reduce_scatter_tensor(part, whole, ReduceOp.AVG, group, sizes=sizes, of=of)
            if group is not groups[-1]:
                gradients = part.split(sizes)
        return part.to(kept).split(sizes)

    def _update(self, gradients: Mapping[Trained, torch.Tensor]) -> None:
        """Update masters, given this rank's parts of their gradients.

        Raises:
            RuntimeError: one has been updated since the last step.
        """
        # before a master changes: a second update by part of a gradient could not be taken back
        if not self._updated_amaxes.keys().isdisjoint(gradients):
            raise RuntimeError(
                "a second backward has come before step(), and the optimizer updates in backward; call step() after "
                "each backward, or make the optimizer without update_in_backward"
            )
        self._updated_amaxes |= self._in_one_pass(gradients, None)

    def clip_grad_by_norm(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As Colossal-AI's, which finds gradients within `no_sync` alone; ValueError where backward has used them."""
        if self.updates_in_backward:
            raise ValueError(REFUSAL)
        return super().clip_grad_by_norm(*args, **kwargs)

    def clip_grad_by_value(self, *args: Any, **kwargs: Any) -> None:
        """As `clip_grad_by_norm`."""
        if self.updates_in_backward:
            raise ValueError(REFUSAL)
        super().clip_grad_by_value(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """As it is; the gradients of such micro-batches add up whole, in `.grad`."""
        (kind,) = {store.kind for store in self.pg_to_grad_store.values()}
        if kind != "32-bit" and not self._warned_of_no_sync:
            self._warned_of_no_sync = True
            self._logger.warning(
                f'fp8_config.gradient_accumulation="{kind}" has no effect within no_sync: gradients add up whole in '
                "16 bits; leave no_sync out, or the option",
                ranks=[0],
            )
        return super().no_sync()

    # --- step: masters are updated

    def step(self, closure: None = None) -> None:
        """Update this rank's master shards and publish the new weights to all ranks.

        Raises:
            ValueError: a closure is given; gradients are reduced before the step, so it cannot be called again.
            RuntimeError: gradients have not been reduced, since the loss ran backward by itself.
        """
        if closure is not None:
            raise ValueError("ZeRO's step takes no closure: its gradients are reduced before; call step() without one")
        # within `no_sync` gradients are whole and unreduced, and Colossal-AI's step does nothing there either
        if not self.require_grad_sync:
            return
        self._require_reduced()
        # before anything is written: every rank skips alike, as overflow is agreed on
        if self.mixed_precision_mixin is not None and self.mixed_precision_mixin.should_skip_step():
            if self._verbose:
                self._logger.info("Found overflow. Skip step")
            self.zero_grad()
            return
        if not self.updates_in_backward:
            self.gathered_weights.wait()  # the optimizer overwrites what they are cast from
            if isinstance(self.optim, DistributedLamb):
                self.gathered_weights.restore()  # its trust ratios are of the norms of working weights
            # before any master changes: the norm is of all gradients, and a loss scale must not reach a moment
            divisor = self._divisor()
            if self.before_update is not None:
                self.before_update()
        if self.automatic_scaling is not None:
            self.automatic_scaling.step()  # not in a step that is skipped
        if self.updates_in_backward:
            # emptied before anything can raise: the next backward may update each weight again
            amaxes, self._updated_amaxes = self._updated_amaxes, {}
            updated = [each for each in self._trained.values() if each in amaxes]
            one_pass.step_of_nothing(self.optim)
            works = self._gather(_in_16_bits(updated))
        else:
            gradients = self._gradients()
            updated = list(gradients)
            works, amaxes = self._step_optimizer(gradients, divisor)
        self._publish(updated, works, amaxes)

    def _require_reduced(self) -> None:
        """Raise RuntimeError where gradients wait to be reduced: a step would go without them, or by some of them.

        Warn once of parameters that were unfrozen too late to be trained.
        """
        waiting = [each.name for each in self._trained.values() if each.working.grad is not None]
        if waiting:
            raise RuntimeError(
                f"gradients of {first_of(waiting)} wait to be reduced over the ranks; call booster.backward(loss, "
                "optimizer) in place of loss.backward(), and for the last micro-batch outside of no_sync"
            )
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.grad is not None]
        if unfrozen:
            self._frozen = {}  # told once
            self._logger.warning(
                f"{first_of(unfrozen)} got gradients and stay as they are: ZeRO trains what required gradients when "
                "booster.boost was called; unfreeze before",
                ranks=[0],
            )

    def forget_step(self) -> None:
        """As `BoostedOptimizer.forget_step`; counts of automatic scaling too."""
        super().forget_step()
        if self.automatic_scaling is not None:
            self.automatic_scaling.forget_step()

    def _gradients(self) -> dict[Trained, torch.Tensor]:
        """Return this rank's parts of the gradients; those without one, such as of a dropped layer, are left out."""
        found = {}
        by_group: dict[tuple[AccumulatedGradients, int], Mapping[int, Sequence[torch.Tensor]]] = {}
        for each in self._trained.values():
            of_group = by_group.get((each.store, each.group_id))
            if of_group is None:
                of_group = by_group[each.store, each.group_id] = each.store.gradients(each.group_id)
            if held := of_group.get(each.place[1]):
                found[each] = held[0]
        return found

    def _divisor(self) -> torch.Tensor | None:
        """Find the divisor of gradients, which undoes the loss scale and clips by the norm over all ranks.

        Returns:
            float32 [], which the host does not wait for; None where it is one.
        """
        self._current_grad_norm = norm = self._norm()
        scaled, clips = self.mixed_precision_mixin is not None, self._clip_grad_norm > 0
        divisor = self.mixed_precision_mixin.get_grad_div_scale() if scaled else 1.0
        if clips:
            return clipping_divisor(norm, divisor, self._clip_grad_norm)
        return None if divisor == 1 else torch.full_like(norm, divisor)

    def _norm(self) -> torch.Tensor:
        """Return the norm of all gradients over all ranks, times the loss scale: float32 [], on the device."""
        device = get_accelerator().get_current_device()
        squares = torch.zeros((), dtype=torch.float32, device=device)
        # in the order of the groups, not as they came: CUDA graphs give a layer's together, and the sum must have the
        # bits of eager layers
        found = self._gradients()
        for group, store in self.pg_to_grad_store.items():
            gradients = [gradient for each, gradient in found.items() if each.store is store]
            # also without gradients: every rank takes part in the reductions
            of_group = torch.zeros_like(squares)
            if gradients:
                # from the norm of each, found beside backward: the step reads no gradient for it that has not changed
                # since
                of_group += noted_norms(gradients).square().sum()
            for ranks in group if isinstance(group, tuple) else (group,):
                if ranks_of(ranks) > 1:  # over one rank it changes nothing, and costs the host a launch
                    dist.all_reduce(of_group, group=ranks)
            squares += of_group
        return squares.sqrt()

    def _step_optimizer(
        self, gradients: Mapping[Trained, torch.Tensor], divisor: torch.Tensor | None
    ) -> tuple[list[dist.Work], dict[Trained, torch.Tensor]]:
        """Step with the masters that have a gradient, and begin to send the weights that are sent in 16 bits.

        Where the optimizer is one of torch's, it is one pass over memory, over these weights first: the next forward
        reads them first, and they are sent while the others are updated.

        Args:
            gradients: of what is updated, in the order of the groups.
            divisor: of gradients; None: they are not divided.

        Returns:
            the gathers of weights in 16 bits, and the amax of each master where it is known: float32 [], on its device.
        """
        in_16_bits = _in_16_bits(gradients)
        if self.why_by_itself() is None:
            amaxes = self._in_one_pass({each: gradients[each] for each in in_16_bits}, divisor)
            works = self._gather(in_16_bits)
            amaxes |= self._in_one_pass({each: gradients[each] for each in _in_fp8(gradients)}, divisor)
            one_pass.step_of_nothing(self.optim)
            return works, amaxes
        self._attach(gradients, divisor)
        for group_id, group in enumerate(self.optim.param_groups):
            group["params"] = [each.master for each in gradients if each.group_id == group_id]
        self.optim.step()
        self._give_back_masters()
        # as Colossal-AI's step does: a master's gradient is FP32, as large as the master
        for masters in self._master_param_groups_of_current_rank.values():
            release_param_grad(masters)
        return self._gather(in_16_bits), {}

    def _give_back_masters(self) -> None:
        for group_id, masters in self._master_param_groups_of_current_rank.items():
            self.optim.param_groups[group_id]["params"] = masters

    def _in_one_pass(
        self, gradients: Mapping[Trained, torch.Tensor], divisor: torch.Tensor | None
    ) -> dict[Trained, torch.Tensor]:
        """Update masters by gradients on any devices, and return the amax of each."""
        amaxes: dict[Trained, torch.Tensor] = {}
        for group_id, group in enumerate(self.optim.param_groups):
            of_group = [each for each in gradients if each.group_id == group_id]
            masters = [each.master for each in of_group]
            # where masters are offloaded, gradients come to them; a look takes less than a call of `to`
            given = [
                gradient if gradient.device == master.device else gradient.to(master.device)
                for master, gradient in zip(masters, map(gradients.__getitem__, of_group), strict=True)
            ]
            found = one_pass.step_group(self.optim, group, masters, given, divisor)
            amaxes.update(zip(of_group, found, strict=True))
        return amaxes

    def _attach(self, gradients: Mapping[Trained, torch.Tensor], divisor: torch.Tensor | None) -> None:
        """Give masters their gradients, of their dtype and divided, for an optimizer that steps by itself."""
        masters = [each.master for each in gradients]
        for master, gradient in zip(masters, gradients.values(), strict=True):
            # torch takes no gradient of another type than the parameter's
            master.grad = gradient.to(master)
        if divisor is not None:
            for device in {master.device for master in masters}:  # offloaded ones lie on the CPU
                torch._foreach_div_([master.grad for master in masters if master.device == device], divisor.to(device))

    # --- after it: all ranks get the new weights

    def _publish(
        self, updated: Sequence[Trained], works: list[dist.Work], amaxes: Mapping[Trained, torch.Tensor]
    ) -> None:
        """Send the new weights of FP8 layers in FP8 to all ranks, and wait for the others.

        Args:
            updated: all that is sent.
            works: the gathers of what is sent in 16 bits, under way.
            amaxes: of the masters, where they are known.
        """
        in_fp8, device = _in_fp8(updated), get_accelerator().get_current_device()
        # offloaded masters come here; a look takes less than a call of `to`
        masters = [each.master if each.master.device == device else each.master.to(device) for each in in_fp8]
        known = [amax if amax is None or amax.device == device else amax.to(device) for amax in map(amaxes.get, in_fp8)]
        shards = zip(masters, known, strict=True)
        # first: where it has a stream of its own, it goes on while the current one waits for the others
        self.gathered_weights.publish(dict(zip([each.gathered for each in in_fp8], shards, strict=True)))
        for work in works:
            work.wait()
        # a graph that still holds the former values must not go backward with these; Colossal-AI writes past torch's
        # count
        torch.autograd.graph.increment_version([each.working for each in _in_16_bits(updated)])

    def publish_masters(self) -> None:
        """Send every weight as a step would, after the masters were set from outside; every rank calls it."""
        trained = list(self._trained.values())
        self._publish(trained, self._gather(_in_16_bits(trained)), {})

    def update_master_params(self, model: nn.Module) -> None:
        """As Colossal-AI's, which sets the masters to weights that were loaded.

        The bytes that were gathered before may decode to these weights, or be noted as theirs, and were cast from
        masters with more bits: a run that goes on must be that of another which loads the same.
        """
        super().update_master_params(model)
        self.gathered_weights.drop()

    def gather_working_weights(self) -> None:
        """Set every working weight to its master's value, rounded once; every rank calls it.

        The working weights of FP8 layers hold the values of their FP8 copies between steps, or none.
        """
        self.gathered_weights.restore()
        with self.gathered_weights.values_of_masters():
            self._gather(_in_fp8(self._trained.values()), wait=True)

    def groups_that_gather(self) -> list[dist.ProcessGroup]:
        """Return the groups of ranks over which `gather_working_weights` communicates."""
        return list(dict.fromkeys(self.param_to_pg[each.working] for each in _in_fp8(self._trained.values())))

    def count_weights(self) -> tuple[int, int]:
        """Return (weights that are sent in FP8, all trained parameters)."""
        return len(self.gathered_weights), len(self._trained)

    def _gather(self, sent: Sequence[Trained], wait: bool = False) -> list[dist.Work]:
        """Begin to gather master shards into working weights, as Colossal-AI does at the end of its step (:590).

        Args:
            sent: what is to be gathered.
            wait: for all of it; else for what is returned, and with `overlap_allgather` when it is used.
        """
        device = get_accelerator().get_current_device()
        messages: dict[dist.ProcessGroup, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        shards, rounded = [], []
        # rounded before they are sent, as Colossal-AI does: half the bytes, and each rank gets the same bits
        for each in sent:
            group = self.param_to_pg[each.working]
            padded = self._working_param_to_padded_working_param[each.working]
            late = self._overlap_allgather and not wait
            if late or isinstance(group, tuple):
                shard = each.master.detach().to(device, self._dtype)
                # over two groups the second gather sends what the first received, so neither is late
                work = all_gather_into_flat_tensor_nd(padded, shard, group, async_op=not isinstance(group, tuple))
                if not isinstance(group, tuple):
                    set_all_gather_handle(each.working, work)
            else:  # within the message, which nobody reads by now
                shard = each.part_of(padded)
                messages.setdefault(group, []).append((padded, shard))
                rounded.append((shard, each.master))
            shards.append(shard)
        if rounded:
            torch._foreach_copy_(*map(list, zip(*rounded, strict=True)))
        self.gathered_weights.count_in_16_bits([each.working for each in sent], shards)
        works = [work for group, of_group in messages.items() for work in gather_many(of_group, group)]
        if wait:
            for work in works:
                work.wait()
        return works


def zero_part_of(optimizer: LowLevelZeroOptimizer, master: torch.Tensor) -> int:
    """Return the place of a master shard among those of its parameter."""
    return get_nd_rank(optimizer.param_to_pg[optimizer.master_to_working_param[id(master)]])


def _in_16_bits(trained: Iterable[Trained]) -> list[Trained]:
    """Select what is sent in the working dtype."""
    return [each for each in trained if each.gathered is None]


def _in_fp8(trained: Iterable[Trained]) -> list[Trained]:
    """Select what is sent in FP8."""
    return [each for each in trained if each.gathered is not None]
