"""Every Python process that has this folder on PYTHONPATH reads it.

A rank of a command may get a signal.
"""

import os

_harm = os.environ.get("FP8BOOSTER_FAULT")  # rank, signal, number of the event, text of the first path, folder
if _harm is not None:
    _rank, _signal, _number, _first, _folder = _harm.split(",", 4)
    if os.environ.get("RANK") == _rank and "TORCHELASTIC_ERROR_FILE" in os.environ:
        if _folder:
            from tests.faults.file_events import FileEvents

            FileEvents(_folder, _first, fatal=int(_number), signal_number=int(_signal))
        else:
            from tests.faults.collective_events import CollectiveEvents

            CollectiveEvents(int(_number), lambda: os.kill(os.getpid(), int(_signal)))
