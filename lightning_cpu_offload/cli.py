"""LightningCLI for any LightningModule, with a report after `fit` of what was reached and where it lies."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from lightning_cpu_offload.callbacks import count_items
from lightning_cpu_offload.estimate import Estimate, estimate
from lightning_cpu_offload.namespaces import pl
from lightning_cpu_offload.offload.sizes import parse_bytes

if TYPE_CHECKING:
    from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
else:
    _cli = importlib.import_module(f"{pl.__name__}.cli")
    LightningArgumentParser, LightningCLI = _cli.LightningArgumentParser, _cli.LightningCLI

MODEL_HINT = (
    "model=None: must be a LightningModule class. "
    "Give --model package.module.Class, or --config with a file that names one, such as configs/gpt_small.yaml."
)

LEAST_MEMORY = 1 << 20
"""Bytes below which an amount of memory lacks its unit."""

RATE_OPTIONS = {
    "flops": ("tflops", "TFLOP/s", 1e12),
    "d2h": ("pcie", "GB/s", 1e9),
    "h2d": ("pcie", "GB/s", 1e9),
    "host": ("host_rate", "GB/s", 1e9),
    "device": ("device_rate", "GB/s", 1e9),
}
"""For each rate of a machine its option of `estimate`, and the unit that is given there."""


class RunRecorder(pl.Callback):
    """Keeps what is known only while a fit runs.

    Attributes:
        loss_before: `val/loss` before the first step, over all that validation reads; None unless the Trainer has
            `num_sanity_val_steps=-1` and the module logs it.
        validated_step: Optimizer step of the last validation; None before the first one.
        items: Tokens, or samples, of the training batches so far, on all devices.
        unit: What `items` counts, `"tokens"` or `"samples"`.
        seconds: Time spent in training so far, validation left out.
    """

    def __init__(self) -> None:
        self.loss_before: float | None = None
        self.validated_step: int | None = None
        self.items = 0
        self.unit = "samples"
        self.seconds = 0.0
        self._resumed = 0.0

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the loss before training, and gives it to the loggers as the first point of the curve."""
        loss = validation_loss(trainer)
        if loss is None or math.isfinite(trainer.num_sanity_val_steps):
            return
        self.loss_before = loss
        for logger in trainer.loggers:
            logger.log_metrics({"val/loss": loss}, step=0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock."""
        self._resumed = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch."""
        items, self.unit = count_items(batch)
        self.items += items * trainer.world_size

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.seconds += time.perf_counter() - self._resumed

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts the clock again."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.validated_step = trainer.global_step
            self._resumed = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        self.seconds += time.perf_counter() - self._resumed


class OffloadCLI(LightningCLI):
    """LightningCLI for any model and data, with subcommands `fit`, `validate`, `test` and `predict`.

    Args:
        args: Command line, as a list of words or a nested dict; None for `sys.argv`.
        run: Whether a subcommand is read and run. If not, model, data and Trainer are only built.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        self.recorder = RunRecorder()
        super().__init__(
            args=args,
            run=run,
            parser_class=_Parser,
            parser_kwargs={
                "prog": "lightning-cpu-offload",
                "description": "Trains with CPU offload. Two more commands need no training: "
                "`estimate --config FILE` says what will fit and how fast, `doctor` what this machine is.",
            },
            trainer_defaults={"callbacks": [self.recorder]},
        )

    def after_fit(self) -> None:
        """Prints the report, after a validation if none has seen the last step."""
        if self.trainer.enable_validation and self.recorder.validated_step != self.trainer.global_step:
            self.trainer.validate(self.model, datamodule=self.datamodule, verbose=False)
        if self.trainer.is_global_zero:
            print("\n".join(report(self.trainer, self.model, self.recorder)))


class EstimateCLI(LightningCLI):
    """Builds the model of a config without memory, and estimates how it trains under the config's Trainer settings.

    Args:
        args: Command line without the word `estimate`, as for `OffloadCLI`.
    """

    def __init__(self, args: ArgsType) -> None:
        super().__init__(
            args=args,
            run=False,
            save_config_callback=None,
            parser_class=_Parser,
            parser_kwargs={"prog": "lightning-cpu-offload estimate"},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds what only an estimate takes, and what a config written by a run holds besides."""
        parser.add_argument("--vram", type=str | None, default=None, help="memory of the device, such as 12GiB")
        parser.add_argument("--ram", type=str | None, default=None, help="memory of the host, such as 32GiB")
        parser.add_argument("--device_fraction", type=float, default=0.25, help="part to step on the device")
        parser.add_argument("--tflops", type=float | None, default=None, help="TFLOP/s of products on the device")
        parser.add_argument("--pcie", type=float | None, default=None, help="GB/s between device and host, each way")
        parser.add_argument("--host_rate", type=float | None, default=None, help="GB/s of the host step")
        parser.add_argument("--device_rate", type=float | None, default=None, help="GB/s of device memory")
        parser.add_argument("--json", action="store_true", help="print everything as JSON")
        for name in ("ckpt_path", "weights_only"):
            parser.add_argument(f"--{name}", default=None, help="not used")

    def instantiate_classes(self) -> None:
        """Builds model and data, the model's tensors without memory where its constructor bears that."""
        for name in ("callbacks", "logger"):
            self.config["trainer"][name] = None
        try:
            with torch.device("meta"):
                super().instantiate_classes()
        except Exception:  # a constructor that reads values; what else is wrong comes again
            super().instantiate_classes()

    def instantiate_trainer(self, **_unused: Any) -> Any:
        """None: nothing is run."""
        return None

    def estimate(self) -> Estimate:
        """The estimate for what was built."""
        settings, trainer = self.config, self.config_init["trainer"]
        precision = {"bf16-true": "bf16-true", "bf16-mixed": "bf16-mixed"}.get(str(trainer["precision"]))
        return estimate(
            self.model,
            first_batch(self.model, self.datamodule),
            strategy=trainer["strategy"],
            precision=precision,
            accumulate_grad_batches=trainer["accumulate_grad_batches"] or 1,
            gradient_clip_val=trainer["gradient_clip_val"],
            vram=self._memory("vram"),
            ram=self._memory("ram"),
            device_fraction=settings["device_fraction"],
            rates={name: self._rate(*option) for name, option in RATE_OPTIONS.items()},
        )

    def _memory(self, name: str) -> int | None:
        """Bytes that an option names; fewer than any machine has are a forgotten unit."""
        text = self.config[name]
        if text is None:
            return None
        nbytes = parse_bytes(text)
        if nbytes < LEAST_MEMORY:
            raise ValueError(f"{name}={text!r}: {nbytes} bytes, so a unit is missing. Write it as in --{name} 12GiB.")
        return nbytes

    def _rate(self, name: str, unit: str, factor: float) -> float | None:
        """What an option names, per second in FLOP or bytes."""
        value = self.config[name]
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value!r}: must be more than 0. Give it in {unit}, or leave it out.")
        return None if value is None else value * factor


def first_batch(model: Any, data: Any) -> Any:
    """A training batch: what `example_batch()` of the data or the model gives, or the first real one.

    Raises:
        ValueError: There is neither.
    """
    for source in (data, model):
        if hasattr(source, "example_batch"):
            return source.example_batch()
    if data is not None:
        data.prepare_data()
        data.setup("fit")
    source = model if data is None else data
    try:
        return next(iter(source.train_dataloader()))
    except Exception as error:
        raise ValueError(
            f"data={type(source).__name__}: no training batch could be taken from it ({error}). "
            "Give --data, or a method example_batch() that returns one batch."
        ) from error


def run_estimate(args: list[str]) -> int:
    """Print an estimate; returns the exit status: 1 where memory was given and nothing fits in it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # the first word is ours
        cli = EstimateCLI(args)
    try:
        result = cli.estimate()
    except ValueError as error:
        cli.parser.error(str(error))
    print(json.dumps(result.to_dict(), indent=2) if cli.config["json"] else result)
    return 0 if result.fitting else 1


def report(trainer: pl.Trainer, model: pl.LightningModule, recorder: RunRecorder) -> list[str]:
    """One line for each thing to know after a fit; what the run has not is left out."""
    rows: dict[str, str] = {}
    loss = validation_loss(trainer)
    if recorder.loss_before is not None:
        rows["validation loss before training"] = f"{recorder.loss_before:.4f}"
    if loss is not None:
        rows["validation loss after training"] = f"{loss:.4f}"
    if loss is not None and recorder.loss_before is not None:
        rows["ratio of after to before"] = f"{loss / recorder.loss_before:.4f}"
    if recorder.seconds:
        rows[f"{recorder.unit}/s"] = f"{recorder.items / recorder.seconds:.1f}"
    rows["peak RSS"] = f"{peak_rss()} bytes"
    if parameters := count_parameters(model):
        rows["peak RSS"] += f", {peak_rss() / parameters:.2f} bytes per parameter"
    rows.update(_places(trainer))
    return [f"{name}: {value}" for name, value in rows.items()]


def _places(trainer: pl.Trainer) -> dict[str, str]:
    rows = {}
    checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "")
    if checkpoint:
        rows["last checkpoint"] = checkpoint
    for logger in trainer.loggers:
        if isinstance(logger, pl.loggers.TensorBoardLogger):
            rows["TensorBoard log"] = logger.log_dir
            rows["to look at it"] = f"{_tensorboard()} --logdir {logger.root_dir}"
    return rows


def _tensorboard() -> str:
    """The command as it can be typed: by its path where its environment is not active."""
    return "tensorboard" if shutil.which("tensorboard") else str(Path(sys.executable).with_name("tensorboard"))


def validation_loss(trainer: pl.Trainer) -> float | None:
    """The last `val/loss`; None if the module logs none."""
    loss = trainer.callback_metrics.get("val/loss")
    return None if loss is None else float(loss)


def count_parameters(model: pl.LightningModule) -> int:
    """Elements of all parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def peak_rss() -> int:
    """The largest part of this process that was in memory at once so far, in bytes."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS alone
    return kibibytes if sys.platform == "darwin" else kibibytes * 1024


class _Parser(LightningArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Adds how to give a model when that is what is missing."""
        if "model" in message and "required" in message:
            message = f"{message}\n{MODEL_HINT}"
        super().error(message, ex)


def main(args: list[str] | None = None) -> None:
    """What `python -m lightning_cpu_offload` and the console script `lightning-cpu-offload` run."""
    # The console script would not find modules in the current folder, as `python -m` does.
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))
    words = sys.argv[1:] if args is None else args
    if words[:1] == ["estimate"]:
        sys.exit(run_estimate(words[1:]))
    OffloadCLI(args)
