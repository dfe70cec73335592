"""The `hf-neat-packing` command: reads options, calls the package, and shows what it says.

The only module that prints. What a command needs is imported inside it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hf_neat_packing.errors import NeatPackingError
from hf_neat_packing.planning.policies import OnOverlong

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def commands() -> None:
    """Pack documents into rows for Hugging Face Transformers, exact for every document."""


DataOption = Annotated[
    str | None,
    typer.Option(
        help="JSONL, text, parquet or CSV file, folder, or data set id.",
        show_default="the standard library's functions",
    ),
]


@contextmanager
def _plain_failures() -> Iterator[None]:
    """Turn what a user can mend into one message; anything else is our fault and keeps its trace."""
    try:
        yield
    except NeatPackingError as error:
        Console(stderr=True).print("[bold red]Error:[/]", end=" ")
        Console(stderr=True, highlight=False, markup=False).print(str(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        Console(stderr=True).print("\nStopped.")
        raise typer.Exit(130) from None


def _quiet_libraries() -> None:
    """Leave warnings of errors only: the bars and notes of libraries would bury what is shown."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


@app.command()
def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Folder or id of a causal language model.", show_default="a small Llama"),
    ] = None,
    data: DataOption = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column with the text.", show_default="text")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the data.")] = "train",
    max_length: Annotated[int, typer.Option(help="Tokens of a pack.", min=1)] = 4096,
    max_documents: Annotated[int, typer.Option(help="Documents to take.", min=1)] = 50_000,
    on_overlong: Annotated[
        OnOverlong, typer.Option(help="What becomes of documents longer than a pack.")
    ] = "split",
    steps: Annotated[int, typer.Option(help="Optimizer steps, one pack each.", min=1)] = 40,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Highest learning rate.", show_default="3e-3, with --model 2e-5"),
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


def main() -> None:
    """Run the command."""
    app()
