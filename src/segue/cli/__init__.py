"""The `segue` command: its entry point and its exit codes."""

from __future__ import annotations

import signal
import sys
import traceback

from segue.errors import ConfigError, SegueError, printable


def main() -> None:
    """Run the command; an error prints its three lines and exits with 1, Ctrl-C with 130."""
    try:
        from segue.cli import commands
        from segue.cli.terminal import show_error
    except ImportError as error:
        _refuse_missing(error)
        raise
    try:
        _refuse_unprintable(sys.argv[1:])
        commands.app(prog_name="segue")
    except SegueError as error:
        show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError):
            _refuse_missing(error)
        if isinstance(error, OSError) and error.errno is not None:
            show_error(_of_the_system(error))
            sys.exit(1)
        sys.stderr.write(printable(traceback.format_exc()))  # a mistake in Segue, which must not be hidden
        sys.exit(1)


def _refuse_missing(error: ImportError) -> None:
    """Name the package of the `lab` extra that is missing."""
    if error.name is not None and error.name.split(".")[0] in ("typer", "rich", "click", "scipy", "jinja2", "filelock"):
        sys.exit(f"The segue command needs {error.name}, which is not installed: pip install 'segue[lab]'")


def _refuse_unprintable(arguments: list[str]) -> None:
    """Refuse control characters in arguments (a file name that the shell expanded may have them): typer would print them."""
    for argument in arguments:
        shown = argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # other encodings are no attack
        if printable(shown) != shown:
            fault = f"an argument has characters that a terminal obeys: {argument}"
            raise ConfigError(fault, "Nobody types them; a file may have them in its name.", "rename that file.")


def _of_the_system(error: OSError) -> ConfigError:
    """Say what the system refuses: a file without permission, a full disk."""
    place = "a file or a connection" if error.filename is None else str(error.filename)
    found = f"The system answers: {error.strerror} ({type(error).__name__})."
    return ConfigError(f"{place} cannot be used.", found, "check the path, its permissions and the space on its disk.")
