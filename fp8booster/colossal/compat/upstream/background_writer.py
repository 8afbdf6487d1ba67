"""A file written by a thread: what colossalai's asynchronous checkpoints ask of the package tensornvme."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch


class BackgroundFileWriter:
    """Writes bytes and tensors to `path`, in the order of the calls, while the caller goes on.

    It has the calls of tensornvme's AsyncFileWriter that colossalai/utils/safetensors.py makes; that package
    must be compiled against liburing. `n_entries`, `backend` and `n_tasks` tune it and mean nothing here.
    """

    def __init__(self, path: str, n_entries: int, backend: str, n_tasks: int) -> None:
        self.offset = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by synchronize)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._writes: list[Future[int]] = []

    def write(self, data: bytes) -> None:
        """Append `data`."""
        self._writes.append(self._thread.submit(self._file.write, data))
        self.offset += len(data)

    def write_raw(self, tensor: torch.Tensor, pointer: int, n_bytes: int, offset: int) -> None:
        """Append `tensor`, on CPU, which must not change until `synchronize`."""
        self.write(memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()))

    def register_h2d(self, n_tensors: int) -> None:
        """Nothing to prepare: `write_tensor` copies before it returns."""

    def write_tensor(self, tensor: torch.Tensor, pinned: torch.Tensor | None = None) -> None:
        """Append a copy of `tensor`, made at once, in `pinned` where that is given."""
        copy = torch.empty_like(tensor, device="cpu") if pinned is None else pinned
        copy.copy_(tensor.detach())
        self.write_raw(copy, copy.data_ptr(), copy.nbytes, self.offset)

    def sync_before_step(self) -> None:
        """Nothing to wait for before the weights change: they are copied."""

    def synchronize(self) -> None:
        """Wait until the file is whole on disk; an error of a write is raised here."""
        self._thread.shutdown()
        self._file.close()
        for write in self._writes:
            write.result()
