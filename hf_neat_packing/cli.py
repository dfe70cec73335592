"""The `hf-neat-packing` command: reads options, calls the package, and shows what it says.

The only module that prints. What a command needs is imported inside it.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hf_neat_packing.audit.commands import audit_command, card_command
from hf_neat_packing.errors import NeatPackingError
from hf_neat_packing.planning import OnOverlong, Strategy, TruncateSide

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def commands() -> None:
    """Pack documents into rows for Hugging Face Transformers, exact for every document."""


MaxLength = Annotated[int, typer.Option(help="Tokens of a pack.", min=1)]
TextColumn = Annotated[str | None, typer.Option(help="Column with the text.", show_default="text")]
Split = Annotated[str, typer.Option(help="Split of the data.")]
Overlong = Annotated[OnOverlong, typer.Option(help="What becomes of documents longer than a pack.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder, tokenizer.json or model id; for text.")
]
How = Annotated[Strategy, typer.Option(help="How documents are distributed.")]
Side = Annotated[TruncateSide, typer.Option(help="Side that 'truncate' cuts.")]
MinLength = Annotated[int, typer.Option(help="Drop documents with fewer tokens.", min=0)]
Seed = Annotated[int, typer.Option(help="Of the order.", min=0)]


@contextmanager
def _plain_failures(stopped: str = "Stopped.") -> Iterator[None]:
    """Turn what a user can mend into one message; anything else is our fault and keeps its trace."""
    try:
        yield
    except NeatPackingError as error:
        message = Text.assemble(("Error: ", "bold red"), _as_options(str(error)))
        Console(stderr=True, highlight=False).print(message)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        Console(stderr=True).print(f"\n{stopped}")
        raise typer.Exit(130) from None


def _as_options(message: str) -> str:
    """Write arguments that a message names as options of the commands: on_overlong="drop", --on-overlong drop."""
    argument = r'\b(on_overlong|truncate_side|strategy)="(\w+)"'
    return re.sub(argument, lambda found: f"--{found[1].replace('_', '-')} {found[2]}", message)


def _quiet_libraries(*, bars: bool = False) -> None:
    """Keep the notes of libraries out of what is shown; what fails raises, and is shown."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with suppress(ImportError):
        import datasets

        # It logs an error and raises it, and the second is enough.
        datasets.logging.set_verbosity(logging.CRITICAL)
        (datasets.enable_progress_bars if bars else datasets.disable_progress_bars)()


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Folder or id of a causal language model.", show_default="a small Llama"),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="JSONL, text, parquet or CSV file, folder, or data set id.",
            show_default="the standard library",
        ),
    ] = None,
    text_column: TextColumn = None,
    split: Split = "train",
    max_length: MaxLength = 4096,
    max_documents: Annotated[int, typer.Option(help="Documents to take.", min=1)] = 50_000,
    on_overlong: Overlong = "split",
    steps: Annotated[int, typer.Option(help="Optimizer steps, one pack each.", min=1)] = 40,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Highest rate.", show_default="3e-3, with --model 2e-5"),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")] = Path(
        "hf-neat-packing-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of weights, plan and order.", min=0)] = 0,
) -> None:
    """Pack real documents, train on them, time and check it: two minutes, no download."""
    with _plain_failures():
        from hf_neat_packing.demo.pictures import picture_of
        from hf_neat_packing.demo.run import run_demo

        _quiet_libraries()
        console = Console(highlight=False)
        for event in run_demo(
            output,
            model=model,
            data=data,
            column=text_column,
            split=split,
            max_length=max_length,
            max_documents=max_documents,
            on_overlong=on_overlong,
            steps=steps,
            learning_rate=learning_rate,
            seed=seed,
        ):
            console.print(picture_of(event))
            sys.stdout.flush()


@app.command()
def plan(
    source: Annotated[
        str,
        typer.Argument(
            help="Lengths (.npy, .json list, or .txt with one a line), or documents as for pack."
        ),
    ],
    max_length: MaxLength,
    tokenizer: Tokenizer = None,
    text_column: TextColumn = None,
    split: Split = "train",
    strategy: How = "best_fit",
    on_overlong: Overlong = "error",
    truncate_side: Side = "right",
    min_length: MinLength = 0,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw packs and the mask of one: a .png, .svg or .pdf file.")
    ] = None,
) -> None:
    """Show how full packs of these documents would be; writes nothing but a picture that is asked for."""
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise typer.BadParameter(
            f"{picture} ends in none of .png, .svg and .pdf.", param_hint="--picture"
        )
    with _plain_failures():
        from rich.console import Console

        from hf_neat_packing.picture import picture_text, save_picture
        from hf_neat_packing.planning import plan_packing
        from hf_neat_packing.sources import document_lengths

        _quiet_libraries()
        lengths = document_lengths(source, tokenizer=tokenizer, column=text_column, split=split)
        planned = plan_packing(
            lengths,
            max_length,
            strategy=strategy,
            on_overlong=on_overlong,
            truncate_side=truncate_side,
            min_length=min_length,
            seed=seed,
        )
        report = planned.report
        if as_json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            print(f"{report}\n\nlengths\n{report.histogram_text(40)}\n")
            Console().print(picture_text(planned))
        if picture is not None:
            drawn = save_picture(planned, picture)
            if not as_json:
                print(f"\npicture  {drawn}")


@app.command()
def pack(
    data: Annotated[
        str, typer.Argument(help="JSONL, text, parquet or CSV file, folder, or data set id.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the packs.")],
    max_length: MaxLength,
    tokenizer: Tokenizer = None,
    text_column: TextColumn = None,
    split: Split = "train",
    strategy: How = "best_fit",
    on_overlong: Overlong = "error",
    truncate_side: Side = "right",
    min_length: MinLength = 0,
    seed: Seed = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace packs that are there.")] = False,
) -> None:
    """Write packs into a folder for `datasets.load_from_disk`; run again to go on where it stopped."""
    with _plain_failures("Stopped. Run the same command to go on from here."):
        from hf_neat_packing.packed_folder import check_output, pack_to_folder
        from hf_neat_packing.sources import load_documents, load_tokenizer
        from hf_neat_packing.sources import text_column as column_with_text

        check_output(output, force=force)
        _quiet_libraries(bars=True)
        documents = load_documents(data, split=split)
        column = column_with_text(documents, text_column)
        report = pack_to_folder(
            documents,
            output,
            tokenizer=None if column is None else load_tokenizer(tokenizer),
            column=column,
            force=force,
            max_length=max_length,
            strategy=strategy,
            on_overlong=on_overlong,
            truncate_side=truncate_side,
            min_length=min_length,
            seed=seed,
        )
        print(f"\n{report}\n\nWritten to {output}")


app.command("audit")(audit_command)
app.command("card")(card_command)


def main() -> None:
    """Run the command."""
    app()
