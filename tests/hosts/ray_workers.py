"""Words that kill the worker process that unpickles them, in the middle of its work."""

import os
import signal
import threading
import time
from pathlib import Path


def _die_while_writing(folder, times, after):
    """Kill this process while it writes packs, once so many files are finished."""
    if len(list(folder.glob("death-*"))) >= times:
        return

    def watch():
        while True:
            finished = len(list(folder.glob("*.unfinished/_reports/0*.json")))
            if finished >= after and list(folder.glob("*.unfinished/.*.unfinished")):
                break
            time.sleep(0.0002)
        (folder / f"death-{os.getpid()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _unpickle(folder, times, after):
    _die_while_writing(Path(folder), times, after)
    return "token"


class DeadlyWord(str):
    """The rule `token`, for the driver; in a worker it is that too, and its death.

    Args:
        folder: where the packs' folder is, and where each death leaves a file.
        times: deaths, on all workers together.
        after: files that are finished before the first.
    """

    def __new__(cls, folder, times, after=0):
        word = super().__new__(cls, "token")
        word.folder, word.times, word.after = folder, times, after
        return word

    def __reduce__(self):
        return _unpickle, (str(self.folder), self.times, self.after)
