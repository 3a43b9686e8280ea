"""The transport "cuda" on a fake card, for programs compiled for the CPU; its stream does all work at once."""

import numpy as np

from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.transport import CudaTransport, XlaBuffers
from tests.fake_cuda import FakeCuda


class CpuBuffers(XlaBuffers):
    """The buffers of XLA on a CPU, whose addresses the fake driver takes for device memory."""

    def __init__(self, stream):
        self._stream = stream

    def stream_of(self, context):
        return self._stream

    def address_of(self, buffer):
        return np.from_dlpack(buffer).ctypes.data


def fake_transport(seed=0, eagerness=0.5):
    """Return a transport on a fake card, and the card."""
    fake = FakeCuda(seed, eagerness, takes_any_address=True)
    transport = CudaTransport(CudaDriver(functions=fake.functions), CpuBuffers(fake.new_stream(is_prompt=True)))
    return transport, fake
