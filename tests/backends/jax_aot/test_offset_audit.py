"""The offset audit: what the GPU runtime would copy against what the program computes, on bad and good compilers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jaxlib
import pytest

from memopt.errors import MemoptError
from memopt_jax import aot, offset_audit

PROGRAMS = Path(__file__).parent / "programs"
LAYER_BYTES = 2048 * 1024 * 2


def program(name: str) -> str:
    return (PROGRAMS / f"{name}.hlo").read_text()


def test_jaxlib_0_10_2_reads_offloaded_residuals_in_forward_order() -> None:
    result = offset_audit.audit(program("h100_offload_jaxlib_0.10.2"))
    (bad,) = result.of("wrong")
    assert result.verdict == "wrong"
    assert bad.direction == "to_device"
    assert bad.recorded == (0, LAYER_BYTES)
    assert bad.computed == (11 * LAYER_BYTES, -LAYER_BYTES), "backward reads the last layer first"
    assert result.of("unknown") == ()


def test_double_buffering_writes_to_wrong_offsets_too() -> None:
    result = offset_audit.audit(program("h100_double_buffered_jaxlib_0.10.2"))
    assert {finding.direction for finding in result.of("wrong")} == {"to_host", "to_device"}


@pytest.mark.parametrize("name", ["h100_offload_jaxlib_0.12.0.1", "h100_pipelined_jaxlib_0.12.0.1"])
def test_jaxlib_0_12_records_what_the_program_computes(name: str) -> None:
    result = offset_audit.audit(program(name))
    assert result.verdict == "right"
    assert {"to_host", "to_device"} <= {finding.direction for finding in result.findings}


def test_a_single_wrong_stride_is_found() -> None:
    text = program("h100_offload_jaxlib_0.12.0.1")
    stride = f'"byte_offset":"{11 * LAYER_BYTES}","byte_stride":"-{LAYER_BYTES}"'
    assert stride in text
    assert offset_audit.audit(text.replace(stride, stride.replace("-", ""))).verdict == "wrong"


def test_an_offset_that_is_right_in_the_first_iterations_only_is_wrong() -> None:
    # The index is clamped at the third layer: iterations 0 to 2 agree with the record, the later ones do not.
    text = program("h100_offload_jaxlib_0.12.0.1")
    result = offset_audit.audit(text)
    assert result.verdict == "right"
    clamped = _CLAMPED.replace("BOUND", "2")
    assert offset_audit.audit(clamped).verdict == "wrong"
    assert offset_audit.audit(_CLAMPED.replace("BOUND", "11")).verdict == "right"


def test_an_index_that_depends_on_data_is_unknown_not_right() -> None:
    assert offset_audit.audit(_CLAMPED.replace("BOUND", "11").replace("%moved)", "%data)")).verdict == "unknown"


def test_programs_without_records_are_worked_around_only_where_the_pass_was_switched_off() -> None:
    text = program("h100_not_recorded_jaxlib_0.10.2")
    assert offset_audit.audit(text, compiler_options=offset_audit.workaround()).verdict == "worked_around"
    assert offset_audit.audit(text).verdict == "not_applicable"
    assert offset_audit.audit(program("v5e_offload_libtpu_0.0.52"), platform="tpu").verdict == "not_applicable"


def test_the_workaround_keeps_other_disabled_passes() -> None:
    options = offset_audit.workaround({"xla_disable_hlo_passes": "some-pass", "other": 1})
    assert options == {"xla_disable_hlo_passes": "some-pass,dynamic-slice-annotator", "other": 1}
    assert offset_audit.workaround(options) == options


def test_wrong_and_unknown_programs_are_refused_with_the_way_out() -> None:
    with pytest.raises(MemoptError, match="wrong-recorded-offsets") as raised:
        offset_audit.require_right(offset_audit.audit(program("h100_offload_jaxlib_0.10.2")))
    assert "0.11.1" in (raised.value.problems[0].hint or "")
    with pytest.raises(MemoptError, match="unknown-recorded-offsets"):
        offset_audit.require_right(offset_audit.AuditResult("unknown"))
    offset_audit.require_right(offset_audit.audit(program("h100_offload_jaxlib_0.12.0.1")))


@pytest.mark.parametrize(
    "version, affected",
    [("0.10.1", False), ("0.10.2", True), ("0.11.0", True), ("0.11.1", False), ("0.12.0.1", False)],
)
def test_affected_versions_are_named(version: str, affected: bool) -> None:
    assert offset_audit.is_affected(version) is affected


def test_what_this_jaxlib_compiles_is_right_or_worked_around(
    compiled: Callable[..., tuple[aot.CompiledStep, ...]],
) -> None:
    (step,) = compiled("gpu:h100:2", {"offload": ["input"]})
    affected = offset_audit.is_affected(jaxlib.__version__)
    assert step.audit.verdict == ("worked_around" if affected else "right")
    assert bool(step.notes) is affected


def test_without_the_workaround_the_verdict_is_what_was_recorded(
    compiled: Callable[..., tuple[aot.CompiledStep, ...]],
) -> None:
    (step,) = compiled("gpu:h100:2", {"offload": ["input"]}, work_around=False)
    assert step.audit.verdict == ("wrong" if offset_audit.is_affected(jaxlib.__version__) else "right")
    assert step.audit.of("unknown") == ()


_CLAMPED = """HloModule clamped, is_scheduled=true

%slice (buffer: f32[12,4], at: s32[]) -> f32[1,4] {
  %buffer = f32[12,4]{1,0:S(5)} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %read = f32[1,4]{1,0} dynamic-slice(%buffer, %at, %zero), dynamic_slice_sizes={1,4}, backend_config={"dynamic_slice_config":{"loop_index":"0","linear":{"byte_offset":"0","byte_stride":"16"}}}
}

%body (state: (s32[], f32[12,4], s32[])) -> (s32[], f32[12,4], s32[]) {
  %state = (s32[], f32[12,4]{1,0:S(5)}, s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %whole = f32[12,4]{1,0:S(5)} get-tuple-element(%state), index=1
  %data = s32[] get-tuple-element(%state), index=2
  %bound = s32[] constant(BOUND)
  %moved = s32[] minimum(%counter, %bound)
  %part = f32[1,4]{1,0} fusion(%whole, %moved), kind=kLoop, calls=%slice
  %one = s32[] constant(1)
  %next = s32[] add(%counter, %one)
  ROOT %made = (s32[], f32[12,4]{1,0:S(5)}, s32[]) tuple(%next, %whole, %data)
}

%condition (state: (s32[], f32[12,4], s32[])) -> pred[] {
  %state = (s32[], f32[12,4]{1,0:S(5)}, s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(12)
  ROOT %goes = pred[] compare(%counter, %end), direction=LT
}

ENTRY %main (given: f32[12,4], data: s32[]) -> f32[12,4] {
  %given = f32[12,4]{1,0:S(5)} parameter(0)
  %data = s32[] parameter(1)
  %start = s32[] constant(0)
  %first = (s32[], f32[12,4]{1,0:S(5)}, s32[]) tuple(%start, %given, %data)
  %loop = (s32[], f32[12,4]{1,0:S(5)}, s32[]) while(%first), condition=%condition, body=%body
  ROOT %out = f32[12,4]{1,0:S(5)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501
