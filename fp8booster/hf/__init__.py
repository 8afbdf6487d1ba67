"""FP8 in Hugging Face's Trainer, in Accelerate, and in TRL's trainers.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[FP8Callback()])

    model = prepare(model, accelerator=accelerator)  # before the optimizer is made
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

`import fp8booster.hf` imports neither transformers nor accelerate; `FP8Callback` imports transformers when it is asked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8booster.hf.prepare import prepare

if TYPE_CHECKING:
    from fp8booster.hf.callback import FP8Callback

__all__ = ["FP8Callback", "prepare"]


def __getattr__(name: str) -> Any:
    if name != "FP8Callback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # its base class is transformers', whose import takes seconds
    from fp8booster.hf.callback import FP8Callback

    return FP8Callback
