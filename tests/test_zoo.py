"""The committed results of the zoo: complete, nothing wrong in them, and the checker of that can fail."""

import copy
import json
from typing import Any

import pytest

from tests.conftest import ROOT
from zoo.report import problems, table

RESULTS = json.loads((ROOT / "zoo" / "results.json").read_text())
PROGRAMS = sorted(path.stem for path in (ROOT / "zoo" / "programs").glob("*.py"))


def test_every_program_has_results() -> None:
    assert list(RESULTS) == PROGRAMS
    assert len(PROGRAMS) >= 10
    assert {result["namespace"] for result in RESULTS.values()} == {"lightning.pytorch", "pytorch_lightning"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_wrong(name: str) -> None:
    assert problems(RESULTS[name]) == []


def test_table_is_that_of_the_results() -> None:
    assert (ROOT / "zoo" / "results.md").read_text() == table(RESULTS)


@pytest.mark.parametrize("way", ["cpu_offload", "cpu_offload fp32"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"error": "RuntimeError: no"}, "RuntimeError: no"),
        ({"changed_dtypes": ["weight: torch.float32 became torch.bfloat16"]}, "weight: torch.float32 became"),
        ({"moved": 0}, "no weight moved"),
        ({"use_error": "ValueError: no"}, "forward afterwards: ValueError: no"),
        ({"output_dtype": "torch.bfloat16"}, "forward afterwards gave torch.bfloat16"),
        ({"output_finite": False}, "finite: False"),
        ({"final_loss": 2.0}, "from stock FP32's"),
        ({"final_loss": float("nan")}, "from stock FP32's"),
    ],
)
def test_what_is_wrong_is_found(way: str, change: dict[str, Any], problem: str) -> None:
    result = copy.deepcopy(RESULTS["chemprop"])
    result["ways"][way] |= change
    assert len(problems(result)) == 1
    assert problem in problems(result)[0]
