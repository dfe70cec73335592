"""Packs written into a folder: complete or not there, and a killed run goes on where it stopped."""

import os
import signal

import datasets
import pytest

from hf_neat_packing import packed_folder
from hf_neat_packing.dataset import materialize
from hf_neat_packing.errors import ColumnError, PlanningError
from hf_neat_packing.packed_folder import pack_to_folder
from hf_neat_packing.planning import PackingReport
from hf_neat_packing.sources import load_documents, token_ids


class CountingTokenizer:
    """A tokenizer that counts its calls and can be made to end the process."""

    eos_token_id = 0

    def __init__(self, *, kill_at: int | None = None) -> None:
        self.calls = 0
        self.kill_at = kill_at

    def get_vocab(self) -> dict[str, int]:
        return {"bytes": 0}

    def __call__(self, texts, **options):
        self.calls += 1
        if self.calls == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"input_ids": [[byte + 1 for byte in text.encode()] for text in texts]}


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    monkeypatch.setattr(packed_folder, "SHARD_DOCUMENTS", 10)


@pytest.fixture
def documents(jsonl) -> datasets.Dataset:
    return load_documents(str(jsonl))


def documents_of(folder) -> list[list[int]]:
    return [ids for row in datasets.load_from_disk(str(folder))["input_ids"] for ids in row]


def write(documents, output, tokenizer=None, **options):
    options = {"max_length": 128, "column": "text", **options}
    tokenizer = tokenizer or CountingTokenizer()
    return pack_to_folder(documents, output, tokenizer=tokenizer, **options)


def killed_run(documents, output, *, kill_at: int | None) -> None:
    child = os.fork()
    if not child:
        write(documents, output, CountingTokenizer(kill_at=kill_at))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_every_document_is_in_the_folder_once_with_its_report(documents, texts, tmp_path):
    report = write(documents, tmp_path / "packs")
    found = sorted(documents_of(tmp_path / "packs"))
    assert found == sorted(token_ids(texts, CountingTokenizer()))
    assert PackingReport.load(tmp_path / "packs" / "packing_report.json") == report
    assert not (tmp_path / "packs.unfinished").exists()


def test_a_killed_run_goes_on_where_it_stopped_and_loses_and_doubles_nothing(documents, tmp_path):
    write(documents, tmp_path / "at_once")
    killed_run(documents, tmp_path / "packs", kill_at=4)
    assert not (tmp_path / "packs").exists()
    killed_run(documents, tmp_path / "packs", kill_at=3)
    tokenizer = CountingTokenizer()
    write(documents, tmp_path / "packs", tokenizer)
    # Eight shards: three from the first run, two from the second, three are left.
    assert tokenizer.calls == 3
    assert documents_of(tmp_path / "packs") == documents_of(tmp_path / "at_once")
    assert not (tmp_path / "packs.unfinished").exists()


def test_a_run_that_died_while_writing_packs_writes_them_again(documents, tmp_path, monkeypatch):
    def die(self, path, **options):
        path.mkdir(parents=True)
        (path / "data-00000-of-00001.arrow").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_neat_packing.dataset.packed_dataset.PackedDataset.save_to_disk", die)
        with pytest.raises(KeyboardInterrupt):
            write(documents, tmp_path / "packs")
    assert not (tmp_path / "packs").exists()
    tokenizer = CountingTokenizer()
    write(documents, tmp_path / "packs", tokenizer)
    assert tokenizer.calls == 0
    assert len(documents_of(tmp_path / "packs")) == len(documents)


def test_a_run_killed_while_packs_are_written_writes_them_again(documents, tmp_path, monkeypatch):
    write(documents, tmp_path / "at_once")
    written = []
    gather = materialize._batch

    def killed(*arguments):
        written.append(arguments)
        if len(written) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*arguments)

    monkeypatch.setattr(materialize, "_TOKENS_WRITTEN", 500)
    with monkeypatch.context() as patch:
        patch.setattr(materialize, "_batch", killed)
        killed_run(documents, tmp_path / "packs", kill_at=None)
    assert not (tmp_path / "packs").exists()
    assert list((tmp_path / "packs.unfinished").glob("*.unfinished")), "no packs were half written"
    tokenizer = CountingTokenizer()
    write(documents, tmp_path / "packs", tokenizer)
    assert tokenizer.calls == 0
    assert documents_of(tmp_path / "packs") == documents_of(tmp_path / "at_once")
    assert not (tmp_path / "packs.unfinished").exists()


def test_another_length_after_a_refusal_reuses_the_tokens(documents, tmp_path):
    with pytest.raises(PlanningError):
        write(documents, tmp_path / "packs", max_length=8)
    tokenizer = CountingTokenizer()
    write(documents, tmp_path / "packs", tokenizer, max_length=8, on_overlong="split")
    assert tokenizer.calls == 0


def test_unfinished_work_on_other_documents_is_never_mixed_in(documents, tmp_path):
    killed_run(documents, tmp_path / "packs", kill_at=4)
    other = documents.select(range(40))
    with pytest.raises(ColumnError, match="--force to start over"):
        write(other, tmp_path / "packs")
    write(other, tmp_path / "packs", force=True)
    assert len(documents_of(tmp_path / "packs")) == 40


def test_packs_are_replaced_only_when_forced(documents, tmp_path):
    write(documents, tmp_path / "packs")
    before = documents_of(tmp_path / "packs")
    with pytest.raises(ColumnError, match="Write --force to replace them"):
        write(documents.select(range(5)), tmp_path / "packs")
    assert documents_of(tmp_path / "packs") == before
    write(documents.select(range(5)), tmp_path / "packs", force=True)
    assert len(documents_of(tmp_path / "packs")) == 5


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", ["packs", "packs.unfinished"])
def test_a_folder_with_other_files_is_never_touched(documents, tmp_path, force, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("years of work")
    with pytest.raises(ColumnError, match="--output FOLDER"):
        write(documents, tmp_path / "packs", force=force)
    assert (tmp_path / name / "thesis.tex").read_text() == "years of work"


def test_data_with_tokens_needs_no_tokenizer_and_keeps_its_other_columns(tmp_path):
    rows = {"input_ids": [[1, 2], [3, 4, 5]], "labels": [[-100, 2], [3, 4, 5]]}
    dataset = datasets.Dataset.from_dict(rows)
    pack_to_folder(dataset, tmp_path / "packs", max_length=8, strategy="sequential")
    found = datasets.load_from_disk(str(tmp_path / "packs"))
    assert found["input_ids"][:] == [rows["input_ids"]]
    assert found["labels"][:] == [rows["labels"]]
    # The first killed moment: the folder for unfinished work is there and holds nothing yet.
    (tmp_path / "again.unfinished").mkdir()
    pack_to_folder(dataset, tmp_path / "again", max_length=8)
    assert len(datasets.load_from_disk(str(tmp_path / "again"))) == 1


def test_options_that_drop_everything_write_nothing(documents, tmp_path):
    with pytest.raises(ColumnError, match="drop all of them"):
        write(documents, tmp_path / "packs", min_length=1000)
    assert not (tmp_path / "packs").exists()
