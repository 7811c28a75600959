"""`python -m lightning_cpu_offload`, and the console script `lightning-cpu-offload`."""

from lightning_cpu_offload.cli import main

if __name__ == "__main__":
    main()
