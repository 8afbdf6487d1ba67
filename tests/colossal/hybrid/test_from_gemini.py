"""On four ranks: what Gemini writes in FP8, tensor parallel pipelines read, in FP8 and native, and native Gemini."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.hybrid import runs as hybrid_runs
from tests.colossal.hybrid.runs import HybridRun, batches, sizes, start
from tests.colossal.hybrid.test_checkpoints import load, save, weights_in
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins.training import Boosted, assert_close, assert_equal

TP2_PP2 = {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}
CLOSE = 1e-2
RATE = 1e-3
FORMS = ("one file", "shards")


def _gemini(plugin: Any) -> Boosted:
    return gemini_runs.boost(plugin, tiny_llama(**sizes()), lr=RATE)


READERS: dict[str, Callable[[], Boosted]] = {
    "fp8 TP2 x PP2": lambda: start(hybrid_runs.fp8(TP2_PP2), lr=RATE),
    "native TP2 x PP2": lambda: start(hybrid_runs.native(TP2_PP2), lr=RATE),
    "native Gemini": lambda: _gemini(gemini_runs.native()),
}


def learn(run: Boosted, first: int, last: int) -> list[float]:
    """Losses of the steps `first` to `last` - 1, over all ranks; all runs read the same text."""
    if isinstance(run, HybridRun):
        return hybrid_runs.learn(run, first, last)
    ranks, losses = dist.get_world_size(), []
    for (tokens,) in batches(first, last, ranks, dist.get_rank()):
        loss = torch.tensor(run.step(tokens)[0])
        dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
    return losses


@ranks(4)
def test_what_gemini_writes_in_fp8_others_read_and_go_on_from() -> None:
    writer = _gemini(gemini_runs.wire())
    start_of_all = learn(writer, 0, 3)
    written = {form: save(writer, form, f"gemini {form}") for form in FORMS}
    expected = learn(writer, 3, 6)
    assert expected[0] < 0.99 * start_of_all[0]
    for name, make in READERS.items():
        reader, losses = make(), []
        for form, files in written.items():
            learn(reader, 0, 1)  # other weights, and FP8 copies of them
            load(reader, *files)
            again, _ = save(reader, form, f"{name} {form}")
            # Gemini writes the dtype of the model as it was built, others their 16-bit weights
            of_reader = weights_in(again)
            of_writer = {name: value.to(of_reader[name].dtype) for name, value in weights_in(files[0]).items()}
            assert_equal(of_writer, of_reader)
            losses.append(learn(reader, 3, 6))
        assert losses[0] == losses[1], name
        assert_close(expected, losses[0], CLOSE)
