"""``hf-strategies <command>``, also as ``python -m hf_strategies.cli <command>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_strategies.cli.inspect import inspect

COMMANDS = {"inspect": (inspect, "print rows of a dataset as the model will see them")}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; exits with 2 and a message where something is wrong with what was asked for."""
    listed = "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-strategies",
        usage="hf-strategies <command> [options]",
        description=f"commands:\n{listed}\n\nhf-strategies <command> --help lists the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The command's own options are none of this parser's business.
    command = parser.parse_args(arguments[:1]).command
    # A terminal that cannot show a character is no reason to stop.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        COMMANDS[command][0](arguments[1:])
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
