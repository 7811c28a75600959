"""`python -m lightning_cpu_offload`, and the console script `lightning-cpu-offload`."""

from __future__ import annotations

import sys


def main(args: list[str] | None = None) -> None:
    """Run the command line; see `lightning_cpu_offload.cli`. `doctor` needs no package but those of the training."""
    words = sys.argv[1:] if args is None else args
    if words[:1] == ["doctor"]:
        from lightning_cpu_offload.estimate import doctor

        sys.exit(doctor.main(words[1:]))
    try:
        from lightning_cpu_offload import cli
    except ModuleNotFoundError as error:
        sys.exit(f"{error}. The command line needs more packages: pip install 'lightning-cpu-offload[recipes]'.")
    cli.main(args)


if __name__ == "__main__":
    main()
