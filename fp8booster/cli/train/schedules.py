"""A pipeline's schedule: what the plugin's `pp_style` asks for beside it."""

from __future__ import annotations

from typing import Any

from .parallel import Parallel, suggestion

PIPELINE_STYLES = ("1f1b", "interleaved", "zbv")
"""The schedules of Colossal-AI's pipelines; zbv is zero-bubble."""


def with_chunks(arguments: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    """A plugin's arguments with `num_model_chunks`, the pieces of the model on a stage, where the schedule has several.

    Raises ValueError for a schedule that does not exist, and for sizes that it does not take.
    """
    style = arguments.get("pp_style", "1f1b")
    if style not in PIPELINE_STYLES:
        raise ValueError(f"pp_style is {style!r}; {suggestion(str(style), PIPELINE_STYLES)}")
    if style == "1f1b":
        return arguments
    if parallel.pp < 2:
        raise ValueError(f"pp_style={style} is a pipeline's; give --pp, the number of its stages")
    if parallel.micro_batches % parallel.pp:
        raise ValueError(
            f"--micro-batches is {parallel.micro_batches}; with pp_style={style} it must be a multiple of --pp, which "
            f"is {parallel.pp}"
        )
    chunks = arguments.get("num_model_chunks", 2)
    if chunks != 2 and (style == "zbv" or not isinstance(chunks, int) or chunks < 2):
        more = "" if style == "zbv" else " or more"
        raise ValueError(f"num_model_chunks is {chunks!r}; with pp_style={style} it must be 2{more}")
    return {"num_model_chunks": chunks} | arguments


def with_schedule(arguments: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    """`with_chunks`, and `scheduler_nodes` for zero-bubble, which Colossal-AI leaves to its user to make."""
    arguments = with_chunks(arguments, parallel)
    if arguments.get("pp_style") != "zbv":
        return arguments
    from fp8booster.colossal.pipeline import zero_bubble_schedule

    return {"scheduler_nodes": zero_bubble_schedule(parallel.pp, parallel.micro_batches)} | arguments
