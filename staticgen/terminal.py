"""What all commands say on standard error: messages, errors, bars. Standard output is for results."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import Progress

console = Console(stderr=True, highlight=False)


@contextmanager
def errors() -> Iterator[None]:
    """Errors as one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("\ncancelled")
        raise typer.Exit(130) from None
    except (typer.Exit, BrokenPipeError):  # typer ends quietly when nobody reads on
        raise
    except (ValueError, TypeError, RuntimeError, OSError, ArithmeticError, MemoryError, ImportError) as error:
        print_error(error)
        raise typer.Exit(1) from None


def print_error(error: BaseException) -> None:
    """An error in one line, in red."""
    text = " ".join(str(error).split()) or type(error).__name__
    console.print(f"error: {text}", style="red", markup=False, soft_wrap=True)


def bar() -> Progress:
    """A bar on standard error, if it would be seen and not stand between the results."""
    shown = console.is_terminal and not sys.stdout.isatty()
    return Progress(console=console, transient=True, disable=not shown, redirect_stdout=False)


def quiet_transformers() -> None:
    """Let transformers draw no bars and give no advice; the commands have their own."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # loading a GGUF file draws a bar that nothing else turns off
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    logging.disable_progress_bar()
