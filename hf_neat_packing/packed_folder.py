"""Write the packs of a source into a folder, and go on where a run that was killed stopped.

Tokenizing takes nearly all of the time, so its result is kept shard by shard beside the folder, in
`<folder>.unfinished`; planning and writing are quick and start over. The folder gets its name when
it is complete.
"""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hf_neat_packing._compat import data_fingerprint
from hf_neat_packing.dataset import pack_dataset
from hf_neat_packing.errors import ColumnError
from hf_neat_packing.planning import PackingReport
from hf_neat_packing.sources import TOKEN_COLUMN, token_ids

if TYPE_CHECKING:
    import datasets

REPORT_NAME = "packing_report.json"
SHARD_DOCUMENTS = 5_000


def check_output(output: Path, *, force: bool) -> None:
    """Refuse a folder that must not be overwritten.

    Args:
        output: Where the packs shall go.
        force: Whether packs from an earlier run may be replaced.

    Raises:
        ColumnError: If there are packs already and `force` is not given, or something else.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / REPORT_NAME).is_file():
        raise ColumnError(
            f"{output} exists and is not a folder of packs, so it is never overwritten. Give "
            "another name: --output FOLDER."
        )
    if not force:
        raise ColumnError(
            f"{output} holds packs already. Write --force to replace them, or give another name: "
            "--output FOLDER."
        )


def pack_to_folder(
    dataset: "datasets.Dataset",
    output: Path,
    *,
    tokenizer: Any = None,
    column: str | None = None,
    force: bool = False,
    **options: Any,
) -> PackingReport:
    """Tokenize documents if they are text, pack them, and write the packs into a folder.

    Args:
        dataset: The documents, one per row.
        output: A new folder, for `datasets.load_from_disk`.
        tokenizer: Makes tokens of the text; not needed for data with tokens.
        column: The column with the text; None for data with tokens.
        force: Replace packs from an earlier run.
        **options: Of `pack_dataset`: `max_length` and the others.

    Returns:
        The report, which is in the folder too.

    Raises:
        ColumnError: If the folder must not be overwritten, if an earlier run on other documents
            was left unfinished there, or if the documents cannot be packed.
        PlanningError: If an option cannot be honoured.
    """
    check_output(output, force=force)
    work = output.with_name(output.name + ".unfinished")
    identity = _identity(dataset, tokenizer, column)
    if column is not None:
        claim(work, identity, force=force)
        dataset = tokenize_in_shards(dataset, work, tokenizer=tokenizer, column=column)
    packed = work / "packed"
    view = pack_dataset(dataset, **options)
    if not len(view):
        raise ColumnError("No document is left to pack; the options drop all of them.")
    claim(work, identity, force=force)
    if packed.exists():
        shutil.rmtree(packed)
    view.save_to_disk(packed)
    if output.exists():
        output.rename(work / "replaced")
    packed.rename(output)
    shutil.rmtree(work)
    report: PackingReport = view.report
    return report


def tokenize_in_shards(
    dataset: "datasets.Dataset", work: Path, *, tokenizer: Any, column: str
) -> "datasets.Dataset":
    """Tokenize documents into files of a fixed number of documents, those left out that are there.

    Args:
        dataset: Texts, one per row.
        work: Folder for the files, as `claim` leaves it.
        tokenizer: A Hugging Face tokenizer.
        column: The column with the text.

    Returns:
        A memory-mapped data set with `input_ids`.

    Raises:
        ColumnError: If a document is no text.
    """
    import datasets
    from datasets.utils import tqdm

    firsts = range(0, len(dataset), SHARD_DOCUMENTS)
    paths = [work / f"tokens-{first:012d}.arrow" for first in firsts]
    done = sum(path.exists() for path in paths) * SHARD_DOCUMENTS
    with tqdm(
        total=len(dataset),
        initial=min(done, len(dataset)),
        unit=" documents",
        desc="Tokenizing",
    ) as bar:
        for first, path in zip(firsts, paths, strict=True):
            if not path.exists():
                texts = list(dataset[first : first + SHARD_DOCUMENTS][column])
                _write(token_ids(texts, tokenizer, first=first), path)
                bar.update(len(texts))
    shards = [datasets.Dataset.from_file(str(path)) for path in paths]
    return datasets.concatenate_datasets(shards)


def claim(work: Path, identity: str, *, force: bool) -> None:
    """Make the folder for unfinished work, or go on with the one that an earlier run has left.

    Args:
        work: The folder.
        identity: What decides the content of the files in it.
        force: Throw away the files of an earlier run on something else.

    Raises:
        ColumnError: If the files there are of something else.
    """
    marker = work / "documents.json"
    unfinished = work / "documents.json.unfinished"
    if work.exists() and not work.is_dir():
        raise ColumnError(f"{work} is a file, and unfinished work goes there. Move it away.")
    if marker.is_file():
        if marker.read_text(encoding="utf-8") == identity:
            return
        if not force:
            raise ColumnError(
                f"{work} is from a run on other documents, or with another tokenizer, that did not "
                "finish. Write --force to start over, or give another name: --output FOLDER."
            )
        shutil.rmtree(work)
    elif work.is_dir() and any(path != unfinished for path in work.iterdir()):
        raise ColumnError(
            f"{work} holds files that are from no earlier run, and unfinished work goes there. "
            "Move it away, or give another name: --output FOLDER."
        )
    work.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(identity, encoding="utf-8")
    unfinished.replace(marker)


def _identity(dataset: "datasets.Dataset", tokenizer: Any, column: str | None) -> str:
    """Hash what decides the tokens: the documents and how they become tokens."""
    digest = hashlib.blake2b(digest_size=8)
    parts: list[Any] = [data_fingerprint(dataset), column, SHARD_DOCUMENTS]
    if column is not None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
        parts += [words, tokenizer.eos_token_id]
    for part in parts:
        digest.update(repr(part).encode() + b"\0")
    return digest.hexdigest()


def _write(documents: Iterable[list[int]], path: Path) -> None:
    """Write one file of documents; it has its name only when it is complete."""
    rows = [np.asarray(ids, dtype=np.int32) for ids in documents]
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in rows], dtype=np.int64)))
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))
    table = pa.table({TOKEN_COLUMN: column})
    unfinished = path.with_suffix(".unfinished")
    with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    unfinished.replace(path)
