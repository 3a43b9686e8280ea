"""Trained weights in other programs' formats: StableHLO, ONNX, a folder of timm, and safetensors."""
