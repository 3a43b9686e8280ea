"""The report on a compiled program: a small network whose work is counted by hand, and written programs with faults."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed import DeviceRates, convolution, explain_program
from loopfeed.engine.hlo.text import parse_hlo
from loopfeed.engine.inspection.convolutions import trace_work
from loopfeed.engine.inspection.plain import compare_reports, comparison_lines, report_lines
from loopfeed.engine.inspection.report import find_faults
from loopfeed.engine.inspection.steps import Steps, read_carry
from loopfeed.engine.inspection.work_by_scope import total_of
from loopfeed.engine.program.train_state import init_state
from loopfeed.engine.run.program_settings import seed_words
from loopfeed.engine.scopes import ACTIONS
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.models.kernels import ONEDNN, XLA
from loopfeed.models.registry import build_model, family_of, find_network
from tests.kernels import needs_onednn, onednn_for_all_shapes
from tests.toy import toy_config

BATCH, SIZE, CLASSES = 8, 8, 3
RATES = DeviceRates(flops_per_s=1e11, bytes_per_s=1e10, dtype="float32", device="a device")


@dataclass
class Network:
    """A convolution of this project, one of `lax`, a grouped one, and a dense layer."""

    name: str = "mixed"
    width: int = 6

    def init(self, key):
        shapes = {"own": (3, 3, 3, 4), "grouped": (3, 3, 2, self.width), "lax": (1, 1, self.width, 5), "dense": (5, 3)}
        return {name: 0.1 * jax.random.normal(key, shape) for name, shape in shapes.items()}, {}

    def apply(self, params, batch_stats, images, train):
        with jax.named_scope("trunk"):
            x = convolution(images, params["own"], padding="VALID")
            x = jnp.maximum(convolution(x, params["grouped"], stride=2, groups=2), 0)
        with jax.named_scope("side"):
            x = lax.conv_general_dilated(x, params["lax"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        with jax.named_scope("head"):
            return x.mean((1, 2)) @ params["dense"], batch_stats


def batch_of(count):
    return np.zeros((count, SIZE, SIZE), np.uint32), np.arange(count, dtype=np.int32) % CLASSES


def explained(config, network):
    return explain_program(
        config, model=network, batches=lambda _: batch_of(BATCH), evaluation=batch_of(BATCH + 3), rates=RATES
    )


CONFIG = toy_config(snapshot_every_steps=2, eval_every_steps=2, image_size=SIZE)


@pytest.fixture(scope="module")
def report():
    return explained(replace(CONFIG, kernels=XLA), Network())


def test_the_forward_pass_is_counted_by_hand(report):
    own = 6 * 6 * 4 * 9 * 3
    grouped = 3 * 3 * 6 * 9 * 2
    by_lax = 3 * 3 * 5 * 6
    assert [each.products for each in report.traced.convolutions] == [BATCH * each for each in (own, grouped, by_lax)]
    assert report.forward_products == own + grouped + by_lax + 5 * 3
    assert report.known_products is None


def test_every_action_has_a_row_and_the_rows_add_up(report):
    found = {(row.phase, row.action) for row in report.scopes}
    expected = {("train", action) for action in ACTIONS["train"] if action != "augment"}
    assert expected <= found
    assert {("valid", action) for action in ("draw", "predict", "loss", "push")} <= found
    stages = {row.stage for row in report.scopes if (row.phase, row.action) == ("train", "forward")}
    assert {"trunk", "side", "head"} <= stages
    order = {
        action: [row.stage for row in report.scopes if (row.phase, row.action) == ("train", action)]
        for action in ("forward", "backward")
    }
    assert order == {"forward": ["trunk", "side", "head"], "backward": ["loss", "head", "side", "trunk"]}
    rows = [row for row in report.scopes if row.phase == "train" and row.action != "snapshot"]
    total = report.total("train")
    assert total == total_of(report.scopes, "train")
    assert total.flops == sum(row.flops for row in rows)
    assert total.seconds == pytest.approx(sum(row.seconds for row in rows))


def test_the_operations_of_products_are_those_of_the_trace(report):
    """A product has two gradients of its size; XLA leaves out the one for the images, and products with padding."""
    own, grouped, by_lax = (2 * each.products for each in report.traced.convolutions)
    # The groups are joined in one block, whose products are twice as many.
    assert 2 * own + 3 * grouped * 0.6 + 3 * by_lax <= report.convolution_flops
    assert report.convolution_flops <= 3 * own + 3 * 2 * grouped + 3 * by_lax
    assert 0.5 < report.convolution_share < 1


@needs_onednn
def test_the_operations_of_kernels_are_those_of_the_trace():
    with onednn_for_all_shapes():
        report = explained(replace(CONFIG, kernels=ONEDNN), Network())
    own, grouped, by_lax = report.traced.convolutions
    assert [each.form for each in (own, grouped)] == ["oneDNN", "oneDNN"]
    # The first has no gradient for the images and no padding; of the second, products with padding are left out.
    assert 2 * own.products <= report.convolution_flops / 2 - 3 * by_lax.products - 3 * 0.6 * grouped.products
    assert report.convolution_flops / 2 - 3 * by_lax.products <= 2 * own.products + 3 * grouped.products
    assert ", float32, kernels onednn" in report_lines(report)[1]


def test_convolutions_name_their_form_their_line_and_why(report):
    own, grouped, by_lax = report.traced.convolutions
    assert [each.scope for each in report.traced.convolutions] == ["trunk", "trunk", "side"]
    assert [form.part for form in own.forms] == ["forward", "input gradient", "filter gradient"]
    assert own.forms[2] == ("filter gradient", "input rows", "at most 4 input channels")
    assert grouped.groups == 2
    assert "1 block of 2 groups" in grouped.form
    assert by_lax.is_lax
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[by_lax.source.line - 1]
    assert "lax.conv_general_dilated" in line
    (finding,) = [each for each in report.findings if each.kind == "lax-convolution"]
    assert (finding.scope, finding.source) == ("train/forward/side", by_lax.source)
    assert "use loopfeed.convolution" in finding.message


def test_the_carry_is_the_training_state_leaf_by_leaf(report):
    settings = CompiledSettings(optimizer="sgd")
    state = jax.eval_shape(
        lambda words: init_state(Network(), settings, jax.random.wrap_key_data(words)), seed_words(0)
    )
    leaves = jax.tree_util.tree_leaves_with_path(state)
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="."): (leaf.shape, leaf.size * leaf.dtype.itemsize)
        for path, leaf in leaves
    }
    assert {leaf.name: (leaf.shape, leaf.num_bytes) for leaf in report.carry} == expected
    assert all(leaf.is_donated for leaf in report.carry)


def test_the_largest_arrays_are_those_of_the_network(report):
    # Patches of the first convolution or of its gradients, before another layer makes its images smaller.
    assert report.arrays[0].made_by in ("train/forward/trunk", "train/backward/trunk")
    assert all(each.num_bytes <= report.memory_bytes["temporaries"] for each in report.arrays)
    sizes = [each.num_bytes for each in report.arrays]
    assert sizes == sorted(sizes, reverse=True)
    assert any(each.source is not None and each.source.file == __file__ for each in report.arrays)


def test_the_text_is_80_wide_and_the_json_complete(report):
    lines = report_lines(report)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "3 convolutions" in text
    assert "1 × jax.lax.conv_general_dilated" in text
    assert "lax-convolution: " in text
    assert f"train/forward/side (test_inspection.py:{report.traced.convolutions[2].source.line})" in text
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert read["totals"]["train"]["flops"] == report.total("train").flops
    assert read["findings"][0]["source"].startswith(__file__)
    assert read["settings"]["batch"] == BATCH
    assert "program" not in read


def test_a_report_equals_itself_and_another_network_differs_by_rows(report):
    assert compare_reports(report, report) == ()
    assert comparison_lines((), ("a", "b")) == ["the two programs do not differ in anything that is counted"]
    other = replace(
        report,
        num_params=99,
        settings=dict(report.settings) | {"batch": 16},
        traced=replace(report.traced, convolutions=report.traced.convolutions[:2]),
        findings=(),
    )
    rows = {(row.group, row.name): (row.one, row.other) for row in compare_reports(report, other)}
    assert rows["settings", "batch"] == (8, 16)
    assert rows["settings", "parameters"] == (report.num_params, 99)
    assert rows["convolutions", "number"] == (3, 2)
    assert rows["findings", "lax-convolution"] == (1, None)
    assert not any(group in ("work", "carry", "memory") for group, _ in rows)
    lines = comparison_lines(compare_reports(report, other), ("one", "two"))
    assert lines[-1] == "everything else that is counted is equal"
    assert lines[0] == "A  one"
    assert max(map(len, lines)) <= 80
    assert compare_reports(report, other)[0] == ("settings", "batch", 8, 16)


@pytest.mark.parametrize(("name", "number"), [("resnet8", 9), ("resnet50", 53), ("convnext-tiny", 18), ("vit-s16", 0)])
def test_convolutions_and_products_of_known_networks(name, number):
    """The products are those of the networks' descriptions, which torchvision and timm count too."""
    size, num_classes = (32, 10) if name == "resnet8" else (224, 1000)
    net = find_network(name)
    known = family_of(net).count_products(net, size, num_classes)
    model = build_model(name, num_classes=num_classes, image_size=size)
    params, batch_stats = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)

    def forward(params, batch_stats, images):
        with jax.named_scope("train"), jax.named_scope("forward"):
            return model.apply(params, batch_stats, images, train=True)

    jaxpr = jax.make_jaxpr(forward)(params, batch_stats, images)
    for platform in ("cpu", "cuda"):
        work = trace_work(jaxpr, platform)
        assert len(work.convolutions) == number
        assert work.forward_products == 2 * known
        assert not any(each.is_lax for each in work.convolutions)


LOOP = """HloModule jit_train, input_output_alias={{ {{0}}: (0, {{}}, may-alias) }}

%naive (a: s8[8,8], b: s8[8,8]) -> s8[8,8] {{
  %a = s8[8,8]{{1,0}} parameter(0)
  %b = s8[8,8]{{1,0}} parameter(1)
  ROOT %product = s8[8,8]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(train)/while/body/train/while/body/jvp(forward)/head/dot_general"}}
}}

%body (carry: (f32[512,1024], f32[512,1024], s8[8,8])) -> (f32[512,1024], f32[512,1024], s8[8,8]) {{
  %carry = (f32[512,1024]{{1,0}}, f32[512,1024]{{1,0}}, s8[8,8]{{1,0}}) parameter(0)
  %w = f32[512,1024]{{1,0}} get-tuple-element(%carry), index=0
  %v = f32[512,1024]{{1,0}} get-tuple-element(%carry), index=1
  %k = s8[8,8]{{1,0}} get-tuple-element(%carry), index=2
  %small = s8[8,8]{{1,0}} fusion(%k, %k), kind=kLoop, calls=%naive
  %copied = f32[512,1024]{{1,0}} copy(%v)
  %kept = s8[8,8]{{1,0:S(5)}} copy(%k), metadata={{op_name="jit(train)/while/body/train/while/body/jvp(forward)/offload/copy"}}
  %act = f32[512,1024]{{1,0}} negate(%w), metadata={{op_name="jit(train)/while/body/train/while/body/jvp(forward)/trunk/neg"}}
  %turned = f32[1024,512]{{1,0}} transpose(%act), dimensions={{1,0}}, metadata={{op_name="jit(train)/while/body/train/while/body/jvp(forward)/trunk/transpose"}}
  %constant = f32[512,1024]{{1,0}} constant({{...}})
  %sum = f32[512,1024]{{1,0}} add(%copied, %constant), metadata={{op_name="jit(train)/while/body/train/while/body/jvp(forward)/table/add"}}
  %wide = f64[16]{{0}} convert(%turned), metadata={{op_name="jit(train)/while/body/train/while/body/opt_step/convert"}}
  %back = f32[512,1024]{{1,0}} subtract(%sum, %act), metadata={{op_name="jit(train)/while/body/train/while/body/transpose(jvp(forward))/trunk/sub"}}
  ROOT %next = (f32[512,1024]{{1,0}}, f32[512,1024]{{1,0}}, s8[8,8]{{1,0}}) tuple(%back, %sum, %small)
}}

%condition (carry.1: (f32[512,1024], f32[512,1024], s8[8,8])) -> pred[] {{
  %carry.1 = (f32[512,1024]{{1,0}}, f32[512,1024]{{1,0}}, s8[8,8]{{1,0}}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (w.0: f32[512,1024], v.0: f32[512,1024], k.0: s8[8,8]) -> f32[512,1024] {{
  %w.0 = f32[512,1024]{{1,0}} parameter(0), metadata={{op_name="state.params[\\'w\\']"}}
  %v.0 = f32[512,1024]{{1,0}} parameter(1), metadata={{op_name="state.update.opt_state[2].v"}}
  %k.0 = s8[8,8]{{1,0}} parameter(2), metadata={{op_name="values.k"}}
  %start.w = f32[512,1024]{{1,0}} copy(%w.0)
  %start = (f32[512,1024]{{1,0}}, f32[512,1024]{{1,0}}, s8[8,8]{{1,0}}) tuple(%start.w, %v.0, %k.0)
  %loop = (f32[512,1024]{{1,0}}, f32[512,1024]{{1,0}}, s8[8,8]{{1,0}}) while(%start), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"7"}}}}
  ROOT %result = f32[512,1024]{{1,0}} get-tuple-element(%loop), index=0
}}
""".replace("{{", "{").replace("}}", "}")  # noqa: E501
MB = 512 * 1024 * 4


@pytest.fixture(scope="module")
def faulty():
    return Steps(parse_hlo(LOOP))


def test_faults_are_found_by_name(faulty):
    carry = read_carry(faulty.program)
    found = {(each.kind, each.scope, each.num_bytes) for each in find_faults(faulty, (), carry, is_cpu=True)}
    assert found == {
        ("naive-product", "train/forward/head", 0),
        ("float64", "train/opt_step", 0),
        ("host-copy", "train/forward/offload", 64),
        ("not-donated", "update.opt_state.2.v", MB),
        ("large-move", "train/forward/table", 2 * MB),
        ("large-move", "train/forward/trunk", 2 * MB),
        ("large-constant", "train/forward/table", MB),
    }
    on_a_card = find_faults(faulty, (), carry, is_cpu=False)
    assert "naive-product" not in {each.kind for each in on_a_card}
    of_library = Steps(parse_hlo(LOOP.replace("kind=kLoop, calls=%naive", "kind=kCustom, calls=%naive")))
    assert "naive-product" not in {each.kind for each in find_faults(of_library, (), carry, is_cpu=True)}


def test_the_largest_arrays_of_a_written_loop(faulty):
    found = [(each.name, array.num_bytes) for array, each in faulty.largest_arrays("train")]
    assert {name for name, size in found if size == MB} == {"copied", "act", "turned", "sum", "back"}
    assert found[-1] == ("kept", 64)
