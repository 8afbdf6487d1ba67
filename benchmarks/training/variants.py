"""List the variants that `benchmarks.convergence` trains: one precision each, with an optimizer and what is saved in
fewer bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.training.job import Job


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train the job's model."""

    key: str
    """As `--variant` takes it; names the folder of its runs."""
    label: str
    """For tables."""
    engine: str = "fp8booster-fp8"
    """A key of `engines.OURS`."""
    base: str | None = None
    """Label of the variant that it differs from in one part; None: it is the one that all are compared with."""
    fp8_options: tuple[str, ...] = ()
    """`key=value` pairs for FP8Config, after the job's."""
    optimizer: str | None = None
    """Another than the job's."""

    def job(self, base: Job, seed: int) -> Job:
        """The job of one run."""
        return replace(
            base,
            seed=seed,
            fp8_options=(*base.fp8_options, *self.fp8_options),
            optimizer=self.optimizer or base.optimizer,
        )


BF16 = "BF16"
FUSED = "BF16, fused blocks"
FP8 = "FP8"
_IN_8_BITS = ("activations.saved=8-bit",)

VARIANTS = {
    variant.key: variant
    for variant in (
        Variant(key="bf16", label=BF16, engine="fp8booster-bf16"),
        Variant(key="bf16-fused", label=FUSED, engine="fp8booster-bf16-fused", base=BF16),
        Variant(key="fp8", label=FP8, base=FUSED),
        Variant(key="fp8-rowwise", label="FP8, rowwise", base=FP8, fp8_options=("scaling=rowwise",)),
        Variant(key="fp8-blockwise", label="FP8, blockwise", base=FP8, fp8_options=("scaling=blockwise",)),
        Variant(key="fp8-amax", label="FP8, amax scaling", base=FP8, fp8_options=("scaling=amax",)),
        Variant(key="fp8-delayed", label="FP8, delayed scaling", base=FP8, fp8_options=("scaling=delayed",)),
        Variant(key="fp8-constant", label="FP8, constant scaling", base=FP8, fp8_options=("scaling=constant",)),
        Variant(key="fp8-e4m3", label="FP8, gradients in E4M3", base=FP8, fp8_options=("formats.gradient=e4m3",)),
        Variant(key="fp8-exact", label="FP8, exact sums", base=FP8, fp8_options=("fast_accumulation=",)),
        Variant(key="fp8-ends", label="FP8, ends in 16 bits", base=FP8, fp8_options=("high_precision_ends=1",)),
        Variant(key="fp8-moments", label="FP8, 8-bit moments", base=FP8, optimizer="adamw-8bit"),
        Variant(key="fp8-activations", label="FP8, 8-bit activations", base=FP8, fp8_options=_IN_8_BITS),
        Variant(key="fp8-lean", label="FP8, both in 8 bits", base=FP8, fp8_options=_IN_8_BITS, optimizer="adamw-8bit"),
    )
}
"""By key, in the order of tables."""


def reference_of(labels: Sequence[str]) -> str:
    """Return the label of the variant that all others of a table are compared with: BF16, fused where no other ran."""
    return FUSED if FUSED in labels and BF16 not in labels else BF16


def chosen(keys: Sequence[str], also: Sequence[str]) -> list[Variant]:
    """The variants of a campaign: those named, all where none is, and one of FP8 for each option of `also`.

    Raises:
        ValueError: a key that none has, or an option without "=", or given twice.
    """
    for key in keys:
        if key not in VARIANTS:
            raise ValueError(f"--variant is {key!r}; use one of {', '.join(VARIANTS)}")
    for option in also:
        if "=" not in option:
            raise ValueError(f"--also {option!r} has no '='; write it as key=value")
        if also.count(option) > 1:
            raise ValueError(f"--also {option} is given twice; leave one out")
    named = [variant for key, variant in VARIANTS.items() if key in keys or not keys]
    return [
        *named,
        *(Variant(key=f"fp8-{option}", label=f"FP8, {option}", base=FP8, fp8_options=(option,)) for option in also),
    ]


def forwards(keys: Sequence[str], base: Job) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return `Job.forwards` of variants in FP8, by their keys, with the options of a campaign's job.

    Raises:
        ValueError: a key is another.
    """
    known = [key for key, variant in VARIANTS.items() if variant.engine == Variant.engine]
    for key in keys:
        if key not in known:
            raise ValueError(f"--evaluate-as is {key!r}; use one of {', '.join(known)}")
    return tuple((VARIANTS[key].label, VARIANTS[key].job(base, 0).fp8_options) for key in keys)


def base_of(label: str) -> str | None:
    """Return the variant that one is compared with, by labels, as results have them."""
    for variant in VARIANTS.values():
        if variant.label == label:
            return variant.base
    return FP8  # one of `--also`
