"""What the results of the zoo say: which of them are wrong, and a table for people."""

from typing import Any

# Over a few dozen steps, rounding in another place may lead elsewhere: a run is suspect only if it ends further from
# stock FP32 than three times what stock bf16-mixed does, and than a tenth.
FURTHER = 3.0
AT_LEAST = 0.1

# The same arithmetic but for the order of operations within one AdamW step.
SAME = 1e-2


def problems(result: dict[str, Any]) -> list[str]:
    """What must not be: a library that trains under stock bf16-mixed and does not here, or is not handed back whole."""
    ways = result["ways"]
    wrong = []
    if not ways["fp32"]["error"]:
        wrong += _module_problems("cpu_offload fp32", ways["cpu_offload fp32"])
        wrong += _apart("cpu_offload fp32", ways, SAME)
    if not ways["bf16-mixed"]["error"]:
        wrong += _module_problems("cpu_offload", ways["cpu_offload"])
        wrong += _apart("cpu_offload", ways, max(AT_LEAST, FURTHER * _difference("bf16-mixed", ways)))
    return wrong


def _module_problems(way: str, outcome: dict[str, Any]) -> list[str]:
    if outcome["error"]:
        return [f"{way}: {outcome['error']}"]
    wrong = [f"{way}: {changed}" for changed in outcome["changed_dtypes"]]
    if not outcome["moved"]:
        wrong.append(f"{way}: no weight moved")
    if outcome["use_error"]:
        wrong.append(f"{way}: forward afterwards: {outcome['use_error']}")
    elif not outcome["output_finite"] or outcome["output_dtype"] == "torch.bfloat16":
        wrong.append(f"{way}: forward afterwards gave {outcome['output_dtype']}, finite: {outcome['output_finite']}")
    return wrong


def _apart(way: str, ways: dict[str, dict[str, Any]], allowed: float) -> list[str]:
    difference = _difference(way, ways)
    return [f"{way}: final loss is {difference:.1%} from stock FP32's"] if not difference <= allowed else []


def _difference(way: str, ways: dict[str, dict[str, Any]]) -> float:
    """Between final losses, as a part of the larger of the first and the final loss of stock FP32."""
    reference, outcome = ways["fp32"], ways[way]
    if outcome["error"] or reference["error"]:
        return 0.0
    scale = max(abs(reference["first_loss"]), abs(reference["final_loss"]))
    return abs(outcome["final_loss"] - reference["final_loss"]) / scale


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    errors: list[str] = []
    lines = [_row(name, result, errors) for name, result in results.items()]
    versions = sorted({f"{name} {version}" for result in results.values() for name, version in _versions(result)})
    return "\n".join(
        [
            "# Results",
            "",
            f"Written by `make zoo`; the CPU is the device. {', '.join(versions)}. [How to read them](README.md).",
            "",
            "| library | Lightning | steps | first loss | FP32 | bf16-mixed | bf16-true | **cpu_offload** "
            "| cpu_offload FP32 | weights apart: bf16-mixed | cpu_offload | cpu_offload FP32 | handed back |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
            *lines,
            "",
            "## Errors",
            "",
            *(f"{number}. {error}" for number, error in enumerate(errors, 1)),
            "",
            "## Handed back otherwise than before",
            "",
            *(f"* {name}, {change}" for name, result in results.items() for change in _changes(result)),
            "",
        ]
    )


def _row(name: str, result: dict[str, Any], errors: list[str]) -> str:
    ways = result["ways"]
    losses = [_loss(f"{name}, {way}", ways[way], errors) for way in ways]
    apart = [_number(ways[way].get("weights_apart")) for way in ("bf16-mixed", "cpu_offload", "cpu_offload fp32")]
    whole = "FP32, usable" if not _module_problems("", ways["cpu_offload"]) else "no"
    first = ways["fp32"]
    cells = [
        result["requires"][0],
        f"`{result['namespace']}`",
        str(first.get("steps", "")),
        _number(first.get("first_loss")),
    ]
    return "| " + " | ".join([*cells, *losses, *apart, whole]) + " |"


def _changes(result: dict[str, Any]) -> list[str]:
    """Modules that any way, stock ones too, left in another dtype or not usable: the first and the last of it."""
    found = [_module_problems(way, outcome) for way, outcome in result["ways"].items() if not outcome["error"]]
    return ["; ".join(dict.fromkeys((wrong[0], wrong[-1]))) for wrong in found if wrong]


def _loss(run: str, outcome: dict[str, Any], errors: list[str]) -> str:
    if not outcome["error"]:
        return _number(outcome["final_loss"])
    errors.append(f"{run}: `{outcome['error']}`")
    return f"error {len(errors)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _versions(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [item for outcome in result["ways"].values() for item in outcome.get("versions", {}).items()]
