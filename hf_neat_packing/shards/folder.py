"""The folder of packs while it is being written: what is finished there, and what an earlier run has left.

Files are written under names of their own and renamed when they are complete: first the packs, then
the report that says that they are there. So a worker may be killed at any moment, and a part that is
written twice is written with the same packs. The folder gets its own name when all parts are there.
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from hf_neat_packing.errors import ColumnError, NeatPackingError

# Readers of parquet folders pass over names that begin so.
SUMMARY_NAME = "_packing.json"
_WORK_NAME = "_work.json"
_REPORTS = "_reports"
_UNFINISHED = ".unfinished"
_ATTEMPT = ".attempt"


class PackFolder:
    """Parts of packs on their way to one folder.

    Args:
        output: The folder that will hold the packs.
        split: First word of the file names, by which `datasets` tells splits.
        parts: How many files there will be.
    """

    def __init__(self, output: Path, split: str, parts: int) -> None:
        self.output, self.split, self.parts = output, split, parts
        self.work = output.with_name(output.name + _UNFINISHED)

    def file_name(self, part: int) -> str:
        """Name the file of a part, in the way of data sets on the Hub."""
        return f"data/{self.split}-{part:05d}-of-{self.parts:05d}.parquet"

    def begin(self, part: int, *, max_retries: int) -> None:
        """Count an attempt at a part.

        Raises:
            NeatPackingError: If the workers of too many attempts have died.
        """
        (self.work / f".{part:05d}-{uuid.uuid4().hex}{_ATTEMPT}").touch()
        died = len(self._attempts(part)) - 1
        if died > max_retries:
            raise NeatPackingError(
                f"{died} workers have died over this part, more than max_retries={max_retries} allows: killed by "
                "somebody, or by the system because memory ran out. What is finished is kept, and the same call goes "
                "on. Write a smaller tokens_per_file (and force=True), or fewer num_workers, if it is memory."
            )

    def unfinished_file(self, part: int) -> Path:
        """Give a name that no other worker writes to, for the packs of a part."""
        return self.work / f".{part:05d}-{uuid.uuid4().hex}{_UNFINISHED}"

    def finish(self, part: int, written: Path, report: dict[str, Any]) -> None:
        """Give the packs of a part their name, and then say that they are there."""
        size = written.stat().st_size
        os.replace(written, self.work / self.file_name(part))
        _write_json(self._report(part), {"bytes": size, **report})
        for attempt in self._attempts(part):
            attempt.unlink(missing_ok=True)

    def finished(self, part: int) -> dict[str, Any] | None:
        """Return the report of a part that is finished, else None."""
        try:
            report: dict[str, Any] = json.loads(self._report(part).read_text(encoding="utf-8"))
            whole = (self.work / self.file_name(part)).stat().st_size == report["bytes"]
        except FileNotFoundError:
            return None
        return report if whole else None

    def claim(self, identity: str, *, force: bool) -> None:
        """Make the folder for unfinished work, or go on in the one that an earlier run has left.

        Args:
            identity: What decides the content of every file.
            force: Replace the packs of an earlier run, and throw away unfinished ones of another.

        Raises:
            ColumnError: If something is in the way that is not the same work.
        """
        _require_replaceable(self.output, force=force)
        marker = self.work / _WORK_NAME
        if marker.is_file():
            if json.loads(marker.read_text(encoding="utf-8")) == identity:
                self._remove_strays()
                return
            if not force:
                raise ColumnError(
                    f"{self.work} is of an earlier run on other shards, on shards that have changed since, or with "
                    "other options, and its packs do not belong with the new ones. Write force=True to throw it away, "
                    "or give another output."
                )
            shutil.rmtree(self.work)
        elif self.work.exists() and any(self.work.iterdir()):
            raise ColumnError(
                f"{self.work} holds files of no earlier run, and unfinished packs go there. Move it away, or give "
                "another output."
            )
        for name in ("data", _REPORTS):
            (self.work / name).mkdir(parents=True, exist_ok=True)
        _write_json(marker, identity)

    def complete(self, summary: dict[str, Any]) -> None:
        """Give the folder its name, all parts being there."""
        self._remove_strays()
        _write_json(self.work / SUMMARY_NAME, summary)
        replaced = self.output.with_name(self.output.name + ".replaced")
        if (self.output / SUMMARY_NAME).is_file():
            self.output.replace(replaced)
        self.work.replace(self.output)
        (self.output / _WORK_NAME).unlink()
        shutil.rmtree(replaced, ignore_errors=True)

    def _report(self, part: int) -> Path:
        return self.work / _REPORTS / f"{part:05d}.json"

    def _attempts(self, part: int) -> list[Path]:
        return list(self.work.glob(f".{part:05d}-*{_ATTEMPT}"))

    def _remove_strays(self) -> None:
        """Remove what killed workers have left, and forget how many there were."""
        for ending in (_UNFINISHED, _ATTEMPT):
            for stray in self.work.rglob(f".*{ending}"):
                stray.unlink(missing_ok=True)


def _require_replaceable(output: Path, *, force: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / SUMMARY_NAME).is_file():
        raise ColumnError(
            f"{output} exists and is not a folder of packs, so it is never overwritten. Give another output."
        )
    if not force:
        raise ColumnError(
            f"{output} holds packs already. Write force=True to replace them, or give another output."
        )


def _write_json(path: Path, value: Any) -> None:
    unfinished = path.with_name(f".{uuid.uuid4().hex}{_UNFINISHED}")
    unfinished.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
