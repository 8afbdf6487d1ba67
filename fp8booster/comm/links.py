"""Reads what `fp8booster doctor --nodes` measured: the payload from which each collective gains in FP8, by link.

Ranks that decide differently wait in different collectives for each other. So rank 0 alone reads the file, and the
others take what it found from the store of the process group.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fp8booster.files import cache_folder, write_whole
from fp8booster.mailbox import Mailbox
from fp8booster.reading import first_of
from fp8booster.version import __version__

INSIDE_A_NODE = "inside a node"
BETWEEN_NODES = "between nodes"

BY_NODES = "between nodes, by nodes"
"""The thresholds of reductions that add inside each node first (`comm.by_nodes`), where nodes have several ranks."""

VARIABLE = "FP8BOOSTER_LINKS"
"""The environment variable with the file's path; empty: no file is read."""

PATIENCE = 1800.0
"""Seconds that the ranks have to come, as long as gloo lets them."""

NEVER = sys.maxsize
"""The threshold of a collective that takes no less time in FP8 at any size."""

KINDS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single", "broadcast", "send")
"""The collectives that are measured, by their rows in `comm.statistics`."""

REDUCTIONS = ("all_reduce", "reduce_scatter_tensor")
"""Collectives of `KINDS` that can run by nodes."""

_AS = {"all_gather": "all_gather_into_tensor", "all_to_all": "all_to_all_single"}
"""The same transport with its tensors in a list."""

_AGAIN = "run `fp8booster doctor --nodes` again"


@dataclass(frozen=True)
class Links:
    """The thresholds that were measured, and their source."""

    source: str = "estimated; `fp8booster doctor --nodes` measures them"
    """A clause: where the thresholds come from, and why not from a file."""

    device: str = ""
    """The type of the devices between which they were measured, "cuda" or "cpu"; empty: none were."""

    minimum_bytes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """By link and collective; None where FP8 gains at no size that was measured."""

    first_ranks: Sequence[int] = ()
    """For each rank the first one of its node."""

    def find(self, device: torch.device, link: str, collective: str) -> int | None:
        """Return the payload from which a collective is sent in FP8, `NEVER`, or None where it was not measured."""
        if device.type != self.device:
            return None
        known = self.minimum_bytes.get(link, {})
        kind = _AS.get(collective, collective)
        if kind not in known:
            return None
        least = known[kind]
        return NEVER if least is None else least


ESTIMATED = Links()


def file_of_links() -> Path | None:
    """Return the file that is read and written: $FP8BOOSTER_LINKS, by default links.json among the cached files."""
    given = os.environ.get(VARIABLE)
    if given is None:
        return cache_folder() / "links.json"
    return Path(given) if given else None


def conditions() -> dict[str, Any]:
    """Return on what measured times depend, as far as rank 0 can tell, by which a file is told from another's."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"CPU, {platform.machine()}, {os.cpu_count()} cores"
    return {
        "device": device,
        "ranks": dist.get_world_size(),
        "ranks of a node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "torch": torch.__version__,
        "fp8booster": __version__,
    }


def write_links(path: Path, minimum_bytes: Mapping[str, Mapping[str, int | None]], **about: Any) -> None:
    """Write the thresholds measured under these conditions; `about` needs "date" and "hosts"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"conditions": conditions(), **about, "minimum_bytes": minimum_bytes}
    write_whole(path, json.dumps(record, indent=1) + "\n")


def own_node() -> tuple[int, int]:
    """Return the first rank of this one's node, and how many it has."""
    # torchrun numbers the ranks of a node one after the other. A launcher that does not say how many a node has is
    # taken to start several nodes: there fewer bytes always help.
    here, rank = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_rank()
    return rank - int(os.environ.get("LOCAL_RANK", rank % here)), here


def agree_on_links(world: dist.ProcessGroup) -> Links:
    """Return what rank 0 reads, with the nodes of all; all ranks of the group of all call it."""
    box, first = Mailbox(world, "links"), own_node()[0]
    if box.rank:
        box.leave("node", first)
        return cast(Links, box.read_answer("node", PATIENCE))
    others, absent = box.collect("node", PATIENCE)
    if absent:
        raise RuntimeError(
            f"rank {first_of(list(map(str, absent)))} did not come within {PATIENCE:g} s to agree on the thresholds of "
            "FP8 messages; let all ranks begin training, and look into the logs of those that do not"
        )
    found = replace(_read(file_of_links()), first_ranks=[first, *others.values()])
    box.answer("node", found)
    return found


def _read(path: Path | None) -> Links:
    if path is None or (VARIABLE not in os.environ and not path.exists()):
        return ESTIMATED
    try:
        return _links_of(path)
    except (OSError, ValueError) as error:
        source = f"estimated, for {error}"
        warnings.warn(f"thresholds of FP8 messages are {source}", stacklevel=5)
        return Links(source)


def _links_of(path: Path) -> Links:
    """Return the thresholds of a file; raises ValueError or OSError where there are none for here."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        measured = {
            link: {kind: record["minimum_bytes"][link][kind] for kind in kinds} for link, kinds in _measured(record)
        }
        then, date, hosts = dict(record["conditions"]), str(record["date"]), ", ".join(record["hosts"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or of another version; {_AGAIN}") from error
    numbers = [least for kinds in measured.values() for least in kinds.values() if least is not None]
    if any(type(least) is not int or least < 0 for least in numbers):
        raise ValueError(f"{path} has a threshold that is no number of bytes; {_AGAIN}")
    now = conditions()
    differ = [f"{name} {then.get(name)} and here {now[name]}" for name in now if then.get(name) != now[name]]
    if differ:
        raise ValueError(f"{path} was measured with {', '.join(differ)}; {_AGAIN}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Links(f"measured {date} on {hosts} ({path})", device, measured)


def _measured(record: dict[str, Any]) -> list[tuple[str, Sequence[str]]]:
    links: list[tuple[str, Sequence[str]]] = [
        (link, KINDS) for link in (INSIDE_A_NODE, BETWEEN_NODES) if link in record["minimum_bytes"]
    ]
    if BETWEEN_NODES in record["minimum_bytes"] and record["conditions"]["ranks of a node"] > 1:
        links.append((BY_NODES, REDUCTIONS))
    return links
