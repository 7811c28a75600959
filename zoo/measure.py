"""Train one program once, in one way, and write what came of it: `python -m zoo.measure PROGRAM WAY RESULT.json`.

Runs inside the program's own environment. Beside `RESULT.json`, `RESULT.pt` receives the weights afterwards.
"""

import importlib
import json
import sys
import time
import traceback
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lightning_cpu_offload import precision

SEED = 7


def main(program_name: str, way: str, result_path: str) -> None:
    """Train `program_name` in the given way and write the result."""
    program = importlib.import_module(f"zoo.programs.{program_name}")
    pl = importlib.import_module(program.NAMESPACE)
    pl.seed_everything(SEED, verbose=False)
    precision.cpu_has_fast_bf16 = lambda: way == "cpu_offload"  # whatever CPU this is
    recorder = recorder_of(pl, getattr(program, "LOSS", None))
    result: dict[str, Any] = {"error": None}
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            use = program.train({**options(way), "callbacks": [recorder]})
            result |= afterwards(recorder, use)
            torch.save(tensors_of(recorder.module), Path(result_path).with_suffix(".pt"))
        except Exception as error:
            traceback.print_exc()
            result["error"] = in_short(error)
    result |= recorder.losses_in_short()
    result["seconds"] = round(time.monotonic() - began, 1)
    result["warnings"] = sorted({str(w.message).splitlines()[0] for w in caught if "cpu_offload" in str(w.message)})
    result["versions"] = {name: version(name) for name in ("torch", program.NAMESPACE.split(".")[0].replace("_", "-"))}
    Path(result_path).write_text(json.dumps(result))


def options(way: str) -> dict[str, Any]:
    """What the Trainer gets in each way, and what keeps the runs small and quiet."""
    chosen: dict[str, dict[str, Any]] = {
        "fp32": {"precision": "32-true"},
        "bf16-mixed": {"precision": "bf16-mixed"},
        "bf16-true": {"precision": "bf16-true"},
        "cpu_offload": {"strategy": "cpu_offload"},
        "cpu_offload fp32": {"strategy": "cpu_offload"},
    }
    return {
        **chosen[way],
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }


def recorder_of(pl: Any, metric: str | None) -> Any:
    """A callback that keeps every training loss, and what the module was before the strategy saw it.

    Args:
        pl: The Lightning namespace of the program.
        metric: Logged metric to take for the loss where the training step returns none.
    """

    class Recorder(pl.Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.module: torch.nn.Module | None = None
            self.before: dict[str, torch.Tensor] = {}

        def __deepcopy__(self, memo: Any) -> "Recorder":
            return self  # some libraries train copies of what they are given

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if self.module is None:
                self.module = pl_module
                self.before = {name: value.clone() for name, value in tensors_of(pl_module).items()}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_unused: Any) -> None:
            loss = trainer.callback_metrics[metric] if metric else outputs["loss"]
            self.losses.append(float(loss))

        def losses_in_short(self) -> dict[str, Any]:
            last = self.losses[-max(1, len(self.losses) // 4) :]
            return {
                "steps": len(self.losses),
                "first_loss": self.losses[0] if self.losses else None,
                "final_loss": sum(last) / len(last) if last else None,
                "losses": self.losses,
            }

    return Recorder()


def afterwards(recorder: Any, use: Any) -> dict[str, Any]:
    """Whether the module that came back is what it was, but trained: dtypes, device, and a forward pass."""
    after = tensors_of(recorder.module)
    before = {name: value for name, value in recorder.before.items() if name in after}
    other = [
        name for name, value in before.items() if (after[name].dtype, after[name].device) != (value.dtype, value.device)
    ]
    try:
        output = use()
        used = {
            "output_dtype": str(output.dtype),
            "output_finite": bool(torch.isfinite(output).all()),
            "use_error": None,
        }
    except Exception as error:
        traceback.print_exc()
        used = {"use_error": in_short(error)}
    return {
        **used,
        "changed_dtypes": [f"{name}: {before[name].dtype} became {after[name].dtype}" for name in other[:3]],
        "moved": sum(not torch.equal(after[name].to(value.dtype), value) for name, value in before.items()),
        "tensors": len(before),
    }


def in_short(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the state dict, less parameters whose shape is not known yet."""
    lazy = torch.nn.parameter.UninitializedTensorMixin
    return {
        name: value.detach().as_subclass(torch.Tensor)
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and not isinstance(value, lazy)
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
