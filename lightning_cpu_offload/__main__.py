"""`python -m lightning_cpu_offload`, and the console script `lightning-cpu-offload`."""

from __future__ import annotations

import sys


def main(args: list[str] | None = None) -> None:
    """Run the command line; see `lightning_cpu_offload.cli`."""
    try:
        from lightning_cpu_offload import cli
    except ModuleNotFoundError as error:
        sys.exit(f"{error}. The command line needs more packages: pip install 'lightning-cpu-offload[recipes]'.")
    cli.main(args)


if __name__ == "__main__":
    main()
