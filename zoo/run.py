"""Train other people's LightningModules, unchanged, with stock Lightning and with `cpu_offload`, side by side.

    python zoo/run.py                     # every program, then results.md and results.json
    python zoo/run.py chemprop darts      # only these; the results of the others stay

Each file in `programs/` is one library. Each gets an environment of its own below `.venvs/`, made once, and one
process for each way to train. Exits with 1 if a library that trains under stock `bf16-mixed` does not train here.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from zoo.report import problems, table

ZOO = Path(__file__).parent
ROOT = ZOO.parent
RESULTS = ZOO / "results.json"
WAYS = ("fp32", "bf16-mixed", "bf16-true", "cpu_offload", "cpu_offload fp32")
LIMIT_S = 300


def main() -> int:
    """Run the chosen programs, write the results, and say what is wrong with them."""
    parser = argparse.ArgumentParser(description="Other people's LightningModules, stock and offloaded.")
    parser.add_argument("programs", nargs="*", help="names of files in zoo/programs; none: all")
    parser.add_argument("--install-only", action="store_true", help="make the environments and stop")
    arguments = parser.parse_args()
    known = sorted(path.stem for path in (ZOO / "programs").glob("*.py"))
    chosen = arguments.programs or known
    if unknown := set(chosen) - set(known):
        parser.error(f"programs={sorted(unknown)}: choose among {', '.join(known)}.")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen:
        python = environment(name)
        if arguments.install_only:
            continue
        results[name] = {**header(name), "ways": {way: run(python, name, way) for way in WAYS}}
        compare_weights(name, results[name]["ways"])
        write({name: results[name] for name in known if name in results})
    if arguments.install_only:
        return 0
    wrong = [f"{name}: {problem}" for name in chosen if name in results for problem in problems(results[name])]
    print("\n".join(wrong) or f"{len(chosen)} libraries: nothing wrong")
    return int(bool(wrong))


def header(name: str) -> dict[str, Any]:
    """The constants of a program, read without importing the library."""
    tree = ast.parse((ZOO / "programs" / f"{name}.py").read_text())
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("REQUIREMENTS", "NAMESPACE")
    }
    about = ast.get_docstring(tree) or ""
    return {"about": about.splitlines()[0], "namespace": constants["NAMESPACE"], "requires": constants["REQUIREMENTS"]}


def environment(name: str) -> Path:
    """The Python of the program's environment, made if it is not there or its requirements changed."""
    folder = ZOO / ".venvs" / name
    python = folder / "bin" / "python"
    wanted = "\n".join([*header(name)["requires"], (ZOO / "constraints.txt").read_text()])
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"{name}: installing", flush=True)
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "-q", "-c", str(ZOO / "constraints.txt")]
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, *header(name)["requires"], "numba", "psutil"], check=True)
        # Without its dependencies: it is to run on the Lightning that the library brought.
        subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
        stamp.write_text(wanted)
    return python


def run(python: Path, name: str, way: str) -> dict[str, Any]:
    """Train in a process of its own; what went wrong there is part of the result."""
    result = weights_file(name, way).with_suffix(".json")
    result.unlink(missing_ok=True)
    result.with_suffix(".pt").unlink(missing_ok=True)
    log = result.with_suffix(".log")
    command = [str(python), "-m", "zoo.measure", name, way, str(result)]
    with log.open("w") as output:
        try:
            subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S, env=surroundings()
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {LIMIT_S} s"}
    if not result.exists():
        return {"error": f"died: {(log.read_text().strip().splitlines() or [''])[-1]}"}
    outcome = {key: value for key, value in json.loads(result.read_text()).items() if key != "losses"}
    print(f"{name}, {way}: {outcome['error'] or outcome['final_loss']}", flush=True)
    return outcome


def surroundings() -> dict[str, str]:
    """Environment variables of a run: sums in one order, no accelerator, nothing fetched."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def weights_file(name: str, way: str) -> Path:
    """Where a run leaves its weights."""
    return ZOO / ".venvs" / name / f"{way.replace(' ', '-')}.pt"


def compare_weights(name: str, ways: dict[str, dict[str, Any]]) -> None:
    """Add to each result how far its weights are from those of stock FP32, as a part of the largest weight."""
    if ways["fp32"]["error"]:
        return
    reference = torch.load(weights_file(name, "fp32"), weights_only=True)
    floats = [key for key, value in reference.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    largest = max(float(reference[key].abs().max()) for key in floats if reference[key].numel())
    for way, result in ways.items():
        if not result["error"]:
            weights = torch.load(weights_file(name, way), weights_only=True)
            apart = max(float((weights[key] - reference[key]).abs().max()) for key in floats if reference[key].numel())
            result["weights_apart"] = apart / largest


def write(results: dict[str, Any]) -> None:
    """Write results.json, and results.md for people."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    (ZOO / "results.md").write_text(table(results))


if __name__ == "__main__":
    sys.exit(main())
