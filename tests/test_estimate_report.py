"""`estimate` in Python and on the command line: the rows, the verdict, the exit status, modules that cannot be run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cpu_offload import CPUOffloadPrecision, CPUOffloadStrategy, estimate
from lightning_cpu_offload.__main__ import main
from lightning_cpu_offload.cli import first_batch
from lightning_cpu_offload.estimate import Estimate
from lightning_cpu_offload.estimate.choices import CONTEXT_BYTES, PROCESS_BYTES
from lightning_cpu_offload.estimate.hardware import hardware
from lightning_cpu_offload.estimate.subject import subject
from lightning_cpu_offload.estimate.ways import DEFAULT, STOCK
from lightning_cpu_offload.offload.sizes import parse_bytes
from tests.estimate_models import SAMPLES, Adversarial, Trained, gpt
from tests.recipes import Make, folder, make, ready

__all__ = ["folder", "make"]  # fixtures

RATES = {"flops": 35e12, "d2h": 24e9, "h2d": 24e9, "host": 60e9, "device": 570e9}
GIVEN = ["--tflops=35", "--pcie=24", "--host_rate=60", "--device_rate=570"]
GIB = 1 << 30


KNOWN: dict[str, Estimate] = {}


def of(name: str, **options: Any) -> Estimate:
    """The estimate of a sample; of equal questions only the first is computed."""
    key = repr((name, sorted(options.items())))
    if "strategy" in options or key not in KNOWN:
        KNOWN[key] = _of(name, **options)
    return KNOWN[key]


def _of(name: str, **options: Any) -> Estimate:
    with torch.device("meta"):
        module, batch = SAMPLES[name].module(), SAMPLES[name].batch()
    return estimate(module, batch, **{"rates": RATES, **options})


def row(result: Estimate, name: str) -> Any:
    return next(row for row in result.rows if row.name.startswith(name))


class TestRows:
    def test_every_choice_has_one(self) -> None:
        names = [row.name for row in of("gpt").rows]
        assert len(names) == len(set(names))
        starts = (
            "AdamW on the device",
            'gradients="device"',
            'gradients="host"',
            'update="delayed"',
            "device_fraction",
        )
        for start in starts:
            assert any(name.startswith(start) for name in names)
            assert any(name.startswith(start) and name.endswith("checkpointing") for name in names)

    def test_what_recomputes_already_is_not_offered_it(self) -> None:
        names = [row.name for row in of("masked language model, checkpointed").rows]
        assert not any("checkpointing" in name for name in names)

    def test_clipping_leaves_out_what_cannot_clip(self) -> None:
        assert any("early" in row.name for row in of("cnn").rows)
        assert not any("early" in row.name for row in of("cnn", gradient_clip_val=1.0).rows)

    def test_other_optimizers_than_adam_have_no_rows_for_what_is_adams(self) -> None:
        module = Unrunnable()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters())  # type: ignore[method-assign]
        names = [row.name for row in estimate(module, torch.zeros(2, 64), rates=RATES).rows]
        assert names == [STOCK.name, 'gradients="device"', 'update="delayed"', 'gradients="host"']

    def test_bytes(self) -> None:
        result = of("gpt", precision="bf16-true", accumulate_grad_batches=4)
        n = result.parameters
        assert n == sum(parameter.numel() for parameter in gpt().parameters())
        device, host = row(result, 'gradients="device"'), row(result, 'gradients="host"')
        assert device.host["masters"] == 4 * n
        assert device.host["optimizer state"] == 8 * n
        assert device.host["process"] == PROCESS_BYTES
        assert set(device.host) == {"process", "masters", "optimizer state", "ring"}
        assert set(row(result, 'update="delayed"').host) == {"process", "masters", "optimizer state", "planes"}
        assert host.host["gradients"] == 4 * n
        assert device.pinned_bytes == device.host["ring"]
        assert device.checkpoint_bytes == 12 * n
        assert device.device_bytes == device.device.reserved + CONTEXT_BYTES
        stock = row(result, "AdamW")
        assert stock.device.by_category["optimizer state"] == 8 * n
        assert stock.device.by_category["weights"] == pytest.approx(4 * n, rel=1e-2)  # in blocks of 512 bytes
        assert host.device.peak <= device.device.peak < stock.device.peak

    def test_moments_in_fewer_bytes(self) -> None:
        result = of("gpt", precision="bf16-true")
        n, wide = result.parameters, row(result, 'gradients="device"')
        for state_dtype, nbytes in {"bfloat16": 4, "float8": 2 + 1 / 32}.items():
            reduced = row(result, f'state_dtype="{state_dtype}"')
            ring = reduced.host["ring"]  # of buffers that hold whole blocks
            assert wide.host["ring"] <= ring < wide.host["ring"] + 4 * 512
            assert reduced.host == {**wide.host, "ring": ring, "optimizer state": math.ceil(nbytes * n)}
            assert reduced.device == wide.device
            assert reduced.checkpoint_bytes == wide.checkpoint_bytes  # FP32 on the disk
            ratio = reduced.step.busy["host"] / wide.step.busy["host"]
            assert ratio == pytest.approx((8 + 2 * nbytes + 4) / 28, rel=1e-6)

    def test_the_last_way_takes_the_least_of_both_memories(self) -> None:
        for result in (of("gpt"), of("low-rank adapters")):
            offloaded = [row for row in result.rows[1:] if "checkpointing" not in row.name]
            least = offloaded[-1]
            assert least.name == 'gradients="host", state_dtype="float8"'
            assert least.device.peak == min(row.device.peak for row in offloaded)
            on_host = row(result, 'gradients="host"')
            assert least.host["optimizer state"] == row(result, 'state_dtype="float8"').host["optimizer state"]
            assert least.host["gradients"] == on_host.host["gradients"]

    def test_a_share_of_the_device_is_of_whole_parameters(self) -> None:
        result = of("gpt", precision="bf16-true", device_fraction=0.4)
        sizes = [parameter.numel() for parameter in gpt().parameters()]
        left, resident = 0.4 * sum(sizes), 0
        for numel in sizes:  # in forward order, all that fits
            if numel <= left:
                left, resident = left - numel, resident + numel
        partial, n = row(result, "device_fraction=0.4"), result.parameters
        assert 0 < resident < 0.4 * n
        assert partial.device.by_category["optimizer state"] == 12 * resident
        assert partial.device.by_category["scratch"] == 2 * partial.host["ring"] / 4  # one chunk, in FP32
        assert partial.host["masters"] == 4 * (n - resident)
        assert partial.host["optimizer state"] == 8 * (n - resident)

    def test_frozen_parts_take_no_state(self) -> None:
        result = of("low-rank adapters")
        module = SAMPLES["low-rank adapters"].module()
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        every = sum(p.numel() for p in module.parameters())
        device = row(result, 'gradients="device"')
        assert result.parameters == trained < every / 10
        assert device.host["masters"] == 4 * trained
        assert device.checkpoint_bytes == 12 * trained + 4 * (every - trained)

    def test_times_come_from_the_given_rates(self) -> None:
        fast, slow = of("mixture of experts"), of("mixture of experts", rates={**RATES, "host": 1e9})
        assert row(slow, 'gradients="device"').step.seconds > 5 * row(fast, 'gradients="device"').step.seconds
        assert row(slow, "AdamW").step.seconds == row(fast, "AdamW").step.seconds
        assert slow.hardware.sources["host"] == "given"

    def test_precision_of_a_strategy(self) -> None:
        pure = CPUOffloadStrategy(precision_plugin=CPUOffloadPrecision("32-true"))
        n = of("mixture of experts").parameters
        weights = row(of("mixture of experts", strategy=pure), 'gradients="device"').device.by_category["weights"]
        assert weights == pytest.approx(4 * n, rel=1e-2)


class TestConfigured:
    """The row of what a strategy was given."""

    def of(self, **options: Any) -> Estimate:
        keywords = {name: options.pop(name) for name in ("vram", "gradient_clip_val") if name in options}
        return of("mixture of experts", precision="bf16-true", strategy=CPUOffloadStrategy(**options), **keywords)

    def test_it_is_the_default_row_where_nothing_was_given(self) -> None:
        assert self.of().configured == of("mixture of experts", strategy="cpu_offload").configured == DEFAULT.name
        assert of("mixture of experts").configured is None

    def test_one_option_is_the_row_of_that_option(self) -> None:
        for name in ('update="delayed"', 'gradients="host"', 'state_dtype="float8"', "device_fraction=0.25"):
            option, _, value = name.partition("=")
            result = self.of(**{option: json.loads(value)})
            assert result.configured == name
            assert len(result.rows) == len(self.of().rows)

    def test_options_together_have_a_row_of_their_own(self) -> None:
        result = self.of(update="early", nonfinite="raise", state_dtype="float8", device_fraction=0.5)
        own = result.rows[1]
        name = 'update="early", nonfinite="raise", device_fraction=0.5, state_dtype="float8"'
        assert own.name == result.configured == name
        n, on_device = result.parameters, own.device.by_category["optimizer state"] // 12
        assert 0.3 * n < on_device <= 0.5 * n
        assert own.host["masters"] == 4 * (n - on_device)
        assert own.host["optimizer state"] == math.ceil((2 + 1 / 32) * (n - on_device))
        assert own.host["ring"] == 4 * row(result, 'state_dtype="float8"').host["ring"]
        plain = next(row for row in result.rows if row.name == 'update="early", nonfinite="raise"')
        assert own.step.busy["host"] < 0.5 * plain.step.busy["host"]
        assert f"host, {name}: " in str(result)

    def test_device_memory_is_a_fraction(self) -> None:
        n = self.of().parameters
        result = self.of(device_memory=6 * n)
        assert result.configured == f"device_memory={6 * n}"
        assert result.rows[1].device == row(self.of(device_fraction=0.5), "device_fraction=0.5").device

    def test_gradients_auto_looks_at_the_device(self) -> None:
        assert self.of(gradients="auto").configured == DEFAULT.name
        assert self.of(gradients="auto", vram=1 << 40).configured == DEFAULT.name
        assert self.of(gradients="auto", vram=1 << 20).configured == 'gradients="host"'

    def test_the_verdict_says_whether_it_fits(self) -> None:
        result = self.of(update="delayed", vram=1 << 40)
        assert 'As configured, update="delayed": fits.' in str(result)
        assert 'As configured, update="delayed": does not fit, device 0.4 GiB' in str(replace(result, vram=1 << 20))

    def test_what_will_be_refused_is_said(self) -> None:
        result = self.of(update="early", nonfinite="raise", gradient_clip_val=1.0)
        assert any("will be refused" in note for note in result.notes)
        assert all("early" not in row.name for row in result.rows)


class TestVerdict:
    def test_the_fastest_that_fits_comes_first(self) -> None:
        result = replace(of("gpt"), vram=100 * GIB, ram=100 * GIB)
        assert result.fitting[0].step is not None
        assert result.fitting[0].step.seconds == min(row.step.seconds for row in result.rows if row.step)
        assert f"the fastest of them: {result.fitting[0].name}" in str(result)

    def test_what_is_lacking_is_named(self) -> None:
        result = replace(of("gpt"), vram=1 << 20, ram=1 << 20)
        assert result.fitting == []
        assert result.lacks(result.rows[1])[0].startswith("device 0.4 GiB of 0.0 GiB")
        assert result.lacks(result.rows[1])[1].startswith("host 1.0 GiB of 0.0 GiB")
        assert "Nothing fits." in str(result)
        assert result.largest == 0
        assert "No model of this shape fits, however small." in str(result)

    def test_the_largest_model_fits_as_computed(self) -> None:
        result = replace(of("gpt"), vram=2 * GIB, ram=8 * GIB)
        assert result.largest > result.parameters
        room = [
            min((2 * GIB - CONTEXT_BYTES) / r.device.reserved, (8 * GIB - PROCESS_BYTES) / max(1, r.host_bytes))
            for r in result.rows
        ]
        assert result.largest / result.parameters >= min(room)

    def test_json_holds_what_the_table_holds(self) -> None:
        result = replace(of("gpt"), vram=12 * GIB)
        data = json.loads(json.dumps(result.to_dict()))
        assert [entry["name"] for entry in data["rows"]] == [row.name for row in result.rows]
        assert data["fits"] is True
        for entry in data["rows"]:
            parts = [*entry["device_by_category"].values(), entry["device_allocator_slack"], entry["device_context"]]
            assert sum(parts) == entry["device_bytes"]
            assert sum(entry["host_by_category"].values()) == entry["host_bytes"]


class Unrunnable(Trained):
    """A step with an operation that needs data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        raise NotImplementedError("a kernel without a fake")


class TestModules:
    def test_a_step_that_cannot_run_is_estimated_by_shapes(self) -> None:
        result = estimate(Unrunnable(), torch.zeros(2, 64), rates=RATES, precision="bf16-true", vram=12 * GIB)
        assert "a kernel without a fake" in result.reason
        device = row(result, 'gradients="device"')
        assert device.by_shapes
        assert device.device.by_category == {"weights": 2 * 4096, "gradients": 2 * 4096}
        assert device.step is None
        assert "Unrunnable, forward: NotImplementedError" in str(result)
        assert "if activations fit too" in str(result)

    def test_a_step_that_returns_no_loss_has_a_reason(self) -> None:
        module = Unrunnable()
        module.training_step = lambda batch, batch_idx: None  # type: ignore[method-assign, assignment, return-value]
        result = estimate(module, torch.zeros(2, 64), rates=RATES)
        assert "training_step returned NoneType in place of a loss" in result.reason

    def test_nothing_to_train(self) -> None:
        module = Unrunnable().requires_grad_(False)
        with pytest.raises(ValueError, match="module=Unrunnable: has no parameter to train"):
            estimate(module, torch.zeros(2, 64), rates=RATES)

    def test_two_optimizers(self) -> None:
        module = Adversarial()
        found = subject(module)
        assert found.optimizers == 2
        assert found.numel == sum(parameter.numel() for parameter in module.parameters())
        assert set(found.group_of.values()) == {0, 1}
        assert found.fused

    @pytest.mark.parametrize(
        ("optimizer", "bytes_per_parameter"),
        [
            (lambda p: torch.optim.SGD(p, lr=0.1), 0),
            (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
            (lambda p: torch.optim.Adam(p), 8),
            (lambda p: torch.optim.AdamW(p, amsgrad=True), 12),
            (lambda p: torch.optim.RMSprop(p), 4),
        ],
    )
    def test_state_of_other_optimizers(self, optimizer: Any, bytes_per_parameter: int) -> None:
        module = Unrunnable()
        made = optimizer(module.parameters())
        module.configure_optimizers = lambda: made  # type: ignore[method-assign]
        found = subject(module)
        assert found.state_bytes == bytes_per_parameter * 4096
        assert not made.state
        assert made.param_groups[0]["params"][0] is module.layer.weight

    def test_optimizers_that_cannot_be_made_are_assumed(self) -> None:
        module = Unrunnable()
        module.configure_optimizers = lambda: 1 / 0  # type: ignore[method-assign, assignment]
        found = subject(module)
        assert "ZeroDivisionError" in found.note
        assert found.state_bytes == 8 * 4096


class TestArguments:
    def test_sizes(self) -> None:
        texts = {"12GiB": 12 * GIB, "32 GB": 32 * 10**9, "1.5g": 1_500_000_000, "7": 7, "8MiB": 8 << 20}
        assert {text: parse_bytes(text) for text in texts} == texts
        with pytest.raises(ValueError, match="size='much'"):
            parse_bytes("much")

    def test_unknown_rate(self) -> None:
        with pytest.raises(ValueError, match=r"rates=\['speed'\]"):
            of("cnn", rates={"speed": 1.0})

    def test_accumulate(self) -> None:
        with pytest.raises(ValueError, match="accumulate_grad_batches=0"):
            of("cnn", accumulate_grad_batches=0)

    @pytest.mark.parametrize("fraction", [-0.1, 7.0, math.nan])
    def test_device_fraction(self, fraction: float) -> None:
        with pytest.raises(ValueError, match=r"device_fraction=.*: must be from 0 to 1"):
            of("cnn", device_fraction=fraction)

    def test_host_rate_is_measured(self) -> None:
        measured = hardware({name: rate for name, rate in RATES.items() if name != "host"})
        assert measured.sources["host"] == "measured"
        assert 1e8 < measured.rates.host < 1e12

    def test_no_batch(self) -> None:
        with pytest.raises(ValueError, match="no training batch could be taken"):
            first_batch(Unrunnable(), None)


def test_the_text_data_gives_a_batch_of_the_shapes_of_its_real_ones(make: Make) -> None:
    data = make(batch_size=3)
    real = next(iter(ready(data).train_dataloader()))
    for example, tensor in zip(first_batch(None, make(batch_size=3)), real, strict=True):
        assert (example.shape, example.dtype) == (tensor.shape, tensor.dtype)


class TestCommandLine:
    def test_a_small_config_fits(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["estimate", "--config", "configs/gpt_small.yaml", "--vram=8GiB", "--ram=16GiB", "--json", *GIVEN])
        assert ended.value.code == 0
        data = json.loads(capsys.readouterr().out)
        assert data["accumulate"] == 4
        assert data["rates"] == RATES
        assert data["fits"]
        # Clipping is on in the config.
        assert not any("early" in row["name"] for row in data["rows"])
        assert data["configured"] == DEFAULT.name

    def test_what_does_not_fit_is_said_with_status_1(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["estimate", "--config", "configs/gpt_small.yaml", "--vram=100MiB", "--ram=512MiB", *GIVEN]
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 1
        assert "Nothing fits." in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("--vram=lots", "size='lots'"),
            ("--vram=12", "vram='12': 12 bytes, so a unit is missing. Write it as in --vram 12GiB."),
            ("--host_rate=0", "host_rate=0.0: must be more than 0. Give it in GB/s, or leave it out."),
            ("--device_fraction=7", "device_fraction=7.0: must be from 0 to 1."),
        ],
    )
    def test_what_cannot_be_meant(
        self, option: str, message: str, root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["estimate", "--config", "configs/gpt_small.yaml", *GIVEN, option])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err

    def test_a_constructor_that_reads_values(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["estimate", "--model=tests.estimate_models.ReadsValues", *GIVEN])
        assert ended.value.code == 0
        assert "ReadsValues: 4,160 trained parameters, 1 micro-batch per step" in capsys.readouterr().out

    @pytest.mark.slow
    @pytest.mark.skipif(sys.platform != "linux", reason="RSS means something else elsewhere")
    def test_a_model_of_8_billion_parameters_takes_less_than_2_gb(self, root: Path) -> None:
        large = ["--model.num_layers=38", "--model.d_model=4096", "--model.num_heads=32"]
        words = ["estimate", "--config", "configs/gpt_458m.yaml", *large]
        code = (
            "import resource, sys\n"
            "from lightning_cpu_offload.cli import run_estimate\n"
            f"run_estimate({words[1:]!r})\n"
            "print('peak', 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        command = [sys.executable, "-c", code]
        printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=300).stdout
        assert "GPT: 7,9" in printed
        assert int(printed.split("peak")[-1]) < 2e9

    @pytest.mark.slow
    def test_the_model_of_the_story_and_one_that_is_too_large(self, run_module: Callable[..., Any]) -> None:
        words = ["estimate", "--config", "configs/gpt_458m.yaml", "--vram=12GiB", "--ram=32GiB", *GIVEN]
        fits = run_module(*words)
        assert fits.returncode == 0, fits.stderr
        assert "457,475,328 trained parameters, 16 micro-batches" in fits.stdout
        large = ["--model.num_layers=12", "--model.d_model=7168", "--model.num_heads=56"]  # 7.9B parameters
        too_large = run_module(*words, *large)
        assert too_large.returncode == 1, too_large.stderr
        assert "Nothing fits." in too_large.stdout
        assert "host" in too_large.stdout.split("Nothing fits.")[1]
