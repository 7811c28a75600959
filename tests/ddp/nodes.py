"""Two machines in one: a network namespace for each, a cable between them, and torchrun in both."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.ddp.driver import prepare, results, run_all

NODES = 2

Ended = tuple[list[Any], list[int], list[str]]

_CABLE = """
mount -t tmpfs none /run && mkdir /run/netns || exit 1
for node in 0 1; do ip netns add node$node || exit 1; done
ip link add between netns node0 type veth peer name between netns node1 || exit 1
for node in 0 1; do
    ip -n node$node addr add 10.77.0.$((node + 1))/24 dev between || exit 1
    ip -n node$node link set lo up && ip -n node$node link set between up || exit 1
done
"""

_START = """
export GLOO_SOCKET_IFNAME=between
for node in 0 1; do
    nsenter --net=/run/netns/node$node "$0" -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --node_rank=$node \\
        --master_addr=10.77.0.1 --master_port=29500 "$@" > "$LOGS.node$node" 2>&1 &
    jobs[node]=$!
done
for job in "${jobs[@]}"; do wait $job; echo "status $?"; done
"""


@cache
def refusal() -> str:
    """Why this machine lets us have no network namespaces; empty if it does."""
    try:
        tried = subprocess.run(["unshare", "-rnm", "bash", "-c", _CABLE], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return tried.stderr.strip() or ("" if tried.returncode == 0 else f"exit status {tried.returncode}")


def launch_nodes(folder: Path, program: str, given: Any, timeout: float = 200) -> Ended:
    """Run a function of `tests.ddp.programs` on one rank of each machine.

    Returns:
        What it returned on each rank, or None; the exit status of each torchrun; what each of them printed.
    """
    words = prepare(folder, program, given, NODES)
    logs, log = folder / program, folder / f"{program}.log"
    script = f"LOGS={logs}\n{_CABLE}{_START}"
    run_all(["unshare", "-rnm", "bash", "-c", script, sys.executable, *words], log, timeout)
    statuses = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("status")]
    printed = [Path(f"{logs}.node{node}").read_text() for node in range(NODES)]
    return results(folder, program, NODES), statuses, printed
