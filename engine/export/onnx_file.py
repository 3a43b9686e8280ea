"""A network as an ONNX file: its traced function, one node after the other, with the weights and what it is about."""

import json
from importlib.util import find_spec
from typing import Any, Final

import jax
import numpy as np

from loopfeed.engine.export.exported_model import INPUT, ExportedModel, any_batch, make_function
from loopfeed.engine.export.flat_jaxpr import FlatJaxpr, flatten_jaxpr
from loopfeed.engine.export.folded_norms import fold_norms
from loopfeed.engine.export.hard_sigmoids import find_hard_sigmoids
from loopfeed.engine.export.onnx_graph import BATCH, OnnxGraph, UnsupportedError
from loopfeed.engine.export.onnx_operators import onnx_type, write_operation
from loopfeed.models.layers.platform_forms import ONNX

OPSET: Final = 18
IR_VERSION: Final = 8
"""Those of ONNX 1.13 (2022). ONNX Runtime 1.14.0 runs such files, and 1.13.1 refuses them for their opset."""
_MOST_BYTES = 2_000_000_000


def onnx_file(exported: ExportedModel) -> bytes:
    """Return the content of an ONNX file for any batch size, which ONNX's checker has accepted.

    Raises:
        ValueError: the package onnx is missing, the model cannot be traced for any number of images, or has an
            operation that has no form in ONNX here.
    """
    if find_spec("onnx") is None:
        raise ValueError('the format onnx needs the package onnx: python -m pip install "loopfeed[onnx]"')
    function, images = make_function(exported, ONNX), any_batch(exported)
    names = list(jax.eval_shape(function, images))
    traced = jax.jit(lambda images: _in_order(function(images), names)).trace(images)
    try:
        model = _model(exported, find_hard_sigmoids(fold_norms(flatten_jaxpr(traced.jaxpr))), names)
    except (TypeError, KeyError, NotImplementedError) as error:  # of a dtype that NumPy or ONNX lacks
        raise _no_form(exported, error) from error
    import onnx

    if model.ByteSize() > _MOST_BYTES:
        raise ValueError(
            f"an ONNX file must be below 2 GB, but the weights of {exported.subject.name} make {model.ByteSize():,} "
            "bytes: export StableHLO instead (--format stablehlo)"
        )
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise _no_form(exported, error) from error
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def _no_form(exported: ExportedModel, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:300]
    return ValueError(
        f"{exported.subject.name} has an operation that cannot be exported to ONNX: {reason}. Export StableHLO "
        "instead (--format stablehlo), or write that layer with other operations of jax"
    )


def _in_order(outputs: dict[str, Any], names: list[str]) -> tuple[Any, ...]:
    return tuple(outputs[name] for name in names)


def _model(exported: ExportedModel, flat: FlatJaxpr, names: list[str]) -> Any:
    from onnx import helper

    graph = OnnxGraph(flat.inputs[0])
    for operation in flat.operations:
        try:
            write_operation(graph, operation)
        except UnsupportedError as error:
            raise _no_form(exported, error) from None
    for name, value in zip(names, flat.outputs, strict=True):
        graph.add("Identity", [graph.read(value)])
        graph.nodes[-1].output[0] = name
    outputs = [
        helper.make_tensor_value_info(name, onnx_type(np.dtype(np.float32)), [BATCH, *value.shape[1:]])
        for name, value in zip(names, flat.outputs, strict=True)
    ]
    images = helper.make_tensor_value_info(INPUT, onnx_type(np.dtype(np.uint8)), [BATCH, *exported.size, 3])
    written = helper.make_graph(graph.nodes, exported.subject.name, [images], outputs, graph.constants)
    model = helper.make_model(
        written,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="loopfeed",
        doc_string=f"{exported.subject.name}: uint8 RGB images [batch, height, width, 3], normalised inside",
    )
    described = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in exported.description.items()
    }
    helper.set_model_props(model, described)
    return model
