"""The scopes of the program's operations: their names as jax writes them, and the scope of every action."""

import re

import jax
import pytest

from loopfeed.engine.run.train import plan_run
from loopfeed.engine.scopes import ACTIONS, NO_SCOPE, Scope, parse_op_name
from tests.toy import Linear, toy_batch, toy_config


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("reduce_sum", NO_SCOPE),
        ("jit(train)/while/body/add", NO_SCOPE),
        ("jit(train)/while/body/train/stack", Scope("train")),
        ("jit(train)/while/body/train/draw/slice", Scope("train", "draw")),
        ("jit(train)/while/body/train/while/body/unpack/div", Scope("train", "unpack")),
        ("a/train/while/body/jvp(forward)/dot_general", Scope("train", "forward")),
        ("a/train/jvp(forward)/layer1/0/jit(_apply_block)/conv1/add", Scope("train", "forward", "layer1/0/conv1")),
        ("a/train/jvp(forward)/layer1/cond/branch_1_fun/while/body/dot", Scope("train", "forward", "layer1")),
        ("a/train/transpose(jvp(forward))/head/dot_general", Scope("train", "backward", "head")),
        ("a/train/transpose(train)/jvp(forward)/head/dot_general", Scope("train", "backward", "head")),
        ("a/train/transpose(jvp(forward))/stem/transpose(train)/jvp(forward)/fc/x", Scope("train", "backward", "fc")),
        ("a/train/transpose(jvp(loss))/jit(log_softmax)/neg", Scope("train", "backward", "loss")),
        ("a/train/jvp(loss)/metric/mul", Scope("train", "loss", "metric")),
        # A user's own names, which are those of actions, of a phase, or hold parentheses.
        ("a/train/jvp(forward)/loss/draw/mul", Scope("train", "forward", "loss/draw")),
        ("a/train/jvp(forward)/train/mul", Scope("train", "forward", "train")),
        ("a/train/jvp(forward)/conv(3/3)/mul", Scope("train", "forward", "conv(3/3)")),
        ("a/train/backward/mul", Scope("train")),
        # The name of a jax function that is traced once, with the outer scopes repeated inside.
        ("while/jit(f)/train/augment/vmap()/vmap(jit(_fold_in))/keys/train/augment/x", Scope("train", "augment")),
        ("a/valid/cond/branch_1_fun/while/body/predict/layer1/add", Scope("valid", "predict", "layer1")),
        ("a/valid/opt_step/add", Scope("valid")),
        ("", NO_SCOPE),
    ],
)  # fmt: skip
def test_the_scope_of_an_operation(op_name, scope):
    assert parse_op_name(op_name) == scope


def test_every_action_of_the_program_has_its_scope():
    """Also under accumulation, and with a user's model, augmentation, loss and metric."""
    config = toy_config(accumulate_steps=2, flip=0.5, eval_every_steps=2, compilation_cache="off")
    plan = plan_run(
        config,
        model=Linear(),
        batches=toy_batch,
        evaluation=toy_batch(0),
        augment=lambda images, keys: images + jax.random.uniform(keys[0]),
        metrics={"largest": lambda outputs, labels: outputs.max(axis=1)},
    )
    scopes = {parse_op_name(name) for name in re.findall(r'op_name="([^"]*)"', plan.compiled.call.as_text() or "")}
    found = {(scope.phase, scope.action) for scope in scopes if scope.action}
    assert found == {(phase, action) for phase, actions in ACTIONS.items() for action in actions}
    assert ("train", "backward", "loss") in {(scope.phase, scope.action, scope.path) for scope in scopes}
