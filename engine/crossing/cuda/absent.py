"""The cuda transport without NVIDIA's driver: programs can be traced and compiled with it, but not run."""

from collections.abc import Callable

from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.transport import CudaTransport


def absent_transport() -> CudaTransport:
    """Return a cuda transport for programs that are only compiled, on a machine without an NVIDIA GPU or its driver."""
    return CudaTransport(CudaDriver(functions=_do_nothing))


def _do_nothing(_name: str) -> Callable[..., int]:
    return lambda *_: 0
