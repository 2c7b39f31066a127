"""The timing of the kernels that quantise activations, under the same conditions as the products that read them."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import ceil

from tritongemm.core.helper_kernel import PARTS
from tritongemm.core.launch import Launch
from tritongemm.core.operands import Tensor
from tritongemm.hip_ext.driver.driver import Device, Function
from tritongemm.hip_ext.launching.patched_launch import call_all, prepare_launch, tensor_map_makers
from tritongemm.measure.operand_sets import LeadInKernel, OperandSets, side_by_side

_GRAPH_SECONDS = 4e-4
_ROUNDS = 20


def time_quantization(operands: OperandSets, launches: tuple[Launch, ...]) -> list[float]:
    """Return seconds of one quantisation, one sample per graph replay, with other memory read before each replay."""
    import torch

    problem, device = operands.problem, operands.device
    place = operands.sets[0]["a"].device
    x = torch.randn((problem.m, problem.k), device=place).to(torch.bfloat16)
    q, scale = operands.sets[0]["a"], operands.sets[0]["scale_a"]
    each = sum(tensor.numel() * tensor.element_size() for tensor in (x, q, scale))
    symbol = launches[0].symbol if len(launches) == 1 else ""  # several dispatches are found in the graph
    rotated = ceil(operands.rotation_bytes / each) + 1
    copies = max(1, min(rotated, OperandSets.MAX_COPIES, device.memory()[0] // (4 * each)))
    part = torch.empty(PARTS, dtype=torch.float32, device=place)
    sets = side_by_side({"x": x, "q": q, "scale": scale, "part": part}, copies)
    with ExitStack() as loaded:
        functions = [_load(device, launch, loaded) for launch in launches]
        starts = [_start(device, functions, launches, one) for one in sets]
        count = max(copies, min(OperandSets.MAX_COPIES, int(_GRAPH_SECONDS / operands.traffic_seconds(each))))
        graph = operands.capture([partial(starts[i % copies], operands.stream) for i in range(count)])
        try:
            lead_in = LeadInKernel(place)
            samples = []
            for _ in range(_ROUNDS + 2):
                lead_in()
                samples.append(operands.race_clock.time(graph, count, symbol))
        finally:
            graph.destroy()
    return samples[2:]


def _load(device: Device, launch: Launch, loaded: ExitStack) -> Function:
    """Return a kernel on the device until `loaded` is closed."""
    module = device.load(launch.read_code())
    loaded.callback(module.unload)
    return module.function(launch.symbol)


def _start(
    device: Device, functions: list[Function], launches: tuple[Launch, ...], tensors: Mapping[str, Tensor]
) -> Callable[[int], None]:
    """Return a function that queues the kernels in order, on addresses of these tensors and the stream of a handle."""
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return call_all(
        [
            prepare_launch(function, launch, tensor_map_makers(device, launch), addresses).launch
            for function, launch in zip(functions, launches, strict=True)
        ]
    )
