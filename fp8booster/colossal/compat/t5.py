"""Mends of T5 in a pipeline, whose stages send each other more than hidden states."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch

T5 = "colossalai.shardformer.modeling.t5"


@mend(
    module=T5,
    place="shardformer/modeling/t5.py:260",
    needed_when="T5's encoder or decoder lies on two or more stages of a pipeline",
)
def t5_stages_return_all_gradients(module: ModuleType, patch: Patch) -> None:
    """Stages of T5 go backward through all that they sent: position biases and the encoder's output too.

    Without it they go through `hidden_states` alone: the table of relative positions learns from the first stage's
    layers only, and the encoder from the first of the decoder's stages. No longer needed when what `t5_stack_forward`
    returns on a first stage of two has no "backward_tensor_keys", or names the position bias there.
    """
    forwards = module.T5PipelineForwards
    patch.set(forwards, "t5_stack_forward", staticmethod(_without_keys(forwards.t5_stack_forward)))


def _without_keys(upstream: Callable) -> Callable:
    @functools.wraps(upstream)
    def t5_stack_forward(*args: Any, **kwargs: Any) -> Any:
        output = upstream(*args, **kwargs)
        if type(output) is dict:
            # the schedule then takes whatever the next stage has a gradient for
            output.pop("backward_tensor_keys", None)
        return output

    return t5_stack_forward


@mend(
    module=T5,
    place="shardformer/modeling/t5.py:141,149",
    needed_when="T5's decoder lies on two or more stages of a pipeline",
)
def t5_decoders_go_on_in_later_stages(module: ModuleType, patch: Patch) -> None:
    """Later stages of T5's decoder make their masks from hidden states.

    Without it: AttributeError: 'NoneType' object has no attribute 'device' (or 'dtype', where a mask is given), and
    the stages before wait for ever. No longer needed when `t5_stack_forward` runs on the second of a decoder's stages.
    """
    forwards = module.T5PipelineForwards
    upstream = forwards.t5_stack_forward
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def t5_stack_forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        starts = (0, given["decoder_starting_stage"])
        if given["stage_manager"].stage not in starts and given.get("inputs_embeds") is None:
            # upstream reads device and dtype of it there, and nothing else
            given["inputs_embeds"] = given["hidden_states"]
        return upstream(**given)

    patch.set(forwards, "t5_stack_forward", staticmethod(t5_stack_forward))
