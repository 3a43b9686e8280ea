"""The parser of optimised HLO: real programs of this machine's jaxlib, and a written one with what a CPU lacks."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from loopfeed.engine.hlo.program import Array, Source
from loopfeed.engine.hlo.text import parse_hlo

# A program for a card: a library's kernel, a branch without a table, an asynchronous copy, sources in the metadata.
CARD = r"""HloModule jit_train, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "/models/net.py"

FunctionNames
1 "apply"
2 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=2 end_column=9}
2 {file_name_id=1 function_name_id=2 line=30 end_line=30 column=2 end_column=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=1}

%fused (param_0: bf16[8,4]) -> (bf16[8,4], f32[]) {
  %param_0 = bf16[8,4]{1,0} parameter(0)
  %mul = bf16[8,4]{1,0} multiply(%param_0, %param_0), metadata={op_name="jit(train)/while/body/train/forward/mul" stack_frame_id=2}
  %zero = f32[] constant(0)
  ROOT %both = (bf16[8,4]{1,0}, f32[]) tuple(%mul, %zero)
}

%body (carry: (s32[], /*index=1*/bf16[8,4])) -> (s32[], bf16[8,4]) {
  %carry = (s32[], /*index=1*/bf16[8,4]{1,0:T(8,128)}) parameter(0)
  %turn = s32[] get-tuple-element(%carry), index=0
  %value = bf16[8,4]{1,0} get-tuple-element(%carry), index=1
  %some_new-line of a later XLA that nobody knows
  %conv.1 = (bf16[8,4]{1,0}, u8[0]{0}) custom-call(%value, /*index=1*/%value), window={size=3x3 pad=1_1x1_1}, custom_call_target="__cudnn$convForward", metadata={op_type="conv" op_name="jit(train)/a \"b\" (c)/conv" source_file="/models/old.py" source_line=12}, backend_config={"x":{"y":[1,2]}}
  %fusion.1 = (bf16[8,4]{1,0}, f32[]) fusion(%value), kind=kLoop, calls=%fused
  ROOT %pair = (s32[], bf16[8,4]{1,0}) tuple(%turn, %value)
}

%condition (carry.1: (s32[], bf16[8,4])) -> pred[] {
  %carry.1 = (s32[], bf16[8,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: bf16[8,4], n: s32[]) -> bf16[8,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %start = (s32[], bf16[8,4]{1,0}) tuple(%n, %x)
  %loop = (s32[], bf16[8,4]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %branches = bf16[8,4]{1,0} conditional(%n, %x, %x), branch_computations={%first, %second}
  ROOT %result = bf16[8,4]{1,0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def card():
    return parse_hlo(CARD)


def compiled(function, *arguments):
    return parse_hlo(text_of(function, *arguments))


def text_of(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().as_text() or ""


@pytest.fixture(scope="module")
def loop():
    """A loop with a product, a sum, a mapped product inside it, and a branch."""

    def body(carry):
        x, turn = carry
        with jax.named_scope("train"):
            with jax.named_scope("forward"):
                y = lax.map(lambda row: jnp.sin(row @ row), x)
            with jax.named_scope("loss"):
                y = y + lax.cond(turn > 3, lambda y: jnp.exp(y).sum(), lambda y: y.max(), y)
        return y, turn + 1

    return compiled(lambda x: lax.while_loop(lambda carry: carry[0].sum() < 10, body, (x, 0)), jnp.ones((6, 4, 4)))


def test_a_program_for_a_card(card):
    assert card.name == "jit_train"
    assert list(card.computations) == ["fused", "body", "condition", "main"]
    assert card.entry.name == "main"
    conv = card.instructions["conv.1"]
    assert (conv.opcode, conv.target, conv.operands) == ("custom-call", "__cudnn$convForward", ("value", "value"))
    assert conv.results == (Array("bf16", (8, 4), (1, 0)), Array("u8", (0,), (0,)))
    assert conv.num_bytes == 64
    assert conv.op_name == 'jit(train)/a "b" (c)/conv'
    assert conv.attribute("window") == "{size=3x3 pad=1_1x1_1}"
    assert card.call_stack(conv) == [Source("/models/old.py", "", 12)]
    loop = card.instructions["loop"]
    assert loop.trip_count == 7
    assert (loop.called_as("body"), loop.called_as("condition")) == ("body", "condition")
    assert card.instructions["branches"].callees == ("first", "second")
    assert card.computations["body"].root.name == "pair"
    assert card.computations["main"].parameters[1].name == "n"


def test_every_instruction_of_a_real_program_is_read():
    text = text_of(lambda x: jnp.sort(x @ x.T, axis=0)[::2].sum() + jnp.arange(5.0), jnp.ones((4, 4)))
    lines = re.findall(r"^\s+(?:ROOT )?%(\S+) = ", text, re.MULTILINE)
    assert list(parse_hlo(text).instructions) == lines
    assert len(lines) > 10


def test_a_real_loop_names_its_scopes_lines_and_turns(loop):
    (dot,) = [each for each in loop.instructions.values() if each.opcode == "dot"]
    assert "train/forward" in loop.op_name_of(dot)
    assert dot.attribute("lhs_contracting_dims") == "{1}"
    assert [each.shape for operand in loop.operands_of(dot) for each in operand.results] == [(4, 4), (4, 4)]
    source = loop.call_stack(dot)[0]
    assert source.file == __file__
    assert "row @ row" in Path(__file__).read_text(encoding="utf-8").splitlines()[source.line - 1]
    inner, outer = loop.loops_around(dot.computation)
    assert (inner.trip_count, outer.trip_count) == (6, None)
    exponentials = [each for each in loop.instructions.values() if each.opcode == "exponential"]
    assert ["train/loss" in loop.op_name_of(each) for each in exponentials] == [True]
    (branch,) = [each for each in loop.instructions.values() if each.opcode == "conditional"]
    assert len(branch.callees) == 2
    assert {each.name for each in loop.within(outer.called_as("body"))} >= {branch.name, inner.name}
