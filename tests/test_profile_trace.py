"""Reading the operations of a trace, and attributing the wall time of its batches, on made-up traces."""

import pytest

from loopfeed.engine.hlo.text import parse_hlo
from loopfeed.engine.profile.attribution import Operation, OpSpan, attribute, operations_of, read_spans
from loopfeed.engine.scopes import NO_SCOPE, Scope
from tests.xspaces import CARD, Event, end_of, make_trace, op

FORWARD, STAGE, OPT_STEP = Scope("train", "forward"), Scope("train", "forward", "stage1"), Scope("train", "opt_step")
DRAW, PUSH = Scope("train", "draw"), Scope("train", "push")
PREDICT = Scope("valid", "predict")
OPERATIONS = {
    "pull": Operation(DRAW, calls_host=True),
    "slice": Operation(DRAW),
    "forward": Operation(FORWARD),
    "stage": Operation(STAGE),
    "loop": Operation(STAGE, is_container=True),
    "outer": Operation(Scope("train"), is_container=True),
    "update": Operation(OPT_STEP),
    "push": Operation(PUSH, calls_host=True),
    "eval-pull": Operation(Scope("valid", "draw"), calls_host=True),
    "predict": Operation(PREDICT),
    "eval-push": Operation(Scope("valid", "push"), calls_host=True),
    "counter": Operation(Scope("train")),
}


def parts(*spans):
    return [(batch.phase, dict(batch.parts_ns)) for batch in attribute(sorted(spans, key=lambda x: x[1]), OPERATIONS)]


def span(name, start_ns, end_ns):
    return OpSpan(name, start_ns, end_ns)


def test_a_batch_lasts_from_its_draw_to_the_next_and_gaps_are_unattributed():
    found = parts(
        span("forward", 0, 5),  # before the first draw
        span("pull", 10, 12),
        span("forward", 13, 20),
        span("pull", 20, 21),
        span("update", 25, 30),
        span("pull", 30, 31),
        span("forward", 31, 99),  # a batch without an end
    )
    assert found == [
        ("train", {DRAW: 2, NO_SCOPE: 1, FORWARD: 7}),
        ("train", {DRAW: 1, NO_SCOPE: 4, OPT_STEP: 5}),
    ]


def test_overlapping_operations_share_the_time_evenly():
    found = parts(
        span("pull", 0, 1), span("forward", 1, 7), span("update", 3, 9), span("stage", 5, 6), span("pull", 9, 10)
    )
    # Alone 1-3 and 7-9; two of them 3-5 and 6-7; three 5-6.
    each = 1 / 3
    assert found[0][1] == pytest.approx({DRAW: 1, FORWARD: 2 + 1.5 + each, OPT_STEP: 1.5 + each + 2, STAGE: each})
    assert sum(found[0][1].values()) == pytest.approx(9)


def test_a_container_has_the_time_that_the_operations_inside_leave_and_of_two_the_inner_has_it():
    found = parts(
        span("pull", 0, 1), span("outer", 1, 10), span("loop", 2, 8), span("forward", 3, 5), span("pull", 10, 11)
    )
    assert found == [("train", {DRAW: 1, Scope("train"): 3, STAGE: 4, FORWARD: 2})]


def test_the_scopes_come_in_the_order_in_which_they_are_mostly_active():
    (batch,) = attribute(
        [span("pull", 0, 1), span("stage", 1, 2), span("forward", 2, 5), span("stage", 6, 9), span("pull", 10, 11)],
        OPERATIONS,
    )
    assert [scope for scope in batch.parts_ns if scope != NO_SCOPE] == [DRAW, FORWARD, STAGE]


def test_the_batches_of_one_draw_are_counted_by_an_operation_that_runs_for_each():
    unpack = {name: Operation(Scope("train", "unpack")) for name in ("before", "unpack", "unpack-loop")}
    spans = [
        span("pull", 0, 1),
        span("before", 1, 2),
        *(span("unpack", at, at + 1) for at in (2, 4, 6)),
        *(span("unpack-loop", at, at + 0.1) for at in (3, 3.1, 3.2, 5, 5.1, 5.2)),
        span("pull", 8, 9),
        span("unpack", 9, 10),
        span("push", 10, 11),
    ]
    batches = attribute(sorted(spans, key=lambda each: each.start_ns), OPERATIONS | unpack, {"train": 4})
    assert [(batch.num_batches, batch.duration_ns) for batch in batches] == [(3, 8), (1, 3)]
    assert [batch.num_batches for batch in attribute(spans[:2] + spans[11:], OPERATIONS | unpack)] == [1, 1]


def test_the_scopes_of_several_batches_come_in_the_order_of_the_first():
    # Later batches are slower in their first operation, whose mean time over all of them is that of the last one.
    batches = [
        [
            span("forward", at + 1, at + longer),
            span("stage", at + longer, at + longer + 1),
            span("update", end - 1, end),
        ]
        for at, longer, end in ((0, 2, 4), (3, 3, 7), (6, 9, 16))
    ]
    (pull,) = attribute(
        [span("pull", 0, 1), *(each for batch in batches for each in batch), span("pull", 16, 17)],
        OPERATIONS,
        {"train": 4},
    )
    assert pull.num_batches == 3
    assert [scope for scope in pull.parts_ns if scope != NO_SCOPE] == [DRAW, FORWARD, STAGE, OPT_STEP]


def test_batches_of_both_phases_follow_each_other():
    found = parts(
        span("pull", 0, 1),
        span("forward", 1, 5),
        span("eval-pull", 5, 6),
        span("predict", 6, 9),
        span("eval-pull", 9, 10),
        span("predict", 10, 14),
        span("eval-push", 14, 15),
        span("pull", 15, 16),
    )
    assert [(phase, sum(each.values())) for phase, each in found] == [("train", 5), ("valid", 4), ("valid", 6)]
    assert found[1][1] == {Scope("valid", "draw"): 1, PREDICT: 3}


def test_only_operations_of_the_program_and_of_its_first_device_are_read():
    trace = make_trace(
        [op("dot", 0, 1, device=3), op("dot", 5, 6, device=2), op("dot", 7, 8, device=2, module="jit_other")]
    )
    assert read_spans(trace, "jit_train") == [("dot", 5, 6)]
    assert read_spans(make_trace(), "jit_train") == []


def test_on_a_card_the_streams_of_the_device_have_the_operations():
    def kernel(name, start_ns, end_ns):
        return Event(f"kernel of {name}", start_ns, end_ns - start_ns, {"hlo_op": name, "hlo_module": "jit_train"})

    copy = Event("MemcpyH2D", 0, 50, {})
    trace = make_trace([kernel("fusion.2", 5, 9), copy], [kernel("fusion.1", 1, 4)], plane=CARD)
    assert read_spans(trace, "jit_train") == [("fusion.1", 1, 4), ("fusion.2", 5, 9)]


def test_on_a_card_the_identity_of_an_operation_names_its_program():
    def kernel(op_name, start_ns, program, **path):
        return Event("kernel", start_ns, 1, {"hlo_op": op_name, "unique_hlo_op_id": program << 32 | start_ns, **path})

    trace = make_trace(
        [
            kernel("fusion.1", 1, 252),
            kernel("dot", 2, 252, name="jit(train)/while/body/dot_general"),
            kernel("fusion.1", 3, 7, name="jit(other)/jit(train)/add"),
            Event("kernel", 4, 1, {"hlo_op": "fusion.2"}),
        ],
        plane=CARD,
    )
    assert read_spans(trace, "jit_train") == [("fusion.1", 1, 2), ("dot", 2, 3)]


def test_a_draw_of_several_copies_begins_one_batch():
    copies = [span("pull", at, at + 1) for at in (0, 1, 2)]
    found = parts(*copies, span("forward", 3, 6), span("pull", 6, 7), span("pull", 7, 8), span("pull", 10, 11))
    assert found[0] == ("train", {DRAW: 3, FORWARD: 3})
    assert len(found) == 1


HLO = """HloModule jit_train, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %inner = f32[8]{0} exponential(%p), metadata={op_name="a/train/jvp(forward)/stem/exp"}
  ROOT %root = f32[8]{0} negate(%inner), metadata={op_name="a/train/jvp(loss)/neg"}
}

%body (c: (f32[8])) -> (f32[8]) {
  %c = (f32[8]{0}) parameter(0)
  %value = f32[8]{0} get-tuple-element(%c), index=0
  %pull = f32[8]{0} custom-call(%value), custom_call_target="python", metadata={op_name="a/train/draw/buffer_callback"}
  %fusion = f32[8]{0} fusion(%pull), kind=kLoop, calls=%fused
  %copy = f32[8]{0} copy(%fusion)
  %sine = f32[8]{0} sine(%copy), metadata={op_name="a/train/opt_step/sin"}
  ROOT %tuple = (f32[8]{0}) tuple(%sine)
}

%condition (c.1: (f32[8])) -> pred[] {
  %c.1 = (f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> (f32[8]) {
  %x = f32[8]{0} parameter(0)
  %start = (f32[8]{0}) tuple(%x)
  ROOT %while = (f32[8]{0}) while(%start), condition=%condition, body=%body, metadata={op_name="a/while"}
}
"""


def test_a_fusion_belongs_to_the_scope_of_its_root_and_a_loop_is_a_container():
    operations = operations_of(parse_hlo(HLO))
    assert operations["fusion"] == Operation(Scope("train", "loss"))
    assert operations["pull"] == Operation(DRAW, calls_host=True)
    assert operations["while"] == Operation(NO_SCOPE, is_container=True)
    # XLA's own copy belongs to what it copies.
    assert operations["copy"].scope == Scope("train", "loss")


def test_the_end_of_an_asynchronous_operation_counts():
    trace = make_trace(
        [op("dot", 10, 12, identity=7), op("add", 12, 20, identity=8), Event("ThreadpoolListener::Record", 13, 1, {})],
        [end_of("dot", 30, identity=7), op("dot", 40, 41, identity=9), end_of("copy", 60, identity=9)],
    )
    assert read_spans(trace, "jit_train") == [("dot", 10, 30), ("add", 12, 20), ("dot", 40, 41)]


def test_an_unknown_operation_is_unattributed_and_one_without_duration_counts_nothing():
    found = parts(span("pull", 0, 1), span("forward", 2, 2), span("mystery", 1, 4), span("pull", 4, 5))
    assert found == [("train", {DRAW: 1, NO_SCOPE: 3})]
